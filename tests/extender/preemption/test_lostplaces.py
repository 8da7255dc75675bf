"""A member of a gang whose reserved place is lost gets other victims; cards of a nominated pod are found once."""

import pytest

from cardwise.core.api.request import Load
from extender.records.nodeinfo import NodeRecord
from tests.build import extended_resource
from tests.extender.gangcluster import single
from tests.extender.preemption.test_gangpreemption import HIGH, LOW, Full, gang
from tests.extender.preemption.test_snapshots import reserve_for_gang
from tests.extender.states import as_card

CHANGES = {
    "the card fails": lambda world: world.state.set_card(*as_card(extended_resource(0, node="n1", health="Unhealthy"))),
    "the node goes": lambda world: world.state.remove_node("n1"),
    "another pod takes it": lambda world: world.runs("daemon", 0, "n1", HIGH),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_member_whose_place_is_lost_gets_other_victims_at_once(size, change):
    world = Full(n1=[LOW], n2=[LOW], n3=[LOW])
    gang(world, size)
    assert world.preempts("g0") == ["n1-0"]
    world.ended()
    CHANGES[change](world)
    assert len(world.asks("g0")) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_member_whose_node_is_cordoned_while_its_victim_ends_for_ever_gets_other_victims(size):
    world = Full(n1=[LOW], n2=[LOW], n3=[LOW])
    gang(world, size)
    assert world.preempts("g0") == ["n1-0"]
    world.state.set_node("n1", NodeRecord(Load(64_000, 512 << 30, 500), schedulable=False))
    del world.nodes["n1"]  # kube-scheduler does not offer the node
    for _ in range(14):
        if world.asks("g0"):
            return
        world.clock.advance(5)
        world.state.expire_reservations()
        world.keep()
    pytest.fail("no other victims within 70 s")


@pytest.mark.parametrize("step", range(1, 6))
def test_no_pod_is_evicted_if_the_place_of_another_member_is_reserved_for_an_earlier_gang_during_the_search(step):
    world = Full(n1=[LOW], n2=[None])
    gang(world, 2)
    steps = world.meanwhile(step, lambda: reserve_for_gang(world, "n2"))
    assert world.asks("g0") == {} or len(steps) < step


def test_the_card_of_a_nominated_pod_is_not_reserved_for_a_second_pod():
    """Another extender has answered the preemption of the pod `other`."""
    world = Full(n1=[LOW, LOW])
    world.nominated_other("n1")
    world.terminate("n1-1")
    world.create(single("p", created=10, priority=HIGH, whole_gpu=1))
    assert world.asks("p") == {"n1": ["n1-0"]}
    world.nominated("p", "n1")
    world.terminate("n1-0")
    world.ended()
    world.create(single("late", created=20, priority=LOW, whole_gpu=1))
    world.only = ["n1"]
    assert world.filter("late")[0] == []
