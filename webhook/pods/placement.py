"""The node of a pod: only the scheduler may choose it."""

from typing import Final

from cardwise.core.api import names
from cardwise.core.values.invalid import InvalidRequest
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview

_SCHEDULER_PLACES: Final = "the scheduler must place a pod that requests a GPU share"
_COPY_ANNOTATIONS: Final = (names.ASSIGNMENT, names.IDX, names.GPUSHARE_ALLOCATION)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Remove the placement of a copy of a placed pod, with a warning.

    A node name that the extender did not write is refused later. Raises InvalidRequest.
    """
    if not pod.spec.get("nodeName"):
        return
    is_copy = any(key in pod.annotations for key in _COPY_ANNOTATIONS) and pod.read_request() is not None
    is_gang_copy = pod.gang is not None and names.GANG in pod.labels
    if not is_copy and not is_gang_copy:
        return
    del pod.spec["nodeName"]
    pod.metadata.pop("resourceVersion", None)
    pod.warnings.append(
        "spec.nodeName: removed, because the pod is a copy of a placed pod; the scheduler places it again"
    )


def validate(pod: PodUnderReview, context: Context) -> None:
    """Refuse a pod that requests cards or devices and names its node. Raises InvalidRequest."""
    if pod.request is not None and pod.spec.get("nodeName"):
        remedy = "use spec.nodeSelector or spec.affinity.nodeAffinity instead"
        raise InvalidRequest("spec.nodeName", _SCHEDULER_PLACES, remedy)
