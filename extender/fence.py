"""Makes void what may still be under way: a pod that was changed takes no Binding that was posted before.

Each Binding carries the resourceVersion of its pod, which the API server compares in the transaction that binds it
(design 0011). So one write to a waiting pod settles, for good, that no Binding posted before it lands, however long it
stands in a buffer. Two ask for that: who begins a term, of every waiting pod; and who wants to give away what a lost
answer keeps.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core import names
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from extender.decisions import Waiter

_log = structlog.get_logger(__name__)

_TIMEOUT = 2.0
_AT_ONCE = 16  # writes
_PATIENCE = 10.0  # seconds for a pod that the API server cannot write while it writes the Lease
_REFUSALS = (errors.Conflict, errors.Forbidden, errors.Invalid, errors.BadRequest)


class Fate(Enum):
    """What became of a pod that was waiting."""

    WAITS = "waits"  # and no Binding from before lands any more
    BOUND = "bound"
    GONE = "gone"


class Fence:
    """Thread-safe."""

    def __init__(self, client: KubeClient, clock: Clock = SYSTEM) -> None:
        self._client = client
        self._clock = clock

    def void(self, pod: Waiter, word: str, *, timeout: float = _TIMEOUT) -> Fate:
        """Changes the pod in the name of the term `word`. Raises KubeError where it is not known whether it could.

        By its status, which hardly any webhook or policy of others wants to see. The time makes it a change each time:
        a write that changes nothing is none.
        """
        said = f"{word}/{self._clock.wall_ns()}" if word else str(self._clock.wall_ns())
        patch = {"metadata": {"uid": pod.uid, "annotations": {names.TERM: said}}}
        path = paths.pods(pod.namespace, pod.name, "status")
        try:
            return _fate(self._client.patch(path, patch, timeout=timeout), pod.uid)
        except errors.NotFound:
            return Fate.GONE
        except _REFUSALS as error:
            fate = self.read(pod, timeout=timeout)
            if fate is Fate.WAITS and isinstance(error, errors.Conflict):
                raise
            if fate is Fate.WAITS:
                # Somebody's policy. It must not keep all others from being bound, and `terms.cardwise.dev` is there.
                _log.warning("a waiting pod cannot be changed", pod=pod.pod, uid=pod.uid, error=str(error))
            return fate

    def void_all(self, pods: Sequence[Waiter], word: str, still: Callable[[], bool]) -> bool | None:
        """Whether one of them turned out to be bound. None: `still` says no, and they are not all void."""
        one = partial(self._surely, word=word, still=still)
        if len(pods) <= _AT_ONCE:
            fates = [one(pod) for pod in pods]
        else:
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fence") as pool:
                fates = list(pool.map(one, pods))
        if None in fates or not still():
            return None
        return Fate.BOUND in fates

    def _surely(self, pod: Waiter, word: str, still: Callable[[], bool]) -> Fate | None:
        backoff, until = Backoff(initial=0.05, cap=1.0), self._clock.now() + _PATIENCE
        while still():
            try:
                return self.void(pod, word)
            except errors.KubeError as error:
                if self._clock.now() > until:
                    _log.warning("a waiting pod cannot be changed", pod=pod.pod, uid=pod.uid, error=str(error))
                    return Fate.WAITS
                self._clock.sleep(backoff.next(error.retry_after))
        return None

    def read(self, pod: Waiter, *, timeout: float = _TIMEOUT) -> Fate:
        """What became of it, as etcd has it; changes nothing."""
        try:
            return _fate(self._client.get(paths.pods(pod.namespace, pod.name), timeout=timeout), pod.uid)
        except errors.NotFound:
            return Fate.GONE


def _fate(found: dict[str, Any], uid: str) -> Fate:
    if (found.get("metadata") or {}).get("uid") != uid:
        return Fate.GONE
    return Fate.BOUND if (found.get("spec") or {}).get("nodeName") else Fate.WAITS
