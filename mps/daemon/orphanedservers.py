"""Ends orphans of a dead daemon: processes of its pipe directory that take no commands any more.

The one place where processes are ended that are not our own. A server without a daemon still serves its clients, and
keeps the card from the next server; so the clients get some time, and then it goes.
"""

import signal

import structlog

from cardwise.clock import Clock
from cardwise.gpus.protocol import CardUse
from mps.daemon.machine import OK, Outcome, Result
from mps.daemon.units import DaemonUnit
from mps.host.processes import Host

_log = structlog.get_logger(__name__)

_KILL_SECONDS = 3.0  # after which a server that does not go is killed


class OrphanSweeper:
    """Ends orphans of one unit. `grace`: seconds for the clients of a server without daemon."""

    def __init__(self, unit: DaemonUnit, use: CardUse, grace: float, host: Host, clock: Clock) -> None:
        self._unit = unit
        self._use = use
        self._grace = grace
        self._host = host
        self._clock = clock
        self._since: float | None = None  # when servers without daemon were first seen
        self._asked: float | None = None  # when they were first told to go
        self._told: signal.Signals | None = None  # the last signal that the log knows of

    def sweep(self) -> Result:
        """One step; to be called again while it is BUSY. Raises OSError."""
        for stray in self._host.daemons(self._unit.pipe):
            _log.warning("ending a stray daemon", card=self._unit.name, pid=stray.pid)
            stray.signal(signal.SIGKILL)
        orphans = self._host.servers(self._unit.pipe)
        if not orphans:
            self._since = self._asked = self._told = None
            return OK
        now = self._clock.now()
        self._since = since = self._since or now
        if now - since < self._grace:
            clients = {pid for _, pid in self._unit.users(self._use)} - {orphan.pid for orphan in orphans}
            if clients:
                why = f"a server without daemon still has {len(clients)} clients; they have some time to end"
                return Result(Outcome.BUSY, why)
        self._asked = asked = self._asked or now
        late = now - asked
        number = signal.SIGKILL if late > _KILL_SECONDS else signal.SIGTERM
        for orphan in orphans:
            if number is not self._told:
                _log.warning("ending a server without daemon", card=self._unit.name, pid=orphan.pid, by=number.name)
            orphan.signal(number)
        self._told = number
        if late > 2 * _KILL_SECONDS:
            pids = ", ".join(str(orphan.pid) for orphan in orphans)
            return Result(Outcome.BUSY, f"server {pids} does not even end when killed: it hangs in the driver")
        return Result(Outcome.BUSY, "servers of a dead daemon are being ended")
