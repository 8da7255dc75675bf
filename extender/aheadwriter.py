"""Writes the nodes of `ahead` into the statuses of the pods: a thread that decides, and a few that write.

Apart from what is decided, which knows no wire. A write that comes too late does no harm: it says which version of the
pod it is for, so it never replaces a node that kube-scheduler has named meanwhile.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.ahead import Ahead, Nominee
from extender.schedule import Pace

_log = structlog.get_logger(__name__)

_THREADS: Final = 16  # with fewer, an API server that takes its time would let kube-scheduler catch up
_RATE: Final = 400.0  # pods a second, at most
_AT_ONCE: Final = 64  # in one round: the loop shall hear that it is to stop
_TIMEOUT: Final = 5.0  # seconds for one write
_PAUSE: Final = 5.0  # seconds after a write that failed


class AheadWriter:
    """`active`: whether this extender leads and knows all there is. `step` belongs to one thread."""

    def __init__(
        self,
        client: KubeClient,
        ahead: Ahead,
        *,
        active: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._ahead = ahead
        self._active = active
        self._clock = clock
        self._pace = Pace(_RATE, _RATE)
        self._not_before = float("-inf")
        self._pool: ThreadPoolExecutor | None = None

    def step(self) -> None:
        """One round: who is next is decided about, and written."""
        if self._clock() < self._not_before or not self._active():
            return
        for _ in range(_AT_ONCE):
            if not self._pace.ready(self._clock(), calm=False):
                return
            again, nominee = self._ahead.decide()
            if nominee is not None:
                self._pace.spend()
                self._threads().submit(self.write, nominee)
            if not again:
                return

    def stop(self) -> None:
        """What was not begun is not written."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def write(self, nominee: Nominee) -> None:
        """Names the pod's node, unless the pod has changed."""
        if not self._ahead.wanted(nominee.uid):
            return  # kube-scheduler was faster; those behind are in time for it
        change = {
            "metadata": {"uid": nominee.uid, "resourceVersion": nominee.version},
            "status": {"nominatedNodeName": nominee.node},
        }
        path = paths.pods(nominee.namespace, nominee.name, "status")
        try:
            self._client.patch(path, change, "merge", timeout=_TIMEOUT)
        except (errors.Conflict, errors.NotFound):
            self._ahead.unwritten(nominee.uid)
        except errors.KubeError as error:
            self._not_before = self._clock() + _PAUSE
            self._ahead.unwritten(nominee.uid)
            who = f"{nominee.namespace}/{nominee.name}"
            _log.warning("cannot nominate a node ahead", pod=who, uid=nominee.uid, error=str(error))

    def _threads(self) -> ThreadPoolExecutor:
        # In the process that serves, which is a fork of the one that made this.
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="nominating")
        return self._pool
