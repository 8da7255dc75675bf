"""CPU, memory and pod counts of all nodes: the allocatable amounts, and the requests of the pods on each node
(`cardwise.kube.pods.loads`).

Loads are sums of requests, as in kube-scheduler. The gang planner reads the free amounts, since it plans a gang before
kube-scheduler has seen all members. Preemption reads the pods of a node. Not thread-safe: the caller holds the
lock of `State`. A snapshot shares data with the original. This is safe: maps with an entry for each pod are immutable,
    and values of the other maps are only replaced.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from immutables import Map

from cardwise.core.api.request import Load
from extender.records.nodeinfo import NodeRecord, PlacedPod

_UNKNOWN_CAPACITY: Final = Load(1 << 60, 1 << 60, 1 << 30)  # the assumed capacity of a node that reports no capacity
# Seconds for which a node must have offered slots again before pods are placed there. A device plugin that shuts down
# withdraws its slots, the kubelet's next report shows them again, and the plugin withdraws them again. A pod that is
# bound in between may reach a node without a plugin.
STEADY_SECONDS: Final = 3.0

_UNREACHABLE_TAINTS: Final = frozenset(
    {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"}
)  # taints of nodes


_NO_COUNTS: Final[Map[str, int]] = Map()


class NodeLoads:
    """Loads by node and by pod. The key of a pod is any unique text. The loads include planned pods as well as bound
    pods.
    """

    def __init__(self) -> None:
        self.freed_count = 0  # how many changes have freed capacity
        self.generation = 0  # how many changes of nodes and their pods were counted
        self._changed_at: dict[str, int] = {}  # the generation of each node's last change
        self._nodes: dict[str, NodeRecord] = {}
        self._slots_since: dict[str, float] = {}  # by node that had no slots: since when it has slots again
        self._freed_counts: dict[str, int] = {}  # by node; not in snapshots
        self._sums: dict[str, Load] = {}
        self._pods: Map[str, PlacedPod] = Map()
        self._planned: set[str] = set()
        self._keys_by_node: dict[str, tuple[str, ...]] = {}  # keys of `_pods` by node
        # By node, the number of pods that hold cards: for each priority the pods that could be evicted, and the pods
        # that terminate already.
        self._victims: dict[int, Map[str, int]] = {}
        self._priorities = Counter[int]()  # how many pods on nodes have each priority
        self._terminating: Map[str, int] = Map()
        self._watched: list[set[str]] = []  # the sets that `watch` has returned

    def snapshot(self) -> "NodeLoads":
        """A copy of the loads, independent of the original. The copy does not update the sets of `watch`."""
        duplicate = NodeLoads()
        duplicate.freed_count, duplicate.generation = self.freed_count, self.generation
        duplicate._changed_at = self._changed_at.copy()
        duplicate._nodes, duplicate._slots_since, duplicate._sums = (
            self._nodes.copy(),
            self._slots_since.copy(),
            self._sums.copy(),
        )
        duplicate._pods, duplicate._planned, duplicate._keys_by_node = (
            self._pods,
            self._planned.copy(),
            self._keys_by_node.copy(),
        )
        duplicate._priorities = self._priorities.copy()
        duplicate._victims, duplicate._terminating = self._victims.copy(), self._terminating
        return duplicate

    def watch(self) -> set[str]:
        """A set that collects the nodes whose `free_load` changes, initially all nodes. The caller clears it after
        reading.
        """
        watched = set(self._nodes)
        self._watched.append(watched)
        return watched

    def last_change_of(self, node: str) -> int:
        """The generation of the last change of the node or of one of its pods; the current generation if there is no
        such node.
        """
        return self._changed_at.get(node, self.generation)

    def nodes_changed_since(self, generation: int) -> list[str]:
        """The nodes whose last change came after this generation, without removed nodes."""
        if generation == self.generation:
            return []
        return [name for name, changed_at in self._changed_at.items() if changed_at > generation]

    def known_nodes(self) -> Collection[str]:
        """The names of all nodes, also of closed ones. The view changes later, so do not keep it."""
        return self._nodes.keys()

    def set_node(self, name: str, record: NodeRecord, now: float) -> None:
        """Update the node."""
        record_before = self._nodes.get(name)
        if record_before != record:
            if not record.offers_shares:
                self._slots_since.pop(name, None)
            elif record_before is not None and not record_before.offers_shares:
                self._slots_since[name] = now
            self._nodes[name] = record
            self.freed_count += 1
            self._mark_changed(name)

    def reopen_steady_nodes(self, now: float) -> bool:
        """Reopen the nodes that have offered slots again for `STEADY_SECONDS`. Returns whether any node was
        reopened.
        """
        steady = [name for name, since in self._slots_since.items() if now - since >= STEADY_SECONDS]
        for name in steady:
            del self._slots_since[name]
            self.freed_count += 1
            self._mark_changed(name)
        return bool(steady)

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._slots_since.pop(name, None)
        self._freed_counts.pop(name, None)
        self._mark_changed(name)
        self._changed_at.pop(name, None)

    def set_pod(self, key: str, placed_pod: PlacedPod) -> None:
        """Add the pod's load to its node."""
        self._planned.discard(key)
        self._set_pod(key, placed_pod)

    def remove_pod(self, key: str) -> None:
        """Remove the pod's load."""
        was_planned = key in self._planned
        self._planned.discard(key)
        pod_before = self._pods.get(key)
        if pod_before is not None:
            if not was_planned:
                self._freed_counts[pod_before.node] = self.freed_count_of(pod_before.node) + 1
            self._pods = self._pods.delete(key)
            self._add_victim_count(pod_before, -1)
            self._add_load(pod_before, -1)
            self._remove_from_node(key, pod_before.node)
            self.freed_count += 1

    def freed_count_of(self, node: str) -> int:
        """How many bound pods have left the node."""
        return self._freed_counts.get(node, 0)

    def mark_unbound(self, key: str) -> None:
        """Remove the pod's load from the node where the pod was bound: the API server now shows the pod without a node.

        If the pod is planned on a node, its load stays there.
        """
        if key in self._pods and key not in self._planned:
            self.remove_pod(key)

    def plan_pod(self, key: str, placed_pod: PlacedPod) -> None:
        """Add the pod's load to its planned node, unless the pod is bound to a node already."""
        if key not in self._pods or key in self._planned:
            self._planned.add(key)
            self._set_pod(key, placed_pod)

    def unplan_pods(self, keys: Iterable[str]) -> None:
        """Remove the loads of these pods from their planned nodes. The loads of bound pods stay."""
        for key in keys:
            if key in self._planned:
                self.remove_pod(key)

    @contextmanager
    def what_if(
        self, *, unplanned: Iterable[str] = (), removed: Iterable[str] = (), added: Iterable[PlacedPod] = ()
    ) -> Iterator[None]:
        """Context manager: inside, the loads are as if these pods were changed. Restores the loads, also after an
        exception.

        unplanned: pods to remove from their planned nodes.
        removed: pods to remove from any node.
        added: pods to add.

        The caller must not update these pods inside the context.
        """
        changes = [(self._pods[key], -1) for key in unplanned if key in self._planned]
        changes += [(self._pods[key], -1) for key in removed]
        changes += [(placed_pod, 1) for placed_pod in added]
        for placed_pod, sign in changes:
            self._add_load(placed_pod, sign)
        try:
            yield
        finally:
            for placed_pod, sign in reversed(changes):
                self._add_load(placed_pod, -sign)

    def free_load(self, node: str) -> Load | None:
        """The free cpu, memory and pods of the node; None if there is no such node."""
        record = self._nodes.get(node)
        if record is None:
            return None
        allocatable, used = record.allocatable or _UNKNOWN_CAPACITY, self._sums.get(node)
        if used is None:
            return allocatable
        return allocatable.add(used, -1)

    def load_of(self, key: str) -> Load:
        """The load of the pod on its node."""
        placed_pod = self._pods.get(key)
        return placed_pod.load if placed_pod is not None else Load(0, 0, 0)

    def labels(self, node: str) -> Mapping[str, str]:
        """The labels of the node; empty if there is no such node."""
        record = self._nodes.get(node)
        return record.node_labels.labels if record is not None else {}

    def open_nodes(self) -> Collection[str]:
        """The nodes that take pods now."""
        return [name for name, record in self._nodes.items() if record.schedulable and self.offers_shares(name)]

    def is_open(self, node: str) -> bool:
        """Whether the node takes pods now."""
        record = self._nodes.get(node)
        return record is not None and record.schedulable and self.offers_shares(node)

    def is_unavailable(self, node: str) -> bool:
        """Whether the node was deleted, is closed, or has an unreachable kubelet."""
        record = self._nodes.get(node)
        return (
            record is None
            or not record.schedulable
            or any(taint.key in _UNREACHABLE_TAINTS for taint in record.node_labels.taints)
        )

    def offers_shares(self, node: str) -> bool:
        """Whether the node has slots for shares; True if unknown.

        After slots were missing, False until the node has offered slots again for `STEADY_SECONDS`.
        """
        record = self._nodes.get(node)
        return record is None or (record.offers_shares and node not in self._slots_since)

    def pods_on(self, node: str) -> Iterator[tuple[str, PlacedPod]]:
        """Keys and pods of a node, including those that are planned there."""
        return ((key, self._pods[key]) for key in sorted(self._keys_by_node.get(node, ())))

    def has_victims(self, priority: int) -> bool:
        """Whether a pod with cards could be evicted for a pod of this priority, on any node."""
        return min(self._victims, default=priority) < priority

    def lowest_priority(self) -> int:
        """The lowest priority of the pods on nodes; 0 without pods."""
        return min(self._priorities, default=0)

    def nodes_with_victims(self, nodes: set[str], priority: int) -> set[str]:
        """The given nodes on which a pod with cards could be evicted for a pod of this priority."""
        return set[str]().union(
            *(
                filter(counts.__contains__, nodes)
                for victim_priority, counts in self._victims.items()
                if victim_priority < priority
            )
        )

    def nodes_with_terminating_pods(self, nodes: set[str]) -> set[str]:
        """The given nodes on which a pod with cards is terminating."""
        return {node for node in nodes if node in self._terminating}

    def get(self, key: str) -> PlacedPod | None:
        """The pod with the node to which it is bound or planned; None if it is on no node."""
        return self._pods.get(key)

    def _set_pod(self, key: str, placed_pod: PlacedPod) -> None:
        pod_before = self._pods.get(key)
        if pod_before == placed_pod:
            return
        self._pods = self._pods.set(key, placed_pod)
        if pod_before is not None:
            self._add_victim_count(pod_before, -1)
        self._add_victim_count(placed_pod, 1)
        if pod_before is not None and (pod_before.node, pod_before.load) == (placed_pod.node, placed_pod.load):
            self._count_change(placed_pod.node)  # its priority has changed, or it terminates: the load is the same
            return
        if pod_before is not None:
            self._add_load(pod_before, -1)
            self._remove_from_node(key, pod_before.node)
            self.freed_count += 1
        self._add_load(placed_pod, 1)
        self._keys_by_node[placed_pod.node] = (*self._keys_by_node.get(placed_pod.node, ()), key)

    def _add_victim_count(self, placed_pod: PlacedPod, sign: int) -> None:
        if placed_pod.uid:  # not only planned
            self._priorities[placed_pod.priority] += sign
            if not self._priorities[placed_pod.priority]:
                del self._priorities[placed_pod.priority]
        if not placed_pod.holds_cards or placed_pod.fixed:
            return
        if placed_pod.terminating:
            self._terminating = _add_count(self._terminating, placed_pod.node, sign)
        elif not placed_pod.grouped:
            counts = _add_count(self._victims.get(placed_pod.priority, _NO_COUNTS), placed_pod.node, sign)
            if counts:
                self._victims[placed_pod.priority] = counts
            else:
                del self._victims[placed_pod.priority]

    def _mark_changed(self, node: str) -> None:
        self._count_change(node)
        for watched in self._watched:
            watched.add(node)

    def _count_change(self, node: str) -> None:
        self.generation += 1
        if node in self._nodes:
            self._changed_at[node] = self.generation

    def _remove_from_node(self, key: str, node: str) -> None:
        keys = tuple(other_key for other_key in self._keys_by_node[node] if other_key != key)
        if keys:
            self._keys_by_node[node] = keys
        else:
            del self._keys_by_node[node]

    def _add_load(self, placed_pod: PlacedPod, sign: int) -> None:
        node, load = placed_pod.node, placed_pod.load
        self._mark_changed(node)
        sums = self._sums.get(node)
        if sums is None:
            self._sums[node] = load
            return
        sums_now = sums.add(load, sign)
        if sums_now.pods:
            self._sums[node] = sums_now
        else:
            del self._sums[node]


def _add_count(counts: Map[str, int], node: str, sign: int) -> Map[str, int]:
    """The counts by node after adding `sign` (1 or -1) to the count of this node. A count of 0 is left out."""
    count = counts.get(node, 0) + sign
    return counts.set(node, count) if count else counts.delete(node)
