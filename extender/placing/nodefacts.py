"""The facts about nodes from which a placement policy ranks the nodes for a pod (`Policy.rank_nodes`)."""

from collections.abc import Mapping

from cardwise.core.api import policies
from extender.cache.nodeload import NodeLoads


class NodeFacts(policies.NodeFacts):
    """The labels of nodes, and the peers of a pod.

    loads: the nodes' loads, which also have their labels.
    peer_counts_by_node: the number of the peers on each node. The pod itself and the members of a gang that is being
        planned are left out.
    """

    def __init__(self, loads: NodeLoads, peer_counts_by_node: Mapping[str, int]) -> None:
        self._loads = loads
        self._peers = peer_counts_by_node

    def labels(self, node: str) -> Mapping[str, str]:
        return self._loads.labels(node)

    def peer_counts_by_node(self) -> Mapping[str, int]:
        return self._peers
