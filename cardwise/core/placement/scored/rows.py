"""A row of scores: the scores of all nodes for one shape; the score of a node is cached until the node changes.

A node that has changed since it was scored is stale, and has no score. So every score in a row is current.
"""

from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import fit_shape
from cardwise.core.placement.scored.nodefeatures import NodeFeatures
from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeTable
from cardwise.core.placement.scored.shapes import RequestShape

SAMPLE_NODES: Final = 64  # nodes in a sample; the shape fits on each of them
_DRAWN_NODES: Final = (
    4 * SAMPLE_NODES
)  # nodes that are drawn for a sample; usually the shape fits on at least SAMPLE of them
NO_POINTS: Final = -np.inf  # the points of a stale node, and of a node on which the shape does not fit


class ShapeScores:
    """The scores for one shape under one policy, by slot of the table.

    decisions: how many decisions have used the row.
    points: the scores.
    card: the position of the scored card; negative if the score is not for one card.
    """

    def __init__(self, table: NodeTable, features: NodeFeatures, shape: RequestShape) -> None:
        self.shape = shape
        self.decisions = 0
        self.points: Floats = np.zeros(0)
        self.card: Ints = np.zeros(0, np.int64)
        self._table = table
        self._features = features
        self._is_stale: Bools = np.zeros(0, np.bool_)
        self._stale_count = 0  # an upper bound of the number of stale nodes
        self._change_count_read = 0

    def discard_scores(self, features: NodeFeatures) -> None:
        """Discard all scores, and use these features from now on."""
        self._features = features
        self.points = np.zeros(0)

    def max_stale(self) -> int:
        """An upper bound of the number of nodes without a score; cheaper than `stale_slots`."""
        length = len(self._table.lines)
        return (
            length
            if len(self.points) != length
            else self._stale_count + self._table.change_count - self._change_count_read
        )

    def stale_slots(self) -> Ints:
        """The slots of nodes that have no score now."""
        lines = self._table.lines
        if len(self.points) != len(lines):
            self.points = np.full(len(lines), NO_POINTS)
            self.card = np.full(len(lines), -1)
            self._is_stale = np.ones(len(lines), np.bool_)
        else:
            changed = self._table.changed_since(self._change_count_read)
            if changed is None:
                self._is_stale[:] = True
                self.points[:] = NO_POINTS
            elif len(changed):
                self._is_stale[changed] = True
                self.points[changed] = NO_POINTS
        self._change_count_read = self._table.change_count
        slots = np.flatnonzero(self._is_stale)
        self._stale_count = len(slots)
        return slots

    def refresh(self, slots: Ints) -> None:
        """Score these slots. A score is valid until the node changes."""
        usable_cards, fits = fit_shape(self._table.lines, self.shape, slots)
        self._mark_scored(slots)
        slots, usable_cards = slots[fits], usable_cards[fits]
        if len(slots):
            node_scores, scoring = self._features.values_of(slots), self._features.scoring
            lines = self._table.lines.pick(slots)
            self.points[slots], self.card[slots] = scoring.scores(lines, node_scores, self.shape, usable_cards)

    def score_for_decision(
        self, max_scored_nodes: int | None, generator: np.random.Generator, candidates: Ints | None = None
    ) -> None:
        """Score the candidates without a score for one decision. If there are more than `max_scored_nodes`, score a
        sample.

        max_scored_nodes: None for no limit.
        candidates: the slots of the candidates; None for all nodes.
        """
        stale = self.stale_slots()
        if candidates is not None:
            stale = candidates[self._is_stale[candidates]]
        if not len(stale):
            return
        if max_scored_nodes is None or len(stale) <= max_scored_nodes:
            self.refresh(stale)
            return
        # Usually the shape fits on enough of the drawn nodes. Checking all nodes takes longer than scoring the sample.
        drawn = generator.choice(stale, min(_DRAWN_NODES, len(stale)), replace=False)
        fits = self._fitting(drawn)
        if len(fits) < SAMPLE_NODES:
            fits = self._fitting(stale)
            generator.shuffle(fits)
            if len(fits) <= SAMPLE_NODES:
                self._mark_scored(stale)  # the shape fits only on the sample, so all other nodes need no score
        self.refresh(fits[:SAMPLE_NODES])

    def _fitting(self, slots: Ints) -> Ints:
        lines = self._table.lines
        if 2 * len(slots) > len(lines):  # checking all lines is faster than copying most of them
            return slots[fit_shape(lines, self.shape).fitting_nodes[slots]]
        return slots[fit_shape(lines, self.shape, slots).fitting_nodes]

    def _mark_scored(self, slots: Ints) -> None:
        """Record that these slots have a current score; no slot may occur twice."""
        self._stale_count -= int(self._is_stale[slots].sum())
        self._is_stale[slots] = False
