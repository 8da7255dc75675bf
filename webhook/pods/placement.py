"""The node of a pod: only the scheduler may choose it."""

from typing import Final

from cardwise.core.api import names
from webhook.pods.context import Context
from webhook.pods.pod import PodUnderReview

_COPY_ANNOTATIONS: Final = (names.ASSIGNMENT, names.IDX, names.GPUSHARE_ALLOCATION)


def mutate(pod: PodUnderReview, context: Context) -> None:  # noqa: ARG001 - a rule
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
