"""A row of scores: those of all nodes for one shape, kept until a node changes.

For each node that is not stale, the kept score equals what would be computed now; a stale node has no score.
"""

from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import fit_shape
from cardwise.core.placement.scored.nodefeatures import NodeFeatures
from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeTable
from cardwise.core.placement.scored.shapes import Shape

SAMPLE: Final = 64  # nodes that take the shape, in a sample
_DRAWN: Final = 4 * SAMPLE  # nodes that are drawn; mostly so many of them take the shape
NONE: Final = -np.inf  # the points of a node that does not take the shape, or is stale


class ShapeScores:
    """The scores for one shape under one policy, by slot of the table. `decisions`: how many decisions have used it."""

    def __init__(self, table: NodeTable, features: NodeFeatures, shape: Shape) -> None:
        self.shape = shape
        self.decisions = 0
        self.points: Floats = np.zeros(0)
        self.card: Ints = np.zeros(0, np.int64)
        self._table = table
        self._features = features
        self._is_stale: Bools = np.zeros(0, np.bool_)
        self._stale_count = 0  # of them, at most
        self._log_position = 0

    def renew(self, features: NodeFeatures) -> None:
        """The features have changed, so all scores are void."""
        self._features = features
        self.points = np.zeros(0)

    def max_stale(self) -> int:
        """The most nodes that may be without a score; cheaper than `stale_slots`."""
        length = len(self._table.lines)
        return length if len(self.points) != length else self._stale_count + self._table.length - self._log_position

    def stale_slots(self) -> Ints:
        """The nodes without a score, as of now."""
        lines = self._table.lines
        if len(self.points) != len(lines):
            self.points = np.full(len(lines), NONE)
            self.card = np.full(len(lines), -1)
            self._is_stale = np.ones(len(lines), np.bool_)
        else:
            changed = self._table.changed_since(self._log_position)
            if changed is None:
                self._is_stale[:] = True
                self.points[:] = NONE
            elif len(changed):
                self._is_stale[changed] = True
                self.points[changed] = NONE
        self._log_position = self._table.length
        slots = np.flatnonzero(self._is_stale)
        self._stale_count = len(slots)
        return slots

    def refresh(self, slots: Ints) -> None:
        """Scores these slots; the scores are good until a node changes."""
        usable_cards, fits = fit_shape(self._table.lines, self.shape, slots)
        self._mark_scored(slots)
        slots, usable_cards = slots[fits], usable_cards[fits]
        if len(slots):
            node_scores, scoring = self._features.values_of(slots), self._features.scoring
            lines = self._table.lines.pick(slots)
            self.points[slots], self.card[slots] = scoring.scores(lines, node_scores, self.shape, usable_cards)

    def score_for_decision(
        self, at_once: int | None, generator: np.random.Generator, candidates: Ints | None = None
    ) -> None:
        """Scores nodes for a decision among these (None: all): each of them, or a sample if that would take long."""
        stale = self.stale_slots()
        if candidates is not None:
            stale = candidates[self._is_stale[candidates]]
        if not len(stale):
            return
        if at_once is None or len(stale) <= at_once:
            self.refresh(stale)
            return
        # Mostly some of them take the shape; to check all would take longer than to score the sample.
        drawn = generator.choice(stale, min(_DRAWN, len(stale)), replace=False)
        fits = self._fitting(drawn)
        if len(fits) < SAMPLE:
            fits = self._fitting(stale)
            generator.shuffle(fits)
            if len(fits) <= SAMPLE:
                self._mark_scored(stale)  # the others do not take the shape: that they have no score is right
        self.refresh(fits[:SAMPLE])

    def _fitting(self, slots: Ints) -> Ints:
        lines = self._table.lines
        if 2 * len(slots) > len(lines):  # to ask all is cheaper than to pick these
            return slots[fit_shape(lines, self.shape).fits[slots]]
        return slots[fit_shape(lines, self.shape, slots).fits]

    def _mark_scored(self, slots: Ints) -> None:
        """These slots, each once, have the right score now."""
        self._stale_count -= int(self._is_stale[slots].sum())
        self._is_stale[slots] = False
