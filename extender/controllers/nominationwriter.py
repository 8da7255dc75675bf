"""Writes nominated nodes into the statuses of pods, and removes them later. `nomination.nominator` chooses the nodes.

One thread chooses the nodes, several threads write. A late write does no harm. It contains the pod's resourceVersion,
so the API server refuses it if kube-scheduler has nominated another node in the meantime.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.nomination.nominator import Nominator, Nominee
from extender.records.podref import PodRef
from extender.reporting.schedule import WriteRate

_log = structlog.get_logger(__name__)

_MAX_THREADS: Final = (
    16  # writing threads; with fewer, kube-scheduler would overtake the writes if the API server is slow
)
_MAX_WRITES_PER_SECOND: Final = 400.0  # maximum number of pods that are written a second
_MAX_PODS_PER_STEP: Final = 64  # maximum number of pods in one step, so that the loop can be stopped
_TIMEOUT: Final = 5.0  # seconds for one write
_FAILURE_PAUSE_SECONDS: Final = 5.0  # seconds in which nothing is written to a namespace after a write there failed
_MAX_ERRORS_IN_A_ROW: Final = (
    8  # server errors in a row, after which no pod is written for `_FAILURE_PAUSE_SECONDS` seconds
)
_SLOW_WRITE_SECONDS: Final = 2.0  # a write that takes at least so many seconds is slow
_SLOW_WRITE_PAUSE_SECONDS: Final = 10.0  # seconds in which nothing is written to a namespace after a slow write there
_FIELD_MANAGER: Final = "cardwise-extender"  # in `metadata.managedFields`: marks the nodes that the extender wrote


class NominationWriter:
    """Writes and removes nominated nodes. `step` belongs to one thread.

    active: returns whether this extender leads and all lists are complete.
    """

    def __init__(
        self,
        client: KubeClient,
        nominator: Nominator,
        *,
        active: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._nominator = nominator
        self._active = active
        self._clock = clock
        self._write_rate = WriteRate()
        self._not_before = float("-inf")
        self._lock = threading.Lock()  # guards the records of failed writes
        self._paused_until: dict[str, float] = {}  # by namespace without writes: until when
        # By namespace with a slow write: until when nothing is written there. Submitted writes are skipped, too.
        self._slow: dict[str, float] = {}
        self._failed = 0  # writes that have failed by errors of the API server since the last successful write
        self._pool: ThreadPoolExecutor | None = None

    def step(self) -> None:
        """Nominate the next pods, write their nodes, and remove nominated nodes whose reservations have ended."""
        if self._clock.now() < self._not_before or not self._active():
            return
        now = self._clock.now()
        with self._lock:
            self._paused_until = {namespace: until for namespace, until in self._paused_until.items() if until > now}
            self._slow = {namespace: until for namespace, until in self._slow.items() if until > now}
            resting = frozenset(self._paused_until.keys() | self._slow.keys())
        for stale_nominee in self._nominator.take_stale_nominees():
            self._thread_pool().submit(_log_errors, self.remove_nomination, stale_nominee)
        for _ in range(_MAX_PODS_PER_STEP):
            if not self._write_rate.allows_write(self._clock.now(), _MAX_WRITES_PER_SECOND):
                return
            attempt = self._nominator.nominate_next_pod(resting)
            if attempt.nominee is not None:
                self._write_rate.record_write()
                self._thread_pool().submit(_log_errors, self.write_nomination, attempt.nominee)
            if not attempt.has_more:
                return

    def stop(self) -> None:
        """Drop the writes that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def write_nomination(self, nominee: Nominee) -> None:
        """Write the node into the pod's status, unless the pod has changed."""
        if not self._nominator.is_awaited(nominee.pod.uid):
            return  # kube-scheduler has called filter for the pod already, so skip the write
        if self._is_slow(nominee.pod.namespace):
            self._nominator.on_write_failed(nominee.pod.uid)
            return
        try:
            self._write_node(nominee.pod, nominee.version, nominee.node)
        except (errors.Conflict, errors.NotFound, errors.Invalid):
            self._nominator.on_write_failed(nominee.pod.uid)  # Invalid: the pod is bound already
        except errors.KubeError as error:
            self._nominator.on_write_failed(nominee.pod.uid)
            self._pause_namespace("failed to write a nominated node", nominee.pod, error)

    def remove_nomination(self, nominee: Nominee) -> None:
        """Remove the node from the pod's status, if the extender wrote the node and the pod is not bound.

        kube-scheduler treats a nominated pod as if it were on the node. kube-scheduler removes the nomination itself
        only for pods that may preempt. Any other pod would block capacity of the node while the pod is pending.
        """
        if self._is_slow(nominee.pod.namespace):
            self._nominator.restore_stale(nominee)
            return
        try:
            path = paths.pods(nominee.pod.namespace, nominee.pod.name)
            pod = self._client.get(path, timeout=_TIMEOUT, managed_fields=True)
            metadata = pod["metadata"]
            if (
                metadata["uid"] != nominee.pod.uid
                or pod["spec"].get("nodeName")
                or not _is_node_from_extender(pod, nominee.node)
            ):
                return
            self._write_node(nominee.pod, metadata["resourceVersion"], None)
        except (errors.NotFound, errors.Invalid):
            return  # the pod was deleted, or is bound
        except errors.Conflict:
            self._nominator.restore_stale(nominee)
        except errors.KubeError as error:
            self._nominator.restore_stale(nominee)
            self._pause_namespace("failed to remove a nominated node", nominee.pod, error)

    def _write_node(self, pod: PodRef, version: str, node: str | None) -> None:
        """Write the node into the pod's status, or remove it (None), if the pod has this resourceVersion.

        Raises KubeError.
        """
        change = {
            "metadata": {"uid": pod.uid, "resourceVersion": version},
            "status": {"nominatedNodeName": node},
        }
        path = paths.pods(pod.namespace, pod.name, "status")
        began = self._clock.now()
        try:
            self._client.patch(path, change, "merge", _FIELD_MANAGER, timeout=_TIMEOUT)
            self._failed = 0
        finally:
            now = self._clock.now()
            if now - began >= _SLOW_WRITE_SECONDS:
                with self._lock:
                    self._slow[pod.namespace] = now + _SLOW_WRITE_PAUSE_SECONDS

    def _pause_namespace(self, message: str, pod: PodRef, error: errors.KubeError) -> None:
        with self._lock:
            self._paused_until[pod.namespace] = self._clock.now() + _FAILURE_PAUSE_SECONDS
            # Timeouts do not count, since a tenant can make their pods so large that each write times out.
            self._failed += errors.would_fail_other_writes(error)
            if self._failed >= _MAX_ERRORS_IN_A_ROW:
                self._failed = 0
                self._not_before = self._clock.now() + _FAILURE_PAUSE_SECONDS
        _log.warning(message, pod=pod.pod, uid=pod.uid, error=str(error))

    def _is_slow(self, namespace: str) -> bool:
        """Whether a recent write to a pod of the namespace was slow: further writes there would occupy the threads."""
        with self._lock:
            return self._slow.get(namespace, float("-inf")) > self._clock.now()

    def _thread_pool(self) -> ThreadPoolExecutor:
        # Created late, because threads do not survive the fork: a child of the process that created this object serves.
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="nominations")
        return self._pool


def _log_errors(do: Callable[[Nominee], None], nominee: Nominee) -> None:
    """Call `do`. Exceptions are logged and not raised."""
    try:
        do(nominee)
    except Exception:  # noqa: BLE001 - the outermost frame of a thread's work
        _log.exception("failed to write a nominated node", pod=nominee.pod.pod, uid=nominee.pod.uid)


def _is_node_from_extender(pod: Mapping[str, Any], node: str) -> bool:
    """Whether an extender has written this node into the pod's status, according to `metadata.managedFields`."""
    if (pod.get("status") or {}).get("nominatedNodeName") != node:
        return False
    return any(
        entry.get("manager") == _FIELD_MANAGER
        and "f:nominatedNodeName" in ((entry.get("fieldsV1") or {}).get("f:status") or {})
        for entry in pod["metadata"].get("managedFields") or ()
    )
