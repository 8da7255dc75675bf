"""Creates grants for containers that run without one.

A container has no grant if the state folder was lost or its grant was unreadable. Without a grant, PreStart would count
the card as free. Also, the container could not be restarted during an outage of the API server. If the API server
reports that a pod has ended, the annotations are read from the container runtime. The runtime keeps them while a
container or sandbox of the pod runs. If making a grant for a container fails, the failure is logged and counted. Other
containers start without delay.

A pod may have been bound here a second time, with other cards than its sandbox has. The containers of such a pod may
use the cards of either binding. So the pod's grants have the cards of both bindings until these containers end.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from cardwise.core.api import assignment as codec
from cardwise.core.api.assignment import Assignment
from deviceplugin.grants.granting import StartRefused, build_grant
from deviceplugin.grants.grants import Grant, GrantStore, UnsafeName
from deviceplugin.sources.containers import Sandbox
from deviceplugin.sources.kubelet import CheckpointContainer
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)


class Adoption(NamedTuple):
    """The outcome of `adopt_grants`.

    grants: the added grants.
    unknown_holders: UIDs of pods that may hold a card without a grant.
    error: why a grant was not written to disk; None if all grants were written.
    """

    grants: list[Grant]
    unknown_holders: set[str]
    error: OSError | None


def select_current_sandboxes(sandboxes: Iterable[Sandbox]) -> list[Sandbox]:
    """The sandboxes in which containers may run. Pure.

    The kubelet ends all containers of a pod before it makes another sandbox for the pod. So other sandboxes are
    selected only if the pod has no ready sandbox.
    """
    sandboxes = list(sandboxes)
    ready_uids = {sandbox.pod_uid for sandbox in sandboxes if sandbox.ready}
    return [sandbox for sandbox in sandboxes if sandbox.ready or sandbox.pod_uid not in ready_uids]


def build_checkpoint_grants(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Mapping[str, NodePod],
    granted: set[tuple[str, str]],
    sandboxes: Iterable[Sandbox],
) -> tuple[list[Grant], set[tuple[str, str]]]:
    """Build the missing grants of containers in the kubelet's checkpoint. Pure.

    granted: pod UID and container name of each container with a grant.
    sandboxes: the sandboxes in which containers may run.

    Also returns the containers whose pod has no assignment, as pod UID and container name.
    """
    assignments_by_uid: dict[str, list[Assignment]] = {}
    for sandbox in sandboxes:
        with contextlib.suppress(codec.InvalidAssignment):
            assignment = codec.decode(sandbox.annotations)
            if assignment is not None and not assignment.is_gpushare:
                assignments_by_uid.setdefault(sandbox.pod_uid, []).append(assignment)
    slots_by_container: dict[tuple[str, str], list[str]] = {}
    for slot, holders in containers_by_slot.items():
        for holder in holders:
            slots_by_container.setdefault((holder.pod_uid, holder.container), []).append(slot)
    grants, unknown_holders = [], set()
    for (uid, container), container_slots in slots_by_container.items():
        pod = pods.get(uid)
        if pod is None or pod.finished or (uid, container) in granted:
            continue
        try:
            grant = build_grant(pod, container, sorted(container_slots))
        except StartRefused as error:
            fields = {"pod": pod.pod, "uid": uid, "error": str(error)}
            _log.warning("a container holds a share slot, but its pod has no assignment", **fields)
            unknown_holders.add((uid, container))
            continue
        for assignment in assignments_by_uid.get(uid, ()):
            grant = grant.extend_by_assignment(assignment)
        grants.append(grant)
    return grants, unknown_holders


def build_sandbox_grants(
    sandboxes: Iterable[Sandbox], live_containers: Mapping[str, set[str]], granted: set[str]
) -> tuple[list[Grant], set[str]]:
    """Build a grant of all shares of each live pod that has no grant. Pure.

    live_containers: names of the live containers by pod UID.
    granted: UIDs of the pods with a grant.

    The grants have no slots, because their containers have started already. Also returns the UIDs of pods whose
    assignment cannot be read.
    """
    grants: dict[str, Grant] = {}
    unknown_holders: set[str] = set()
    for sandbox in sandboxes:
        container = max(live_containers.get(sandbox.pod_uid, ()), default="")  # "": the sandbox itself
        if not container or sandbox.pod_uid in granted:
            continue
        try:
            assignment = codec.decode(sandbox.annotations)
        except codec.InvalidAssignment as error:
            fields = {"pod": f"{sandbox.namespace}/{sandbox.name}", "uid": sandbox.pod_uid, "error": str(error)}
            _log.warning("a running pod has an assignment that cannot be read", **fields)
            unknown_holders.add(sandbox.pod_uid)
            continue
        if assignment is not None and not assignment.is_gpushare:
            grant = Grant.for_pod(sandbox.pod_uid, sandbox.namespace, sandbox.name, container, assignment)
            grants[sandbox.pod_uid] = grants.get(sandbox.pod_uid, grant).extend_by_assignment(assignment)
    return list(grants.values()), unknown_holders


def adopt_grants(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Pods,
    grants: GrantStore,
    sandboxes: Sequence[Sandbox],
    live_containers: Mapping[str, set[str]],
) -> Adoption:
    """Add the missing grants of containers that are alive according to the runtime."""
    granted = {(grant.pod_uid, grant.container) for grant in grants.list_grants()}
    pods_by_uid = {pod.uid: pod for pod in pods.list_pods()}
    sandboxes = select_current_sandboxes(sandboxes)
    checkpoint_grants, without_assignment = build_checkpoint_grants(containers_by_slot, pods_by_uid, granted, sandboxes)
    checkpoint_grants = [
        grant for grant in checkpoint_grants if grant.container in live_containers.get(grant.pod_uid, ())
    ]
    granted_uids = {uid for uid, _ in granted} | {grant.pod_uid for grant in checkpoint_grants}
    grants_of_sandboxes, unknown_holders = build_sandbox_grants(sandboxes, live_containers, granted_uids)
    unknown_holders |= {uid for uid, container in without_assignment if container in live_containers.get(uid, ())}
    adoption = Adoption([], unknown_holders, None)
    for grant in (*checkpoint_grants, *grants_of_sandboxes):
        fields = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
        try:
            grants.adopt_grant(grant)
        except UnsafeName as error:
            _log.warning("failed to build a grant for a running container", **fields, error=str(error))
            adoption.unknown_holders.add(grant.pod_uid)
            continue
        except OSError as error:  # the grant counts in memory, and is written again later
            adoption = adoption._replace(error=adoption.error or error)
        adoption.grants.append(grant)
        _log.warning("adopted a running container without a grant", **fields)
    return adoption
