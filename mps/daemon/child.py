"""The process of a control daemon: a child of this manager, or a process that a former manager started.

A daemon outlives its manager. The next manager is not the daemon's parent, but must notice the daemon's end.
"""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from cardwise.clock import Clock
from cardwise.core.api import mps
from mps.daemon.units import DaemonUnit
from mps.host import cgroups, processes
from mps.host.processes import Host, HostProcess

_KILL_SECONDS = 3.0
_POLL_SECONDS = 0.02
_CGROUP_NAME = "cardwise-mps"


class DaemonProcess:
    """The process of a daemon, at most one at a time. Only `is_running` and `pid` are thread-safe.

    cgroup: the mounted cgroup root below which the daemon runs; None: in the manager's cgroup.
    """

    def __init__(
        self,
        unit: DaemonUnit,
        program: Path,
        environment: Mapping[str, str],
        *,
        cgroup: Path | None,
        host: Host,
        clock: Clock,
    ) -> None:
        self._unit = unit
        self._program = program
        self._environment = environment
        self._cgroup = cgroup
        self._host = host
        self._clock = clock
        self._last_child: processes.Child | None = None  # the last child
        self._process: HostProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether a daemon runs, as last observed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The PID of the daemon; 0 if there is none."""
        process = self._process
        return process.pid if process is not None else 0

    @property
    def return_code(self) -> int | None:
        """The return code of the last daemon; None while the process runs, and for a process that another manager has
        started.
        """
        return self._last_child.code if self._last_child is not None else None

    def take_over(self) -> bool:
        """Take over a former manager's daemon that accepts commands; returns whether there is one."""
        daemons = self._host.daemons(self._unit.pipe)
        if daemons and (self._unit.pipe / mps.CONTROL_SOCKET).exists():
            self._process = daemons[0]
        return self.is_running

    def has_same_cards(self) -> bool:
        """Whether the daemon was started for the same cards in the same order."""
        process_environment = self._host.environment(self._process.pid) if self._process is not None else {}
        environment = self._environment
        return all(
            process_environment.get(name) == environment.get(name)
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
        )

    def start(self, options: Sequence[str], output_descriptor: int) -> bool:
        """Start the daemon; returns False if it ended at once. Raises OSError."""
        command = [str(self._program), processes.FOREGROUND_OPTION, *options]
        self._last_child = self._host.start(command, self._environment, output_descriptor)
        if not self._last_child.is_alive():
            return False
        self._process = self._last_child
        if self._cgroup is not None:
            cgroups.move_process(self._process.pid, self._cgroup, _CGROUP_NAME)
        return True

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def forget_process(self) -> None:
        """Forget the process after its end."""
        self._process = None

    def wait_ended(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the daemon has ended, and then forget it. Returns whether it has ended."""
        deadline = self._clock.now() + timeout
        while self.is_alive():
            if self._clock.now() >= deadline:
                return False
            self._clock.sleep(_POLL_SECONDS)
        self.forget_process()
        return True

    def kill(self) -> bool:
        """Kill the daemon; returns whether it has ended. Raises OSError."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
        return self.wait_ended(_KILL_SECONDS)

    def abandon(self) -> None:
        """Stop waiting for the process, which keeps running without this manager."""
        if self._last_child is not None:
            self._last_child.abandon()
