"""The placement engine: where a request fits, and which cards it takes there.

Extender, simulator, `explain` and the tests call these functions; nobody derives free memory again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cardwise.core import policies
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.cardindex import CardIndex, Entry
from cardwise.core.cards import FULL_CORE
from cardwise.core.ledger import POSITION, Ledger, NodeState
from cardwise.core.quantity import MiB, Percent
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


class Claim(NamedTuple):
    """Cards that belong together: `cards` different ones, each with `mem` MiB and `core` percent, or whole."""

    keys: tuple[str, ...]
    cards: int
    mem: int
    core: int
    whole: bool


def claims(request: PodRequest) -> list[Claim]:
    """What must be found, the hardest first. Single-card shares of a pod are one claim: they share a card."""
    together = [c for c in request.containers if not c.whole and c.cards == 1]
    found = [
        Claim((c.key,), c.cards, c.mem_per_card, c.core_per_card, c.whole)
        for c in request.containers
        if c.whole or c.cards > 1
    ]
    if together:
        keys = tuple(c.key for c in together)
        found.append(Claim(keys, 1, sum(c.mem for c in together), sum(c.core for c in together), whole=False))
    return sorted(found, key=lambda claim: (not claim.whole, -claim.mem, -claim.cards))


def place(ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str) -> Placement | Unplaceable:
    """The best of the nodes under the policy; equal scores go to the node named first."""
    scorer = Scorer(request, policy)
    if scorer.indexed:
        nodes = nodes if isinstance(nodes, (set, frozenset, dict)) else dict.fromkeys(nodes)
        node = scorer.first(ledger, nodes)
        if node is not None:
            return _certainly(place_on(node, request, policy))
        return Unplaceable(refusals=scorer.refuse_all(ledger, nodes))
    scores, refusals = scorer.score_all(ledger, nodes)
    if not scores:
        return Unplaceable(refusals=refusals)
    most = max(scores.values())
    best = min(name for name, score in scores.items() if score == most)
    return _certainly(place_on(ledger.node(best), request, policy))


# How a policy walks the index of all cards for a share of one card; a policy that is not here asks node by node.
_INDEXED: dict[str, Callable[[CardIndex, int, Collection[str]], Iterator[Entry]]] = {
    "binpack": CardIndex.smallest,
    "spread": CardIndex.largest,
}


class Scorer:
    """Scores nodes for one request, without building the assignment: what filter asks of every node."""

    def __init__(self, request: PodRequest, policy: str) -> None:
        self._policy = policies.POLICIES[policy]
        self._walk = _INDEXED.get(policy)
        self._claims = claims(request)
        first = self._claims[0]
        single = len(self._claims) == 1 and first.cards == 1
        self._share = single and not first.whole
        # One card, and nothing to ask of it but memory.
        self._simple = single and not first.core and len(first.keys) == 1
        self._codes_of = NodeState.empties if first.whole else NodeState.ascending

    @property
    def indexed(self) -> bool:
        """Whether `first` can answer."""
        return self._share and self._walk is not None

    def first(self, ledger: Ledger, nodes: Collection[str]) -> NodeState | None:
        """The best of the nodes by the index of all cards; None where none fits."""
        if self._walk is None:
            return None
        claim = self._claims[0]
        for _, name, position in self._walk(ledger.index(), claim.mem, nodes):
            node = ledger.node(name)
            if node is not None and _takes(node, position, claim):
                return node
        return None

    def score(self, node: NodeState | None) -> int | Refusal:
        """The node's score, or why it cannot take the request."""
        if node is None:
            return Refusal.NOT_OURS
        if self._simple:
            claim = self._claims[0]
            pick = self._policy(self._codes_of(node), claim.mem)
            return pick[0] if pick is not None else _refusal(node, claim)
        found = _fit(node, self._claims, self._policy)
        return found if isinstance(found, Refusal) else found[0]

    def score_all(self, ledger: Ledger, nodes: Iterable[str]) -> tuple[dict[str, int], dict[str, Refusal]]:
        """`score` of each: those that fit, and those that do not."""
        scores: dict[str, int] = {}
        refusals: dict[str, Refusal] = {}
        by_name, simple, policy, codes_of = ledger.by_name(), self._simple, self._policy, self._codes_of
        claim = self._claims[0]
        for name in nodes:
            node = by_name.get(name)
            if simple and node is not None:  # as `score`, without its calls
                pick = policy(codes_of(node), claim.mem)
                if pick is not None:
                    scores[name] = pick[0]
                else:
                    refusals[name] = _refusal(node, claim)
                continue
            score = self.score(node)
            if isinstance(score, Refusal):
                refusals[name] = score
            else:
                scores[name] = score
        return scores, refusals

    def refuse_all(self, ledger: Ledger, nodes: Iterable[str]) -> dict[str, Refusal]:
        """Why each cannot take the request, once `first` has said that none can."""
        by_name = ledger.by_name()
        claim = self._claims[0]
        refusals: dict[str, Refusal] = {}
        for name in nodes:
            node = by_name.get(name)
            refusals[name] = _refusal(node, claim) if node is not None else Refusal.NOT_OURS
        return refusals


def _certainly(placed: Placement | Refusal) -> Placement:
    """The placement on a node that was found fit a moment ago on the same ledger."""
    if isinstance(placed, Refusal):
        raise AssertionError(placed)
    return placed


def place_on(node: NodeState | None, request: PodRequest, policy: str) -> Placement | Refusal:
    """The cards of one node for the request, or why there are none."""
    if node is None:
        return Refusal.NOT_OURS
    wanted = claims(request)
    found = _fit(node, wanted, policies.POLICIES[policy])
    if isinstance(found, Refusal):
        return found
    score, positions = found
    by_key = {container.key: container for container in request.containers}
    shares: dict[str, tuple[CardShare, ...]] = {}
    for claim, chosen in zip(wanted, positions, strict=True):
        for key in claim.keys:
            container = by_key[key]
            mem, core = container.mem_per_card, container.core_per_card
            shares[key] = tuple(_share(node, i, None if claim.whole else (mem, core)) for i in chosen)
    in_order = {container.key: shares[container.key] for container in request.containers}
    return Placement(node=node.name, assignment=Assignment(in_order), score=score)


def _share(node: NodeState, i: int, part: tuple[MiB, Percent] | None) -> CardShare:
    card = node.cards[i]
    mem, core = part if part is not None else (MiB(node.free[i]), FULL_CORE)
    return CardShare(card.index, card.uuid, mem, core, card.mem)


def _fit(node: NodeState, wanted: Sequence[Claim], policy: policies.Policy) -> tuple[int, list[list[int]]] | Refusal:
    """Score and card positions for each claim. Later claims see what earlier ones have taken."""
    scratch = node
    score = 0
    positions: list[list[int]] = []
    for claim in wanted:
        if positions:
            # What the claim before has taken.
            scratch = node.copy() if scratch is node else scratch
            before = wanted[len(positions) - 1]
            for i in positions[-1]:
                part = None if before.whole else (MiB(before.mem), Percent(before.core))
                scratch.count(_share(scratch, i, part), 1)
                scratch.clients[i] += len(before.keys) - 1
        codes = _usable(scratch, claim)
        chosen: list[int] = []
        if len(codes) < claim.cards:
            return _refusal(node, claim)
        for _ in range(claim.cards):
            pick = policy(codes, claim.mem)
            if pick is None:
                return _refusal(node, claim)
            score += pick[0]
            chosen.append(pick[1])
            if claim.cards > 1:
                codes = [code for code in codes if code & ~(-1 << POSITION) != pick[1]]
        positions.append(sorted(chosen))
    return score, positions


def _usable(node: NodeState, claim: Claim) -> list[int]:
    """Codes of the cards that may serve the claim, but for the memory."""
    if claim.whole:
        return node.empties()
    codes = node.ascending()
    if claim.core or len(claim.keys) > 1:
        return [code for code in codes if _takes(node, code & ~(-1 << POSITION), claim)]
    return codes


def _takes(node: NodeState, i: int, claim: Claim) -> bool:
    """Whether an open card has what the claim asks beside memory: cores, and room for a client a container."""
    return node.free_core[i] >= claim.core and node.clients[i] + len(claim.keys) <= node.max_clients


def _refusal(node: NodeState, claim: Claim) -> Refusal:
    """Why the claim found no card, from the most to the least permanent reason."""
    if not node.cards:
        return Refusal.NOT_OURS
    if claim.cards == 1 and not claim.whole and not claim.core:
        # The common cases of a full cluster, where thousands of nodes are asked.
        if node.largest < claim.mem:
            return Refusal.CARD_TOO_SMALL
        if max(node.free) < claim.mem:
            return Refusal.NO_MEMORY
    if claim.cards > 1 and len(node.cards) < claim.cards:
        return Refusal.TOO_FEW_CARDS
    if claim.whole:
        return Refusal.NO_WHOLE_CARD if node.healthy >= claim.cards else Refusal.UNHEALTHY
    big = [i for i, card in enumerate(node.cards) if card.mem - node.headroom >= claim.mem]
    if len(big) < claim.cards:
        return Refusal.CARD_TOO_SMALL
    roomy = [i for i in big if node.free[i] >= claim.mem]
    if len(roomy) < claim.cards:
        return Refusal.NO_MEMORY
    healthy_roomy = [i for i in roomy if node.cards[i].healthy]
    if len(healthy_roomy) < claim.cards:
        return Refusal.UNHEALTHY
    if sum(node.open(i, len(claim.keys)) for i in healthy_roomy) < claim.cards:
        return Refusal.TOO_MANY_CLIENTS
    if sum(node.free_core[i] >= claim.core for i in healthy_roomy) < claim.cards:
        return Refusal.NO_CORE
    return Refusal.NO_MEMORY  # each claim of the pod fits, not all together
