"""The processes of this machine that matter to MPS: control daemons, servers, and programs on the cards.

`Host` is the seam to them; `LocalHost` is this machine. A daemon may be our child or one that a former manager started.
Both are identified by PID and start time, so that no signal reaches another process with a reused PID.
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
from mps.host.control import ControlProgram, FrontEnd

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
FOREGROUND = "-f"
_PROGRAM_ARGUMENTS = 3  # that may name the program, also if an interpreter runs it
# Of a command line or environment. Tenants can start many processes with megabytes of either, and all are read at each
# check; daemons and servers have some hundred bytes.
_MAX_BYTES = 65_536
_REAP_SECONDS = 3.0
_ENDED_STATES = "ZX"
_STATE_OFFSET = 2  # fields of /proc/<pid>/stat before the one after the name


class HostProcess(Protocol):
    """One process, and no later one with the same PID."""

    @property
    def pid(self) -> int: ...

    def is_alive(self) -> bool:
        """Whether the process runs; a zombie does not."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended. Raises OSError if it is not permitted."""


class Child(HostProcess, Protocol):
    """A process that this one has started."""

    @property
    def code(self) -> int | None:
        """The return code, None until its end was observed."""

    def abandon(self) -> None:
        """Stop waiting for the process: it keeps running."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """The activity of a process: the letter of its state, and its number of context switches."""

    state: str
    switches: int


class Host(Protocol):
    """A machine on which daemons run. Thread-safe. Processes that have ended are not returned."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> Child:
        """Start a command in its own session, with output to this descriptor. Raises OSError."""

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        """A front end to the daemon of the environment's pipe folder."""

    def daemons(self, pipe: Path) -> list[HostProcess]:
        """Control daemons of this pipe folder that run in the foreground, as ours do."""

    def servers(self, pipe: Path) -> list[HostProcess]:
        """Servers that daemons of this pipe folder have started, whether the daemon still lives or not."""

    def environment(self, pid: int) -> Mapping[str, str]:
        """The environment that the process was started with."""

    def activity(self, pid: int) -> ProcessActivity | None:
        """The activity of a process, None if it has ended."""

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        """The pods and containers of a process, the outermost first."""

    def name(self, pid: int) -> str:
        """The name of a process, for people; "" if there is no such process."""

    def is_server(self, pid: int) -> bool:
        """Whether it is an MPS server by its name, which any process can choose."""


class LocalHost:
    """The `Host` that is this machine, by /proc."""

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
        return _StartedChild(popen)

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        return ControlProgram(program, environment)

    def daemons(self, pipe: Path) -> list[HostProcess]:
        return [process for process, arguments in _find_processes(pipe, CONTROL) if FOREGROUND in arguments]

    def servers(self, pipe: Path) -> list[HostProcess]:
        return [process for process, _ in _find_processes(pipe, SERVER)]

    def environment(self, pid: int) -> Mapping[str, str]:
        return _read_environment(pid)

    def activity(self, pid: int) -> ProcessActivity | None:
        try:
            lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        except OSError:
            return None
        # The name comes first and has no line break of its own: the kernel escapes it.
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = (int(text) for name, text in fields.items() if name.endswith("_ctxt_switches"))
        state = fields["State"].strip()[0]
        return None if state in _ENDED_STATES else ProcessActivity(state, sum(switches))

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        return cgroups.read_memberships(pid)

    def name(self, pid: int) -> str:
        try:
            name = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return ""
        # A process names itself, and admins read it on their terminals.
        return "".join(character if character.isprintable() else "?" for character in name)

    def is_server(self, pid: int) -> bool:
        return _is_program(PROC / str(pid), SERVER)


LOCAL = LocalHost()


@dataclass(frozen=True, slots=True)
class _FoundProcess:
    """A process by PID and start time, in clock ticks since boot."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.start_time

    def signal(self, number: signal.Signals) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Checked after opening: now the descriptor is certainly that of this process.
            if self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


class _StartedChild:
    """A child by its handle: no other process gets its PID before we have reaped it."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int | None:
        return self._popen.returncode

    def is_alive(self) -> bool:
        if self._popen.poll() is not None:
            return False
        if _start_time(self.pid) is not None:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_SECONDS)  # returns at once, since it has ended: `poll` was a moment too early
        return False

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def abandon(self) -> None:
        if self._popen.poll() is None:
            self._popen.returncode = 0


def _find_processes(pipe: Path, program: str) -> list[tuple[HostProcess, list[str]]]:
    processes: list[tuple[HostProcess, list[str]]] = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        if not _is_program(entry, program):
            continue
        pid = int(entry.name)
        start_time = _start_time(pid)
        if start_time is None or _read_environment(pid).get(mps.PIPE_ENV) != str(pipe):
            continue
        if not cgroups.is_tenant_process(pid):  # a tenant's process must neither be ended nor count as a daemon
            processes.append((_FoundProcess(pid, start_time), _read_arguments(entry)))
    return processes


def _is_program(entry: Path, program: str) -> bool:
    return any(Path(argument).name == program for argument in _read_arguments(entry)[:_PROGRAM_ARGUMENTS])


def _read_arguments(entry: Path) -> list[str]:
    """The arguments within the bytes that are read."""
    return _read_entries(entry / "cmdline")


def _read_environment(pid: int) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in _read_entries(PROC / str(pid) / "environ") if "=" in entry)


def _read_entries(file: Path) -> list[str]:
    """The entries of a file of /proc that are separated by NUL; empty if the process has ended."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES)
    except OSError:
        return []
    return content.decode(errors="replace").split("\0")[:-1]


def _start_time(pid: int) -> int | None:
    try:
        content = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in brackets and may hold anything, brackets too.
    fields = content[content.rindex(")") + _STATE_OFFSET :].split()
    return None if fields[0] in _ENDED_STATES else int(fields[19])
