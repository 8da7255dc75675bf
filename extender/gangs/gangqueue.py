"""The order in which waiting gangs are planned, kept up to date while they change.

Gangs that are bound in part come first, then the gang with the smallest rank. But one tenant can have thousands of
gangs, and other tenants would wait until all these are tried. So after `GANGS_BEFORE_NEXT_NAMESPACE` gangs of one
namespace the gangs of other namespaces follow. Not thread-safe: the caller holds the lock of `State`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import count
from typing import Final

from cardwise.core.gangs.gangs import Rank
from cardwise.core.gangs.gangstate import Gang

GANGS_BEFORE_NEXT_NAMESPACE: Final = 32  # gangs of a namespace, after which gangs of other namespaces follow

_QueueEntry = tuple[bool, Rank, Gang]  # ranks are never equal, so gangs are not compared


class GangQueue:
    """The gangs that do not run, in order."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, list[_QueueEntry]] = {}  # by namespace, in order
        self._places: dict[str, _QueueEntry] = {}  # by gang

    def update_gang(self, gang: Gang) -> None:
        """Update the gang's position in the order. Removes a gang that runs."""
        key, before = gang.key, self._places.get(gang.key)
        now = None if gang.ran else (not gang.forward, gang.rank(), gang)
        if now == before:
            return
        self.remove_gang(key)
        if now is not None:
            self._places[key] = now
            insort(self._by_namespace.setdefault(gang.namespace, []), now)

    def remove_gang(self, key: str) -> None:
        """Remove the gang."""
        before = self._places.pop(key, None)
        if before is None:
            return
        namespace = before[2].namespace
        places = self._by_namespace[namespace]
        del places[bisect_left(places, before)]
        if not places:
            del self._by_namespace[namespace]

    def gangs_in_order(self) -> "GangCursor":
        """All gangs in order. A gang that changes during the iteration may be left out or come twice."""
        return GangCursor(self._round_robin())

    def gangs_before(self, gang: Gang) -> "GangCursor":
        """The gangs that come before this gang. If gangs change during the iteration, as in `gangs_in_order`."""
        return GangCursor(self._round_robin(self._places[gang.key]))

    def _round_robin(self, until: _QueueEntry | None = None) -> Iterator[Gang]:
        last_lap = None
        if until is not None:
            last_lap = bisect_left(self._by_namespace[until[2].namespace], until) // GANGS_BEFORE_NEXT_NAMESPACE
        for lap in count():
            chunks = [
                places[lap * GANGS_BEFORE_NEXT_NAMESPACE : (lap + 1) * GANGS_BEFORE_NEXT_NAMESPACE]
                for places in self._by_namespace.values()
            ]
            if lap == last_lap and until is not None:
                chunks = [places[: bisect_left(places, until)] for places in chunks]
            if not any(chunks):
                return
            for _, _, gang in merge(*chunks):
                yield gang
            if lap == last_lap:
                return


class GangCursor:
    """An iterator over gangs that can be continued later."""

    def __init__(self, gangs: Iterator[Gang]) -> None:
        self._remaining = gangs
        self.gang = next(gangs, None)  # the next gang; None at the end

    def advance(self) -> None:
        """Set `gang` to the next gang."""
        self.gang = next(self._remaining, None)
