"""The protocol of a scored policy, and functions that several policies share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import Shape


class WeightedShape(NamedTuple):
    """A shape of the workload with its weight: the fraction of arriving pods; all weights sum to 1."""

    shape: Shape
    weight: float


class Scores(NamedTuple):
    """The scores of some lines.

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

    def node_features(self, lines: NodeArrays) -> Floats:
        """The features of each node's cards, cached until the node changes."""

    def node_values(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:
        """The values of nodes with these features and these free amounts; valid until the next `update_prices`."""

    def survey(self, lines: NodeArrays, tally: Floats) -> Floats:
        """Survey these nodes. The outcomes for all nodes are added up and passed to `update_prices`.

        tally: the features of the nodes.
        """

    def update_prices(self, surveyed_sum: Floats, departure_rate: float) -> bool:
        """Update prices from a survey of all nodes. Returns whether all scores have changed.

        departure_rate: how many pods end per pod that arrives.
        """

    def scores(self, lines: NodeArrays, node_scores: NodeScores, shape: Shape, usable_cards: Bools) -> Scores:
        """The score of each line for the shape; a higher score is better. The shape must fit on all lines."""


@dataclass(frozen=True, slots=True)
class WorkloadModel:
    """The input of a scored policy.

    yardstick: MiB of a usual card.
    prices: by size of a card in MiB, the values of its remainders, see `prices`.
    """

    workload: Sequence[WeightedShape]
    yardstick: float
    prices: Mapping[int, Floats]


def best_candidate(at: Ints, card: Ints, points: Floats, count: int) -> Scores:
    """The best candidate on each of `count` lines; of equal candidates the first.

    at: the lines of the candidates, in ascending order.
    """
    if len(points) == count:  # one candidate per line
        return Scores(points, card)
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    best = np.maximum.reduceat(points, starts)
    best_indices = np.flatnonzero(points == best[at])
    first_best = best_indices[np.flatnonzero(np.diff(at[best_indices], prepend=-1))]
    return Scores(best, card[first_best])


def distinct_by_cards(workload: Sequence[WeightedShape]) -> tuple[list[Shape], Ints]:
    """The shapes of the workload without cpu and memory, each once; and for each request of the workload the index of
    its shape in this list.
    """
    indexes: dict[Shape, int] = {}
    shape_indexes = [indexes.setdefault(_cards_only(shape), len(indexes)) for shape, _ in workload]
    return list(indexes), np.array(shape_indexes, np.int64)


def _cards_only(shape: Shape) -> Shape:
    return shape._replace(request_size=shape.request_size._replace(cpu=0, memory=0))
