"""Features of nodes: what each scored policy in use computes of their cards, kept until a node changes.

They are made and renewed by a look at all nodes, in parts: a whole look takes as long as many decisions, and no
decision waits for it.
"""

from collections.abc import Callable

import numpy as np

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeTable
from cardwise.core.placement.scored.scoring import NodeScores, Scoring


class NodeFeatures:
    """The features of all nodes for one policy, by slot of the table."""

    def __init__(self, table: NodeTable, scoring: Scoring) -> None:
        self.scoring = scoring
        self._table = table
        self._features: Floats = np.zeros((0, scoring.width))
        self._node_values: Floats = np.zeros(0)
        self._changed: Bools = np.zeros(0, np.bool_)  # nodes, since their tally
        self._unpriced: Bools = np.zeros(0, np.bool_)  # nodes that are worth something else now
        self._at = 0

    def values_of(self, slots: Ints) -> NodeScores:
        """The features of these slots as of now. Each slot at most once."""
        self._count(slots)
        unpriced = slots[self._unpriced[slots]]
        if len(unpriced):
            lines = self._table.lines
            features, cpu, memory = self._features[unpriced], lines.cpu[unpriced], lines.memory[unpriced]
            self._node_values[unpriced] = self.scoring.node_values(features, cpu, memory)
            self._unpriced[unpriced] = False
        return NodeScores(self._features[slots], self._node_values[slots])

    def survey(self, slots: Ints) -> Floats:
        """What a look at all nodes needs of these slots."""
        self._count(slots)
        return self.scoring.survey(self._table.lines.pick(slots), self._features[slots])

    def update_prices(self, surveyed_sum: Floats, leaving: float) -> bool:
        """Looks at the sum of what was surveyed, see `Scoring.update_prices`."""
        if not self.scoring.update_prices(surveyed_sum, leaving):
            return False
        self._unpriced[:] = True
        return True

    def _count(self, slots: Ints) -> None:
        length = len(self._table.lines)
        if len(self._node_values) != length:
            self._features, self._node_values = np.zeros((length, self.scoring.width)), np.zeros(length)
            self._changed, self._unpriced = np.ones(length, np.bool_), np.ones(length, np.bool_)
        else:
            since = self._table.since(self._at)
            changed = since if since is not None else slice(None)
            self._changed[changed] = self._unpriced[changed] = True
        self._at = self._table.length
        changed_slots = slots[self._changed[slots]]
        if len(changed_slots):
            self._features[changed_slots] = self.scoring.node_features(self._table.lines.pick(changed_slots))
            self._changed[changed_slots] = False


class FeatureSurvey:
    """A look at all nodes, in parts. It may see changes that happen meanwhile, or not."""

    def __init__(self, table: NodeTable, features: NodeFeatures) -> None:
        self.features = features
        self._table = table
        self._sum: Floats | None = None
        self._at = 0

    def survey_nodes(self, max_nodes: int) -> int:
        """Survey at most `max_nodes` nodes. Returns how many were surveyed."""
        count = min(max_nodes, len(self._table) - self._at)
        if count > 0 or self._sum is None:
            surveyed_sum = self.features.survey(np.arange(self._at, self._at + count))
            self._sum = surveyed_sum if self._sum is None else self._sum + surveyed_sum
            self._at += count
        return count

    def conclude(self, leaving: float) -> bool | None:
        """Whether scores have changed; None while the survey is not finished."""
        if self._sum is None or self._at < len(self._table):
            return None
        return self.features.update_prices(self._sum, leaving)


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

    def prepare_policy(self, policy: str) -> None:
        """The policy is asked for."""
        if policy not in self._wanted:
            self._wanted[policy] = None
            self._begin(policy)

    def renew(self) -> None:
        """Discard all features: the learned workload has changed."""
        for policy in self._wanted:
            self._begin(policy)

    def start_surveys(self, leaving: float) -> None:
        """Looks at all nodes again; features that are being made do that anyway."""
        self._leaving = leaving
        for policy, features in self._known.items():
            if policy not in self._surveys:
                self._surveys[policy] = FeatureSurvey(self._table, features)

    def survey_nodes(self, max_nodes: int) -> list[str]:
        """Survey at most `max_nodes` nodes. Returns the policies whose scores have all changed."""
        outdated: list[str] = []
        for policy, survey in list(self._surveys.items()):
            max_nodes -= survey.survey_nodes(max_nodes)
            changed = survey.conclude(self._leaving)
            if changed is None:
                return outdated
            del self._surveys[policy]
            if changed or self._known.get(policy) is not survey.features:
                self._known[policy] = survey.features
                outdated.append(policy)
        return outdated

    @property
    def busy(self) -> bool:
        """Whether there is more to look at."""
        return bool(self._surveys)

    def _begin(self, policy: str) -> None:
        scoring = self._make(policy)
        if scoring is not None:
            self._surveys[policy] = FeatureSurvey(self._table, NodeFeatures(self._table, scoring))
