"""Chooses which clients to detach because their pod is about to be killed. Pure.

Terminations come in several ways, and not all are known beforehand: the table is in docs/reference/mps.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mps.host.pods import PodView


@dataclass(slots=True)
class Terminations:
    """For one thread; times are given in."""

    before: float  # seconds before the end of the grace period
    _deleted: dict[str, float] = field(default_factory=dict)  # uid -> monotonic, when its deletion was first seen
    _living: dict[str, PodView] = field(default_factory=dict)  # at the last look
    _vanished: dict[str, PodView] = field(default_factory=dict)

    @property
    def vanished(self) -> list[PodView]:
        """Pods that are still due although the cluster does not know them any more."""
        return list(self._vanished.values())

    def due(self, pods: Sequence[PodView], wall: float, monotonic: float) -> tuple[list[PodView], float | None]:
        """Those whose time has come, and in how many seconds the next one's comes."""
        living = [pod for pod in pods if pod.assignment.containers and not pod.finished]
        now, later = self._missed(pods, living), []
        for pod, left in (*self._by_deletion(living, wall, monotonic), *self._by_deadline(living, wall)):
            if left <= 0:
                now.append(pod)
            else:
                later.append(left)
        return now, min(later, default=None)

    def over(self, uid: str) -> None:
        """It has no clients left; of one that the cluster knows this need not be said."""
        self._vanished.pop(uid, None)

    def _by_deletion(self, living: Sequence[PodView], wall: float, monotonic: float) -> Iterator[tuple[PodView, float]]:
        """Pods that are being deleted, and when they end. By two clocks, the earlier counts: the API server's clock may
        differ from ours, and a manager that has just started sees an old deletion as new. A pod whose grace is short
        gets half of it.
        """
        self._deleted = {pod.uid: self._deleted.get(pod.uid, monotonic) for pod in living if pod.ends is not None}
        for pod in living:
            if pod.ends is not None:
                left = min(pod.ends - wall, self._deleted[pod.uid] + pod.grace - monotonic)
                yield pod, left - min(self.before, pod.grace / 2)

    def _by_deadline(self, living: Sequence[PodView], wall: float) -> Iterator[tuple[PodView, float]]:
        """The kubelet ends a pod at its deadline, with the grace of its spec, and by the clock that we have too."""
        for pod in living:
            if pod.ends is None and pod.deadline is not None:
                yield pod, pod.deadline + pod.patience - wall - min(self.before, pod.patience / 2)

    def _missed(self, pods: Sequence[PodView], living: Sequence[PodView]) -> list[PodView]:
        """Deleted by force: the object goes before the containers, and without a word about when these go.

        A static pod does not end with its mirror. Of one that ended in good order no client is found.
        """
        known = {pod.uid for pod in pods}
        self._vanished |= {uid: pod for uid, pod in self._living.items() if uid not in known}
        self._living = {pod.uid: pod for pod in living if pod.cgroup_uid == pod.uid}
        return list(self._vanished.values())
