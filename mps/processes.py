"""The processes of MPS on this machine: found by their pipe folder, told apart from later ones with the same PID.

Apart because a daemon may be our child or one that a former manager left; both are handled alike, by PID and start
time, so nothing is ever signalled that only has an old number.
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cardwise.core import mps
from mps import cgroups
from mps.cgroups import PROC

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
FOREGROUND = "-f"
_ARGUMENTS = 3  # in which a program's name is, also where an interpreter runs it
_AFTER_NAME = 2  # fields of /proc/<pid>/stat before the one after the name


@dataclass(frozen=True, slots=True)
class Process:
    """One process, and no later one of that number. `started` is in clock ticks since boot."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        return _started(self.pid) == self.started

    def signal(self, number: signal.Signals) -> None:
        """Nothing when it has ended. Raises OSError when it may not be."""
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


@dataclass(frozen=True, slots=True)
class Pulse:
    """Of a process at a moment: the letter of its state, and how often it has let others run."""

    state: str
    switches: int


def identify(pid: int) -> Process | None:
    """None when no such process runs."""
    started = _started(pid)
    return None if started is None else Process(pid, started)


def pulse(pid: int) -> Pulse | None:
    """None when it has ended."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    # The name comes first and has no line break of its own: the kernel escapes it.
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    switches = (int(value) for name, value in fields.items() if name.endswith("_ctxt_switches"))
    return Pulse(fields["State"].strip()[0], sum(switches))


def daemons(pipe: Path) -> list[Process]:
    """Control daemons of this pipe folder that run in the foreground, as ours do."""
    return [process for process, arguments in _of(pipe, CONTROL) if FOREGROUND in arguments]


def servers(pipe: Path) -> list[Process]:
    """Servers that daemons of this pipe folder have started, whether the daemon still lives or not."""
    return [process for process, _ in _of(pipe, SERVER)]


def is_server(pid: int) -> bool:
    """Whether it is an MPS server by its name, which any process may give itself."""
    return _is(PROC / str(pid), SERVER)


def name(pid: int) -> str:
    """For people; "" when it has ended."""
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def environment(process: Process) -> Mapping[str, str]:
    """That the process was started with; empty when it has ended."""
    return _environment(process.pid)


def _of(pipe: Path, program: str) -> list[tuple[Process, list[str]]]:
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        if not _is(entry, program):
            continue
        pid = int(entry.name)
        process = identify(pid)
        if process is None or _environment(pid).get(mps.PIPE_ENV) != str(pipe):
            continue
        if not cgroups.is_tenants(pid):  # he would have it ended, or be taken for a daemon
            found.append((process, _arguments(entry)))
    return found


def _is(entry: Path, program: str) -> bool:
    return any(Path(argument).name == program for argument in _arguments(entry)[:_ARGUMENTS])


def _arguments(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _environment(pid: int) -> dict[str, str]:
    try:
        content = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def _started(pid: int) -> int | None:
    try:
        content = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in brackets and may hold anything, brackets too.
    fields = content[content.rindex(")") + _AFTER_NAME :].split()
    return None if fields[0] in "ZX" else int(fields[19])
