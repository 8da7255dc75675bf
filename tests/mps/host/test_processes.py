"""The machine's own processes: found, told apart, started and ended."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cardwise.core.api import mps
from mps.host import cgroups, processes
from mps.host.cgroups import CgroupMembership
from mps.host.processes import CONTROL_PROGRAM, FOREGROUND_OPTION, LOCAL, SERVER_PROGRAM

SECONDS = 60.0  # in which a process that was signalled has ended
STAY = "import signal; print(flush=True); signal.pause()"
NOBODYS = 2**22 + 1  # above any PID


@pytest.fixture
def running(folder) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A process under this name, with the environment of one of the pipe folder; it has started when it is returned."""
    started = []

    def start(name: str, *arguments: str, pipe: str = "pipe") -> subprocess.Popen[bytes]:
        program = folder / name
        program.write_text(STAY)
        environment = os.environ | {mps.PIPE_ENV: str(folder / pipe), "CUDA_VISIBLE_DEVICES": "GPU-of-no-manager"}
        command = [sys.executable, "-IS", program, *arguments]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def output() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def test_daemons_of_others_are_those_with_another_folder_and_no_front_ends(folder, running):
    ours, others = running(CONTROL_PROGRAM, FOREGROUND_OPTION), running(CONTROL_PROGRAM, "-d", pipe="other")
    front_end = running(CONTROL_PROGRAM, pipe="other")
    listed = {daemon.pid: daemon.pipe for daemon in LOCAL.other_daemons(folder / "pipe")}
    assert listed[others.pid] == str(folder / "other")
    assert listed.keys().isdisjoint({ours.pid, front_end.pid})


def test_a_daemon_that_ends_while_it_is_read_is_nobody_s(folder, running, monkeypatch):
    """The kernel shows an empty environment then, as that of a daemon which serves all GPUs."""
    ending = running(CONTROL_PROGRAM, FOREGROUND_OPTION)
    real = processes._read_environment

    def read_late(pid: int) -> dict[str, str]:
        if pid == ending.pid:
            ending.kill()
            ending.wait(SECONDS)
        return real(pid)

    monkeypatch.setattr(processes, "_read_environment", read_late)
    assert ending.pid not in {daemon.pid for daemon in LOCAL.other_daemons(folder / "pipe")}
    assert ending.returncode == -signal.SIGKILL


def test_daemons_and_servers_are_known_by_name_and_pipe_folder(folder, running):
    daemon, server = running(CONTROL_PROGRAM, FOREGROUND_OPTION), running(SERVER_PROGRAM)
    running(CONTROL_PROGRAM)  # its front end
    running(CONTROL_PROGRAM, FOREGROUND_OPTION, pipe="other")
    (listed,) = LOCAL.daemons(folder / "pipe")
    assert (listed.pid, listed.is_alive()) == (daemon.pid, True)
    assert [process.pid for process in LOCAL.servers(folder / "pipe")] == [server.pid]
    assert LOCAL.is_server(server.pid)
    assert not LOCAL.is_server(daemon.pid)
    assert LOCAL.environment(daemon.pid)[mps.PIPE_ENV] == str(folder / "pipe")
    assert LOCAL.name(daemon.pid)


def test_those_of_tenants_are_neither(folder, running, monkeypatch):
    theirs = [running(CONTROL_PROGRAM, FOREGROUND_OPTION).pid, running(SERVER_PROGRAM).pid]
    real = cgroups.read_memberships
    monkeypatch.setattr(
        cgroups, "read_memberships", lambda pid: (CgroupMembership("uid-tenant", "c"),) if pid in theirs else real(pid)
    )
    assert not LOCAL.daemons(folder / "pipe")
    assert not LOCAL.servers(folder / "pipe")
    assert LOCAL.memberships(theirs[0]) == (CgroupMembership("uid-tenant", "c"),)


def test_a_process_cannot_write_to_the_terminal_of_who_reads_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_bytes(b"a\x1b[31mRED\xff\n")
    assert LOCAL.name(7) == "a?[31mRED\ufffd"


def test_one_that_has_ended_is_signalled_no_more(folder, running):
    daemon = running(CONTROL_PROGRAM, FOREGROUND_OPTION)
    (listed,) = LOCAL.daemons(folder / "pipe")
    listed.signal(signal.SIGKILL)
    assert daemon.wait(SECONDS) == -signal.SIGKILL
    assert not listed.is_alive()
    listed.signal(signal.SIGKILL)
    assert LOCAL.environment(daemon.pid) == {}
    assert LOCAL.name(NOBODYS) is None
    assert LOCAL.memberships(NOBODYS) == ()


def test_a_number_that_another_process_has_now_is_not_it(folder, running):
    running(CONTROL_PROGRAM, FOREGROUND_OPTION)
    (daemon,) = LOCAL.daemons(folder / "pipe")
    former = type(daemon)(daemon.pid, daemon.start_time - 1)
    assert not former.is_alive()
    former.signal(signal.SIGKILL)
    assert daemon.is_alive()


def test_a_child_says_how_it_ended_and_leaves_no_zombie(output, monkeypatch):
    child = LOCAL.start([sys.executable, "-IS", "-c", STAY], {}, output)
    assert child.is_alive()
    assert child.code is None
    assert LOCAL.activity(child.pid).state in "RSD"
    monkeypatch.setattr(subprocess.Popen, "poll", lambda popen: popen.returncode)  # always a moment too early
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert LOCAL.activity(child.pid) is None
    assert not child.is_alive()
    assert child.code == -signal.SIGKILL
    assert not Path(f"/proc/{child.pid}").exists(), "reaped"


def test_a_child_has_a_session_of_its_own_and_its_words_go_to_the_output(output):
    code = "import os, sys; print(os.getsid(0) == os.getpid(), os.getcwd()); sys.exit(3)"
    child = LOCAL.start([sys.executable, "-IS", "-c", code], {}, output)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not child.is_alive()
    assert child.code == 3
    os.lseek(output, 0, os.SEEK_SET)
    assert os.read(output, 1000) == b"True /\n"


def test_one_that_is_left_goes_on_and_nobody_waits_for_it(output):
    child = LOCAL.start([sys.executable, "-IS", "-c", STAY], {}, output)
    child.abandon()
    try:
        os.kill(child.pid, 0)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


def test_of_what_a_process_was_started_with_only_the_beginning_is_read(tmp_path, monkeypatch):
    """Tenants start as many processes with megabytes of arguments and variables as they like."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(f"/usr/bin/{SERVER_PROGRAM}\0".encode() + b"a\0" * 500_000)
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0" + b"".join(b"V%d=x\0" % i for i in range(200_000)))
    assert LOCAL.is_server(7)
    assert len(processes._read_arguments(tmp_path / "7")) < 40_000
    assert LOCAL.environment(7)["A"] == "1"
    assert len(LOCAL.environment(7)) < 40_000
