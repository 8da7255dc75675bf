"""The pressure on kinds of cards: what it costs to take one that is scarce to those who can use no other.

The share of the demand that names a kind over the kind's share of what is free. Where that is above 1 there will be too
few of it, and those who can go elsewhere had better do so.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.nodetable import Floats, Ints, Lines
from cardwise.core.placement.scored.scoring import Weighted

_CALM: Final = 0.5  # demand that names a kind, per what is free of it, up to which it costs nothing
_MOST: Final = 8.0  # cards that it costs at most
_STEP: Final = 0.05  # cards: it is rounded to this, so that it seldom changes


class Pressure:
    """Of one workload."""

    def __init__(self, workload: Sequence[Weighted], yardstick: float) -> None:
        demand: dict[frozenset[int], float] = {}
        total = 0.0
        for shape, weight in workload:
            amount = weight * shape.ask.cards * (shape.ask.mem / yardstick if shape.ask.mem else 1.0)
            total += amount
            if shape.kinds is not None:
                demand[shape.kinds] = demand.get(shape.kinds, 0.0) + amount
        self._demand = [(sorted(kinds), amount / total) for kinds, amount in demand.items() if kinds and amount]
        self._prices: Floats = np.zeros(0)
        self._kinds = max((kinds[-1] for kinds, _ in self._demand), default=-1) + 1  # those that are named, and others

    @property
    def any(self) -> bool:
        """Whether any kind costs something."""
        return bool(len(self._prices))

    def of(self, kind: Ints) -> Floats:
        """By card, of these kinds."""
        return self._prices[np.minimum(kind, self._kinds)]

    def survey(self, lines: Lines) -> Floats:
        """What is free of each kind that may be named, MiB, and of all others together."""
        kind = np.minimum(lines.kind, self._kinds)
        some = kind >= 0
        return np.bincount(kind[some], lines.free[some], self._kinds + 1).astype(np.float64)

    def look(self, free: Floats) -> bool:
        """At what is free now, as surveyed; whether prices are others."""
        if not self._demand:
            return False
        named = np.zeros(len(free))
        for kinds, amount in self._demand:
            here = free[kinds]
            named[kinds] += amount * (here / here.sum() if here.any() else 1.0 / len(kinds))
        ratio = np.divide(named * free.sum(), free, out=np.zeros(len(free)), where=free > 0)
        # The last is of kinds that nobody names, or of no card.
        prices: Floats = np.rint(np.clip(ratio - _CALM, 0.0, _MOST) / _STEP) * _STEP
        if np.array_equal(prices, self._prices):
            return False
        self._prices = prices if prices.any() else np.zeros(0)
        return True
