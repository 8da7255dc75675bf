"""Why a pod waits or where it could go, card by card: the detail that refusal texts must not carry."""

from collections.abc import Iterable
from dataclasses import dataclass

from cardwise.core import placement
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.request import PodRequest
from cardwise.core.verdict import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class CardView:
    """A card with its holders. `short` is how many MiB are missing for the request, 0 where it fits."""

    index: int
    uuid: str
    model: str
    healthy: bool
    total: int
    free: int
    short: int
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node for a request: its score under the policy, or the refusal, and each card."""

    name: str
    score: int | None
    refusal: Refusal | None
    cards: tuple[CardView, ...]


def explain(ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str) -> list[NodeView]:
    """Every node for the request, the best first, refused ones last."""
    scorer = placement.Scorer(request, policy)
    views = []
    for name in nodes:
        score = scorer.score(ledger.node(name))
        refused = isinstance(score, Refusal)
        views.append(
            NodeView(
                name=name,
                score=None if isinstance(score, Refusal) else score,
                refusal=score if isinstance(score, Refusal) else None,
                cards=_cards(ledger, name, request if refused else None),
            )
        )
    return sorted(views, key=lambda view: (view.score is None, -(view.score or 0), view.name))


def _cards(ledger: Ledger, name: str, request: PodRequest | None) -> tuple[CardView, ...]:
    node = ledger.node(name)
    if node is None:
        return ()
    holders: dict[int, list[Holding]] = {}
    for holding in ledger.holdings(name):
        for position in {node.position(share) for share in holding.assignment.shares()} - {None}:
            holders.setdefault(position or 0, []).append(holding)
    views = []
    for i, card in enumerate(node.cards):
        short = 0
        if request is not None:
            # Whole cards are short of whatever others hold.
            short = max(0, request.largest_share - node.free[i]) if request.largest_share else node.used[i]
        views.append(
            CardView(
                index=card.index,
                uuid=card.uuid,
                model=card.model,
                healthy=card.healthy,
                total=card.mem,
                free=node.free[i],
                short=short,
                holders=tuple(holders.get(i, ())),
            )
        )
    return tuple(views)
