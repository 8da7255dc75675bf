"""The protocol of a scored policy, and what several of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import Shape


class WeightedShape(NamedTuple):
    """A shape of the workload, and its part of the workload; the sum of all parts is 1."""

    shape: Shape
    weight: float


class Scores(NamedTuple):
    """The scores of some lines, and the card that each score is for; ABSENT if it is for no single card."""

    points: Floats
    card: Ints


class NodeScores(NamedTuple):
    """What is kept of nodes: numbers of their cards that the policy needs (tally), and what each node is worth."""

    features: Floats
    values_by_node: Floats


class Scoring(Protocol):
    """A policy for one workload."""

    width: int  # numbers in a tally

    def node_features(self, lines: NodeArrays) -> Floats:
        """The numbers that are kept of each node's cards until they change."""

    def node_values(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:
        """What nodes with this tally and so much left are worth; good until the next look."""

    def survey(self, lines: NodeArrays, tally: Floats) -> Floats:
        """What a look needs of these nodes; the results of several parts are added up."""

    def update_prices(self, surveyed_sum: Floats, departure_rate: float) -> bool:
        """Looks at all nodes together, now and then. Returns whether all scores have changed, because nodes are worth
        something else. `departure_rate`: how many pods end for each one that comes.
        """

    def scores(self, lines: NodeArrays, node_scores: NodeScores, shape: Shape, usable_cards: Bools) -> Scores:
        """How good each line is for the shape, which all of them can take. A higher score is better."""


@dataclass(frozen=True, slots=True)
class WorkloadModel:
    """What a policy is made from. `yardstick`: MiB of a usual card; `prices`: by size of a card, see `prices`."""

    workload: Sequence[WeightedShape]
    yardstick: float
    prices: Mapping[int, Floats]


def best_candidate(at: Ints, card: Ints, points: Floats, count: int) -> Scores:
    """The best candidate on each of `count` lines, the first of equal ones. `at`: their lines, in ascending order."""
    if len(points) == count:  # one way each
        return Scores(points, card)
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    best = np.maximum.reduceat(points, starts)
    best_indices = np.flatnonzero(points == best[at])
    first_best = best_indices[np.flatnonzero(np.diff(at[best_indices], prepend=-1))]
    return Scores(best, card[first_best])


def distinct_by_cards(workload: Sequence[WeightedShape]) -> tuple[list[Shape], Ints]:
    """The shapes of the workload that differ in cards, and for each request of the workload the index of its shape."""
    indexes: dict[Shape, int] = {}
    shape_indexes = [indexes.setdefault(_cards_only(shape), len(indexes)) for shape, _ in workload]
    return list(indexes), np.array(shape_indexes, np.int64)


def _cards_only(shape: Shape) -> Shape:
    return shape._replace(request_size=shape.request_size._replace(cpu=0, memory=0))
