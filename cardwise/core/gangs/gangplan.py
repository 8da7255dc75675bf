"""The planner of gangs: nodes and cards for all members of a gang at once, or for none.

The placement engine chooses cards, with the plan so far held in the ledger; what a node has left of CPU, memory and
pods is asked of `Nodes`. The search is limited: members are placed in an order, each on the best node of the moment,
and in a second order if the first leaves a member out. A plan that is found is right; another may be missed.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, Protocol

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.vacancy import Vacant
from cardwise.core.placement import fitting
from cardwise.core.placement.ledger import Holding, Ledger, Undo
from cardwise.core.placement.placement import Scorer
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal

_NO_LOAD: Final = Load(0, 0, 0)
_MOST_SCORED: Final = 500  # nodes that are scored for members that are alike
_MOST_SEARCHED: Final = 128  # nodes that are searched for all members of several claims together, but
_AT_LEAST: Final = 2  # at least so many for each member
_STEPS: Final = 1024  # the effort of such searches, see `SearchEffort`
_CHEAPER: Final = 40  # so many nodes can be scored in the time in which the index finds the best one


class Nodes(Protocol):
    """What nodes have left of cpu, memory and pods."""

    def left(self, node: str) -> Load | None:
        """What the node has for further pods; None where there is no such node."""

    def names(self) -> Collection[str]:
        """All nodes that pods may be put on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan: each member with its node, and its cards if it asks for some. Nothing is held."""

    nodes: Mapping[str, str]
    assignments: Mapping[str, Assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """No plan was found. `member`: the first without a place, with all members before it placed."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The limits of a plan, and how it chooses.

    `offers`: by shape, the nodes that kube-scheduler allows; a shape that is not in it may have any node. `avoided`:
    pairs of shape and node that do not go together. `closed`: whether a node is kept from a member for somebody else.
    `vacant`: the nodes that could take a pod of this request and load; None: not known. `headroom`: what quotas leave
    to the namespace now.
    """

    namespace: str
    policy: str
    headroom: Callable[[], Sequence[Headroom]] = tuple
    offers: Mapping[str, Collection[str]] = field(default_factory=dict)
    avoided: Collection[tuple[str, str]] = ()
    closed: Callable[[Member, str], bool] | None = None
    vacant: Callable[[PodRequest, Load], Vacant | None] | None = None


def plan(ledger: Ledger, nodes: Nodes, members: Sequence[Member], terms: Terms) -> Planned | Unplanned:
    """Places for all of the members. Members that have a place already are not among them; their cards are held.

    The ledger holds the plan while it grows, and is as before afterwards, also after an exception.
    """
    beyond = _beyond_quotas(ledger, members, terms)
    if beyond is not None:
        return Unplanned(member=beyond)
    ground = _Ground(ledger, nodes, terms)
    kinds = ground.kinds(members)
    few = {id(kind): len(kind.candidates) for kind in kinds.values()}
    order = sorted(members, key=lambda m: (_size(m.request), few[id(kinds[m.uid])], -m.load.cpu))
    found = _Attempt(ground, kinds).place(order)
    if isinstance(found, Planned):
        return found
    few = {id(kind): ground.options(kind) for kind in kinds.values()}
    second = sorted(members, key=lambda m: (few[id(kinds[m.uid])], -m.load.cpu, -m.load.memory, _size(m.request)))
    if [m.uid for m in second] != [m.uid for m in order]:
        again = _Attempt(ground, kinds).place(second)
        if isinstance(again, Planned):
            return again
    return found


def _beyond_quotas(ledger: Ledger, members: Iterable[Member], terms: Terms) -> Member | None:
    """The first member that exceeds the quotas, whichever cards the members get. No node is looked at."""
    headroom = terms.headroom()
    for member in members if headroom else ():
        if member.request is None:
            continue
        least = [(one, fitting.surely(member.request, ledger.kinds, one.entry)) for one in headroom]
        if not all(one.takes(charge) for one, charge in least):
            return member
        headroom = [one.less(charge) for one, charge in least]
    return None


def _size(request: PodRequest | None) -> tuple[int, int, int]:
    """A sort key: members that are hard to place come first."""
    if request is None:
        return 0, 0, 0
    whole = sum(container.cards for container in request.containers if container.whole)
    return -whole, -len(request.devices), -request.largest_share


class _Kind(NamedTuple):
    """Members that are alike to the planner, and the nodes that may take one of them when the plan begins.

    `scores`: how good each candidate is; None if the index of all cards finds the best one without scores.
    """

    load: Load
    allowed: Callable[[str], bool]
    scorer: Scorer | None
    candidates: Collection[str]
    scores: Mapping[str, int] | None


class _Ground:
    """What is the same for all attempts: the nodes before anything is planned."""

    def __init__(self, ledger: Ledger, nodes: Nodes, terms: Terms) -> None:
        self.ledger = ledger
        self.terms = terms
        self.limited = bool(terms.headroom())
        self.effort = SearchEffort(_STEPS, reasons=False)
        self._nodes = nodes
        self._left: dict[str, Load | None] = {}
        # By the address of the offers: the terms keep these, so nothing else gets it.
        self._roomy: dict[tuple[int, Load], list[str]] = {}
        self._ordered: dict[int, list[str]] = {}

    def kinds(self, members: Iterable[Member]) -> Mapping[str, _Kind]:
        """The kind of each member; members that are alike have the same."""
        alike: dict[object, list[Member]] = {}
        for member in members:
            told = member.shape in self.terms.offers or self.terms.avoided or self.terms.closed is not None
            alike.setdefault((member.request, member.load, member.shape if told else ""), []).append(member)
        several = sum(fitting.several(r) for some in alike.values() if (r := some[0].request) is not None)
        found: dict[str, _Kind] = {}
        for some in alike.values():
            kind = self._look(some[0], len(some), _MOST_SEARCHED // max(1, several))
            found |= dict.fromkeys([member.uid for member in some], kind)
        return found

    def left(self, node: str) -> Load | None:
        try:
            return self._left[node]
        except KeyError:
            left = self._left[node] = self._nodes.left(node)
            return left

    def score(self, kind: _Kind, node: str) -> int | None:
        """How good the node is now for a member of this kind; None if it has no cards for it."""
        if kind.scorer is None:
            return self._harm(node)
        score = kind.scorer.score(self.ledger.node(node))
        return None if isinstance(score, Refusal) else score

    def options(self, kind: _Kind) -> int:
        """How many nodes could take a member of this kind before anything is planned."""
        if kind.scores is None and kind.scorer is not None:
            return len(kind.scorer.score_all(self.ledger, kind.candidates)[0])
        return len(kind.candidates)

    def scorer(self, request: PodRequest) -> Scorer:
        return Scorer(request, request.policy or self.terms.policy, self.terms.headroom(), self.effort)

    def _harm(self, node: str) -> int:
        """The penalty of a node for a pod that needs no card: nodes with cards come last."""
        state = self.ledger.node(node)
        return -1 if state is not None and state.cards else 0

    def _look(self, member: Member, count: int, searches: int) -> _Kind:
        """The kind of `count` members like this one. `searches`: nodes that may be searched for several claims."""
        offers = self.terms.offers.get(member.shape)
        avoided, closed, shape = self.terms.avoided, self.terms.closed, member.shape

        def allowed(node: str) -> bool:
            if offers is not None and node not in offers:
                return False
            return (shape, node) not in avoided and (closed is None or not closed(member, node))

        def among(nodes: Iterable[str]) -> Iterator[str]:
            offered = iter(nodes) if offers is None else filter(offers.__contains__, nodes)
            return filter(allowed, offered) if avoided or closed is not None else offered

        request, vacant = member.request, self._vacant(member)
        if request is None:
            scores = {node: self._harm(node) for node in among(self._with_room(offers, member.load))}
            return _Kind(member.load, allowed, None, scores.keys(), scores)
        scorer = self.scorer(request)
        plain = scorer.indexed and not self.limited and not any(c.device_class for c in request.containers)
        spreads = (request.policy or self.terms.policy) == "spread"
        several = fitting.several(request)
        candidates: Iterable[str]
        if several:
            nodes = self._with_room(offers, member.load) if vacant is None else vacant
            searches = max(searches, _AT_LEAST * count)
            candidates = _both_ends(among(nodes), among(reversed(nodes)), searches, spreads=spreads)
        elif vacant is None:
            candidates = among(self._with_room(offers, member.load))
        else:
            candidates = filter(vacant.most.__contains__, among(self._in_order(offers)))
        if plain:
            candidates = list(candidates)
            if len(candidates) > _CHEAPER * count:
                return _Kind(member.load, allowed, scorer, candidates, None)
        if vacant is not None and not several:
            # Of thousands only those are scored that the policy seems to prefer: scoring all takes longer than others
            # may wait. If these are too few, all are scored.
            some = sorted(islice(among(vacant if spreads else reversed(vacant)), _MOST_SCORED))
            scores, _ = scorer.score_all(self.ledger, some)
            if len(scores) >= count:
                return _Kind(member.load, allowed, scorer, scores.keys(), scores)
        scores, _ = scorer.score_all(self.ledger, candidates)
        return _Kind(member.load, allowed, scorer, scores.keys(), scores)

    def _vacant(self, member: Member) -> Vacant | None:
        vacant = self.terms.vacant
        return vacant(member.request, member.load) if vacant is not None and member.request is not None else None

    def _with_room(self, offers: Collection[str] | None, load: Load) -> list[str]:
        """The nodes that have room for the load, in the order of their names."""
        key = id(offers), load
        found = self._roomy.get(key)
        if found is None:
            among = self._in_order(offers)
            found = self._roomy[key] = [node for node in among if takes(self.left(node), _NO_LOAD, load)]
        return found

    def _in_order(self, offers: Collection[str] | None) -> list[str]:
        """The nodes that are offered, or all, in the order of their names: sorted once for all kinds."""
        found = self._ordered.get(id(offers))
        if found is None:
            found = self._ordered[id(offers)] = sorted(self._nodes.names() if offers is None else offers)
        return found


def _both_ends(emptiest: Iterable[str], fullest: Iterable[str], count: int, *, spreads: bool) -> list[str]:
    """`count` candidates: half of them those that the policy seems to prefer, and half the emptiest, since the former
    may have cards for each claim and not for all together. Given are all, in both orders.
    """
    half = count if spreads else count // 2
    return sorted({*islice(emptiest, half), *islice(fullest, count - half)})


class _Queue(Protocol):
    """The nodes for one kind of members, kept up to date while the plan grows."""

    kind: _Kind

    def best(self, touched: Sequence[str], taken: Mapping[str, Load]) -> str | None:
        """The best node now. `touched`: the nodes that the plan has used so far, in that order."""

    def drop(self, node: str) -> None:
        """The node does not fit, whatever its score says."""


class _Walked:
    """By the ledger's index of all cards, which finds the best node of thousands without asking each."""

    def __init__(self, ground: _Ground, kind: _Kind) -> None:
        self._ground = ground
        self.kind = kind
        self._nodes = set(kind.candidates)

    def best(self, touched: Sequence[str], taken: Mapping[str, Load]) -> str | None:
        del touched
        kind, ground = self.kind, self._ground
        while kind.scorer is not None and (state := kind.scorer.first(ground.ledger, self._nodes)) is not None:
            load = taken.get(state.name)
            if load is None or takes(ground.left(state.name), load, kind.load):
                return state.name
            self._nodes.discard(state.name)
        return None

    def drop(self, node: str) -> None:
        self._nodes.discard(node)


class _Sorted:
    """By scores. Nodes that the plan does not use stay in their first order, equally good ones by name; the others are
    few.
    """

    def __init__(self, ground: _Ground, kind: _Kind, scores: Mapping[str, int]) -> None:
        self._ground = ground
        self.kind = kind
        self._scores = scores
        self._fresh = iter(sorted(scores, key=scores.__getitem__, reverse=True))
        self._next = next(self._fresh, None)
        self._changed: dict[str, int | None] = {}  # the score now; None where the node will not do
        self._heap: list[tuple[int, str]] = []
        self._seen = 0  # of the plan's nodes

    def best(self, touched: Sequence[str], taken: Mapping[str, Load]) -> str | None:
        for node in dict.fromkeys(touched[self._seen :]):
            self._look_again(node, taken.get(node, _NO_LOAD))
        self._seen = len(touched)
        while self._next is not None and self._next in self._changed:
            self._next = next(self._fresh, None)
        while self._heap and self._changed[self._heap[0][1]] != -self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._next is not None and (not self._heap or (-self._scores[self._next], self._next) < self._heap[0]):
            return self._next
        return self._heap[0][1] if self._heap else None

    def drop(self, node: str) -> None:
        self._changed[node] = None

    def _look_again(self, node: str, taken: Load) -> None:
        self._changed[node] = None
        if not self.kind.allowed(node) or not takes(self._ground.left(node), taken, self.kind.load):
            return
        score = self._changed[node] = self._ground.score(self.kind, node)
        if score is not None:
            heapq.heappush(self._heap, (-score, node))


class _Attempt:
    """One order of members."""

    def __init__(self, ground: _Ground, kinds: Mapping[str, _Kind]) -> None:
        self._nodes: dict[str, str] = {}
        self._assignments: dict[str, Assignment] = {}
        self._ground = ground
        self._kinds = kinds
        self._queues: dict[int, _Queue] = {}
        self._taken: dict[str, Load] = {}
        self._touched: list[str] = []
        self._undo: list[Undo] = []

    def place(self, members: Iterable[Member]) -> Planned | Unplanned:
        """Places for all these members, or the first without one."""
        try:
            for member in members:
                if not self._place(member):
                    return Unplanned(member=member)
            return Planned(nodes=self._nodes, assignments=self._assignments)
        finally:
            for back in reversed(self._undo):
                back()

    def _place(self, member: Member) -> bool:
        queue = self._queue(self._kinds[member.uid])
        scorer = queue.kind.scorer
        if scorer is not None and member.request is not None and self._ground.limited:
            scorer = self._ground.scorer(member.request)  # quotas leave less with every member
            if scorer.exhausted(self._ground.ledger):
                return False
        while (node := queue.best(self._touched, self._taken)) is not None:
            if scorer is None:
                self._put(member, node, None)
                return True
            placed = scorer.place_on(self._ground.ledger.node(node), self._ground.effort)
            if not isinstance(placed, Refusal):
                self._put(member, node, placed.assignment)
                return True
            queue.drop(node)
        return False

    def _queue(self, kind: _Kind) -> _Queue:
        queue = self._queues.get(id(kind))
        if queue is None:
            ground, scores = self._ground, kind.scores
            queue = _Walked(ground, kind) if scores is None else _Sorted(ground, kind, scores)
            self._queues[id(kind)] = queue
        return queue

    def _put(self, member: Member, node: str, assignment: Assignment | None) -> None:
        self._nodes[member.uid] = node
        before = self._taken.get(node, _NO_LOAD)
        self._taken[node] = before.plus(member.load)
        self._touched.append(node)
        if assignment is not None:
            self._assignments[member.uid] = assignment
            namespace = self._ground.terms.namespace
            mps_client = member.request.mps_client if member.request is not None else COMMON
            holding = Holding(member.uid, namespace, member.name, node, assignment, mps_client=mps_client)
            self._undo.append(self._ground.ledger.hold(holding))


def takes(left: Load | None, taken: Load, load: Load) -> bool:
    """Whether there is room for one more pod. What it does not ask for does not matter, as in kube-scheduler."""
    if left is None:
        return False
    return (
        (not load.cpu or left.cpu - taken.cpu >= load.cpu)
        and (not load.memory or left.memory - taken.memory >= load.memory)
        and left.pods - taken.pods >= load.pods
    )
