"""Evicts victims for pods that lack only cards. For such pods kube-scheduler finds no victims, because it compares node
totals (`preemption.preemption`).

The Eviction API is used, because it respects PodDisruptionBudgets. A dry run tries all victims first; if the eviction
of one victim is not allowed, no victim is evicted. Only the leader evicts, for one pod at a time and not too often.
"""

from collections.abc import Callable

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.pods.eviction import evict
from extender.cache.pacing import pause_seconds
from extender.preemption.preemption import Eviction, Preemption
from extender.records.podref import PodRef

_log = structlog.get_logger(__name__)

_INTERVAL_SECONDS = 1.0  # seconds between two pods for which victims are evicted
_RETRY_SECONDS = 2.0  # seconds between two attempts to evict the same victim
_MAX_TRIES = 20
# Seconds for which a victim is not chosen again: after a failed dry run; and after failed evictions, which is longer,
# since other victims may have been evicted in vain.
_REFUSED_SECONDS, _STUCK_SECONDS = 60.0, 600.0


class Evictions:
    """Evicts the victims of `Preemption.next_evictions`. All methods belong to one thread.

    active: returns whether this extender leads and all lists are complete.
    """

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
        self._deferred: list[tuple[Eviction, PodRef, float, int]] = []  # victims to try again: from when, and how often

    def step(self) -> None:
        """Retry deferred victims, then evict the victims for the next pod that is due."""
        if not self._active():
            self._deferred.clear()  # the leader does its own searches
            return
        now = self._clock.now()
        self._retry_deferred(now)
        if now < self._next:
            return
        began = self._clock.cpu()
        evictions = self._preemption.next_evictions()
        # Thousands of pods may wait in vain, so this thread pauses. The pause is short, since it delays all namespaces;
        # after a long search only the pod's namespace pauses longer (`SchedulingQueue.on_searched`).
        self._next = now + max(_INTERVAL_SECONDS if evictions else 0.0, pause_seconds(self._clock.cpu() - began))
        victims = [victim for eviction in evictions for victim in eviction.victims]
        refused_uids = [victim.uid for victim in victims if not self._can_evict(victim)]
        if refused_uids:
            for eviction in evictions:
                self._preemption.on_eviction_failed(eviction, refused_uids, _REFUSED_SECONDS)
            return
        self._deferred.extend(
            (eviction, victim, now, _MAX_TRIES) for eviction in evictions for victim in eviction.victims
        )
        self._retry_deferred(now)

    def _retry_deferred(self, now: float) -> None:
        """Retry the victims that could not be evicted yet. If they are not evicted, the other evictions were in
        vain.
        """
        deferred, self._deferred = self._deferred, []
        for eviction, victim, at, tries in deferred:
            if at > now:
                self._deferred.append((eviction, victim, at, tries))
                continue
            if not self._active() or not self._preemption.is_eviction_needed(eviction, victim.uid):
                continue
            if not tries:
                # Release the cards, so that other victims are searched for the pod. Its other victims on the node have
                # failed as often.
                refused_uids = [
                    pod.uid for pod in eviction.victims if self._preemption.is_eviction_needed(eviction, pod.uid)
                ]
                _log.warning(
                    "failed to evict a pod; released the reservation of the pod that waits for it",
                    pod=victim.pod, uid=victim.uid, for_pod=eviction.claimant.ref.pod, node=eviction.node,
                )  # fmt: skip
                self._preemption.on_eviction_failed(eviction, refused_uids, _STUCK_SECONDS)
                continue
            if not self._evict(eviction, victim):
                self._deferred.append((eviction, victim, now + _RETRY_SECONDS, tries - 1))

    def _can_evict(self, victim: PodRef) -> bool:
        try:
            evict(self._client, victim.namespace, victim.name, victim.uid, dry_run=True)
        except errors.NotFound:
            return True
        except errors.KubeError as error:
            _log.info(
                "a disruption budget does not allow the eviction of a pod",
                pod=victim.pod,
                uid=victim.uid,
                error=str(error),
            )
            return False
        return True

    def _evict(self, eviction: Eviction, victim: PodRef) -> bool:
        """Evict the victim. Returns False if the eviction must be retried."""
        try:
            evict(self._client, victim.namespace, victim.name, victim.uid)
        except (errors.NotFound, errors.Conflict):
            return True  # the victim was deleted; a pod with its name is a different pod
        except errors.KubeError as error:
            _log.warning("failed to evict a pod; trying again", pod=victim.pod, uid=victim.uid, error=str(error))
            return False
        newcomer, node = eviction.claimant.ref, eviction.node
        text = f"evicted: pod {newcomer.pod} has a higher priority and needs this pod's GPU"
        self._events.record(victim.about, "Preempted", text)
        text = f"pod {victim.pod} is evicted on node {node} to free its GPU for this pod"
        self._events.record(newcomer.about, "Preempting", text)
        return True
