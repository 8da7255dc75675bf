"""Daemons and servers that die, freeze, fault or are meddled with, and how the manager heals them."""

import fcntl
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cardwise.core.mps import State
from cardwise.core.quantity import MiB
from tests.mps.worlds import PACE, eventually


@pytest.mark.parametrize("wound", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_killed_or_frozen_daemon_is_replaced_and_its_neighbour_never_notices(pair, wound):
    pair.bind("pod", 0, 8138)
    pair.start(pace=replace(PACE, answer=1.0))
    pair.wait_ready(0, need=MiB(8138))
    pair.wait_ready(1)
    before, neighbour, orphan = pair.daemon(0), pair.daemon(1), pair.servers(0)[0]
    before.signal(wound)
    eventually(lambda: pair.problem(0) or not before.alive(), "nothing starts there")
    eventually(lambda: not before.alive() and not orphan.alive(), "nothing of it is left")
    pair.wait_ready(0, need=MiB(8138))
    assert pair.daemon(0) != before
    assert pair.daemon(1) == neighbour
    assert not pair.problem(1)
    assert pair.mode(0) == "ExclusiveProcess"


def test_a_frozen_server_under_a_daemon_that_answers_is_replaced_with_it(pair, monkeypatch):
    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", "535")
    pair.bind("pod", 0, 8138)
    pair.start(driver="535.261.03", pace=replace(PACE, answer=5.0))
    pair.wait_ready(0, need=MiB(8138))
    pair.wait_ready(1)
    daemon, neighbour, (server,) = pair.daemon(0), pair.daemon(1), pair.servers(0)
    server.signal(signal.SIGSTOP)
    eventually(lambda: f"server {server.pid} is stopped" in pair.problem(0), "nothing starts there, and it is said why")
    eventually(lambda: not daemon.alive() and not server.alive(), "nothing of it is left")
    pair.wait_ready(0, need=MiB(8138))
    assert (pair.daemon(1), pair.problem(1)) == (neighbour, "")


def test_a_server_that_was_stopped_for_a_moment_goes_on(node):
    node.start(pace=replace(PACE, answer=60.0))
    node.wait_ready()
    daemon, (server,) = node.daemon(), node.servers()
    server.signal(signal.SIGSTOP)
    eventually(lambda: "is stopped" in node.problem())
    server.signal(signal.SIGCONT)
    node.wait_ready()
    assert (node.daemon(), node.servers()) == (daemon, [server])


def test_a_daemon_that_ends_between_two_looks_leaves_no_zombie(node, monkeypatch):
    node.start()
    node.wait_ready()
    monkeypatch.setattr(subprocess.Popen, "poll", lambda popen: popen.returncode)  # always a moment too early
    killed = node.daemon()
    killed.signal(signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{killed.pid}").exists(), "reaped")
    node.wait_ready()


def test_a_daemon_whose_socket_somebody_has_replaced_is_replaced_itself(node):
    node.start()
    node.wait_ready()
    before, control = node.daemon(), node.home() / "pipe" / "control"
    control.rename(control.with_name("c2"))
    control.symlink_to("c2")  # answers as before, through hands that are not ours
    eventually(lambda: not before.alive(), "it ends")
    node.wait_ready()
    assert not control.is_symlink()
    assert not control.with_name("c2").exists()


def test_clients_of_a_dead_daemons_server_have_time_to_end(node):
    node.start()
    node.wait_ready()
    node.add_client()
    (server,) = node.servers()
    node.daemon().signal(signal.SIGKILL)
    eventually(lambda: "still has 1 clients" in node.status().reason)
    assert server.alive()
    eventually(lambda: not server.alive(), "but not for ever")
    node.wait_ready()


def test_a_fault_waits_for_the_clients_and_heals_with_their_end(node):
    node.start(pace=replace(PACE, fault_grace=60.0))
    node.wait_ready()
    before = node.daemon()
    node.add_client()
    node.say("fault")
    eventually(lambda: node.status().state is State.FAULT)
    eventually(lambda: node.told()["state"] == "Fault")
    assert "a client's fault" in node.problem()
    node.remove_clients()
    node.wait_ready()
    assert node.daemon() == before, "no restart was needed"


def test_a_fault_whose_clients_stay_is_ended_by_detaching_them(node):
    node.start()
    node.wait_ready()
    before, client = node.daemon(), node.add_client()
    node.say("fault")
    eventually(lambda: not before.alive())
    node.wait_ready()
    assert (node.home() / "log" / "terminated").read_text().split() == [str(client.pid)]
    assert client.poll() is None, "it was detached, not killed"


def test_a_server_that_cannot_start_is_tried_again_and_said(node):
    failing = node.say("server-fails")
    node.start(pace=replace(PACE, warm=3.0))
    eventually(lambda: "its server is not there yet" in node.status().reason)
    assert node.problem()
    eventually(lambda: node.told()["state"] in ("Starting", "Down"))
    failing.unlink()
    node.wait_ready()


def test_garbage_in_the_pipe_costs_at_most_a_restart(node, monkeypatch):
    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", "580")
    node.start(driver="580.95.05")
    node.wait_ready()
    assert node.status().multi_user
    killed = node.daemon()
    node.ask("x" * 5000)
    eventually(lambda: not killed.alive())
    (node.home() / "pipe" / "rubbish").write_bytes(b"\0" * 1000)
    node.wait_ready()
    assert node.ask("get_default_active_thread_percentage") == "100.0"


def test_nothing_that_clients_leave_in_the_pipe_folder_keeps_a_daemon_down(node, folder):
    pipe, precious = node.home() / "pipe", folder / "precious"
    (pipe / "control" / "full").mkdir(parents=True)
    seen_by_containers = pipe.stat().st_ino
    precious.write_text("the node's")
    (pipe / "nvidia-cuda-mps-control.pid").symlink_to(precious)
    (pipe / "link").symlink_to(folder)
    (pipe / "control_lock").touch()
    with (pipe / "control_lock").open() as of_a_client:
        fcntl.lockf(of_a_client, fcntl.LOCK_SH)  # as whoever waits for it has it once a daemon dies
        node.start()
        node.wait_ready()
    assert precious.read_text() == "the node's", "a daemon writes where links lead"
    assert pipe.stat().st_ino == seen_by_containers
