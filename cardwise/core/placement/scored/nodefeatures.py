"""Features of nodes: what a scored policy computes of each node's cards, kept until the node changes."""

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeTable
from cardwise.core.placement.scored.scoring import Known, Scoring


class NodeFeatures:
    """Of all nodes, by slot as in the table, for one policy."""

    def __init__(self, table: NodeTable, scoring: Scoring) -> None:
        self.scoring = scoring
        self._table = table
        self._tally: Floats = np.zeros((0, scoring.width))
        self._worth: Floats = np.zeros(0)
        self._changed: Bools = np.zeros(0, np.bool_)  # nodes, since their tally
        self._priceless: Bools = np.zeros(0, np.bool_)  # nodes that are worth something else now
        self._at = 0

    def of(self, slots: Ints) -> Known:
        """As of now. Each slot at most once."""
        self._count(slots)
        priceless = slots[self._priceless[slots]]
        if len(priceless):
            lines = self._table.lines
            tally, cpu, memory = self._tally[priceless], lines.cpu[priceless], lines.memory[priceless]
            self._worth[priceless] = self.scoring.worth(tally, cpu, memory)
            self._priceless[priceless] = False
        return Known(self._tally[slots], self._worth[slots])

    def survey(self, slots: Ints) -> Floats:
        """What a look at all nodes needs of these."""
        self._count(slots)
        return self.scoring.survey(self._table.lines.pick(slots), self._tally[slots])

    def look(self, surveyed: Floats, leaving: float) -> bool:
        """At the sum of what was surveyed, see `Scoring.look`."""
        if not self.scoring.look(surveyed, leaving):
            return False
        self._priceless[:] = True
        return True

    def _count(self, slots: Ints) -> None:
        length = len(self._table.lines)
        if len(self._worth) != length:
            self._tally, self._worth = np.zeros((length, self.scoring.width)), np.zeros(length)
            self._changed, self._priceless = np.ones(length, np.bool_), np.ones(length, np.bool_)
        else:
            since = self._table.since(self._at)
            changed = since if since is not None else slice(None)
            self._changed[changed] = self._priceless[changed] = True
        self._at = self._table.length
        changed_slots = slots[self._changed[slots]]
        if len(changed_slots):
            self._tally[changed_slots] = self.scoring.tally(self._table.lines.pick(changed_slots))
            self._changed[changed_slots] = False
