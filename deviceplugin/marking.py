"""Marks granted pods: ALIYUN_COM_GPU_MEM_ASSIGNED becomes "true", as gpushare's tools expect.

Apart and in the background, because nothing of ours reads it and no container may wait for the API server.
"""

import threading
from collections import OrderedDict

import structlog

from cardwise.core import names
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from deviceplugin.pods import PodView

_log = structlog.get_logger(__name__)

_LIMIT = 10_000  # pods that wait for the API server to come back


class Marker:
    """Its thread patches each pod once, again after errors that may pass."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, PodView] = OrderedDict()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="marking", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def mark(self, pod: PodView) -> None:
        """Returns at once. A pod that is marked already costs nothing, nor one without cards, which has no mark."""
        if pod.annotations.get(names.ASSIGNED, "true") == "true":
            return
        with self._changed:
            self._waiting[pod.uid] = pod
            while len(self._waiting) > _LIMIT:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def _run(self) -> None:
        backoff = Backoff(cap=10.0)
        while (pod := self._next()) is not None:
            try:
                self._patch(pod)
                backoff.reset()
            except (errors.NotFound, errors.Conflict):
                pass  # gone, or another pod under its name: nobody is left to read the mark
            except (errors.TooManyRequests, errors.ServerError, errors.Unreachable) as error:
                self._retry(pod, backoff.next(error.retry_after))
            except errors.KubeError as error:
                who = f"{pod.namespace}/{pod.name}"
                _log.warning("pod not marked as assigned", pod=who, uid=pod.uid, error=str(error))
            except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
                _log.exception("pod not marked as assigned", pod=f"{pod.namespace}/{pod.name}", uid=pod.uid)

    def _next(self) -> PodView | None:
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            return self._waiting.popitem(last=False)[1]

    def _retry(self, pod: PodView, delay: float) -> None:
        with self._changed:
            self._waiting.setdefault(pod.uid, pod)
            self._changed.wait_for(lambda: self._stopping, delay)

    def _patch(self, pod: PodView) -> None:
        # The UID is a precondition: a merge patch that would change it is refused.
        change = {"metadata": {"uid": pod.uid, "annotations": {names.ASSIGNED: "true"}}}
        self._client.patch(paths.pods(pod.namespace, pod.name), change, "merge")
