"""The process of a control daemon: our child, or one that an earlier manager started.

It outlives its manager: nobody waits for it at the end, and the next manager, whose child it is not, has to notice its
death all the same.
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
_LOOK_SECONDS = 0.02
_CGROUP = "cardwise-mps"


class DaemonProcess:
    """The process of a daemon, at most one at a time. For one thread; `running` and `pid` are for any.

    `cgroup`: the mounted cgroup root below which it lives on its own, None: in ours.
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
        self._started: processes.Child | None = None  # the last one of ours
        self._process: HostProcess | None = None

    @property
    def running(self) -> bool:
        """Whether there is one, as far as we have noticed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """0 when there is none."""
        process = self._process
        return process.pid if process is not None else 0

    @property
    def code(self) -> int | None:
        """The last one's return code, None also where it was no child of ours."""
        return self._started.code if self._started is not None else None

    def take_over(self) -> bool:
        """Whether a former manager has left one that can be asked; whether it is one for our cards is `fits`."""
        found = self._host.daemons(self._unit.pipe)
        if found and (self._unit.pipe / mps.CONTROL).exists():
            self._process = found[0]
        return self.running

    def fits(self) -> bool:
        """Whether it was started to see the same cards in the same order."""
        theirs = self._host.environment(self._process.pid) if self._process is not None else {}
        mine = self._environment
        return all(theirs.get(name) == mine.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))

    def start(self, options: Sequence[str], output: int) -> bool:
        """False when it ended at once. Raises OSError."""
        command = [str(self._program), processes.FOREGROUND, *options]
        self._started = self._host.start(command, self._environment, output)
        if not self._started.alive():
            return False
        self._process = self._started
        if self._cgroup is not None:
            cgroups.move(self._process.pid, self._cgroup, _CGROUP)
        return True

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def forget(self) -> None:
        """After its end."""
        self._process = None

    def gone(self, seconds: float) -> bool:
        """Whether it ends by itself in this time; then it is forgotten."""
        deadline = self._clock.now() + seconds
        while self.alive():
            if self._clock.now() >= deadline:
                return False
            self._clock.sleep(_LOOK_SECONDS)
        self.forget()
        return True

    def kill(self) -> bool:
        """Whether it is gone then. Raises OSError."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
        return self.gone(_KILL_SECONDS)

    def leave(self) -> None:
        """It goes on without us, and nobody is to wait for it."""
        if self._started is not None:
            self._started.leave()
