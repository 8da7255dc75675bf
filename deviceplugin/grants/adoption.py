"""Makes grants for containers that already run but have none on this node's disk.

Happens when the state folder was lost or a grant was unreadable. Without it the card would look empty to the check at
PreStart, and the container could not be restarted while the API server is away.
"""

from collections.abc import Mapping, Sequence

import structlog

from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.prestart import Refused, grant_of
from deviceplugin.sources.kubelet import KnownContainer
from deviceplugin.sources.pods import Pods, PodView

_log = structlog.get_logger(__name__)


def missing(
    known: Mapping[str, Sequence[KnownContainer]], pods: Mapping[str, PodView], granted: set[tuple[str, str]]
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
        except Refused as error:
            who = f"{pod.namespace}/{pod.name}"
            _log.warning("a container holds a share slot without an assignment", pod=who, uid=uid, error=str(error))
    return found


def adopt(
    known: Mapping[str, Sequence[KnownContainer]], pods: Pods, grants: GrantStore, alive: Mapping[str, set[str]]
) -> list[Grant]:
    """Enters what is missing for containers that are alive by the runtime's word. Raises OSError."""
    granted = {(grant.pod_uid, grant.container) for grant in grants.all()}
    adopted = []
    for grant in missing(known, {pod.uid: pod for pod in pods.all()}, granted):
        if grant.container in alive.get(grant.pod_uid, ()):
            grants.adopt(grant)
            adopted.append(grant)
            told = {"pod": grant.pod, "uid": grant.pod_uid, "container": grant.container}
            _log.warning("adopted a running container without a grant", **told)
    return adopted
