"""The tenants of a node's cards: a pod that shares cards within its namespace only is never on a card with a pod of
another namespace (`cardwise.core.api.sharing`).

Example: card 0 holds a pod of namespace a that shares within a only, and card 1 holds an ordinary pod of a. Card 0 is
closed to pods of b. Card 1 is open to ordinary pods of b, and also to pods of a that share within a only. Once a pod of
b is on card 1, it is closed to those.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from cardwise.core.api.sharing import Tenant
from cardwise.core.placement.mpstaints import BITS
from cardwise.core.values.refusals import Refusal

# A taint in the groups of the card index and in the table of nodes, as those of `mpstaints`: a pod that shares cards
# within its namespace only holds the card.
EXCLUSIVE_TAINT: Final = 1 << BITS

_NO_SHARES: Final[Mapping[Tenant, int]] = MappingProxyType({})


class CardTenants:
    """The tenants of a node's cards, by position.

    shares: by card, the number of shares of each tenant; the mappings are replaced, never changed.
    exclusive: how many pairs of a card and an exclusive tenant there are.
    """

    __slots__ = ("exclusive", "shares")

    def __init__(self, cards: int) -> None:
        self.shares = [_NO_SHARES] * cards
        self.exclusive = 0

    def copy(self) -> "CardTenants":
        """A copy with its own counts."""
        duplicate = CardTenants(0)
        duplicate.shares, duplicate.exclusive = self.shares.copy(), self.exclusive
        return duplicate

    def add_shares(self, i: int, tenant: Tenant, change: int) -> None:
        """Add this number of the tenant's shares of the card; remove shares if the number is negative."""
        shares_before = self.shares[i].get(tenant, 0)
        shares = dict(self.shares[i])
        if shares_before + change:
            shares[tenant] = shares_before + change
        else:
            del shares[tenant]
        self.shares[i] = shares or _NO_SHARES
        if tenant.exclusive:
            self.exclusive += (tenant in shares) - bool(shares_before)

    def is_exclusive(self, i: int) -> bool:
        """Whether a pod that shares cards within its namespace only holds the card."""
        return bool(self.exclusive) and any(tenant.exclusive for tenant in self.shares[i])

    def state(self, i: int) -> object:
        """What decides which tenants the card admits; equal for cards that admit the same."""
        return frozenset(self.shares[i])

    def may_be_closed_to(self, tenant: Tenant) -> bool:
        """Whether any card may be closed to the tenant."""
        return tenant.exclusive or bool(self.exclusive)

    def admits(self, i: int, tenant: Tenant) -> bool:
        """Whether the tenant may share the card with all its present tenants."""
        return all(map(tenant.can_share_with, self.shares[i]))

    def blocking_shares(self, i: int, tenant: Tenant) -> Iterator[tuple[Tenant, int]]:
        """The shares that must end before the card admits the tenant, by their tenant."""
        return ((other, shares) for other, shares in self.shares[i].items() if not tenant.can_share_with(other))


def refusal_for(tenant: Tenant) -> Refusal:
    """Why cards that do not admit the tenant are closed to it."""
    return Refusal.OTHER_NAMESPACES if tenant.exclusive else Refusal.WITHIN_NAMESPACE
