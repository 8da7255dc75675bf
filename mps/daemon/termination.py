"""Chooses which clients to detach because their pod is about to be killed. Pure.

Pods end in several ways, and not all are known beforehand: docs/reference/mps.md has the table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mps.host.pods import PodView


@dataclass(slots=True)
class Terminations:
    """The terminating pods of a node. Not thread-safe; times are parameters."""

    seconds_before: float  # seconds before the end of the grace period
    _deleted: dict[str, float] = field(
        default_factory=dict
    )  # UID -> monotonic time at which its deletion was first seen
    _last_living: dict[str, PodView] = field(default_factory=dict)  # at the last call
    _vanished: dict[str, PodView] = field(default_factory=dict)

    @property
    def force_deleted(self) -> list[PodView]:
        """Pods that are due although their objects are gone: they were deleted by force."""
        return list(self._vanished.values())

    def due(self, pods: Sequence[PodView], wall: float, monotonic: float) -> tuple[list[PodView], float | None]:
        """The pods whose clients are to be detached now, and the seconds until the next one is due (None: unknown)."""
        living = [pod for pod in pods if pod.assignment.containers and not pod.finished]
        now, later = self._force_deleted(pods, living), []
        for pod, remaining in (*self._by_deletion(living, wall, monotonic), *self._by_deadline(living, wall)):
            if remaining <= 0:
                now.append(pod)
            else:
                later.append(remaining)
        return now, min(later, default=None)

    def mark_detached(self, uid: str) -> None:
        """Forget a force-deleted pod: it has no clients left."""
        self._vanished.pop(uid, None)

    def _by_deletion(self, living: Sequence[PodView], wall: float, monotonic: float) -> Iterator[tuple[PodView, float]]:
        """Terminating pods, and the seconds until their clients are to be detached.

        The earlier of two clocks counts: the API server's clock may differ from ours, and a manager that has just
        started sees an old deletion as new. A pod with a short grace period gets half of it.
        """
        self._deleted = {pod.uid: self._deleted.get(pod.uid, monotonic) for pod in living if pod.ends_at is not None}
        for pod in living:
            if pod.ends_at is not None:
                remaining = min(pod.ends_at - wall, self._deleted[pod.uid] + pod.grace - monotonic)
                yield pod, remaining - min(self.seconds_before, pod.grace / 2)

    def _by_deadline(self, living: Sequence[PodView], wall: float) -> Iterator[tuple[PodView, float]]:
        """Pods with a deadline: the kubelet ends them then, with the grace period of their spec, by its clock."""
        for pod in living:
            if pod.ends_at is None and pod.deadline is not None:
                yield pod, pod.deadline + pod.spec_grace - wall - min(self.seconds_before, pod.spec_grace / 2)

    def _force_deleted(self, pods: Sequence[PodView], living: Sequence[PodView]) -> list[PodView]:
        """Force-deleted pods: the object is gone before the containers, and nothing tells when these end.

        A static pod does not end with its mirror pod. A pod that ended normally has no clients to detach.
        """
        known = {pod.uid for pod in pods}
        self._vanished |= {uid: pod for uid, pod in self._last_living.items() if uid not in known}
        self._last_living = {pod.uid: pod for pod in living if pod.cgroup_uid == pod.uid}
        return list(self._vanished.values())
