"""Features of nodes: what each scored policy in use computes of their cards, kept until a node changes.

They are made and renewed by a look at all nodes, in parts: a whole look takes as long as many decisions, and no
decision waits for it.
"""

from collections.abc import Callable

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeTable
from cardwise.core.placement.scored.scoring import Known, Scoring


class NodeFeatures:
    """The features of all nodes for one policy, by slot of the table."""

    def __init__(self, table: NodeTable, scoring: Scoring) -> None:
        self.scoring = scoring
        self._table = table
        self._tally: Floats = np.zeros((0, scoring.width))
        self._worth: Floats = np.zeros(0)
        self._changed: Bools = np.zeros(0, np.bool_)  # nodes, since their tally
        self._priceless: Bools = np.zeros(0, np.bool_)  # nodes that are worth something else now
        self._at = 0

    def of(self, slots: Ints) -> Known:
        """The features of these slots as of now. Each slot at most once."""
        self._count(slots)
        priceless = slots[self._priceless[slots]]
        if len(priceless):
            lines = self._table.lines
            tally, cpu, memory = self._tally[priceless], lines.cpu[priceless], lines.memory[priceless]
            self._worth[priceless] = self.scoring.worth(tally, cpu, memory)
            self._priceless[priceless] = False
        return Known(self._tally[slots], self._worth[slots])

    def survey(self, slots: Ints) -> Floats:
        """What a look at all nodes needs of these slots."""
        self._count(slots)
        return self.scoring.survey(self._table.lines.pick(slots), self._tally[slots])

    def look(self, surveyed: Floats, leaving: float) -> bool:
        """Looks at the sum of what was surveyed, see `Scoring.look`."""
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


class FeatureSurvey:
    """A look at all nodes, in parts. It may see changes that happen meanwhile, or not."""

    def __init__(self, table: NodeTable, features: NodeFeatures) -> None:
        self.features = features
        self._table = table
        self._sum: Floats | None = None
        self._at = 0

    def go_on(self, most: int) -> int:
        """Surveys at most so many nodes. Returns how many it has surveyed."""
        count = min(most, len(self._table) - self._at)
        if count > 0 or self._sum is None:
            surveyed = self.features.survey(np.arange(self._at, self._at + count))
            self._sum = surveyed if self._sum is None else self._sum + surveyed
            self._at += count
        return count

    def conclude(self, leaving: float) -> bool | None:
        """Whether scores have changed; None while the survey is not finished."""
        if self._sum is None or self._at < len(self._table):
            return None
        return self.features.look(self._sum, leaving)


class FeatureViews:
    """The features of each policy that is asked for. They are made by a look at all nodes, and renewed in the same way.

    Until new features are finished the old ones are used. `make`: makes the scoring of a policy from what was learned
    last; None if nothing was learned yet.
    """

    def __init__(self, table: NodeTable, make: Callable[[str], Scoring | None]) -> None:
        self._table = table
        self._make = make
        self._wanted: dict[str, None] = {}
        self._known: dict[str, NodeFeatures] = {}
        self._surveys: dict[str, FeatureSurvey] = {}
        self._leaving = 0.0

    def __contains__(self, policy: str) -> bool:
        """Whether the features of the policy are finished."""
        return policy in self._known

    def __getitem__(self, policy: str) -> NodeFeatures:
        return self._known[policy]

    def want(self, policy: str) -> None:
        """The policy is asked for."""
        if policy not in self._wanted:
            self._wanted[policy] = None
            self._begin(policy)

    def renew(self) -> None:
        """Something else was learned: all features are to be made again."""
        for policy in self._wanted:
            self._begin(policy)

    def look(self, leaving: float) -> None:
        """Looks at all nodes again; features that are being made do that anyway."""
        self._leaving = leaving
        for policy, features in self._known.items():
            if policy not in self._surveys:
                self._surveys[policy] = FeatureSurvey(self._table, features)

    def go_on(self, most: int) -> list[str]:
        """Looks at at most so many nodes. Returns the policies whose scores have all changed."""
        void: list[str] = []
        for policy, survey in list(self._surveys.items()):
            most -= survey.go_on(most)
            changed = survey.conclude(self._leaving)
            if changed is None:
                return void
            del self._surveys[policy]
            if changed or self._known.get(policy) is not survey.features:
                self._known[policy] = survey.features
                void.append(policy)
        return void

    @property
    def busy(self) -> bool:
        """Whether there is more to look at."""
        return bool(self._surveys)

    def _begin(self, policy: str) -> None:
        scoring = self._make(policy)
        if scoring is not None:
            self._surveys[policy] = FeatureSurvey(self._table, NodeFeatures(self._table, scoring))
