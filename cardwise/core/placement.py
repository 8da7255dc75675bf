"""The placement engine: where a request fits, and which cards it takes there.

Extender, simulator, `explain` and the tests call these functions; nobody derives free memory again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cardwise.core import fitting, policies, quotas
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.cardindex import CardIndex, Entry
from cardwise.core.kinds import ANY_CARD, Kinds
from cardwise.core.ledger import Ledger, NodeState
from cardwise.core.quotas import Room
from cardwise.core.request import PodRequest
from cardwise.core.verdict import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A node, the cards there, and the policy's score (comparable between nodes of one request)."""

    node: str
    assignment: Assignment
    score: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaceable:
    """No node fits: the reason of each."""

    refusals: dict[str, Refusal]


def place(
    ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str, rooms: Sequence[Room] = ()
) -> Placement | Unplaceable:
    """The best of the nodes under the policy; equal scores go to the node named first.

    `rooms` are what quotas leave to the pod's namespace; what is placed never exceeds them.
    """
    scorer = Scorer(request, policy, rooms)
    if scorer.indexed:
        nodes = nodes if isinstance(nodes, (set, frozenset, dict)) else dict.fromkeys(nodes)
        node = scorer.first(ledger, nodes)
        if node is not None:
            return _certainly(scorer.place_on(node))
        return Unplaceable(refusals=scorer.refuse_all(ledger, nodes))
    scores, refusals = scorer.score_all(ledger, nodes)
    if not scores:
        return Unplaceable(refusals=refusals)
    most = max(scores.values())
    best = min(name for name, score in scores.items() if score == most)
    return _certainly(scorer.place_on(ledger.node(best)))


def place_on(
    node: NodeState | None, request: PodRequest, policy: str, rooms: Sequence[Room] = ()
) -> Placement | Refusal:
    """The cards of one node for the request, or why there are none."""
    return Scorer(request, policy, rooms).place_on(node)


def exceeded(ledger: Ledger, placement: Placement, rooms: Sequence[Room]) -> list[quotas.Entry]:
    """The entries of quotas that leave no room for the placement."""
    charges = [(ledger.kind(placement.node, share), quotas.charge(share)) for share in placement.assignment.shares()]
    return [
        room.entry
        for room in rooms
        if not room.takes(quotas.total(charge for kind, charge in charges if ledger.kinds.covered(kind, room.entry)))
    ]


# How a policy walks the index of all cards for a share of one card; a policy that is not here asks node by node.
_INDEXED: dict[str, Callable[[CardIndex, int, Collection[str], Collection[int] | None], Iterator[Entry]]] = {
    "binpack": CardIndex.smallest,
    "spread": CardIndex.largest,
}


class Scorer:
    """Scores nodes for one request, without building the assignment: what filter asks of every node.

    For the ledger as it is; not to be kept.
    """

    def __init__(self, request: PodRequest, policy: str, rooms: Sequence[Room] = ()) -> None:
        self._policy = policies.POLICIES[policy]
        self._walk = _INDEXED.get(policy)
        self._request = request
        self._claims = fitting.claims(request)
        self._rooms = rooms
        self._plan: fitting.Plan | None = None
        first = self._claims[0]
        self._single = len(self._claims) == 1 and first.cards == 1
        # One card, and nothing to ask of it but memory and its kind.
        self._simple = self._single and not first.core and len(first.keys) == 1
        self._whole = first.whole

    @property
    def indexed(self) -> bool:
        """Whether `first` can answer."""
        return self._single and not self._whole and self._walk is not None

    def first(self, ledger: Ledger, nodes: Collection[str]) -> NodeState | None:
        """The best of the nodes by the index of all cards; None where none fits."""
        if self._walk is None:
            return None
        plan = self._plan_on(ledger.kinds)
        claim, levels, _ = plan.wants[0]
        for _, kinds in levels:
            for _, name, position, _ in self._walk(ledger.index(), claim.mem, nodes, kinds):
                node = ledger.node(name)
                if (
                    node is not None
                    and fitting.takes(node, position, claim)
                    and (not plan.rooms or fitting.charged(plan.rooms, node, position, claim) is not None)
                ):
                    return node
        return None

    def score(self, node: NodeState | None) -> int | Refusal:
        """The node's score, or why it cannot take the request."""
        if node is None:
            return Refusal.NOT_OURS
        return self._score(node, self._plan_on(node.registry))

    def score_all(self, ledger: Ledger, nodes: Iterable[str]) -> tuple[dict[str, int], dict[str, Refusal]]:
        """`score` of each: those that fit, and those that do not."""
        scores: dict[str, int] = {}
        refusals: dict[str, Refusal] = {}
        plan = self._plan_on(ledger.kinds)
        by_name, policy = ledger.by_name(), self._policy
        codes_of = NodeState.empties if self._whole else NodeState.ascending
        claim, levels, _ = plan.wants[0]
        plain = self._simple and levels is ANY_CARD and not plan.rooms
        for name in nodes:
            node = by_name.get(name)
            if node is None:
                refusals[name] = Refusal.NOT_OURS
                continue
            if plain:  # as `_score`, without its calls
                pick = policy(codes_of(node), claim.mem)
                if pick is not None:
                    scores[name] = pick[0]
                else:
                    refusals[name] = fitting.refusal(node, claim)
                continue
            score = self._score(node, plan)
            if isinstance(score, Refusal):
                refusals[name] = score
            else:
                scores[name] = score
        return scores, refusals

    def refuse_all(self, ledger: Ledger, nodes: Iterable[str]) -> dict[str, Refusal]:
        """Why each cannot take the request, once `first` has said that none can."""
        by_name = ledger.by_name()
        plan = self._plan_on(ledger.kinds)
        claim, _, typed = want = plan.wants[0]
        limited = plan.unlimited is not None
        refusals: dict[str, Refusal] = {}
        for name in nodes:
            node = by_name.get(name)
            if node is None:
                refusals[name] = Refusal.NOT_OURS
            elif limited:
                refusals[name] = fitting.why(node, plan, want, self._policy)
            else:
                refusals[name] = fitting.refusal(node, claim, typed)
        return refusals

    def place_on(self, node: NodeState | None) -> Placement | Refusal:
        """The cards of the node, or why there are none."""
        if node is None:
            return Refusal.NOT_OURS
        plan = self._plan_on(node.registry)
        found = fitting.fit(node, plan, self._policy)
        if isinstance(found, Refusal):
            return found
        score, positions = found
        by_key = {container.key: container for container in self._request.containers}
        shares: dict[str, tuple[CardShare, ...]] = {}
        for want, chosen in zip(plan.wants, positions, strict=True):
            for key in want.claim.keys:
                container = by_key[key]
                mem, core = container.mem_per_card, container.core_per_card
                shares[key] = tuple(fitting.share(node, i, None if container.whole else (mem, core)) for i in chosen)
        in_order = {container.key: shares[container.key] for container in self._request.containers}
        return Placement(node=node.name, assignment=Assignment(in_order), score=score)

    def _plan_on(self, kinds: Kinds) -> fitting.Plan:
        if self._plan is None:
            self._plan = fitting.plan(self._claims, kinds, self._rooms)
        return self._plan

    def _score(self, node: NodeState, plan: fitting.Plan) -> int | Refusal:
        if self._single and not plan.rooms:
            want = plan.wants[0]
            pick = fitting.pick_one(node, fitting.usable(node, want.claim), want, self._policy)
            return pick[0] if pick is not None else fitting.why(node, plan, want, self._policy)
        found = fitting.fit(node, plan, self._policy)
        return found if isinstance(found, Refusal) else found[0]


def _certainly(placed: Placement | Refusal) -> Placement:
    """The placement on a node that was found fit a moment ago on the same ledger."""
    if isinstance(placed, Refusal):
        raise AssertionError(placed)
    return placed
