"""Prices of kinds of cards: a card costs more if its kind is scarce for pods that can use no other kind.

Theory of operation. The pressure on a kind is the part of the demand that names the kind, divided by the kind's part of
the free MiB. If the pressure is above 1, there will be too few cards of the kind, and pods that can use other cards
should use those. A whole card of the kind costs the pressure above 0.5, at most 8 cards; a share costs its part of this
price.

Example: half of the demand names kind A, and the other half names no kind. A quarter of the free MiB is on cards of
kind A. The pressure on A is 2, so a card of kind A costs 1.5 cards more than any other.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.nodetable import Floats, Ints, NodeArrays
from cardwise.core.placement.scored.scoring import WeightedShape

_FREE_PRESSURE: Final = 0.5  # the pressure up to which a kind costs nothing
_MAX_PRICE: Final = 8.0  # the maximum price, in cards
_PRICE_STEP: Final = 0.05  # cards; prices are rounded to multiples of this, so that they seldom change


class KindPrices:
    """The prices of kinds of cards for one workload."""

    def __init__(self, workload: Sequence[WeightedShape], typical_card_mib: float) -> None:
        demand: dict[frozenset[int], float] = {}
        total = 0.0
        for shape, weight in workload:
            amount = (
                weight
                * shape.request_size.cards
                * (shape.request_size.mem / typical_card_mib if shape.request_size.mem else 1.0)
            )
            total += amount
            if shape.kinds is not None:
                demand[shape.kinds] = demand.get(shape.kinds, 0.0) + amount
        self._demand = [(sorted(kinds), amount / total) for kinds, amount in demand.items() if kinds and amount]
        self._prices: Floats = np.zeros(0)
        # the index, in arrays by kind, of all kinds that no request names: 1 above the highest named kind
        self._kinds = max((kinds[-1] for kinds, _ in self._demand), default=-1) + 1

    @property
    def has_prices(self) -> bool:
        """Whether any kind has a price."""
        return bool(len(self._prices))

    def prices_of(self, kind: Ints) -> Floats:
        """The price of each card, by its kind."""
        return self._prices[np.minimum(kind, self._kinds)]

    def measure_supply(self, nodes: NodeArrays) -> Floats:
        """The free MiB of each kind that the workload names, and of all other kinds together."""
        kind = np.minimum(nodes.kind, self._kinds)
        is_card = kind >= 0
        return np.bincount(kind[is_card], nodes.free[is_card], self._kinds + 1).astype(np.float64)

    def update_prices(self, free: Floats) -> bool:
        """Compute the prices from the free MiB by kind. Returns whether they have changed."""
        if not self._demand:
            return False
        demand_by_kind = np.zeros(len(free))
        for kinds, amount in self._demand:
            free_by_kind = free[kinds]
            demand_by_kind[kinds] += amount * (
                free_by_kind / free_by_kind.sum() if free_by_kind.any() else 1.0 / len(kinds)
            )
        ratio = np.divide(demand_by_kind * free.sum(), free, out=np.zeros(len(free)), where=free > 0)
        # The last price is for kinds that no request names, and for "no card".
        prices: Floats = np.rint(np.clip(ratio - _FREE_PRESSURE, 0.0, _MAX_PRICE) / _PRICE_STEP) * _PRICE_STEP
        if np.array_equal(prices, self._prices):
            return False
        self._prices = prices if prices.any() else np.zeros(0)
        return True
