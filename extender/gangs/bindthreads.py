"""Limits how many bind threads gangs may occupy, fairly among namespaces.

Each member of a gang, except the last, waits in a thread of the extender. One tenant could occupy all threads with
gangs whose last member never comes. So a namespace that recently got threads must let other namespaces go first. While
another namespace is short of threads, the members of a gang wait no longer than `GangPatience.permit`, even if its
PodGroup sets a longer time.
"""

from typing import Final

from cardwise.core.gangs.gangstate import Gang

_WAIT_SECONDS: Final = 5.0  # seconds for which a refused gang counts as short of threads: longer than until its retry
_MAX_NAMESPACES: Final = 1000  # maximum number of namespaces whose last admission is remembered


class BindThreadAdmission:
    """Decides which gangs may occupy bind threads. Not thread-safe: the caller holds the lock of `State`.

    max_threads: the number of threads in which members may wait.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._admitted_at: dict[str, float] = {}  # by namespace, when it last got threads; the latest at the end
        self._short: dict[str, tuple[str, float]] = {}  # by gang: its namespace, and when it was last refused threads

    def refusal_reason(self, gang: Gang, occupied: int, now: float) -> str | None:
        """Why the gang's members may not wait in bind now; None if they may wait.

        occupied: the number of threads in which members of other gangs wait or may wait.
        """
        waiting = len(gang.members_to_plan()) - 1
        if waiting > self._max_threads:
            return f"{waiting} pods must wait in bind, and the extender has threads for {self._max_threads} of them"
        if occupied + waiting > self._max_threads:
            self._short[gang.key] = gang.namespace, now
            return "other gangs are being bound"
        if waiting and self._must_yield(gang.namespace, now):
            return "a gang of another namespace comes first for the bind threads"
        self._short.pop(gang.key, None)
        return None

    def mark_admitted(self, gang: Gang, now: float) -> None:
        """Record that the members of the gang may wait from now on."""
        self._admitted_at.pop(gang.namespace, None)
        self._admitted_at[gang.namespace] = now
        if len(self._admitted_at) > _MAX_NAMESPACES:
            del self._admitted_at[next(iter(self._admitted_at))]

    def are_others_short(self, namespace: str, now: float) -> bool:
        """Whether gangs of other namespaces are short of threads."""
        self._short = {key: entry for key, entry in self._short.items() if now - entry[1] < _WAIT_SECONDS}
        return any(other != namespace for other, _ in self._short.values())

    def _must_yield(self, namespace: str, now: float) -> bool:
        if not self.are_others_short(namespace, now):
            return False
        own_time = self._admitted_at.get(namespace, float("-inf"))
        return any(self._admitted_at.get(other, float("-inf")) < own_time for other, _ in self._short.values())
