"""When a server counts as one that does not run, which the kernel alone knows."""

import os

import pytest

from mps import processes, servers
from mps.control import Control, FrontEnd
from mps.machine import OK, Outcome
from mps.processes import Pulse
from mps.servers import Servers


class Daemon(FrontEnd):
    """One server, which is well if you ask it."""

    def ask(self, command: str, timeout: float) -> str:
        return "7" if command == "get_server_list" else "ACTIVE"


@pytest.fixture
def look(monkeypatch):
    """How it is at a time, where the kernel says this of the server."""
    subject = Servers(Control(Daemon(), 1.0), tells_status=True)

    def at(now: float, pulse: Pulse | None):
        monkeypatch.setattr(processes, "pulse", lambda pid: pulse)
        monkeypatch.setattr(servers.time, "monotonic", lambda: now)
        return subject.look()

    return at


def test_one_that_waits_in_the_driver_for_moments_is_well(look):
    for now in range(60):
        assert look(float(now), Pulse("D", switches=now)) == OK, "it moves"
    for now in range(60):
        assert look(60.0 + now, Pulse("DS"[now % 2], switches=60)) == OK, "it is not always there"


def test_one_that_does_not_move_there_is_not(look):
    assert look(0.0, Pulse("D", 5)) == OK
    assert look(9.0, Pulse("D", 5)) == OK
    assert look(10.0, Pulse("D", 5)).outcome is Outcome.FROZEN
    assert "server 7 hangs in the driver" in look(12.0, Pulse("D", 5)).reason
    assert look(13.0, Pulse("R", 6)) == OK


@pytest.mark.parametrize("state", ["T", "t"])
def test_one_that_is_stopped_is_not_at_once(look, state):
    assert look(0.0, Pulse("S", 5)) == OK
    assert look(1.0, Pulse(state, 5)).outcome is Outcome.FROZEN


def test_one_that_has_ended_is_told_of_by_its_daemon(look):
    assert look(0.0, None) == OK


def test_the_kernel_tells_of_a_process():
    mine = processes.pulse(os.getpid())
    assert mine is not None
    assert mine.state in "RS"
    assert processes.pulse(2**22 + 1) is None
