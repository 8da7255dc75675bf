"""Remembers what one call of kube-scheduler found out about a pod, for the next call about it.

What it asks and which version of it was seen, from filter to bind: a bind call names the pod only. The scores of nodes,
from filter to prioritize, which asks for the same a moment later. Of a member of a PodGroup of Kubernetes that its bind
was refused, from there to the next filter. It is a cache: what is not here is found anew.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api.request import PodRequest

_MOST = 20_000
_MOST_SCORED = 8  # pods; the scheduler asks about one after the other
_SCORED_SECONDS = 1.0
_FIRST_REST, _LONGEST_REST = 1.0, 10.0  # seconds, as kube-scheduler's own back-off


class Asked(NamedTuple):
    """What a pod asks, as that version of it (its resourceVersion) says."""

    request: PodRequest
    version: str


class Requests:
    """By pod UID; the oldest go first. A pod's request never changes while it is pending."""

    def __init__(self, most: int = _MOST, clock: Clock = SYSTEM) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._by_uid: OrderedDict[str, Asked] = OrderedDict()
        self._scored: OrderedDict[str, tuple[float, dict[str, int]]] = OrderedDict()
        # Of members of PodGroups that filter was asked about: until when each rests, and for how long.
        self._rests: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def put(self, uid: str, asked: PodRequest, version: str) -> None:
        if not uid or not version:
            return
        with self._lock:
            self._by_uid[uid] = Asked(asked, version)
            self._by_uid.move_to_end(uid)
            if len(self._by_uid) > self._most:
                self._by_uid.popitem(last=False)

    def take(self, uid: str) -> Asked | None:
        """What was remembered; it is forgotten, since a bind that fails is followed by another filter."""
        with self._lock:
            return self._by_uid.pop(uid, None)

    def bind_failed(self, uid: str) -> None:
        """A bind of the pod was refused. Where it is a member, it rests, each time twice as long as before."""
        with self._lock:
            if uid in self._rests:
                _, before = self._rests.pop(uid)
                rest = min(2 * before, _LONGEST_REST)
                self._rests[uid] = self._clock.now() + rest, rest

    def rests(self, uid: str) -> float:
        """Filter is asked about a member of a PodGroup. For how many seconds it is not to be tried, since its bind was
        refused a moment ago.
        """
        with self._lock:
            until, _ = self._rests.setdefault(uid, (0.0, _FIRST_REST / 2))
            if len(self._rests) > self._most:
                self._rests.popitem(last=False)
            return max(0.0, until - self._clock.now())

    def put_scores(self, uid: str, scores: dict[str, int]) -> None:
        """What filter has found, node by node."""
        with self._lock:
            self._scored[uid] = self._clock.now(), scores
            if len(self._scored) > _MOST_SCORED:
                self._scored.popitem(last=False)

    def take_scores(self, uid: str) -> dict[str, int] | None:
        """The same, while it is fresh, and once. The order of nodes is no promise: bind looks at the cards again."""
        with self._lock:
            at, scores = self._scored.pop(uid, (0.0, None))
        return scores if self._clock.now() - at < _SCORED_SECONDS else None
