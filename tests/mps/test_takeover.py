"""One manager after another: what the next one takes over, ends, and never mistakes for its own."""

import os
import signal
import subprocess
import sys

import pytest

from cardwise.core import mps
from cardwise.core.quantity import MiB
from cardwise.gpus import mpsnode
from mps import cgroups
from mps.cgroups import Membership
from tests.mps.worlds import eventually, uuid_of


def test_the_next_manager_takes_over_what_is_held_and_ends_what_is_not(pair):
    pair.bind("pod", 0, 8138)
    pair.start()
    pair.wait_ready(0, need=MiB(8138))
    pair.wait_ready(1)
    held, idle = pair.daemon(0), pair.daemon(1)
    client = pair.add_client(0)
    pair.stop()
    assert held.alive()
    assert not idle.alive()
    assert (pair.mode(0), pair.mode(1)) == ("ExclusiveProcess", "Default")
    assert "no MPS manager runs" in pair.problem(0), "nothing starts in between"
    assert pair.told(0)["state"] == "Down"
    pair.start()
    pair.wait_ready(0, need=MiB(8138))
    pair.wait_ready(1)
    assert pair.daemon(0) == held
    assert client.poll() is None
    assert not (pair.home(0) / "log" / "terminated").exists()


def test_after_a_crash_cards_are_taken_over_or_opened_again(pair):
    pair.bind("pod", 0, 8138)
    pair.start()
    pair.wait_ready(0, need=MiB(8138))
    pair.wait_ready(1)
    held = pair.daemon(0)
    left = pair.daemon(1)
    pair.crash()
    assert "no MPS manager runs" in pair.problem(0)
    assert pair.told(0)["state"] == "Ready", "nobody could tell: PreStart is what holds"
    assert pair.mode(1) == "ExclusiveProcess"
    pair.start(cards="0")
    eventually(lambda: not left.alive(), "its card is not served any more")
    assert pair.mode(1) == "Default"
    pair.wait_ready(0, need=MiB(8138))
    assert pair.daemon(0) == held


def test_a_daemon_of_an_open_card_that_is_not_served_any_more_is_ended_too(pair):
    pair.start(exclusive=False)
    pair.wait_ready(1)
    left, servers = pair.daemon(1), pair.servers(1)
    pair.crash()
    pair.start(cards="0")
    eventually(lambda: not left.alive() and not any(server.alive() for server in servers))
    assert pair.mode(1) == "Default"


def test_a_state_file_of_a_manager_that_hangs_goes_stale(node):
    node.start()
    node.wait_ready()
    status = node.status()  # and it looks no more
    later = status.checked + status.valid_seconds + 1
    assert "is it hanging?" in mps.unusable(status, uuid_of(0), now=later)
    assert mpsnode.now() < later


@pytest.fixture
def pretender(node, folder):
    """In some pod, under the name and with the environment of a daemon or server of the card."""
    started = []

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = folder / name
        program.write_text("import time; time.sleep(600)")
        environment = os.environ | {mps.PIPE_ENV: str(node.home() / "pipe")}
        started.append(subprocess.Popen([sys.executable, program, *arguments], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_tenants_process_is_no_daemon_and_no_server_whatever_it_calls_itself(node, pretender, monkeypatch):
    (node.home() / "pipe").mkdir(parents=True)
    server, daemon = pretender("nvidia-cuda-mps-server"), pretender("nvidia-cuda-mps-control", "-f")
    real, theirs = cgroups.of, (Membership("uid-tenant", "c"),)
    monkeypatch.setattr(cgroups, "of", lambda pid: theirs if pid in (server.pid, daemon.pid) else real(pid))
    node.start()
    node.wait_ready()
    assert node.status().daemon_pid == node.daemon().pid != daemon.pid, "it was not taken over"
    killed = node.daemon()
    killed.signal(signal.SIGKILL)
    eventually(lambda: not killed.alive())
    node.wait_ready()
    assert (server.poll(), daemon.poll()) == (None, None), "it is not for us to end them"
