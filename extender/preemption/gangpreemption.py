"""Preemption for gangs: victims for a member are answered only if then all missing members of its gang have a place.

kube-scheduler preempts for one pod after the other, and knows no gangs. So for each answer the whole gang is looked at:
what is free or becomes free, for which members victims terminate already, and which pods would have to go for the other
members. The answer has only the victims for the pod that was asked for. The places of the other members are kept until
kube-scheduler asks for them.

The search may need several plans, and takes a turn at the state for each. What one turn has found may not hold in the
next. So each turn plans anew, with more nodes where pods would go, and the answer is right when it is kept.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.preemption.preemption import Victims
from extender.cache.cache import Cache
from extender.cache.nominated import NominatedPods
from extender.cache.nominations import Kept, NominatedPlace
from extender.gangs.gangplaces import TURN, GangPlaces
from extender.gangs.gangs import Gangs
from extender.records.nodeinfo import Placed
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef


@dataclass(frozen=True, slots=True)
class Together:
    """The victims for the pod, by node, and what is kept for the other members of its gang meanwhile."""

    node: str
    victims: Victims
    rest: tuple[Kept, ...]


@dataclass(slots=True)
class GangSearch:
    """The search for one answer: what was asked, and what one turn passes on to the next.

    `chosen`: kube-scheduler's own victims, by node. `found`: the victims there for this pod alone, as seen last.
    `takes`: how many members the next turn puts where pods go; 0: it only asks whether waiting is enough.
    """

    claimant: WaitingPod
    policy: str
    chosen: Mapping[str, Collection[str]]
    found: dict[str, Victims]
    takes: int = 0


class GangPreemption:
    """Not thread-safe: the state locks."""

    def __init__(
        self, nominated: NominatedPods, gangs: Gangs, places: GangPlaces, *, cache: Cache, clock: Clock
    ) -> None:
        self._ledger = cache.ledger
        self._loads = cache.loads
        self._nominations = cache.reservations.nominations
        self._nominated = nominated
        self._gangs = gangs
        self._gang_places = places
        self._clock = clock

    def concerns(self, uid: str) -> bool:
        """Whether the pod is in a gang that does not run, so that it is not placed alone."""
        gang = self._gangs.of(uid)
        return gang is None or not gang.ran

    def unhelped(self, uid: str) -> list[str]:
        """All members of the pod's gang that have no place yet, and for which no victims terminate."""
        return [member.uid for member in self._lacking(uid)]

    def turn(self, search: GangSearch) -> tuple[Together | None, bool]:
        """One turn of the search: the answer, or None if no pod is to go (the gang only has to wait, or would not be
        complete); and whether another turn may find more.
        """
        uid = search.claimant.uid
        with self._nominations.tried():
            self._nominations.drop(uid)
            gang, lacking = self._gangs.of(uid), self._lacking(uid)
            if gang is None or all(member.uid != uid for member in lacking):
                return None, False
            if not self._gang_places.look(lacking, self._clock.cpu() + TURN):
                return None, True
            if not search.takes:
                search.takes = 1
                return None, not self._suffices(search, gang, lacking)
            together, more = self._take(search, gang, lacking)
            if together is not None and self._suffices(search, gang, lacking):
                return None, False  # room has come since the first turn
            search.takes = 2 * search.takes + 1  # a plan costs more than a look, and who is looked at in vain stays
            return together, more

    def _suffices(self, search: GangSearch, gang: Gang, lacking: Sequence[Member]) -> bool:
        """Whether the gang only has to wait."""
        return self._places(search, gang, lacking, _enough(search)) is not None

    def _take(self, search: GangSearch, gang: Gang, lacking: Sequence[Member]) -> tuple[Together | None, bool]:
        """Plans the gang with the nodes of the least harmful victims, for the pod itself and for members of its shape;
        for all other members there must be room. Also returns whether there are more such nodes and members.
        """
        claimant, found = search.claimant, search.found
        shape = gang.members[claimant.uid].shape
        alike = [member for member in lacking if member.shape == shape and member.uid != claimant.uid]
        fellows = [_claimant(gang.namespace, member) for member in alike]
        own: tuple[str, Victims] | None = None
        others: list[Kept] = []
        taken: list[str] = []
        now: dict[str, Victims] = {}  # by node, with all who have been put there
        queue = [(victims.harm, node) for node, victims in found.items()]
        heapq.heapify(queue)
        with self._nominations.tried():
            while queue and (own is None or (fellows and len(taken) < search.takes)):
                harm, node = heapq.heappop(queue)
                if node not in now:
                    taker = claimant if own is None else fellows[0]
                    victims = self._who_goes(search, taker, node, lacking, first=node not in taken)
                    if victims is not None:
                        now[node] = victims
                        heapq.heappush(queue, (victims.harm, node))
                    continue
                victims = now.pop(node)
                if victims.uids and own is None:
                    taker, own = claimant, (node, victims)
                elif fellows:
                    taker = fellows.pop(0)
                    if victims.assignment is not None:
                        others.append(Kept(taker, node, victims.assignment))
                else:
                    break
                place = NominatedPlace(victims.assignment, victims.uids)
                self._nominations.answered(taker, {node: place}, self._clock.now())
                taken.append(node)
                heapq.heappush(queue, (harm, node))
            if own is None:
                return None, False
            rest = [member for member in lacking if not self._is_helped(member.uid)]
            places = self._places(search, gang, rest, {*_enough(search), *taken})
        if places is None:
            return None, bool(queue and fellows)
        return Together(*own, (*others, *places)), False

    def _who_goes(
        self, search: GangSearch, taker: WaitingPod, node: str, lacking: Sequence[Member], *, first: bool
    ) -> Victims | None:
        """The victims on the node as it is now. `first`: no member has been put there yet."""
        own, found = [member.uid for member in lacking if not self._is_helped(member.uid)], search.found
        if first and taker is not search.claimant:
            # Victims for another member are decided when kube-scheduler brings it. That these suffice is cheap to see.
            seen = found[node]
            rest = self._nominated.who_goes(taker, search.policy, node, own=own, gone=seen.uids)
            if rest is not None and not rest.uids:
                return replace(seen, assignment=rest.assignment)
        chosen = search.chosen[node] if first else ()
        victims = self._nominated.who_goes(taker, search.policy, node, chosen, own=own)
        if victims is None and first:
            del found[node]
        elif victims is not None and first:
            found[node] = victims
        return victims

    def _lacking(self, uid: str) -> list[Member]:
        """The members whose UIDs `unhelped` returns; none where nothing can be planned for the gang now."""
        gang = self._gangs.of(uid)
        if gang is None or gang.ran or gang.refusal(self._clock.now()) is not None:
            return []
        return [member for member in gang.missing_in_plan() if not self._is_helped(member.uid)]

    def _is_helped(self, uid: str) -> bool:
        """Whether victims terminate for the pod already."""
        return bool(self._nominations.node(uid))

    def _places(
        self, search: GangSearch, gang: Gang, members: Sequence[Member], nodes: Collection[str]
    ) -> list[Kept] | None:
        """Places for all of these members once all victims are gone, with the cards that they get."""
        shape = gang.members[search.claimant.uid].shape
        with self._later({member.uid for member in members}, search.claimant.request.priority, nodes):
            planned = self._gang_places.would_place(gang, members, self._clock.now(), shape=shape, also=nodes)
        if planned is None:
            return None
        return [
            Kept(_claimant(gang.namespace, member), planned.nodes[member.uid], assignment)
            for member in members
            if (assignment := planned.assignments.get(member.uid)) is not None
        ]

    @contextmanager
    def _later(self, own: Collection[str], priority: int, nodes: Iterable[str]) -> Iterator[None]:
        """Context: all victims are gone, and the pods that they go for are there."""
        going = self._nominations.all_victims()
        gone: list[str] = []
        for node in {*nodes, *going.values()}:
            for key, one in self._loads.on(node):
                if one.going or one.uid in going:
                    going[one.uid] = node
                    gone.append(key)
        coming = [
            Placed(node, who.load)
            for who, node, _ in self._nominations.before(own, priority)
            if self._loads.get(who.uid) is None
        ]
        with (
            self._nominated.kept(own, priority),
            self._ledger.what_if(released=going),
            self._loads.what_if(gone=gone, there=coming),
        ):
            yield


def _enough(search: GangSearch) -> set[str]:
    """Nodes where it is enough to wait, for the pod alone."""
    return {node for node, victims in search.found.items() if not victims.uids}


def _claimant(namespace: str, member: Member) -> WaitingPod:
    asked = member.request or PodRequest(containers=(), priority=member.priority)
    return WaitingPod(PodRef(member.uid, namespace, member.name), asked, member.load)
