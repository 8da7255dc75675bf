"""What the manager tells the cluster, and what it leaves to the device plugin to say."""

from dataclasses import replace

import pytest

from cardwise.core.mps import Scope, State, Status
from cardwise.gpus import mpsnode
from cardwise.kube.client import KubeClient
from mps.publication import Publication
from tests.mps.worlds import NODE, RESOURCES, eventually, uuid_of

LONG_AGO = 5000.0  # seconds
# As deviceplugin.mpssaid puts it there.
GONE = {"state": "Down", "reason": "the node's MPS manager is gone or hangs", "lastChange": "2026-11-21T10:00:00Z"}


@pytest.fixture
def told(node):
    """The statuses of the node's cards by UUID; changed by tests, published at once."""
    statuses = {}
    client = KubeClient(node.api.url)
    publication = Publication(client, NODE, lambda: dict(statuses))
    publication.start()
    yield statuses, publication
    publication.stop()
    client.close()


def status(index=0, *, age=0.0, state=State.READY):
    # Valid for so long that a machine under load does not make it stale.
    return Status(
        uuids=(uuid_of(index),), scope=Scope.CARD, state=state, checked=mpsnode.now() - age, valid_seconds=600.0
    )


def overwritten(node, index=0):
    """By the device plugin."""
    found = node.api.get(RESOURCES, uuid_of(index).lower())
    found["status"]["mps"] |= GONE
    node.api.put(RESOURCES, found)


def test_a_manager_that_is_there_again_writes_over_what_was_said_in_its_absence(node, told):
    statuses, publication = told
    statuses[uuid_of(0)] = status()
    publication.wake()
    eventually(lambda: node.told().get("state") == "Ready", timeout=60)
    overwritten(node)
    eventually(lambda: node.told()["state"] == "Ready", timeout=60)
    assert node.told()["reason"] == ""


def test_one_that_does_not_look_at_a_card_any_more_contradicts_nobody_until_it_does(node, told):
    statuses, publication = told
    statuses[uuid_of(0)] = status()
    publication.wake()
    eventually(lambda: node.told().get("state") == "Ready", timeout=60)
    statuses[uuid_of(0)] = replace(statuses[uuid_of(0)], checked=mpsnode.now() - LONG_AGO)
    overwritten(node)
    node.add_resource(1)
    statuses[uuid_of(1)] = status(1, age=LONG_AGO, state=State.FAULT)
    publication.wake()
    eventually(lambda: node.told(1).get("state") == "Fault", "a state in which nothing starts is told", timeout=60)
    assert node.told()["state"] == "Down"
    statuses[uuid_of(0)] = status()  # and nobody wakes it
    eventually(lambda: node.told()["state"] == "Ready", timeout=60)
