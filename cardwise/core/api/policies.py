"""Placement policies: which card a share takes, and how good a node is for it.

A policy is one function in a table: it picks one of a node's usable cards and scores the pick. The scores of one
policy are comparable across nodes, so the best node is the one with the highest score. A policy gets the cards as
`cards.card_code`s in ascending order, the fullest card first, and the lowest code of a card with the requested free
memory. Codes are plain integers, because a filter call runs the policy for thousands of nodes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from cardwise.core.api.cards import PLACE, POSITION, card_code

Pick = tuple[int, int]  # the score of taking a card, and its position in the node's lists
Policy = Callable[[Sequence[int], int], Pick | None]


def binpack(codes: Sequence[int], min_free: int) -> Pick | None:
    """Pick the card with the least free memory that fits; the lowest index if several are equal. Keeps emptier cards
    free for larger requests.
    """
    index = bisect_left(codes, min_free)
    if index == len(codes):
        return None
    code = codes[index]
    return -(code >> POSITION), code & PLACE


def spread(codes: Sequence[int], min_free: int) -> Pick | None:
    """Pick the card with the most free memory; the lowest index if several are equal. Keeps tenants apart while there
    is capacity.
    """
    if not codes or codes[-1] < min_free:
        return None
    free = codes[-1] >> POSITION
    return free, codes[bisect_left(codes, card_code(free))] & PLACE


DEFAULT: Final = "priced"
# used where a scored policy has no scores: on one given node, under tight quotas, and until a workload is learned
FALLBACK: Final = "binpack"
SCORED: Final = frozenset({"priced"})  # scored policies: `scored.engine` chooses nodes and cards
POLICIES: Final[dict[str, Policy]] = {"binpack": binpack, "spread": spread, **dict.fromkeys(sorted(SCORED), binpack)}
