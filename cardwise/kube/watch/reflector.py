"""A reflector: keeps a projection of one kind of object up to date with the API server, by list and watch.

The informer of the official Python client lacks socket timeouts, paging, bookmarks and back-off. This module has the
thread and the I/O; `store.Store` has the known objects and computes the changes.
"""

import contextlib
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import errors, wire
from cardwise.kube.backoff import Backoff
from cardwise.kube.client import KubeClient, Query
from cardwise.kube.nesting import null_deep_values, tolerate_depth
from cardwise.kube.recovery import Outage
from cardwise.kube.watch.store import Diff, Store
from cardwise.kube.watching import Watch
from cardwise.supervision import supervised_thread

T = TypeVar("T")
H_contra = TypeVar("H_contra", contravariant=True)

Project = Callable[[bytes], tuple[str, T] | None]

_log = structlog.get_logger("cardwise.kube.reflector")

_decode_list = tolerate_depth(msgspec.json.Decoder(wire.List).decode)
_decode_event = tolerate_depth(msgspec.json.Decoder(wire.WatchEvent).decode)
_decode_head = tolerate_depth(msgspec.json.Decoder(wire.ObjectHead).decode)


class Handler(Protocol[H_contra]):
    """Handles changes. The reflector's thread calls it for one change at a time, after the change is in the store.

    Exceptions are logged with tracebacks and counted, and the thread continues with the next change. A failed change is
    delivered again after a while, or together with the key's next change. `old` is then the last value that the handler
    has accepted.
    """

    def on_change(self, key: str, old: H_contra | None, new: H_contra) -> None:
        """Handle a new or changed object. `old`: None if the key is new."""

    def on_delete(self, key: str, old: H_contra) -> None: ...

    def on_synced(self) -> None:
        """Called after each list, once all its changes were delivered. After the first call, all objects are known."""


class WakeHandler:
    """A handler that calls `wake` on every change; by default it does nothing, for users who read the store."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake

    def on_change(self, key: str, old: object | None, new: object) -> None:  # noqa: ARG002
        self._wake()

    def on_delete(self, key: str, old: object) -> None:  # noqa: ARG002
        self._wake()

    def on_synced(self) -> None:
        self._wake()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPace:
    """The durations of a reflector's watches and pauses, in seconds.

    watch_min, watch_max: a watch lasts a random time between these.
    silence: a watch that sends nothing for this time is considered lost. The API server sends a bookmark each minute,
        but only for kinds with an event since its start. If nothing arrived since the watch was opened, the reflector
        lists again: after a restore of etcd, an API server accepts a watch from a version that lies in its future, and
        sends nothing until it reaches that version (kubernetes#107457).
    backoff_initial, backoff_cap: the first and the longest pause after failed calls. The default longest pause is for
        agents, which run on each node.
    """

    watch_min: float = 240.0
    watch_max: float = 480.0
    silence: float = 100.0
    backoff_initial: float = 0.5
    backoff_cap: float = 30.0


# For the extender and the webhook: they need current data and have few replicas, so they reconnect within seconds.
CENTRAL_PACE = WatchPace(backoff_cap=5.0)


class Reflector(Generic[T]):
    """Lists and watches one kind of object.

    project: turns an object's JSON into a key and a compact value. If it returns None, the object is ignored, and a
        former version is removed from the store.
    identity_of: returns the object's "namespace/name" (or name) from its key and value. Without this function, each
        object of a list is decoded a second time.
    on_list_failed: called when a list fails. Some of its objects may have been projected without being in the store.
    list_limit: objects per page of a list.

    Attributes:
    store: the known objects; may be read by any thread.
    synced: set after the first complete list.
    relists, events: the numbers of lists and of events.
    errors: the number of failed calls, and of watches that missed events.
    handler_errors: the number of exceptions of the handler or the projection.
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        project: Project[T],
        handler: Handler[T],
        *,
        query: Query | None = None,
        name: str = "",
        identity_of: Callable[[str, T], str] | None = None,
        on_list_failed: Callable[[], None] = lambda: None,
        list_limit: int = 1000,
        pace: WatchPace | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.name = name or path.rsplit("/", 1)[-1]
        self.store: Store[T] = Store()
        self.synced = threading.Event()
        self.relists = 0
        self.events = 0
        self.errors = 0
        self.handler_errors = 0
        self._client = client
        self._path = path
        self._query = dict(query or {})
        self._project = null_deep_values(project)
        self._identity_of = identity_of
        self._on_list_failed = on_list_failed
        self._handler = handler
        self._limit = list_limit
        self._pace = pace or WatchPace()
        self._clock = clock
        self._version = ""
        self._last_event_at: float | None = None
        self._confirmed_at = -math.inf  # when a list or watch line last showed that the API server has `_version`
        self._disconnected_at: float | None = -math.inf  # since when changes may be missed; None while a watch is open
        self._outage = Outage(client.recovery, self, clock)
        self._stopping = threading.Event()
        self._wake = threading.Event()  # ends the pause before the next attempt
        self._was_retried = False  # whether `retry` has ended the current pause
        self._pause_end = -math.inf  # when the last pause would have ended, if `retry` ended it
        self._may_retry = True  # whether `retry` may end a pause
        self._page_expired = False
        self._unconfirmed_since: float | None = None  # `_confirmed_at` when a silent watch made the next list necessary
        self._requested_lists: list[threading.Event] = []  # events of `relist` whose list has not begun yet
        # Events of `relist` whose list is complete, while the handler may not have accepted all changes.
        self._undelivered_lists: list[threading.Event] = []
        # Changes for which the handler failed. By key: the last value that the handler accepted (None if it accepted
        # none), and the last known value.
        self._deferred: dict[str, tuple[T | None, T]] = {}
        self._redeliver_at: float | None = None
        self._redeliver_backoff = Backoff(initial=self._pace.backoff_initial, cap=self._pace.backoff_cap)
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._log = _log.bind(reflector=self.name)
        self._thread = supervised_thread(self._run, f"reflector-{self.name}", clock)

    def start(self) -> None:
        self._client.recovery.subscribe(self)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the watch and wait up to `timeout` seconds for the thread. No handler is called afterwards."""
        self._client.recovery.unsubscribe(self)
        self._stopping.set()
        self._wake.set()
        with self._lock:
            if self._watch is not None:
                self._watch.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._clock.join(self._thread, timeout)

    def relist(self) -> threading.Event:
        """List again. The returned event is set when the handler has accepted all changes of a list that began after
        this call. So the handler then knows all earlier writes. Also ends a pause after errors, since the caller
        expects that the API server is available.
        """
        done = threading.Event()
        with self._lock:
            self._requested_lists.append(done)
            if self._watch is not None:
                self._watch.close()
        self._wake.set()
        return done

    def retry(self) -> None:
        """End the pause after a failed call, because the API server responds again. See `recovery.Retrying`."""
        with self._lock:
            if self._may_retry:
                self._was_retried = True
                self._wake.set()

    def disconnected_seconds(self) -> float:
        """The seconds during which changes may have been missed: 0 while a watch is open, inf before the first watch.

        After a watch that went silent, these are the seconds since the API server last sent something. If the watch
        never sent anything, they are the seconds since its end, and a list follows: such a silence is normal, because
        kube-apiserver sends bookmarks only for kinds with an event since its start.
        """
        since = self._disconnected_at  # read once, because the thread changes it
        return 0.0 if since is None else self._clock.now() - since

    def staleness_seconds(self) -> float:
        """The seconds since the API server last sent a list, event or bookmark, or ended a watch; inf if never."""
        last_event_at = self._last_event_at
        return math.inf if last_event_at is None else self._clock.now() - last_event_at

    def _run(self) -> None:
        cap = self._pace.backoff_cap
        backoff = Backoff(initial=self._pace.backoff_initial, cap=cap, max_retry_after=cap)
        while not self._stopping.is_set():
            delay = 0.0
            events_before = self.events
            try:
                if self._redeliver_at is not None and self._clock.now() >= self._redeliver_at:
                    self._deliver_deferred()
                if self._requested_lists or not self._version:
                    self._relist()
                if self._stopping.is_set():
                    return
                healthy = self._watch_once()
                if healthy:
                    backoff.reset()
                elif not self._requested_lists:  # no back-off if `relist` ended the watch
                    delay = backoff.next_delay()
            except errors.WatchSilent as error:
                # No back-off is needed: if the API server hangs, the next connection fails, and that has a back-off.
                if self._version:
                    self.errors += 1
                    self._outage.mark_failed(self._disconnected_at)
                    self._log.warning("the watch went silent, connecting again", error=str(error))
                else:  # normal for a kind without events; an error only if the list fails or shows missed events
                    self._log.debug("the watch sent nothing, listing again", error=str(error))
            except errors.Gone as error:
                self._log.info("the watch's resourceVersion expired; listing again", error=str(error))
                self._version = ""
                delay = backoff.next_delay()
            except errors.KubeError as error:
                self.errors += 1
                self._outage.mark_failed()
                if isinstance(error, errors.BadRequest) or "Too large resource version" in error.message:
                    # `_version` is newer than the API server's version: etcd was restored from a backup.
                    self._version = ""
                delay = backoff.next_delay(error.retry_after)
                self._log.warning(
                    "failed to watch the API server; trying again", error=str(error), retry_in=round(delay, 1)
                )
            except Exception:  # noqa: BLE001 - foreign code; logged and counted
                # After an unexpected error, a new list corrects the state, or fails again.
                self.errors += 1
                self._version = ""
                delay = backoff.next_delay()
                self._log.exception("reflector failed; listing again", retry_in=round(delay, 1))
            if self.events > events_before:
                # The watch worked until now. A list alone does not reset the back-off, because lists that are each
                # followed by a 410 must slow down.
                backoff.reset()
            self._pause(delay)

    def _pause(self, delay: float) -> None:
        """Wait `delay` seconds before the next attempt. If `retry` ended the last pause, also wait for the rest of that
        pause, but in total no longer than the longest pause of the back-off. `retry` does not end such a wait.
        """
        now = self._clock.now()
        until = now + delay
        if delay:
            until = max(until, min(self._pause_end + delay, now + self._pace.backoff_cap))
        with self._lock:
            self._may_retry |= self._pause_end <= now
        self._clock.wait(self._wake, until - now)
        with self._lock:
            self._wake.clear()  # `_stopping`, `_requested_lists` and `_was_retried` tell why the pause ended
            self._pause_end = until if self._was_retried else -math.inf
            self._may_retry = self._pause_end <= self._clock.now()
            self._was_retried = False

    def _relist(self) -> None:
        with self._lock:
            requested_count = len(self._requested_lists)
        # The first list is delivered page by page. Later lists are delivered as a whole, after the comparison.
        is_first = not len(self.store)
        listed_records: list[tuple[str, str, T]] = []
        unreadable: list[str] = []
        version = ""
        unconfirmed_since, self._unconfirmed_since = self._unconfirmed_since, None
        changed_count = 0  # objects that differ from the store
        # If the last list expired between two pages, list in one response, which cannot expire.
        limit = 0 if self._page_expired else self._limit
        try:
            for page in self._client.list_pages(self._path, self._query, limit):
                if self._stopping.is_set():
                    return
                decoded = _decode_list(page)
                version = decoded.metadata.resource_version
                for raw in decoded.items or ():
                    try:
                        projected = self._project(bytes(raw))
                    except Exception:  # noqa: BLE001 - foreign code; logged and counted
                        identity = _identity(_decode_head(raw).metadata)
                        self._count_handler_error("projection failed", identity)
                        unreadable.append(identity)
                        continue
                    if projected is not None:
                        if self._identity_of is not None:
                            identity = self._identity_of(*projected)
                        else:
                            identity = _identity(_decode_head(raw).metadata)
                        key, record = projected
                        listed_records.append((identity, key, self.store.reuse_known(key, record)))
                if is_first:
                    diff = self.store.add_records(listed_records)
                    changed_count += len(diff)
                    self._deliver(diff)
                    listed_records.clear()
        except Exception as error:
            self._page_expired |= isinstance(error, errors.Gone)
            self._on_list_failed()
            raise
        self._page_expired = False
        self._outage.mark_succeeded()
        self.relists += 1
        self._version = version
        if not is_first:
            diff = self.store.replace_records(listed_records, keep=unreadable)
            changed_count += len(diff)
            self._deliver(diff)
        if unconfirmed_since is not None and changed_count:
            self._report_missed_events(unconfirmed_since, changed_count)
        self._last_event_at = self._confirmed_at = self._clock.now()
        self._call_handler(self._handler.on_synced)
        self.synced.set()
        with self._lock:
            self._undelivered_lists += self._requested_lists[:requested_count]
            self._requested_lists = self._requested_lists[requested_count:]
        self._complete_relists()

    def _report_missed_events(self, since: float, objects: int) -> None:
        """Report that the list after a silent watch differs from the store: the watch did not send all events."""
        self.errors += 1
        self._outage.mark_failed(since)
        self._log.warning(
            "the watch sent no events, but objects had changed; listed them again",
            objects=objects,
            silent_seconds=round(self._clock.now() - since),
        )

    def _complete_relists(self) -> None:
        """Set the events that `relist` returned, if the handler has accepted all changes."""
        if not self._deferred:
            completed, self._undelivered_lists = self._undelivered_lists, []
            for event in completed:
                event.set()

    def _watch_once(self) -> bool:
        """Run one watch. Returns False if it ended soon and without events, so that a back-off is needed."""
        started = self._clock.now()
        seconds = random.uniform(self._pace.watch_min, self._pace.watch_max)  # noqa: S311 - spread, not secrecy
        redeliver_at = self._redeliver_at
        if redeliver_at is not None:
            seconds = max(1.0, min(seconds, redeliver_at - started))
        watch = self._client.watch(self._path, self._query, self._version, seconds, read_timeout=self._pace.silence)
        self._disconnected_at = None
        self._outage.mark_succeeded()
        with self._lock:
            self._watch = watch
            if self._stopping.is_set() or self._requested_lists:
                watch.close()
        events_before = self.events
        try:
            with contextlib.closing(iter(watch)) as lines:
                for line in lines:
                    if self._stopping.is_set() or self._requested_lists:
                        return True
                    self._process_event(line)
                    if self._redeliver_at != redeliver_at:
                        return True  # the handler failed: the next watch ends when the change is delivered again
            self._check_confirmed(events_before)
        except errors.WatchSilent:
            if self.events > events_before:
                self._disconnected_at = self._confirmed_at
            self._check_confirmed(events_before)
            raise
        finally:
            if self._disconnected_at is None:
                self._disconnected_at = self._clock.now()
            with self._lock:
                self._watch = None
        self._last_event_at = self._clock.now()
        return self.events > events_before or self._clock.now() - started >= min(1.0, self._pace.watch_min)

    def _check_confirmed(self, events_before: int) -> None:
        """Request a new list if the ended watch sent nothing, and nothing arrived for `silence` seconds: the API server
        may not have `_version` (see `WatchPace`). Several short watches count together.

        events_before: the number of events when the watch was opened.
        """
        if self.events == events_before and self._clock.now() - self._confirmed_at >= self._pace.silence:
            self._version = ""
            self._unconfirmed_since = self._confirmed_at

    def _process_event(self, line: bytes) -> None:
        event = _decode_event(line)
        if event.type == wire.EventType.ERROR:
            raise errors.from_status(bytes(event.object))
        head = _decode_head(event.object).metadata
        self.events += 1
        self._last_event_at = self._confirmed_at = self._clock.now()
        self._disconnected_at = None
        if event.type != wire.EventType.BOOKMARK:
            identity = _identity(head)
            try:
                projected = None if event.type == wire.EventType.DELETED else self._project(bytes(event.object))
            except Exception:  # noqa: BLE001 - foreign code; logged and counted
                self._count_handler_error("projection failed", identity)
            else:
                self._deliver(self.store.apply_event(identity, projected))
        if head.resource_version:
            self._version = head.resource_version

    def _deliver(self, diff: Diff[T]) -> None:
        for key, old in diff.deleted:
            self._notify_deleted(key, old)
        for key, old, new in diff.updated:
            self._notify_changed(key, old, new)
        for key, new in diff.added:
            self._notify_changed(key, None, new)

    def _notify_changed(self, key: str, old: T | None, new: T) -> None:
        delivered, _ = self._deferred.pop(key, (old, new))
        if not self._call_handler(self._handler.on_change, key, delivered, new):
            self._defer_change(key, delivered, new)

    def _notify_deleted(self, key: str, old: T) -> None:
        delivered, _ = self._deferred.pop(key, (old, old))
        # Even if the handler accepted no value, it is called: it may have failed in the middle of an addition.
        if not self._call_handler(self._handler.on_delete, key, old if delivered is None else delivered):
            self._defer_change(key, delivered, old)

    def _defer_change(self, key: str, delivered: T | None, last: T) -> None:
        self._deferred[key] = delivered, last
        if self._redeliver_at is None:
            self._redeliver_at = self._clock.now() + self._redeliver_backoff.next_delay()

    def _deliver_deferred(self) -> None:
        """Deliver again the changes for which the handler failed."""
        self._redeliver_at = None
        for key, (delivered, last) in list(self._deferred.items()):
            record = self.store.get(key)
            if record is not None:
                self._notify_changed(key, delivered, record)
            else:
                self._notify_deleted(key, last)
        if not self._deferred:
            self._redeliver_backoff.reset()
        self._complete_relists()

    def _call_handler(self, method: Callable[..., None], *args: object) -> bool:
        if not self._stopping.is_set():
            try:
                method(*args)
            except Exception:  # noqa: BLE001 - foreign code; logged and counted
                self._count_handler_error("handler failed", str(args[0]) if args else method.__name__)
                return False
        return True

    def _count_handler_error(self, event: str, key: str) -> None:
        self.handler_errors += 1
        self._log.exception(event, key=key)


def _identity(head: wire.Identity) -> str:
    return f"{head.namespace}/{head.name}" if head.namespace else head.name
