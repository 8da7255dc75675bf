"""The search for the cards to reserve for a gang: the cards on which least memory must be freed for all its members.

The search plans the gang on a copy of the cluster that has only some of the cards. In the copy only the gang itself
holds shares of these cards, and the cpu and memory of the other pods on these cards count as free. Cards are added in
order, the cards with the least memory in use first, until the gang fits. So the copy has few cards that the gang does
not need. Cards that the gang can never use are left out: too small, of another class, unhealthy, cordoned, or on nodes
that kube-scheduler does not offer.

In a big cluster the search takes many turns, since filter waits for the state's lock. The cluster may change between
the turns. So the result is good enough for a reservation, but must not be used as a plan. Not thread-safe.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import merge
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import Capacities, MemberShape, ShapeCapacity, shapes
from cardwise.core.gangs.gangplan import Draft, Planned, Terms, TurnOver, Unplanned
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement import fitting
from cardwise.core.placement.nodestate import NodeState
from extender.cache.cache import Cache
from extender.cache.nodeload import NodeLoads
from extender.cache.yielding import TURN_SECONDS

# While the copy has too few cards, their number grows by a factor of 1 + 1/_SLOWLY; after a failed plan it doubles.
_SLOWLY: Final = 8
_INDEXED: Final = 64  # nodes that are indexed between two checks of the time

# An entry of the search: how often its cards were given up, the MiB in use on them, their node, and their positions
# there. The copy gets the smallest entries first.
_Entry = tuple[int, int, str, tuple[int, ...]]


def no_place_text(member: Member) -> str:
    """The text that says for which member a plan failed."""
    return f"no node has capacity for {member.name} beside the other members"


class CardSearch:
    """The search for the cards of one gang: for the members that are missing when the search begins.

    offers: the nodes that kube-scheduler has offered, by shape.
    given_up: how often each card was given up, because nothing was freed on the card for long.
    """

    def __init__(
        self,
        gang: Gang,
        offers: Mapping[str, Collection[str]],
        given_up: Mapping[str, int],
        cache: Cache,
        clock: Clock,
    ) -> None:
        self.key = gang.key
        self.changes = gang.changes
        self.wanted: Sequence[Member] = gang.members_to_plan()
        self._gang = gang
        self._offers = offers
        self._given_up = dict(given_up)
        self._cache = cache
        self._ledger = cache.ledger
        self._clock = clock
        self._copy = cache.ledger.empty_copy()
        self._free = _Freed(cache.loads)
        self._capacities = Capacities(self._copy, self._free)
        allowed = cache.ledger.kinds.allowed
        shaped = {member.shape: member.request for member in self.wanted if member.request is not None}
        self._shapes = list(shaped)
        self._card_requests = [
            (card_request, allowed(card_request.resource_class))
            for request in shaped.values()
            for card_request in fitting.card_requests(request)
        ]
        # A member with a device needs cards and devices of the same node. So a node is added with all its cards.
        self._by_node = any(request.devices for request in shaped.values())
        self._unread = sorted(cache.ledger.nodes_by_name(), reverse=True)
        self._read: list[list[_Entry]] = []  # the entries that were read, in parts that are sorted
        self._entries: Iterator[_Entry] | None = None  # the entries that the copy does not have yet, in order
        self._exhausted = False
        self._added: dict[str, set[int]] = {}  # positions of the cards that the copy has, by node
        self._count = 0  # the number of entries that were added to the copy
        self._due = 1  # the number of entries to add before the gang is planned
        self._draft: Draft | None = None  # the draft of a plan that takes several turns
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

    @property
    def is_half_planned(self) -> bool:
        """Whether the last turn has ended before its plan was complete."""
        return self._draft is not None

    def continue_search(self, policy: str) -> Planned | Unplanned | None:
        """Do one turn of the search.

        Returns the plan, or the member that has no place even on all cards. None: the next call continues.
        """
        until = self._clock.cpu() + TURN_SECONDS
        if not self._read_some(until):
            return None
        while True:
            if self._draft is None:
                if not self._add_due(until):
                    return None
                short, known = self._find_lacking_member(until)
                if not known:
                    return None
                if short is not None and self._exhausted:
                    return Unplanned(member=short)
                if short is not None:
                    self._due = max(1, self._count // _SLOWLY)
                    continue
                if not self._update_index(until):
                    return None
            planned = self._plan(policy)
            if planned is None or isinstance(planned, Planned) or self._exhausted:
                return planned
            self._due = max(1, self._count)
            if self._clock.cpu() >= until:
                return None

    def _read_some(self, until: float) -> bool:
        """Read the cards of the cluster until the turn is over. Returns whether all cards are read."""
        part: list[_Entry] = []
        while self._unread:
            state = self._ledger.node(self._unread.pop())
            if state is not None and self._is_offered(state.name):
                part += self._entries_of(state)
            if self._clock.cpu() >= until - TURN_SECONDS / 4:  # the remaining time is for sorting
                break
        if part:
            self._read.append(sorted(part))
        if self._unread:
            return False
        if self._entries is None:
            self._entries = merge(*self._read)
            self._read = []
        return True

    def _is_offered(self, node: str) -> bool:
        """Whether kube-scheduler offers the node for a member, and the node takes pods."""
        if not any(node in self._offers.get(shape, (node,)) for shape in self._shapes):
            return False
        is_open = self._cache.loads.is_open(node)
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
        return self._given_up.get(state.cards[i].uuid, 0) if state.used[i] else 0

    def _is_useful(self, state: NodeState, i: int) -> bool:
        """Whether a member could have the card, or a part of it, if the card were empty."""
        card = state.cards[i]
        kind, size = state.kinds[i], card.mem - state.kept_back
        would_do = any(
            size >= card_request.mem and (allowed is None or kind in allowed)
            for card_request, allowed in self._card_requests
        )
        self._closed |= would_do and not card.accepts_shares
        return would_do and card.accepts_shares

    def _add_due(self, until: float) -> bool:
        """Add the next `_due` entries to the copy. Returns whether all these were added, or no entries are left."""
        while self._due and self._entries is not None:
            entry = next(self._entries, None)
            if entry is None:
                self._exhausted = True
                return True
            self._add_entry(entry)
            self._due -= 1
            self._count += 1
            if self._clock.cpu() >= until:
                break
        return not self._due

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
            self._copy.set_devices(name, state.devices)
        self._copy.set_cards(name, cards)
        for holding in self._ledger.holdings(name):
            if holding.uid in self._gang.members:
                self._copy.set_holding(holding)
            elif holding.node == name and (
                self._by_node or any(share.uuid in uuids for share in holding.assignment.shares())
            ):
                self._free.give_back(name, holding.uid)

    def _find_lacking_member(self, until: float) -> tuple[Member | None, bool]:
        """A member for whose shape the copy has too little capacity, None if there is none; and whether the capacity of
        the whole copy was counted.
        """
        for shape, members in shapes(self.wanted).items():
            capacity, known = self._capacities.count_pods(shape)
            while not known and self._clock.cpu() < until:
                capacity, known = self._capacities.count_pods(shape)
            if not known:
                return None, False
            if capacity < len(members):
                return members[-1], True
        return None, True

    def _update_index(self, until: float) -> bool:
        """Update the copy's index of cards for the plan. Returns whether all nodes are indexed."""
        while self._copy.index_some(_INDEXED):
            if self._clock.cpu() >= until:
                return False
        return True

    def _plan(self, policy: str) -> Planned | Unplanned | None:
        """A plan on the cards of the copy; None: the next turn continues it."""
        draft, self._draft = self._draft or Draft(self._clock.cpu, TURN_SECONDS), None
        draft.begin()
        headroom = self._cache.headroom(self._gang.namespace)
        self._by_quota = bool(headroom)
        terms = Terms(
            policy=policy,
            headroom=headroom,
            offers=self._offers,
            vacant=self._vacant,
            draft=draft,
        )
        try:
            return gangplan.plan(self._copy, self._free, self.wanted, terms)
        except TurnOver:
            self._draft = draft
            return None

    def _vacant(self, request: PodRequest, load: Load) -> ShapeCapacity | None:
        shape = MemberShape(request, load)
        return self._capacities.nodes(shape) if self._capacities.count_pods(shape)[1] else None


class _Freed:
    """The free cpu and memory of nodes, if some of their pods were gone."""

    def __init__(self, loads: NodeLoads) -> None:
        self._loads = loads
        self._removed: set[str] = set()
        self._returned: dict[str, Load] = {}

    def give_back(self, node: str, uid: str) -> None:
        """Count the pod as gone from the node."""
        if uid not in self._removed:
            self._removed.add(uid)
            self._returned[node] = self._returned.get(node, Load(0, 0, 0)).add(self._loads.load_of(uid))

    def free_load(self, node: str) -> Load | None:
        free, returned = self._loads.free_load(node), self._returned.get(node)
        return free if free is None or returned is None else free.add(returned)

    def names(self) -> Collection[str]:
        return self._loads.names()

    def watch(self) -> set[str]:
        return set()  # a node changes only when the copy gets more of its cards, and is counted again then
