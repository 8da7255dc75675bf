"""Measures the fragmentation of a simulated cluster: the share of idle card memory that arriving pods cannot use."""

from collections import Counter

from cardwise.core.defrag import fragmentation
from cardwise.core.placement import fitting
from cardwise.core.placement.scored.shapes import RequestSize, make_request_size
from cardwise.simulation.cluster import NO_CARD, SimulatedCluster
from cardwise.simulation.workload import SimulatedWorkload


class SimulatedFragments:
    """The fragmentation of one simulated cluster. Recomputes only nodes that were marked as changed."""

    def __init__(self, workload: SimulatedWorkload, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._changed = {node.name for node in cluster.ledger.nodes()}
        # Pods without cards count too, as in FGD, so that the numbers can be compared with the published numbers.
        request_sizes: Counter[RequestSize] = Counter()
        for shape, count in Counter(pod.shape for pod in workload.pods).items():
            request = shape.request or NO_CARD
            request_size = make_request_size(request, fitting.card_requests(request), shape.load)
            if request_size is not None:
                request_sizes[request_size] += count
        self._fragments = fragmentation.Fragments(fragmentation.typical_pods(request_sizes, cluster.ledger.kinds))

    def mark_changed(self, node: str) -> None:
        """Mark the node as changed, since a pod was placed on it or removed from it."""
        self._changed.add(node)

    def fragmented_percent(self) -> float:
        """The share of idle card memory that is fragmented, in percent; 0 if nothing is idle."""
        for name in sorted(self._changed):
            self._fragments.set_node(name, self._cluster.ledger.node(name), self._cluster.free_load(name))
        self._changed.clear()
        return self._fragments.total().percent
