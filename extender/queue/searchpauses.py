"""Pauses of namespaces after long searches. Without pauses, the pods of one namespace could stop the searches of all
others.

Theory of operation. After a search of 0.05 s of CPU or more, its namespace pauses. The pause is ten times the search
time, multiplied by the number of namespaces that pause at that moment, including this namespace. So a single namespace
uses at most a tenth of the time. A user's many namespaces use a tenth together, not a tenth each. A pause is at most
600 s, since the other namespaces may stop searching long before the pause ends. A shorter search does not end a pause.
Only namespaces with such long searches ever wait.

Example: the search for a pod of A takes 5 s, so A pauses 50 s. B searches meanwhile; its search takes 1 s, so B pauses
20 s. With ten such namespaces, each search of 1 s is followed by a pause of 100 s.

All namespaces that pause share the tenth equally, so many namespaces leave little to each. Example: alone,
A makes 720 searches of 0.5 s in an hour, 360 s in total. Beside 50 namespaces with searches of 0.05 s, A makes 15 such
searches, and each of the 51 namespaces uses about 7 s.
"""

from typing import Final

from cardwise.clock import Clock

PAUSE_FACTOR: Final = 10  # the length of a pause, in lengths of the search
MAX_PAUSE_SECONDS: Final = 600
# Seconds of CPU. After a shorter search there is no pause, since any filter call in a large cluster takes as long.
SHORT_SECONDS: Final = 0.05


class SearchPauses:
    """The pauses of all namespaces. Not thread-safe: the caller holds the lock of `State`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paused_until: dict[str, float] = {}  # by namespace, when its pause ends

    def charge_search(self, namespace: str, seconds: float) -> float | None:
        """Let the namespace pause if its search was long. Returns the end of the pause; None without a pause.

        seconds: the CPU seconds of the search.
        """
        if seconds < SHORT_SECONDS:
            return None
        now = self._clock.now()
        self._paused_until = {name: until for name, until in self._paused_until.items() if until > now}
        paused_count = len(self._paused_until.keys() | {namespace})
        pause = min(MAX_PAUSE_SECONDS, PAUSE_FACTOR * paused_count * seconds)
        end = self._paused_until[namespace] = max(now + pause, self._paused_until.get(namespace, now))
        return end

    def is_paused(self, namespace: str) -> bool:
        """Whether the namespace must not search now."""
        until = self._paused_until.get(namespace)
        return until is not None and self._clock.now() < until
