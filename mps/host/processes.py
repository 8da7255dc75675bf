"""The processes of this machine that matter to MPS: control daemons, servers, and programs on the cards.

`Host` is the seam to them; `LocalHost` is the machine's own. A daemon may be our child or one that a former manager
left. Both are handled alike, by PID and start time, so nothing is ever signalled that only has an old number.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cardwise.core.api import mps
from mps.host import cgroups
from mps.host.cgroups import PROC, CgroupMembership
from mps.host.control import FrontEnd, Program

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
FOREGROUND = "-f"
_ARGUMENTS = 3  # in which a program's name is, also where an interpreter runs it
# Of a command line, or an environment. Tenants start processes with megabytes of either, as many as they like, and all
# of them are read at each look; daemons and servers have some hundred bytes.
_MOST_BYTES = 65_536
_REAP_SECONDS = 3.0
_ENDED = "ZX"
_AFTER_NAME = 2  # fields of /proc/<pid>/stat before the one after the name


class HostProcess(Protocol):
    """One process, and no later one of that number."""

    @property
    def pid(self) -> int: ...

    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""

    def signal(self, number: signal.Signals) -> None:
        """Nothing when it has ended. Raises OSError when it may not be."""


class Child(HostProcess, Protocol):
    """One that we have started."""

    @property
    def code(self) -> int | None:
        """Its return code, None before its end was seen."""

    def leave(self) -> None:
        """It goes on without us, and nobody is to wait for it."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A process at a moment: the letter of its state, and how often it has let others run."""

    state: str
    switches: int


class Host(Protocol):
    """A machine on which daemons run. From any thread; what has ended is nowhere."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> Child:
        """In a session of its own; what it says goes to this descriptor. Raises OSError."""

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        """A front end to the daemon of the environment's pipe folder."""

    def daemons(self, pipe: Path) -> list[HostProcess]:
        """Control daemons of this pipe folder that run in the foreground, as ours do."""

    def servers(self, pipe: Path) -> list[HostProcess]:
        """Servers that daemons of this pipe folder have started, whether the daemon still lives or not."""

    def environment(self, pid: int) -> Mapping[str, str]:
        """That the process was started with."""

    def pulse(self, pid: int) -> Pulse | None:
        """None when it has ended."""

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        """The pods and containers that it is in, the outermost first."""

    def name(self, pid: int) -> str:
        """For people; "" where there is no such process."""

    def is_server(self, pid: int) -> bool:
        """Whether it is an MPS server by its name, which any process may give itself."""


class LocalHost:
    """`Host` of the processes that we see."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> Child:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        return _Started(popen)

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        return Program(program, environment)

    def daemons(self, pipe: Path) -> list[HostProcess]:
        return [process for process, arguments in _of(pipe, CONTROL) if FOREGROUND in arguments]

    def servers(self, pipe: Path) -> list[HostProcess]:
        return [process for process, _ in _of(pipe, SERVER)]

    def environment(self, pid: int) -> Mapping[str, str]:
        return _environment(pid)

    def pulse(self, pid: int) -> Pulse | None:
        try:
            lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        except OSError:
            return None
        # The name comes first and has no line break of its own: the kernel escapes it.
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = (int(value) for name, value in fields.items() if name.endswith("_ctxt_switches"))
        state = fields["State"].strip()[0]
        return None if state in _ENDED else Pulse(state, sum(switches))

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        return cgroups.of(pid)

    def name(self, pid: int) -> str:
        try:
            said = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return ""
        # A process names itself, and admins read it on their terminals.
        return "".join(one if one.isprintable() else "?" for one in said)

    def is_server(self, pid: int) -> bool:
        return _is(PROC / str(pid), SERVER)


LOCAL = LocalHost()


@dataclass(frozen=True, slots=True)
class _Found:
    """A process by PID and start time, in clock ticks since boot."""

    pid: int
    started: int

    def alive(self) -> bool:
        return _started(self.pid) == self.started

    def signal(self, number: signal.Signals) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Only now is it certain that the descriptor is of the process that we mean.
            if self.alive():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


class _Started:
    """A child by its handle: no other process gets its PID before we have reaped it."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int | None:
        return self._popen.returncode

    def alive(self) -> bool:
        if self._popen.poll() is not None:
            return False
        if _started(self.pid) is not None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_SECONDS)  # at once, since it has ended: `poll` came a moment too early
        return False

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def leave(self) -> None:
        if self._popen.poll() is None:
            self._popen.returncode = 0


def _of(pipe: Path, program: str) -> list[tuple[HostProcess, list[str]]]:
    found: list[tuple[HostProcess, list[str]]] = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        if not _is(entry, program):
            continue
        pid = int(entry.name)
        started = _started(pid)
        if started is None or _environment(pid).get(mps.PIPE_ENV) != str(pipe):
            continue
        if not cgroups.is_tenants(pid):  # he would have it ended, or be taken for a daemon
            found.append((_Found(pid, started), _arguments(entry)))
    return found


def _is(entry: Path, program: str) -> bool:
    return any(Path(argument).name == program for argument in _arguments(entry)[:_ARGUMENTS])


def _arguments(entry: Path) -> list[str]:
    """Those that end within the bytes that are read."""
    return _entries(entry / "cmdline")


def _environment(pid: int) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in _entries(PROC / str(pid) / "environ") if "=" in entry)


def _entries(file: Path) -> list[str]:
    """The texts that a process was started with; empty where it has ended."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES)
    except OSError:
        return []
    return content.decode(errors="replace").split("\0")[:-1]


def _started(pid: int) -> int | None:
    try:
        content = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in brackets and may hold anything, brackets too.
    fields = content[content.rindex(")") + _AFTER_NAME :].split()
    return None if fields[0] in _ENDED else int(fields[19])
