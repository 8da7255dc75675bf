"""What a control daemon says to commands, and what is the end of it."""

import contextlib
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cardwise.core.api import mps
from cardwise.gpus import mpsfiles
from mps.host.control import CommandRefused, DaemonTimeout, NoDaemon, UnknownCommand
from tests.mps.contract.programs import SECONDS, eventually


class TestProtocol:
    def test_errors_are_told_by_text(self, running):
        with pytest.raises(UnknownCommand, match='Unknown command "bogus"'):
            running.front.send("bogus", SECONDS)
        with pytest.raises(CommandRefused, match="Server 4711 not found"):
            running.control.clients(4711)
        with pytest.raises(CommandRefused, match="Invalid priority"):
            running.front.send("set_default_client_priority 7", SECONDS)
        with pytest.raises(CommandRefused, match="A user id"):
            running.front.send("start_server", SECONDS)

    def test_without_a_daemon_nobody_answers(self, world):
        with pytest.raises(NoDaemon, match="Cannot find MPS control daemon process"):
            world.control.servers()

    def test_a_frozen_one_hangs_its_front_end(self, every):
        every.daemon.signal(signal.SIGSTOP)
        with pytest.raises(DaemonTimeout, match=r"no answer to 'get_server_list' within 0\.5 s"):
            every.front.send("get_server_list", 0.5)
        assert mpsfiles.is_daemon_listening(every.pipe), "its socket still takes connections"
        every.daemon.signal(signal.SIGCONT)
        assert every.control.servers() == []

    def test_quit_is_judged_by_the_end_of_the_process(self, every):
        every.control.percentage()
        with contextlib.suppress(NoDaemon):  # its rc says nothing: 0 and 1 were both seen
            every.control.quit(1, SECONDS)
        assert every.ended() is not None
        with pytest.raises(NoDaemon):
            every.control.servers()

    def test_sigterm_is_the_end_at_once(self, every):
        every.daemon.signal(signal.SIGTERM)
        assert every.ended() != 0
        assert (every.pipe / "control").exists(), "without cleaning up"


class TestProgram:
    """What front end and daemon do as processes."""

    def test_errors_have_rc_0_and_are_told_by_text(self, process):
        done = process.run(text=b"bogus\n")
        assert (done.returncode, done.stdout) == (0, b'Unknown command "bogus"\n')

    def test_without_a_daemon_there_is_rc_1(self, program):
        done = program.run(text=b"get_server_list\n")
        assert done.returncode == 1
        assert b"Cannot find MPS control daemon process" in done.stdout + done.stderr

    def test_who_connects_and_says_nothing_keeps_all_others_waiting(self, process):
        path = process.pipe / mps.CONTROL_SOCKET

        def connections() -> int:
            lines = Path("/proc/net/unix").read_text().splitlines()
            return sum(line.endswith(f" {path}") for line in lines) - 1  # one listens

        with ThreadPoolExecutor() as pool, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            eventually(lambda: connections() == 0)
            client.connect(str(path))
            asking = pool.submit(process.control.servers)
            eventually(lambda: connections() == 2)
            process.run("-h")  # what takes as long as asking and being answered
            assert not asking.done()
            client.close()
            assert asking.result() == []

    def test_answers_of_several_commands_run_together(self, process):
        done = process.run(text=b"get_server_list\nget_default_active_thread_percentage\n")
        assert done.stdout == b"100.0\n", "whose answer that is, nobody can tell: one command for each process"

    def test_a_long_line_kills_newer_daemons_and_never_leaves_us(self, process):
        process.run(text=b"x" * 5000 + b"\n")
        if process.driver >= 580:
            assert process.ended() != 0
        else:
            assert process.control.servers() == []
        with pytest.raises(CommandRefused, match="would crash the daemon"):
            process.front.send("x" * 5000, SECONDS)
        with pytest.raises(CommandRefused, match="would crash the daemon"):
            process.front.send("get_server_list\nquit", SECONDS)
