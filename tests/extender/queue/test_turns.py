"""After a time without an extender: pods that were refused in that time are retried in order, and get the capacity
freed for them.
"""

import pytest

from cardwise.core.values.refusals import Refusal
from extender.api import verbs
from extender.records.wire import FilterArgs
from tests.build import asking
from tests.extender.gangcluster import World as GangWorld
from tests.extender.gangcluster import member
from tests.extender.preemption.test_preemption import HALF, HIGH, LOW, PREFERENCES, World
from tests.extender.states import as_pod


def turned_away(world: World, pod: dict) -> None:
    """A pod whose filter call failed; a nomination, if it had one, was removed."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}
    world.show_pod(pod | {"status": {"phase": "Pending", "conditions": [condition]}})


@pytest.fixture
def world() -> World:
    """An epoch has begun; one card is full, the other was freed for `high` while no extender served calls."""
    new_world = World()
    for name in ("a0", "b0"):
        new_world.runs(name, HALF, 0)
    turned_away(new_world, new_world.wants("high"))
    with new_world.state.queue() as queue:
        queue.begin_retry_window()
    return new_world


def low(world: World, priority: int = LOW) -> list[str]:
    return world.filter(world.wants("low", HALF, priority=priority))


def test_a_label_of_the_same_name_refuses_no_pod():
    world = World()
    pod = world.wants("high")
    pod["metadata"]["labels"] = {"x": "SchedulerError", "y": "Unschedulable"}
    record = as_pod(pod)
    assert (record.turned_away, record.refused) == (None, False)


def test_a_pod_of_lower_priority_waits_until_it_has_come(world):
    assert low(world) == []
    assert world.filter(world.wants("high")) == ["n1"]
    assert low(world) == [], "the card is planned for it now"


def test_the_reason_is_said_and_makes_nobody_be_evicted(world):
    args = FilterArgs(pod=world.wants("low", HALF, priority=LOW), node_names=["n1"])
    answer = verbs.filter_nodes(world.state, PREFERENCES, args)
    assert answer.failed_and_unresolvable_nodes == {"n1": Refusal.NOT_ITS_TURN.text}


@pytest.mark.parametrize("priority", [HIGH, HIGH + 1])
def test_one_that_does_not_come_after_it_need_not_wait(world, priority):
    assert low(world, priority) == ["n1"]


def test_it_is_over_after_a_while(world):
    world.clock.advance(12.0)
    assert low(world) == ["n1"]


def test_it_is_over_when_the_pod_is_gone_or_waits_for_another_reason(world):
    pod = world.wants("high")
    world.show_pod(
        pod | {"status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "reason": "Unschedulable"}]}}
    )
    assert low(world) == ["n1"]


def test_a_pod_that_was_not_refused_delays_no_other():
    world = World()
    world.show_pod(world.wants("high"))
    with world.state.queue() as queue:
        queue.begin_retry_window()
    assert low(world) == ["n1"]


@pytest.mark.parametrize("change", ["it has a gate", "its scheduler does not call"])
def test_a_pod_that_is_never_tried_delays_no_other(change):
    """A user who may write the status of his pods can write any reason into it."""
    world = World()
    forged = world.wants("high")
    if change == "it has a gate":
        forged["spec"]["schedulingGates"] = [{"name": "example.com/gate"}]
    else:
        forged["spec"]["schedulerName"] = "none"
    turned_away(world, forged)
    with world.state.queue() as queue:
        queue.begin_retry_window()
    assert low(world) == ["n1"]


def test_no_pod_waits_in_the_middle_of_an_epoch(world):
    world.clock.advance(100.0)
    turned_away(world, world.wants("other"))
    assert low(world) == ["n1"]


@pytest.mark.parametrize("change", ["came", "gone", "in time"])
def test_deferred_pods_are_requeued(world, change):
    assert low(world) == []
    world.state.next_requeue_node()  # for the cards, which are new
    world.clock.advance(3.0)
    world.state.expire_reservations()
    assert world.state.next_requeue_node() is None
    if change == "came":
        world.filter(world.wants("high"))
    elif change == "gone":
        world.delete_pod("high")
    else:
        world.clock.advance(9.0)
    world.state.expire_reservations()
    assert world.state.next_requeue_node() is not None


def test_a_gang_of_lower_priority_waits_as_well():
    world = GangWorld({"n1": 1})
    first = asking("first", gpu_mem=100)
    first["spec"]["priority"] = HIGH
    first["status"] = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "reason": "SchedulerError"}]}
    world.state.set_pod(as_pod(first))
    world.create(*(member(f"g{i}", minimum=2, created=i, gated=False, gpu_mem=100) for i in range(2)))
    with world.state.queue() as queue:
        queue.begin_retry_window()
    assert world.schedule("g0") == Refusal.GANG_WAITS.text
    world.clock.advance(12.0)
    world.state.expire_reservations()
    for name in ("g0", "g1"):
        assert world.schedule(name) == ""
    world.settle()
    assert len(world.bound()) == 2
