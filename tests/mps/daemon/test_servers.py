"""When a server counts as one that does not run, which the kernel alone knows."""

import pytest

from mps.daemon.machine import OK_RESULT, Outcome
from mps.daemon.servers import Servers
from mps.host.control import Control, FrontEnd
from mps.host.processes import SERVER_PROGRAM, ProcessActivity
from tests.fakes.clock import FakeClock
from tests.mps.hosts import FakeHost


class Daemon(FrontEnd):
    """One server, which is well if you ask it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def send(self, command: str, timeout: float) -> str:
        return str(self._pid) if command == "get_server_list" else "ACTIVE"


@pytest.fixture
def check_after(monkeypatch):
    """How it is a second later, where the kernel says this of the server."""
    clock = FakeClock()
    host = FakeHost(clock)
    subject = Servers(Control(Daemon(host.add(SERVER_PROGRAM).pid), 1.0), host, clock, has_status_command=True)

    def check_at(seconds: float, activity: ProcessActivity | None):
        clock.advance(seconds)
        monkeypatch.setattr(host, "activity", lambda pid: activity)
        return subject.check_servers()

    return check_at


def test_one_that_waits_in_the_driver_for_moments_is_well(check_after):
    for switches in range(60):
        assert check_after(1.0, ProcessActivity("D", switches)) == OK_RESULT, "it moves"
    for turn in range(60):
        assert check_after(1.0, ProcessActivity("DS"[turn % 2], 60)) == OK_RESULT, "it is not always there"


def test_one_that_does_not_move_there_is_not(check_after):
    assert check_after(0.0, ProcessActivity("D", 5)) == OK_RESULT
    assert check_after(9.0, ProcessActivity("D", 5)) == OK_RESULT
    frozen = check_after(1.0, ProcessActivity("D", 5))
    assert frozen.outcome is Outcome.FROZEN
    assert "hangs in the driver" in frozen.reason
    assert check_after(1.0, ProcessActivity("R", 6)) == OK_RESULT


@pytest.mark.parametrize("state", ["T", "t"])
def test_one_that_is_stopped_is_not_at_once(check_after, state):
    assert check_after(0.0, ProcessActivity("S", 5)) == OK_RESULT
    assert check_after(1.0, ProcessActivity(state, 5)).outcome is Outcome.FROZEN


def test_one_that_has_ended_is_told_of_by_its_daemon(check_after):
    assert check_after(0.0, None) == OK_RESULT
