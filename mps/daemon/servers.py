"""The MPS servers of one daemon: whether they run, and in which state they are.

Driver 535 does not report a server's state, so there it is asked twice. A daemon may go on answering for a server that
does not run any more, so the kernel is asked too.
"""

import math
from collections.abc import Sequence

from cardwise.clock import Clock
from mps.daemon.machine import OK, Outcome, Result
from mps.host.control import Control, ServerStatus, UnknownCommand
from mps.host.processes import Host, Pulse

_ASK_SECONDS = 2.0  # between two requests for a server
_STOPPED = "Tt"  # by a signal, by a debugger
_WAITS = "D"  # in the kernel, where no signal reaches it; for moments every server is there
_STUCK_SECONDS = 10.0  # in which it has not moved there


class Servers:
    """For one thread. `tells_status`: whether the driver should know `get_server_status`."""

    def __init__(self, control: Control, host: Host, clock: Clock, *, tells_status: bool) -> None:
        self._control = control
        self._host = host
        self._clock = clock
        self._tells_status = tells_status
        self._asked = -math.inf
        self._listed = ""  # those that were there at the last look, of a driver that tells no status
        self._waiting: dict[int, tuple[Pulse, float]] = {}  # since when each is at the same place in the kernel

    def forget(self) -> None:
        """A new daemon has none."""
        self._asked = -math.inf
        self._waiting.clear()

    def warm(self) -> Result:
        """Asks for one where there is none. Raises ControlError."""
        servers = self._control.servers()
        if servers:
            return self._judge(servers)
        now = self._clock.now()
        if now - self._asked >= _ASK_SECONDS:
            self._asked = now
            self._control.start_server()
        return Result(Outcome.BUSY, "its server is not there yet")

    def look(self) -> Result:
        """How they are. Raises ControlError."""
        servers = self._control.servers()
        return self._judge(servers) if servers else Result(Outcome.BUSY, "its server has ended")

    def _judge(self, servers: Sequence[int]) -> Result:
        listed = " ".join(map(str, servers))
        if still := self._still(servers, self._clock.now()):
            return Result(Outcome.FROZEN, still)
        if self._tells_status:
            try:
                said = {self._control.status(server) for server in servers}
            except UnknownCommand:
                self._tells_status = False
            else:
                if ServerStatus.FAULT in said:
                    return Result(Outcome.FAULT, f"server {listed}: a client's fault reached the card")
                if said == {ServerStatus.ACTIVE}:
                    return OK
                return Result(Outcome.BUSY, f"server {listed} is starting")
        # A server that fails is gone at once; one that is still there at a second look is up.
        before, self._listed = self._listed, listed
        return OK if before == listed else Result(Outcome.BUSY, f"server {listed} is starting")

    def _still(self, servers: Sequence[int], now: float) -> str:
        """Which one does not run, "" if all do."""
        before, self._waiting = self._waiting, {}
        for server in servers:
            pulse = self._host.pulse(server)
            if pulse is None:
                continue  # the daemon will say so
            if pulse.state in _STOPPED:
                return f"server {server} is stopped: it takes no client"
            if pulse.state in _WAITS:
                last, since = before.get(server, (None, now))
                self._waiting[server] = (pulse, since if last == pulse else now)
                if now - self._waiting[server][1] >= _STUCK_SECONDS:
                    return f"server {server} hangs in the driver"
        return ""
