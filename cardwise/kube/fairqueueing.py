"""Fair queueing: whose write (or call) is next, so that slow or many writes of one owner do not delay the others.

Theory of operation. Start-time fair queueing (Goyal, Vin and Cheng, 1996). Each owner (a namespace, a node, a kind or
an address) has a virtual time: the seconds that its writes have taken. The owner with the least virtual time is served
next. An owner that was idle starts at the virtual time of the owner that was served last, without credit.

Example: writes of A take 2 s each, those of B 0.02 s. A is served once, then B a hundred times, then A again: each gets
half of the time.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

_T = TypeVar("_T")

_LEAST = 0.02  # seconds that a write counts for at least: many short writes take an owner's time as well
_MANY = 1000  # owners of which is remembered what they have used


class FairQueueing:
    """Chooses the next owner (a namespace, a node, a kind or an address) so that each gets the same time.

    An owner whose objects are slow to write, or many, delays only itself.

    least: seconds that a write counts for at least.
    """

    def __init__(self, least: float = _LEAST) -> None:
        self._least = least
        self._many = _MANY
        self._used: dict[str, float] = {}  # the virtual time of each owner, in seconds of writing
        self._now = 0.0  # the virtual time of the owner that was served last
        self._waiting: set[str] = set()
        self._heap: list[tuple[float, float, int, str]] = []  # of these: since when, what they had used, in which order
        self._order = count()

    def wait(self, owner: str) -> None:
        """The owner has something to write."""
        if owner not in self._waiting:
            self._waiting.add(owner)
            used = self._used.get(owner, 0.0)
            heappush(self._heap, (max(used, self._now), used, next(self._order), owner))

    def next(self, is_eligible: Callable[[str], bool] = lambda _: True) -> str:
        """Chooses the next eligible owner, which waits no more; there must be one. Among equal ones, one that was idle.

        Owners that are passed over because they are not eligible wait no more either, and are not charged.
        """
        while True:
            since, _, _, owner = heappop(self._heap)
            if not is_eligible(owner):
                self._waiting.remove(owner)
                continue
            used = self._used.get(owner, 0.0)
            if used <= since:
                break
            heappush(self._heap, (used, used, next(self._order), owner))  # it has used time since it waits
        self._waiting.remove(owner)
        self._now = since
        self._used[owner] = since + self._least
        if len(self._used) > self._many:  # who has used no more than who is served now is as one who was idle
            self._used = {name: used for name, used in self._used.items() if used > since}
            self._many = max(_MANY, 2 * len(self._used))
        return owner

    def took(self, owner: str, seconds: float) -> None:
        """A write of the owner that was chosen took so long."""
        self.charge(owner, max(0.0, seconds - self._least))

    def charge(self, owner: str, seconds: float) -> None:
        """The owner has used so many seconds more than it was charged when it was chosen."""
        self._used[owner] = self._used.get(owner, 0.0) + seconds

    def rest(self) -> None:
        """Nobody waits."""
        self._waiting.clear()
        self._heap.clear()
        self._used.clear()
        self._now = 0.0


def round_robin(items: Iterable[_T], owner: Callable[[_T], str]) -> list[_T]:
    """The items in another order: the first of each owner, then the second of each, and so on."""
    positions, before = list[tuple[int, _T]](), Counter[str]()
    for item in items:
        name = owner(item)
        positions.append((before[name], item))
        before[name] += 1
    return [item for _, item in sorted(positions, key=lambda pair: pair[0])]
