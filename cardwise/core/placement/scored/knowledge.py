"""What is known of each node to a scored policy, as the node is: kept until it changes."""

import numpy as np

from cardwise.core.placement.scored.grid import Bools, Floats, Grid, Ints
from cardwise.core.placement.scored.scoring import Known, Scoring


class Knowledge:
    """Of all nodes, by slot as in the grid, for one policy."""

    def __init__(self, grid: Grid, scoring: Scoring) -> None:
        self.scoring = scoring
        self._grid = grid
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
            lines = self._grid.lines
            tally, cpu, memory = self._tally[priceless], lines.cpu[priceless], lines.memory[priceless]
            self._worth[priceless] = self.scoring.worth(tally, cpu, memory)
            self._priceless[priceless] = False
        return Known(self._tally[slots], self._worth[slots])

    def survey(self, slots: Ints) -> Floats:
        """What a look at all nodes needs of these."""
        self._count(slots)
        return self.scoring.survey(self._grid.lines.pick(slots), self._tally[slots])

    def look(self, surveyed: Floats, leaving: float) -> bool:
        """At the sum of what was surveyed, see `Scoring.look`."""
        if not self.scoring.look(surveyed, leaving):
            return False
        self._priceless[:] = True
        return True

    def _count(self, slots: Ints) -> None:
        length = len(self._grid.lines)
        if len(self._worth) != length:
            self._tally, self._worth = np.zeros((length, self.scoring.width)), np.zeros(length)
            self._changed, self._priceless = np.ones(length, np.bool_), np.ones(length, np.bool_)
        else:
            since = self._grid.since(self._at)
            changed = since if since is not None else slice(None)
            self._changed[changed] = self._priceless[changed] = True
        self._at = self._grid.length
        changed_slots = slots[self._changed[slots]]
        if len(changed_slots):
            self._tally[changed_slots] = self.scoring.tally(self._grid.lines.pick(changed_slots))
            self._changed[changed_slots] = False
