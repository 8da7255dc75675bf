"""What nvidia-cuda-mps-control does, traps and all: held against the double, and against the real one where it is.

The real one is there after `make test-mps-real` or with $CARDWISE_MPS_ROOT (tests/mps/fetch.py); its server is the
double's, since no machine of ours has a card. Which test has which trap of mps.md 1.2 to 1.6, also of those that need
a card, is a table in docs/design/0005-mps.md (test_traps.py sees to it that the tests exist).
"""

import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from cardwise.core import mps
from cardwise.gpus import mpsnode
from mps import processes
from mps.control import Control, Program
from tests.mps import fetch
from tests.mps.worlds import DOUBLE, eventually

SECONDS = 20.0
DRIVERS = (535, 550, 580, 595)
KINDS = [f"double-{driver}" for driver in DRIVERS] + [f"real-{name}" for name in fetch.programs()]
GIVEN = {"bookworm": 535, "trixie": 550}


@dataclass
class World:
    """One kind of program, and the folders of one daemon."""

    folder: Path
    program: Path
    driver: int
    real: bool
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{DOUBLE.parent}{os.pathsep}{os.environ['PATH']}",
            "CARDWISE_DOUBLE_DRIVER": str(self.driver),
            mps.PIPE_ENV: str(self.pipe),
            mps.LOG_ENV: str(self.folder / "log"),
        }

    @property
    def pipe(self) -> Path:
        return self.folder / "pipe"

    @property
    def front(self) -> Program:
        return Program(self.program, self.environment)

    @property
    def control(self) -> Control:
        return Control(self.front, SECONDS)

    def run(self, *options: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """The program as a shell runs it."""
        return subprocess.run(
            [self.program, *options],
            input=text,
            capture_output=True,
            timeout=SECONDS,
            env=self.environment,
            check=False,
        )

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        lazy = ["-lazy-init"] if self.real and self.driver >= 580 else []
        with (self.folder / "log" / "daemon.log").open("ab") as log:
            daemon = subprocess.Popen(
                [self.program, "-f", *lazy, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self.started.append(daemon)
        eventually(lambda: daemon.poll() is not None or mpsnode.answers(self.pipe))
        return daemon

    def close(self) -> None:
        for daemon in self.started:
            daemon.kill()
            daemon.wait()
        for process in [*processes.daemons(self.pipe), *processes.servers(self.pipe)]:
            process.signal(signal.SIGKILL)
