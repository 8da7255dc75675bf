"""Vacancy: what nodes are worth whose pods are to end, since in time cards will be empty there together.

A request for several whole cards needs them empty at once on one node. Where pods come and go, cards seldom are, unless
somebody leaves the emptiest nodes alone until they are. So what such a request is worth counts on a node that cannot
take it yet as well, by the chance that the shares in its way have ended before further ones come: the fewer, the more.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.nodetable import Floats, Ints
from cardwise.core.placement.scored.shapes import Shape

_ENDED: Final = 0.6  # the chance that a share has ended
_LONG: Final = 64  # shares, of which it is certain that some have not
_FACTOR: Final = 30.0  # how much more than its weight an empty place counts that is to come


class Vacancy:
    """For the requests of one workload, in the order of their weights."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._chance = np.append(_ENDED ** np.arange(_LONG), 0.0)
        self._at: dict[frozenset[int] | None, list[int]] = {}
        self._cards = np.array([shape.ask.cards for shape in shapes], np.int64)
        for i, shape in enumerate(shapes):
            if shape.ask.whole and shape.ask.cards > 1:
                self._at.setdefault(shape.kinds, []).append(i)
        self._values: list[tuple[frozenset[int] | None, Floats]] = []

    def weigh(self, weights: Floats) -> None:
        """The requests count so much now."""
        self._values = []
        for kinds, at in self._at.items():
            values: Floats = np.zeros(self._cards[at].max() + 1)
            np.add.at(values, self._cards[at], _FACTOR * weights[at])
            self._values.append((kinds, values))

    def worth(self, clients: Ints, kind: Ints) -> Floats:
        """By line. `clients` as in `Lines`."""
        worth = np.zeros(len(clients))
        for kinds, values in self._values:
            counts = clients if kinds is None else np.where(np.isin(kind, list(kinds)), clients, _LONG)
            most = min(len(values) - 1, counts.shape[1])
            # In the way of so many cards are the shares on those with the fewest.
            in_way = np.sort(counts, axis=1)[:, :most].cumsum(axis=1)
            worth += self._chance[np.minimum(in_way, _LONG)] @ values[1 : most + 1]
        return worth
