"""Pods that wait because cards are fragmented: the sums of a node have room for them, and no card of it has.

kube-scheduler's preemption does not begin for them: with its sums it would evict nobody. Not thread-safe: the state
locks.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from extender.records.pod import Claimant

_SETTLED: Final = 3.0  # seconds that a pod waits before somebody is evicted for it
_AGAIN: Final = 15.0  # seconds between two looks for victims
_FORGET: Final = 600.0  # kube-scheduler tries a pod that still waits after five minutes at the latest


@dataclass(slots=True, eq=False)
class FragmentedPod:
    """`nodes`: where the sums have room, as last heard."""

    claimant: Claimant
    policy: str
    nodes: tuple[str, ...]
    last: float
    not_before: float


class FragmentedPods:
    """By pod UID."""

    def __init__(self) -> None:
        self._pods: dict[str, FragmentedPod] = {}

    def refused(self, claimant: Claimant, policy: str, nodes: Collection[str], now: float) -> None:
        """The pod was refused on these nodes for want of a card."""
        before = self._pods.get(claimant.uid)
        not_before = before.not_before if before is not None else now + _SETTLED
        self._pods[claimant.uid] = FragmentedPod(claimant, policy, tuple(sorted(nodes)), now, not_before)

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def drop(self, uid: str) -> None:
        """It was placed, or is no more."""
        self._pods.pop(uid, None)

    def clear(self) -> None:
        """Another extender is asked."""
        self._pods.clear()

    def due(self, now: float, helped: Callable[[str], bool]) -> FragmentedPod | None:
        """The next to find victims for, of the highest priority first; not again for a while. `helped`: whether
        somebody goes for the pod already.
        """
        for uid in [uid for uid, pod in self._pods.items() if now - pod.last > _FORGET]:
            del self._pods[uid]
        due = [pod for uid, pod in self._pods.items() if pod.not_before <= now and not helped(uid)]
        if not due:
            return None
        first = min(due, key=lambda pod: (-pod.claimant.request.priority, pod.not_before, pod.claimant.uid))
        first.not_before = now + _AGAIN
        return first
