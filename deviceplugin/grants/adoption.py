"""Creates grants for containers that run without one.

This happens when the state folder was lost or a grant was unreadable. Without a grant, PreStart would take the card for
free, and the container could not be restarted while the API server is away. For pods that have ended according to the
API server, the runtime keeps the annotations as long as a container or sandbox of them runs. A container of which no
grant can be made is logged and counted, and holds up no other container.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from cardwise.core.api import assignment as codec
from deviceplugin.grants.grants import Grant, GrantStore, UnsafeName
from deviceplugin.grants.prestart import StartRefused, grant_of
from deviceplugin.sources.containers import Sandbox
from deviceplugin.sources.kubelet import CheckpointContainer
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)


class Adoption(NamedTuple):
    """The added grants, the UIDs of pods that may hold a card without one, and why a grant could not be written."""

    grants: list[Grant]
    unknown_holders: set[str]
    error: OSError | None


def missing_grants(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Mapping[str, NodePod],
    granted: set[tuple[str, str]],
) -> tuple[list[Grant], set[tuple[str, str]]]:
    """The missing grants of the containers in the kubelet's checkpoint, and the containers without assignment. Pure."""
    slots: dict[tuple[str, str], list[str]] = {}
    for slot, holders in containers_by_slot.items():
        for holder in holders:
            slots.setdefault((holder.pod_uid, holder.container), []).append(slot)
    grants, unknown_holders = [], set()
    for (uid, container), slots_of_container in slots.items():
        pod = pods.get(uid)
        if pod is None or pod.finished or (uid, container) in granted:
            continue
        try:
            grants.append(grant_of(pod, container, sorted(slots_of_container)))
        except StartRefused as error:
            fields = {"pod": pod.pod, "uid": uid, "error": str(error)}
            _log.warning("a container holds a share slot, but its pod has no assignment", **fields)
            unknown_holders.add((uid, container))
    return grants, unknown_holders


def sandbox_grants(
    sandboxes: Iterable[Sandbox], alive: Mapping[str, set[str]], granted: set[str]
) -> tuple[list[Grant], set[str]]:
    """A grant for each live pod without one, for all that the pod holds; and the pods with an unreadable assignment.

    Pure. No container is started by such a grant, so it has no slot.
    """
    grants, unknown_holders = [], set()
    for pod in sandboxes:
        container = max(alive.get(pod.pod_uid, ()), default="")  # "" is the sandbox
        if not container or pod.pod_uid in granted:
            continue
        try:
            assignment = codec.decode(pod.annotations)
        except codec.InvalidAssignment as error:
            fields = {"pod": f"{pod.namespace}/{pod.name}", "uid": pod.pod_uid, "error": str(error)}
            _log.warning("a running pod has an assignment that cannot be read", **fields)
            unknown_holders.add(pod.pod_uid)
            continue
        if assignment is not None and not assignment.legacy:
            grants.append(Grant.for_pod(pod.pod_uid, pod.namespace, pod.name, container, assignment))
    return grants, unknown_holders


def adopt(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Pods,
    grants: GrantStore,
    sandboxes: Sequence[Sandbox],
    alive: Mapping[str, set[str]],
) -> Adoption:
    """Add the missing grants of containers that are alive according to the runtime."""
    granted = {(grant.pod_uid, grant.container) for grant in grants.all()}
    in_api = {pod.uid: pod for pod in pods.all()}
    missing, without_assignment = missing_grants(containers_by_slot, in_api, granted)
    missing = [grant for grant in missing if grant.container in alive.get(grant.pod_uid, ())]
    granted_uids = {uid for uid, _ in granted} | {grant.pod_uid for grant in missing}
    of_sandboxes, unknown_holders = sandbox_grants(sandboxes, alive, granted_uids)
    unknown_holders |= {uid for uid, container in without_assignment if container in alive.get(uid, ())}
    adoption = Adoption([], unknown_holders, None)
    for grant in (*missing, *of_sandboxes):
        fields = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
        try:
            grants.adopt(grant)
        except UnsafeName as error:
            _log.warning("a running container cannot have a grant", **fields, error=str(error))
            adoption.unknown_holders.add(grant.pod_uid)
            continue
        except OSError as error:  # the grant counts, and is written again
            adoption = adoption._replace(error=adoption.error or error)
        adoption.grants.append(grant)
        _log.warning("adopted a running container without a grant", **fields)
    return adoption
