"""Which nodes report each card or device, by UUID, and which pods hold one that their own node does not report."""

from collections.abc import Collection, Iterable

from immutables import Map

_NO_NODES: tuple[str, ...] = ()
_NO_PODS: Map[str, int] = Map()


class NodesByUuid:
    """The nodes of all cards, or of all devices other than GPUs, by UUID. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: Map[str, tuple[str, ...]] = Map()
        self._elsewhere: Map[str, Map[str, int]] = Map()  # by UUID, then by pod: how often it was added

    def copy(self) -> "NodesByUuid":
        """An independent copy: later changes of one do not affect the other. Takes the same time for any number of
        UUIDs.
        """
        duplicate = NodesByUuid()
        duplicate._nodes, duplicate._elsewhere = self._nodes, self._elsewhere  # these maps are immutable
        return duplicate

    def nodes(self, uuid: str) -> tuple[str, ...]:
        """The nodes that report the UUID, in the order of their names; usually one."""
        return self._nodes.get(uuid, _NO_NODES)

    def shared(self) -> dict[str, tuple[str, ...]]:
        """The nodes of each UUID that several nodes report."""
        return {uuid: nodes for uuid, nodes in self._nodes.items() if len(nodes) > 1}

    def set_uuids(self, node: str, uuids_before: Collection[str], uuids_now: Collection[str]) -> None:
        """Update the UUIDs that the node reports from `uuids_before` to `uuids_now`."""
        own_name = (node,)
        for uuid in uuids_before:
            if uuid not in uuids_now:
                self._set(uuid, tuple(name for name in self._nodes[uuid] if name != node))
        for uuid in uuids_now:
            if uuid not in uuids_before:
                other_nodes = self._nodes.get(uuid)
                self._set(uuid, tuple(sorted((*other_nodes, node))) if other_nodes else own_name)

    def pods_whose_node_lacks(self, uuid: str) -> Iterable[str]:
        """The UIDs of the pods that hold this card or device although their own node does not report it."""
        return self._elsewhere.get(uuid, ())

    def count_holding_elsewhere(self, uuid: str, uid: str, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) a pod that holds this card or device although its own node does not report
        it.
        """
        holders = self._elsewhere.get(uuid, _NO_PODS)
        times = holders.get(uid, 0) + sign
        holders = holders.set(uid, times) if times else holders.delete(uid)
        self._elsewhere = self._elsewhere.set(uuid, holders) if holders else self._elsewhere.delete(uuid)

    def _set(self, uuid: str, nodes: tuple[str, ...]) -> None:
        if nodes:
            self._nodes = self._nodes.set(uuid, nodes)
        else:
            self._nodes = self._nodes.delete(uuid)
