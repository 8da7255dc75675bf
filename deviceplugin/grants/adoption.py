"""Makes grants for containers that already run but have none on this node's disk.

Happens when the state folder was lost or a grant was unreadable. Without it the card would look empty to the check at
PreStart, and the container could not be restarted while the API server is away. Of pods that have ended by the API
server's word the runtime remembers what they were given, for as long as something of them runs.
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


def missing(
    known: Mapping[str, Sequence[CheckpointContainer]], pods: Mapping[str, NodePod], granted: set[tuple[str, str]]
) -> list[Grant]:
    """The grants that are missing for the checkpoint's containers. Pure."""
    slots: dict[tuple[str, str], list[str]] = {}
    for slot, holders in known.items():
        for holder in holders:
            slots.setdefault((holder.pod_uid, holder.container), []).append(slot)
    found = []
    for (uid, container), theirs in slots.items():
        pod = pods.get(uid)
        if pod is None or pod.finished or (uid, container) in granted:
            continue
        try:
            found.append(grant_of(pod, container, sorted(theirs)))
        except StartRefused as error:
            told = {"pod": pod.pod, "uid": uid, "error": str(error)}
            _log.warning("a container holds a share slot without an assignment", **told)
    return found


def left_over(sandboxes: Iterable[Sandbox], alive: Mapping[str, set[str]], granted: set[str]) -> list[Grant]:
    """A grant for each pod that has something alive and no grant: what it holds, whichever of its containers has it.
    None of these is started by it, so it has no slot. Pure.
    """
    found = []
    for pod in sandboxes:
        container = max(alive.get(pod.pod_uid, ()), default="")  # "" is the sandbox
        if not container or pod.pod_uid in granted:
            continue
        try:
            assignment = codec.decode(pod.annotations)
        except codec.InvalidAssignment:
            continue  # whatever it has, it was not given by us
        if assignment is not None and not assignment.legacy:
            found.append(Grant.of(pod.pod_uid, pod.namespace, pod.name, container, assignment))
    return found


def adopt(
    known: Mapping[str, Sequence[CheckpointContainer]],
    pods: Pods,
    grants: GrantStore,
    sandboxes: Sequence[Sandbox],
    alive: Mapping[str, set[str]],
) -> list[Grant]:
    """Enters what is missing for containers that are alive by the runtime's word. Raises OSError."""
    granted = {(grant.pod_uid, grant.container) for grant in grants.all()}
    in_api = {pod.uid: pod for pod in pods.all()}
    adopted = [one for one in missing(known, in_api, granted) if one.container in alive.get(one.pod_uid, ())]
    have = {uid for uid, _ in granted} | {grant.pod_uid for grant in adopted}
    adopted += left_over(sandboxes, alive, have)
    for grant in adopted:
        grants.adopt(grant)
        told = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
        _log.warning("adopted a running container without a grant", **told)
    return adopted
