"""Cards that do not answer NVML: what other cards, and clients of a former manager, notice of it."""

import pytest
from structlog.testing import capture_logs

from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import CardError, ComputeMode
from cardwise.gpus.simulated import SimulatedGpus
from mps.daemon import computemode
from tests.mps.mpsnode import Cards, uuid_of


@pytest.fixture
def shared(make_node):
    """One daemon for two cards, with a pod on each."""
    node = make_node(scope=DaemonScope.NODE)
    node.bind("first", 0, 4096)
    node.bind("second", 1, 8138)
    node.start()
    node.wait_ready(0, memory_limit=MiB(4096))
    node.wait_ready(1, memory_limit=MiB(8138))
    return node


def test_the_daemon_of_the_node_stays_ready_for_the_other_card(shared):
    shared.lost.add(uuid_of(0))
    for _ in range(300):
        shared.step_all()
        assert shared.status().state is MpsState.READY


def test_and_is_started_again_after_it_died(shared):
    shared.lost.add(uuid_of(0))
    shared.daemon().kill()
    shared.until(lambda: shared.problem(1))
    shared.wait_ready(1, memory_limit=MiB(8138))
    assert shared.mode(1) == "ExclusiveProcess"


def test_a_card_that_somebody_opened_is_closed_again(shared):
    shared.lost.add(uuid_of(0))
    shared.gpus.set_compute_mode(uuid_of(1), ComputeMode.DEFAULT)
    shared.pass_time(20.0)
    assert shared.mode(1) == "ExclusiveProcess"


def test_a_card_that_comes_back_open_is_closed(shared):
    shared.lost.add(uuid_of(0))
    SimulatedGpus(shared.cards_file).set_compute_mode(uuid_of(0), ComputeMode.DEFAULT)  # by a reset
    shared.pass_time(20.0)
    shared.lost.clear()
    shared.pass_time(20.0)
    assert shared.mode(0) == "ExclusiveProcess"


def test_who_came_past_mps_on_the_other_card_is_found_out(shared):
    shared.lost.add(uuid_of(0))
    for process in [*shared.servers(), shared.daemon()]:
        process.kill()
    thief = shared.use(1, 300, "second")
    shared.until(lambda: f"process {thief.pid} (python) of pod default/second" in shared.status().reason)
    assert shared.status().state is MpsState.DOWN


def test_the_other_card_is_opened_when_mps_is_off_and_this_one_when_it_answers(shared):
    shared.lost.add(uuid_of(0))
    for name, index in (("first", 0), ("second", 1)):
        shared.end(name)
        shared.bind(f"{name}-plain", index, 4096, without_mps=True)
    shared.until(lambda: not shared.problem(1, required_state=MpsState.OFF))
    assert (shared.mode(0), shared.mode(1)) == ("ExclusiveProcess", "Default")
    shared.lost.clear()
    shared.pass_time(5.0)
    assert shared.mode(0) == "Default"


def test_where_no_card_answers_none_is_called_closed(pair, tmp_path):
    use = Cards(pair.cards_file, {uuid_of(0), uuid_of(1)})
    with pytest.raises(CardError, match="GPU is lost"):
        computemode.are_closed(use, [uuid_of(0)])
    with pytest.raises(CardError, match="GPU is lost"):
        computemode.close_cards(tmp_path, use, [uuid_of(0)])


def test_the_next_manager_keeps_the_daemon_of_the_node_for_the_clients_of_the_other_card(shared):
    daemon, client = shared.daemon(), shared.add_client(1, "second")
    shared.crash()
    shared.lost.add(uuid_of(0))
    shared.start()
    shared.wait_ready(1, memory_limit=MiB(8138))
    shared.pass_time(60.0)
    assert shared.send_command("get_default_device_pinned_mem_limit 1") == "8G"
    shared.bind("third", 1, 9216)
    shared.wait_ready(1, memory_limit=MiB(9216))
    assert shared.send_command("get_default_device_pinned_mem_limit 0") == "4G", "of the card that does not answer"
    shared.lost.clear()
    shared.pass_time(60.0)
    shared.wait_ready(0, memory_limit=MiB(4096))
    assert shared.daemon() == daemon
    assert client.is_alive()
    assert not (shared.log() / "terminated").exists()


def test_a_manager_that_stops_meanwhile_leaves_the_daemon_to_the_pods_of_that_card(shared):
    daemon = shared.daemon()
    shared.crash()
    shared.end("second")
    shared.lost.add(uuid_of(0))
    shared.start()
    shared.wait_ready(1)
    shared.stop()
    assert daemon.is_alive()


def test_a_daemon_that_is_started_meanwhile_serves_the_cards_that_answer(shared):
    shared.crash()
    shared.lost.add(uuid_of(0))
    shared.start()
    shared.wait_ready(1)
    with capture_logs() as logs:
        shared.daemon().kill()
        shared.until(lambda: shared.problem(1))
        shared.until(lambda: shared.status().uuids == (uuid_of(1),))
        shared.wait_ready(1, memory_limit=MiB(8138))
    (server,) = shared.servers()
    assert any(line["event"].endswith(f"fake server {server.pid} for devices {uuid_of(1)}") for line in logs)
    shared.lost.clear()
    shared.wait_ready(0, memory_limit=MiB(4096))
    shared.wait_ready(1, memory_limit=MiB(8138))


def test_the_next_manager_does_not_take_a_silent_card_for_one_that_is_not_served(pair):
    pair.bind("pod", 0, 8138)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    daemon, (server,), client = pair.daemon(0), pair.servers(0), pair.add_client(0, "pod")
    pair.crash()
    pair.lost.add(uuid_of(0))
    pair.start()
    pair.wait_ready(1)
    pair.pass_time(30.0)
    assert pair.mode(0) == "ExclusiveProcess"
    pair.lost.clear()
    pair.wait_ready(0, memory_limit=MiB(8138))
    assert pair.daemon(0) == daemon
    assert pair.servers(0) == [server]
    assert client.is_alive()


def test_what_is_not_served_is_ended_when_all_cards_have_answered(make_node):
    node = make_node(cards=3)
    node.start()
    for index in range(3):
        node.wait_ready(index)
    leftover = node.daemon(1)
    node.crash()
    node.lost.add(uuid_of(0))
    node.start(cards="0,2")
    node.pass_time(30.0)
    assert leftover.is_alive(), "nobody knows yet which cards there are"
    node.lost.clear()
    node.until(lambda: not leftover.is_alive())
    node.wait_ready(0)
    assert node.mode(1) == "Default"


@pytest.mark.parametrize(
    ("before", "after"), [(DaemonScope.CARD, DaemonScope.NODE), (DaemonScope.NODE, DaemonScope.CARD)]
)
def test_beside_a_silent_card_the_scope_can_be_changed(pair, before, after):
    pair.start(scope=before)
    pair.wait_ready(1)
    pair.stop()
    pair.lost.add(uuid_of(0))
    pair.start(scope=after)
    pair.wait_ready(1)


def test_where_no_card_answers_at_the_start_the_daemon_of_the_node_goes_on(shared):
    before = shared.daemon()
    shared.crash()
    shared.lost |= {uuid_of(0), uuid_of(1)}
    shared.start()
    shared.pass_time(30.0)
    assert shared.daemon() is before
    shared.lost.clear()
    shared.wait_ready(1, memory_limit=MiB(8138))
    assert shared.daemon() is before


def test_a_drained_card_has_no_process_of_mps_for_its_reset_once_the_manager_has_stopped(pair):
    """`nvidia-smi --gpu-reset` refuses a GPU that a process uses (docs/reference/cards.md)."""
    pair.bind("drained", 0, 8138)
    pair.bind("stays", 1, 4096)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1)
    neighbour = pair.daemon(1)
    pair.end("drained")
    pair.stop()
    assert (pair.host.daemons(pair.pipe(0)), pair.servers(0)) == ([], [])
    assert pair.mode(0) == "Default"
    pair.bind("next", 0, 9216)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(9216))
    assert pair.mode(0) == "ExclusiveProcess"
    assert pair.daemon(1) == neighbour


def test_after_a_reset_under_its_pods_a_card_has_mps_again_with_their_limits(pair):
    """As by a driver that recovers a GPU: what used it is gone, and its compute mode is that of a new GPU."""
    pair.bind("pod", 0, 8138)
    pair.bind("neighbour", 1, 4096)
    pair.start()
    pair.wait_ready(0, memory_limit=MiB(8138))
    pair.wait_ready(1, memory_limit=MiB(4096))
    before, neighbour, client = pair.daemon(0), pair.daemon(1), pair.add_client(1, "neighbour")
    pair.add_client(0, "pod")
    pair.lost.add(uuid_of(0))
    for process in [*pair.servers(0), before]:
        process.kill()
    pair.end_clients(0)
    SimulatedGpus(pair.cards_file).set_compute_mode(uuid_of(0), ComputeMode.DEFAULT)
    pair.until(lambda: pair.problem(0), "nothing starts there")
    pair.pass_time(60.0)
    assert pair.problem(0), "before it answers"
    pair.lost.clear()
    pair.wait_ready(0, memory_limit=MiB(8138))
    assert pair.mode(0) == "ExclusiveProcess"
    assert pair.send_command("get_default_device_pinned_mem_limit 0") == "8G"
    assert (pair.daemon(0) != before, pair.daemon(1) == neighbour, client.is_alive()) == (True, True, True)
