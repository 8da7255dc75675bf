"""The facts about nodes from which a placement policy ranks the nodes for a pod (`Policy.rank_nodes`)."""

from collections import Counter
from collections.abc import Collection, Mapping

from cardwise.core.api import policies
from extender.cache.nodeload import NodeLoads


class NodeFacts(policies.NodeFacts):
    """The labels of nodes, and the peers of a pod.

    loads: has the labels.
    peer_nodes: the node of each peer, by UID (`Reservations.peer_nodes`).
    excluded: the UIDs of pods that do not count, such as the pod itself or the members of a gang that is planned.
    """

    def __init__(self, loads: NodeLoads, peer_nodes: Mapping[str, str], excluded: Collection[str]) -> None:
        self._loads = loads
        self._peers = Counter(node for uid, node in peer_nodes.items() if uid not in excluded)

    def labels(self, node: str) -> Mapping[str, str]:
        return self._loads.labels(node)

    def peer_counts_by_node(self) -> Mapping[str, int]:
        return self._peers
