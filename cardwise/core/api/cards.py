"""A physical card as placement sees it."""

from dataclasses import dataclass

from cardwise.core.api.mpsprofile import CardMps
from cardwise.core.values.quantity import MiB, Percent

FULL_CORE = Percent(100)  # of one card's SMs
POSITION_BITS = 10  # the number of bits for a card's position in a `card_code`: a node has at most 1024 cards
POSITION_MASK = (1 << POSITION_BITS) - 1  # the mask of these bits


def card_code(free: int, position: int = 0) -> int:
    """A card as one integer that sorts by free MiB, then by position in the node's lists."""
    return free << POSITION_BITS | position


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card of a node. An unhealthy or cordoned card takes no new shares.

    mem: the card's total MiB.
    headroom: MiB that driver and MPS server take, as the node's device plugin reports them.
    classes: the ResourceClasses that select the card.
    priority: the highest priority of these classes.
    mps: None if the node has no MPS manager, or MPS is unavailable on the card.
    has_kernel_limit: whether the driver limits the memory of containers with a share of this card only.
    """

    index: int
    uuid: str
    mem: MiB
    model: str = ""
    healthy: bool = True
    cordoned: bool = False
    classes: frozenset[str] = frozenset()
    priority: int = 0
    mps: CardMps | None = None
    headroom: MiB = MiB(0)
    has_kernel_limit: bool = False

    def usable_mib(self, kept_back: MiB | None) -> int:
        """The MiB that shares can use.

        kept_back: MiB that stay free on each card; None for the card's own headroom.
        """
        return self.mem - (self.headroom if kept_back is None else kept_back)

    @property
    def accepts_shares(self) -> bool:
        """Whether the card takes new shares: it is healthy and not cordoned."""
        return self.healthy and not self.cordoned
