"""The placement engine: the best node for a request, and the cards that the request takes there.

The extender, the simulator, `explain` and the tests all use these functions.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cardwise.core.api import policies, quotas
from cardwise.core.api.assignment import Assignment, CardShare, CardUse
from cardwise.core.api.cards import card_code
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.policies import CardOrder
from cardwise.core.api.quotas import Charge, Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting, searching
from cardwise.core.placement.cardindex import USED_TAINT, CardIndex, IndexEntry
from cardwise.core.placement.cardtenants import EXCLUSIVE_TAINT
from cardwise.core.placement.devices import GrantedDevices, WantedDevices
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import ANY_CARD, UNKNOWN_KIND, CardKinds
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.mpstaints import CLOSABLE
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of a pod, its cards and devices there, and the score.

    score: by the policy; higher is better. Comparable only for the same request.
    """

    node: str
    assignment: Assignment
    score: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaceable:
    """The outcome when no node fits.

    refusals: by node, the reason.
    """

    refusals: dict[str, Refusal]


def place(
    ledger: Ledger,
    nodes: Collection[str],
    request: PodRequest,
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    limit: searching.CheckLimit | None = None,
) -> Placement | Unplaceable:
    """The placement on the best of the nodes under the policy; of nodes with equal scores, the first by name.

    headroom: the amounts that quotas leave to the pod's namespace; the placement never exceeds them.
    limit: limits the search; None: no limit. Raises SearchTooLong.
    """
    scorer = Scorer(ledger.kinds, request, policy, headroom, limit=limit)
    use_index = ledger.has_index and len(nodes) * _INDEX_NODES_DIVISOR > len(
        ledger.nodes_by_name()
    )  # few nodes are checked faster than the index is walked
    if use_index and scorer.indexed:
        nodes = nodes if isinstance(nodes, (set, frozenset, dict)) else _Names(nodes)
        node = scorer.best_node(ledger, nodes)
        if node is not None:
            return _expect_placement(scorer.place_on(node))
        return Unplaceable(refusals=scorer.refuse_all(ledger, nodes))
    candidate_nodes = scorer.with_cards(ledger, nodes) if use_index else nodes
    scores, refusals = scorer.score_all(ledger, candidate_nodes)
    if not scores:
        return Unplaceable(refusals=refusals if candidate_nodes is nodes else scorer.score_all(ledger, nodes).refusals)
    highest = max(scores.values())
    best = min(name for name, score in scores.items() if score == highest)
    return _expect_placement(scorer.place_on(ledger.node(best)))


def place_on(
    kinds: CardKinds, node: NodeState | None, request: PodRequest, policy: str, headroom: Sequence[Headroom] = ()
) -> Placement | Refusal:
    """The placement of the request on one node, or the refusal.

    kinds: the kinds of the node's ledger.
    """
    return Scorer(kinds, request, policy, headroom).place_on(node)


def charges_by_kind(ledger: Ledger, node_assignments: Iterable[tuple[str, Assignment]]) -> dict[int, Charge]:
    """The charges of the placements to quotas, by kind of cards (`Ledger.kind_of_share`).

    A gang has thousands of shares, but its cards have few kinds. So each entry of a quota reads this sum, not the
    shares.

    node_assignments: the node and the assignment of each pod.
    """
    uses_by_kind: dict[int, list[CardUse]] = {}
    for node, assignment in node_assignments:
        state = ledger.node(node)
        for use in assignment.card_uses():
            kind = state.kind_of_share(use) if state is not None else UNKNOWN_KIND
            uses_by_kind.setdefault(kind, []).append(use)
    return {kind: quotas.sum_charges(map(quotas.charge_of_use, uses)) for kind, uses in uses_by_kind.items()}


def entries_exceeded_by(
    kinds: CardKinds, charges: Mapping[int, Charge], headroom: Iterable[Headroom]
) -> list[quotas.QuotaEntry]:
    """The quota entries that further charges would exceed.

    kinds: the kinds of the ledger's cards.
    charges: by kind, as `charges_by_kind` returns them.
    """
    return [
        entry_headroom.entry
        for entry_headroom in headroom
        if not entry_headroom.has_room_for(kinds.covered_charge(charges, entry_headroom.entry))
    ]


def entries_exceeded_by_holdings(
    ledger: Ledger, holdings: Iterable[Holding], headroom: Sequence[Headroom]
) -> list[quotas.QuotaEntry]:
    """The quota entries that are exceeded in an amount that the holdings use.

    holdings: of pods of one namespace.
    headroom: what the namespace's quotas still allow now, while the ledger counts the holdings.
    """
    exceeded = [part for entry_headroom in headroom if (part := entry_headroom.exceeded_part()) is not None]
    if not exceeded:
        return []
    charges = charges_by_kind(ledger, ((holding.node, holding.assignment) for holding in holdings))
    return entries_exceeded_by(ledger.kinds, charges, exceeded)


def entries_exceeded_together(
    ledger: Ledger, node_assignments: Iterable[tuple[str, Assignment]], headroom: Sequence[Headroom]
) -> list[quotas.QuotaEntry]:
    """The quota entries that the placements of several pods of one namespace would exceed together.

    node_assignments: the node and the assignment of each pod.
    """
    return entries_exceeded_by(ledger.kinds, charges_by_kind(ledger, node_assignments), headroom)


# The reasons that are found for thousands of nodes in a few ms.
_QUICK_REFUSALS: Final = frozenset({Refusal.NO_MEMORY, Refusal.CARD_TOO_SMALL, Refusal.NOT_OURS})
_INDEX_NODES_DIVISOR: Final = 8  # the index is used only for more than 1 / _INDEX_NODES_DIVISOR of all nodes


class _Names(Collection[str]):
    """The names of the candidate nodes, from kube-scheduler. The first look-ups search the list; only after several
    look-ups a set is built.

    Usually one look-up is enough, because the best card is nearly always on a candidate. With 5,000 names, a look-up in
    the list takes 0.03 ms, and building the set 0.2 ms.
    """

    _MAX_LIST_LOOKUPS = 4  # look-ups in the list that together take less time than building the set

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._lookups = 0
        self._table: Collection[str] | None = None

    def __contains__(self, name: object) -> bool:
        if self._table is None:
            self._lookups += 1
            if self._lookups <= self._MAX_LIST_LOOKUPS:
                return name in self._names
            self._table = frozenset(self._names)
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_WALKS: Final[
    Mapping[CardOrder, Callable[[CardIndex, int, Collection[str], Collection[int] | None, int], Iterator[IndexEntry]]]
] = {CardOrder.FULLEST_FIRST: CardIndex.smallest, CardOrder.EMPTIEST_FIRST: CardIndex.largest}


class ScoredNodes(NamedTuple):
    """Nodes for a request.

    scores: by node where the request fits, the score.
    refusals: by each other node, the reason.
    """

    scores: dict[str, int]
    refusals: dict[str, Refusal]


class Scorer:
    """Scores nodes for one request without building the assignments, since filter needs a score of every node.

    A scorer is valid only until the ledger changes, so do not keep it.

    effort: the remaining effort of a search in progress; None for a new search.
    limit: limits the cards and nodes that `best_node`, `ranked_nodes`, `score_all` and `refuse_all` check; None: no
        limit. These methods raise SearchTooLong.
    """

    def __init__(
        self,
        kinds: CardKinds,
        request: PodRequest,
        policy: str,
        headroom: Sequence[Headroom] = (),
        effort: searching.SearchEffort | None = None,
        *,
        limit: searching.CheckLimit | None = None,
    ) -> None:
        self._kinds = kinds
        in_force = policies.find_policy(policy)
        self._pick_card = in_force.pick_card
        self._walk_index = _WALKS[in_force.card_order]
        self._request = request
        self._card_requests = fitting.card_requests(request)
        self._effort = effort or searching.SearchEffort()
        # Counts checks of cards before they are made (`CheckLimit.count`).
        self.count_checks: Callable[[int], None] = limit.count if limit is not None else _count_nothing
        self._headroom = headroom
        self._plan: fitting.SearchPlan | None = None
        # Devices are checked before cards, node by node: few nodes have them.
        self._devices = WantedDevices(request.devices) if request.devices else None
        first_request = self._card_requests[0] if self._card_requests else None
        self._is_one_card = first_request is not None and len(self._card_requests) == 1 and first_request.cards == 1
        # Whether the request is for one card, and needs neither SMs nor more than one share.
        self._is_memory_only = (
            first_request is not None and self._is_one_card and not first_request.core and len(first_request.keys) == 1
        )
        self._takes_whole_cards = first_request is not None and first_request.whole

    @property
    def devices(self) -> bool:
        """Whether the request has devices other than GPUs."""
        return self._devices is not None

    @property
    def indexed(self) -> bool:
        """Whether `best_node` and `ranked_nodes` can be used for the request."""
        return self._is_one_card and self._devices is None

    def best_node(self, ledger: Ledger, nodes: Collection[str]) -> NodeState | None:
        """The best of the nodes, looked up in the ledger's card index; None if the request fits on none of them."""
        return next(self.ranked_nodes(ledger, nodes), None)

    def ranked_nodes(self, ledger: Ledger, nodes: Collection[str]) -> Iterator[NodeState]:
        """The nodes where the request fits, the best first, looked up in the ledger's card index. The ledger must not
        change during the iteration.
        """
        plan = self._search_plan()
        card_request, levels, _ = plan.typed_requests[0]
        may_be_closed = self._may_be_closed(ledger)
        untolerated = (card_request.untolerated if may_be_closed else 0) | (USED_TAINT if card_request.whole else 0)
        if card_request.tenant.namespace not in ledger.exclusive_pods:
            untolerated |= EXCLUSIVE_TAINT  # all such cards are of other namespaces
        # Cards that a share without MPS would close come after all others of the level.
        avoided = card_request.avoided & CLOSABLE if may_be_closed else 0
        walks = [(kinds, mask) for _, kinds in levels for mask in ((avoided, 0) if avoided else (0,))]
        for kinds, mask in walks:
            for _, name, position, group in self._walk_index(
                ledger.index(), card_request.mem or 1, nodes, kinds, untolerated | mask
            ):
                if avoided and not mask and not group & avoided:
                    continue  # it was in the walk before
                node = ledger.node(name)
                if (
                    node is not None
                    and not (may_be_closed and fitting.is_avoided(node, position, card_request, kinds, plan.headroom))
                    and fitting.has_capacity(node, position, card_request)
                    and (not may_be_closed or fitting.admits(node, position, card_request))
                    and (
                        not plan.headroom
                        or fitting.headroom_after(plan.headroom, node, position, card_request) is not None
                    )
                ):
                    yield node
                else:
                    self.count_checks(1)

    def with_cards(self, ledger: Ledger, nodes: Collection[str]) -> Collection[str]:
        """For a request of whole cards only: the nodes with enough empty cards, looked up in the ledger's card index.
        In a full cluster only a few nodes have enough, and only these need to be scored. For other requests: all nodes.
        """
        if len(self._card_requests) != 1 or not self._takes_whole_cards:
            return nodes
        cards, counts = self._card_requests[0].cards, ledger.index().open_cards_by_node(USED_TAINT)
        return [name for name in nodes if counts.get(name, 0) >= cards]

    def is_exhausted_by_quotas(self) -> bool:
        """Whether quotas close all kinds of cards for at least one card request. Then no node can take the pod."""
        plan = self._search_plan()
        return any(
            all(kinds == frozenset() for _, kinds in typed_request.levels) for typed_request in plan.typed_requests
        )

    def score(self, node: NodeState | None) -> int | Refusal:
        """The node's score, or why it cannot take the request."""
        if self._devices is not None:
            return self._score_with(self._devices, node)
        if node is None:
            return Refusal.NOT_OURS
        return self._score(node, self._search_plan())

    def score_all(self, ledger: Ledger, nodes: Iterable[str]) -> ScoredNodes:
        """The score of each node where the request fits, and the refusal of each other node."""
        scores: dict[str, int] = {}
        refusals: dict[str, Refusal] = {}
        by_name, pick_card = ledger.nodes_by_name(), self._pick_card
        if self._devices is not None:
            for name in nodes:
                self.count_checks(searching.NODE_CHECKS)
                score = self._score_with(self._devices, by_name.get(name))
                if isinstance(score, Refusal):
                    refusals[name] = score
                else:
                    scores[name] = score
            return ScoredNodes(scores, refusals)
        plan = self._search_plan()
        card_request, levels, typed = plan.typed_requests[0]
        min_code, takes_whole_cards = card_code(card_request.mem), card_request.whole
        is_plain = self._is_memory_only and levels is ANY_CARD and not plan.headroom
        may_be_closed = self._may_be_closed(ledger)
        # For several whole cards: most nodes have too few empty cards, and are refused without a search.
        min_empty_cards = (
            card_request.cards if card_request.whole and len(plan.typed_requests) == 1 and plan.unlimited is None else 0
        )
        for name in nodes:
            node = by_name.get(name)
            if node is None:
                refusals[name] = Refusal.NOT_OURS
                continue
            if is_plain and not (
                may_be_closed
                and (node.mps.tainted & card_request.avoided or fitting.may_be_closed_to(node, card_request))
            ):
                # The same as `_score`, inlined: with thousands of nodes, each function call would add a twentieth.
                pick = pick_card(
                    node.codes_of_empty_cards() if takes_whole_cards else node.codes or node.codes_fullest_first(),
                    min_code,
                )
                if pick is not None:
                    scores[name] = pick[0]
                else:
                    refusals[name] = refusal = fitting.refusal_of_node(node, card_request)
                    if refusal not in _QUICK_REFUSALS:
                        self.count_checks(searching.NODE_CHECKS)
                continue
            self.count_checks(searching.NODE_CHECKS)
            if min_empty_cards and len(node.codes_of_empty_cards()) < min_empty_cards:
                refusals[name] = fitting.refusal_of_node(node, card_request, typed)
                continue
            score = self._score(node, plan)
            if isinstance(score, Refusal):
                refusals[name] = score
            else:
                scores[name] = score
        return ScoredNodes(scores, refusals)

    def refuse_all(self, ledger: Ledger, nodes: Iterable[str]) -> dict[str, Refusal]:
        """The refusal of each node. Call this only if `best_node` returned None."""
        plan = self._search_plan()
        card_request, _, typed = plan.typed_requests[0]
        is_limited, by_name = plan.unlimited is not None, ledger.nodes_by_name()

        def refusal_of(name: str) -> Refusal:
            node = by_name.get(name)
            if node is None:
                return Refusal.NOT_OURS
            self.count_checks(searching.NODE_CHECKS)
            if is_limited:
                return searching.refusal_reason(node, plan, plan.typed_requests[0], self._pick_card, self._effort)
            return fitting.refusal_of_node(node, card_request, typed)

        if is_limited or typed is not None or not fitting.is_refused_for_memory_first(card_request):
            return {name: refusal_of(name) for name in nodes}
        by_memory = ledger.memory_index()
        refusals = dict.fromkeys(nodes, Refusal.NO_MEMORY)
        for name in by_memory.nodes_too_small_for(card_request.mem):
            if name in refusals:
                refusals[name] = Refusal.CARD_TOO_SMALL
        # Nodes without cards, and nodes that have enough memory and are refused for another reason.
        for name in (*(refusals.keys() - by_memory.names()), *by_memory.nodes_with_free(card_request.mem)):
            if name in refusals:
                refusals[name] = refusal_of(name)
        return refusals

    def place_on(self, node: NodeState | None, effort: searching.SearchEffort | None = None) -> Placement | Refusal:
        """The cards and devices of the node, or the refusal.

        effort: the effort that this and other calls share; None for an effort of this call only.
        """
        if node is None:
            return Refusal.NOT_OURS if self._devices is None else Refusal.NO_SUCH_DEVICE
        granted: GrantedDevices = {}
        free = 0
        if self._devices is not None:
            of_devices = self._devices.grant(node.devices, node.device_holds)
            if isinstance(of_devices, Refusal):
                return of_devices
            free, granted = of_devices
        plan = self._search_plan()
        effort = effort or searching.SearchEffort()  # a new effort, so that the search finds the same cards as before
        fit = searching.fit_request(node, plan, self._pick_card, effort)
        if isinstance(fit, Refusal):
            return fit
        score, positions = fit
        return self._placement(
            node, plan, positions, score if self._card_requests else self._score_devices(free), granted
        )

    def place_at(self, node: NodeState, position: int, score: int) -> Placement:
        """The placement of a one-card request on this card. The caller has checked that the request fits."""
        return self._placement(node, self._search_plan(), [[position]], score, {})

    def _placement(
        self,
        node: NodeState,
        plan: fitting.SearchPlan,
        positions: Sequence[Sequence[int]],
        score: int,
        granted: GrantedDevices,
    ) -> Placement:
        by_key = {container.key: container for container in self._request.containers}
        shares: dict[str, tuple[CardShare, ...]] = {}
        for typed_request, chosen in zip(plan.typed_requests, positions, strict=True):
            for key in typed_request.card_request.keys:
                container = by_key[key]
                mem, core = container.mem_per_card, container.core_per_card
                shares[key] = tuple(
                    fitting.make_share(node, i, None if container.whole else (mem, core)) for i in chosen
                )
        in_order = {container.key: shares[container.key] for container in self._request.containers}
        assignment = Assignment(in_order, granted) if granted else Assignment(in_order)
        return Placement(node=node.name, assignment=assignment, score=score)

    def _may_be_closed(self, ledger: Ledger) -> bool:
        """Whether MPS or the tenants of a card of the ledger may close the card to the request."""
        request = self._request
        return (
            bool(ledger.managed or ledger.exclusive_pods)
            or request.tenant.exclusive
            or request.isolation.strength >= Isolation.MPS.strength
        )

    def _search_plan(self) -> fitting.SearchPlan:
        if self._plan is None:
            self._plan = fitting.make_search_plan(self._card_requests, self._kinds, self._headroom)
        return self._plan

    def _score_with(self, devices: WantedDevices, node: NodeState | None) -> int | Refusal:
        """As `score`, for a request with devices. Cards decide the score; devices only if no card is requested."""
        if node is None:
            return Refusal.NO_SUCH_DEVICE
        free = devices.available(node.devices, node.device_holds)
        if isinstance(free, Refusal):
            return free
        return self._score(node, self._search_plan()) if self._card_requests else self._score_devices(free)

    def _score_devices(self, free: int) -> int:
        """The policy's score of a node with this number of free devices: the score of a card with this number of free
        MiB.
        """
        pick = self._pick_card([card_code(free)], card_code(free))
        return pick[0] if pick is not None else 0

    def _score(self, node: NodeState, plan: fitting.SearchPlan) -> int | Refusal:
        if self._is_one_card and not plan.headroom:
            typed_request = plan.typed_requests[0]
            pick = fitting.choose_card(
                node, fitting.usable_codes(node, typed_request.card_request), typed_request, self._pick_card
            )
            return (
                pick[0]
                if pick is not None
                else searching.refusal_reason(node, plan, typed_request, self._pick_card, self._effort)
            )
        fit = searching.fit_request(node, plan, self._pick_card, self._effort)
        return fit if isinstance(fit, Refusal) else fit[0]


def _count_nothing(_checks: int) -> None:
    """Count checks without a limit."""


def _expect_placement(placement: Placement | Refusal) -> Placement:
    """Return the placement. A refusal would be a bug, because the same ledger was checked just before."""
    if isinstance(placement, Refusal):
        raise AssertionError(placement)
    return placement
