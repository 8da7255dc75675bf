"""The protocol of a scored policy, and functions that several policies share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import RequestShape


class WeightedShape(NamedTuple):
    """A shape of the workload with its weight: the fraction of arriving pods; all weights sum to 1."""

    shape: RequestShape
    weight: float


class Scores(NamedTuple):
    """The scores of some nodes.

    points: the score.
    card: the position of the scored card; ABSENT if the score is not for one card.
    """

    points: Floats
    card: Ints


class NodeScores(NamedTuple):
    """The cached numbers of nodes: the features of their cards, and the value of each node."""

    features: Floats
    values_by_node: Floats


class Scoring(Protocol):
    """A scored policy for one workload."""

    width: int  # features per node

    def node_features(self, nodes: NodeArrays) -> Floats:
        """The features of each node's cards, cached until the node changes."""

    def remaining_values(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:
        """The values of nodes with these features and these free amounts; valid until the next `update_prices`."""

    def measure_supply(self, nodes: NodeArrays, features: Floats) -> Floats:
        """What these nodes still offer, as numbers. The sum over all nodes is passed to `update_prices`."""

    def update_prices(self, supply: Floats, departure_rate: float) -> bool:
        """Update prices from the supply of all nodes. Returns whether all scores have changed.

        supply: the sum of `measure_supply` over all nodes.
        departure_rate: how many pods end per pod that arrives.
        """

    def scores(self, nodes: NodeArrays, node_scores: NodeScores, shape: RequestShape, usable_cards: Bools) -> Scores:
        """The score of each line for the shape; a higher score is better. The shape must fit on all nodes."""


@dataclass(frozen=True, slots=True)
class WorkloadModel:
    """The input of a scored policy.

    typical_card_mib: MiB of a card of the size that has the most memory in the cluster, over all its cards.
    prices: by size of a card in MiB, the values of its remainders, see `prices`.
    """

    workload: Sequence[WeightedShape]
    typical_card_mib: float
    prices: Mapping[int, Floats]


def best_candidates(line: Ints, card: Ints, points: Floats, line_count: int) -> Scores:
    """The best candidate on each of `line_count` lines; of equal candidates the first.

    line: the line of each candidate, in ascending order.
    """
    if len(points) == line_count:  # one candidate per line
        return Scores(points, card)
    starts = np.flatnonzero(np.diff(line, prepend=-1))
    best = np.maximum.reduceat(points, starts)
    best_indices = np.flatnonzero(points == best[line])
    first_best = best_indices[np.flatnonzero(np.diff(line[best_indices], prepend=-1))]
    return Scores(best, card[first_best])


def distinct_by_cards(workload: Sequence[WeightedShape]) -> tuple[list[RequestShape], Ints]:
    """The distinct shapes of the workload, compared without cpu and memory. The second result has, for each request of
    the workload, the index of its shape.
    """
    indexes: dict[RequestShape, int] = {}
    shape_indexes = [indexes.setdefault(_cards_only(shape), len(indexes)) for shape, _ in workload]
    return list(indexes), np.array(shape_indexes, np.int64)


def _cards_only(shape: RequestShape) -> RequestShape:
    return shape._replace(request_size=shape.request_size._replace(cpu=0, memory=0))
