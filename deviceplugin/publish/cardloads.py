"""The load of each card of this node, computed from the node's pods and from the grants on disk. Pure.

The load is computed at each scrape, independently of the extender's cache. So the two can be compared: the extender
must write the same numbers into the ExtendedResource.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from cardwise.core.api import assignment
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import HEALTHY, GpuCard, Health
from deviceplugin.grants.grants import Grant, merge_by_pod
from deviceplugin.sources.pods import NodePod


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLoad:
    """The load of a card.

    used: MiB that pods request.
    granted: MiB of containers that have started.
    shares: number of containers with a share.
    core: percent of the SMs that pods request.
    """

    card: GpuCard
    healthy: bool
    used: int
    granted: int
    shares: int
    core: int

    @property
    def free(self) -> int:
        """Free memory in MiB."""
        return max(0, self.card.memory - self.used)


def card_loads(
    cards: Iterable[GpuCard], health_by_uuid: Mapping[str, Health], pods: Iterable[NodePod], grants: Iterable[Grant]
) -> list[CardLoad]:
    """The load of these cards.

    After its end, a pod is included while it has a grant, that is, until its containers have ended. For a pod that is
    bound here again, each amount is the larger one of grant and assignment.
    """
    cards = list(cards)
    uuid_by_index = {card.index: card.uuid for card in cards}
    used: Counter[str] = Counter()
    granted: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    core: Counter[str] = Counter()

    def add_share(share: CardShare) -> None:
        used[share.uuid] += share.mem
        shares[share.uuid] += 1
        core[share.uuid] += share.core

    assignments: dict[str, Assignment] = {}
    for pod in pods:
        if pod.finished:
            continue
        assigned_shares = tuple(
            replace(share, uuid=share.resolve_uuid(uuid_by_index) or "") for share in _assigned_shares(pod)
        )
        assignments[pod.uid] = Assignment({"": assigned_shares})
        for share in assigned_shares:
            add_share(share)
    for grant in merge_by_pod(grants):
        for share in grant.pod_shares:
            granted[share.uuid] += share.mem
        excess = grant.pod_assignment.excess_over(assignments.get(grant.pod_uid, Assignment({})))
        for share in excess.shares() if excess is not None else ():
            add_share(share)
    return [
        CardLoad(
            card=card,
            healthy=health_by_uuid.get(card.uuid, HEALTHY).healthy,
            used=MiB(used[card.uuid]),
            granted=MiB(granted[card.uuid]),
            shares=shares[card.uuid],
            core=core[card.uuid],
        )
        for card in cards
    ]


def _assigned_shares(pod: NodePod) -> Iterator[CardShare]:
    try:
        decoded_assignment = assignment.decode(pod.annotations)
    except assignment.InvalidAssignment:
        return  # the extender reports the invalid assignment, and no container of such a pod starts
    if decoded_assignment is not None:
        yield from decoded_assignment.shares()
