"""Why a pod waits or where it could go, card by card: the detail that refusal texts must not carry."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cardwise.core import fitting, placement
from cardwise.core.ledger import Holding, Ledger, NodeState
from cardwise.core.quotas import Room
from cardwise.core.request import PodRequest
from cardwise.core.verdict import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class CardView:
    """A card with its holders. `short` is how many MiB are missing for the request, 0 where it fits.

    `closed` says why the card is not for the request, whatever is free on it: "type", "quota", or "" where it is.
    """

    index: int
    uuid: str
    model: str
    classes: frozenset[str]
    healthy: bool
    total: int
    free: int
    short: int
    closed: str
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node for a request: its score under the policy, or the refusal, and each card."""

    name: str
    score: int | None
    refusal: Refusal | None
    cards: tuple[CardView, ...]


def explain(
    ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str, rooms: Sequence[Room] = ()
) -> list[NodeView]:
    """Every node for the request, the best first, refused ones last."""
    scorer = placement.Scorer(request, policy, rooms)
    views = []
    for name in nodes:
        node = ledger.node(name)
        score = scorer.score(node)
        refused = isinstance(score, Refusal)
        views.append(
            NodeView(
                name=name,
                score=None if isinstance(score, Refusal) else score,
                refusal=score if isinstance(score, Refusal) else None,
                cards=_cards(ledger, node, request, rooms, refused=refused) if node is not None else (),
            )
        )
    return sorted(views, key=lambda view: (view.score is None, -(view.score or 0), view.name))


def _cards(
    ledger: Ledger, node: NodeState, request: PodRequest, rooms: Sequence[Room], *, refused: bool
) -> tuple[CardView, ...]:
    holders: dict[int, list[Holding]] = {}
    for holding in ledger.holdings(node.name):
        for position in {node.position(share) for share in holding.assignment.shares()} - {None}:
            holders.setdefault(position or 0, []).append(holding)
    views = []
    for i, card in enumerate(node.cards):
        claims, closed = fitting.served(node, i, request, rooms)
        views.append(
            CardView(
                index=card.index,
                uuid=card.uuid,
                model=card.model,
                classes=card.classes,
                healthy=card.healthy,
                total=card.mem,
                free=node.free[i],
                short=_short(node, i, claims) if refused and claims else 0,
                closed=closed,
                holders=tuple(holders.get(i, ())),
            )
        )
    return tuple(views)


def _short(node: NodeState, i: int, claims: Sequence[fitting.Claim]) -> int:
    """MiB that are missing on the card for the largest share; whole cards are short of whatever others hold."""
    largest = max(claim.mem for claim in claims)
    return max(0, largest - node.free[i]) if largest else node.used[i]
