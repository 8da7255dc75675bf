"""Fragmentation of a simulated cluster: how much of the idle cards the arriving pods can use."""

from collections import Counter

from cardwise.core.defrag import fragmentation
from cardwise.core.placement import fitting
from cardwise.core.placement.scored.shapes import Ask, ask_of
from cardwise.simulation.cluster import NO_CARD, Cluster
from cardwise.simulation.workload import SimulatedWorkload


class SimulatedFragments:
    """The fragmentation of one simulated cluster. Counts only nodes again that were touched."""

    def __init__(self, workload: SimulatedWorkload, cluster: Cluster) -> None:
        self._cluster = cluster
        self._touched = {node.name for node in cluster.ledger.nodes()}
        # Pods without cards too: FGD counts them, and its authors' numbers are compared with ours.
        asks: Counter[Ask] = Counter()
        for shape, many in Counter(pod.shape for pod in workload.pods).items():
            request = shape.request or NO_CARD
            ask = ask_of(request, fitting.claims(request), shape.load)
            if ask is not None:
                asks[ask] += many
        self._fragments = fragmentation.Fragments(fragmentation.typical(asks, cluster.ledger.kinds))

    def touch(self, node: str) -> None:
        """Something has come to the node, or left it."""
        self._touched.add(node)

    def percent(self) -> float:
        """How much of what is idle is fragmented; 0 where nothing is idle."""
        for name in sorted(self._touched):
            self._fragments.set(name, self._cluster.ledger.node(name), self._cluster.left(name))
        self._touched.clear()
        return self._fragments.total().percent
