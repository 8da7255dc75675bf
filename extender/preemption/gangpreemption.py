"""Preemption for gangs: a member gets victims only if all missing members of its gang then fit.

Theory of operation. kube-scheduler preempts for one pod after the other, and knows no gangs. So each answer considers
the whole gang. It considers three things: capacity that is free or becomes free, members with terminating victims, and
the pods that must be evicted for the other members. Members are placed where the least harmful victims are. After 1, 3,
7, … such members the rest of the gang is planned on the free capacity. A plan after each member would cost too much: a
plan is more expensive than a search on a node. The answer has only the victims for the requested pod. The places of the
other members are reserved until kube-scheduler calls for these members.

Example: a gang has 5 members that request a GPU each. 1 GPU is free on n3. Pods of lower priority have 2 GPUs on n1 and
2 on n2. With 1 member on n1 in place of a victim, only 2 members fit, and with 3 such members only 4. The next step
allows 7: all 4 GPUs of n1 and n2 are cleared, and the fifth member gets the free GPU. So the gang is complete after 4
plans.

The search runs on a snapshot, without the lock. `GangPreemption` takes the snapshot, and after the search it checks
under the lock whether the result is still valid (docs/design/0032-snapshots.md).
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import placement
from cardwise.core.preemption.preemption import Victims
from extender.cache.cache import Cache
from extender.cache.clusterview import Changes, ClusterView, PodPlace
from extender.cache.nominated import NominatedPods
from extender.cache.nominations import MemberReservation, NominatedPlace
from extender.cache.pacing import PlanningStopped, stop_when
from extender.gangs.gangplaces import GangPlaces
from extender.gangs.gangplanner import GangPlanner, GangToPlan
from extender.gangs.gangs import Gangs
from extender.records.nodeinfo import PlacedPod
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef

_MAX_CARD_REQUESTS: Final = 512  # of all unplaced members: a plan for more takes longer than a call may
_Harm = tuple[int, bool, int, int]  # see `Victims.harm`


@dataclass(slots=True)
class _MemberVictims:
    """A member, its node, and the victims that are evicted for it there."""

    claimant: WaitingPod
    node: str
    victims: Victims


@dataclass(frozen=True, slots=True)
class _MemberPlace:
    """A member that has a node without evictions.

    assignment: None if the member requests no cards.
    """

    claimant: WaitingPod
    node: str
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class GangVictims:
    """Nodes and cards for all members that had none.

    member_victims: the members for which pods are evicted; the requested pod comes first.
    search_order: the same members, in the order in which the search has chosen their victims.
    places: the places of the other members.
    """

    member_victims: tuple[_MemberVictims, ...]
    search_order: tuple[_MemberVictims, ...]
    places: tuple[_MemberPlace, ...]

    @property
    def reservations(self) -> tuple[MemberReservation, ...]:
        """The cards that stay reserved for all members except the requested pod until the victims are gone."""
        assignments = [
            *((placed.claimant, placed.node, placed.victims.assignment) for placed in self.member_victims[1:]),
            *((place.claimant, place.node, place.assignment) for place in self.places),
        ]
        return tuple(
            MemberReservation(claimant, node, assignment)
            for claimant, node, assignment in assignments
            if assignment is not None
        )

    @property
    def nodes(self) -> set[str]:
        """The nodes of all these members."""
        return {*(placed.node for placed in self.member_victims), *(place.node for place in self.places)}

    def count_members_with_victims(self, nodes: Collection[str]) -> int:
        """The number of members on these nodes for which pods are evicted."""
        return sum(placed.node in nodes for placed in self.member_victims)

    @property
    def victim_uids(self) -> set[str]:
        """The UIDs of all pods to evict."""
        return {uid for placed in self.member_victims for uid in placed.victims.uids}


@dataclass(frozen=True, slots=True)
class GangSearch:
    """The input of a search, besides the cluster.

    scheduler_victims: kube-scheduler's own victims, by node.
    own_eviction_nodes: nodes where the extender itself evicts. Its evictions exceed no PodDisruptionBudget, and spare
        the pods in `refused` (`NominatedPods.find_victims`).
    for_scheduler: whether kube-scheduler has called preempt for the pod. Then the pod must not be placed on
        `own_eviction_nodes`.
    is_over: returns whether the search must end.
    find_victims: finds the victims for the pod alone on one node of a snapshot.
    commit: called under the lock with victims that are valid at that moment. Returns whether the victims were
      committed.
    """

    claimant: WaitingPod
    policy: str
    scheduler_victims: Mapping[str, Collection[str]]
    own_eviction_nodes: Collection[str]
    refused: Collection[str]
    for_scheduler: bool
    is_over: Callable[[], bool]
    find_victims: Callable[[NominatedPods, str], Victims | None]
    commit: Callable[[GangVictims], bool]

    @property
    def nodes(self) -> set[str]:
        """All nodes where pods may be evicted."""
        return {*self.scheduler_victims, *self.own_eviction_nodes}


@dataclass(frozen=True, slots=True)
class GangSnapshot:
    """A pod's gang and the cluster, as they were at one moment.

    members: all members, by UID.
    missing: the members that are not in the plan yet.
    unplaced: the missing members that have no terminating victims.
    freed: `Capacity.freed_count` at that moment.
    """

    cluster: ClusterView
    gang: GangToPlan
    members: Mapping[str, Member]
    missing: Sequence[Member]
    unplaced: Sequence[Member]
    freed: int


class GangPreemption:
    """Takes snapshots of gangs, and checks the results of searches.

    Not thread-safe: the caller holds the lock of `State`.
    """

    def __init__(self, gangs: Gangs, places: GangPlaces, *, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._nominations = cache.nominations
        self._gangs = gangs
        self._places = places
        self._clock = clock

    def is_in_pending_gang(self, uid: str) -> bool:
        """Whether the pod is in a gang that does not run yet. Such a pod is placed only with its gang."""
        gang = self._gangs.gang_of(uid)
        return gang is None or not gang.ran

    def is_over_quota(self, uid: str) -> bool:
        """Whether the missing members of the pod's gang exceed the remaining quotas, whichever pods are evicted."""
        gang = self._gangs.gang_of(uid)
        if gang is None or gang.ran:
            return False
        headroom = self._cache.headroom(gang.namespace)
        return gangplan.exceed_quotas(self._cache.ledger, gang.missing_in_plan(), headroom)

    def unplaced_uids(self, uid: str) -> list[str]:
        """The UIDs of all members of the pod's gang that still need a place and have no terminating victims."""
        return [member.uid for member in self._unplaced_members(uid)]

    def take_snapshot(self, uid: str, cluster: ClusterView) -> GangSnapshot | None:
        """The pod's gang, if the pod is an unplaced member and the gang can be planned; else None.

        cluster: a snapshot that was taken since the caller took the lock.

        A pod with reserved cards is unplaced as well: the caller has found that waiting for these cards is not enough.
        """
        gang, unplaced = self._gangs.gang_of(uid), self._unplaced_members(uid, including=uid)
        if gang is None or all(member.uid != uid for member in unplaced):
            return None
        return GangSnapshot(
            cluster,
            self._places.make_gang_to_plan(gang, self._clock.now()),
            members=dict(gang.members),
            missing=gang.missing_in_plan(),
            unplaced=unplaced,
            freed=self._freed_count(),
        )

    def is_capacity_freed(self, snapshot: GangSnapshot) -> bool:
        """Whether capacity may have been freed since the snapshot. Then the gang may fit without further evictions."""
        return self._freed_count() != snapshot.freed

    def changed_nodes(self, snapshot: GangSnapshot, claimant: WaitingPod, nodes: Iterable[str]) -> list[str]:
        """The given nodes on which the victims for the pod may have changed since the snapshot."""
        return list(filter(Changes(self._cache, snapshot.cluster, claimant).may_concern, nodes))

    def has_members_changed(self, snapshot: GangSnapshot, claimant: WaitingPod) -> bool:
        """Whether the unplaced members, or the reservation for the pod, have changed since the snapshot."""
        nomination_then = snapshot.cluster.moment.nominations.get(claimant.uid)
        nomination = self._nominations.get(claimant.uid)
        if nomination is None or nomination_then is None:
            is_same = nomination is nomination_then
        else:
            is_same = nomination.reserves_as(nomination_then)
        return not is_same or self._unplaced_members(claimant.uid, including=claimant.uid) != snapshot.unplaced

    def nodes_to_check(self, snapshot: GangSnapshot, gang_victims: GangVictims) -> set[str]:
        """The nodes of the gang on which something has changed since the snapshot."""
        changes = Changes(self._cache, snapshot.cluster, gang_victims.member_victims[0].claimant)
        return set(filter(changes.has_node_changed, gang_victims.nodes))

    def _unplaced_members(self, uid: str, including: str = "") -> list[Member]:
        """The members whose UIDs `unplaced_uids` returns; none if the gang cannot be planned now.

        including: a member for which victims may terminate.
        """
        gang = self._gangs.gang_of(uid)
        if gang is None or gang.ran or gang.refusal(self._clock.now()) is not None:
            return []
        return [
            member
            for member in gang.missing_in_plan()
            if member.uid == including or not self._nominations.nominated_node(member.uid)
        ]

    def _freed_count(self) -> int:
        return self._cache.capacity.freed_count + self._cache.loads.freed_count


class GangVictimSearch:
    """Searches victims for a gang on a snapshot. Changes the snapshot: reserves the chosen places there.

    nominated: the nominated pods on the snapshot.
    planner: plans gangs on the snapshot.
    victims_by_node: the victims for the requested pod alone, by node.
    """

    def __init__(
        self,
        search: GangSearch,
        snapshot: GangSnapshot,
        victims_by_node: Mapping[str, Victims],
        *,
        nominated: NominatedPods,
        planner: GangPlanner,
        clock: Clock,
    ) -> None:
        self._search = search
        self._snapshot = snapshot
        self._ledger, self._loads = snapshot.cluster.ledger, snapshot.cluster.loads
        self._nominations = snapshot.cluster.nominations
        self._nominated = nominated
        self._planner = planner
        self._clock = clock
        self._victims_by_node = dict(victims_by_node)
        shape, uid = snapshot.members[search.claimant.uid].shape, search.claimant.uid
        # The members of the pod's shape that are not placed yet.
        self._same_shape = [
            self._make_claimant(member) for member in snapshot.unplaced if member.shape == shape and member.uid != uid
        ]
        self._queue = [(victims.harm, node) for node, victims in victims_by_node.items()]  # the least harm first
        heapq.heapify(self._queue)
        self._nominations.remove(search.claimant.uid)  # what is reserved for the pod already does not count
        self._claimant_victims: _MemberVictims | None = None
        self._member_victims: list[_MemberVictims] = []
        self._next_victims: dict[str, Victims] = {}  # the victims for one more member, by node

    def must_only_wait(self) -> bool:
        """Whether the whole gang fits without further evictions."""
        return (
            self._count_capacities()
            and self._find_places(self._snapshot.unplaced, self._nodes_without_evictions()) is not None
        )

    def suffices_without_last(self, gang_victims: GangVictims) -> bool:
        """Whether the gang is complete on this snapshot even if the last of the members with victims gets no victims.

        These members have the same shape. So if the result is False, all these victims are needed.
        """
        *earlier, _ = (placed for placed in gang_victims.search_order if placed.victims.uids)
        for placed in earlier:
            self._place_member(placed)
        return self._count_capacities() and self._place_others() is not None

    def find_victims(self) -> GangVictims | None:
        """The victims; None if the gang only has to wait, if it would remain incomplete, or if the search is over."""
        if gangplan.count_card_requests(self._snapshot.unplaced) > _MAX_CARD_REQUESTS or self.must_only_wait():
            return None
        count = 1
        while True:
            self._choose_victims(count)
            if self._claimant_victims is None:
                return None
            places = self._place_others()
            if places is not None:
                return self._make_gang_victims(self._claimant_victims, places)
            if not (self._queue and self._same_shape) or self._search.is_over():
                return None
            count = 2 * count + 1  # a plan costs more than a search on a node

    def still_holds(self, gang_victims: GangVictims, changed_nodes: Collection[str]) -> bool:
        """Whether the result of another search is also valid on this snapshot. Reserves the result in the snapshot.

        changed_nodes: where the snapshots may differ. On these nodes the search is repeated and must find the same
            victims. The nodes and cards that are planned for the other members must still be free.
        """
        without_place = {member.uid for member in self._snapshot.unplaced}
        for node in changed_nodes:
            self._victims_by_node.pop(node, None)
        for placed in gang_victims.search_order:
            if placed.node in changed_nodes and not self._are_victims_same(placed, without_place):
                return False
            without_place.discard(placed.claimant.uid)
            self._place_member(placed)
        if self._exceeds_quota(gang_victims.places):
            return False
        places = [place for place in gang_victims.places if place.node in changed_nodes]
        return not places or self._are_places_free(places, without_place)

    def _count_capacities(self) -> bool:
        """Compute the capacities that a plan of all members reads. Returns False if the time of the search ends before
        all are computed.
        """
        try:
            self._planner.count_capacities(self._snapshot.unplaced, stop_when(self._search.is_over))
        except PlanningStopped:
            return False
        return True

    def _place_member(self, placed: _MemberVictims) -> None:
        """Place the member on its node in the snapshot, and treat its victims as gone from now on."""
        self._member_victims.append(placed)
        place = NominatedPlace(placed.victims.assignment, placed.victims.uids)
        self._nominations.set_places(placed.claimant, {placed.node: place}, self._clock.now())

    def _are_victims_same(self, placed: _MemberVictims, excluded: Collection[str]) -> bool:
        """Whether the member still needs exactly these victims, and all of them still run."""
        running_uids = {pod.uid for _, pod in self._loads.pods_on(placed.node) if not pod.terminating}
        if not running_uids.issuperset(placed.victims.uids):
            return False
        is_first = all(other.node != placed.node for other in self._member_victims)
        victims = self._find_victims_on(placed.node, placed.claimant, excluded, first=is_first)
        return (
            victims is not None
            and victims.violations <= placed.victims.violations
            and set(victims.uids) == set(placed.victims.uids)
            and victims.assignment == placed.victims.assignment
        )

    def _are_places_free(self, places: Sequence[_MemberPlace], excluded: Collection[str]) -> bool:
        """Whether all these members fit on their nodes once all victims are gone."""
        nodes = {place.node for place in places}
        pod_places = [
            PodPlace(
                place.claimant.ref,
                place.claimant.request,
                place.claimant.load,
                node=place.node,
                assignment=place.assignment,
            )
            for place in places
        ]
        gang, gang_cards = self._snapshot.gang, self._snapshot.cluster.gang_cards
        with (
            self._after_evictions(excluded, nodes, only=nodes),
            gang_cards.count_reserved(nodes.intersection(gang_cards.reserved_nodes(gang.rank, gang.namespace))),
        ):
            if any(map(self._loads.is_unavailable, nodes)):
                return False
            return self._snapshot.cluster.has_free_load_for(pod_places) and self._snapshot.cluster.has_cards_for(
                pod_places
            )

    def _place_others(self) -> list[_MemberPlace] | None:
        """The places, without evictions, for all members that are not placed yet.

        None if a member has no such place, or if all places together exceed the quotas.
        """
        placed_uids = {placed.claimant.uid for placed in self._member_victims}
        others = [member for member in self._snapshot.unplaced if member.uid not in placed_uids]
        nodes = {*self._nodes_without_evictions(), *(placed.node for placed in self._member_victims)}
        places = self._find_places(others, nodes) if others else []
        return None if places is None or self._exceeds_quota(places) else places

    def _make_gang_victims(self, first: _MemberVictims, places: Iterable[_MemberPlace]) -> GangVictims:
        others = [placed for placed in self._member_victims if placed is not first]
        return GangVictims((first, *others), tuple(self._member_victims), tuple(places))

    def _exceeds_quota(self, places: Iterable[_MemberPlace]) -> bool:
        """Whether the members' shares together exceed the quotas of the gang's namespace.

        These are: the shares on the chosen victims' cards, the shares of `places`, and the reservations for other
        members. The ledger's used amounts do not include reservations for nominated pods
        (`NominatedPods.reservations_on`).
        """
        headroom = self._snapshot.cluster.headroom(self._snapshot.gang.namespace)
        if not headroom:
            return False
        planned = [(placed.node, placed.victims.assignment) for placed in self._member_victims]
        planned += [(place.node, place.assignment) for place in places]
        chosen_uids = {placed.claimant.uid for placed in self._member_victims}
        for member in self._snapshot.missing:
            nomination = self._nominations.get(member.uid)
            node = self._nominations.nominated_node(member.uid)
            if nomination is not None and node and member.uid not in chosen_uids:
                planned.append((node, nomination.places[node].assignment))
        known_assignments = [(node, assignment) for node, assignment in planned if assignment is not None]
        return bool(placement.entries_exceeded_together(self._ledger, known_assignments, headroom))

    def _choose_victims(self, count: int) -> None:
        """Place members where the least harmful victims are, until `count` are placed or no node is left."""
        without_place = {member.uid for member in self._snapshot.unplaced}
        without_place -= {placed.claimant.uid for placed in self._member_victims}
        used_nodes = {placed.node for placed in self._member_victims}
        while (entry := self._next_node(count)) is not None:
            harm, node = entry
            victims = self._next_victims.pop(node, None)
            if victims is None:
                if self._search.is_over():
                    return
                claimant = self._search.claimant if self._claimant_victims is None else self._same_shape[0]
                victims = self._find_victims_on(node, claimant, without_place, first=node not in used_nodes)
                if victims is not None:
                    self._next_victims[node] = victims
                    heapq.heappush(self._queue, (victims.harm, node))
                continue
            if victims.uids and self._claimant_victims is None:
                placed = self._claimant_victims = _MemberVictims(self._search.claimant, node, victims)
            elif self._same_shape:
                placed = _MemberVictims(self._same_shape.pop(0), node, victims)
            else:
                return
            used_nodes.add(node)
            without_place.discard(placed.claimant.uid)
            self._place_member(placed)
            heapq.heappush(self._queue, (harm, node))

    def _next_node(self, count: int) -> tuple[_Harm, str] | None:
        """Take the node for the next member out of the queue; None if `count` members are placed, or no node is
        left.
        """
        queue, own_nodes = self._queue, self._search.own_eviction_nodes
        if self._claimant_victims is None and self._search.for_scheduler and own_nodes:
            entry = min((queued for queued in queue if queued[1] not in own_nodes), default=None)
            if entry is not None:
                queue.remove(entry)
                heapq.heapify(queue)
            return entry
        if queue and (self._claimant_victims is None or (self._same_shape and len(self._member_victims) < count)):
            return heapq.heappop(queue)
        return None

    def _find_victims_on(
        self, node: str, claimant: WaitingPod, excluded: Collection[str], *, first: bool
    ) -> Victims | None:
        """The victims on the node; None if no eviction helps.

        excluded: members for which no pods are evicted.
        first: whether no member has been placed on the node yet.
        """
        search = self._search
        refused = search.refused if node in search.own_eviction_nodes else None
        if first and claimant is not search.claimant:
            # Victims for another member are chosen when kube-scheduler tries it. It is cheap to find out whether these
            # suffice.
            known_victims = self._victims_by_node.get(node)
            more_victims = known_victims and self._nominated.find_victims(
                claimant, search.policy, node, excluded=excluded, removed=known_victims.uids, refused=refused
            )
            if known_victims is not None and more_victims is not None and not more_victims.uids:
                return replace(known_victims, assignment=more_victims.assignment)
        scheduler_victims = search.scheduler_victims.get(node, ()) if first else ()
        victims = self._nominated.find_victims(
            claimant, search.policy, node, scheduler_victims, excluded=excluded, refused=refused
        )
        if victims is not None and victims.violations and refused is not None:
            victims = None
        if victims is None and first:
            self._victims_by_node.pop(node, None)
        elif victims is not None and first:
            self._victims_by_node[node] = victims
        return victims

    def _nodes_without_evictions(self) -> set[str]:
        """The nodes where the pod alone only has to wait."""
        return {node for node, victims in self._victims_by_node.items() if not victims.uids}

    def _find_places(self, members: Sequence[Member], nodes: Collection[str]) -> list[_MemberPlace] | None:
        """For each of these members, the node and the cards that it gets once all victims are gone; None if not all
        fit.

        nodes: further nodes that may be used, in addition to the nodes that kube-scheduler has offered.
        """
        shape = self._snapshot.members[self._search.claimant.uid].shape
        with self._after_evictions({member.uid for member in members}, nodes):
            planned = self._planner.simulate_plan(self._gang_on_open_nodes, members, shape=shape, more_nodes=nodes)
        if planned is None:
            return None
        return [
            _MemberPlace(self._make_claimant(member), planned.nodes[member.uid], planned.assignments.get(member.uid))
            for member in members
        ]

    @cached_property
    def _gang_on_open_nodes(self) -> GangToPlan:
        """The gang without the offers of nodes that have closed since kube-scheduler offered them."""
        gang = self._snapshot.gang
        # Many shapes have the same offer, as one object.
        distinct_offers = {id(offer): offer for offer in gang.offers.values()}
        offered = set[str]()
        for offer in distinct_offers.values():
            offered |= offer
        closed = set(filter(self._loads.is_unavailable, offered))
        if not closed:
            return gang
        open_offers = {key: offer - closed for key, offer in distinct_offers.items()}
        return gang._replace(offers={shape: open_offers[id(offer)] for shape, offer in gang.offers.items()})

    @contextmanager
    def _after_evictions(
        self, excluded: Collection[str], nodes: Iterable[str], *, only: Collection[str] | None = None
    ) -> Iterator[None]:
        """Context manager: inside, all victims are gone, and the pods for which they are evicted are placed.

        nodes: the nodes where terminating pods are gone as well.
        only: the nodes that the caller reads; other nodes may stay unchanged. None: all nodes. Takes 0.1 ms for each
            nominated pod on these nodes.
        """
        priority = self._search.claimant.request.priority
        victims = self._nominations.victim_nodes_by_uid()
        leaving = {uid: node for uid, node in victims.items() if only is None or node in only}
        leaving_keys: list[str] = []
        for node in {*nodes, *leaving.values()}:
            for key, placed in self._loads.pods_on(node):
                if placed.terminating or placed.uid in leaving:
                    leaving[placed.uid] = node
                    leaving_keys.append(key)
        coming = [
            PlacedPod(node, claimant.load)
            for claimant, node, _ in self._nominations.reserved_places(excluded, priority)
            if (only is None or node in only) and self._loads.get(claimant.uid) is None
        ]
        with (
            self._nominated.count_reserved(excluded, priority, only),
            self._ledger.what_if(released=leaving),
            self._loads.what_if(removed=leaving_keys, added=coming),
        ):
            yield

    def _make_claimant(self, member: Member) -> WaitingPod:
        request = member.request or PodRequest(containers=(), priority=member.priority)
        pod = PodRef(member.uid, self._snapshot.gang.namespace, member.name)
        return WaitingPod(pod, request, member.load, rank=self._snapshot.gang.rank)
