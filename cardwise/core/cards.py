"""A physical card as placement sees it."""

from dataclasses import dataclass

from cardwise.core.quantity import MiB, Percent

FULL_CORE = Percent(100)  # of one card's SMs


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card of a node. `mem` is its total in MiB; a card that is not healthy takes no new share."""

    index: int
    uuid: str
    mem: MiB
    model: str = ""
    healthy: bool = True
