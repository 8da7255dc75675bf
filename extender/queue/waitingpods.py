"""The pods without a node: who they are, why they wait, and when they are to be woken.

Takes the state's lock; `unschedulable` knows no lock and only who was refused.
"""

from cardwise.clock import Clock
from extender.cache.cache import Cache
from extender.cache.statelock import StateLock
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef


class WaitingPods:
    """Methods may be called from any thread; those that say so want the lock to be held."""

    def __init__(self, lock: StateLock, held: Cache, clock: Clock) -> None:
        self._lock = lock
        self._held = held
        self._clock = clock
        self._unbound: dict[str, PodRecord] = {}
        self._asking: dict[str, PodRecord] = {}  # they name a class

    def waits(self, pod: PodRecord) -> None:
        """The pod has no node. Under the lock."""
        self._unbound[pod.uid] = pod
        self._asking.pop(pod.uid, None)
        if pod.classes:
            self._asking[pod.uid] = pod

    def over(self, uid: str) -> None:
        """The pod is bound, or is no more. Under the lock."""
        self._unbound.pop(uid, None)
        self._asking.pop(uid, None)
        self._held.unschedulable.satisfied(uid)

    def any_asks_for(self, device_class: str) -> bool:
        """Whether a pod waits for this class. Under the lock."""
        return any(device_class in pod.classes for pod in self._asking.values())

    def asking_for(self, device_class: str) -> list[PodRef]:
        """The pods that wait for this class, also those that the scheduler refused without asking us."""
        with self._lock:
            return [pod.ref for pod in self._asking.values() if device_class in pod.classes]

    def bindable(self) -> list[PodRef]:
        """The pods that an extender may have been asked to bind."""
        with self._lock:
            return [pod.ref for pod in self._unbound.values() if pod.bindable]

    def rests(self, uid: str, seconds: float) -> None:
        """Filter has refused the pod for so long, whatever there is."""
        with self._lock:
            self._held.unschedulable.rests(uid, self._clock.now(), seconds)

    def refused_because(self, uid: str, reason: str) -> None:
        """What filter has just told the scheduler of the pod, for metrics."""
        with self._lock:
            self._held.unschedulable.because(uid, reason)

    def by_reason(self) -> dict[str, int]:
        """Pods that filter found no node for, by the most frequent reason among the nodes, for metrics."""
        with self._lock:
            return self._held.unschedulable.reasons(self._clock.now())

    def wake_all(self) -> None:
        """Touch a node soon, whoever waits: another extender that has refused pods cannot wake them any more."""
        with self._lock:
            self._held.unschedulable.of_others()

    def touch_pending(self) -> bool:
        """Whether a node is to be touched, now or when a second has passed since the last."""
        with self._lock:
            return self._held.unschedulable.pending

    def touch_due(self) -> str | None:
        """A node to touch so that waiting pods are tried again, at most one a second; see `unschedulable`."""
        with self._lock:
            self._held.count_cards()
            node = self._held.unschedulable.due(self._clock.now())
            nodes = self._held.inventory.nodes
            if node is None or node in nodes:
                return node
            return next(iter(nodes), None)  # any will do; the one with room may be gone

    def touch_failed(self, node: str) -> None:
        """The node from `touch_due` could not be touched: it is due again."""
        with self._lock:
            self._held.unschedulable.failed(node)
