"""Creates grants for containers that run without one.

This happens when the state folder was lost or a grant was unreadable. Without a grant, PreStart would take the card for
free, and the container could not be restarted while the API server is away. For pods that have ended according to the
API server, the runtime keeps the annotations as long as a container or sandbox of them runs.
"""

from collections.abc import Iterable, Mapping, Sequence

import structlog

from cardwise.core.api import assignment as codec
from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.prestart import StartRefused, grant_of
from deviceplugin.sources.containers import Sandbox
from deviceplugin.sources.kubelet import CheckpointContainer
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)


def missing_grants(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Mapping[str, NodePod],
    granted: set[tuple[str, str]],
) -> list[Grant]:
    """The missing grants of the containers in the kubelet's checkpoint. Pure."""
    slots: dict[tuple[str, str], list[str]] = {}
    for slot, holders in containers_by_slot.items():
        for holder in holders:
            slots.setdefault((holder.pod_uid, holder.container), []).append(slot)
    grants = []
    for (uid, container), slots_of_container in slots.items():
        pod = pods.get(uid)
        if pod is None or pod.finished or (uid, container) in granted:
            continue
        try:
            grants.append(grant_of(pod, container, sorted(slots_of_container)))
        except StartRefused as error:
            fields = {"pod": pod.pod, "uid": uid, "error": str(error)}
            _log.warning("a container holds a share slot, but its pod has no assignment", **fields)
    return grants


def sandbox_grants(sandboxes: Iterable[Sandbox], alive: Mapping[str, set[str]], granted: set[str]) -> list[Grant]:
    """A grant for each live pod without one, for all that the pod holds. Pure.

    No container is started by such a grant, so it has no slot.
    """
    grants = []
    for pod in sandboxes:
        container = max(alive.get(pod.pod_uid, ()), default="")  # "" is the sandbox
        if not container or pod.pod_uid in granted:
            continue
        try:
            assignment = codec.decode(pod.annotations)
        except codec.InvalidAssignment:
            continue  # whatever it has, Cardwise did not allocate it
        if assignment is not None and not assignment.legacy:
            grants.append(Grant.for_pod(pod.pod_uid, pod.namespace, pod.name, container, assignment))
    return grants


def adopt(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Pods,
    grants: GrantStore,
    sandboxes: Sequence[Sandbox],
    alive: Mapping[str, set[str]],
) -> list[Grant]:
    """Add the missing grants of containers that are alive according to the runtime. Raises OSError."""
    granted = {(grant.pod_uid, grant.container) for grant in grants.all()}
    in_api = {pod.uid: pod for pod in pods.all()}
    adopted = [
        grant
        for grant in missing_grants(containers_by_slot, in_api, granted)
        if grant.container in alive.get(grant.pod_uid, ())
    ]
    granted_uids = {uid for uid, _ in granted} | {grant.pod_uid for grant in adopted}
    adopted += sandbox_grants(sandboxes, alive, granted_uids)
    for grant in adopted:
        grants.adopt(grant)
        fields = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
        _log.warning("adopted a running container without a grant", **fields)
    return adopted
