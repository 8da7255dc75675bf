"""Checks whether the MPS servers of one daemon run, and which status they report.

Driver 535 does not report the status of a server. So with this driver, a server counts as running only if two
consecutive checks list the same servers. A daemon may list a server whose process is stopped or hangs, so the state of
the process in /proc is checked too.
"""

import math
from collections.abc import Sequence

from cardwise.clock import Clock
from mps.daemon.machine import OK_RESULT, ActResult, Outcome
from mps.host.control import Control, ServerStatus, UnknownCommand
from mps.host.processes import Host, ProcessActivity

_START_RETRY_SECONDS = 2.0  # pause between two requests to start a server
_STOPPED_STATES = "Tt"  # the states in /proc of a process that was stopped by a signal, or by a debugger
_UNINTERRUPTIBLE_STATES = (
    "D"  # waits in the kernel, where no signal reaches it; every server is in this state for moments
)
_STUCK_SECONDS = 10.0  # time without progress in the kernel after which a server counts as hanging


class Servers:
    """The servers of one daemon. Not thread-safe.

    has_status_command: whether this driver version has the command `get_server_status`.
    """

    def __init__(self, control: Control, host: Host, clock: Clock, *, has_status_command: bool) -> None:
        self._control = control
        self._host = host
        self._clock = clock
        self._has_status_command = has_status_command
        self._requested_at = -math.inf
        self._last_listed = ""  # PIDs of the servers at the last check, for drivers without the status command
        self._waiting_since: dict[
            int, tuple[ProcessActivity, float]
        ] = {}  # activity of each server that waits in the kernel, and the time of its last change, by PID

    def forget_servers(self) -> None:
        """Forget the servers, since a new daemon has none."""
        self._requested_at = -math.inf
        self._waiting_since.clear()

    def ensure_server(self) -> ActResult:
        """Check the daemon's servers, or start a server if there is none. Raises ControlError."""
        servers = self._control.servers()
        if servers:
            return self._check_health(servers)
        now = self._clock.now()
        if now - self._requested_at >= _START_RETRY_SECONDS:
            self._requested_at = now
            self._control.start_server()
        return ActResult(Outcome.BUSY, "its server has not started yet")

    def check_servers(self) -> ActResult:
        """Check the servers. Raises ControlError."""
        servers = self._control.servers()
        return self._check_health(servers) if servers else ActResult(Outcome.BUSY, "its server has ended")

    def _check_health(self, servers: Sequence[int]) -> ActResult:
        pids_text = " ".join(map(str, servers))
        if frozen_reason := self._frozen_reason(servers, self._clock.now()):
            return ActResult(Outcome.FROZEN, frozen_reason)
        if self._has_status_command:
            try:
                statuses = {self._control.status(server) for server in servers}
            except UnknownCommand:
                self._has_status_command = False
            else:
                if ServerStatus.FAULT in statuses:
                    return ActResult(Outcome.FAULT, f"server {pids_text}: a client's fault reached the GPU")
                if statuses == {ServerStatus.ACTIVE}:
                    return OK_RESULT
                return ActResult(Outcome.BUSY, f"server {pids_text} is starting")
        # A server that fails ends at once, so a server that the next check lists again is up.
        previously_listed, self._last_listed = self._last_listed, pids_text
        return (
            OK_RESULT if previously_listed == pids_text else ActResult(Outcome.BUSY, f"server {pids_text} is starting")
        )

    def _frozen_reason(self, servers: Sequence[int], now: float) -> str | None:
        """Why the process of a server makes no progress; None if all servers make progress."""
        previous, self._waiting_since = self._waiting_since, {}
        for server in servers:
            activity = self._host.activity(server)
            if activity is None:
                continue  # the daemon will report that the server has ended
            if activity.state in _STOPPED_STATES:
                return f"server {server} is stopped: it accepts no clients"
            if activity.state in _UNINTERRUPTIBLE_STATES:
                last_activity, since = previous.get(server, (None, now))
                self._waiting_since[server] = (activity, since if last_activity == activity else now)
                if now - self._waiting_since[server][1] >= _STUCK_SECONDS:
                    return f"server {server} hangs in the driver"
        return None
