"""The gang to which a pod belongs.

A gang is read from the pod itself, so that a member is gated before the scheduler sees it. Pods of schedulers that do
not call the extender belong to no gang of Cardwise, because other projects (Volcano, coscheduling) use the same
annotations.
"""

import re
from collections.abc import Collection
from typing import Final

from cardwise.core.gangs import gangs
from cardwise.core.gangs.gangs import ForeignPodGroup, Membership
from cardwise.core.values import objectnames
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods.context import DEFAULT_SCHEDULER, Context
from webhook.pods.pod import PodUnderReview

_SCHEDULING_GROUP: Final = "spec.schedulingGroup"
_GANG_NAME: Final = re.compile(
    r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?"
)  # the names of PodGroups that are also valid label values
NOT_SERVED: Final = (
    f"{_SCHEDULING_GROUP}: the pod is not a member of a Cardwise gang, because this cluster does not serve PodGroups "
    "of "
    f"{ForeignPodGroup.KUBERNETES}/v1beta1 (Kubernetes 1.37, feature gate GenericWorkload)"
)


def mutate(pod: PodUnderReview, context: Context) -> None:
    """Read the gang that the pod names by annotation or label, whatever it requests. Raises InvalidRequest."""
    pod.gang = named_gang(pod, context.settings.gang_schedulers)


def named_gang(pod: PodUnderReview, schedulers: Collection[str]) -> Membership | None:
    """The gang that a pod or a template names by annotation or label, whatever it requests. Raises InvalidRequest.

    schedulers: the schedulers that call the extender.
    """
    gang = _read_membership(pod, schedulers, "")
    return gang if gang is not None and gang.foreign is not ForeignPodGroup.KUBERNETES else None


def gang_of_requester(pod: PodUnderReview, context: Context, scheduler: str = "") -> Membership | None:
    """The gang of a pod that requests cards or devices: it may also name a PodGroup of Kubernetes.

    scheduler: the scheduler of pods that name none; "" for Kubernetes' own.

    Raises InvalidRequest, KubeError.
    """
    gang = _read_membership(pod, context.settings.gang_schedulers, scheduler)
    if gang is None or gang.foreign is not ForeignPodGroup.KUBERNETES:
        return gang
    if not context.cluster.serves_podgroups():
        return None
    if not _GANG_NAME.fullmatch(gang.name):
        fault = "is too long for" if objectnames.is_subdomain(gang.name) else "cannot be"
        problem = f"{quote_text(gang.name)} {fault} the name of a gang"
        raise InvalidRequest(
            f"{_SCHEDULING_GROUP}.podGroupName", problem, "give the PodGroup a name of 63 characters at most"
        )
    return gang


def names_podgroup(pod: PodUnderReview, context: Context, scheduler: str) -> bool:
    """Whether the pod names a PodGroup of Kubernetes, and its scheduler calls the extender. Raises InvalidRequest.

    scheduler: as in `gang_of_requester`.
    """
    gang = _read_membership(pod, context.settings.gang_schedulers, scheduler)
    return gang is not None and gang.foreign is ForeignPodGroup.KUBERNETES


def _read_membership(pod: PodUnderReview, schedulers: Collection[str], scheduler: str) -> Membership | None:
    named = pod.spec.get("schedulerName") or DEFAULT_SCHEDULER
    if (scheduler if scheduler and named == DEFAULT_SCHEDULER else named) not in schedulers:
        return None
    return gangs.membership({"metadata": {"annotations": pod.annotations, "labels": pod.labels}, "spec": pod.spec})
