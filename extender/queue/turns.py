"""Puts pods off at the beginning of a term: first come those that were turned away while no extender answered.

kube-scheduler takes the nomination from a pod that it cannot ask an extender about, and lets it wait for up to ten
seconds more than others. In that time pods of lower priority would take what has just been freed for it, and it would
preempt once more. So they wait until it has been here once, but not for long. Not thread-safe: the state locks.
"""

from typing import Final

_SECONDS: Final = 12.0  # kube-scheduler's longest back-off, and a moment


class Turns:
    """Times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._away: dict[str, int] = {}  # priorities of those who were brought in vain, by pod
        self._asked: set[str] = set()  # who has been here since the term began, as long as that matters
        self._until = float("-inf")
        self._put_off = False  # somebody waits for others to come

    def heard(self, uid: str, priority: int | None) -> None:
        """The pod waits, and kube-scheduler could not ask for it; None: that is not why it waits."""
        if priority is None:
            self.drop(uid)
        else:
            self._away[uid] = priority

    def drop(self, uid: str) -> None:
        """The pod waits no more."""
        self._away.pop(uid, None)
        self._asked.discard(uid)

    def begin(self, now: float) -> None:
        """A term begins."""
        self._asked.clear()
        self._until = now + _SECONDS

    def has(self, uid: str, priority: int, now: float) -> bool:
        """Whether the pod, which has come, may be placed now."""
        if now >= self._until:
            return True
        self._asked.add(uid)
        if not self._comes_before(priority):
            return True
        self._put_off = True
        return False

    def step(self, now: float) -> bool:
        """Whether those who were put off may come again."""
        if not self._put_off or (now < self._until and self._away.keys() - self._asked):
            return False
        self._put_off = False
        return True

    def _comes_before(self, priority: int) -> bool:
        return any(other > priority for uid, other in self._away.items() if uid not in self._asked)
