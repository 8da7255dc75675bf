"""Wait slots: a container's start may wait for MPS only with a slot. A node has 16 slots. They are shared fairly among
namespaces, and within a namespace among cards.

Theory of operation. A start waits in a thread of the gRPC server. The number of slots is limited, since other threads
must stay free for Allocate. While a slot is free, any start gets it. If no slot is free, a start takes a slot of a
larger owner (`RecentUse`). The larger owner is the namespace with the most slots. If this is the start's own namespace,
the card with the most slots in this namespace is used instead. Of the larger owner's starts, the start that has waited
longest loses its slot: that start is refused, and the kubelet repeats the start later. If no owner is larger, the new
start does not wait.

Example: namespace A has all 16 wait slots, for starts on a card whose MPS daemon A ends again and again. A start of
namespace B on another card takes one of these slots. The next start of A on its card does not wait: A has 15 slots, and
no owner has more. Starts of B, C and D may go on to take slots until each of the four has 4.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cardwise.clock import Clock
from cardwise.kube.fairqueueing import RecentUse

WAIT_SLOTS = 16
# Maximum number of threads of starts that have a slot, or have lost their slot and have not noticed this yet.
_MAX_THREADS = 2 * WAIT_SLOTS

Cards = tuple[str, ...]  # the UUIDs of the cards and devices of a container


@dataclass(eq=False, slots=True)
class _WaitSlot:
    namespace: str
    cards: Cards
    since: float
    is_lost: bool = False


class WaitSlots:
    """The limited slots in which starts of containers may wait for MPS. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By namespace, the start that has waited longest first.
        self._slots: dict[str, list[_WaitSlot]] = defaultdict(list)
        self._threads = 0
        self._used: RecentUse[str] = RecentUse(clock)  # recent waiting time in seconds, by namespace
        self._used_of_cards: RecentUse[tuple[str, Cards]] = RecentUse(clock)  # by namespace and set of cards

    @contextlib.contextmanager
    def reserve(self, namespace: str, cards: Cards) -> Iterator[Callable[[], bool]]:
        """Reserve a wait slot for a start of the namespace on these cards, until the context ends.

        Yields a function that returns whether the start has a slot. The start may get no slot, or may lose its slot to
        another start later. Without a slot, a start must stop waiting.
        """
        with self._lock:
            slot = self._try_reserve(namespace, cards)
        if slot is None:
            yield lambda: False
            return
        try:
            yield lambda: not slot.is_lost
        finally:
            with self._lock:
                self._release(slot)

    def _try_reserve(self, namespace: str, cards: Cards) -> _WaitSlot | None:
        if self._threads >= _MAX_THREADS:
            return None
        if sum(map(len, self._slots.values())) >= WAIT_SLOTS:
            losing_slot = self._find_losing_slot(namespace, cards)
            if losing_slot is None:
                return None
            losing_slot.is_lost = True
            self._remove(losing_slot)
        slot = _WaitSlot(namespace, cards, self._clock.now())
        self._slots[namespace].append(slot)
        self._threads += 1
        return slot

    def _find_losing_slot(self, namespace: str, cards: Cards) -> _WaitSlot | None:
        """The slot that a start of the namespace on these cards takes; None if no owner is larger than its own."""
        for larger_namespace in self._used.larger_owners(namespace, self._slots)[:1]:
            slots_by_cards = self._group_by_cards(larger_namespace)
            return slots_by_cards[self._used_of_cards.owners_by_size(slots_by_cards)[0]][0]
        slots_by_cards = self._group_by_cards(namespace)
        for owner in self._used_of_cards.larger_owners((namespace, cards), slots_by_cards)[:1]:
            return slots_by_cards[owner][0]
        return None

    def _group_by_cards(self, namespace: str) -> dict[tuple[str, Cards], list[_WaitSlot]]:
        slots_by_cards: dict[tuple[str, Cards], list[_WaitSlot]] = defaultdict(list)
        for slot in self._slots.get(namespace, ()):
            slots_by_cards[namespace, slot.cards].append(slot)
        return slots_by_cards

    def _release(self, slot: _WaitSlot) -> None:
        if not slot.is_lost:
            self._remove(slot)
        self._threads -= 1
        seconds = self._clock.now() - slot.since
        self._used.add_use(slot.namespace, seconds)
        self._used_of_cards.add_use((slot.namespace, slot.cards), seconds)

    def _remove(self, slot: _WaitSlot) -> None:
        slots = self._slots[slot.namespace]
        slots.remove(slot)
        if not slots:
            del self._slots[slot.namespace]
