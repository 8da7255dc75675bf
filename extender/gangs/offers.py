"""The nodes that kube-scheduler has offered for members of gangs, by gang and by shape of members.

A set of 5,000 names takes 0.3 MB, and each shape may have another one: labels and node affinity of members are part of
their shape, and users choose them. So the sets of all gangs together have at most `_MAX_NAMES` names. Above that, the
gang with the most names loses the shapes that were offered longest ago. Members of a shape without an offer may be
planned on any node, until kube-scheduler offers nodes for them again.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

_MAX_NAMES: Final = 2_000_000  # in all sets of one table: 110 MB
_MAX_SHAPES: Final = 1024  # maximum number of shapes of a gang
_NO_OFFERS: Final[Mapping[str, frozenset[str]]] = {}


class OfferTable:
    """The offers of all gangs. Shapes with equal offers should share one set, which is then counted once for a gang.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._offers: dict[str, dict[str, frozenset[str]]] = {}  # by gang and shape; the latest shape at the end
        self._uses: dict[str, Counter[int]] = {}  # by gang and `id` of a set, the number of shapes with this set
        self._names: dict[str, int] = {}  # by gang, the number of names in its sets
        self._total = 0

    def get(self, gang: str) -> Mapping[str, frozenset[str]]:
        """The offers of the gang by shape. Copy the mapping to keep it."""
        return self._offers.get(gang, _NO_OFFERS)

    def set(self, gang: str, shape: str, offer: frozenset[str]) -> None:
        """Record the offer for the shape, in place of an earlier one."""
        offers = self._offers.setdefault(gang, {})
        self._drop(gang, shape)
        offers[shape] = offer
        uses = self._uses.setdefault(gang, Counter())
        if not uses[id(offer)]:
            self._count(gang, len(offer))
        uses[id(offer)] += 1
        if len(offers) > _MAX_SHAPES:
            self._drop(gang, next(iter(offers)))
        while self._total > _MAX_NAMES:
            largest = max(self._names, key=self._names.__getitem__)
            for oldest in list(self._offers[largest]):
                self._drop(largest, oldest)
                if self._total <= _MAX_NAMES:
                    return

    def remove(self, gang: str) -> None:
        """Remove all offers of the gang."""
        if self._offers.pop(gang, None) is not None:
            del self._uses[gang]
            self._total -= self._names.pop(gang, 0)

    def clear(self) -> None:
        """Remove all offers."""
        for table in (self._offers, self._uses, self._names):
            table.clear()
        self._total = 0

    def _drop(self, gang: str, shape: str) -> None:
        offer = self._offers[gang].pop(shape, None)
        if offer is None:
            return
        uses = self._uses[gang]
        uses[id(offer)] -= 1
        if not uses[id(offer)]:
            del uses[id(offer)]
            self._count(gang, -len(offer))

    def _count(self, gang: str, names: int) -> None:
        self._names[gang] = self._names.get(gang, 0) + names
        self._total += names
