"""Chooses the cards to reserve for a gang: the cards that need the least memory freed for all members.

Theory of operation. The search plans the gang on a copy of the cluster that has only some of the cards. In the copy
only the gang itself holds shares of these cards. The cpu and memory of all other pods on these cards are free. Cards
are added in order, the cards with the least memory in use first, until the gang fits. So the copy has few cards that
the gang does not need. Cards on which nothing was freed for long (`GangWithOffers.given_up`) come last. Cards that
the gang can never use are left out. They are too small, of another class, unhealthy, or cordoned, or kube-scheduler
    does not offer their nodes.

Example: two members request 40 GiB each. A node has four cards of 64 GiB with 10, 50, 30 and 60 GiB in use. With card
0, the copy has capacity for 1 member. With card 2, the next in order, the copy has capacity for both members. The gang
is planned on cards 0 and 2, and 6 GiB must be freed on card 2. If card 2 was given up, card 1 comes first. Then the
gang is planned on cards 0 and 1, and 26 GiB must be freed.

The search runs on a snapshot, without the lock. The cluster may change meanwhile. So the result is good enough for a
reservation, but must not be used as a plan.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import Capacities, MemberShape, ShapeCapacity, group_by_shape
from cardwise.core.gangs.gangplan import Pace, PlanConstraints, Planned, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import fitting
from cardwise.core.placement.nodestate import NodeState
from extender.cache.clusterview import ClusterView
from extender.cache.nodeload import NodeLoads

# While the copy has too few cards, their number grows by a factor of 1 + 1/_GROWTH_DIVISOR; after a failed plan it
# doubles.
_GROWTH_DIVISOR: Final = 8
_NODES_BETWEEN_PACES: Final = 64  # nodes that are read between two calls of `pace`

# An entry of the search: how often its cards were given up, the MiB in use on them, their node, and their positions
# there. The copy gets the smallest entries first.
_Entry = tuple[int, int, str, tuple[int, ...]]


def no_place_text(member: Member) -> str:
    """The text that names the member for which a plan failed."""
    return f"no node has capacity for {member.name} in addition to the other members"


class GangWithOffers(NamedTuple):
    """A gang for which cards are searched, as it was when the snapshot was taken.

    members: the members that are missing.
    uids: the UIDs of all members.
    offers: the nodes that kube-scheduler has offered, by shape.
    given_up: how often each card was given up, because nothing was freed on the card for long.
    """

    namespace: str
    members: Sequence[Member]
    uids: Collection[str]
    offers: Mapping[str, Collection[str]]
    given_up: Mapping[str, int]


class CardsFound(NamedTuple):
    """The result of a search.

    problem: why the gang could not run even if all pods that hold its cards ended; "" if it could run then.
    """

    outcome: Planned | Unplanned
    problem: str


def search_cards(snapshot: ClusterView, gang: GangWithOffers, policy: str, pace: Pace) -> CardsFound:
    """The plan of the gang on the cards that need the least memory freed.

    policy: the placement policy of pods that name none.
    pace: called in all loops.
    """
    search = _CardSearch(snapshot, gang, pace)
    outcome = search.find_plan(policy)
    return CardsFound(outcome, search.problem_text(outcome) if isinstance(outcome, Unplanned) else "")


class _CardSearch:
    """The copy of the cluster with some of its cards, in which one gang is planned."""

    def __init__(self, snapshot: ClusterView, gang: GangWithOffers, pace: Pace) -> None:
        self._gang = gang
        self._snapshot = snapshot
        self._ledger = snapshot.ledger
        self._pace = pace
        self._copy = snapshot.ledger.empty_copy()
        self._free = _FreeLoadsWithoutPods(snapshot.loads)
        self._capacities = Capacities(self._copy, self._free)
        allowed = snapshot.ledger.kinds.allowed
        shaped = {member.shape: member.request for member in gang.members if member.request is not None}
        self._shapes = list(shaped)
        self._card_requests = [
            (card_request, allowed(card_request.resource_class))
            for request in shaped.values()
            for card_request in fitting.card_requests(request)
        ]
        # A member with a device needs cards and devices of the same node. So a node is added with all its cards.
        self._by_node = any(request.devices for request in shaped.values())
        self._added: dict[str, set[int]] = {}  # positions of the cards that the copy has, by node
        self._closed = False  # whether suitable cards or nodes are cordoned or unhealthy
        self._by_quota = False  # whether quotas may be the reason why the last plan failed

    def problem_text(self, planned: Unplanned) -> str:
        """Why the gang could not run even if all pods that hold its cards ended."""
        if self._by_quota:
            condition = "within the GPUQuotas of its namespace, even if pods of other namespaces end"
        elif self._closed:
            condition = "while suitable GPUs or nodes are cordoned or unhealthy, even if all other pods end"
        else:
            condition = "even if all other pods end"
        return f"the gang cannot run {condition}: {no_place_text(planned.member)}"

    def find_plan(self, policy: str) -> Planned | Unplanned:
        """The plan, or the member that does not fit even on all cards."""
        entries, count, due = self._read_entries(), 0, 1
        while True:
            for entry in entries[count : count + due]:
                self._pace()
                self._add_entry(entry)
            is_complete, count = count + due > len(entries), min(count + due, len(entries))
            short = self._find_unplaceable_member()
            if short is not None and is_complete:
                return Unplanned(member=short)
            if short is not None:
                due = max(1, count // _GROWTH_DIVISOR)
                continue
            planned = self._plan(policy)
            if isinstance(planned, Planned) or is_complete:
                return planned
            due = max(1, count)

    def _read_entries(self) -> list[_Entry]:
        """The useful cards of the cluster, in order."""
        entries: list[_Entry] = []
        for i, name in enumerate(sorted(self._ledger.nodes_by_name())):
            if i % _NODES_BETWEEN_PACES == 0:
                self._pace()
            state = self._ledger.node(name)
            if state is not None and self._is_offered(name):
                entries += self._entries_of(state)
        return sorted(entries)

    def _is_offered(self, node: str) -> bool:
        """Whether kube-scheduler offers the node for a member, and the node takes pods."""
        if not any(node in self._gang.offers.get(shape, (node,)) for shape in self._shapes):
            return False
        is_open = self._snapshot.loads.is_open(node)
        self._closed |= not is_open
        return is_open

    def _entries_of(self, state: NodeState) -> list[_Entry]:
        useful = [i for i in range(len(state.cards)) if self._is_useful(state, i)]
        if self._by_node:
            given_up = sum(self._given_up_count(state, i) for i in useful)
            in_use = sum(state.used[i] for i in useful) + len(state.device_holds)
            return [(given_up, in_use, state.name, tuple(useful))]
        return [(self._given_up_count(state, i), state.used[i], state.name, (i,)) for i in useful]

    def _given_up_count(self, state: NodeState, i: int) -> int:
        return self._gang.given_up.get(state.cards[i].uuid, 0) if state.used[i] else 0

    def _is_useful(self, state: NodeState, i: int) -> bool:
        """Whether a member could have the card, or a part of it, if the card were empty."""
        card = state.cards[i]
        kind, size = state.kinds[i], state.usable[i]
        would_do = any(
            size >= card_request.mem and (allowed is None or kind in allowed)
            for card_request, allowed in self._card_requests
        )
        self._closed |= would_do and not card.accepts_shares
        return would_do and card.accepts_shares

    def _add_entry(self, entry: _Entry) -> None:
        _, _, name, positions = entry
        state = self._ledger.node(name)
        if state is None:
            return
        known = self._added.setdefault(name, set())
        first = not known
        known.update(i for i in positions if i < len(state.cards))
        cards = [state.cards[i] for i in sorted(known) if i < len(state.cards)]
        uuids = {card.uuid for card in cards}
        if first:
            self._copy.set_other_devices(name, state.devices)
        self._copy.set_cards(name, cards)
        for holding in self._ledger.holdings(name):
            if holding.uid in self._gang.uids:
                self._copy.set_holding(holding)
            elif holding.node == name and (
                self._by_node or any(share.uuid in uuids for share in holding.assignment.shares())
            ):
                self._free.remove_pod(name, holding.uid)

    def _find_unplaceable_member(self) -> Member | None:
        """A member of a shape for which the copied nodes have too little capacity; None if all shapes fit."""
        for shape, members in group_by_shape(self._gang.members).items():
            if self._capacities.count_fitting_pods(shape, self._pace) < len(members):
                return members[-1]
        return None

    def _plan(self, policy: str) -> Planned | Unplanned:
        """A plan on the cards of the copy."""
        headroom = self._snapshot.headroom(self._gang.namespace)
        self._by_quota = bool(headroom)
        constraints = PlanConstraints(policy=policy, headroom=headroom, offers=self._gang.offers, vacant=self._vacant)
        return gangplan.plan(self._copy, self._free, self._gang.members, constraints, self._pace)

    def _vacant(self, request: PodRequest, load: Load) -> ShapeCapacity:
        shape = MemberShape(request, load)
        self._capacities.count_fitting_pods(shape)
        return self._capacities.shape_capacity(shape)


class _FreeLoadsWithoutPods:
    """The free cpu and memory of nodes as they would be without some of their pods."""

    generation = 0

    def __init__(self, loads: NodeLoads) -> None:
        self._loads = loads
        self._removed: set[str] = set()
        self._returned: dict[str, Load] = {}

    def remove_pod(self, node: str, uid: str) -> None:
        """Treat the pod as gone from the node: its load is free."""
        if uid not in self._removed:
            self._removed.add(uid)
            self._returned[node] = self._returned.get(node, Load(0, 0, 0)).add(self._loads.load_of(uid))

    def free_load(self, node: str) -> Load | None:
        free, returned = self._loads.free_load(node), self._returned.get(node)
        return free if free is None or returned is None else free.add(returned)

    def open_nodes(self) -> Collection[str]:
        return self._loads.open_nodes()

    def known_nodes(self) -> Collection[str]:
        return self._loads.known_nodes()

    def nodes_changed_since(self, generation: int) -> Collection[str]:
        del generation  # unused: a node changes only when its cards are added to the copy, which recounts the node
        return ()
