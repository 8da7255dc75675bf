"""What a control daemon says to commands, and what is the end of it."""

import contextlib
import signal
import socket

import pytest

from cardwise.core import mps
from cardwise.gpus import mpsnode
from mps.control import NoDaemon, Refused, Silent, UnknownCommand
from tests.mps.contract.programs import SECONDS


class TestProtocol:
    def test_errors_have_rc_0_and_are_told_by_text(self, running):
        assert running.run(text=b"bogus\n").returncode == 0
        with pytest.raises(UnknownCommand, match='Unknown command "bogus"'):
            running.front.ask("bogus", SECONDS)
        with pytest.raises(Refused, match="Server 4711 not found"):
            running.control.clients(4711)
        with pytest.raises(Refused, match="Invalid priority"):
            running.front.ask("set_default_client_priority 7", SECONDS)
        with pytest.raises(Refused, match="A user id"):
            running.front.ask("start_server", SECONDS)

    def test_without_a_daemon_there_is_rc_1(self, world):
        with pytest.raises(NoDaemon, match="Cannot find MPS control daemon process"):
            world.control.servers()

    def test_a_frozen_one_hangs_its_front_end(self, running):
        running.started[0].send_signal(signal.SIGSTOP)
        with pytest.raises(Silent, match=r"no answer to 'get_server_list' within 0\.5 s"):
            running.front.ask("get_server_list", 0.5)
        assert mpsnode.answers(running.pipe), "its socket still takes connections"
        running.started[0].send_signal(signal.SIGCONT)
        assert running.control.servers() == []

    def test_who_connects_and_says_nothing_keeps_all_others_waiting(self, running):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(running.pipe / mps.CONTROL))
            with pytest.raises(Silent):
                running.front.ask("get_server_list", 1.0)
        assert running.control.servers() == []

    def test_answers_of_several_commands_run_together(self, running):
        done = running.run(text=b"get_server_list\nget_default_active_thread_percentage\n")
        assert done.stdout == b"100.0\n", "whose answer that is, nobody can tell: one command for each process"

    def test_a_long_line_kills_newer_daemons_and_never_leaves_us(self, running):
        running.run(text=b"x" * 5000 + b"\n")
        if running.driver >= 580:
            assert running.started[0].wait(SECONDS) != 0
        else:
            assert running.control.servers() == []
        with pytest.raises(Refused, match="no command that a daemon would survive"):
            running.front.ask("x" * 5000, SECONDS)
        with pytest.raises(Refused, match="no command"):
            running.front.ask("get_server_list\nquit", SECONDS)

    def test_quit_is_judged_by_the_end_of_the_process(self, running):
        running.control.percentage()
        with contextlib.suppress(NoDaemon):  # its rc says nothing: 0 and 1 were both seen
            running.control.quit(1, SECONDS)
        assert running.started[0].wait(SECONDS) is not None
        with pytest.raises(NoDaemon):
            running.control.servers()

    def test_sigterm_is_the_end_at_once(self, running):
        running.started[0].terminate()
        assert running.started[0].wait(SECONDS) != 0
        assert (running.pipe / "control").exists(), "without cleaning up"
