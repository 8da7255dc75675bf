"""Clients of pods that end: detached before their grace is over, at once, or past their deadline."""

import signal
from datetime import timedelta

import pytest

from cardwise.core.api.mps import MpsState
from cardwise.kube import paths
from mps.host.control import CommandRefused, Control
from tests.mps.hosts import FakeProcess
from tests.mps.mpsnode import Node


def beside_another(node: Node, name: str) -> FakeProcess:
    """The client of this pod on a card that a second pod with a client shares, which is to stay."""
    node.bind(name, 0, 2048)
    node.bind("staying", 0, 2048)
    node.start()
    node.wait_ready()
    node.add_client(pod="staying")
    return node.add_client(pod=name)


def terminated(node: Node, index: int = 0) -> list[str]:
    file = node.log(index) / "terminated"
    return file.read_text().split() if file.exists() else []


def test_clients_of_an_ending_pod_are_detached_before_its_grace_is_over(node):
    mine = beside_another(node, "ending")
    node.delete("ending")
    node.pass_time(56.5)
    assert not terminated(node), "it has its grace"
    node.pass_time(1.0)
    assert terminated(node) == [str(mine.pid)]


@pytest.mark.parametrize("ahead", [-3600, 30, 61, 3600])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_pod_on_a_node_whose_clock_is_wrong_has_its_grace(node, ahead, restarted):
    """Also from a manager that starts meanwhile."""
    mine = beside_another(node, "ending")
    node.step_all()
    now = node.clock.wall()
    node.delete("ending")
    node.clock.set_wall(now + timedelta(seconds=ahead))
    node.api.time_behind = timedelta(seconds=ahead)
    if restarted:
        node.pass_time(10.0)
        node.crash()
        node.start()
    node.pass_time(45.0 if restarted else 55.5)  # deletions are written to the second
    assert not terminated(node), "it has its grace"
    node.pass_time(3.0)
    assert terminated(node) == [str(mine.pid)]


def test_one_that_opens_the_card_after_that_is_detached_too(node):
    first = beside_another(node, "ending")
    node.delete("ending")
    node.until(lambda: terminated(node))
    second = node.add_client(pod="ending")
    node.until(lambda: terminated(node) == [str(first.pid), str(second.pid)])


def test_clients_of_a_pod_that_is_deleted_by_force_are_detached_at_once(node):
    mine = beside_another(node, "forced")
    node.step_all()
    node.end("forced")
    node.pass_time(1.0)
    assert terminated(node) == [str(mine.pid)]
    node.until(lambda: not node.manager._terminating_pods.force_deleted, "and it is done with")
    assert terminated(node) == [str(mine.pid)]


def test_clients_of_a_pod_that_is_past_its_deadline_are_detached(node):
    mine = beside_another(node, "late")
    yesterday = (node.clock.wall() - timedelta(days=1)).isoformat()
    node.api.edit(paths.pods("default", "late"), status={"startTime": yesterday}, spec={"activeDeadlineSeconds": 60})
    node.pass_time(1.0)
    assert set(terminated(node)) == {str(mine.pid)}


def test_a_client_that_has_just_ended_keeps_no_other_one_of_its_pod_on_the_server(node, monkeypatch):
    gone, second = beside_another(node, "forced"), node.add_client(pod="forced")
    terminate = Control.terminate

    def not_found(control, client):
        if client.pid == gone.pid:
            raise CommandRefused(f"terminate_client {client.server} {client.pid}: not found")
        terminate(control, client)

    monkeypatch.setattr(Control, "terminate", not_found)
    node.step_all()
    node.end("forced")
    node.manager.reconcile()
    assert terminated(node) == [str(second.pid)]
    assert node.manager._terminating_pods.force_deleted, "it is asked once more whether the first one is gone"
    gone.kill()
    node.manager.reconcile()
    assert not node.manager._terminating_pods.force_deleted


def test_a_pod_whose_daemon_is_silent_for_a_moment_is_not_forgotten(node):
    mine = beside_another(node, "forced")
    node.step_all()
    daemon = node.daemon()
    daemon.signal(signal.SIGSTOP)
    node.end("forced")
    node.manager.reconcile()
    assert not terminated(node)
    daemon.signal(signal.SIGCONT)
    node.manager.reconcile()
    assert terminated(node) == [str(mine.pid)]


def test_a_frozen_daemon_takes_no_time_from_pods_on_other_cards(pair):
    """Who has a card can keep its daemon silent, and others have seconds."""
    pair.bind("ending", 1, 2048)
    pair.start()
    pair.wait_ready(1)
    mine = pair.add_client(1, "ending")
    pair.step_all()
    pair.daemon(0).signal(signal.SIGSTOP)
    pair.end("ending")
    began = pair.clock.now()
    pair.manager.reconcile()
    assert terminated(pair, 1) == [str(mine.pid)]
    assert pair.clock.now() == began, "it was not asked"


def test_one_that_does_not_answer_is_asked_last_and_once_however_many_pods_end_on_its_card(pair):
    for name, index in (("first", 0), ("second", 0), ("ending", 1)):
        pair.bind(name, index, 2048)
    pair.start()
    pair.wait_ready(0)
    pair.wait_ready(1)
    mine = pair.add_client(1, "ending")
    pair.step_all()
    pair.daemon(0).signal(signal.SIGSTOP)
    pair.until(lambda: pair.status(0).state is MpsState.DOWN)
    for name in ("first", "second", "ending"):
        pair.end(name)
    waits = []
    pair.clock.live = lambda: waits.append(terminated(pair, 1))
    pair.manager.reconcile()
    assert waits == [[str(mine.pid)]]
