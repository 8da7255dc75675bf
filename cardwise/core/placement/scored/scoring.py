"""The protocol of a scored policy, and what several of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, Lines
from cardwise.core.placement.scored.shapes import Shape


class Weighted(NamedTuple):
    """A shape of the workload and how much of the workload it is; the sum of all is 1."""

    shape: Shape
    weight: float


class Scores(NamedTuple):
    """Of some lines: how good each is, and the card that this is said of, ABSENT where it is of no single one."""

    points: Floats
    card: Ints


class Known(NamedTuple):
    """What is kept of nodes as they are: of their cards so many numbers as a policy needs, and what each is worth."""

    tally: Floats
    worth: Floats


class Scoring(Protocol):
    """A policy for one workload."""

    width: int  # numbers in a tally

    def tally(self, lines: Lines) -> Floats:
        """What is kept of the nodes' cards, for as long as these do not change."""

    def worth(self, tally: Floats, cpu: Floats, memory: Floats) -> Floats:
        """What nodes with this tally and so much left are worth, until the next look."""

    def survey(self, lines: Lines, tally: Floats) -> Floats:
        """What a look needs of these nodes: the sum over several parts is what it needs of them together."""

    def look(self, surveyed: Floats, leaving: float) -> bool:
        """At all nodes together, now and then; whether what nodes are worth, and so all scores, are others now.

        `leaving`: how many pods go for one that comes.
        """

    def scores(self, lines: Lines, known: Known, shape: Shape, usable: Bools) -> Scores:
        """How good each line is for the shape; all of them take it. The more the better."""


class Nearsighted:
    """What a policy need not say that looks at no more than one node."""

    def survey(self, lines: Lines, tally: Floats) -> Floats:  # noqa: ARG002
        """Nothing."""
        return np.zeros(0)

    def look(self, surveyed: Floats, leaving: float) -> bool:  # noqa: ARG002
        """Nothing is ever another."""
        return False


@dataclass(frozen=True, slots=True)
class Market:
    """What a policy is made for. `yardstick`: MiB of a usual card; `prices`: by size of a card, see `prices`."""

    workload: Sequence[Weighted]
    yardstick: float
    prices: Mapping[int, Floats]


def best_candidate(at: Ints, card: Ints, points: Floats, count: int) -> Scores:
    """The best way on each of so many lines, of equal ones the first. `at`: the line of each, in ascending order."""
    if len(points) == count:  # one way each
        return Scores(points, card)
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    best = np.maximum.reduceat(points, starts)
    among = np.flatnonzero(points == best[at])
    first = among[np.flatnonzero(np.diff(at[among], prepend=-1))]
    return Scores(best, card[first])


def by_cards(workload: Sequence[Weighted]) -> tuple[list[Shape], Ints]:
    """Shapes of the workload that differ in cards, and for each of the workload which of these it is."""
    found: dict[Shape, int] = {}
    which = [found.setdefault(_cards_only(shape), len(found)) for shape, _ in workload]
    return list(found), np.array(which, np.int64)


def _cards_only(shape: Shape) -> Shape:
    return shape._replace(ask=shape.ask._replace(cpu=0, memory=0))
