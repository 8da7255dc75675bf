"""What nvidia-cuda-mps-control does, traps and all: held against our doubles, and on request against the real one.

The real one is asked for by `make test-mps-real` ($CARDWISE_MPS_REAL; tests/mps/fetch.py). Its server is the double's,
since no machine of ours has a card. What a daemon knows and answers is the same code in both doubles, so it is held
against the one in memory (tests/mps/hosts.py); what needs a process, against the program. Each trap has a test
with its name here, or in tests/realcard where it needs a card.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import mps
from mps.host.control import Control, FrontEnd
from mps.host.processes import LOCAL, Child, Host
from tests.fakes.clock import FakeClock
from tests.mps import fetch
from tests.mps.hosts import FakeHost
from tests.mps.mpsnode import DOUBLE

SECONDS = 60.0
REAL = [f"real-{name}" for name in fetch.programs()] if os.environ.get("CARDWISE_MPS_REAL") else []
KINDS = [*(f"memory-{driver}" for driver in (535, 550, 580, 595)), *REAL]
PROGRAMS = [*(f"program-{driver}" for driver in (550, 580)), *REAL]


def eventually(ask: Callable[[], Any]) -> Any:
    """For what a process of another's making does, and tells nobody of."""
    deadline = time.monotonic() + SECONDS
    while not (answer := ask()):
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)
    return answer


@dataclass
class World:
    """One kind of program, and the folders of one daemon. `daemon` is the one that was started last."""

    folder: Path
    program: Path
    driver: int
    real: bool
    host: Host = LOCAL
    clock: Clock = SYSTEM
    daemon: Child | None = None
    started: list[Child] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{DOUBLE.parent}{os.pathsep}{os.environ['PATH']}",
            "CARDWISE_DOUBLE_DRIVER": str(self.driver),
            mps.PIPE_ENV: str(self.pipe),
            mps.LOG_ENV: str(self.folder / "log"),
            # It serves no card of a manager that another test runs on this machine. NVIDIA's program wants a real one.
            **({} if self.real else {"CUDA_VISIBLE_DEVICES": "GPU-of-no-manager"}),
        }

    @property
    def pipe(self) -> Path:
        return self.folder / mps.PIPE_FOLDER

    @property
    def log(self) -> Path:
        return self.folder / "log" / "daemon.log"

    @property
    def front(self) -> FrontEnd:
        return self.host.front_end(self.program, self.environment)

    @property
    def control(self) -> Control:
        return Control(self.front, SECONDS)

    def run(self, *options: str, text: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
        """The program as a shell runs it."""
        return subprocess.run(
            [self.program, *options],
            input=text,
            capture_output=True,
            timeout=SECONDS,
            env=self.environment | environment,
            check=False,
        )

    def start(self, *options: str) -> "World":
        lazy = ["-lazy-init"] if self.real and self.driver >= 580 else []
        self.pipe.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            command = [str(self.program), "-f", *lazy, *options]
            self.daemon = self.host.start(command, self.environment, log.fileno())
        self.started.append(self.daemon)
        eventually(lambda: not self.daemon.is_alive() or self._listens())
        return self

    def _listens(self) -> bool:
        """What `mpsfiles.is_daemon_listening` asks is true a moment earlier: from `bind` on."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            return client.connect_ex(str(self.pipe / mps.CONTROL_SOCKET)) == 0

    def kill(self) -> None:
        self.daemon.signal(signal.SIGKILL)
        self.ended()

    def ended(self) -> int:
        """Once it has: its return code."""
        if self.host is LOCAL:
            with contextlib.suppress(ProcessLookupError):  # it has been reaped already
                descriptor = os.pidfd_open(self.daemon.pid)
                select.select([descriptor], [], [], SECONDS)
                os.close(descriptor)
        assert not self.daemon.is_alive()
        return self.daemon.code

    def server(self) -> int:
        """Its PID, when it is there."""
        self.control.start_server()
        (server,) = eventually(self.control.servers)
        eventually(lambda: self.host.servers(self.pipe))  # before that it is not known by name
        return server

    def close(self) -> None:
        """Ends the daemons first: a real one starts the next server when one ends, by a fork that has its own name."""
        for daemon in self.started:
            self.daemon = daemon
            self.kill()
        eventually(self._none_left)

    def _none_left(self) -> bool:
        processes = [*self.host.daemons(self.pipe), *self.host.servers(self.pipe)]
        for process in processes:
            process.signal(signal.SIGKILL)
        return not processes


def make(kind: str, folder: Path) -> World:
    flavour, _, name = kind.partition("-")
    (folder / "log").mkdir()
    if flavour == "real":
        program = fetch.programs()[name]
        driver = fetch.driver(program) or int(os.environ.get("CARDWISE_MPS_REAL_DRIVER", "550"))
        return World(folder, program, driver, real=True)
    world = World(folder, DOUBLE, int(name), real=False)
    if flavour == "memory":
        world.clock = FakeClock()
        world.host = FakeHost(world.clock)
    return world
