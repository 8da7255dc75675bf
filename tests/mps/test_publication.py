"""What the manager tells the cluster, and what it leaves to the device plugin to say."""

import math
from dataclasses import replace

import pytest

from cardwise.core.api.mps import DaemonScope, MpsState, Status
from cardwise.kube import paths
from mps.publication import MpsStatusPublisher
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock
from tests.mps.mpsnode import NODE, uuid_of

RESOURCES = "/apis/cardwise.dev/v1alpha1/extendedresources"
# As deviceplugin.publish.stalemps puts it there.
GONE = {
    "state": "Down",
    "reason": "the node's MPS manager is gone or hangs",
    "lastTransitionTime": "2026-11-21T10:00:00Z",
}


class Cluster:
    """The objects of a node's cards, and what is to be told of them by UUID."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.statuses: dict[str, Status] = {}
        client = self.api.client(clock=self.clock)
        self.publication = MpsStatusPublisher(client, NODE, lambda: dict(self.statuses), self.clock)
        self.add(0)

    def add(self, index: int, node: str = NODE, **status: object) -> None:
        metadata = {"name": uuid_of(index).lower(), "labels": {"cardwise.dev/node": NODE}}
        self.api.write_object(
            RESOURCES,
            {"metadata": metadata, "spec": {"uuid": uuid_of(index), "index": index, "node": node}, "status": status},
        )

    def set_status(self, index: int = 0, *, age: float = 0.0, state: MpsState = MpsState.READY) -> None:
        """From now on; looked at so many seconds ago."""
        self.statuses[uuid_of(index)] = Status(
            uuids=(uuid_of(index),),
            scope=DaemonScope.CARD,
            state=state,
            checked=self.clock.now() - age,
            valid_seconds=12.0,
        )
        self.publication.wake()

    def path(self, index: int = 0) -> str:
        return paths.extendedresources(uuid_of(index).lower())

    def published(self, index: int = 0) -> dict[str, object]:
        return (self.api.get(self.path(index)) or {}).get("status", {}).get("mps") or {}

    def reconcile(self) -> "Cluster":
        """Both threads wait: for news from the API server, and for something to tell it."""
        self.clock.until_waiting(2)
        return self

    def later(self) -> "Cluster":
        """When it looks again though nobody has woken it."""
        self.clock.step(2)
        return self.reconcile()

    def state(self, index: int = 0) -> object:
        return self.reconcile().published(index).get("state")


@pytest.fixture
def cluster():
    cluster = Cluster()
    cluster.publication.start()
    yield cluster
    cluster.publication.stop()
    cluster.api.close()


def test_no_object_of_another_node_is_written(cluster):
    """It carries this node's label, which its node can write where no policy forbids it."""
    cluster.add(1, node="n9")
    cluster.set_status(1)
    cluster.set_status(0)
    assert (cluster.state(0), cluster.state(1)) == ("Ready", None)
    assert cluster.api.sent("patch", f"{cluster.path(1)}/status") == []


def test_an_object_that_comes_later_or_is_made_anew_is_told(cluster):
    cluster.set_status(0)
    cluster.set_status(1)
    assert (cluster.state(0), cluster.state(1)) == ("Ready", None)
    cluster.add(1)
    assert cluster.state(1) == "Ready"
    cluster.api.remove(cluster.path())
    cluster.add(0)
    assert cluster.state() == "Ready"


def test_the_api_server_is_told_of_changes_only(cluster):
    cluster.set_status(0)
    cluster.reconcile()
    for _ in range(5):
        cluster.later().set_status(0)  # the daemon was asked a moment ago, and all is as before
        cluster.reconcile()
    assert len(cluster.api.sent("patch")) == 1
    cluster.set_status(0, state=MpsState.FAULT)
    assert cluster.state() == "Fault"
    assert len(cluster.api.sent("patch")) == 2


def test_what_the_api_server_does_not_take_is_said_and_told_again(cluster):
    cluster.api.fault(Fault(status=500), "patch", times=2)
    cluster.set_status(0)
    cluster.reconcile()
    assert "failed to publish the MPS statuses of this node" in cluster.publication.problem
    assert cluster.later().state() is None
    assert cluster.later().state() == "Ready"
    assert not cluster.publication.problem


def test_a_card_whose_object_cannot_be_written_does_not_keep_the_others_untold(cluster):
    """Another node may have taken its name, so that this one may not write it."""
    cluster.add(1)
    cluster.api.fault(Fault(status=403), "patch", f"{cluster.path()}/*", times=math.inf)
    cluster.set_status(0)
    cluster.set_status(1)
    assert cluster.reconcile().later().state(1) == "Ready"
    assert "403" in cluster.publication.problem


def test_its_last_word_is_told_before_it_ends(cluster):
    cluster.set_status(0)
    assert cluster.state() == "Ready"
    cluster.statuses[uuid_of(0)] = replace(cluster.statuses[uuid_of(0)], state=MpsState.DOWN)
    cluster.publication.stop()
    assert cluster.published()["state"] == "Down"


def test_a_manager_that_is_there_again_writes_over_what_was_said_in_its_absence(cluster):
    cluster.set_status(0)
    cluster.reconcile().api.edit(cluster.path(), status={"mps": GONE})
    assert cluster.state() == "Ready"
    assert cluster.published()["reason"] == ""


def test_one_that_does_not_look_at_a_card_any_more_contradicts_nobody_until_it_does(cluster):
    cluster.set_status(0)
    assert cluster.state() == "Ready"
    cluster.statuses[uuid_of(0)] = replace(cluster.statuses[uuid_of(0)], checked=cluster.clock.now() - 60.0)
    cluster.api.edit(cluster.path(), status={"mps": GONE})
    cluster.add(1)
    cluster.set_status(1, age=60.0, state=MpsState.FAULT)
    assert cluster.state(1) == "Fault", "a state in which nothing starts"
    assert cluster.later().state() == "Down"
    cluster.statuses[uuid_of(0)] = replace(cluster.statuses[uuid_of(0)], checked=cluster.clock.now())
    assert cluster.later().state() == "Ready", "and nobody woke it"
