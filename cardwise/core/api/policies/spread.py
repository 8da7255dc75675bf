"""`spread`: the emptiest card. Tenants share a card only when no empty card is left."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from cardwise.core.api.cards import POSITION_BITS, POSITION_MASK, card_code
from cardwise.core.api.policies.policy import CardOrder, Pick, Policy


def pick_card(codes: Sequence[int], min_free: int) -> Pick | None:
    """Pick the card with the most free memory; the lowest index if several are equal."""
    if not codes or codes[-1] < min_free:
        return None
    free = codes[-1] >> POSITION_BITS
    return free, codes[bisect_left(codes, card_code(free))] & POSITION_MASK


SPREAD: Final = Policy(
    name="spread", pick_card=pick_card, card_order=CardOrder.EMPTIEST_FIRST, prefers_empty_nodes=True
)
