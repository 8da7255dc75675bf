"""Gangs by PodGroups of Kubernetes: who counts, what a group without a minimum is, and what happens when it goes."""

import json

import pytest

from cardwise.core.api import names
from cardwise.core.gangs.gangs import ForeignPodGroup, PodGroupSpec
from extender.records import podinfo
from extender.records.nodeinfo import PlacedPod
from tests.build import P100
from tests.extender.gangcluster import World, member

NATIVE = ForeignPodGroup.KUBERNETES


def native(name, **spec):
    pod = member(name, minimum=None, created=int(name[-1]), **{"gpu_mem": P100} | spec)
    del pod["metadata"]["annotations"][names.GROUP_NAME]
    pod["spec"]["schedulingGroup"] = {"podGroupName": "g"}
    return pod


def aside(world, name, **changes):
    """A pod of the group that asks for nothing: none of ours."""
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}"} | changes.pop("meta", {})
    spec = {"containers": [{"name": "c"}], "schedulingGroup": {"podGroupName": "g"}} | changes.pop("spec", {})
    record = podinfo.decode_pod(json.dumps({"metadata": meta, "spec": spec, "status": changes}).encode())
    if record is None:
        world.state.remove_pod_without_request(f"default/{name}")
        return None
    assert type(record[1]) is PlacedPod
    world.state.set_pod_without_request(*record)
    return record[1]


def minimum(world):
    return next(view.minimum for view in world.state.gangs.views())


@pytest.fixture
def world():
    return World({"n1": 2, "n2": 1})


def test_its_minimum_is_the_groups_and_nobody_starts_before(world):
    world.create(native("a0"), native("a1"), native("a2"))
    world.run(2)
    assert world.phase() == "Pending"
    assert "PodGroup g (scheduling.k8s.io/v1beta1), which does not exist" in world.reason()
    assert world.state.gangs.foreign_groups() == [(NATIVE, "default/g")]
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=3))
    world.run(3)
    assert world.phase() == "Running"
    assert len(world.bound()) == 3


def test_one_that_fits_nowhere_keeps_all_waiting(world):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=3))
    world.create(native("a0"), native("a1"), native("a2", selector={"zone": "nowhere"}))
    world.run(5)
    assert world.bound() == {}


def test_pods_that_ask_for_nothing_count_and_are_left_alone(world):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=4))
    assert aside(world, "ps-0").node == ""
    world.create(native("a0"), native("a1"))
    world.run(2)
    assert (world.phase(), minimum(world)) == ("Pending", 3)
    aside(world, "ps-1")
    world.run(2)
    assert (world.phase(), len(world.bound())) == ("Running", 2)


@pytest.mark.parametrize(
    "gone",
    [{"meta": {"deletionTimestamp": "2026-11-21T10:00:00Z"}}, {"phase": "Succeeded"}, {"phase": "Failed"}, None],
    ids=["ending", "done", "failed", "deleted"],
)
def test_pods_that_ask_for_nothing_count_while_they_are_there(world, gone):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=3))
    world.create(native("a0"))
    aside(world, "ps-0")
    aside(world, "ps-0", spec={"nodeName": "n1"}, phase="Running")
    assert minimum(world) == 2
    aside(world, "ps-1")
    assert minimum(world) == 1
    aside(world, "ps-2")
    assert minimum(world) == 1, "a gang has one member at least"
    aside(world, "ps-2", phase="Succeeded")
    if gone is None:
        world.state.remove_pod_without_request("default/ps-1")
    else:
        aside(world, "ps-1", **gone)
    assert minimum(world) == 2


def test_a_member_that_came_while_nobody_gated_counts(world):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=3))
    early = native("a2")
    early["metadata"]["labels"] = {}
    world.create(native("a0"), native("a1"), early)
    assert minimum(world) == 2
    world.delete("a2")
    assert minimum(world) == 3


def test_a_basic_group_is_no_gang(world):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(basic=True))
    world.create(native("a0"), native("a1"), native("a2"), native("a3"))
    refusals = world.run(2)
    assert len(world.bound()) == 3
    assert refusals.keys() == {"a3"}
    assert "gang" not in refusals["a3"].lower()
    assert world.state.gangs.views() == []
    assert set(world.state.gangs.phase_counts().values()) == {0}
    assert world.groups == {}


def test_a_group_that_goes_while_it_waits_ends_its_plan_and_may_come_again(world):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=3))
    world.create(native("a0"), native("a1"), native("a2"))
    world.keep()
    world.schedule("a0")
    assert world.phase() == "Reserved"
    world.state.gangs.set_foreign_group(NATIVE, "default/g", None)
    assert (world.phase(), world.unbound_shares()) == ("Pending", 0)
    world.settle()
    assert world.bound() == {}
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(basic=True))
    assert world.phase() == ""
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=3))
    world.run(5)
    assert world.phase() == "Running"
    world.state.gangs.set_foreign_group(NATIVE, "default/g", None)
    assert world.phase() == "Running"


def test_our_podgroup_of_that_name_does_not_say_how_many(world):
    """kube-scheduler starts the group with no fewer than its own minimum."""
    world.put_group("g", minMember=1)
    world.create(native("a0"))
    assert world.phase() == "Pending"
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=2))
    assert minimum(world) == 2


def test_pods_that_name_it_in_two_ways_wait_and_say_so(world):
    world.state.gangs.set_foreign_group(NATIVE, "default/g", PodGroupSpec(minimum=2))
    world.create(native("a0"), native("a1"), member("b0", minimum=2, gpu_mem=P100))
    world.run(2)
    assert world.bound() == {}
    assert world.reason() == "some of its pods name it by spec.schedulingGroup, others by annotation or label"
    world.delete("b0")
    world.run(2)
    assert world.phase() == "Running"
