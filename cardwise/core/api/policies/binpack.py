"""`binpack`: the fullest card that fits. Emptier cards stay free for larger requests."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from cardwise.core.api.cards import POSITION_BITS, POSITION_MASK
from cardwise.core.api.policies.policy import Pick, Policy


def pick_card(codes: Sequence[int], min_free: int) -> Pick | None:
    """Pick the card with the least free memory that fits; the lowest index if several are equal."""
    index = bisect_left(codes, min_free)
    if index == len(codes):
        return None
    code = codes[index]
    return -(code >> POSITION_BITS), code & POSITION_MASK


BINPACK: Final = Policy(name="binpack", pick_card=pick_card)
