"""Pods with card requests that were bound without the extender are deleted, and no other pods."""

import math

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment
from cardwise.kube import paths
from extender.controllers.directbinds import DirectBindController
from extender.records.podinfo import PodRecord
from tests.build import P100, asking, container, shares
from tests.extender.controllers.deletingcluster import PODS, DeletingCluster
from tests.extender.gangcluster import member
from tests.extender.states import as_pod, with_cards
from tests.fakes.apiserver import Fault

LEGACY = {names.IDX: "0", names.POD_MEM: "100", names.DEV_MEM: str(P100), names.ASSIGNED: "false"}
RUNNING, WAITING = {"running": {}}, {"waiting": {"reason": "CreateContainerConfigError"}}


class World(DeletingCluster):
    def __init__(self):
        super().__init__(DirectBindController, cards=1)

    def add_pod(self, name="p", pod=None, *, node="n1", annotations=None, statuses=(), phase="Pending"):
        pod = pod or asking(name, gpu_mem=100)
        pod["metadata"]["annotations"] = (pod["metadata"].get("annotations") or {}) | (annotations or {})
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": phase, "containerStatuses": list(statuses)}
        self.api.write_object(paths.pods(), pod)
        self.see(name)

    def see(self, name="p"):
        known = as_pod(self.api.get(f"{PODS}/{name}"))
        if isinstance(known, PodRecord):
            self.state.set_pod(known)
        else:
            self.state.set_pod_without_request(f"default/{name}", known)


@pytest.fixture
def world():
    return World()


def test_it_is_deleted_within_seconds_with_one_event(world):
    world.add_pod()
    world.step()
    assert world.remaining_pods() == []
    assert world.events.summaries() == [("p", "BoundWithoutExtender", "Warning")]
    sent = world.api.sent("delete", "*/p")[0]
    assert sent.body["gracePeriodSeconds"] == 1, "nothing that it runs beside keeps it"


def test_a_member_of_a_gang_and_one_that_asks_for_a_device_go_too(world):
    of_gang = member("g", gpu_mem=100)
    of_gang["spec"].pop("schedulingGates", None)
    world.add_pod("g", of_gang)
    world.add_pod("d", asking("d", resource_class="nic"))
    world.step()
    assert world.remaining_pods() == []


def test_what_runs_beside_the_container_that_waits_keeps_it_no_longer(world):
    pod = asking("p")
    pod["spec"]["containers"] = [container("plain"), container("main", gpu_mem=100, share=1)]
    world.add_pod(
        pod=pod,
        phase="Running",
        statuses=[{"name": "plain", "state": RUNNING}, {"name": "main", "state": WAITING}],
    )
    world.step()
    assert world.remaining_pods() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"statuses": [{"name": "main", "state": RUNNING}], "phase": "Running"},
        {"statuses": [{"name": "main", "state": WAITING, "lastState": {"terminated": {}}}]},
        {"node": "elsewhere"},
        {"annotations": LEGACY},
        {"annotations": LEGACY | {names.IDX: "-1"}},
        {"annotations": {names.MIRROR: "x"}},
        {"annotations": assignment.encode(Assignment({"0": shares(100, 0)}), assume_time_ns=1)},
    ],
    ids=["runs", "ran", "on a node without cards", "of gpushare", "unreadable", "static", "placed"],
)
def test_what_has_started_is_placed_or_is_not_ours_stays(world, fields):
    world.add_pod(**fields)
    world.step()
    assert world.remaining_pods() == ["p"]
    assert world.events.all == []


def test_what_the_webhook_leaves_alone_stays(world):
    pod = asking("p", gpu_mem=100)
    del pod["spec"]["containers"][0]["resources"]["limits"][names.SHARE]
    world.add_pod(pod=pod)
    world.step()
    assert world.remaining_pods() == ["p"]


def test_a_node_that_gets_its_cards_later_is_looked_at_then(world):
    world.add_pod(node="n2")
    world.step()
    assert world.remaining_pods() == ["p"]
    with_cards(world.state, n2=1)
    world.step()
    assert world.remaining_pods() == []


def test_a_standby_leaves_it_to_the_leader(world):
    world.leads = False
    world.add_pod()
    world.step()
    assert world.remaining_pods() == ["p"]
    world.leads = True
    world.step()
    assert world.remaining_pods() == []


def test_what_starts_while_it_is_looked_at_stays(world):
    world.add_pod()
    running = {"phase": "Running", "containerStatuses": [{"name": "main", "state": RUNNING}]}
    world.api.before_request(lambda _: world.api.edit(f"{PODS}/p", status=running), "delete", "*/p")
    world.step()
    assert world.remaining_pods() == ["p"]


@pytest.mark.parametrize("annotations", [LEGACY, LEGACY | {names.IDX: "-1"}], ids=["of gpushare", "unreadable"])
def test_what_is_placed_before_it_is_looked_at_stays(world, annotations):
    world.add_pod()
    world.api.before_request(lambda _: world.api.edit(f"{PODS}/p", metadata={"annotations": annotations}), "get", "*/p")
    world.step()
    assert world.remaining_pods() == ["p"]


def test_another_of_the_same_name_stays(world):
    world.add_pod()
    world.api.remove(f"{PODS}/p")
    world.api.write_object(paths.pods(), asking("p", uid="another", gpu_mem=100))
    world.step()
    assert world.remaining_pods() == ["p"]


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=429), Fault(refused=True)], ids=str)
def test_what_fails_is_tried_again_less_and_less_often(world, fault):
    world.add_pod()
    refused = world.api.fault(fault, "delete", times=math.inf)
    world.step(120)
    assert world.remaining_pods() == ["p"]
    assert 2 <= len(world.api.sent("delete", "*/p")) <= 20
    refused.end()
    world.step(60)
    assert world.remaining_pods() == []
    assert len(world.events.all) == 1


def test_a_slow_one_keeps_others_of_the_thread_waiting_for_a_moment_only(world):
    for i in range(10):
        world.add_pod(f"p{i}")
    world.api.before_request(lambda _: world.clock.advance(1.0), "get", times=math.inf)
    world.controller.step()
    world.clock.advance(3.0)
    began = world.clock.now()
    world.controller.step()
    assert world.clock.now() - began <= 4.0
    world.step(20)
    assert world.remaining_pods() == []


def test_completed_pods_are_not_checked_again(world):
    world.add_pod()
    world.state.remove_pod(as_pod(world.api.get(f"{PODS}/p")))
    world.step()
    assert world.api.requests == []
