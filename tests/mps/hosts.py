"""A machine in memory for the MPS manager: no process is started, and time passes on a FakeClock only.

Its daemons are the double's (double/daemon.py), with the files and sockets that others look for in the pipe folder.
"""

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cardwise.clock import Clock
from cardwise.core.api import mps
from mps.host.cgroups import CgroupMembership
from mps.host.control import DaemonTimeout, FrontEnd, NoDaemon, check_answer
from mps.host.processes import CONTROL_PROGRAM, SERVER_PROGRAM, ControlDaemon, HostProcess, ProcessActivity
from tests.mps.double.daemon import Daemon, Ended


@dataclass(eq=False)
class FakeProcess:
    """As a child of ours, and as the daemon's server (`poll`, `terminate`, `kill`, `wait`)."""

    pid: int
    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    pods: tuple[CgroupMembership, ...] = ()
    state: str = "S"
    code: int | None = None
    deaf: frozenset[signal.Signals] = frozenset()  # what it does not end by
    listener: socket.socket | None = None
    daemon: Daemon | None = None

    def is_alive(self) -> bool:
        return self.code is None

    def signal(self, number: signal.Signals) -> None:
        if not self.is_alive() or number in self.deaf:
            return
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.state = "T" if number is signal.SIGSTOP else "S"
        else:
            self.end(-number)

    def end(self, code: int) -> None:
        self.code = code
        if self.listener is not None:
            self.listener.close()
        if self.daemon is not None:
            self.daemon.host.close()

    def abandon(self) -> None:
        pass

    def poll(self) -> int | None:
        return self.code

    @property
    def returncode(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self) -> None:
        assert not self.is_alive()


class FakeHost:
    """`mps.host.processes.Host`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.processes: dict[int, FakeProcess] = {}
        self._pids = itertools.count(4000)

    def add(self, name: str, environment: Mapping[str, str] | None = None, *pods: CgroupMembership) -> FakeProcess:
        process = FakeProcess(next(self._pids), name, environment or {}, pods)
        self.processes[process.pid] = process
        return process

    def start(self, command: Sequence[str], environment: Mapping[str, str], output_descriptor: int) -> FakeProcess:
        driver = int(environment.get("CARDWISE_DOUBLE_DRIVER", "550"))
        pipe = _pipe(environment)
        another = self.daemons(pipe)
        child = self.add(CONTROL_PROGRAM, environment)
        if driver >= 580 and environment.get("CARDWISE_DOUBLE_REFUSES") in command:
            child.end(0)  # it has printed its help
        elif another:
            child.end(1)
        else:
            self._open(child, pipe)
            percentage = environment.get(mps.PERCENT_ENV, "100")
            child.daemon = Daemon(
                driver, environment[mps.LOG_ENV], _Environs(self, child, output_descriptor), percentage
            )
        return child

    def _open(self, child: FakeProcess, pipe: Path) -> None:
        (pipe / mps.CONTROL_SOCKET).unlink(missing_ok=True)
        child.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child.listener.bind(str(pipe / mps.CONTROL_SOCKET))
        child.listener.listen()

    def front_end(self, program: Path, environment: Mapping[str, str]) -> FrontEnd:
        return _FrontEnd(self, Path(environment[mps.PIPE_ENV]))

    def daemons(self, pipe: Path) -> list[HostProcess]:
        return self._processes_of(pipe, CONTROL_PROGRAM)

    def servers(self, pipe: Path) -> list[HostProcess]:
        return self._processes_of(pipe, SERVER_PROGRAM)

    def _processes_of(self, pipe: Path, name: str) -> list[HostProcess]:
        return [
            process
            for process in self.processes.values()
            if process.is_alive() and process.name == name and not process.pods and _pipe(process.environment) == pipe
        ]

    def other_daemons(self, root: Path) -> list[ControlDaemon]:
        return [
            ControlDaemon(process.pid, process.environment)
            for process in self.processes.values()
            if process.is_alive()
            and process.name == CONTROL_PROGRAM
            and not process.pods
            and not _pipe(process.environment).is_relative_to(root)
        ]

    def environment(self, pid: int) -> Mapping[str, str]:
        return self.processes[pid].environment

    def activity(self, pid: int) -> ProcessActivity | None:
        process = self._living(pid)
        return ProcessActivity(process.state, 0) if process is not None else None

    def memberships(self, pid: int) -> tuple[CgroupMembership, ...]:
        process = self._living(pid)
        return process.pods if process is not None else ()

    def running_containers(self) -> set[str]:
        living = [process for process in self.processes.values() if process.is_alive()]
        return {membership.container for process in living for membership in process.pods}

    def name(self, pid: int) -> str | None:
        process = self._living(pid)
        return process.name if process is not None else None

    def is_server(self, pid: int) -> bool:
        return self.name(pid) == SERVER_PROGRAM

    def _living(self, pid: int) -> FakeProcess | None:
        process = self.processes.get(pid)
        return process if process is not None and process.is_alive() else None


def _pipe(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(mps.PIPE_ENV, ""))


class _Environs:
    """What a daemon has around it."""

    def __init__(self, host: FakeHost, process: FakeProcess, output: int) -> None:
        self._host = host
        self._process = process
        self._output = os.fdopen(os.dup(output), "wb", buffering=0)
        self.now, self.sleep = host.clock.now, host.clock.sleep

    def log(self, text: str) -> None:
        with contextlib.suppress(BlockingIOError):
            self._output.write(f"[Control {self._process.pid}] {text}\n".encode())

    def close(self) -> None:
        self._output.close()

    def is_running(self, pid: int) -> bool:
        return self._host.activity(pid) is not None

    def start_server(self) -> FakeProcess:
        server = self._host.add(SERVER_PROGRAM, self._process.environment)
        folder = Path(self._process.environment[mps.LOG_ENV])
        self.log(f"fake server {server.pid} for devices {self._process.environment.get('CUDA_VISIBLE_DEVICES', 'all')}")
        if (folder / "server-stays").exists():
            server.deaf = frozenset({signal.SIGTERM})
        if (folder / "server-fails").exists():
            server.end(1)
        return server


class _FrontEnd:
    def __init__(self, host: FakeHost, pipe: Path) -> None:
        self._host = host
        self._pipe = pipe

    def send(self, command: str, timeout: float) -> str:
        daemons = self._host.daemons(self._pipe)
        if not daemons:
            raise NoDaemon("Cannot find MPS control daemon process")
        (process,) = daemons
        assert isinstance(process, FakeProcess)
        assert process.daemon is not None
        if process.state == "T":
            self._host.clock.sleep(timeout)
            raise DaemonTimeout(f"no answer to {command!r} within {timeout:g} s")
        try:
            answer = process.daemon.handle_command(command.encode(), 0).strip()
        except Ended as end:
            process.end(end.args[0])
            raise NoDaemon(f"{command!r} ended with rc 1") from end
        check_answer(command, answer)
        return answer
