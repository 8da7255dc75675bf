"""Marks granted pods: ALIYUN_COM_GPU_MEM_ASSIGNED becomes "true", as gpushare's tools expect.

In the background: no container may wait for the API server. To the extender the mark means that the pod has started: if
a card was given twice, it does not evict a marked pod (`extender/controllers/overfull.py`). The command line shows it.
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

_FAILED = "pod not marked as assigned"
_TIMEOUT = 2.0  # seconds: of a pod that takes long to write the others' marks wait for so long only
_LIMIT = 10_000  # pods that wait for the API server to come back


class Marker:
    """Its thread patches each pod once, again after errors that may pass."""

    def __init__(self, client: KubeClient, clock: Clock = SYSTEM) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, NodePod] = OrderedDict()
        self._loop = Loop(
            "marking",
            self._mark_next,
            failed=_FAILED,
            failures=metrics.FAILURES,
            expected=(errors.KubeError,),
            every=None,
            clock=clock,
        )

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def mark(self, pod: NodePod) -> None:
        """Returns at once. A pod that is marked already costs nothing, nor one without cards, which has no mark."""
        if pod.annotations.get(names.ASSIGNED, "true") == "true":
            return
        with self._lock:
            self._waiting[pod.uid] = pod
            while len(self._waiting) > _LIMIT:
                self._waiting.popitem(last=False)
        self._loop.wake()

    def _mark_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            _, pod = self._waiting.popitem(last=False)
        self._loop.wake()
        try:
            self._patch(pod)
        except (errors.NotFound, errors.Invalid):
            pass  # gone, or another pod under its name: nobody is left to read the mark
        except (errors.TooManyRequests, errors.ServerError, errors.Unreachable) as error:
            with self._lock:
                self._waiting.setdefault(pod.uid, pod)  # after the others
            if not isinstance(error, errors.TimedOut):
                raise
        except errors.KubeError as error:
            _log.warning(_FAILED, pod=pod.pod, uid=pod.uid, error=str(error))

    def _patch(self, pod: NodePod) -> None:
        # The UID is a precondition: a patch that would change it is Invalid.
        change = {"metadata": {"uid": pod.uid, "annotations": {names.ASSIGNED: "true"}}}
        self._client.patch(paths.pods(pod.namespace, pod.name), change, "merge", timeout=_TIMEOUT)
