"""Decides when to wake pods that kube-scheduler has parked: room has come, and kube-scheduler saw no event of it.

kube-scheduler tries an unschedulable pod again when a node, a pod or the like changes. A plan that ended, a card that
healed, a share that its node gave up or a quota that was raised is none of those, so a change of one node annotation
makes it one; one node is enough, because the scheduler takes every node change as a reason. Pure; the thread that
touches is `controllers.loops`.
"""

from collections import Counter

_MOST = 50_000  # pods remembered; beyond that waking is by whoever is remembered, which wakes all
_FORGET = 600.0  # seconds; kube-scheduler tries a pod that still waits again after five minutes at the latest
_RACE = 2.0  # seconds in which the scheduler may have asked before we knew what it knows
_EVERY = 1.0  # seconds between two touches: each makes the scheduler try all waiting pods


class UnschedulablePods:
    """Who was refused for want of room, and whether room has come since. Times are in seconds, of one clock.

    A node of "" is any node.
    """

    def __init__(self) -> None:
        self._refused: dict[str, float] = {}  # the longest ago first
        self._reasons: dict[str, str] = {}  # of those
        self._last_refusal = float("-inf")
        self._freed: str | None = None
        self._others = False  # somebody may wait of whom we do not know
        self._touched = float("-inf")
        self._resting: dict[str, float] = {}  # until when

    def __len__(self) -> int:
        return len(self._refused)

    def __contains__(self, uid: str) -> bool:
        return uid in self._refused

    def refused(self, uid: str, now: float) -> None:
        self._last_refusal = now
        self._refused.pop(uid, None)
        self._forget(now)
        if len(self._refused) < _MOST:
            self._refused[uid] = now

    def rests(self, uid: str, now: float, seconds: float) -> None:
        """It was refused for that time only, after which nothing else may wake it."""
        self.refused(uid, now)
        self._resting[uid] = now + seconds

    def because(self, uid: str, reason: str) -> None:
        """What most nodes lacked for the pod, when it was refused last."""
        if uid in self._refused:
            self._reasons[uid] = reason

    def reasons(self, now: float) -> Counter[str]:
        """How many wait for which reason."""
        self._forget(now)
        return Counter(self._reasons.values())

    def satisfied(self, uid: str) -> None:
        """It was placed, or is gone."""
        self._refused.pop(uid, None)
        self._reasons.pop(uid, None)
        self._resting.pop(uid, None)

    def freed(self, node: str, now: float, *, seen: bool) -> None:
        """There may be room on this node. `seen`: the scheduler sees the cause and retries by itself."""
        self._forget(now)
        if self._refused and (not seen or now - self._last_refusal < _RACE):
            self._freed = node

    def of_others(self) -> None:
        """Another process may have refused pods, and what it was about to wake them for is lost."""
        self._others = True
        if not self.pending:
            self._freed = ""

    def due(self, now: float) -> str | None:
        """The node to touch now, if any; says so once."""
        for uid in [uid for uid, until in self._resting.items() if until <= now]:
            del self._resting[uid]
            self.freed("", now, seen=False)
        if not self.pending or now - self._touched < _EVERY:
            return None
        node, self._freed = self._freed, None
        self._forget(now)
        others, self._others = self._others, False
        if not self._refused and not others:
            return None
        self._touched = now
        return node

    @property
    def pending(self) -> bool:
        """Whether a node is to be touched, now or later."""
        return self._freed is not None

    def failed(self, node: str) -> None:
        """The node that was due could not be touched."""
        self._others = True
        if not self.pending:
            self._freed = node

    def _forget(self, now: float) -> None:
        """Those that were refused long ago: pods that vanished while filter was at them."""
        while self._refused:
            uid, at = next(iter(self._refused.items()))
            if now - at <= _FORGET:
                return
            del self._refused[uid]
            self._reasons.pop(uid, None)
