"""Decides which gang members to wake when only the gangs know that they have a chance now.

How pods are woken is in `cache.unschedulable`. Not thread-safe: the state locks.
"""

from collections.abc import Mapping

from cardwise.core.gangs.gangstate import Gang
from extender.cache.unschedulable import UnschedulablePods


class Requeue:
    """`unschedulable`: who was refused."""

    def __init__(self, unschedulable: UnschedulablePods) -> None:
        self._unschedulable = unschedulable
        self._backing_off: set[str] = set()

    def all(self, now: float) -> None:
        """Whoever waits may have a chance now."""
        self._unschedulable.freed("", now, seen=False)

    def members(self, gang: Gang, now: float) -> None:
        """Some of the plan may have been refused before there was one."""
        if any(uid in self._unschedulable for uid in gang.plan):
            self.all(now)

    def after_backoff(self, key: str) -> None:
        """The members of the gang, once it may be planned again."""
        self._backing_off.add(key)

    def drop(self, key: str) -> None:
        """The gang is no more."""
        self._backing_off.discard(key)

    def step(self, gangs: Mapping[str, Gang], now: float) -> None:
        """What time does."""
        for key in list(self._backing_off):
            gang = gangs.get(key)
            if gang is None or gang.plan or gang.ran or gang.forward:
                self._backing_off.discard(key)
            elif now >= gang.backoff_until and not gang.evicting:
                self._backing_off.discard(key)
                self.all(now)
