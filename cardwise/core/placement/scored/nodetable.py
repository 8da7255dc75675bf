"""The table of nodes: all nodes as arrays of plain numbers, one line per node, and a log of changed nodes.

Scores are computed for hundreds of nodes at once, but the ledger has a separate object for each node. When a node
changes, its line is read from the ledger again. Caches that are computed from lines use the log to find the lines that
have changed.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cardwise.core.api.request import Load
from cardwise.core.placement.cardtenants import EXCLUSIVE_TAINT
from cardwise.core.placement.mpstaints import ANY
from cardwise.core.placement.nodestate import NodeState

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NO_CARD_KIND: Final = -1  # the kind at positions where a node has no card
# The number of shares on a card that takes no shares: such a card never becomes empty.
CLIENTS_OF_UNSHARED_CARD: Final = 1 << 20
_MAX_CHANGED_SLOTS: Final = 1 << 16  # changed slots that are remembered; with more, the older half is removed
_TIE_BREAK_SEED: Final = b"cardwise"


@dataclass(frozen=True, slots=True)
class NodeArrays:
    """Some nodes as arrays: one line for each node. Arrays of cards are indexed by line and by position of the card.

    free: MiB; 0 if the card is closed.
    core: free percent of the SMs; 0 if the card is closed.
    size: total MiB of the card.
    kind: the kind of the card, see `CardKinds`; ABSENT where the node has no card.
    taints: the taints of the card, see `mpstaints` and `cardtenants`.
    user: the user of the card, see `mpstaints`.
    clients: how many shares must end before the card is empty; CLIENTS_OF_UNSHARED_CARD if the card takes no shares.
    empty: whether a request for a whole card can get the card.
    first: whether no earlier card of the node is in the same state.
    cpu, memory: free amounts of the node, in millicores and bytes; -1 in a line without a node.
    """

    free: Floats
    core: Floats
    size: Floats
    kind: Ints
    taints: Ints
    user: Ints
    clients: Ints
    empty: Bools
    first: Bools
    cpu: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.cpu)

    def pick(self, positions: NDArray[np.integer] | Bools | slice) -> "NodeArrays":
        """The lines at these positions."""
        return NodeArrays(
            self.free[positions],
            self.core[positions],
            self.size[positions],
            self.kind[positions],
            self.taints[positions],
            self.user[positions],
            self.clients[positions],
            self.empty[positions],
            self.first[positions],
            self.cpu[positions],
            self.memory[positions],
        )


def tie_break_rank(node: str) -> int:
    """A fixed arbitrary number that orders nodes of equal score."""
    return int.from_bytes(blake2b(node.encode(), digest_size=7, key=_TIE_BREAK_SEED).digest())


class NodeTable:
    """The lines of all nodes, by slot. No request fits on a slot without a node."""

    def __init__(self) -> None:
        self.names: list[str] = []  # "" for a slot without a node
        self.slots: dict[str, int] = {}
        self.order: Ints = np.zeros(0, np.int64)
        self.single = False  # whether at any time a card was not open to all users
        self.fuller = 0.0  # counts changes that left less memory free
        self.emptier = 0.0  # counts changes that left more memory free
        self._vacant: list[int] = []
        self._lines = _empty_lines(0, 1)
        self._changed_slots: list[int] = []
        self._removed_count = 0  # the number of entries that were removed from the beginning of `_changed_slots`

    @property
    def lines(self) -> NodeArrays:
        """All lines, by slot."""
        return self._lines

    def __len__(self) -> int:
        return len(self.names)

    def set_node(self, name: str, node: NodeState | None, free_load: Load | None) -> None:
        """Update the line of the node.

        free_load: the node's free cpu, memory and pod slots; None if the node was deleted.
        """
        slot = self.slots.get(name)
        is_known = slot is not None
        if free_load is None or free_load.pods <= 0:
            if slot is None:
                return
            if free_load is None:
                del self.slots[name]
                self.names[slot] = ""
                self._vacant.append(slot)
            self._lines.cpu[slot] = self._lines.memory[slot] = -1.0
            self._lines.free[slot] = self._lines.core[slot] = 0.0
            self._lines.clients[slot] = CLIENTS_OF_UNSHARED_CARD
            self._lines.empty[slot] = self._lines.first[slot] = False
            self._record_change(slot)
            return
        if slot is None:
            slot = self._add_node(name)
        cards = node.cards if node is not None else ()
        if len(cards) > self._lines.free.shape[1]:
            self._widen(len(cards))
        free_before = self._lines.free[slot].sum()
        self._lines.cpu[slot], self._lines.memory[slot] = free_load.cpu, free_load.memory
        self._fill(slot, node)
        free_after = self._lines.free[slot].sum()
        self.fuller += free_after < free_before
        self.emptier += is_known and free_after > free_before
        self._record_change(slot)

    def changed_since(self, change_count: int) -> Ints | None:
        """The slots of the changes after the first `change_count`; a slot may occur several times. None if some of
        these changes are no longer known: any slot may have changed.
        """
        if change_count < self._removed_count:
            return None
        return np.array(self._changed_slots[change_count - self._removed_count :], np.int64)

    def departure_rate(self) -> float:
        """The estimated number of pods that end per pod that arrives. Older changes count less."""
        ratio = self.emptier / max(self.fuller, 1.0)
        self.emptier, self.fuller = self.emptier / 2, self.fuller / 2
        return ratio

    @property
    def change_count(self) -> int:
        """The number of changes of slots since the table was created."""
        return self._removed_count + len(self._changed_slots)

    def _fill(self, slot: int, node: NodeState | None) -> None:
        lines = self._lines
        width = lines.free.shape[1]
        free, core, size, empty, first = [0.0] * width, [0.0] * width, [0.0] * width, [False] * width, [False] * width
        kind, taints, user, clients = (
            [NO_CARD_KIND] * width,
            [0] * width,
            [ANY] * width,
            [CLIENTS_OF_UNSHARED_CARD] * width,
        )
        if node is not None:
            states = set()
            for i, card in enumerate(node.cards):
                size[i], kind[i] = card.mem, node.kinds[i]
                clients[i] = node.clients[i] if card.accepts_shares else CLIENTS_OF_UNSHARED_CARD
                if not node.is_open(i) or node.free[i] <= 0:
                    continue
                # `free_core` is negative if the setting was lowered; then no percentage is free.
                free[i], core[i], empty[i] = node.free[i], max(0, node.free_core[i]), not node.clients[i]
                taints[i], user[i] = node.mps.taints[i], node.mps.users[i]
                if node.tenants.is_exclusive(i):
                    taints[i] |= EXCLUSIVE_TAINT
                state = free[i], core[i], size[i], kind[i], empty[i], taints[i], user[i], clients[i]
                first[i] = state not in states
                states.add(state)
            self.single = self.single or node.mps.single
        lines.free[slot], lines.core[slot], lines.size[slot] = free, core, size
        lines.kind[slot], lines.taints[slot], lines.user[slot] = kind, taints, user
        lines.clients[slot] = clients
        lines.empty[slot], lines.first[slot] = empty, first

    def _record_change(self, slot: int) -> None:
        self._changed_slots.append(slot)
        if len(self._changed_slots) > _MAX_CHANGED_SLOTS:
            half = len(self._changed_slots) // 2
            del self._changed_slots[:half]
            self._removed_count += half

    def _add_node(self, name: str) -> int:
        if self._vacant:
            slot = self._vacant.pop()
            self.names[slot] = name
        else:
            slot = len(self.names)
            self.names.append(name)
            if slot >= len(self._lines):
                self._lengthen(max(64, 2 * slot))
        self.slots[name] = slot
        self.order[slot] = tie_break_rank(name)
        return slot

    def _lengthen(self, length: int) -> None:
        old_lines, lines = self._lines, _empty_lines(length, self._lines.free.shape[1])
        _copy(old_lines, lines)
        order = np.zeros(length, np.int64)
        order[: len(self.order)] = self.order
        self._lines, self.order = lines, order

    def _widen(self, width: int) -> None:
        lines = _empty_lines(len(self._lines), width)
        _copy(self._lines, lines)
        self._lines = lines


def _empty_lines(length: int, width: int) -> NodeArrays:
    shape = length, width
    return NodeArrays(
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(shape),
        np.full(shape, NO_CARD_KIND, np.int64),
        np.zeros(shape, np.int64),
        np.full(shape, ANY, np.int64),
        np.full(shape, CLIENTS_OF_UNSHARED_CARD, np.int64),
        np.zeros(shape, np.bool_),
        np.zeros(shape, np.bool_),
        np.full(length, -1.0),
        np.full(length, -1.0),
    )


def _copy(source: NodeArrays, target: NodeArrays) -> None:
    for name in ("free", "core", "size", "kind", "taints", "user", "clients", "empty", "first"):
        array = getattr(source, name)
        getattr(target, name)[: array.shape[0], : array.shape[1]] = array
    for name in ("cpu", "memory"):
        array = getattr(source, name)
        getattr(target, name)[: len(array)] = array
