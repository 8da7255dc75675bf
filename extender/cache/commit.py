"""The check of a plan that was made on a snapshot, before its places are reserved (docs/design/0032-snapshots.md).

Theory of operation. A planner works without the lock, and the cluster changes meanwhile. `CHECKS` lists everything that
a plan relies on. Under the lock, each entry is checked in the cluster as it is now, but only for nodes that have
changed since the snapshot. If all checks succeed, the caller reserves all places at once. If a check fails, the caller
reserves nothing, and plans again on a new snapshot.

Example: n1 and n2 have 1 GPU and 4 cpu each, and a gang member that requests 1 cpu is planned on n1. Before the commit,
a pod without GPUs takes 3.5 cpu of n1. So 0.5 cpu are free: the check `cpu, memory, slots` fails, and the second plan
puts the member on n2. If the other pod takes only 3 cpu, 1 cpu is free: all checks succeed, and plan 1 is reserved.

kube-scheduler checks affinity and the like itself before it binds a pod. Not thread-safe: the caller holds the lock of
`State`.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from cardwise.core.api import policies
from cardwise.core.gangs.gangs import Rank
from cardwise.core.placement import placement
from extender.cache.clusterview import ClusterView, NodeChanges, PodPlace
from extender.cache.nominated import NominatedPods
from extender.cache.pacing import PlanningStopped

PODS_CHECK: Final = "pods"  # the check that fails if the pods of the plan have changed


class PodPlan(NamedTuple):
    """Places for pods of one namespace that are to be reserved together.

    snapshot: the cluster on which the places were found.
    is_wanted: returns whether exactly these pods, with this rank, still need places. All must be pending, and no
        Binding may bind one of them.
    replaced: UIDs of pods whose reservations the plan replaces: the pods themselves, and overtaken nominated pods.
    own_uids: UIDs of pods whose reserved cards the plan may use.
    rank, priority: the position of the pods in the scheduling order. The pods must respect other pods' reservations
        that come earlier.
    """

    snapshot: ClusterView
    namespace: str
    places: Sequence[PodPlace]
    is_wanted: Callable[[], bool]
    replaced: Collection[str]
    own_uids: Collection[str]
    rank: Rank
    priority: int


class Commit:
    """The comparison of a plan with the cluster as it is now. Create and use it while the lock is held.

    pace: called before each search for the unknown cards of a nominated pod. If it raises `PlanningStopped`, the plan
        is in conflict: the searches would hold the lock for too long. Their results are kept for the next plan.
    """

    def __init__(
        self, cluster: ClusterView, nominated: NominatedPods, plan: PodPlan, pace: Callable[[], object] = lambda: None
    ) -> None:
        self._pace = pace
        self._cluster = cluster
        self._nominated = nominated
        self._plan = plan

    def find_conflict(self) -> str | None:
        """The name of the first check that fails; None if the places may be reserved."""
        _ = self._changed_places  # computed before the what-if changes nodes
        try:
            # Searches unknown cards before the what-if, since the results are kept.
            self._nominated.reservations_on(self._nominated_nodes, self._plan.own_uids, self._plan.priority, self._pace)
            return self._first_failed_check()
        except PlanningStopped:
            return "nominated pods"

    def _first_failed_check(self) -> str | None:
        ledger, loads, replaced = self._cluster.ledger, self._cluster.loads, self._plan.replaced
        holders = [uid for uid in replaced if ledger.holding(uid) is not None]
        with ledger.what_if(released=holders), loads.what_if(unplanned=replaced):
            return next((name for name, check in CHECKS.items() if not check(self)), None)

    @cached_property
    def _changed_places(self) -> list[PodPlace]:
        """The places on nodes that have changed since the snapshot."""
        plan = self._plan
        changes = NodeChanges(self._cluster, plan.snapshot, plan.rank, plan.namespace)
        nodes = {place.node for place in plan.places}
        changed_nodes = set(filter(changes.has_node_changed, nodes))
        return [place for place in plan.places if place.node in changed_nodes]

    @property
    def _changed_nodes(self) -> set[str]:
        return {place.node for place in self._changed_places}

    @property
    def _nominated_nodes(self) -> set[str]:
        """The changed nodes where cards are reserved for nominated pods that come first."""
        return self._nominated.reserved_nodes(self._plan.own_uids, self._plan.priority) & self._changed_nodes

    def is_epoch_same(self) -> bool:
        """Whether no other extender may have placed pods since the snapshot."""
        return self._cluster.leader_changes == self._plan.snapshot.leader_changes

    def are_pods_wanted(self) -> bool:
        """Whether exactly these pods still need places."""
        return self._plan.is_wanted()

    def do_nodes_take_pods(self) -> bool:
        """Whether all nodes of the plan exist and are still open: not cordoned, and with slots."""
        loads, loads_then = self._cluster.loads, self._plan.snapshot.loads
        return all(
            loads.free_load(node) is not None and (loads.is_open(node) or not loads_then.is_open(node))
            for node in self._changed_nodes
        )

    def have_nodes_load(self) -> bool:
        """Whether cpu, memory and slots of the nodes suffice."""
        return self._cluster.has_free_load_for(self._changed_places)

    def have_cards_capacity(self) -> bool:
        """Whether each card can take its share: it exists, is open, is of the requested class, and has the capacity.
        MPS and the tenants of the card must admit the pod.
        """
        return self._cluster.has_cards_for(self._changed_places)

    def are_labels_same(self) -> bool:
        """Whether the node labels that the pods' policies have read are unchanged (`Policy.rank_nodes`)."""
        loads, loads_then = self._cluster.loads, self._plan.snapshot.loads
        return all(
            loads.labels(place.node) == loads_then.labels(place.node)
            for place in self._changed_places
            if place.request is not None and policies.ranks_nodes(place.request.policy)
        )

    def is_within_quotas(self) -> bool:
        """Whether the remaining quotas of the namespace suffice for all pods."""
        headroom = self._cluster.headroom(self._plan.namespace)
        assignments = [(place.node, place.assignment) for place in self._plan.places if place.assignment is not None]
        return not headroom or not placement.entries_exceeded_together(self._cluster.ledger, assignments, headroom)

    def is_nominated_capacity_left(self) -> bool:
        """Whether the places leave enough capacity for the nominated pods that come first."""
        plan, nodes = self._plan, self._nominated_nodes
        with self._nominated.count_reserved(plan.own_uids, plan.priority, nodes, self._pace):
            return self._cluster.has_cards_for([place for place in self._changed_places if place.node in nodes])

    def is_gang_capacity_left(self) -> bool:
        """Whether the places leave enough capacity for a gang reservation of a higher rank."""
        plan, gang_cards = self._plan, self._cluster.gang_cards
        nodes = self._changed_nodes.intersection(gang_cards.reserved_nodes(plan.rank, plan.namespace))
        with gang_cards.count_reserved(nodes):
            return self._cluster.has_cards_for([place for place in self._changed_places if place.node in nodes])


CHECKS: Final[dict[str, Callable[[Commit], bool]]] = {
    "leader epoch": Commit.is_epoch_same,
    PODS_CHECK: Commit.are_pods_wanted,
    "nodes": Commit.do_nodes_take_pods,
    "cpu, memory, slots": Commit.have_nodes_load,
    "cards": Commit.have_cards_capacity,
    "labels": Commit.are_labels_same,
    "quotas": Commit.is_within_quotas,
    "nominated pods": Commit.is_nominated_capacity_left,
    "gang reservation": Commit.is_gang_capacity_left,
}
