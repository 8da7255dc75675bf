"""Places for starts that wait: 16 on a node, shared fairly by namespaces and, within a namespace, by cards.

Theory of operation. A start waits in a thread of the gRPC server. The number of places is limited, since other threads
must stay free for Allocate. While a place is free, any start gets it. If none is free, a start takes a place of a
larger owner (`RecentUse`). This is the namespace with the most places; if that is the start's own namespace, it is the
card of this namespace with the most places. Of this owner's starts, the start that has waited longest loses its place:
it is refused, and the kubelet tries it again. If no owner is larger, the new start does not wait.

Example: namespace A has all 16 places, by starts on a card whose MPS daemon it ends again and again. A start of
namespace B on another card takes one of them. The next start of A on its card does not wait: A has 15 places, and no
owner has more. Starts of B, C and D may go on to take places until each of the four has 4.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cardwise.clock import Clock
from cardwise.kube.fairqueueing import RecentUse

PLACES = 16
# Maximum number of threads of starts that have a place, or have lost their place and have not noticed this yet.
_MAX_THREADS = 2 * PLACES

Cards = tuple[str, ...]  # the UUIDs of the cards and devices of a container


@dataclass(eq=False, slots=True)
class _Place:
    namespace: str
    cards: Cards
    since: float
    is_lost: bool = False


class WaitPlaces:
    """The places of the starts that wait. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By namespace, the start that has waited longest first.
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self._threads = 0
        self._used: RecentUse[str] = RecentUse(clock)  # recent waiting time in seconds, by namespace
        self._used_of_cards: RecentUse[tuple[str, Cards]] = RecentUse(clock)  # by namespace and set of cards

    @contextlib.contextmanager
    def reserve(self, namespace: str, cards: Cards) -> Iterator[Callable[[], bool]]:
        """Reserve a place for a start of the namespace on these cards, until the context ends.

        Yields a function that returns whether the start has a place. The start may get no place, or may lose its place
        to another start later. Without a place, it must end its wait.
        """
        with self._lock:
            place = self._try_reserve(namespace, cards)
        if place is None:
            yield lambda: False
            return
        try:
            yield lambda: not place.is_lost
        finally:
            with self._lock:
                self._release(place)

    def _try_reserve(self, namespace: str, cards: Cards) -> _Place | None:
        if self._threads >= _MAX_THREADS:
            return None
        if sum(map(len, self._places.values())) >= PLACES:
            losing_place = self._find_losing_place(namespace, cards)
            if losing_place is None:
                return None
            losing_place.is_lost = True
            self._remove(losing_place)
        place = _Place(namespace, cards, self._clock.now())
        self._places[namespace].append(place)
        self._threads += 1
        return place

    def _find_losing_place(self, namespace: str, cards: Cards) -> _Place | None:
        """The place that a start of the namespace on these cards takes; None if no owner is larger than its own."""
        for larger_namespace in self._used.larger_owners(namespace, self._places)[:1]:
            places_by_cards = self._group_by_cards(larger_namespace)
            return places_by_cards[self._used_of_cards.owners_by_size(places_by_cards)[0]][0]
        places_by_cards = self._group_by_cards(namespace)
        for owner in self._used_of_cards.larger_owners((namespace, cards), places_by_cards)[:1]:
            return places_by_cards[owner][0]
        return None

    def _group_by_cards(self, namespace: str) -> dict[tuple[str, Cards], list[_Place]]:
        places_by_cards: dict[tuple[str, Cards], list[_Place]] = defaultdict(list)
        for place in self._places.get(namespace, ()):
            places_by_cards[namespace, place.cards].append(place)
        return places_by_cards

    def _release(self, place: _Place) -> None:
        if not place.is_lost:
            self._remove(place)
        self._threads -= 1
        seconds = self._clock.now() - place.since
        self._used.add_use(place.namespace, seconds)
        self._used_of_cards.add_use((place.namespace, place.cards), seconds)

    def _remove(self, place: _Place) -> None:
        places = self._places[place.namespace]
        places.remove(place)
        if not places:
            del self._places[place.namespace]
