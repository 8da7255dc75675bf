"""Marks granted pods: ALIYUN_COM_GPU_MEM_ASSIGNED becomes "true", as gpushare's tools expect.

Marks are written in the background, since no container may wait for the API server. For the extender, the mark means
that the pod has started: if a card is overcommitted, the extender does not evict a marked pod
(`extender/controllers/overcommit.py`). The command line shows the mark.
"""

import threading
from collections import OrderedDict

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.runtime.loops import Loop
from deviceplugin.publish import metrics
from deviceplugin.sources.pods import NodePod

_log = structlog.get_logger(__name__)

_FAILED_TEXT = "failed to mark a pod as assigned"
_TIMEOUT = 2.0  # seconds; a slow write delays the marks of the other pods by this time at most
_MAX_FAILURES = (
    3  # consecutive failures before a pause: one failure may concern its pod alone, as when a webhook rejects it
)
_MAX_QUEUED = 10_000  # maximum number of pods whose mark waits until the API server answers again


class PodMarker:
    """Patches each granted pod once, in its own thread, and retries after transient errors."""

    def __init__(self, client: KubeClient, clock: Clock = SYSTEM) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._queue: OrderedDict[str, NodePod] = OrderedDict()
        self._failures = 0  # consecutive failures of the API server
        self._loop = Loop(
            "marking",
            self._mark_next,
            failed=_FAILED_TEXT,
            failures=metrics.THREAD_FAILURES,
            expected=(errors.KubeError,),
            every=None,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def queue_mark(self, pod: NodePod) -> None:
        """Queue a pod for its mark. Ignores pods that are marked already, and pods without cards."""
        if pod.annotations.get(names.ASSIGNED, "true") == "true":
            return
        with self._lock:
            self._queue[pod.uid] = pod
            while len(self._queue) > _MAX_QUEUED:
                self._queue.popitem(last=False)
        self._loop.wake()

    def _mark_next(self) -> None:
        with self._lock:
            if not self._queue:
                return
            _, pod = self._queue.popitem(last=False)
        self._loop.wake()
        failures, self._failures = self._failures, 0
        try:
            self._patch(pod)
        except (errors.NotFound, errors.Invalid):
            pass  # the pod was deleted, or another pod has its name
        except (errors.TooManyRequests, errors.ServerError, errors.Unreachable) as error:
            with self._lock:
                self._queue.setdefault(pod.uid, pod)  # the pod is tried again after the other pods
                queued = len(self._queue)
            if isinstance(error, errors.ServerError):
                self._failures = failures + 1
                if self._failures < min(_MAX_FAILURES, queued):
                    return
                self._failures = 0
            if not isinstance(error, errors.TimedOut):
                raise
        except errors.KubeError as error:
            _log.warning(_FAILED_TEXT, pod=pod.pod, uid=pod.uid, error=str(error))

    def _patch(self, pod: NodePod) -> None:
        # The UID is a precondition: a patch that would change it is Invalid.
        change = {"metadata": {"uid": pod.uid, "annotations": {names.ASSIGNED: "true"}}}
        self._client.patch(paths.pods(pod.namespace, pod.name), change, "merge", timeout=_TIMEOUT)
