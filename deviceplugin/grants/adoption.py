"""Creates grants for containers that run without one.

This happens when the state folder was lost or a grant was unreadable. Without a grant, PreStart would count the card as
free, and the container could not be restarted while the API server is away. For pods that have ended according to the
API server, the runtime keeps the annotations as long as a container or sandbox of them runs. If no grant can be made
for a container, that is logged and counted, and other containers are not delayed.

A pod may have been bound here again with other cards than its sandbox was made for. Its containers may use either, so
its grants have the cards of both until these containers end.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from cardwise.core.api import assignment as codec
from cardwise.core.api.assignment import Assignment
from deviceplugin.grants.grants import Grant, GrantStore, UnsafeName
from deviceplugin.grants.prestart import StartRefused, grant_of
from deviceplugin.sources.containers import Sandbox
from deviceplugin.sources.kubelet import CheckpointContainer
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)


class Adoption(NamedTuple):
    """The result of `adopt`: added grants, the UIDs of pods that may hold a card without one, and why a grant could not
    be written.
    """

    grants: list[Grant]
    unknown_holders: set[str]
    error: OSError | None


def current_sandboxes(sandboxes: Iterable[Sandbox]) -> list[Sandbox]:
    """The sandboxes in which containers may run. Pure.

    The kubelet ends all containers of a pod before it makes another sandbox for it, so a sandbox that is not ready
    counts only if the pod has no ready one.
    """
    sandboxes = list(sandboxes)
    ready_uids = {sandbox.pod_uid for sandbox in sandboxes if sandbox.ready}
    return [sandbox for sandbox in sandboxes if sandbox.ready or sandbox.pod_uid not in ready_uids]


def missing_grants(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Mapping[str, NodePod],
    granted: set[tuple[str, str]],
    sandboxes: Iterable[Sandbox],
) -> tuple[list[Grant], set[tuple[str, str]]]:
    """The missing grants of the containers in the kubelet's checkpoint, and the containers without assignment. Pure.

    sandboxes: those in which containers may run.
    """
    started_with: dict[str, list[Assignment]] = {}
    for sandbox in sandboxes:
        with contextlib.suppress(codec.InvalidAssignment):
            assignment = codec.decode(sandbox.annotations)
            if assignment is not None and not assignment.is_legacy:
                started_with.setdefault(sandbox.pod_uid, []).append(assignment)
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
            grant = grant_of(pod, container, sorted(slots_of_container))
        except StartRefused as error:
            fields = {"pod": pod.pod, "uid": uid, "error": str(error)}
            _log.warning("a container holds a share slot, but its pod has no assignment", **fields)
            unknown_holders.add((uid, container))
            continue
        for assignment in started_with.get(uid, ()):
            grant = grant.with_cards_of(assignment)
        grants.append(grant)
    return grants, unknown_holders


def sandbox_grants(
    sandboxes: Iterable[Sandbox], alive: Mapping[str, set[str]], granted: set[str]
) -> tuple[list[Grant], set[str]]:
    """A grant for each live pod without one, for all that the pod holds; and the pods with an unreadable assignment.

    Pure. No container is started by such a grant, so it has no slot.
    """
    grants: dict[str, Grant] = {}
    unknown_holders: set[str] = set()
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
        if assignment is not None and not assignment.is_legacy:
            grant = Grant.for_pod(pod.pod_uid, pod.namespace, pod.name, container, assignment)
            grants[pod.pod_uid] = grants.get(pod.pod_uid, grant).with_cards_of(assignment)
    return list(grants.values()), unknown_holders


def adopt_grants(
    containers_by_slot: Mapping[str, Sequence[CheckpointContainer]],
    pods: Pods,
    grants: GrantStore,
    sandboxes: Sequence[Sandbox],
    alive: Mapping[str, set[str]],
) -> Adoption:
    """Add the missing grants of containers that are alive according to the runtime."""
    granted = {(grant.pod_uid, grant.container) for grant in grants.list_grants()}
    in_api = {pod.uid: pod for pod in pods.list_pods()}
    sandboxes = current_sandboxes(sandboxes)
    missing, without_assignment = missing_grants(containers_by_slot, in_api, granted, sandboxes)
    missing = [grant for grant in missing if grant.container in alive.get(grant.pod_uid, ())]
    granted_uids = {uid for uid, _ in granted} | {grant.pod_uid for grant in missing}
    of_sandboxes, unknown_holders = sandbox_grants(sandboxes, alive, granted_uids)
    unknown_holders |= {uid for uid, container in without_assignment if container in alive.get(uid, ())}
    adoption = Adoption([], unknown_holders, None)
    for grant in (*missing, *of_sandboxes):
        fields = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
        try:
            grants.adopt_grant(grant)
        except UnsafeName as error:
            _log.warning("a running container cannot have a grant", **fields, error=str(error))
            adoption.unknown_holders.add(grant.pod_uid)
            continue
        except OSError as error:  # the grant counts, and is written again
            adoption = adoption._replace(error=adoption.error or error)
        adoption.grants.append(grant)
        _log.warning("adopted a running container without a grant", **fields)
    return adoption
