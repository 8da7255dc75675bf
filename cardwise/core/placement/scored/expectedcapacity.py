"""Expected capacity: the value of nodes where several cards may become empty at the same time, because pods end.

Theory of operation. A request for several whole cards needs cards of one node that are empty at the same time. If pods
arrive and end all the time, this is rare. It happens only if new pods avoid the emptiest nodes. So a node also has a
value for such a request if it cannot take the request yet: the value of an empty node times 0.6 for each blocking
share. 0.6 is the chance that a share ends before new shares come. The blocking shares are those on the cards with the
fewest shares.

Example: a request for 4 cards has a weight of 1. It counts 30 on an empty node of 4 cards, 18 on a node with one share,
and 6.48 on a node with three. A pod on the first of these two nodes costs 18 - 10.8 = 7.2, and on the second 6.48 -
3.888 = 2.592. So the pod goes to the second node, and the first may become empty.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.nodetable import Floats, Ints
from cardwise.core.placement.scored.shapes import RequestShape

_END_CHANCE: Final = 0.6  # the chance that a share ends before new shares come
_MAX_SHARES: Final = 64  # with this many blocking shares, the chance that all of them end counts as 0
_VALUE_PER_WEIGHT: Final = 30.0  # the value of an empty node for a request, per weight of the request


class ExpectedCapacity:
    """The expected capacity of nodes for the requests of one workload."""

    def __init__(self, shapes: Sequence[RequestShape]) -> None:
        self._chance = np.append(_END_CHANCE ** np.arange(_MAX_SHARES), 0.0)
        self._indices_by_kinds: dict[frozenset[int] | None, list[int]] = {}
        self._cards = np.array([shape.request_size.cards for shape in shapes], np.int64)
        for i, shape in enumerate(shapes):
            if shape.request_size.whole and shape.request_size.cards > 1:
                self._indices_by_kinds.setdefault(shape.kinds, []).append(i)
        self._weights_by_kinds: list[tuple[frozenset[int] | None, Floats]] = []

    def set_weights(self, weights: Floats) -> None:
        """Set the weights of the requests."""
        self._weights_by_kinds = []
        for kinds, indices in self._indices_by_kinds.items():
            weights_by_count: Floats = np.zeros(self._cards[indices].max() + 1)
            np.add.at(weights_by_count, self._cards[indices], _VALUE_PER_WEIGHT * weights[indices])
            self._weights_by_kinds.append((kinds, weights_by_count))

    def node_values(self, clients: Ints, kind: Ints) -> Floats:
        """The expected capacity of each line, as a value.

        clients, kind: as in `NodeArrays`.
        """
        totals = np.zeros(len(clients))
        for kinds, weights_by_count in self._weights_by_kinds:
            counts = clients if kinds is None else np.where(np.isin(kind, list(kinds)), clients, _MAX_SHARES)
            max_cards = min(len(weights_by_count) - 1, counts.shape[1])
            # The shares that block a number of cards are the shares on the cards with the fewest shares.
            in_way = np.sort(counts, axis=1)[:, :max_cards].cumsum(axis=1)
            totals += self._chance[np.minimum(in_way, _MAX_SHARES)] @ weights_by_count[1 : max_cards + 1]
        return totals
