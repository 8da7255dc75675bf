"""Vacancy: what nodes are worth because their pods will end, so that several cards will be empty there at once.

A request for several whole cards needs them empty at the same time on one node. If pods come and go, that is rare,
unless the emptiest nodes are left alone until they are empty. So such a request also counts on a node that cannot take
it yet: by the chance that the shares in its way end before new ones come. The fewer such shares, the more it counts.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.nodetable import Floats, Ints
from cardwise.core.placement.scored.shapes import Shape

_ENDED: Final = 0.6  # the chance that a share has ended
_LONG: Final = 64  # shares; of so many it is certain that some have not ended
_FACTOR: Final = 30.0  # by this factor of its weight an expected empty place counts


class Vacancy:
    """Vacancy for the requests of one workload, in the order of their weights."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._chance = np.append(_ENDED ** np.arange(_LONG), 0.0)
        self._at: dict[frozenset[int] | None, list[int]] = {}
        self._cards = np.array([shape.ask.cards for shape in shapes], np.int64)
        for i, shape in enumerate(shapes):
            if shape.ask.whole and shape.ask.cards > 1:
                self._at.setdefault(shape.kinds, []).append(i)
        self._values: list[tuple[frozenset[int] | None, Floats]] = []

    def weigh(self, weights: Floats) -> None:
        """Sets the weights of the requests."""
        self._values = []
        for kinds, at in self._at.items():
            values: Floats = np.zeros(self._cards[at].max() + 1)
            np.add.at(values, self._cards[at], _FACTOR * weights[at])
            self._values.append((kinds, values))

    def worth(self, clients: Ints, kind: Ints) -> Floats:
        """What each line is worth. `clients` as in `Lines`."""
        worth = np.zeros(len(clients))
        for kinds, values in self._values:
            counts = clients if kinds is None else np.where(np.isin(kind, list(kinds)), clients, _LONG)
            most = min(len(values) - 1, counts.shape[1])
            # The shares in the way of so many cards are those on the cards with the fewest shares.
            in_way = np.sort(counts, axis=1)[:, :most].cumsum(axis=1)
            worth += self._chance[np.minimum(in_way, _LONG)] @ values[1 : most + 1]
        return worth
