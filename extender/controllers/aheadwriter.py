"""Writes the nodes that `ahead.ahead` has decided into the statuses of pods, and takes them back.

One thread decides, some write. A write that comes too late does no harm: it names the version of the pod that it is
for, so it never replaces a node that kube-scheduler has named meanwhile.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from extender.ahead.ahead import Ahead, Nominee
from extender.records.podref import PodRef
from extender.reporting.schedule import Pace

_log = structlog.get_logger(__name__)

_THREADS: Final = 16  # with fewer, an API server that takes its time would let kube-scheduler catch up
_RATE: Final = 400.0  # pods a second, at most
_AT_ONCE: Final = 64  # in one round: the loop shall hear that it is to stop
_TIMEOUT: Final = 5.0  # seconds for one write
_PAUSE: Final = 5.0  # seconds after a write that failed: for its namespace, since its pod may be why
_IN_A_ROW: Final = 8  # writes that failed with none between them that did not: then for all
_MANAGER: Final = "cardwise-extender"  # in `metadata.managedFields`: by it our names are told from those of others


class AheadWriter:
    """`active`: whether this extender leads and knows all there is. `step` belongs to one thread."""

    def __init__(
        self,
        client: KubeClient,
        ahead: Ahead,
        *,
        active: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._ahead = ahead
        self._active = active
        self._clock = clock
        self._pace = Pace(_RATE, _RATE)
        self._not_before = float("-inf")
        self._resting: dict[str, float] = {}  # until when, by namespace
        self._failed = 0  # writes, since the last that did not
        self._pool: ThreadPoolExecutor | None = None

    def step(self) -> None:
        """One round: who is next is decided about, and written; names that mean nothing any more are taken back."""
        if self._clock.now() < self._not_before or not self._active():
            return
        now = self._clock.now()
        self._resting = {namespace: until for namespace, until in self._resting.items() if until > now}
        resting = frozenset(self._resting)
        for stale in self._ahead.stale():
            self._threads().submit(self.take_back, stale)
        for _ in range(_AT_ONCE):
            if not self._pace.ready(self._clock.now(), calm=False):
                return
            again, nominee = self._ahead.decide(resting)
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
        if not self._ahead.wanted(nominee.pod.uid):
            return  # kube-scheduler was faster; those behind are in time for it
        try:
            self._name(nominee.pod, nominee.version, nominee.node)
        except (errors.Conflict, errors.NotFound, errors.Invalid):
            self._ahead.unwritten(nominee.pod.uid)  # Invalid: kube-scheduler was faster, the pod is bound
        except errors.KubeError as error:
            self._ahead.unwritten(nominee.pod.uid)
            self._rest("cannot nominate a node ahead", nominee.pod, error)

    def take_back(self, stale: Nominee) -> None:
        """Takes the node out of the pod's status, if it is there by us and the pod has none.

        kube-scheduler counts who is nominated to a node as if he were there, and never forgets a pod that may evict
        nobody: it would keep others away for as long as it waits.
        """
        try:
            pod = self._client.get(paths.pods(stale.pod.namespace, stale.pod.name), timeout=_TIMEOUT)
            metadata = pod["metadata"]
            if metadata["uid"] != stale.pod.uid or pod["spec"].get("nodeName") or not _is_ours(pod, stale.node):
                return
            self._name(stale.pod, metadata["resourceVersion"], None)
        except (errors.NotFound, errors.Invalid):
            return  # it is no more, or bound
        except errors.Conflict:
            self._ahead.still_named(stale)
        except errors.KubeError as error:
            self._ahead.still_named(stale)
            self._rest("cannot take a nominated node back", stale.pod, error)

    def _name(self, pod: PodRef, version: str, node: str | None) -> None:
        """The pod's status names the node from now on, if the pod still is of this version. Raises KubeError."""
        change = {
            "metadata": {"uid": pod.uid, "resourceVersion": version},
            "status": {"nominatedNodeName": node},
        }
        path = paths.pods(pod.namespace, pod.name, "status")
        self._client.patch(path, change, "merge", _MANAGER, timeout=_TIMEOUT)
        self._failed = 0

    def _rest(self, what: str, pod: PodRef, error: errors.KubeError) -> None:
        self._resting[pod.namespace] = self._clock.now() + _PAUSE
        self._failed += 1
        if self._failed >= _IN_A_ROW:
            self._failed = 0
            self._not_before = self._clock.now() + _PAUSE
        _log.warning(what, pod=pod.pod, uid=pod.uid, error=str(error))

    def _threads(self) -> ThreadPoolExecutor:
        # In the process that serves, which is a fork of the one that made this.
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="nominating")
        return self._pool


def _is_ours(pod: Mapping[str, Any], node: str) -> bool:
    """Whether the pod's status names this node because of us."""
    if (pod.get("status") or {}).get("nominatedNodeName") != node:
        return False
    return any(
        entry.get("manager") == _MANAGER
        and "f:nominatedNodeName" in ((entry.get("fieldsV1") or {}).get("f:status") or {})
        for entry in pod["metadata"].get("managedFields") or ()
    )
