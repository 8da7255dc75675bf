"""One manager after another: what the next one takes over, ends, and never mistakes for its own."""

import shutil

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.quantity import MiB
from mps.host.cgroups import CgroupMembership
from mps.host.processes import CONTROL_PROGRAM, SERVER_PROGRAM
from tests.mps.mpsnode import uuid_of


def test_the_next_manager_takes_over_what_is_held_and_ends_what_is_not(pair):
    pair.bind("pod", 0, 8138)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1)
    held, idle = pair.daemon(0), pair.daemon(1)
    client = pair.add_client(0)
    manager = pair.manager
    pair.stop()
    assert held.is_alive()
    assert not idle.is_alive()
    assert (pair.mode(0), pair.mode(1)) == ("ExclusiveProcess", "Default")
    assert "no MPS manager runs" in pair.problem(0), "nothing starts in between"
    assert {status.state for status in manager.statuses().values()} == {"Down"}, "the cluster's last word"
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1)
    assert pair.daemon(0) == held
    assert client.is_alive()
    assert not (pair.log() / "terminated").exists()


def test_on_request_all_daemons_end_with_the_manager_or_none(pair):
    pair.bind("pod", 0, 8138)
    pair.start(stop_daemons="never")
    pair.wait_ready(0)
    pair.wait_ready(1)
    daemons = [pair.daemon(0), pair.daemon(1)]
    client = pair.add_client(0)
    pair.stop()
    assert all(daemon.is_alive() for daemon in daemons)
    pair.start(stop_daemons="always")
    pair.wait_ready(0)
    pair.stop()
    assert not any(daemon.is_alive() for daemon in daemons)
    assert (pair.log() / "terminated").read_text().split() == [str(client.pid)]
    assert (pair.mode(0), pair.mode(1)) == ("Default", "Default")


def test_without_knowing_the_pods_none_ends_with_the_manager(node):
    node.start()
    node.wait_ready()
    node.pods.synced = False
    daemon = node.daemon()
    node.stop()
    assert daemon.is_alive()


def test_after_a_crash_cards_are_taken_over_or_opened_again(pair):
    pair.bind("pod", 0, 8138)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1)
    held = pair.daemon(0)
    leftover = pair.daemon(1)
    pair.crash()
    assert "no MPS manager runs" in pair.problem(0)
    assert pair.mode(1) == "ExclusiveProcess"
    pair.start(cards="0")
    assert not leftover.is_alive(), "its card is not served any more"
    assert pair.mode(1) == "Default"
    pair.wait_ready(0, memory_limit=MiB(8138))
    assert pair.daemon(0) == held


def test_a_daemon_of_an_open_card_that_is_not_served_any_more_is_ended_too(pair):
    pair.start(exclusive=False)
    pair.wait_ready(1)
    leftover, servers = pair.daemon(1), pair.servers(1)
    pair.crash()
    pair.start(cards="0")
    assert not leftover.is_alive()
    assert not any(server.is_alive() for server in servers)
    assert pair.mode(1) == "Default"


def test_after_a_change_of_scope_only_folders_that_are_served_say_how_mps_is(pair):
    """The state file of a card's own folder comes first: an old one would hold the node's daemon up for ever."""
    pair.start()
    pair.wait_ready(0)
    pair.wait_ready(1)
    own = pair.home(0)
    pair.stop()
    pair.start(scope=DaemonScope.NODE)
    pair.wait_ready(0)
    pair.wait_ready(1)
    whole = pair.home()
    pair.crash()
    pair.start(scope=DaemonScope.CARD)
    pair.wait_ready(0)
    for name in (mps.READY_FILE, f"{mps.CLIENTS_FOLDER}/{mps.CONTROL_SOCKET}"):
        assert (own / name).exists()
        assert not (whole / name).exists()


def test_a_daemon_that_sees_other_cards_is_replaced(node):
    node.start()
    node.wait_ready()
    leftover = node.daemon()
    leftover.environment = {**leftover.environment, "CUDA_VISIBLE_DEVICES": "GPU-other"}
    node.crash()
    node.start()
    node.until(lambda: not leftover.is_alive())
    node.wait_ready()


def test_a_daemon_whose_folder_was_removed_is_replaced(node):
    node.bind("pod", 0, 8138)
    node.start()
    node.wait_ready(memory_limit=MiB(8138))
    leftover = node.daemon()
    shutil.rmtree(node.root)
    assert "no MPS manager runs" in node.problem()
    node.crash()
    began = node.clock.now()
    node.start()
    node.wait_ready(memory_limit=MiB(8138))
    assert not leftover.is_alive()
    assert node.daemon() != leftover
    assert node.clock.now() - began < 5.0, "nobody can ask it, so nothing is waited for"


def test_a_state_file_of_a_manager_that_hangs_goes_stale(node):
    node.start()
    node.wait_ready()
    node.clock.advance(node.status().valid_seconds + 1)  # and it looks no more
    assert "it may hang" in node.problem()
    assert mps.is_stale(node.status(), node.clock.now())
    assert uuid_of(0) in node.problem()


def test_a_tenants_process_is_no_daemon_and_no_server_whatever_it_calls_itself(node):
    environment, tenant = {mps.PIPE_ENV: str(node.pipe())}, CgroupMembership("uid-tenant", "c")
    server, daemon = (
        node.host.add(SERVER_PROGRAM, environment, tenant),
        node.host.add(CONTROL_PROGRAM, environment, tenant),
    )
    node.start()
    node.wait_ready()
    assert node.status().daemon_pid == node.daemon().pid != daemon.pid, "it was not taken over"
    node.daemon().kill()
    node.until(node.problem)
    node.wait_ready()
    assert server.is_alive()
    assert daemon.is_alive(), "it is not for us to end them"
