"""A physical card as placement sees it."""

from dataclasses import dataclass

from cardwise.core.quantity import MiB, Percent

FULL_CORE = Percent(100)  # of one card's SMs
POSITION = 10  # bits of a card's position in a code: a node has at most 1024 cards


def card_code(free: int, position: int = 0) -> int:
    """A card as one integer that sorts by free MiB, then by position in the node's lists."""
    return free << POSITION | position


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card of a node. `mem` is its total in MiB; a card that is not healthy takes no new share.

    `classes` are the ResourceClasses that select it, `priority` is the highest of theirs.
    """

    index: int
    uuid: str
    mem: MiB
    model: str = ""
    healthy: bool = True
    classes: frozenset[str] = frozenset()
    priority: int = 0
