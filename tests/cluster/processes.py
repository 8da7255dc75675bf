"""Starting, waiting for and ending the cluster's processes, also those of a test run that was killed.

Every process is noted in the state folder with its id and start time, and it and its children carry the state folder
in their environment, so that a later `up` or `down` ends exactly the processes that we started, never a stranger that
got the same id.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Seconds between two looks: at first, and after some seconds. A look takes 2 to 5 ms of CPU, its answer included.
POLL = 0.04, 0.5
# The one deadline of all waits, in seconds. It only decides how late a broken test fails. A machine that has just
# been brought up from a snapshot once took two minutes for the start of etcd.
PATIENCE = 300.0
# What counts at most between two looks, in seconds: where we stood still, so did what we wait for.
_STOOD_STILL = 5.0
MARK = "CARDWISE_TEST_CLUSTER"  # environment variable of every process of a cluster: its state folder


class CommandFailed(RuntimeError):
    """A command that ended with an error; the text has its stderr."""


class NotReady(RuntimeError):
    """Something did not become ready in time; the text has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """One process on record."""

    name: str
    pid: int
    started: int  # clock ticks since boot, from /proc/PID/stat: with the pid it names one process for ever
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Process:
    """A process of the cluster. All methods also work from another Python process (`Cluster.attach`)."""

    # Children of this Python process by id: a dead child stays a zombie until somebody polls it.
    _children: dict[int, subprocess.Popen[bytes]] = {}  # noqa: RUF012 - one table for the whole process, on purpose

    def __init__(self, state: Path, name: str) -> None:
        self._state = state
        self._record = state / "run" / f"{name}.json"
        self.name = name
        self.log = state / "logs" / f"{name}.log"

    @property
    def recorded(self) -> Noted | None:
        try:
            data = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return Noted(**data | {"command": tuple(data["command"])})

    @property
    def pid(self) -> int:
        record = self.recorded
        if record is None:
            raise LookupError(f"{self.name} was never started")
        return record.pid

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it; extra environment variables are added to ours."""
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        extra = dict(environment or {})
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_inherited() | extra | {MARK: str(self._state)},
                start_new_session=True,  # Ctrl-C in a terminal reaches us, and we end them in order
            )
        self._children[child.pid] = child
        record = {
            "name": self.name,
            "pid": child.pid,
            "started": start_time(child.pid) or 0,
            "command": list(command),
            "environment": extra,
        }
        scratch = self._record.with_suffix(".new")
        scratch.write_text(json.dumps(record))
        scratch.rename(self._record)

    def is_alive(self) -> bool:
        """Whether the very process that we started still runs."""
        record = self.recorded
        if record is None:
            return False
        child = self._children.get(record.pid)
        if child is not None:
            child.poll()
        return start_time(record.pid) == record.started

    def kill(self, *, wait: bool = True) -> None:
        """SIGKILL for it and its workers, as when a container is killed; wait until all of them are gone."""
        self._signal_group(signal.SIGKILL)
        record = self.recorded
        if not wait or record is None:
            return
        # Its workers, too: one that waits for a CPU takes the signal only when it has one, after its leader is gone.
        if not self._has_ended(PATIENCE) or not wait_for(lambda: not _group(record.pid)):
            raise NotReady(f"{self.name} lives on after SIGKILL")

    def stop(self, timeout: float = 60) -> None:
        """SIGTERM, and SIGKILL when that does not help within `timeout` seconds."""
        self._signal_group(signal.SIGCONT)
        if self.is_alive():
            os.kill(self.pid, signal.SIGTERM)
        if not self._has_ended(timeout):
            self.kill()

    def pause(self) -> None:
        """SIGSTOP: it and its workers hang. A thread that waits for a CPU takes the signal only when it has one."""
        self._signal_group(signal.SIGSTOP)
        self.wait_until(lambda: all(map(_stands_still, _group(self.pid))), "standing still")

    def pause_children(self) -> None:
        """SIGSTOP: its workers hang, and it does not."""
        workers = children(self.pid)
        for child in workers:
            os.kill(child, signal.SIGSTOP)
        self.wait_until(lambda: all(map(_stands_still, workers)), "workers that stand still")

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)

    def restart(self) -> None:
        """The same command again, after ending what still runs."""
        record = self.recorded
        if record is None:
            raise LookupError(f"{self.name} was never started")
        if self.is_alive():
            self.stop()
        self.start(record.command, record.environment)

    def log_tail(self, lines: int = 50) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def wait_until(self, ready: Callable[[], bool], condition: str, timeout: float = PATIENCE) -> None:
        """Wait for a condition of this process. Raises NotReady with the end of its log."""
        # Alive, too: another process may answer on a port that this one did not get.
        if not wait_for(ready, timeout, self.is_alive) or not self.is_alive():
            state = "does not run" if not self.is_alive() else f"was not ready in {timeout:.0f} s"
            raise NotReady(f"{self.name} {state} ({condition}); the end of {self.log}:\n{self.log_tail(30)}")

    def _signal_group(self, number: int) -> None:
        # It leads a session (see `start`), so its process group has its id. containerd's shims have their own groups.
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _has_ended(self, timeout: float) -> bool:
        return wait_for(lambda: not self.is_alive() and self._is_reaped(), timeout)

    def _is_reaped(self) -> bool:
        """Whether its last thread has ended, and its ports are free: the first may be a zombie before. True where it is
        not our child.
        """
        record = self.recorded
        child = None if record is None else self._children.get(record.pid)
        return child is None or child.poll() is not None


def wait_for(ready: Callable[[], bool], timeout: float = PATIENCE, while_: Callable[[], bool] = lambda: True) -> bool:
    """Poll until `ready`; False after `timeout` seconds, or as soon as `while_` is false."""
    first, last = POLL
    waited, before = 0.0, time.monotonic()
    while not ready():
        now = time.monotonic()
        waited, before = waited + min(now - before, _STOOD_STILL), now
        if waited > timeout or not while_():
            return ready()
        time.sleep(min(last, max(first, waited / 8)))
    return True


def stat(pid: int) -> list[str]:
    """The fields after the process's name, the first of them its state. Source: proc(5), field 3 and on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_time(pid: int) -> int | None:
    """Start time in clock ticks since boot; None for no process or a zombie. Source: proc(5), field 22."""
    fields = _fields_of_running(pid)
    return None if fields is None else int(fields[19])


def _fields_of_running(pid: int) -> list[str] | None:
    """As `stat`; None for no process or a zombie."""
    try:
        fields = stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields


def children(pid: int) -> list[int]:
    """Ids of the child processes."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _group(leader: int) -> list[int]:
    """The running processes of the group that this process leads or led. Source: proc(5), field 5."""
    fields_by_pid = {pid: _fields_of_running(pid) for pid in _all_pids()}
    return [pid for pid, fields in fields_by_pid.items() if fields is not None and int(fields[2]) == leader]


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stands_still(pid: int) -> bool:
    """Whether all of its threads are stopped, or gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return all(_state(thread) in "TtXZ" for thread in Path(f"/proc/{pid}/task").iterdir())
    return True


def _state(thread: Path) -> str:
    """As proc(5) has it in field 3 of `stat`; X for none."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def marked(state: Path) -> list[int]:
    """Every running process of this cluster, also those that no record names: workers, containerd's shims, and what
    has left its container's cgroup, as MPS daemons do.
    """
    return [pid for pid in _all_pids() if _is_of(pid, state) and start_time(pid) is not None]


def _inherited() -> dict[str, str]:
    """Our environment, without what is fixed for pytest alone."""
    return {name: variable for name, variable in os.environ.items() if name != "PYTHONHASHSEED"}


def kill_marked(state: Path, timeout: float = PATIENCE) -> None:
    """SIGKILL what still runs of this cluster, until nothing does: a dying process may have started another."""
    deadline = time.monotonic() + timeout
    while (pids := marked(state)) and time.monotonic() < deadline:
        for pid in pids:
            _kill_if(pid, lambda pid: _is_of(pid, state))
        time.sleep(POLL[0])


def _kill_if(pid: int, ours: Callable[[int], bool]) -> None:
    # By a handle, which names one process for ever: asked after it is open, the answer is about the one we signal.
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            if ours(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_of(pid: int, state: Path) -> bool:
    """Whether its environment is marked, or its file system that of a container of the cluster."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"{MARK}={state}".encode() in environment:
            return True
        mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    return any(f"{state}/" in mount[-1] for mount in mounts if mount[4] == "/")


def run(command: Sequence[str], *, stdin: str | None = None, timeout: float = PATIENCE, check: bool = True) -> str:
    """Run to the end and return stdout. Raises CommandFailed."""
    done = subprocess.run(list(command), input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise CommandFailed(f"{' '.join(map(str, command))} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def noted_names(state: Path) -> list[str]:
    """Names of all processes on record, the latest started last."""
    records = (state / "run").glob("*.json") if (state / "run").exists() else ()
    return [path.stem for path in sorted(records, key=lambda path: path.stat().st_mtime_ns)]
