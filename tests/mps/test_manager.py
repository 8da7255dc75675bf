"""The manager on a node with the double: what containers, the cluster and admins see while all is well."""

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus import mpsfiles
from mps.manager import ManagerLock, RootLocked
from tests.mps.mpsnode import P100, uuid_of


def test_cards_come_up_ready_closed_and_told(pair):
    pair.start()
    for index in (0, 1):
        pair.wait_ready(index)
        assert pair.mode(index) == "ExclusiveProcess"
    assert pair.published_status(0) | {"lastTransitionTime": ""} == {
        "mode": "card",
        "state": "Ready",
        "reason": "",
        "multiUser": False,
        "ceilingMiB": 512,
        "maxClients": 48,
        "lastTransitionTime": "",
    }
    assert pair.daemon(0) != pair.daemon(1), "one for each card"
    assert pair.send_command("get_default_active_thread_percentage") == "100.0"


def test_it_is_ready_when_the_pods_are_known_the_cluster_is_told_and_a_card_is(pair):
    pair.start()
    pair.pods.synced = False
    pair.manager._publication.problem = "the cluster has not been told"
    pods, problem, cards = pair.manager.problems()
    assert (pods, problem) == ("the pods of this node are not known yet", "the cluster has not been told")
    assert cards.startswith("no GPU's MPS is ready")
    pair.pods.synced, pair.manager._publication.problem = True, ""
    pair.wait_ready(0)
    assert not pair.manager.problems(), "one sick card is told, and the others are served"


def test_a_thread_that_does_not_come_round_has_it_restarted(node):
    node.start()
    node.clock.advance(119.0)
    assert not node.manager.stuck_reasons()
    node.clock.advance(2.0)
    assert node.manager.stuck_reasons() == ["the manager's thread has completed no pass for 121 s"]
    node.step_all()
    assert not node.manager.stuck_reasons()


def test_a_daemon_sees_its_own_card_only(pair):
    with capture_logs() as logs:
        pair.start()
        pair.wait_ready(1)
    text = f"fake server {pair.servers(1)[0].pid} for devices {uuid_of(1)}"
    assert any(text in line["event"] and line.get("card") == uuid_of(1) for line in logs)


def test_a_card_whose_pods_all_do_without_mps_is_off_and_open(node):
    node.start()
    node.wait_ready()
    node.bind("plain", 0, 4096, without_mps=True)
    node.until(lambda: not node.problem(required_state=MpsState.OFF))
    assert node.mode() == "Default"
    assert node.published_status()["state"] == "Off"
    assert "is Off, not Ready" in node.problem()
    assert not node.servers()
    node.end("plain")
    node.wait_ready()
    assert node.mode() == "ExclusiveProcess"


def test_that_it_is_off_does_not_go_stale(node):
    node.bind("plain", 0, 4096, without_mps=True)
    node.start()
    node.until(lambda: not node.problem(required_state=MpsState.OFF))
    node.pass_time(60.0)
    assert not node.problem(required_state=MpsState.OFF)


def test_one_pod_that_wants_mps_keeps_it_on(node):
    node.bind("plain", 0, 4096, without_mps=True)
    node.bind("limited", 0, 2048)
    node.start()
    node.wait_ready(memory_limit=MiB(4096))


def test_one_daemon_for_the_node(make_node):
    node = make_node(scope=DaemonScope.NODE)
    node.bind("pod", 1, 8138)
    node.start()
    node.wait_ready(0)
    node.wait_ready(1, memory_limit=MiB(8138))
    assert node.send_command("get_default_device_pinned_mem_limit 0") == "512M"
    assert node.send_command("get_default_device_pinned_mem_limit 1") == "8G"
    assert node.published_status(1)["mode"] == "node"
    assert "allows 512 MiB" in node.problem(0, memory_limit=MiB(8138))
    node.cards.append({"index": 2, "uuid": uuid_of(2), "memoryMiB": P100})
    node.write_cards()
    node.wait_ready(2)
    node.wait_ready(1, memory_limit=MiB(8138))


def test_a_card_whose_pods_do_without_mps_does_not_end_the_daemon_of_the_node_for_another(make_node):
    node = make_node(scope=DaemonScope.NODE)
    node.bind("plain", 0, 4096, without_mps=True)
    node.bind("limited", 1, 8138)
    node.start()
    node.wait_ready(1, memory_limit=MiB(8138))


def test_a_new_card_and_one_that_leaves(pair):
    pair.start()
    pair.wait_ready(0)
    pair.cards.append({"index": 2, "uuid": uuid_of(2), "memoryMiB": P100})
    gone = pair.daemon(0)
    del pair.cards[0]
    pair.write_cards()
    pair.wait_ready(2)
    pair.until(lambda: not gone.is_alive())
    assert pair.problem(0)


def test_a_card_in_mig_mode_has_no_daemon_while_it_lasts(pair):
    """Somebody else gives its slices to pods."""
    pair.cards[0]["mig"] = True
    pair.write_cards()
    pair.start()
    pair.wait_ready(1)
    assert (pair.host.daemons(pair.pipe(0)), pair.mode(0)) == ([], "Default")
    pair.cards[0]["mig"], pair.cards[1]["mig"] = False, True
    pair.write_cards()
    pair.wait_ready(0)
    pair.until(lambda: not pair.host.daemons(pair.pipe(1)) and pair.mode(1) == "Default")


@pytest.mark.parametrize("driver", ["535", "595"])
def test_other_drivers_come_up_too(node, monkeypatch, driver):
    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", driver)
    node.bind("pod", 0, 8138)
    node.start(driver=f"{driver}.1")
    node.wait_ready(memory_limit=MiB(8138))
    assert node.status().multi_user == (driver == "595")
    assert node.status().max_clients == (60 if driver == "595" else 48)


def test_an_option_that_the_program_does_not_take_is_left_out(node, monkeypatch):
    """The table says 580, the program is of another mind: it prints its help, and ends with rc 0."""
    monkeypatch.setenv("CARDWISE_DOUBLE_DRIVER", "580")
    monkeypatch.setenv("CARDWISE_DOUBLE_REFUSES", "-multiuser-server")
    node.start(driver="580.95.05")
    node.wait_ready()
    assert not node.status().multi_user


def test_there_is_one_manager_for_a_root(folder):
    first, second = ManagerLock(folder), ManagerLock(folder)
    first.acquire()
    with pytest.raises(RootLocked):
        second.acquire()
    assert mpsfiles.is_manager_running(folder)
    first.release()
    assert not mpsfiles.is_manager_running(folder), "and asking held nothing"
    second.acquire()
    assert not second.is_lost()
    (folder / mps.LOCK_FILE).unlink()
    assert second.is_lost()
    ManagerLock(folder).release()
    assert second.is_lost(), "another one's is there"
    second.release()
