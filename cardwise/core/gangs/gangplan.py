"""The planner of gangs: nodes and cards for all members of a gang at once, or for none.

Theory of operation. The plan is made on copies of the nodes that it uses, so the ledger does not change. The members
are placed one after another, each on the best node at that point, and the placement engine chooses the cards. The
members with the largest requests come first. If a member then gets no node, a second plan begins with the members that
have the fewest possible nodes. Each plan is valid, but the search may miss a plan that exists.

Example: with `binpack`, n1 has a card with 8 GiB free, and n2 one with 10 GiB. Member a requests 6 GiB. Member b
requests 5 GiB, and kube-scheduler offers only n1 for b. In the first order, a comes first and gets n1, the fuller node.
The remaining 2 GiB are too little for b. In the second order, b comes first, because 1 node is possible for b, and 2
for a: b gets n1, and a gets n2.

Effort is counted in card requests: scoring a node for a pod with 8 card requests is a work of 8. Equal members form one
kind, and a node is scored once for each kind. A kind of pods with several card requests is scored on twice as many
nodes as it has members. If `_MAX_WORK` allows, more nodes are scored. Other kinds are scored on the nodes that the
policy prefers. All nodes are scored if the preferred nodes are too few, or if the policy ranks nodes
(`Policy.rank_nodes`). Example: 8 equal members with 128 card requests each are scored on 16 nodes, which is a work of
2,048 in 16 steps.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, Protocol

from cardwise.core.api import policies
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON_CLIENT
from cardwise.core.api.policies import NodeFacts, Policy
from cardwise.core.api.quotas import NO_CHARGE, Charge, Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.capacity import ShapeCapacity
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import fitting
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.placement.placement import Scorer, charges_by_kind
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal

_NO_LOAD: Final = Load(0, 0, 0)
_MAX_SCORED_NODES: Final = 500  # nodes that are scored for members of one kind
_MAX_SEARCHED_NODES: Final = 128  # searched nodes, in total for all kinds with several card requests
_MAX_WORK: Final = 1024  # the work of these searches, in card requests
_MIN_SEARCHED_NODES: Final = 2  # nodes that are searched for each such member, even if that exceeds these limits
_WORK_BETWEEN_PACES: Final = 64  # card requests; the work between two calls of `pace`
_SEARCH_STEPS: Final = 1024  # the effort of the searches of one plan, see `SearchEffort`
_UNUSABLE_SCORE: Final = -(1 << 62)  # lower than any score

Pace = Callable[[], object]


class Nodes(Protocol):
    """The free cpu, memory and pods of nodes."""

    def free_load(self, node: str) -> Load | None:
        """The node's free amounts for further pods; None if there is no such node."""

    def open_nodes(self) -> Collection[str]:
        """All nodes that accept pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for all members, without reservations.

    nodes: by UID, the member's node.
    assignments: by UID, the member's cards; only members that request cards or devices.
    """

    nodes: Mapping[str, str]
    assignments: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """The outcome if no plan was found.

    member: the first member that could not be placed.
    """

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """The limits of a plan, and how it chooses.

    policy: the placement policy of pods that name no policy.
    headroom: the amounts that quotas leave to the namespace.
    offers: by shape, the nodes that kube-scheduler allows; other shapes may use any node.
    avoided: pairs of shape and node that must not be combined.
    closed: returns whether a node is forbidden for a member; the same for all members with an equal request.
    vacant: returns the nodes that could take a pod with this request and load; None if unknown.
    facts: takes `PodRequest.peer_key` of members, and returns the facts from which a policy ranks the nodes for them.
        The members to be planned do not count as peers. None: no node is ranked.
    """

    policy: str
    headroom: Sequence[Headroom] = ()
    offers: Mapping[str, Collection[str]] = field(default_factory=dict)
    avoided: Collection[tuple[str, str]] = ()
    closed: Callable[[Member, str], bool] | None = None
    vacant: Callable[[PodRequest, Load], ShapeCapacity] | None = None
    facts: Callable[[str | None], NodeFacts] | None = None


def plan(
    ledger: Ledger, nodes: Nodes, members: Sequence[Member], constraints: PlanConstraints, pace: Pace = lambda: None
) -> Planned | Unplanned:
    """Plan nodes and cards for all of these members, or for none.

    members: the members without a node. The cards of members that already have one are in the ledger.
    pace: called before each step that takes time. It may sleep, or raise an exception to end the plan.
    """
    first_excess = first_beyond_quotas(ledger, members, constraints.headroom)
    if first_excess is not None:
        return Unplanned(member=first_excess)
    inputs, sizes = _Inputs(ledger, nodes, members, constraints, pace), _sizes(members)
    node_counts = inputs.node_counts(members, lambda kind: len(kind.candidates))
    first_order = sorted(members, key=lambda m: (sizes[m.request], node_counts[m.uid], -m.load.cpu))
    planned = _Attempt(inputs).place(first_order)
    if isinstance(planned, Planned):
        return planned
    node_counts = inputs.node_counts(members, inputs.options)
    second_order = sorted(members, key=lambda m: (node_counts[m.uid], -m.load.cpu, -m.load.memory, sizes[m.request]))
    if [m.uid for m in second_order] == [m.uid for m in first_order]:
        return planned
    second_plan = _Attempt(inputs).place(second_order)
    return second_plan if isinstance(second_plan, Planned) else planned


def first_beyond_quotas(ledger: Ledger, members: Iterable[Member], headroom: Sequence[Headroom]) -> Member | None:
    """The first member that exceeds the remaining quotas, whichever cards the members get; None if there is none. No
    node is checked.
    """
    members = list(members)
    if not exceed_quotas(ledger, members, headroom):
        return None
    charges = _min_charges(ledger, members, headroom)
    for member in members:
        if member.request is None:
            continue
        if not all(map(Headroom.has_room_for, headroom, charges[member.request])):
            return member
        headroom = list(map(Headroom.subtract, headroom, charges[member.request]))
    return None


def exceed_quotas(ledger: Ledger, members: Iterable[Member], headroom: Sequence[Headroom]) -> bool:
    """Whether the members exceed quotas, whichever cards they get: `first_beyond_quotas` finds a member.

    Reads each different request only once, because preemption calls this while it holds the lock.
    """
    if not headroom:
        return False
    members = list(members)
    counts = Counter(member.request for member in members)
    totals = [NO_CHARGE] * len(headroom)
    for request, charges in _min_charges(ledger, members, headroom).items():
        totals = [total.add(charge.multiply(counts[request])) for total, charge in zip(totals, charges, strict=True)]
    return not all(map(Headroom.has_room_for, headroom, totals))


def _min_charges(
    ledger: Ledger, members: Iterable[Member], headroom: Sequence[Headroom]
) -> dict[PodRequest, list[Charge]]:
    """By request of the members, a lower bound of its charge to each entry."""
    entries = [entry_headroom.entry for entry_headroom in headroom]
    requests = {member.request for member in members} - {None}
    return {request: fitting.min_charges(request, ledger.kinds, entries) for request in requests if request is not None}


def count_card_requests(members: Iterable[Member]) -> int:
    """The card requests of all members: the work to place each of them once."""
    counts: dict[PodRequest, int] = {}
    total = 0
    for member in members:
        if member.request is not None:
            if member.request not in counts:
                counts[member.request] = len(fitting.card_requests(member.request))
            total += counts[member.request]
    return total


def _sizes(members: Iterable[Member]) -> dict[PodRequest | None, tuple[int, int, int]]:
    """By request, a sort key: members that are hard to place come first."""
    return {request: _request_size_key(request) for request in {member.request for member in members}}


def _request_size_key(request: PodRequest | None) -> tuple[int, int, int]:
    if request is None:
        return 0, 0, 0
    whole_cards = sum(container.cards for container in request.containers if container.whole)
    return -whole_cards, -len(request.devices), -request.largest_share


class _Kind(NamedTuple):
    """One kind: equal members, and the nodes that could take such a member before anything is planned.

    member: the first member of the kind.
    scorer: None for members without cards and devices.
    candidates: the nodes.
    scores: the score of each candidate; None if the ledger's card index finds the best ones without scores.
    work: the work to search one node, in card requests.
    """

    member: Member
    scorer: Scorer | None
    candidates: Collection[str]
    scores: Mapping[str, int] | None
    work: int = 1


class _Inputs:
    """The input of both attempts: the members by kind, and the nodes without the plan."""

    def __init__(
        self, ledger: Ledger, nodes: Nodes, members: Sequence[Member], constraints: PlanConstraints, pace: Pace
    ) -> None:
        self.ledger = ledger
        self.constraints = constraints
        self.pace = pace
        self.effort = SearchEffort(_SEARCH_STEPS, reasons=False)
        self._nodes = nodes
        self._steps_work = 0  # the work since the last call of the pace
        self._works: dict[PodRequest, int] = {}  # by request, the work to search one node
        self._free_loads: dict[str, Load | None] = {}
        # Keys contain the `id` of the offers. It stays unique, because the constraints keep the offers alive.
        self._nodes_by_load: dict[tuple[int, Load], list[str]] = {}
        self._ordered: dict[int, list[str]] = {}
        self._kinds: dict[str, _Kind] = {}
        self._representatives: dict[str, str] = {}  # by UID, the first equal member
        first_by_key: dict[object, Member] = {}
        avoiding = {shape for shape, _ in constraints.avoided}
        for member in members:
            # Shapes with the same offered nodes are treated as equal.
            offers, shape = id(constraints.offers.get(member.shape)), member.shape if member.shape in avoiding else ""
            kind_key = member.request, member.load, offers, shape
            self._representatives[member.uid] = first_by_key.setdefault(kind_key, member).uid
        self._equal_counts = Counter(self._representatives.values())
        self._costly_kinds = sum(self._work(m.request) > 1 for m in first_by_key.values() if m.request is not None)

    def representative(self, member: Member) -> str:
        """The UID of the first member that the planner treats as equal to this one."""
        return self._representatives[member.uid]

    def kind(self, member: Member) -> "_Kind":
        """The kind of the member, computed at the first call. Equal members have the same kind."""
        representative = self._representatives[member.uid]
        kind = self._kinds.get(representative)
        if kind is None:
            kind = self._kinds[representative] = self._compute_kind(member, representative)
        return kind

    def count_work(self, work: int) -> None:
        """Call after each search. `work`: the number of card requests, summed over the searched nodes."""
        self._steps_work += work
        if self._steps_work >= _WORK_BETWEEN_PACES:
            self._steps_work = 0
            self.pace()

    def node_counts(self, members: Iterable[Member], count_nodes: Callable[["_Kind"], int]) -> dict[str, int]:
        """By UID of a member, the number of nodes for the member's kind.

        count_nodes: returns the number for a kind.
        """
        counts: dict[str, int] = {}
        for member in members:
            representative = self._representatives[member.uid]
            if representative not in counts:
                self.pace()
                counts[representative] = count_nodes(self.kind(member))
        return {uid: counts[representative] for uid, representative in self._representatives.items()}

    def allowed(self, member: Member, node: str) -> bool:
        """Whether the node is offered for the member and not forbidden."""
        constraints, offers = self.constraints, self.constraints.offers.get(member.shape)
        if offers is not None and node not in offers:
            return False
        return (member.shape, node) not in constraints.avoided and (
            constraints.closed is None or not constraints.closed(member, node)
        )

    def free_load(self, node: str) -> Load | None:
        try:
            return self._free_loads[node]
        except KeyError:
            load = self._free_loads[node] = self._nodes.free_load(node)
            return load

    def options(self, kind: _Kind) -> int:
        """The number of nodes that could take a member of this kind before anything is planned."""
        if kind.scores is not None or kind.scorer is None:
            return len(kind.candidates)
        return len(self._score_all(kind.scorer, sorted(kind.candidates), kind.work))

    def scorer(self, request: PodRequest, headroom: Sequence[Headroom]) -> Scorer:
        return Scorer(
            self.ledger.kinds,
            request,
            policies.card_policy(request.policy, self.constraints.policy),
            headroom,
            self.effort,
        )

    def ranking_policy(self, request: PodRequest | None) -> Policy | None:
        """The policy that ranks the nodes for members with this request; None if there is none."""
        if request is None or request.policy is None or self.constraints.facts is None:
            return None
        policy = policies.find_policy(request.policy)
        return policy if policy.rank_nodes is not None else None

    def cardless_score(self, node: str) -> int:
        """The score of a node for a pod that needs no card. Nodes with cards get -1 and so come last."""
        state = self.ledger.node(node)
        return -1 if state is not None and state.cards else 0

    def _work(self, request: PodRequest) -> int:
        """The work to search one node: the number of card requests, at least 1."""
        if request not in self._works:
            self._works[request] = max(1, len(fitting.card_requests(request)))
        return self._works[request]

    def _compute_kind(self, member: Member, representative: str) -> _Kind:
        """Compute the kind of the member. `representative`: the UID of the first equal member."""
        constraints, request = self.constraints, member.request
        offers = constraints.offers.get(member.shape)
        if request is None:
            allowed = self._allowed_nodes(member, self._nodes_with_capacity(offers, member.load))
            harms = {node: self.cardless_score(node) for node in allowed}
            return _Kind(member, None, harms.keys(), harms)
        scorer, work = self.scorer(request, constraints.headroom), self._work(request)
        if (
            self.ledger.has_index
            and scorer.indexed
            and not constraints.headroom
            and not any(c.resource_class for c in request.containers)
            and self.ranking_policy(request) is None
        ):
            vacant = self._vacant(member)
            vacant_nodes = self._nodes_with_capacity(offers, member.load) if vacant is None else vacant.counts
            return _Kind(member, scorer, set(self._allowed_nodes(member, vacant_nodes)), None, work)
        scores = self._score(member, request, scorer, self._equal_counts[representative])
        return _Kind(member, scorer, scores.keys(), scores, work)

    def _score(self, member: Member, request: PodRequest, scorer: Scorer, count: int) -> dict[str, int]:
        """The scores of nodes for `count` members that are equal to this one, in the order of the nodes' names."""
        offers, vacant = self.constraints.offers.get(member.shape), self._vacant(member)
        policy, work = (
            policies.find_policy(policies.card_policy(request.policy, self.constraints.policy)),
            self._work(request),
        )
        spreads = policy.prefers_empty_nodes
        if work > 1:
            nodes = self._nodes_with_capacity(offers, member.load) if vacant is None else vacant
            searches = max(
                min(_MAX_SEARCHED_NODES, _MAX_WORK // work) // self._costly_kinds, _MIN_SEARCHED_NODES * count
            )
            emptiest, fullest = self._allowed_nodes(member, nodes), self._allowed_nodes(member, reversed(nodes))
            return self._score_all(scorer, _select_from_both_ends(emptiest, fullest, searches, spreads=spreads), work)
        if vacant is None:
            nodes = list(self._allowed_nodes(member, self._nodes_with_capacity(offers, member.load)))
            return self._score_all(scorer, nodes, work)
        if self.ranking_policy(request) is not None:
            return self._score_all(scorer, sorted(self._allowed_nodes(member, vacant.counts)), work)
        # Of thousands of nodes, only those that the policy probably prefers are scored, unless too few of them fit.
        preferred = sorted(
            islice(self._allowed_nodes(member, vacant if spreads else reversed(vacant)), _MAX_SCORED_NODES)
        )
        scores = self._score_all(scorer, preferred, work)
        if len(scores) >= count:
            return scores
        preferred_set = set(preferred)
        other_nodes = [
            node
            for node in self._allowed_nodes(member, self._sorted_nodes(offers))
            if node in vacant.counts and node not in preferred_set
        ]
        return dict(sorted({**scores, **self._score_all(scorer, other_nodes, work)}.items()))

    def _score_all(self, scorer: Scorer, nodes: Sequence[str], work: int) -> dict[str, int]:
        """The scores of the nodes that fit, in the order of their names. `work`: the work of scoring one node."""
        scores, at_once = dict[str, int](), max(1, _WORK_BETWEEN_PACES // work)
        for start in range(0, len(nodes), at_once):
            some_nodes = nodes[start : start + at_once]
            scores |= scorer.score_all(self.ledger, some_nodes)[0]
            self.count_work(len(some_nodes) * work)
        return dict(sorted(scores.items()))

    def _allowed_nodes(self, member: Member, nodes: Iterable[str]) -> Iterator[str]:
        """The nodes that are offered for the member and not forbidden."""
        if self.constraints.avoided or self.constraints.closed is not None:
            return (node for node in nodes if self.allowed(member, node))
        offers = self.constraints.offers.get(member.shape)
        return iter(nodes) if offers is None else filter(offers.__contains__, nodes)

    def _vacant(self, member: Member) -> ShapeCapacity | None:
        vacant = self.constraints.vacant
        return vacant(member.request, member.load) if vacant is not None and member.request is not None else None

    def _nodes_with_capacity(self, offers: Collection[str] | None, load: Load) -> list[str]:
        """The nodes that have capacity for the load, in the order of their names."""
        key = id(offers), load
        nodes = self._nodes_by_load.get(key)
        if nodes is None:
            offered_nodes = self._sorted_nodes(offers)
            nodes = self._nodes_by_load[key] = [
                node for node in offered_nodes if has_capacity(self.free_load(node), _NO_LOAD, load)
            ]
        return nodes

    def _sorted_nodes(self, offers: Collection[str] | None) -> list[str]:
        """The offered nodes, or all nodes, in the order of their names; sorted once for all kinds."""
        ordered = self._ordered.get(id(offers))
        if ordered is None:
            ordered = self._ordered[id(offers)] = sorted(self._nodes.open_nodes() if offers is None else offers)
        return ordered


def _select_from_both_ends(emptiest: Iterable[str], fullest: Iterable[str], count: int, *, spreads: bool) -> list[str]:
    """Select `count` candidates: half of them are the nodes that the policy prefers, half are the emptiest nodes. The
    emptiest nodes are needed because a preferred node may have a card for each card request, but not for all together.

    emptiest, fullest: the same nodes, the emptiest or the fullest first.
    spreads: whether the policy prefers the emptiest nodes.
    """
    half = count if spreads else count // 2
    return sorted({*islice(emptiest, half), *islice(fullest, count - half)})


class _Queue:
    """The nodes for one kind of members, the best first, updated while the plan grows.

    Nodes that the plan does not use stay in their initial order, and nodes of equal score in the order of their names.
    The few nodes that the plan uses are scored again.
    """

    def __init__(self, inputs: _Inputs, kind: _Kind, used: "_PlannedNodes") -> None:
        self.kind = kind
        self._inputs = inputs
        self._used = used
        self._changed: dict[str, int | None] = {}  # the current score; None if the node cannot be used
        self._heap: list[tuple[int, str]] = []
        self._seen_count = 0  # how many entries of `_PlannedNodes.touched` were read
        self._unchanged_nodes = self._sorted_nodes()
        self._next = next(self._unchanged_nodes, None)

    def best(self) -> str | None:
        """The best node now; None if there is none."""
        touched_nodes = dict.fromkeys(self._used.touched[self._seen_count :])
        self._seen_count = len(self._used.touched)
        for node in touched_nodes:
            self._rescore_node(node)
            self._inputs.count_work(self.kind.work)
        while self._next is not None and self._next in self._changed:
            self._next = next(self._unchanged_nodes, None)
        while self._heap and self._changed[self._heap[0][1]] != -self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._next is None or not self._heap:
            return self._heap[0][1] if self._heap else self._next
        scores = self.kind.scores
        first = scores[self._next] if scores is not None else self._score(self._next)
        return self._next if (-first, self._next) < self._heap[0] else self._heap[0][1]

    def drop(self, node: str) -> None:
        """Remove the node, because the member does not fit there despite the node's score."""
        self._changed[node] = None
        self._inputs.count_work(self.kind.work)

    def _sorted_nodes(self) -> Iterator[str]:
        """The nodes that the plan does not use, the best first."""
        candidates, scorer, scores = self.kind.candidates, self.kind.scorer, self.kind.scores
        if scores is not None:
            yield from sorted(scores, key=scores.__getitem__, reverse=True)
        elif scorer is not None:
            # The ledger's card index finds the best of thousands of nodes without checking each.
            for state in scorer.ranked_nodes(self._inputs.ledger, candidates):
                yield state.name

    def _rescore_node(self, node: str) -> None:
        self._changed[node] = None
        member = self.kind.member
        if not self._inputs.allowed(member, node) or not self._used.takes(node, member.load):
            return
        score = self._score(node)
        if score != _UNUSABLE_SCORE:
            self._changed[node] = score
            heapq.heappush(self._heap, (-score, node))

    def _score(self, node: str) -> int:
        scorer = self.kind.scorer
        if scorer is None:
            return self._inputs.cardless_score(node)
        score = scorer.score(self._used.state(node))
        return _UNUSABLE_SCORE if isinstance(score, Refusal) else score


class _RankedQueue:
    """The nodes for one kind of members, under a policy that ranks nodes: the lowest rank first, then the best score.

    Each planned member may change the ranks of many nodes, so all of them are compared for each member.

    policy: the policy that ranks the nodes.
    """

    def __init__(self, inputs: _Inputs, kind: _Kind, used: "_PlannedNodes", policy: Policy) -> None:
        self.kind = kind
        self._inputs = inputs
        self._used = used
        self._policy = policy
        self._scores = dict(kind.scores or {})  # the current scores of the nodes that can be used
        self._seen_count = 0  # how many entries of `_PlannedNodes.touched` were read

    def best(self) -> str | None:
        """The best node now; None if there is none."""
        touched_nodes = dict.fromkeys(self._used.touched[self._seen_count :])
        self._seen_count = len(self._used.touched)
        for node in touched_nodes:
            self._rescore_node(node)
        request, scores, facts = self.kind.member.request, self._scores, self._inputs.constraints.facts
        if not scores or request is None or facts is None or self._policy.rank_nodes is None:
            return None
        self._inputs.count_work(_WORK_BETWEEN_PACES)
        rank = self._policy.rank_nodes(self._policy.label, _FactsWithPlan(facts(request.peer_key), self._used, request))
        return min(scores, key=lambda node: (rank(node), -scores[node], node))

    def drop(self, node: str) -> None:
        """Remove the node, because the member does not fit there despite the node's score."""
        self._scores.pop(node, None)

    def _rescore_node(self, node: str) -> None:
        self._scores.pop(node, None)
        member, scorer = self.kind.member, self.kind.scorer
        if scorer is None or not self._inputs.allowed(member, node) or not self._used.takes(node, member.load):
            return
        score = scorer.score(self._used.state(node))
        self._inputs.count_work(self.kind.work)
        if not isinstance(score, Refusal):
            self._scores[node] = score


class _FactsWithPlan(NodeFacts):
    """Facts in which the planned members count as peers."""

    def __init__(self, facts: NodeFacts, used: "_PlannedNodes", request: PodRequest) -> None:
        self._facts = facts
        self._planned_peers = used.peer_counts_by_node(request.peer_key)

    def labels(self, node: str) -> Mapping[str, str]:
        return self._facts.labels(node)

    def peer_counts_by_node(self) -> Mapping[str, int]:
        return Counter(self._facts.peer_counts_by_node()) + self._planned_peers


class _PlannedNodes:
    """Copies of the nodes that a plan uses, with the planned members placed on them. All other nodes are in the ledger
    unchanged.
    """

    def __init__(self, inputs: _Inputs) -> None:
        self.touched: list[str] = []  # the nodes that changed, in this order; a node may occur several times
        self._inputs = inputs
        self._states: dict[str, NodeState] = {}
        self._loads: dict[str, Load] = {}
        self._peers: dict[str, Counter[str]] = {}  # by `PodRequest.peer_key`, the planned members by node

    def peer_counts_by_node(self, peer_key: str | None) -> Counter[str]:
        """How many planned members with this key each node has."""
        return self._peers.get(peer_key, Counter()) if peer_key is not None else Counter()

    def state(self, node: str) -> NodeState | None:
        return self._states.get(node) or self._inputs.ledger.node(node)

    def takes(self, node: str, load: Load) -> bool:
        """Whether the node has capacity for the load in addition to the plan."""
        return has_capacity(self._inputs.free_load(node), self._loads.get(node, _NO_LOAD), load)

    def add_member(self, node: str, member: Member, assignment: Assignment | None) -> None:
        self.touched.append(node)
        self._loads[node] = self._loads.get(node, _NO_LOAD).add(member.load)
        if member.request is not None and member.request.peer_key is not None:
            self._peers.setdefault(member.request.peer_key, Counter())[node] += 1
        if assignment is None:
            return
        state = self._states.get(node)
        if state is None:
            state_before = self._inputs.ledger.node(node)
            if state_before is None:
                raise AssertionError(node)  # the node was just searched for cards
            state = self._states[node] = state_before.copy()
        state.apply_assignment(
            assignment, member.request.mps_client if member.request is not None else COMMON_CLIENT, 1
        )


class _Attempt:
    """An attempt to place the members in one order."""

    def __init__(self, inputs: _Inputs) -> None:
        self._inputs = inputs
        self._nodes: dict[str, str] = {}
        self._assignments: dict[str, Assignment] = {}
        self._used = _PlannedNodes(inputs)

    def place(self, order: Sequence[Member]) -> Planned | Unplanned:
        """Place all members in this order, or return the first one without a node."""
        inputs, headroom, queues = self._inputs, self._inputs.constraints.headroom, dict[str, _Queue | _RankedQueue]()
        for member in order:
            inputs.pace()
            representative = inputs.representative(member)
            if representative not in queues:
                queues[representative] = self._make_queue(member)
            if not self._place(queues[representative], member, headroom):
                return Unplanned(member=member)
            assignment = self._assignments.get(member.uid)
            if headroom and assignment is not None:
                charges = charges_by_kind(inputs.ledger, [(self._nodes[member.uid], assignment)])
                headroom = _subtract_charges(headroom, inputs.ledger, charges)
        return Planned(nodes=self._nodes, assignments=self._assignments)

    def _make_queue(self, member: Member) -> _Queue | _RankedQueue:
        inputs, kind = self._inputs, self._inputs.kind(member)
        policy = inputs.ranking_policy(member.request)
        return (
            _RankedQueue(inputs, kind, self._used, policy) if policy is not None else _Queue(inputs, kind, self._used)
        )

    def _place(self, queue: _Queue | _RankedQueue, member: Member, headroom: Sequence[Headroom]) -> bool:
        inputs, scorer, used = self._inputs, queue.kind.scorer, self._used
        if headroom and scorer is not None and member.request is not None:
            scorer = inputs.scorer(member.request, headroom)  # quotas leave less with every member
            if scorer.is_exhausted_by_quotas():
                return False
        while (node := queue.best()) is not None:
            if not used.takes(node, member.load):
                queue.drop(node)  # what `PlanConstraints.vacant` returns is an upper bound
                continue
            if scorer is None:
                self._add_member(member, node, None)
                return True
            placement = scorer.place_on(used.state(node), inputs.effort)
            if not isinstance(placement, Refusal):
                self._add_member(member, node, placement.assignment)
                return True
            queue.drop(node)
        return False

    def _add_member(self, member: Member, node: str, assignment: Assignment | None) -> None:
        self._nodes[member.uid] = node
        if assignment is not None:
            self._assignments[member.uid] = assignment
        self._used.add_member(node, member, assignment)


def _subtract_charges(headroom: Sequence[Headroom], ledger: Ledger, charges: Mapping[int, Charge]) -> list[Headroom]:
    """The headroom after these charges.

    charges: by kind of cards.
    """
    return [
        entry_headroom.subtract(ledger.kinds.covered_charge(charges, entry_headroom.entry))
        for entry_headroom in headroom
    ]


def has_capacity(free: Load | None, used: Load, load: Load) -> bool:
    """Whether one more pod with this load fits. As in kube-scheduler, only the requested resources matter.

    free: the node's free amounts without the plan; None if there is no such node.
    used: the amounts that the plan uses of these.
    """
    if free is None:
        return False
    return (
        (not load.cpu or free.cpu - used.cpu >= load.cpu)
        and (not load.memory or free.memory - used.memory >= load.memory)
        and free.pods - used.pods >= load.pods
    )
