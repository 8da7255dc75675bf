"""For nominating ahead: remembers the nodes that kube-scheduler would accept for a pod (`nodeconstraints`).

A node may be nominated only if it is open and its labels and taints admit the pod. This module does not consider the
capacity of nodes, since it changes with every pod. It evaluates only rules that kube-scheduler certainly applies;
kube-scheduler applies the other rules itself. Pure; not thread-safe: the caller holds the lock of `State`.

For new constraints all nodes are compared, which takes 20 ms with 5,000 nodes. So `search` does this on a copy of the
nodes, without the lock, and `record_search` compares only the nodes that have changed during the search.
"""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from cardwise.core.values.decoded import Json
from cardwise.kube.pods import nodeconstraints
from cardwise.kube.pods.nodeconstraints import NodeConstraints, NodeLabelsAndTaints

# Maximum number of different constraints whose nodes are remembered; all pods of a workload have the same constraints.
_MAX_REMEMBERED: Final = 256

_MAX_CONSTRAINT_BYTES: Final = (
    4096  # nodes of longer constraints (in bytes) are not remembered: a tenant may write a MiB of them into each pod
)

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode


def constraints_key(spec: Json) -> bytes:
    """A key that is equal for pods with equal constraints on their node. `parse_constraints` parses the key."""
    return _encode(nodeconstraints.constraint_fields(spec))


@lru_cache(maxsize=_MAX_REMEMBERED)
def parse_constraints(key: bytes) -> NodeConstraints:
    """The constraints from a key of `constraints_key`."""
    return NodeConstraints.parse(*_decode(key))


class FeasibleNodes:
    """All open nodes. The feasible nodes for a key are remembered, and updated when nodes change."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeLabelsAndTaints] = {}
        self._nodes_by_key: dict[bytes, set[str]] = {}  # by key, the least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def set_node(self, name: str, labels: NodeLabelsAndTaints) -> None:
        """Update the node."""
        if self._nodes.get(name) == labels:
            return
        self._nodes[name] = labels
        for key, allowed in self._nodes_by_key.items():
            if parse_constraints(key).admits(name, labels):
                allowed.add(name)
            else:
                allowed.discard(name)

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        for allowed in self._nodes_by_key.values():
            allowed.discard(name)

    def open_nodes(self) -> Mapping[str, NodeLabelsAndTaints]:
        """A copy of the open nodes and their labels and taints."""
        return self._nodes.copy()

    def feasible_nodes(self, key: bytes) -> set[str] | None:
        """The nodes that are feasible for a pod with these constraints. The caller must not change the set.

        None if the nodes are not remembered; then a search is needed.
        """
        nodes = self._nodes_by_key.pop(key, None)
        if nodes is not None:
            self._nodes_by_key[key] = nodes
        return nodes

    def record_search(
        self, key: bytes, searched: Mapping[str, NodeLabelsAndTaints], feasible: Collection[str]
    ) -> set[str]:
        """Remember the result of a search, updated to the present nodes. Returns the nodes that are feasible now.

        searched, feasible: the input and the result of `search`.
        """
        nodes = set(feasible)
        if self._nodes != searched:
            admits = _parser(key)(key).admits
            nodes &= self._nodes.keys()
            for name, labels in self._nodes.items():
                if searched.get(name) != labels:
                    (nodes.add if admits(name, labels) else nodes.discard)(name)
        if len(key) <= _MAX_CONSTRAINT_BYTES:
            self._nodes_by_key.pop(key, None)
            if len(self._nodes_by_key) >= _MAX_REMEMBERED:
                del self._nodes_by_key[next(iter(self._nodes_by_key))]
            self._nodes_by_key[key] = nodes
        return nodes


def search(key: bytes, nodes: Mapping[str, NodeLabelsAndTaints], pause: Callable[[], object]) -> set[str]:
    """The nodes that are feasible for a pod with these constraints.

    nodes: all open nodes.
    pause: called before each node.
    """
    admits = _parser(key)(key).admits
    feasible = set[str]()
    for name, labels in nodes.items():
        pause()
        if admits(name, labels):
            feasible.add(name)
    return feasible


def _parser(key: bytes) -> Callable[[bytes], NodeConstraints]:
    """The function that parses the key; it remembers only short keys."""
    return parse_constraints if len(key) <= _MAX_CONSTRAINT_BYTES else parse_constraints.__wrapped__
