"""Fair queueing: whose write is next, so that nobody's slow or many writes delay those of others.

Start-time fair queueing. Each namespace (or node, or kind) has a virtual time: the seconds that its writes have taken.
The next write is that of the namespace with the least. With A, whose writes take 2 s each, and B, whose writes take
0.02 s each, A is served once, then B for a hundred writes, then A again. A namespace that was idle starts where the
others are, without time saved up.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")

_LEAST = 0.02  # seconds that a write counts for at least: many short writes take a namespace's turn as well


class FairQueueing:
    """Chooses the next namespace (or node, or kind) so that each gets the same time: fair queueing by start times.

    A namespace whose objects are slow to write, or many, delays only itself. A new namespace starts where the others
    are, without time saved up.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}  # the virtual time of each namespace, in seconds of writing
        self._now = 0.0  # the virtual time of the namespace that was served last

    def first(self, waiting: Iterable[str]) -> str:
        """The namespace that is next, of those that wait; there must be one. Of equal ones the one that was idle."""
        namespace = min(waiting, key=lambda name: (self._stands(name), self._used.get(name, 0.0)))
        self._now = max(self._now, self._stands(namespace))
        return namespace

    def took(self, namespace: str, seconds: float) -> None:
        self._used[namespace] = self._stands(namespace) + max(seconds, _LEAST)

    def rest(self) -> None:
        """No namespace waits."""
        self._used.clear()
        self._now = 0.0

    def _stands(self, namespace: str) -> float:
        return max(self._used.get(namespace, 0.0), self._now)


def round_robin(items: Iterable[_T], owner: Callable[[_T], str]) -> list[_T]:
    """The items in another order: the first of each owner, then the second of each, and so on."""
    positions, before = list[tuple[int, _T]](), Counter[str]()
    for item in items:
        name = owner(item)
        positions.append((before[name], item))
        before[name] += 1
    return [item for _, item in sorted(positions, key=lambda pair: pair[0])]
