"""Daemons and servers that die, freeze, fault or are meddled with, and how the manager heals them."""

import os
import signal

import pytest

from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus import mpsfiles
from tests.mps.mpsnode import PACE


@pytest.mark.parametrize("wound", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_killed_or_frozen_daemon_is_replaced_and_its_neighbour_never_notices(pair, wound):
    pair.bind("pod", 0, 8138)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1)
    before, neighbour, orphan = pair.daemon(0), pair.daemon(1), pair.servers(0)[0]
    began = pair.clock.now()
    before.signal(wound)
    pair.until(lambda: pair.problem(0), "nothing starts there")
    pair.until(lambda: not before.is_alive() and not orphan.is_alive(), "nothing of it is left")
    pair.wait_ready(0, memory_limit=MiB(8138))
    assert pair.clock.now() - began < 30.0
    assert pair.daemon(0) != before
    assert pair.daemon(1) == neighbour
    assert not pair.problem(1)
    assert pair.mode(0) == "ExclusiveProcess"


def test_a_frozen_server_under_a_daemon_that_answers_is_replaced_with_it(pair, monkeypatch):
    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", "535")
    pair.bind("pod", 0, 8138)
    pair.start(driver="535.261.03")
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1)
    daemon, neighbour, (server,) = pair.daemon(0), pair.daemon(1), pair.servers(0)
    server.signal(signal.SIGSTOP)
    pair.until(lambda: f"server {server.pid} is stopped" in pair.problem(0), "nothing starts there, and it is said why")
    pair.until(lambda: not daemon.is_alive() and not server.is_alive(), "nothing of it is left")
    pair.wait_ready(0, memory_limit=MiB(8138))
    assert (pair.daemon(1), pair.problem(1)) == (neighbour, "")


def test_a_server_that_was_stopped_for_a_moment_goes_on(node):
    node.start()
    node.wait_ready()
    daemon, (server,) = node.daemon(), node.servers()
    server.signal(signal.SIGSTOP)
    node.until(lambda: "is stopped" in node.problem())
    server.signal(signal.SIGCONT)
    node.wait_ready()
    assert (node.daemon(), node.servers()) == (daemon, [server])


def test_clients_of_a_dead_daemons_server_have_time_to_end(node):
    node.start()
    node.wait_ready()
    node.add_client()
    (server,) = node.servers()
    node.daemon().kill()
    node.until(lambda: "still has 1 clients" in node.status().reason)
    assert server.is_alive()
    seen = node.clock.now()
    node.until(lambda: not server.is_alive(), "but not for ever")
    assert node.clock.now() - seen == pytest.approx(PACE.orphan_grace, abs=1.0)
    node.wait_ready()


def test_an_orphaned_server_that_does_not_end_is_killed(node):
    node.touch_double_file("server-stays")
    node.start()
    node.wait_ready()
    (server,) = node.servers()
    node.daemon().kill()
    node.until(lambda: not server.is_alive())
    assert server.code == -signal.SIGKILL
    node.wait_ready()


def test_one_that_does_not_even_end_when_killed_is_told_and_waited_for(node):
    node.start()
    node.wait_ready()
    (server,) = node.servers()
    server.deaf = frozenset({signal.SIGTERM, signal.SIGKILL})
    node.daemon().kill()
    node.until(lambda: f"server {server.pid} does not end when killed" in node.status().reason)
    assert not node.host.daemons(node.pipe()), "no daemon beside it"
    server.deaf = frozenset()
    node.wait_ready()


def test_a_fault_waits_for_the_clients_and_heals_with_their_end(node):
    node.start()
    node.wait_ready()
    before = node.daemon()
    node.add_client()
    node.touch_double_file("fault")
    node.until(lambda: node.status().state is MpsState.FAULT)
    assert node.published_status()["state"] == "Fault"
    assert "a client's fault" in node.problem()
    node.pass_time(PACE.fault_grace - 2.0)
    node.end_clients()
    node.wait_ready()
    assert node.daemon() == before, "no restart was needed"


def test_a_fault_whose_clients_stay_is_ended_by_detaching_them(node):
    node.start()
    node.wait_ready()
    before, client = node.daemon(), node.add_client()
    node.touch_double_file("fault")
    node.until(lambda: not before.is_alive())
    node.wait_ready()
    assert (node.log() / "terminated").read_text().split() == [str(client.pid)]
    assert client.is_alive(), "it was detached, not killed"


def test_a_server_that_cannot_start_is_tried_again_and_said(node):
    failing = node.touch_double_file("server-fails")
    node.start()
    node.until(lambda: "its server has not started yet" in node.status().reason)
    assert node.problem()
    assert node.published_status()["state"] in ("Starting", "Down")
    failing.unlink()
    node.wait_ready()


def test_garbage_in_the_pipe_costs_at_most_a_restart(node, monkeypatch):
    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", "580")
    node.start(driver="580.95.05")
    node.wait_ready()
    assert node.status().multi_user
    killed = node.daemon()
    with pytest.raises(Exception, match="139"):
        node.send_command("x" * 5000)
    killed.end(139)
    (node.pipe() / "rubbish").write_bytes(b"\0" * 1000)
    node.until(node.problem)
    node.wait_ready()
    assert node.send_command("get_default_active_thread_percentage") == "100.0"


def test_each_daemon_finds_its_folder_of_pipes_empty(node):
    node.start()
    node.wait_ready()
    mounted, covered = (node.home() / mps.CLIENTS_FOLDER).stat(), os.open(node.pipe(), os.O_PATH)
    (node.pipe() / "control_lock").touch()
    node.daemon().kill()
    node.until(node.problem)
    node.wait_ready()
    assert os.path.samestat(os.fstat(covered), node.pipe().stat()), "share agents have a mount on it"
    os.close(covered)
    assert [entry.name for entry in node.pipe().iterdir()] == ["control"]
    assert [entry.name for entry in (node.home() / mps.CLIENTS_FOLDER).iterdir()] == ["control"]
    assert mpsfiles.is_daemon_listening(node.home() / mps.CLIENTS_FOLDER)
    assert os.path.samestat((node.home() / mps.CLIENTS_FOLDER).stat(), mounted), "containers have it mounted"
