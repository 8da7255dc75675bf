"""Evicts the later of two pods that hold the same memory of a card, if it has not started yet.

Two Bindings of the extender never cause this (docs/design/0011-fencing.md). The causes are a Binding of another
program, a wrong clock, or a manual change. The node starts no pod beyond the card's capacity, so the later pod would
wait there for ever. Pods that were bound to the node under its former name hold memory too, but are not evicted.
Otherwise an attacker who controls a node could have the pods of another node evicted by false reports.

`State` lists a node as suspect as soon as the watch shows both pods. `_SETTLE_SECONDS` later the pods are read again,
since the node marks a pod as started only a moment after its start. The eviction names the pod's resourceVersion.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.values.decoded import Json, annotations_of, statuses_of
from cardwise.kube import errors, paths
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient
from cardwise.kube.events import Recorder
from cardwise.kube.pods.eviction import evict
from extender.records.podref import PodRef
from extender.state import State

_log = structlog.get_logger(__name__)

_TIMESTAMP_DIGITS = 30
_EARLIEST_TIME = ""  # sorts before every time: of a pod whose time of binding is unknown
_SETTLE_SECONDS = 3.0  # seconds from the suspicion of a node to its check


class _Holder(NamedTuple):
    """A bound pod as read from the API server. `since`: when the pod was bound, for comparison with other pods."""

    pod: PodRef
    version: str
    since: tuple[str, int]
    amounts: dict[str, int]  # MiB of a card, 1 of a device, by UUID
    started: bool
    terminating: bool
    bound_here: bool  # whether the pod is bound to the node that reports the card


class OvercommitController:
    """Resolves the nodes of `State.take_overcommitted_nodes`. All methods belong to one thread.

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
        self._check_times: dict[str, float] = {}  # suspected nodes, and when they are checked
        self._backoffs: dict[str, Backoff] = {}

    def step(self) -> None:
        """Check the nodes that are due, and evict pods from overcommitted cards."""
        if not self._active():
            return  # the state keeps the suspected nodes until this extender leads
        now = self._clock.now()
        for node in self._state.take_overcommitted_nodes():
            self._check_times.setdefault(node, now + _SETTLE_SECONDS)
        for node in sorted(node for node, at in self._check_times.items() if at <= now):
            try:
                self._check_node(node)
            except errors.KubeError as error:
                self._retry_later(node, error.retry_after)
                _log.info("failed to resolve an overcommitted card; trying again", node=node, error=str(error))
            except Exception:  # noqa: BLE001 - an unexpected pod must not stop the checks of other nodes
                self._retry_later(node)
                _log.exception("failed to resolve an overcommitted card", node=node)
            else:
                del self._check_times[node]
                self._backoffs.pop(node, None)

    def _retry_later(self, node: str, at_least: float | None = None) -> None:
        self._check_times[node] = self._clock.now() + self._backoffs.setdefault(node, Backoff()).next_delay(at_least)

    def _check_node(self, node: str) -> None:
        overcommitted = self._state.overcommit_details(node)
        uuid_of = overcommitted.uuid_by_index
        if not overcommitted.capacity_by_uuid:
            return  # a pod was deleted already
        pods_read = [
            self._read_holder(pod, bound_to, uuid_of if bound_to == node else {}, bound_here=bound_to == node)
            for pod, bound_to in overcommitted.pods
        ]
        holders = [holder for holder in pods_read if holder is not None]
        for uuid, capacity in overcommitted.capacity_by_uuid.items():
            # A pod that is being deleted before it started will not use the card.
            card_holders = [
                holder for holder in holders if uuid in holder.amounts and (holder.started or not holder.terminating)
            ]
            too_much = sum(holder.amounts[uuid] for holder in card_holders) - capacity
            victims = [holder for holder in card_holders if holder.bound_here and not holder.started]
            for victim in sorted(victims, key=lambda holder: holder.since)[::-1]:
                if too_much <= 0:
                    break
                too_much -= victim.amounts[uuid]
                self._evict(victim, node, uuid)
                holders.remove(victim)

    def _read_holder(self, pod: PodRef, node: str, uuid_of: Mapping[int, str], *, bound_here: bool) -> _Holder | None:
        try:
            manifest = self._client.get(paths.pods(pod.namespace, pod.name))
        except (errors.NotFound, errors.InvalidName):  # a node may report an invalid pod name
            return None
        metadata = manifest["metadata"]
        annotations = annotations_of(manifest)
        finished = (manifest.get("status") or {}).get("phase") in names.FINISHED_PHASES
        if metadata["uid"] != pod.uid or manifest["spec"].get("nodeName") != node or finished:
            return None
        try:
            assigned = assignment.decode(annotations)
        except assignment.InvalidAssignment:
            return None  # the ledger does not count a pod with an unreadable assignment either
        if assigned is None:
            return None
        return _Holder(
            pod,
            metadata["resourceVersion"],
            (_bound_at(manifest), _parse_nanoseconds(annotations.get(names.ASSUME_TIME))),
            _amounts_by_uuid(assigned, uuid_of),
            annotations.get(names.ASSIGNED) == "true" or _has_started(manifest),
            bool(metadata.get("deletionTimestamp")),
            bound_here,
        )

    def _evict(self, victim: _Holder, node: str, uuid: str) -> None:
        """Evict the pod. Raises KubeError. This is Conflict if the pod has changed since it was read: it may run
        now.
        """
        pod = victim.pod
        try:
            evict(self._client, pod.namespace, pod.name, pod.uid, version=victim.version)
        except errors.NotFound:
            return
        _log.warning("evicted a pod from an overcommitted card", pod=pod.pod, uid=pod.uid, node=node, card=uuid)
        text = f"evicted before it started: GPU {uuid} of node {node} is overcommitted"
        self._events.record(pod.about, "GPUOvercommitted", text, "Warning")


def _amounts_by_uuid(assigned: Assignment, uuid_of: Mapping[int, str]) -> dict[str, int]:
    amounts = {device.uuid: 1 for device in assigned.non_gpu_devices()}
    for share in assigned.shares():
        if uuid := share.resolve_uuid(uuid_of):
            amounts[uuid] = amounts.get(uuid, 0) + share.mem
    return amounts


def _parse_nanoseconds(text: str | None) -> int:
    """The nanoseconds in the annotation, or 0. They only order two pods that were bound in the same second."""
    return int(text) if text and text.isdecimal() and len(text) < _TIMESTAMP_DIGITS else 0


def _bound_at(pod: Json) -> str:
    """When the pod was bound, in whole seconds of the API server's clock; a string that sorts first if unknown."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    times = (condition.get("lastTransitionTime") for condition in conditions if condition["type"] == "PodScheduled")
    return str(next(times, None) or _EARLIEST_TIME)


def _has_started(pod: Json) -> bool:
    running = (pod.get("status") or {}).get("phase") == "Running"
    return running or any(status.get("state", {}).keys() - {"waiting"} for status in statuses_of(pod))
