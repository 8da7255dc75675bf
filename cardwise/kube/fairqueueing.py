"""Fair queueing: chooses the next write or call. An owner with many or slow calls must not delay other owners.

Theory of operation. Start-time fair queueing (Goyal, Vin and Cheng, 1996). Each owner (a namespace, a node, a kind or
an address) has a virtual time: the seconds that its writes have taken. The owner with the lowest virtual time is served
next. An owner that was idle starts at the virtual time of the last served owner, without credit.

Example: writes of A take 2 s each, those of B 0.02 s. A is served once, then B 100 times, then A again: each gets half
of the time.

For queues with a limit, `RecentUse` chooses the owner that loses a slot to a newcomer. This is the owner with the most
slots; of several such owners, the one that has used the most time lately. Example: 250 owners have one slot each and
queue again as soon as they are served. An owner that queues only occasionally has used less time, so one of the 250
loses its slot to this owner.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sized
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from cardwise.clock import Clock

_T = TypeVar("_T")
_OwnerT = TypeVar("_OwnerT", bound=Hashable)

_MIN_CHARGE = 0.02  # seconds; the minimum charge of a write, so that many short writes also use up an owner's time
_MAX_OWNERS_BEFORE_PRUNING = 1000  # owners; with more, owners that count as idle are removed
_MAX_OWNERS = 5_000  # owners whose use `RecentUse` keeps; twice as many take 3 MB, if they are addresses
_HALF_LIFE_SECONDS = 30.0  # seconds after which used time counts half
_MAX_HALVINGS = 64  # half-lives after which all use is scaled to a new start, because larger factors would overflow


class FairQueueing:
    """Chooses the next owner: a namespace, a node, a kind or an address. Each owner gets the same time.

    An owner with slow or many writes delays only itself.

    min_charge: the minimum charge of a write, in seconds.
    """

    def __init__(self, min_charge: float = _MIN_CHARGE) -> None:
        self._min_charge = min_charge
        self._prune_above = _MAX_OWNERS_BEFORE_PRUNING
        self._used: dict[str, float] = {}  # the virtual time of each owner, in seconds of writing
        self._virtual_time = 0.0  # the virtual time of the owner that was served last
        self._waiting: set[str] = set()
        self._heap: list[tuple[float, float, int, str]] = []  # the waiting owners: start time, used time, order, owner
        self._order = count()

    def enqueue(self, owner: str) -> None:
        """Mark the owner as waiting."""
        if owner not in self._waiting:
            self._waiting.add(owner)
            used = self._used.get(owner, 0.0)
            heappush(self._heap, (max(used, self._virtual_time), used, next(self._order), owner))

    def dequeue(self, is_eligible: Callable[[str], bool] = lambda _: True) -> str:
        """Remove the next eligible owner from the queue and return it. At least one owner in the queue must be
        eligible. Of owners with equal time, those that were idle come first.

        Ineligible owners that come before the returned owner are also removed; they are not charged.
        """
        while True:
            since, _, _, owner = heappop(self._heap)
            if not is_eligible(owner):
                self._waiting.remove(owner)
                continue
            used = self._used.get(owner, 0.0)
            if used <= since:
                break
            heappush(self._heap, (used, used, next(self._order), owner))  # the owner was charged while it waited
        self._waiting.remove(owner)
        self._virtual_time = since
        self._used[owner] = since + self._min_charge
        if len(self._used) > self._prune_above:  # owners that have used no more time than this owner count as idle
            self._used = {name: used for name, used in self._used.items() if used > since}
            self._prune_above = max(_MAX_OWNERS_BEFORE_PRUNING, 2 * len(self._used))
        return owner

    def charge_write(self, owner: str, seconds: float) -> None:
        """Charge the chosen owner for its write, which took `seconds`."""
        self.charge(owner, max(0.0, seconds - self._min_charge))

    def charge(self, owner: str, seconds: float) -> None:
        """Charge the owner `seconds`, in addition to the minimum that `dequeue` has charged."""
        self._used[owner] = self._used.get(owner, 0.0) + seconds

    def clear(self) -> None:
        """Remove all owners and their charges. Call this when no owner waits."""
        self._waiting.clear()
        self._heap.clear()
        self._used.clear()
        self._virtual_time = 0.0


class RecentUse(Generic[_OwnerT]):
    """The time that each owner has recently used, for queues with a limit. If there are more than `_MAX_OWNERS` owners,
    the use of the owners with the least is sometimes removed. Then these count as new.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used: dict[_OwnerT, float] = {}  # seconds, times 2 for each half-life between `_start` and their use
        self._start = clock.now()

    def add_use(self, owner: _OwnerT, seconds: float) -> None:
        """Record that the owner has used these seconds."""
        halvings = (self._clock.now() - self._start) / _HALF_LIFE_SECONDS
        if halvings > _MAX_HALVINGS or len(self._used) > 2 * _MAX_OWNERS:
            self._start = self._clock.now()
            largest = sorted(self._used, key=self._used.__getitem__, reverse=True)[:_MAX_OWNERS]
            decayed = {name: self._used[name] * 0.5**halvings for name in largest}
            self._used = {name: used for name, used in decayed.items() if used > 0}
            halvings = 0.0
        self._used[owner] = self._used.get(owner, 0.0) + seconds * 2**halvings

    def owners_by_size(self, slots: Mapping[_OwnerT, Sized]) -> list[_OwnerT]:
        """The owners in the order in which they lose slots. `slots`: the slots of each owner."""
        sizes = self._sizes(slots)
        return sorted(sizes, key=sizes.__getitem__, reverse=True)

    def larger_owners(self, owner: _OwnerT, slots: Mapping[_OwnerT, Sized]) -> list[_OwnerT]:
        """The owners that have more slots than `owner` would have with one more, the largest first. One of them loses a
        slot to `owner`; if there are none, `owner` is refused.
        """
        own_size = len(slots.get(owner, ())) + 1, self._used.get(owner, 0.0)
        sizes = {name: size for name, size in self._sizes(slots).items() if size > own_size}
        return sorted(sizes, key=sizes.__getitem__, reverse=True)

    def _sizes(self, slots: Mapping[_OwnerT, Sized]) -> dict[_OwnerT, tuple[int, float]]:
        used = self._used.get
        return {name: (len(queued), used(name, 0.0)) for name, queued in slots.items()}


def round_robin(elements: Iterable[_T], owner: Callable[[_T], str]) -> list[_T]:
    """Reorder the elements: the first of each owner, then the second of each, and so on."""
    positions, before = list[tuple[int, _T]](), Counter[str]()
    for element in elements:
        name = owner(element)
        positions.append((before[name], element))
        before[name] += 1
    return [element for _, element in sorted(positions, key=lambda pair: pair[0])]
