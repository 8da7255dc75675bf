"""The processes of this node that matter to MPS: control daemons, servers, and programs on the cards.

`Host` is the interface, and tests have another implementation; `LocalHost` is this node. A daemon may be a child of
this manager or of a former one. Both are identified by PID and start time. So a signal never reaches another process
with a reused PID.
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

CONTROL_PROGRAM = "nvidia-cuda-mps-control"
SERVER_PROGRAM = "nvidia-cuda-mps-server"
FOREGROUND_OPTION = "-f"
_DAEMON_OPTIONS = {FOREGROUND_OPTION, "-d"}  # without these the program is a front end
_DEFAULT_PIPE = "/tmp/nvidia-mps"  # noqa: S108 - where NVIDIA's daemon listens by default
_PROGRAM_ARGUMENTS = 3  # the first arguments that are read: they name the program even if an interpreter runs it
# The maximum number of bytes that are read of a command line or environment. Each check reads both for every process,
# and tenants can start many processes with megabytes of them; those of daemons and servers have some hundred bytes.
_MAX_BYTES = 65_536
_REAP_SECONDS = 3.0
_ENDED_STATES = "ZX"
_STATE_OFFSET = 2  # in /proc/<pid>/stat: the state is two characters after the name


class HostProcess(Protocol):
    """One process. Its methods never affect a later process with the same PID."""

    @property
    def pid(self) -> int: ...

    def is_alive(self) -> bool:
        """Whether the process runs; a zombie does not."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended. Raises OSError if it is not permitted."""


class Child(HostProcess, Protocol):
    """A process that this process has started."""

    @property
    def code(self) -> int | None:
        """The return code; None until the end of the process was observed."""

    def abandon(self) -> None:
        """Stop waiting for the process: it keeps running."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """The activity of a process: the state letter in /proc, and the number of context switches."""

    state: str
    switches: int


@dataclass(frozen=True, slots=True)
class ControlDaemon:
    """A control daemon that the manager has not started."""

    pid: int
    environment: Mapping[str, str]

    @property
    def pipe(self) -> str:
        return self.environment.get(mps.PIPE_ENV) or _DEFAULT_PIPE


class Host(Protocol):
    """A node that runs daemons. Thread-safe. Processes that have ended are not returned."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], output_descriptor: int) -> Child:
        """Start a command in its own session. Raises OSError.

        output_descriptor: the file descriptor for stdout and stderr.
        """

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        """A front end to the daemon whose pipe folder the environment names."""

    def daemons(self, pipe: Path) -> list[HostProcess]:
        """The control daemons of this pipe folder that run in the foreground, as daemons of the manager do."""

    def servers(self, pipe: Path) -> list[HostProcess]:
        """The servers that a daemon of this pipe folder has started, even if the daemon has ended."""

    def other_daemons(self, root: Path) -> list[ControlDaemon]:
        """The control daemons with a pipe folder outside `root`. Processes of tenants' pods are left out."""

    def environment(self, pid: int) -> Mapping[str, str]:
        """The environment with which the process was started."""

    def activity(self, pid: int) -> ProcessActivity | None:
        """The activity of a process; None if it has ended."""

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        """The pods and containers of a process, the outermost first."""

    def running_containers(self) -> set[str]:
        """The IDs of all containers that have a process."""

    def name(self, pid: int) -> str | None:
        """The printable name of a process; None if the process does not exist."""

    def is_server(self, pid: int) -> bool:
        """Whether the process has the name of an MPS server. Any process can choose this name."""


class LocalHost:
    """The node of this process, read from /proc."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], output_descriptor: int) -> Child:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_descriptor,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        return _StartedChild(popen)

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        return ControlProgram(program, environment)

    def daemons(self, pipe: Path) -> list[HostProcess]:
        return [
            process
            for process, arguments, environment in _find_processes(CONTROL_PROGRAM)
            if FOREGROUND_OPTION in arguments and environment.get(mps.PIPE_ENV) == str(pipe)
        ]

    def servers(self, pipe: Path) -> list[HostProcess]:
        return [
            process
            for process, _, environment in _find_processes(SERVER_PROGRAM)
            if environment.get(mps.PIPE_ENV) == str(pipe)
        ]

    def other_daemons(self, root: Path) -> list[ControlDaemon]:
        daemons = [
            ControlDaemon(process.pid, environment)
            for process, arguments, environment in _find_processes(CONTROL_PROGRAM)
            if _DAEMON_OPTIONS & set(arguments)
        ]
        return [daemon for daemon in daemons if not Path(daemon.pipe).is_relative_to(root)]

    def environment(self, pid: int) -> Mapping[str, str]:
        return _read_environment(pid)

    def activity(self, pid: int) -> ProcessActivity | None:
        try:
            lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
        except OSError:
            return None
        # The name is in the first line. A process cannot add lines by its name, since the kernel escapes line breaks.
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = (int(text) for name, text in fields.items() if name.endswith("_ctxt_switches"))
        state = fields["State"].strip()[0]
        return None if state in _ENDED_STATES else ProcessActivity(state, sum(switches))

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        return cgroups.read_memberships(pid)

    def running_containers(self) -> set[str]:
        pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
        return {membership.container for pid in pids for membership in cgroups.read_memberships(pid)} - {""}

    def name(self, pid: int) -> str | None:
        try:
            name = (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return None
        # A process chooses its own name, and administrators read it on their terminals.
        return "".join(character if character.isprintable() else "?" for character in name)

    def is_server(self, pid: int) -> bool:
        return _is_program(_read_arguments(PROC / str(pid)), SERVER_PROGRAM)


LOCAL = LocalHost()


@dataclass(frozen=True, slots=True)
class _FoundProcess:
    """A process that another process has started, identified by its PID and its start time (clock ticks since boot)."""

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
            # Checked after opening, so that the descriptor certainly belongs to this process.
            if self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


class _StartedChild:
    """A child of this process. No other process gets its PID before the child is reaped."""

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
            self._popen.wait(_REAP_SECONDS)  # returns at once: the process has ended since `poll`
        return False

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def abandon(self) -> None:
        if self._popen.poll() is None:
            self._popen.returncode = 0


def _find_processes(program: str) -> list[tuple[HostProcess, list[str], Mapping[str, str]]]:
    """Find the processes of a program, with their arguments and environments. Leaves out processes of tenants' pods."""
    processes: list[tuple[HostProcess, list[str], Mapping[str, str]]] = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        if not _is_program(_read_arguments(entry), program):
            continue
        pid = int(entry.name)
        start_time = _start_time(pid)
        # A tenant's process must not be ended, and does not count as a daemon.
        if start_time is not None and not cgroups.is_tenant_process(pid):
            environment = _read_environment(pid)
            # Read after the environment: of a process that has ended meanwhile both are empty, and an empty environment
            # is also that of a daemon which serves all GPUs.
            arguments = _read_arguments(entry)
            if _is_program(arguments, program):
                processes.append((_FoundProcess(pid, start_time), arguments, environment))
    return processes


def _is_program(arguments: Sequence[str], program: str) -> bool:
    return any(Path(argument).name == program for argument in arguments[:_PROGRAM_ARGUMENTS])


def _read_arguments(entry: Path) -> list[str]:
    """The arguments within the first `_MAX_BYTES` of the command line."""
    return _read_entries(entry / "cmdline")


def _read_environment(pid: int) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in _read_entries(PROC / str(pid) / "environ") if "=" in entry)


def _read_entries(file: Path) -> list[str]:
    """Read the NUL-separated entries of a file in /proc; [] if the process has ended."""
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
    # The name is in brackets, and may contain any character, also brackets.
    fields = content[content.rindex(")") + _STATE_OFFSET :].split()
    return None if fields[0] in _ENDED_STATES else int(fields[19])
