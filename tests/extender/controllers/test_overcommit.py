"""Overcommitted cards: the later pod is deleted if it has not started."""

import math

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.kube import paths
from extender.controllers.overcommit import OvercommitController
from tests.build import P100, asking, extended_resource, reported_share
from tests.extender.controllers.deletingcluster import PODS, DeletingCluster
from tests.extender.states import as_card, as_pod
from tests.fakes.apiserver import Fault

CARD = "GPU-n1-0"


class World(DeletingCluster):
    def __init__(self):
        super().__init__(OvercommitController, cards=2)

    def add_pod(
        self,
        name,
        mem=P100,
        *,
        at=0,
        phase="Pending",
        containers="waiting",
        index=0,
        seen=True,
        devices=(),
        node="n1",
    ):
        """Add a pod that was bound in the second `at`."""
        assigned = Assignment(
            {"main": (CardShare(index, f"GPU-n1-{index}", mem, 0, P100),)} if mem else {},
            {"main": tuple(AssignedDevice("nic", uuid) for uuid in devices)} if devices else {},
        )
        pod = asking(name, gpu_mem=mem, annotations=assignment.encode(assigned, assume_time_ns=at))
        pod["spec"]["nodeName"] = node
        condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": f"2026-11-22T10:00:{at:02}Z"}
        containers = [{"name": "main", "state": {containers: {}}}]
        pod["status"] = {"phase": phase, "conditions": [condition], "containerStatuses": containers}
        self.api.write_object(paths.pods(), pod)
        if seen:
            self.see(name)

    def see(self, name):
        self.state.set_pod(as_pod(self.api.get(f"{PODS}/{name}")))


@pytest.fixture
def world():
    return World()


@pytest.fixture
def twice(world):
    """A card that two pods hold."""
    world.add_pod("early", at=1)
    world.add_pod("late", at=2)
    return world


def test_the_later_pod_is_deleted_with_an_event(twice):
    twice.step()
    assert twice.remaining_pods() == ["early"]
    assert twice.events.summaries() == [("late", "GPUOvercommitted", "Warning")]


def test_by_when_they_were_bound_whichever_is_seen_first(world):
    world.add_pod("late", at=2)
    world.add_pod("early", at=1)
    world.step()
    assert world.remaining_pods() == ["early"]


@pytest.mark.parametrize("change", [{"phase": "Running", "containers": "running"}, {"containers": "terminated"}])
def test_a_started_pod_stays(world, change):
    world.add_pod("early", at=1)
    world.add_pod("late", at=2, **change)
    world.step()
    assert world.remaining_pods() == ["late"]


def test_a_granted_pod_stays_and_no_pod_is_deleted_if_all_have_started(world):
    for at, name in enumerate(("early", "late")):
        world.add_pod(name, at=at)
        world.api.edit(f"{PODS}/{name}", metadata={"annotations": {names.ASSIGNED: "true"}})
    world.step()
    assert world.remaining_pods() == ["early", "late"]
    assert world.events.all == []


def test_no_more_go_than_need_to(world):
    world.add_pod("a", P100 // 2, at=1)
    world.add_pod("b", P100 // 4, at=2)
    world.add_pod("c", P100 // 2, at=3)
    world.add_pod("d", P100 // 2, at=4)
    world.add_pod("elsewhere", P100, at=5, index=1)
    world.step()
    assert world.remaining_pods() == ["a", "b", "elsewhere"]
    world.see("a")
    world.step()
    assert world.remaining_pods() == ["a", "b", "elsewhere"]


def test_a_card_that_is_full_is_left_alone(world):
    world.add_pod("a", P100 // 2, at=1)
    world.add_pod("b", P100 // 2, at=2)
    world.step()
    assert world.api.requests == []


def test_deleted_and_completed_pods_do_not_count(twice):
    twice.api.edit(f"{PODS}/early", status={"phase": "Succeeded"})
    twice.step()
    assert twice.remaining_pods() == ["early", "late"]


def test_a_device_is_given_once(world):
    world.add_pod("early", 0, at=1, devices=["nic-1"])
    world.add_pod("other", 0, at=2, devices=["nic-2"])
    world.add_pod("late", 0, at=3, devices=["nic-1"])
    world.step()
    assert world.remaining_pods() == ["early", "other"]


def test_a_standby_leaves_it_to_the_leader_and_does_it_when_it_leads(twice):
    twice.leads = False
    twice.step()
    assert twice.remaining_pods() == ["early", "late"]
    twice.leads = True
    twice.step()
    assert twice.remaining_pods() == ["early"]


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=429), Fault(refused=True)], ids=str)
def test_what_fails_is_tried_again_less_and_less_often(twice, fault):
    refused = twice.api.fault(fault, "create", "*/eviction", times=math.inf)
    for _ in range(30):
        twice.step()
    assert twice.remaining_pods() == ["early", "late"]
    assert 2 <= len(twice.api.sent("create", "*/eviction")) <= 20
    refused.end()
    for _ in range(10):
        twice.step()
    assert twice.remaining_pods() == ["early"]


def test_a_pod_that_started_just_after_the_suspicion_stays(twice):
    twice.controller.step()
    twice.api.edit(f"{PODS}/late", metadata={"annotations": {names.ASSIGNED: "true"}})
    twice.step()
    assert twice.remaining_pods() == ["late"]


def test_an_odd_time_of_another_scheduler_keeps_nothing_from_being_mended(twice):
    twice.api.edit(f"{PODS}/early", metadata={"annotations": {names.ASSUME_TIME: "1.7e18"}})
    twice.step()
    assert twice.remaining_pods() == ["early"]


def test_one_node_that_cannot_be_looked_at_keeps_no_other(twice, monkeypatch):
    look = twice.controller._check_node
    monkeypatch.setattr(twice.controller, "_check_node", lambda node: look(node) if node == "n1" else {}["odd"])
    monkeypatch.setattr(twice.state, "take_overcommitted_nodes", lambda: {"n0", "n1"})
    twice.step()
    assert twice.remaining_pods() == ["early"]
    assert set(twice.controller._check_times) >= {"n0"}, "and it is looked at again"


@pytest.mark.parametrize("address", [("", ""), ("default", "?limit=1"), ("default", "x/../../../../../version")])
def test_what_a_node_says_of_others_is_no_address(world, address):
    world.add_pod("early", P100 // 2, at=1)
    stray = reported_share("b7", P100) | dict(zip(("namespace", "name"), address, strict=True))
    world.state.set_card(*as_card(extended_resource(0, node="n1", reported=[stray])))
    world.step()
    assert [call.path for call in world.api.requests] == [f"{PODS}/early"]


@pytest.mark.parametrize("card_comes_last", [False, True])
def test_pods_of_the_former_name_of_a_node_hold_its_cards(world, card_comes_last):
    world.state.set_node("former")
    if card_comes_last:
        name, card = as_card(extended_resource(0))
        world.state.set_card(name, card._replace(node="n2"))
    world.add_pod("early", at=1, node="former", phase="Running", containers="running")
    world.add_pod("late", at=2)
    if card_comes_last:
        world.step()
        assert world.remaining_pods() == ["early", "late"]
        world.state.set_card(name, card)
    world.step()
    assert world.remaining_pods() == ["early"]


def test_no_node_gets_pods_of_another_node_evicted_by_what_it_reports(world):
    world.state.set_node("n2")
    world.add_pod("early", P100 // 2, at=1)
    world.add_pod("late", P100 // 2, at=2)
    world.state.remove_card(as_card(extended_resource(0))[0])
    world.state.set_card(
        *as_card(extended_resource(0, mem=1) | {"spec": extended_resource(0, mem=1)["spec"] | {"node": "n2"}})
    )
    world.step()
    assert world.remaining_pods() == ["early", "late"]


def test_a_pod_of_gpushare_counts_on_the_card_of_its_index(world):
    annotations = {names.IDX: "0", names.POD_MEM: str(P100), names.DEV_MEM: str(P100), names.ASSIGNED: "true"}
    pod = asking("gpushare", gpu_mem=P100, annotations=annotations | {names.ASSUME_TIME: "1"})
    pod["spec"]["nodeName"], pod["status"] = "n1", {"phase": "Running"}
    world.api.write_object(paths.pods(), pod)
    world.see("gpushare")
    world.add_pod("late", at=2)
    world.step()
    assert world.remaining_pods() == ["gpushare"]


def test_a_pod_that_starts_during_the_check_stays(twice):
    running = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
    twice.api.before_request(lambda _: twice.api.edit(f"{PODS}/late", status=running), "create", "*/late/eviction")
    twice.step()
    twice.step()
    assert twice.remaining_pods() == ["late"]
