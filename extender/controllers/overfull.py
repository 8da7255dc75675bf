"""Evicts the later of two pods that were given the same room, if it has not started yet.

Two Bindings of ours never do that (design 0011); a Binding of somebody else may, or one that a wrong clock or a person
let through. Pods that were bound to its node under another name hold a card, too. They are not
evicted, so that a node which was taken over cannot get the pods of another node evicted by what it reports. The node
starts nothing beyond what the card has, so the later pod would wait there for ever. The state
suspects a node as soon as the watch shows both pods. Some seconds later the pods are read anew, since it takes a moment
until a started pod is marked as started; the eviction names the version of the pod.
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

_DIGITS = 30
_SETTLES = 3.0  # seconds from a suspicion to a look


class _Holder(NamedTuple):
    """A bound pod as it is now. `since`: when it was bound."""

    pod: PodRef
    version: str
    since: tuple[str, int]
    held: dict[str, int]  # MiB of a card, 1 of a device, by UUID
    started: bool
    leaving: bool
    here: bool  # bound to the node that reports the card


class Overfull:
    """`active`: whether this extender leads and all lists are complete. All methods belong to one thread."""

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
        self._due: dict[str, float] = {}  # nodes that are suspected, and when they are looked at
        self._backoffs: dict[str, Backoff] = {}

    def step(self) -> None:
        """One round."""
        if not self._active():
            return  # the state keeps the suspicion until this extender leads
        now = self._clock.now()
        for node in self._state.take_overfull():
            self._due.setdefault(node, now + _SETTLES)
        for node in sorted(node for node, at in self._due.items() if at <= now):
            try:
                self._look(node)
            except errors.KubeError as error:
                self._later(node, error.retry_after)
                _log.info("failed to resolve an overcommitted card; trying again", node=node, error=str(error))
            except Exception:  # noqa: BLE001 - one odd pod must not keep other nodes from being mended
                self._later(node)
                _log.exception("failed to resolve an overcommitted card", node=node)
            else:
                del self._due[node]
                self._backoffs.pop(node, None)

    def _later(self, node: str, at_least: float | None = None) -> None:
        self._due[node] = self._clock.now() + self._backoffs.setdefault(node, Backoff()).next(at_least)

    def _look(self, node: str) -> None:
        sizes, uuid_of, pods = self._state.holders(node)
        if not sizes:
            return  # a pod has gone already
        found = [
            self._read(pod, bound_to, uuid_of if bound_to == node else {}, here=bound_to == node)
            for pod, bound_to in pods
        ]
        holders = [each for each in found if each is not None]
        for uuid, size in sizes.items():
            # A pod that is being deleted and has not started holds nothing there.
            there = [each for each in holders if uuid in each.held and (each.started or not each.leaving)]
            too_much = sum(each.held[uuid] for each in there) - size
            victims = [each for each in there if each.here and not each.started]
            for victim in sorted(victims, key=lambda each: each.since)[::-1]:
                if too_much <= 0:
                    break
                too_much -= victim.held[uuid]
                self._evict(victim, node, uuid)
                holders.remove(victim)

    def _read(self, pod: PodRef, node: str, uuid_of: Mapping[int, str], *, here: bool) -> _Holder | None:
        try:
            found = self._client.get(paths.pods(pod.namespace, pod.name))
        except (errors.NotFound, errors.InvalidName):  # a node may report a name that no pod has
            return None
        metadata = found["metadata"]
        annotations = annotations_of(found)
        finished = (found.get("status") or {}).get("phase") in names.FINISHED_PHASES
        if metadata["uid"] != pod.uid or found["spec"].get("nodeName") != node or finished:
            return None
        try:
            made = assignment.decode(annotations)
        except assignment.InvalidAssignment:
            return None  # counted nowhere
        if made is None:
            return None
        return _Holder(
            pod,
            metadata["resourceVersion"],
            (_bound_at(found), _count(annotations.get(names.ASSUME_TIME))),
            _held(made, uuid_of),
            annotations.get(names.ASSIGNED) == "true" or _started(found),
            bool(metadata.get("deletionTimestamp")),
            here,
        )

    def _evict(self, victim: _Holder, node: str, uuid: str) -> None:
        """Raises KubeError, Conflict where the pod has changed: it may have started."""
        pod = victim.pod
        try:
            evict(self._client, pod.namespace, pod.name, pod.uid, version=victim.version)
        except errors.NotFound:
            return
        _log.warning("evicted a pod from an overcommitted card", pod=pod.pod, uid=pod.uid, node=node, card=uuid)
        text = f"evicted before its start was seen: {uuid} of node {node} was given to more pods than it has room for"
        self._events.record(pod.about, "CardGivenTwice", text, "Warning")


def _held(made: Assignment, uuid_of: Mapping[int, str]) -> dict[str, int]:
    held = {device.uuid: 1 for device in made.device_shares()}
    for share in made.shares():
        if uuid := share.uuid_by(uuid_of):
            held[uuid] = held.get(uuid, 0) + share.mem
    return held


def _count(text: str | None) -> int:
    """The nanoseconds in the annotation, or 0. They only decide between two pods that were bound in the same second."""
    return int(text) if text and text.isdecimal() and len(text) < _DIGITS else 0


def _bound_at(pod: Json) -> str:
    """When the pod was bound, to the second, as the API server says."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    times = (each.get("lastTransitionTime") for each in conditions if each["type"] == "PodScheduled")
    return str(next(times, None) or "")


def _started(pod: Json) -> bool:
    running = (pod.get("status") or {}).get("phase") == "Running"
    return running or any(each.get("state", {}).keys() - {"waiting"} for each in statuses_of(pod))
