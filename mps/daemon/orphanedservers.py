"""Ends the orphaned servers of a dead daemon: server processes of its pipe folder that accept no commands any more.

Only this module ends processes that the manager has not started. A server without a daemon still serves its clients,
and prevents the next server from opening the card. So the clients get some time to end; then this module ends the
server.
"""

import signal

import structlog

from cardwise.clock import Clock
from cardwise.gpus.protocol import CardControl
from mps.daemon.machine import OK_RESULT, ActResult, Outcome
from mps.daemon.units import DaemonUnit
from mps.host.processes import Host

_log = structlog.get_logger(__name__)

_KILL_SECONDS = 3.0  # seconds between SIGTERM and SIGKILL


class OrphanedServerSweeper:
    """Ends the orphaned servers of one unit.

    grace: seconds that the clients of a server without a daemon get to end.
    """

    def __init__(self, unit: DaemonUnit, card_control: CardControl, grace: float, host: Host, clock: Clock) -> None:
        self._unit = unit
        self._card_control = card_control
        self._grace = grace
        self._host = host
        self._clock = clock
        self._orphaned_since: float | None = None  # when servers without a daemon were first observed
        self._first_signal_at: float | None = None  # when the servers got their first signal
        self._logged_signal: signal.Signals | None = None  # the last signal that was logged

    def sweep(self) -> ActResult:
        """Do one step to end the servers. Call again while the outcome is BUSY. Raises OSError."""
        for daemon in self._host.daemons(self._unit.pipe):
            _log.warning("ending a leftover daemon", card=self._unit.name, pid=daemon.pid)
            daemon.signal(signal.SIGKILL)
        orphans = self._host.servers(self._unit.pipe)
        if not orphans:
            self._orphaned_since = self._first_signal_at = self._logged_signal = None
            return OK_RESULT
        now = self._clock.now()
        self._orphaned_since = orphaned_since = self._orphaned_since or now
        if now - orphaned_since < self._grace:
            clients = {pid for _, pid in self._unit.processes(self._card_control)} - {orphan.pid for orphan in orphans}
            if clients:
                reason = f"an orphaned MPS server still has {len(clients)} clients; waiting for them to exit"
                return ActResult(Outcome.BUSY, reason)
        self._first_signal_at = first_signal_at = self._first_signal_at or now
        elapsed = now - first_signal_at
        signal_number = signal.SIGKILL if elapsed > _KILL_SECONDS else signal.SIGTERM
        for orphan in orphans:
            if signal_number is not self._logged_signal:
                _log.warning(
                    "ending an orphaned MPS server", card=self._unit.name, pid=orphan.pid, by=signal_number.name
                )
            orphan.signal(signal_number)
        self._logged_signal = signal_number
        if elapsed > 2 * _KILL_SECONDS:
            pids = ", ".join(str(orphan.pid) for orphan in orphans)
            return ActResult(Outcome.BUSY, f"server {pids} does not end when killed: it hangs in the driver")
        return ActResult(Outcome.BUSY, "servers of a dead daemon are being ended")
