"""Selects the pods that are about to be killed: before that, their clients have to be detached from MPS. Pure.

Pods end in several ways, and some ends cannot be known beforehand: docs/reference/mps.md has the table.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from cardwise.kube.watch.reflector import WatchPace
from mps.host.pods import PodView

# Killing a busy client may affect others of its server, so clients are detached before the kubelet kills them: long
# enough before for the command to a slow daemon, and late enough that a pod can use its grace period.
DETACH_BEFORE_SECONDS: Final = 3.0
_PACE = WatchPace()  # the pace of the watch of the node's pods
_MAX_WATCH_DELAY = _PACE.silence + _PACE.backoff_cap  # seconds


class DuePods(NamedTuple):
    """Pods whose clients must be detached now.

    next_due_seconds: the seconds until the next pod is due; None if unknown.
    """

    pods: list[PodView]
    next_due_seconds: float | None


@dataclass(slots=True)
class TerminatingPods:
    """The terminating pods of a node. Not thread-safe; times are parameters."""

    _last_uids: set[str] = field(default_factory=set)  # UIDs of the pods at the last call
    _grace_ends: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # UID of a terminating pod -> its `ends_at`, and the monotonic time at which its grace period ends
    _last_living: dict[str, PodView] = field(default_factory=dict)  # UID -> pod that was alive at the last call
    _vanished: dict[str, PodView] = field(default_factory=dict)

    @property
    def force_deleted(self) -> list[PodView]:
        """Pods that were deleted by force. Their clients must be detached, although the pod objects no longer exist."""
        return list(self._vanished.values())

    def due_pods(
        self, pods: Sequence[PodView], *, api_time: datetime | None, node_time: datetime, monotonic: float
    ) -> DuePods:
        """The pods whose clients must be detached now.

        api_time: the time of the API server's clock, which also gave the deletion times; None: unknown.
        node_time: the time of the node's clock, which the kubelet uses for pods' deadlines.
        monotonic: seconds of a clock that only moves forward.
        """
        living_pods = [pod for pod in pods if pod.assignment.containers and not pod.finished]
        due_pods, remaining_seconds = self._update_force_deleted(pods, living_pods), []
        node_clock_seconds = node_time.timestamp()
        api_clock_seconds = None if api_time is None else api_time.timestamp()
        terminating_pods = self._seconds_until_detach_at_deletion(
            pods, living_pods, api_clock_seconds, node_clock_seconds, monotonic
        )
        for pod, remaining in (
            *terminating_pods,
            *self._seconds_until_detach_at_active_deadline(living_pods, node_clock_seconds),
        ):
            if remaining <= 0:
                due_pods.append(pod)
            else:
                remaining_seconds.append(remaining)
        return DuePods(due_pods, min(remaining_seconds, default=None))

    def mark_detached(self, uid: str) -> None:
        """Forget a force-deleted pod that has no clients any more."""
        self._vanished.pop(uid, None)

    def _seconds_until_detach_at_deletion(
        self,
        pods: Sequence[PodView],
        living_pods: Sequence[PodView],
        api_clock_seconds: float | None,
        node_clock_seconds: float,
        monotonic: float,
    ) -> Iterator[tuple[PodView, float]]:
        """Terminating pods, each with the seconds until its clients must be detached.

        The kubelet starts the grace period when its watch shows the deletion. Our watch may show it later, so the
        remaining time is computed from the deletion's own time (`_remaining_grace`), and is never longer than the grace
        period counted from our first observation. If the grace period is short, clients are detached after half of it.
        """
        grace_ends: dict[str, tuple[float, float]] = {}
        for pod in living_pods:
            if pod.ends_at is None:
                continue
            ends_at, grace_end = self._grace_ends.get(pod.uid, (None, math.inf))
            if ends_at != pod.ends_at:  # a first deletion, or another one with a shorter grace period
                remaining = self._remaining_grace(pod, pod.ends_at, api_clock_seconds, node_clock_seconds)
                grace_end = min(grace_end, monotonic + remaining)
            grace_ends[pod.uid] = pod.ends_at, grace_end
            yield pod, grace_end - monotonic - min(DETACH_BEFORE_SECONDS, pod.grace / 2)
        self._grace_ends = grace_ends
        self._last_uids = {pod.uid for pod in pods}

    def _remaining_grace(
        self, pod: PodView, ends_at: float, api_clock_seconds: float | None, node_clock_seconds: float
    ) -> float:
        """The remaining seconds of the grace period when a deletion is observed for the first time.

        The time is computed with the API server's clock, since the node's clock may be wrong. But with several API
        servers, the server that responded last may not be the server that wrote the deletion, and their clocks may be
        hours apart. So a clock is ignored if it shows the deletion as older than the longest delay of a watch. Without
        a usable clock, the whole grace period remains if the pod was observed before its deletion. Otherwise the node's
        clock is used, or no time remains.
        """
        was_known = pod.uid in self._last_uids
        max_age = _MAX_WATCH_DELAY if was_known else pod.grace + _MAX_WATCH_DELAY
        for now in (api_clock_seconds,) if was_known else (api_clock_seconds, node_clock_seconds):
            if now is not None and now - (ends_at - pod.grace) <= max_age:
                return min(pod.grace, ends_at - now)
        return pod.grace if was_known else 0.0

    def _seconds_until_detach_at_active_deadline(
        self, living_pods: Sequence[PodView], node_clock_seconds: float
    ) -> Iterator[tuple[PodView, float]]:
        """Pods with a deadline, each with the seconds until its clients must be detached.

        At the deadline, by the node's clock, the kubelet ends the pod with the grace period of its spec.
        """
        for pod in living_pods:
            if pod.ends_at is None and pod.deadline is not None:
                yield (
                    pod,
                    pod.deadline + pod.spec_grace - node_clock_seconds - min(DETACH_BEFORE_SECONDS, pod.spec_grace / 2),
                )

    def _update_force_deleted(self, pods: Sequence[PodView], living_pods: Sequence[PodView]) -> list[PodView]:
        """Update and return the force-deleted pods: their objects were deleted while their containers may still run.

        Leaves out pods that ended normally. Leaves out static pods too: a static pod keeps running when its mirror pod
        is deleted.
        """
        uids = {pod.uid for pod in pods}
        vanished = self._vanished | self._last_living
        self._vanished = {uid: pod for uid, pod in vanished.items() if uid not in uids}  # a pod may be bound here again
        self._last_living = {pod.uid: pod for pod in living_pods if pod.cgroup_uid == pod.uid}
        return list(self._vanished.values())
