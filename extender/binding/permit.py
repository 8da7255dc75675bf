"""Lets bind calls of gang members wait for the other members, each in its thread.

One more thread watches the connections of the waiting calls. If kube-scheduler's timeout ends, it closes the call's
connection. Then the permit of the gang is cancelled, because this member can no longer be bound.
"""

import select
import ssl
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.supervision import supervised_thread
from extender.gangs.gangtypes import Permit

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.2  # seconds between two checks of all connections

Cancel = Callable[[Permit, str], None]


class Connection(Protocol):
    """The connection of a call, as a socket that can be polled."""

    def fileno(self) -> int: ...


class WaitingBinds:
    """The binds that wait for a permit. Thread-safe. The watching thread runs while a bind waits.

    cancel: called to cancel a permit that is not decided yet.
    """

    def __init__(self, cancel: Cancel, clock: Clock = SYSTEM) -> None:
        self._cancel = cancel
        self._clock = clock
        self._connections: dict[int, tuple[Connection, Permit, str]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait_for_permit(self, permit: Permit, name: str, connection: Connection | None, seconds: float) -> None:
        """Wait until the permit is decided. Cancels the permit after `seconds`, or when the connection closes earlier.

        name: the name of the pod, for the reason.
        """
        number = self._register_connection(permit, name, connection) if connection is not None else None
        try:
            if not self._clock.wait(permit.done, max(0.0, seconds)):
                self._cancel(permit, f"the bind of {name} timed out while it waited for the other members")
                if not permit.done.is_set():  # a thread failed between its decision and setting `done`
                    permit.decide(allowed=False, reason="the outcome is unknown; the pod is tried again")
        finally:
            if number is not None:
                with self._lock:
                    self._connections.pop(number, None)

    def _register_connection(self, permit: Permit, name: str, connection: Connection) -> int | None:
        number = connection.fileno()
        if number < 0:
            return None
        with self._lock:
            self._connections[number] = connection, permit, name
            if self._thread is None:
                self._thread = supervised_thread(self._run, "permits", self._clock)
                self._thread.start()
        return number

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._connections:
                    self._thread = None
                    return
                connections = dict(self._connections)
            try:
                closed = _closed_connections(connections)
                for _, permit, name in closed:
                    self._cancel(permit, f"kube-scheduler gave up the bind of {name}")
            except Exception:  # noqa: BLE001 - the outermost loop: without it closed connections would not be noticed
                _log.exception("failed to check the connections of waiting bind calls")
            self._clock.sleep(_POLL_SECONDS)


def _closed_connections(connections: dict[int, tuple[Connection, Permit, str]]) -> list[tuple[Connection, Permit, str]]:
    """The waiting binds whose connections kube-scheduler has closed or is about to close, from `connections`."""
    poll = select.poll()
    for number, (connection, _, _) in connections.items():
        # A TLS client sends a closing record first. A client that waits for a response sends nothing else.
        poll.register(number, select.POLLRDHUP | (select.POLLIN if isinstance(connection, ssl.SSLSocket) else 0))
    return [connections[number] for number, _ in poll.poll(0)]
