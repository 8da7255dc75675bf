"""The index of nodes by memory: finds the nodes with too little memory without checking each of thousands of nodes.

The outcome equals that of checking node by node (tests/core/placement/test_cardindex.py).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, KeysView, Sequence
from typing import Final, NamedTuple

from cardwise.core.placement.nodestate import NodeState

_RESORT_NODES: Final = 500  # changed nodes above which sorting all nodes again is faster than moving the changed nodes


class _Memory(NamedTuple):
    """A node's memory in MiB.

    largest: the capacity of its largest card.
    free: the largest free amount on one card, whether the card is open or closed.
    """

    largest: int
    free: int


class MemoryIndex:
    """The memory index of one ledger. `Ledger.memory_index` refreshes it before each use."""

    def __init__(self) -> None:
        self._memory_by_node: dict[str, _Memory] = {}
        self._largest: list[tuple[int, str]] = []
        self._free: list[tuple[int, str]] = []

    def refresh(self, changed: Iterable[tuple[str, NodeState | None]]) -> None:
        """Update the index for changed nodes; None for a deleted node."""
        memory_by_name = {
            name: _Memory(node.largest, max(node.free)) if node is not None and node.cards else None
            for name, node in changed
        }
        rebuild = len(memory_by_name) > _RESORT_NODES
        for name, memory in memory_by_name.items():
            memory_before = self._memory_by_node.get(name)
            if memory == memory_before:
                continue
            if memory is None:
                del self._memory_by_node[name]
            else:
                self._memory_by_node[name] = memory
            if not rebuild:
                self._move(name, memory_before, memory)
        if rebuild:
            self._largest = sorted((memory.largest, name) for name, memory in self._memory_by_node.items())
            self._free = sorted((memory.free, name) for name, memory in self._memory_by_node.items())

    def names(self) -> KeysView[str]:
        """The nodes with cards."""
        return self._memory_by_node.keys()

    def nodes_too_small_for(self, mem: int) -> Sequence[str]:
        """The nodes without a card of at least `mem` MiB."""
        return [name for _, name in self._largest[: bisect_left(self._largest, (mem,))]]

    def nodes_with_free(self, mem: int) -> Sequence[str]:
        """The nodes with at least `mem` MiB free on one card."""
        return [name for _, name in self._free[bisect_left(self._free, (mem,)) :]]

    def _move(self, name: str, before: _Memory | None, now: _Memory | None) -> None:
        if before is not None:
            del self._largest[bisect_left(self._largest, (before.largest, name))]
            del self._free[bisect_left(self._free, (before.free, name))]
        if now is not None:
            insort(self._largest, (now.largest, name))
            insort(self._free, (now.free, name))
