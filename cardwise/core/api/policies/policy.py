"""The interface of a placement policy: which node and card a pod gets.

A policy is one file beside this one: a `Policy` and the functions that it names. Its row is in `POLICIES`. The engines
read only this interface, so no other code compares the name of a policy. Example, a policy that takes the emptiest
card:

    def pick_card(codes, min_free):
        return (codes[-1] >> POSITION, codes[-1] & PLACE) if codes and codes[-1] >= min_free else None

    EMPTIEST = Policy(name="emptiest", pick_card=pick_card, card_order=CardOrder.EMPTIEST_FIRST)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

Pick = tuple[int, int]  # the score of taking a card, and its position in the node's lists
# Picks one of a node's usable cards, and scores the pick; None if no card fits. The scores of one policy are comparable
# across nodes, so the best node is the one with the highest score. The arguments are the cards as `cards.card_code`s in
# ascending order, the fullest card first; and the lowest code of a card with the requested free memory. Codes are plain
# integers, because a filter call picks cards of thousands of nodes.
PickCard = Callable[[Sequence[int], int], Pick | None]


class CardOrder(Enum):
    """The order in which a policy takes cards from the index of all cards, for a request of one card."""

    FULLEST_FIRST = auto()
    EMPTIEST_FIRST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A placement policy.

    name: as users write it.
    pick_card: picks a card of one node.
    card_order: the order of all cards. It must agree with the scores of `pick_card`.
    prefers_empty_nodes: whether the policy probably takes the emptiest nodes first. With thousands of nodes, the
        planner of gangs scores only the nodes that the policy probably prefers.
    is_scored: whether `scored.engine` chooses the node and the card, by scores of all nodes for the workload. Where it
        has no scores, `pick_card` decides.
    """

    name: str
    pick_card: PickCard
    card_order: CardOrder = CardOrder.FULLEST_FIRST
    prefers_empty_nodes: bool = False
    is_scored: bool = False
