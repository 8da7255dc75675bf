"""Evicts for pods that only cards keep waiting (--preempt-fragmented), where kube-scheduler's preemption never begins.

By the Eviction API, so that disruption budgets hold: all victims of a pod are asked for by a dry run first, and nobody
goes where one of them may not. The extender that leads does it, for one pod at a time and not too often.
"""

from collections.abc import Callable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from cardwise.kube.events import ObjectRef, Recorder
from cardwise.kube.pods.eviction import evict
from extender.preemption.preemption import Eviction, Preemption
from extender.records.podref import PodRef

_log = structlog.get_logger(__name__)

_EVERY = 1.0  # seconds between two pods for whom somebody goes
_AGAIN = 2.0  # seconds between two tries for the same victim
_TRIES = 20


class Evictions:
    """`active`: whether this extender leads and knows all there is. All methods belong to one thread."""

    def __init__(
        self,
        client: KubeClient,
        preemption: Preemption,
        events: Recorder,
        *,
        active: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._preemption = preemption
        self._events = events
        self._active = active
        self._clock = clock
        self._next = float("-inf")
        self._left: list[tuple[Eviction, PodRef, float, int]] = []  # to be tried again at a time, and how often yet

    def step(self) -> None:
        """One round."""
        if not self._active():
            self._left.clear()  # whoever leads now looks for itself
            return
        now = self._clock.now()
        self._go_on(now)
        if now < self._next:
            return
        eviction = self._preemption.next_eviction()
        if eviction is None:
            return
        self._next = now + _EVERY
        if not all(self._may_go(victim) for victim in eviction.victims):
            self._preemption.given_up(eviction.claimant)
            return
        self._left.extend((eviction, victim, now, _TRIES) for victim in eviction.victims)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Who was to go once goes, though it takes several tries: the others have gone for nothing else."""
        left, self._left = self._left, []
        for eviction, victim, at, tries in left:
            if at > now:
                self._left.append((eviction, victim, at, tries))
                continue
            if not tries or not self._active() or not self._preemption.wanted(eviction, victim.uid):
                continue
            if not self._evict(eviction, victim):
                self._left.append((eviction, victim, now + _AGAIN, tries - 1))

    def _may_go(self, victim: PodRef) -> bool:
        try:
            evict(self._client, victim.namespace, victim.name, victim.uid, dry_run=True)
        except errors.NotFound:
            return True
        except errors.KubeError as error:
            _log.info("a pod may not be evicted", pod=victim.pod, uid=victim.uid, error=str(error))
            return False
        return True

    def _evict(self, eviction: Eviction, victim: PodRef) -> bool:
        """Whether that is done with."""
        try:
            evict(self._client, victim.namespace, victim.name, victim.uid)
        except (errors.NotFound, errors.Conflict):
            return True  # it is gone, and one of the same name is another
        except errors.KubeError as error:
            _log.warning("cannot evict a pod; it is tried again", pod=victim.pod, uid=victim.uid, error=str(error))
            return False
        newcomer, node = eviction.claimant.ref, eviction.node
        text = f"evicted for {newcomer.pod}, of higher priority, which needs its GPU card"
        self._events.record(ObjectRef.pod(victim.namespace, victim.name, victim.uid), "Preempted", text)
        text = f"{victim.pod} is evicted on node {node}, whose GPU cards have no room in one piece"
        self._events.record(ObjectRef.pod(newcomer.namespace, newcomer.name, newcomer.uid), "Preempting", text)
        return True
