"""Clients of pods that end: detached before their grace is over, at once, or past their deadline."""

import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from mps import cgroups
from mps.cgroups import Membership
from tests.mps.worlds import Node, eventually


@pytest.fixture
def whose(monkeypatch):
    """PID -> UID of its pod, instead of the machine's own cgroups."""
    table: dict[int, str] = {}
    monkeypatch.setattr(cgroups, "of", lambda pid: (Membership(table[pid], "c"),) if pid in table else ())
    return table


def beside_another(node: Node, whose: dict[int, str], name: str) -> subprocess.Popen[bytes]:
    """The client of this pod on a card that a second pod with a client shares, which is to stay."""
    node.bind(name, 0, 2048)
    node.bind("staying", 0, 2048)
    node.start()
    node.wait_ready()
    mine, other = node.add_client(), node.add_client()
    whose |= {mine.pid: f"uid-{name}", other.pid: "uid-staying"}
    return mine


def test_clients_of_an_ending_pod_are_detached_before_its_grace_is_over(node, whose):
    mine = beside_another(node, whose, "ending")
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    end = {"deletionTimestamp": in_a_minute.isoformat(), "deletionGracePeriodSeconds": 60}
    node.change_pod("ending", {"metadata": end})
    eventually(lambda: any(pod.ends for pod in node.manager.pods.all()))
    node.manager._detach_ending()
    terminated = node.home() / "log" / "terminated"
    assert not terminated.exists(), "it has its grace"
    node.change_pod("ending", {"metadata": {"deletionTimestamp": datetime.now(UTC).isoformat()}})
    eventually(terminated.exists)
    assert terminated.read_text().split() == [str(mine.pid)]


def test_clients_of_a_pod_that_is_deleted_by_force_are_detached_at_once(node, whose):
    mine = beside_another(node, whose, "forced")
    eventually(lambda: len(node.manager._endings._living) == 2, "the manager knows them")
    node.end("forced")
    terminated = node.home() / "log" / "terminated"
    eventually(lambda: terminated.exists() and terminated.read_text())
    eventually(lambda: not node.manager._endings.vanished, "and it is done with")
    assert terminated.read_text().split() == [str(mine.pid)]


def test_clients_of_a_pod_that_is_past_its_deadline_are_detached(node, whose):
    mine = beside_another(node, whose, "late")
    long_ago = {"status": {"startTime": "2026-01-01T00:00:00Z"}, "spec": {"activeDeadlineSeconds": 60}}
    node.change_pod("late", long_ago)
    terminated = node.home() / "log" / "terminated"
    eventually(lambda: terminated.exists() and terminated.read_text())
    assert set(terminated.read_text().split()) == {str(mine.pid)}
