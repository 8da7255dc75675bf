"""The gangs under the state's lock: what verbs, binder and controller call.

Long work is done in short turns, and other threads get the lock in between.
"""

from collections.abc import Callable, Collection
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import Foreign, Group, Rank
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.values.refusals import Refusal
from extender.ahead.reserve import Reserve
from extender.cache.cache import Cache
from extender.cache.statelock import StateLock
from extender.cache.yielding import give_way, slices
from extender.gangs.gangs import Gangs
from extender.gangs.gangviews import View
from extender.gangs.gangwords import Hold, Work

_TOLD_AT_ONCE: Final = 50  # gangs
_TENDED_AT_ONCE: Final = 200  # gangs
_ROUND_SECONDS: Final = 1.0  # of planning in one step; the rest of the round is for the next step
_RECOVER_SECONDS: Final = 3.0  # of planning before a term begins; gangs that are left are planned in the term


class LockedGangs:
    """All methods may be called from any thread. Those without a docstring are as in `Gangs`."""

    def __init__(self, lock: StateLock, cache: Cache, gangs: Gangs, reserve: Reserve, clock: Clock) -> None:
        self._lock = lock
        self._clock = clock
        self._gangs = gangs
        self._cache = cache
        self._reserve = reserve

    def set_group(self, key: str, group: Group | None) -> None:
        with self._lock:
            self._gangs.set_group(key, group)

    def set_foreign(self, kind: Foreign, key: str, group: Group | None) -> None:
        with self._lock:
            self._gangs.set_foreign(kind, key, group)

    def filter(self, uid: str, nodes: Collection[str]) -> str | Refusal | None:
        with self._lock:
            self._cache.count_cards()
            return self._gangs.filter(uid, nodes)

    def reserved(self, rank: Rank, request: PodRequest, nodes: Collection[str]) -> set[str]:
        """Those of the nodes that a gang which has waited long keeps from a pod of this rank."""
        if self._reserve.gang is None:
            return set()
        with self._lock:
            self._cache.count_cards()
            return self._reserve.closed(rank, request, nodes)

    def join(self, uid: str, node: str) -> Hold | str | None:
        with self._lock:
            self._cache.count_cards()
            return self._gangs.join(uid, node)

    def waits(self, uid: str) -> bool:
        with self._lock:
            return self._gangs.waits(uid)

    def cancel(self, hold: Hold, reason: str) -> None:
        with self._lock:
            self._gangs.cancel(hold, reason)

    def observe(self, held: Callable[[str, float], None], queued: Callable[[str], None]) -> None:
        """Sets the callbacks for metrics. `held`: a hold is over, "bound" or "ended", after so many seconds. `queued`:
        a gang begins to be bound, whose oldest member was created then.
        """
        self._gangs.observe = held
        self._gangs.queued = queued

    def recover(self) -> None:
        """A term begins: gangs that are bound in part are planned before anything else is placed."""
        with self._lock:
            self._gangs.recover()
        until = self._clock.now() + _RECOVER_SECONDS
        while self._recover_some() and self._clock.now() < until:
            give_way(self._clock)

    def stop(self, reason: str) -> None:
        with self._lock:
            self._gangs.stop(reason)

    def step(self) -> Work:
        """One round of what is due by time; only the leader calls it."""
        work, due = Work([], []), list[Gang]()
        with self._lock:
            keys = self._gangs.keys()
        for some in slices(keys, _TENDED_AT_ONCE, self._clock):
            with self._lock:
                self._cache.count_cards()
                self._gangs.tend(some, work, due)
        with self._lock:
            self._cache.count_cards()
            self._gangs.tended(due)
        until = self._clock.now() + _ROUND_SECONDS
        while self._plan_some() and self._clock.now() < until:
            give_way(self._clock)
        return work

    def _recover_some(self) -> bool:
        with self._lock:
            self._cache.count_cards()
            return self._gangs.recover_some()

    def _plan_some(self) -> bool:
        with self._lock:
            self._cache.count_cards()
            return self._gangs.plan_some()

    def evicts(self, uid: str) -> bool:
        with self._lock:
            return self._gangs.evicts(uid)

    def views(self) -> list[View]:
        """All gangs as people see them."""
        with self._lock:
            keys = self._gangs.keys()
        found: list[View] = []
        for some in slices(keys, _TOLD_AT_ONCE, self._clock):
            with self._lock:
                found += self._gangs.views(some)
        return found

    def foreign(self) -> list[tuple[Foreign, str]]:
        with self._lock:
            return self._gangs.foreign()

    def phases(self) -> dict[str, int]:
        with self._lock:
            return self._gangs.phases()
