"""Preemption for gangs: a member gets victims only if then all missing members of its gang have a place.

kube-scheduler preempts for one pod after the other, and knows no gangs. So each answer considers the whole gang: what
is free or becomes free, for which members victims terminate already, and which pods would have to be evicted for the
other members. The answer has only the victims for the requested pod. The places of the other members are reserved until
kube-scheduler asks for them.

The search may need several plans, and takes a turn at the state's lock for each, and further turns to find the victims
on many nodes. The result of one turn may not hold in the next. So each turn starts again if anything has changed that
the result depends on, and the answer is right when its cards are reserved.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement import placement
from cardwise.core.preemption.preemption import Victims
from extender.cache.cache import Cache
from extender.cache.nominated import NominatedPods
from extender.cache.nominations import MemberReservation, NominatedPlace
from extender.cache.yielding import TURN_SECONDS
from extender.gangs.gangplaces import GangPlaces
from extender.gangs.gangs import Gangs
from extender.records.nodeinfo import PlacedPod
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef

_FEW: Final = 8  # members put where pods are evicted; a plan with more has a turn of its own
_MOST_CARD_REQUESTS: Final = 512  # of all members without a place: a plan for more would hold the lock for too long


@dataclass(slots=True)
class _MemberVictims:
    """A member, its node, and the victims that are evicted for it there."""

    claimant: WaitingPod
    node: str
    victims: Victims


@dataclass(frozen=True, slots=True)
class GangVictims:
    """Places for all members without a place.

    member_victims: the members for which pods are evicted; the requested pod comes first.
    reservations: what is reserved for the other members meanwhile, with or without victims.
    """

    member_victims: tuple[_MemberVictims, ...]
    reservations: tuple[MemberReservation, ...]


@dataclass(slots=True)
class GangSearch:
    """The search for one answer: its input, and what one turn passes on to the next.

    scheduler_victims: kube-scheduler's own victims, by node.
    victims_by_node: the victims there for this pod alone, as found last.
    own_eviction_nodes: nodes where the extender itself evicts. There no PodDisruptionBudget is exceeded, and the pods
        `refused` stay (`NominatedPods.find_victims`).
    for_scheduler: kube-scheduler has asked for the pod, so it must be put on none of the nodes `own_eviction_nodes`.
    max_members: how many members are put where pods are evicted before the gang is planned; 0: the next turn only
        checks whether waiting is enough.
    """

    claimant: WaitingPod
    policy: str
    scheduler_victims: Mapping[str, Collection[str]]
    victims_by_node: dict[str, Victims]
    own_eviction_nodes: Collection[str]
    refused: Collection[str]
    for_scheduler: bool
    max_members: int = 0
    attempt: "_Attempt | None" = None


@dataclass(slots=True)
class _Attempt:
    """The members that were placed so far, and where.

    pod_inputs: the inputs of the search on every node.
    queue: the nodes where more members may be put, the least harm first.
    same_shape: the members of this shape without a place.
    claimant_victims: the place of the requested pod.
    next_victims: the victims for one more member, by node, as far as known.
    node_inputs: the inputs of the search on each searched node.
    """

    pod_inputs: object
    queue: list[tuple[tuple[int, bool, int, int], str]]
    same_shape: list[WaitingPod]
    claimant_victims: _MemberVictims | None = None
    member_victims: list[_MemberVictims] = field(default_factory=list)
    next_victims: dict[str, Victims] = field(default_factory=dict)
    node_inputs: dict[str, object] = field(default_factory=dict)


class GangPreemption:
    """The search for victims for a gang. Not thread-safe: the state locks."""

    def __init__(
        self, nominated: NominatedPods, gangs: Gangs, places: GangPlaces, *, cache: Cache, clock: Clock
    ) -> None:
        self._cache = cache
        self._ledger = cache.ledger
        self._loads = cache.loads
        self._nominations = cache.reservations.nominations
        self._nominated = nominated
        self._gangs = gangs
        self._gang_places = places
        self._clock = clock

    def is_in_pending_gang(self, uid: str) -> bool:
        """Whether the pod is in a gang that does not run yet, so that the pod is not placed alone."""
        gang = self._gangs.gang_of(uid)
        return gang is None or not gang.ran

    def is_over_quota(self, uid: str) -> bool:
        """Whether the missing members of the pod's gang exceed the remaining quotas, whichever pods are evicted."""
        gang = self._gangs.gang_of(uid)
        if gang is None or gang.ran:
            return False
        headroom = self._cache.headroom(gang.namespace)
        return gangplan.first_beyond_quotas(self._ledger, gang.missing_in_plan(), headroom) is not None

    def unplaced_uids(self, uid: str) -> list[str]:
        """The UIDs of all members of the pod's gang without a place and without terminating victims."""
        return [member.uid for member in self._unplaced_members(uid)]

    def search_turn(self, search: GangSearch) -> tuple[GangVictims | None, bool]:
        """Continue the search for `TURN_SECONDS` of CPU time.

        Returns the victims, and whether a later call may find more.
        The victims are None if no pod must be evicted: the gang only has to wait, or would not be complete.
        """
        uid = search.claimant.uid
        with self._nominations.restore_afterwards():
            self._nominations.remove(uid)
            gang, lacking = self._gangs.gang_of(uid), self._unplaced_members(uid)
            if gang is None or all(member.uid != uid for member in lacking):
                return None, False
            if gangplan.count_card_requests(lacking) > _MOST_CARD_REQUESTS:
                return None, False
            if not self._gang_places.planner.count_capacities(lacking, self._clock.cpu() + TURN_SECONDS):
                return None, True
            if not search.max_members:
                search.max_members = 1
                return None, not self._must_only_wait(search, gang, lacking)
            gang_victims, has_more = self._plan_victims(search, gang, lacking)
            if gang_victims is not None and self._must_only_wait(search, gang, lacking):
                return None, False  # capacity was freed since the first turn
            return gang_victims, has_more

    def _must_only_wait(self, search: GangSearch, gang: Gang, lacking: Sequence[Member]) -> bool:
        """Whether the gang only has to wait."""
        return self._find_places(search, gang, lacking, _nodes_without_evictions(search)) is not None

    def _plan_victims(
        self, search: GangSearch, gang: Gang, lacking: Sequence[Member]
    ) -> tuple[GangVictims | None, bool]:
        """Plan the gang with the nodes of the least harmful victims, for the pod itself and for members of its shape.

        All other members need free capacity. Returns the places, and whether another turn may find more.
        """
        attempt = self._current_attempt(search, gang, lacking)
        with self._nominations.restore_afterwards():
            for member_victims in attempt.member_victims:
                self._reserve_place(member_victims)
            if not self._choose_victims(search, attempt, lacking):
                return None, True
            if attempt.claimant_victims is None:
                return None, False
            takers = {placed.claimant.uid for placed in attempt.member_victims}
            remaining = [member for member in lacking if member.uid not in takers]
            nodes = {*_nodes_without_evictions(search), *(placed.node for placed in attempt.member_victims)}
            places = self._find_places(search, gang, remaining, nodes) if remaining else []
        search.max_members = 2 * search.max_members + 1  # a plan costs more than a search on a node
        if places is None or self._exceeds_quota(gang, attempt.member_victims, places):
            return None, bool(attempt.queue and attempt.same_shape)
        other_reservations = [
            MemberReservation(placed.claimant, placed.node, placed.victims.assignment)
            for placed in attempt.member_victims
            if placed is not attempt.claimant_victims and placed.victims.assignment is not None
        ]
        all_victims = (
            attempt.claimant_victims,
            *(placed for placed in attempt.member_victims if placed is not attempt.claimant_victims),
        )
        return GangVictims(all_victims, (*other_reservations, *places)), False

    def _exceeds_quota(
        self, gang: Gang, all_victims: Iterable[_MemberVictims], places: Iterable[MemberReservation]
    ) -> bool:
        """Whether all of this, and what is reserved for other members, would exceed the quotas of the gang's namespace.

        Quotas do not count what is reserved for nominated pods (`NominatedPods.reservations_on`).
        """
        headroom = self._cache.headroom(gang.namespace)
        if not headroom:
            return False
        planned = [(member_victims.node, member_victims.victims.assignment) for member_victims in all_victims]
        planned += [(place.node, place.assignment) for place in places]
        for member in gang.missing_in_plan():
            nomination = self._nominations.get(member.uid)
            node = self._nominations.nominated_node(member.uid)
            if nomination is not None and node:
                planned.append((node, nomination.places[node].assignment))
        known_assignments = [(node, assignment) for node, assignment in planned if assignment is not None]
        return bool(placement.exceeded_together(self._ledger, known_assignments, headroom))

    def _current_attempt(self, search: GangSearch, gang: Gang, lacking: Sequence[Member]) -> _Attempt:
        """What earlier turns have tried, if it still holds; otherwise nothing yet."""
        pod_inputs = tuple(lacking), self._nominated.pod_inputs(search.claimant)
        attempt = search.attempt
        if (
            attempt is None
            or attempt.pod_inputs != pod_inputs
            or any(self._nominated.node_inputs(node) != inputs for node, inputs in attempt.node_inputs.items())
        ):
            shape, uid = gang.members[search.claimant.uid].shape, search.claimant.uid
            fellows = [
                _make_claimant(gang, member) for member in lacking if member.shape == shape and member.uid != uid
            ]
            queue = [(victims.harm, node) for node, victims in search.victims_by_node.items()]
            heapq.heapify(queue)
            attempt = search.attempt = _Attempt(pod_inputs, queue, fellows)
        return attempt

    def _choose_victims(self, search: GangSearch, attempt: _Attempt, lacking: Sequence[Member]) -> bool:
        """Put members where the least harmful victims are, until as many are put as the search tries.

        Returns False if the turn's time is over, so that the next turn continues.
        """
        until = self._clock.cpu() + TURN_SECONDS
        unhelped = dict.fromkeys(member.uid for member in lacking)
        used_nodes, has_searched = {member_victims.node for member_victims in attempt.member_victims}, False
        for member_victims in attempt.member_victims:
            del unhelped[member_victims.claimant.uid]
        while (entry := _next_node(search, attempt)) is not None:
            harm, node = entry
            if node not in attempt.next_victims:
                claimant = search.claimant if attempt.claimant_victims is None else attempt.same_shape[0]
                has_searched = True
                attempt.node_inputs[node] = self._nominated.node_inputs(node)
                victims = self._find_victims(search, claimant, node, unhelped, first=node not in used_nodes)
                if victims is not None:
                    attempt.next_victims[node] = victims
                    heapq.heappush(attempt.queue, (victims.harm, node))
                if self._clock.cpu() >= until:
                    return False
                continue
            victims = attempt.next_victims.pop(node)
            if victims.uids and attempt.claimant_victims is None:
                member_victims = attempt.claimant_victims = _MemberVictims(search.claimant, node, victims)
            elif attempt.same_shape:
                member_victims = _MemberVictims(attempt.same_shape.pop(0), node, victims)
            else:
                break
            attempt.member_victims.append(member_victims)
            used_nodes.add(node)
            del unhelped[member_victims.claimant.uid]
            self._reserve_place(member_victims)
            heapq.heappush(attempt.queue, (harm, node))
        return self._clock.cpu() < until and not (has_searched and len(attempt.member_victims) > _FEW)

    def _reserve_place(self, member_victims: _MemberVictims) -> None:
        place = NominatedPlace(member_victims.victims.assignment, member_victims.victims.uids)
        self._nominations.set_places(member_victims.claimant, {member_victims.node: place}, self._clock.now())

    def _find_victims(
        self, search: GangSearch, claimant: WaitingPod, node: str, excluded: Collection[str], *, first: bool
    ) -> Victims | None:
        """The victims on the node as it is now; None if no eviction helps.

        excluded: members for which no pods are evicted.
        first: no member has been put on the node yet.
        """
        victims_by_node, refused = search.victims_by_node, search.refused if node in search.own_eviction_nodes else None
        if first and claimant is not search.claimant:
            # Victims for another member are chosen when kube-scheduler tries it. Whether these suffice is cheap to find
            # out.
            known_victims = victims_by_node[node]
            more_victims = self._nominated.find_victims(
                claimant, search.policy, node, excluded=excluded, removed=known_victims.uids, refused=refused
            )
            if more_victims is not None and not more_victims.uids:
                return replace(known_victims, assignment=more_victims.assignment)
        scheduler_victims = search.scheduler_victims.get(node, ()) if first else ()
        victims = self._nominated.find_victims(
            claimant, search.policy, node, scheduler_victims, excluded=excluded, refused=refused
        )
        if victims is not None and victims.violations and refused is not None:
            victims = None
        if victims is None and first:
            del victims_by_node[node]
        elif victims is not None and first:
            victims_by_node[node] = victims
        return victims

    def _unplaced_members(self, uid: str) -> list[Member]:
        """The members whose UIDs `unplaced_uids` returns; none if the gang cannot be planned now."""
        gang = self._gangs.gang_of(uid)
        if gang is None or gang.ran or gang.refusal(self._clock.now()) is not None:
            return []
        return [member for member in gang.missing_in_plan() if not self._has_victims(member.uid)]

    def _has_victims(self, uid: str) -> bool:
        """Whether victims terminate for the pod already."""
        return bool(self._nominations.nominated_node(uid))

    def _find_places(
        self, search: GangSearch, gang: Gang, members: Sequence[Member], nodes: Collection[str]
    ) -> list[MemberReservation] | None:
        """Places for all of these members once all victims are gone, with their cards; None if there are none."""
        shape = gang.members[search.claimant.uid].shape
        with self._after_evictions({member.uid for member in members}, search.claimant.request.priority, nodes):
            planned_gang = self._gang_places.planned_gang(gang, self._clock.now())
            planned = self._gang_places.planner.simulate_plan(planned_gang, members, shape=shape, more_nodes=nodes)
        if planned is None:
            return None
        return [
            MemberReservation(_make_claimant(gang, member), planned.nodes[member.uid], assignment)
            for member in members
            if (assignment := planned.assignments.get(member.uid)) is not None
        ]

    @contextmanager
    def _after_evictions(self, excluded: Collection[str], priority: int, nodes: Iterable[str]) -> Iterator[None]:
        """Context manager: inside, all victims are gone, and the pods that they are evicted for are placed."""
        leaving = self._nominations.all_victims()
        leaving_keys: list[str] = []
        for node in {*nodes, *leaving.values()}:
            for key, placed in self._loads.pods_on(node):
                if placed.terminating or placed.uid in leaving:
                    leaving[placed.uid] = node
                    leaving_keys.append(key)
        coming = [
            PlacedPod(node, claimant.load)
            for claimant, node, _ in self._nominations.reserved_places(excluded, priority)
            if self._loads.get(claimant.uid) is None
        ]
        with (
            self._nominated.count_reserved(excluded, priority),
            self._ledger.what_if(released=leaving),
            self._loads.what_if(removed=leaving_keys, added=coming),
        ):
            yield


def _next_node(search: GangSearch, attempt: _Attempt) -> tuple[tuple[int, bool, int, int], str] | None:
    """Take the node for the next member out of the queue; None if no more members are to be put."""
    if attempt.claimant_victims is None and search.for_scheduler and search.own_eviction_nodes:
        entry = min((queued for queued in attempt.queue if queued[1] not in search.own_eviction_nodes), default=None)
        if entry is not None:
            attempt.queue.remove(entry)
            heapq.heapify(attempt.queue)
        return entry
    if attempt.queue and (
        attempt.claimant_victims is None or (attempt.same_shape and len(attempt.member_victims) < search.max_members)
    ):
        return heapq.heappop(attempt.queue)
    return None


def _nodes_without_evictions(search: GangSearch) -> set[str]:
    """The nodes where the pod alone only has to wait."""
    return {node for node, victims in search.victims_by_node.items() if not victims.uids}


def _make_claimant(gang: Gang, member: Member) -> WaitingPod:
    request = member.request or PodRequest(containers=(), priority=member.priority)
    return WaitingPod(PodRef(member.uid, gang.namespace, member.name), request, member.load, rank=gang.rank())
