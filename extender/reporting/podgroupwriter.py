"""Writes PodGroups, their statuses, and events on the pending pods of gangs.

The writer has its own thread, because slow writes must not delay gates and permits. Like the status writer, it is
level-triggered: it compares the desired object with the object of the watch.
"""

from collections.abc import Callable
from typing import NamedTuple

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.gangs.gangs import GangPhase
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventKind, ObjectRef, Recorder
from extender.gangs import podgroups
from extender.gangs.gangviews import GangView
from extender.gangs.podgroups import GroupRecord
from extender.records.podref import PodRef
from extender.reporting import statuses
from extender.reporting.listers import Lister
from extender.reporting.schedule import Key, WriteRate, WriteSchedule

_log = structlog.get_logger(__name__)

GROUP = "podgroup"

_COMPARE_SECONDS = 0.5  # seconds between two comparisons of all gangs
_MIN_SECONDS_BETWEEN_WRITES = 0.5  # minimum seconds between two writes to one PodGroup
_MAX_WRITES_PER_SECOND = 50.0  # maximum number of writes a second
_MAX_STEP_SECONDS = 1.0  # seconds of writing after which a step ends
_WRITE_TIMEOUT = 2.0
_REFUSED_SECONDS = 30.0  # seconds until a refused write is tried again
_CONFLICT_SECONDS = 2.0  # seconds until a retry after a conflict: by then the watch shows the created or deleted object
_SETTLED_SECONDS = 1.0  # seconds for which a gang must be in a state before its pods get an event about the state


class _EventState(NamedTuple):
    """The event that a gang should have, since when it should have it, and whether the event was written."""

    reason: str
    text: str
    at: float
    done: bool


class PodGroupWriter:
    """Writes PodGroups and events. All methods belong to one thread.

    gangs: returns all gangs.
    active: returns whether this extender leads; only the leader writes.
    """

    def __init__(
        self,
        client: KubeClient,
        lister: Lister[GroupRecord],
        events: Recorder,
        *,
        gangs: Callable[[], list[GangView]],
        active: Callable[[], bool],
        clock: Clock = SYSTEM,
    ) -> None:
        self._client = client
        self._lister = lister
        self._events = events
        self._gangs = gangs
        self._active = active
        self._clock = clock
        self._views: dict[str, GangView] = {}
        self._event_states: dict[str, _EventState] = {}
        self._schedule = WriteSchedule({GROUP: _MIN_SECONDS_BETWEEN_WRITES})
        self._write_rate = WriteRate()
        self._compared_at = float("-inf")

    def step(self) -> None:
        """Compare all gangs with what was written, and write as much as the time allows."""
        if not self._active():
            return
        now = self._clock.now()
        if now - self._compared_at >= _COMPARE_SECONDS:
            self._compared_at = now
            self._mark_changed(now)
        while self._clock.now() - now <= _MAX_STEP_SECONDS and self._write_rate.allows_write(
            self._clock.now(), _MAX_WRITES_PER_SECOND
        ):
            key = self._schedule.next_key(self._clock.now())
            if key is None:
                return
            self._write_if_changed(key)

    def _mark_changed(self, now: float) -> None:
        before, self._views = self._views, {f"{view.namespace}/{view.name}": view for view in self._gangs()}
        records = self._lister.snapshot()
        changed = {key for key, view in self._views.items() if before.get(key) != view} | (before.keys() - self._views)
        # Add the PodGroups that must be created or deleted.
        changed |= self._lister.take_changed() | (self._views.keys() ^ records.keys())
        self._schedule.enqueue_all([Key(GROUP, key) for key in sorted(changed)], now)
        for key, view in self._views.items():
            self._record_event(key, view, records.get(key), now)
        for key in self._event_states.keys() - self._views:
            del self._event_states[key]

    # PodGroups.

    def _write_if_changed(self, key: Key) -> None:
        """Create, update or delete one PodGroup, if it differs from the desired object."""
        planned_write = self._plan_write(key.key)
        if planned_write is None:
            self._schedule.mark_settled(key)
            return
        content, write = planned_write
        self._write_rate.record_write()
        try:
            write()
        except (errors.NotFound, errors.Conflict):
            self._schedule.mark_failed(key, self._clock.now(), _CONFLICT_SECONDS)  # the watch will show the new state
        except errors.KubeError as error:
            _log.warning("failed to write a PodGroup; trying again", name=key.key, error=str(error))
            self._schedule.mark_failed(key, self._clock.now(), error.retry_after or _REFUSED_SECONDS)
        else:
            self._schedule.mark_written(key, content, self._clock.now())

    def _plan_write(self, key: str) -> tuple[object, Callable[[], object]] | None:
        view, record = self._views.get(key), self._lister.objects.get(key)
        namespace, _, name = key.partition("/")
        if record is None:
            if view is None or view.minimum < 1 or not (view.has_minimum_from_member or view.has_foreign_podgroup):
                return None
            manifest = podgroups.automatic_group(view)
            return "made", lambda: self._client.create(paths.podgroups(namespace), manifest, timeout=_WRITE_TIMEOUT)
        if record.auto and view is None:
            if record.terminating:
                return None
            options = {"preconditions": {"uid": record.uid}}
            return "deleted", lambda: self._client.delete(
                paths.podgroups(namespace, name), options, timeout=_WRITE_TIMEOUT
            )
        if record.auto and view is not None and view.minimum not in (0, record.minimum):
            spec = {"spec": {"minMember": view.minimum}}
            return spec, lambda: self._client.patch(
                paths.podgroups(namespace, name), spec, "merge", timeout=_WRITE_TIMEOUT
            )
        now = self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ")
        wanted_status = podgroups.group_status(record, view, now)
        if statuses.is_same_status(wanted_status, record.status):
            return None
        patch = {"status": statuses.make_status_patch(wanted_status, record.status, now)}
        return wanted_status, lambda: self._client.patch(
            paths.podgroups(namespace, name, "status"), patch, "merge", timeout=_WRITE_TIMEOUT
        )

    # Events.

    def _record_event(self, key: str, view: GangView, record: GroupRecord | None, now: float) -> None:
        event = _event_text(view)
        state_before = self._event_states.get(key)
        if event is None:
            self._event_states.pop(key, None)
            return
        if state_before is None or (state_before.reason, state_before.text) != event:
            # Without an earlier state, a running gang may have been running for long before this epoch.
            is_recorded = state_before is None and view.phase is GangPhase.RUNNING and _was_running(record)
            state_before = self._event_states[key] = _EventState(*event, now, is_recorded)
        at_once = view.phase in (GangPhase.RUNNING, GangPhase.PARTLY_BOUND)
        if state_before.done or (not at_once and now - state_before.at < _SETTLED_SECONDS):
            return
        self._event_states[key] = state_before._replace(done=True)
        kind: EventKind = (
            "Normal" if view.phase in (GangPhase.RESERVED, GangPhase.BINDING, GangPhase.RUNNING) else "Warning"
        )
        if record is not None:
            group_object = ObjectRef(names.API_VERSION, "PodGroup", view.name, view.namespace, record.uid)
            self._events.record(group_object, state_before.reason, state_before.text, kind)
        for pod in view.oldest:
            self._events.record(pod.about, state_before.reason, state_before.text, kind)


def _event_text(view: GangView) -> tuple[str, str] | None:
    """Reason and text of the event about the gang; None for no event, for example if all pods of the gang are
    terminating.
    """
    name, member_count = f"gang {view.name}", view.member_count
    if not member_count:
        return None
    if view.phase is GangPhase.PENDING:
        if view.minimum > member_count:
            return "GangIncomplete", f"{name} is waiting for {view.minimum - member_count} of {view.minimum} members"
        return "GangIncomplete", f"{name} cannot be bound: {view.reason}"
    if view.phase is GangPhase.WAITING:
        return (
            "GangWaiting",
            f"{name} waits for capacity for all its members" + (f": {view.reason}" if view.reason else ""),
        )
    if view.phase is GangPhase.RESERVED:
        first_members = ", ".join(view.waiting_for[:3]) + (", ..." if len(view.waiting_for) > 3 else "")
        return "GangReserved", f"{name} fits, waiting for {first_members} to be scheduled"
    if view.phase is GangPhase.RUNNING:
        return "GangBound", f"{name} is bound: all {view.minimum} required members have a node"
    if view.phase is GangPhase.PARTLY_BOUND:
        return (
            "GangPartlyBound",
            f"{name} is partly bound: {view.bound} of {view.minimum} members have a node",
        )
    return None


def _was_running(record: GroupRecord | None) -> bool:
    return record is not None and record.status.get("phase") == GangPhase.RUNNING


def rollback_event(pod: PodRef, cause: str) -> tuple[ObjectRef, str, str]:
    """The event of a member that is evicted."""
    return pod.about, "GangRolledBack", f"{cause}; the pod is evicted, and the whole gang is tried again"
