"""CPU, memory and pod counts of all nodes: what they have, and what the pods on them request
(`cardwise.kube.pods.loads`).

Counted by requests, as kube-scheduler does. Gangs need it, since a gang is planned before kube-scheduler has seen all
of its members; preemption needs it for the pods of a node. Not thread-safe: the state locks. A snapshot shares what
does not change: maps with an entry for each pod are persistent, and all others have values that are replaced, never
changed.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from immutables import Map

from cardwise.core.api.request import Load
from extender.records.nodeinfo import NodeRecord, PlacedPod

_UNKNOWN: Final = Load(1 << 60, 1 << 60, 1 << 30)  # the capacity of a node that reports none
# Seconds for which slots must have been back. A device plugin that is about to end withdraws them, the kubelet's next
# report brings them back, and the plugin withdraws them again: a pod that is bound in between may find no plugin.
STEADY_SECONDS: Final = 3.0

_UNREACHABLE_TAINTS: Final = frozenset(
    {"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"}
)  # taints of nodes


_NO_COUNTS: Final[Map[str, int]] = Map()


class NodeLoads:
    """Loads by node and by pod. The key of a pod is any unique text. A planned pod counts like a bound pod."""

    def __init__(self) -> None:
        self.freed_count = 0  # counts changes that freed something
        self.generation = 0  # counts changes of nodes
        self._changed_at: dict[str, int] = {}  # the generation of each node's last change
        self._nodes: dict[str, NodeRecord] = {}
        self._slots_since: dict[str, float] = {}  # nodes that had no slots, and since when they have them again
        self._sums: dict[str, Load] = {}
        self._pods: Map[str, PlacedPod] = Map()
        self._planned: set[str] = set()
        self._keys_by_node: dict[str, tuple[str, ...]] = {}  # keys of `_pods` by node
        # How many pods of a node hold cards: those that could be evicted, by priority, and those that terminate
        # already.
        self._victims: dict[int, Map[str, int]] = {}
        self._terminating: Map[str, int] = Map()
        self._watched: list[set[str]] = []  # see `watch`

    def snapshot(self) -> "NodeLoads":
        """A copy of the loads. Later changes of one are not seen in the other. The copy has no sets of `watch`."""
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
        duplicate._victims, duplicate._terminating = self._victims.copy(), self._terminating
        return duplicate

    def watch(self) -> set[str]:
        """A set that collects the nodes whose `free_load` changes, initially all nodes. The caller clears it after
        reading.
        """
        watched = set(self._nodes)
        self._watched.append(watched)
        return watched

    def changed_at(self, node: str) -> int:
        """The generation of the last change of the node or of one of its pods; the current one if there is no such
        node.
        """
        return self._changed_at.get(node, self.generation)

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
        """Open nodes whose slots have been back for `STEADY_SECONDS`. Returns whether there are any."""
        steady = [name for name, since in self._slots_since.items() if now - since >= STEADY_SECONDS]
        for name in steady:
            del self._slots_since[name]
            self.freed_count += 1
            self._mark_changed(name)
        return bool(steady)

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._slots_since.pop(name, None)
        self._mark_changed(name)
        self._changed_at.pop(name, None)

    def set_pod(self, key: str, placed_pod: PlacedPod) -> None:
        """Count the pod on its node."""
        self._planned.discard(key)
        self._set_pod(key, placed_pod)

    def remove_pod(self, key: str) -> None:
        """Stop counting the pod."""
        self._planned.discard(key)
        pod_before = self._pods.get(key)
        if pod_before is not None:
            self._pods = self._pods.delete(key)
            self._count_victim(pod_before, -1)
            self._add_load(pod_before, -1)
            self._remove_from_node(key, pod_before.node)
            self.freed_count += 1

    def mark_unbound(self, key: str) -> None:
        """Stop counting the pod where it was bound: the API server shows it without a node. Its plan
        still counts.
        """
        if key in self._pods and key not in self._planned:
            self.remove_pod(key)

    def plan_pod(self, key: str, placed_pod: PlacedPod) -> None:
        """Count the pod on the node of its plan, unless it is on a node already."""
        if key not in self._pods or key in self._planned:
            self._planned.add(key)
            self._set_pod(key, placed_pod)

    def unplan_pods(self, keys: Iterable[str]) -> None:
        """Stop counting these pods where they are planned; those that are on their nodes still count."""
        for key in keys:
            if key in self._planned:
                self.remove_pod(key)

    @contextmanager
    def what_if(
        self, *, unplanned: Iterable[str] = (), removed: Iterable[str] = (), added: Iterable[PlacedPod] = ()
    ) -> Iterator[None]:
        """Context manager: inside, other pods count. Restores the loads at the end, also after an exception.

        unplanned: pods that do not count where they are planned.
        removed: pods that do not count at all.
        added: pods that count in addition.

        These pods must not change inside the context.
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
        allocatable, used = record.allocatable or _UNKNOWN, self._sums.get(node)
        if used is None:
            return allocatable
        return allocatable.add(used, -1)

    def load_of(self, key: str) -> Load:
        """The load of the pod on its node."""
        placed_pod = self._pods.get(key)
        return placed_pod.load if placed_pod is not None else Load(0, 0, 0)

    def names(self) -> Collection[str]:
        """The nodes that take pods now."""
        return [name for name, record in self._nodes.items() if record.schedulable and self.offers_shares(name)]

    def is_open(self, node: str) -> bool:
        """Whether the node takes pods now."""
        record = self._nodes.get(node)
        return record is not None and record.schedulable and self.offers_shares(node)

    def is_unavailable(self, node: str) -> bool:
        """Whether the node takes no pods until it is repaired: it is gone, closed, or its kubelet is unreachable."""
        record = self._nodes.get(node)
        return (
            record is None
            or not record.schedulable
            or any(taint.key in _UNREACHABLE_TAINTS for taint in record.node_labels.taints)
        )

    def offers_shares(self, node: str) -> bool:
        """Whether the node has slots for shares. True if unknown; False until slots that were missing are back for
        `STEADY_SECONDS`.
        """
        record = self._nodes.get(node)
        return record is None or (record.offers_shares and node not in self._slots_since)

    def pods_on(self, node: str) -> Iterator[tuple[str, PlacedPod]]:
        """Keys and pods of a node, including those that are planned there."""
        return ((key, self._pods[key]) for key in sorted(self._keys_by_node.get(node, ())))

    def has_victims(self, priority: int) -> bool:
        """Whether a pod with cards could be evicted for a pod of this priority, on any node."""
        return min(self._victims, default=priority) < priority

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
        """The given nodes on which a pod with cards is being deleted."""
        return {node for node in nodes if node in self._terminating}

    def get(self, key: str) -> PlacedPod | None:
        """The pod with its node, or with the node of its plan."""
        return self._pods.get(key)

    def _set_pod(self, key: str, placed_pod: PlacedPod) -> None:
        pod_before = self._pods.get(key)
        if pod_before == placed_pod:
            return
        self._pods = self._pods.set(key, placed_pod)
        if pod_before is not None:
            self._count_victim(pod_before, -1)
        self._count_victim(placed_pod, 1)
        if pod_before is not None and (pod_before.node, pod_before.load) == (placed_pod.node, placed_pod.load):
            self._count_change(placed_pod.node)  # another priority, or it terminates: node and load have not changed
            return
        if pod_before is not None:
            self._add_load(pod_before, -1)
            self._remove_from_node(key, pod_before.node)
            self.freed_count += 1
        self._add_load(placed_pod, 1)
        self._keys_by_node[placed_pod.node] = (*self._keys_by_node.get(placed_pod.node, ()), key)

    def _count_victim(self, placed_pod: PlacedPod, sign: int) -> None:
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
    """The counts by node with one more (sign 1) or one less (sign -1) for this node; a node without any is left out."""
    count = counts.get(node, 0) + sign
    return counts.set(node, count) if count else counts.delete(node)
