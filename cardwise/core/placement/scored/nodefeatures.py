"""Features of nodes: the numbers that each scored policy computes from a node's cards, cached until the node changes.

A scan of all nodes computes the features and renews them. A scan takes as long as many decisions. It runs in several
steps, and decisions do not wait for it.
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
        self._changed: Bools = np.zeros(0, np.bool_)  # nodes that have changed since their features were computed
        self._unpriced: Bools = np.zeros(0, np.bool_)  # nodes whose value must be computed with the current prices
        self._seen_changes = 0

    def values_of(self, slots: Ints) -> NodeScores:
        """The current features and values of these slots; no slot may occur twice."""
        self._refresh_features(slots)
        unpriced = slots[self._unpriced[slots]]
        if len(unpriced):
            lines = self._table.lines
            features, cpu, memory = self._features[unpriced], lines.cpu[unpriced], lines.memory[unpriced]
            self._node_values[unpriced] = self.scoring.remaining_values(features, cpu, memory)
            self._unpriced[unpriced] = False
        return NodeScores(self._features[slots], self._node_values[slots])

    def measure_supply(self, slots: Ints) -> Floats:
        """See `Scoring.measure_supply`. The caller adds up the numbers of all slots."""
        self._refresh_features(slots)
        return self.scoring.measure_supply(self._table.lines.pick(slots), self._features[slots])

    def update_prices(self, supply: Floats, departure_rate: float) -> bool:
        """Update prices from the supply of all nodes, see `Scoring.update_prices`."""
        if not self.scoring.update_prices(supply, departure_rate):
            return False
        self._unpriced[:] = True
        return True

    def _refresh_features(self, slots: Ints) -> None:
        length = len(self._table.lines)
        if len(self._node_values) != length:
            self._features, self._node_values = np.zeros((length, self.scoring.width)), np.zeros(length)
            self._changed, self._unpriced = np.ones(length, np.bool_), np.ones(length, np.bool_)
        else:
            changes = self._table.changed_since(self._seen_changes)
            changed = changes if changes is not None else slice(None)
            self._changed[changed] = self._unpriced[changed] = True
        self._seen_changes = self._table.change_count
        changed_slots = slots[self._changed[slots]]
        if len(changed_slots):
            self._features[changed_slots] = self.scoring.node_features(self._table.lines.pick(changed_slots))
            self._changed[changed_slots] = False


class FeatureScan:
    """A scan of all nodes, in several steps. Changes during the scan may or may not be included."""

    def __init__(self, table: NodeTable, features: NodeFeatures) -> None:
        self.features = features
        self._table = table
        self._sum: Floats | None = None
        self._next_slot = 0

    def scan_nodes(self, max_nodes: int) -> int:
        """Scan at most `max_nodes` nodes. Returns how many were scanned."""
        count = min(max_nodes, len(self._table) - self._next_slot)
        if count > 0 or self._sum is None:
            supply = self.features.measure_supply(np.arange(self._next_slot, self._next_slot + count))
            self._sum = supply if self._sum is None else self._sum + supply
            self._next_slot += count
        return count

    def conclude(self, departure_rate: float) -> bool | None:
        """Update prices if the scan is complete. Returns whether all scores have changed; None if not complete."""
        if self._sum is None or self._next_slot < len(self._table):
            return None
        return self.features.update_prices(self._sum, departure_rate)


class FeatureViews:
    """The features of each policy in use. A scan of all nodes computes the features, and later scans renew them.

    The old features are used until the new ones are complete.

    make: returns the scoring of a policy from the learned workload; None if nothing was learned yet.
    """

    def __init__(self, table: NodeTable, make: Callable[[str], Scoring | None]) -> None:
        self._table = table
        self._make = make
        self._requested_policies: dict[str, None] = {}
        self._features_by_policy: dict[str, NodeFeatures] = {}
        self._scans: dict[str, FeatureScan] = {}
        self._departure_rate = 0.0

    def __contains__(self, policy: str) -> bool:
        """Whether the features of the policy are complete."""
        return policy in self._features_by_policy

    def __getitem__(self, policy: str) -> NodeFeatures:
        return self._features_by_policy[policy]

    def prepare_policy(self, policy: str) -> None:
        """Compute features for this policy from now on."""
        if policy not in self._requested_policies:
            self._requested_policies[policy] = None
            self._begin(policy)

    def recompute_features(self) -> None:
        """Recompute all features, because the learned workload or the kinds of cards have changed."""
        for policy in self._requested_policies:
            self._begin(policy)

    def start_scans(self, departure_rate: float) -> None:
        """Start a scan for each policy whose features are complete, unless one is running.

        `prepare_policy` and `recompute_features` start a policy's first scan.
        """
        self._departure_rate = departure_rate
        for policy, features in self._features_by_policy.items():
            if policy not in self._scans:
                self._scans[policy] = FeatureScan(self._table, features)

    def scan_nodes(self, max_nodes: int) -> list[str]:
        """Scan at most `max_nodes` nodes. Returns the policies whose scores have all changed."""
        outdated: list[str] = []
        for policy, scan in list(self._scans.items()):
            max_nodes -= scan.scan_nodes(max_nodes)
            changed = scan.conclude(self._departure_rate)
            if changed is None:
                return outdated
            del self._scans[policy]
            if changed or self._features_by_policy.get(policy) is not scan.features:
                self._features_by_policy[policy] = scan.features
                outdated.append(policy)
        return outdated

    @property
    def is_scanning(self) -> bool:
        """Whether a scan is in progress."""
        return bool(self._scans)

    def _begin(self, policy: str) -> None:
        scoring = self._make(policy)
        if scoring is not None:
            self._scans[policy] = FeatureScan(self._table, NodeFeatures(self._table, scoring))
