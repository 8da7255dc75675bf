"""Clients of pods that end: detached before their grace is over, at once, or past their deadline."""

from datetime import timedelta

from cardwise.kube import paths
from tests.mps.hosts import FakeProcess
from tests.mps.worlds import Node


def beside_another(node: Node, name: str) -> FakeProcess:
    """The client of this pod on a card that a second pod with a client shares, which is to stay."""
    node.bind(name, 0, 2048)
    node.bind("staying", 0, 2048)
    node.start()
    node.wait_ready()
    node.add_client(pod="staying")
    return node.add_client(pod=name)


def terminated(node: Node) -> list[str]:
    file = node.log() / "terminated"
    return file.read_text().split() if file.exists() else []


def test_clients_of_an_ending_pod_are_detached_before_its_grace_is_over(node):
    mine = beside_another(node, "ending")
    node.delete("ending")
    node.pass_time(56.5)
    assert not terminated(node), "it has its grace"
    node.pass_time(1.0)
    assert terminated(node) == [str(mine.pid)]


def test_one_that_opens_the_card_after_that_is_detached_too(node):
    first = beside_another(node, "ending")
    node.delete("ending")
    node.until(lambda: terminated(node))
    second = node.add_client(pod="ending")
    node.until(lambda: terminated(node) == [str(first.pid), str(second.pid)])


def test_clients_of_a_pod_that_is_deleted_by_force_are_detached_at_once(node):
    mine = beside_another(node, "forced")
    node.turn()
    node.end("forced")
    node.pass_time(1.0)
    assert terminated(node) == [str(mine.pid)]
    node.until(lambda: not node.manager._terminations.vanished, "and it is done with")
    assert terminated(node) == [str(mine.pid)]


def test_clients_of_a_pod_that_is_past_its_deadline_are_detached(node):
    mine = beside_another(node, "late")
    yesterday = (node.clock.wall() - timedelta(days=1)).isoformat()
    node.api.edit(paths.pods("default", "late"), status={"startTime": yesterday}, spec={"activeDeadlineSeconds": 60})
    node.pass_time(1.0)
    assert set(terminated(node)) == {str(mine.pid)}
