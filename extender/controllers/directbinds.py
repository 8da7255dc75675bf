"""Deletes pods that request GPUs and were bound without the extender.

The webhook refuses such Bindings. But if the webhook responds too late, the API server accepts them; otherwise other
schedulers would be blocked. Such a pod has no cards, and its containers never start. Still the kubelet and
kube-scheduler add its requests to the node's totals, outside of every quota, and refuse other pods. The pod is deleted
and not evicted, since a PodDisruptionBudget of its owner could forbid the eviction.

Static pods are excluded, and pods that the webhook does not change (they request no slot). Pods that a gpushare
scheduler has bound are also excluded: gpushare's annotations contain their assignment.
"""

from collections.abc import Callable
from typing import Any

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment, names
from cardwise.core.values.decoded import annotations_of, statuses_of
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.fairqueueing import round_robin
from extender.records.pod import Pod
from extender.records.podref import PodRef
from extender.state import State

_log = structlog.get_logger(__name__)

_SETTLE_SECONDS = 2.0  # seconds from the first sight of such a pod to the check
_ROUND_SECONDS = 2.0  # seconds after which a step checks no further pod: other steps run in this thread, too
_TIMEOUT = 5.0
_GRACE_SECONDS = 1  # grace period of the deletion, in seconds: running containers must not delay its end for long


class DirectBindController:
    """Deletes the pods of `State.direct_binds`. All methods belong to one thread.

    active: returns whether this extender leads and all lists are complete.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        events: Recorder,
        *,
        active: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._state = state
        self._events = events
        self._active = active
        self._clock = clock
        self._due_by_uid: dict[str, float] = {}  # by UID, when the pod is checked next
        self._backoffs: dict[str, Backoff] = {}
        self._reported: set[str] = set()

    def step(self) -> None:
        """Check the pods that are due, and delete those that were bound without the extender."""
        if not self._active():
            return  # the state keeps these pods until this extender leads
        now = self._clock.now()
        direct_binds = {pod.uid: (pod, node) for pod, node in self._state.direct_binds()}
        self._due_by_uid = {uid: self._due_by_uid.get(uid, now + _SETTLE_SECONDS) for uid in direct_binds}
        self._backoffs = {uid: backoff for uid, backoff in self._backoffs.items() if uid in direct_binds}
        self._reported &= direct_binds.keys()
        due_uids = sorted((uid for uid, at in self._due_by_uid.items() if at <= now), key=self._due_by_uid.__getitem__)
        # Namespaces take turns, since a tenant can make each call about their pods take seconds.
        for uid in round_robin(due_uids, lambda uid: direct_binds[uid][0].namespace):
            if self._clock.now() - now > _ROUND_SECONDS:
                break
            at_least = None
            try:
                self._check_pod(*direct_binds[uid])
            except errors.KubeError as error:
                at_least = error.retry_after
                pod = direct_binds[uid][0]
                _log.info(
                    "failed to delete a pod that was bound without the extender; trying again",
                    pod=pod.pod,
                    uid=uid,
                    error=str(error),
                )
            except Exception:  # noqa: BLE001 - an unexpected pod must not stop the checks of other pods
                _log.exception(
                    "failed to delete a pod that was bound without the extender", pod=direct_binds[uid][0].pod, uid=uid
                )
            # Try again until the watch shows that the pod is gone.
            self._due_by_uid[uid] = self._clock.now() + self._backoffs.setdefault(uid, Backoff(initial=1.0)).next_delay(
                at_least
            )

    def _check_pod(self, pod: PodRef, node: str) -> None:
        try:
            manifest = self._client.get(paths.pods(pod.namespace, pod.name), timeout=_TIMEOUT)
        except errors.NotFound:
            return
        if manifest["metadata"]["uid"] != pod.uid or not _is_unstarted_direct_bind(manifest, node):
            return
        preconditions = {"uid": pod.uid, "resourceVersion": manifest["metadata"]["resourceVersion"]}
        options = {"gracePeriodSeconds": _GRACE_SECONDS, "preconditions": preconditions}
        try:
            self._client.delete(paths.pods(pod.namespace, pod.name), options, timeout=_TIMEOUT)
        except errors.NotFound:
            return
        if pod.uid in self._reported:
            return
        self._reported.add(pod.uid)
        _log.warning("deleted a pod that was bound without the extender", pod=pod.pod, uid=pod.uid, node=node)
        text = f"deleted: the pod requests GPUs or devices, and another program than Cardwise bound it to node {node}"
        self._events.record(pod.about, names.BOUND_WITHOUT_EXTENDER, text, "Warning")


def _is_unstarted_direct_bind(pod: dict[str, Any], node: str) -> bool:
    """Whether the pod is on the node without cards, and no container that requests a GPU or device has ever started."""
    status = pod.get("status") or {}
    if pod["spec"].get("nodeName") != node or status.get("phase") in names.FINISHED_PHASES:
        return False
    try:
        if assignment.decode(annotations_of(pod)) is not None:
            return False
    except assignment.InvalidAssignment:
        return False  # the pod has an assignment, which cannot be read
    slots = Pod(pod).slots
    started = {
        status_entry["name"]
        for status_entry in statuses_of(pod)
        if status_entry.get("state", {}).keys() - {"waiting"} or status_entry.get("lastState")
    }
    return bool(slots) and not slots & started
