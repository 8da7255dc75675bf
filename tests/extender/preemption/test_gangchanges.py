"""A change during the search for a gang's victims has the same result as a change before it, at each step."""

from collections.abc import Callable

import pytest

from cardwise.core.api import assignment
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import Load
from cardwise.kube.pods.budgets import Budget, LabelCondition
from extender.cache import clusterview
from extender.preemption import preemption
from extender.records.nodeinfo import NodeRecord, PlacedPod
from tests.build import extended_resource, shares
from tests.extender.gangcluster import member, single
from tests.extender.preemption.test_gangpreemption import HIGH, LOW, Full, gang
from tests.extender.states import as_card, bound, on_victim_search

MAX_STEPS = 20


def due_world(size: int, **cards: list[int | None]) -> Full:
    """A world in which the extender itself is to evict for a gang, or for a single pod if `size` is 0."""
    world = Full(**cards)
    world.only = list(world.nodes)
    names = gang(world, size) if size else ["p"]
    if not size:
        world.create(single("p", priority=HIGH, whole_gpu=1))
    for name in names:
        world.filter(name)
    world.only = []
    world.clock.advance(4)
    return world


def own_victims(size: int, cards: dict[str, list[int | None]], change: Callable[[Full], object]) -> list[list[str]]:
    """The victims of the extender: first if the change comes before the search, then for each step of the search."""
    before = due_world(size, **cards)
    change(before)
    victims_by_step = [before.own()]
    for number in range(1, MAX_STEPS):
        world = due_world(size, **cards)
        steps = world.meanwhile(number, lambda world=world: change(world))
        victims = world.own()
        if len(steps) < number:
            return victims_by_step
        victims_by_step.append(victims)
    raise AssertionError("the search has more steps")


def evicted_for(make_world: Callable[[], Full], change: Callable[[Full], object]) -> list[dict[str, list[str]]]:
    """The answers to kube-scheduler for g0: first if the change comes before the call, then for each step."""
    before = make_world()
    victims_by_step = [before.asks("g0", before=lambda: change(before))]
    for number in range(1, MAX_STEPS):
        world = make_world()
        steps = world.meanwhile(number, lambda world=world: change(world))
        answer = world.asks("g0")
        if len(steps) < number:
            return victims_by_step
        victims_by_step.append(answer)
    raise AssertionError("the search has more steps")


def take_sms(world: Full) -> None:
    """A pod takes 60 % of the SMs of the card of n2, and little memory."""
    held = Assignment({"0": shares(1000, 0, core=60, node="n2")})
    pod = bound("late", 1000, 0, node="n2", annotations=assignment.encode(held, assume_time_ns=1))
    pod["spec"]["priority"] = HIGH
    world.show_pod(pod)


def take_clients(world: Full) -> None:
    """48 small shares come to the card of n2: MPS admits no further client."""
    for i in range(48):
        pod = bound(f"late{i}", 10, 0, node="n2")
        pod["spec"]["priority"] = HIGH
        world.show_pod(pod)


@pytest.mark.parametrize("change", [take_sms, take_clients])
def test_no_pod_is_evicted_if_the_card_of_another_member_takes_no_further_share(change):
    def make_world() -> Full:
        world = Full(n1=[LOW], n2=[None])
        fields = {"gated": False, "priority": HIGH, "gpu_mem": 4000, "gpu_core": 60}
        world.create(*(member(f"g{i}", "g", 2, created=i, **fields) for i in range(2)))
        return world

    victims_by_step = evicted_for(make_world, change)
    assert victims_by_step == [{}] * len(victims_by_step)
    assert len(victims_by_step) > 3
    assert make_world().asks("g0") == {"n1": ["n1-0"]}


def test_memory_of_a_node_that_is_overcommitted_is_no_obstacle_for_members_that_request_none():
    """As for kube-scheduler."""

    def make_world() -> Full:
        world = Full(n1=[LOW], n2=[None])
        world.state.set_node("n2", NodeRecord(Load(64_000, 1 << 30, 500)))
        world.state.set_pod_without_request("big", PlacedPod("n2", Load(1, 2 << 30, 1)))
        pods = [member(f"g{i}", "g", 2, gated=False, priority=HIGH, created=i, whole_gpu=1) for i in range(2)]
        for pod in pods:
            del pod["spec"]["containers"][0]["resources"]["requests"]["memory"]
        world.create(*pods)
        return world

    victims_by_step = evicted_for(
        make_world, lambda world: world.state.set_pod_without_request("o", PlacedPod("n2", Load(1, 0, 1)))
    )
    assert victims_by_step == [{"n1": ["n1-0"]}] * len(victims_by_step)


@pytest.mark.parametrize("end", [Full.delete, Full.terminate])
@pytest.mark.parametrize("gone", ["n2-0", "n2-1"])
@pytest.mark.parametrize("max_fewer_checks", [0, 3])
def test_no_pod_is_evicted_for_a_member_on_whose_node_a_card_becomes_free(monkeypatch, max_fewer_checks, gone, end):
    monkeypatch.setattr(preemption, "_MAX_FEWER_VICTIMS_CHECKS", max_fewer_checks)
    victims_by_step = own_victims(2, {"n1": [LOW], "n2": [LOW, LOW]}, lambda world: end(world, gone))
    assert [len(victims) for victims in victims_by_step] == [1] * len(victims_by_step)


@pytest.mark.parametrize("end", [Full.delete, Full.terminate])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_more_pods_are_evicted_than_needed_if_a_card_becomes_free_on_a_node_of_no_member(size, end):
    cards = {f"n{i}": [LOW] for i in range(size)} | {"x": [HIGH]}
    victims_by_step = own_victims(size, cards, lambda world: end(world, "x-0"))
    assert [len(victims) for victims in victims_by_step] == [size - 1] * len(victims_by_step)


@pytest.mark.parametrize("end", [Full.delete, Full.terminate])
@pytest.mark.parametrize(
    "cards",
    [
        pytest.param({"n1": [LOW], "x": [HIGH]}, id="a node without victims"),
        pytest.param({"n1": [LOW], "x": [LOW + 1]}, id="a node with a more important victim"),
        pytest.param({"n1": [LOW], "x": [LOW]}, id="a node with an equal victim"),
        pytest.param({"n1": [LOW], "x": [LOW + 1, LOW + 1]}, id="a node with several"),
    ],
)
def test_no_pod_is_evicted_for_a_single_pod_if_a_card_becomes_free_on_another_node(cards, end):
    victims_by_step = own_victims(0, cards, lambda world: end(world, "x-0"))
    assert len(victims_by_step) > 1
    assert victims_by_step == [[]] * len(victims_by_step)


def test_if_capacity_is_freed_all_the_time_a_gang_gets_victims_all_the_same():
    world = due_world(2, n1=[LOW], n2=[LOW], n3=[HIGH])
    world.on_step(
        lambda step: [
            world.state.set_pod_without_request("o", PlacedPod("n3", Load(step, 0, 1))),
            world.state.remove_pod_without_request("o"),
        ]
    )
    assert world.own() == ["n1-0", "n2-0"]


def test_if_cards_change_on_many_other_nodes_all_the_time_a_single_pod_gets_victims_all_the_same():
    """Each of these nodes may have to be searched again, which may take longer than the lock may be held."""
    world = due_world(0, n1=[LOW], **{f"x{i:02}": [HIGH] for i in range(60)})
    locked = []

    def search(_: object) -> None:
        locked.append(world.state._lock._lock.locked())
        if locked[-1]:
            world.clock.worked += 0.001
        elif len(locked) == 61:
            for i in range(60):
                world.state.set_card(*as_card(extended_resource(0, node=f"x{i:02}", health="Unhealthy")))

    on_victim_search(world.state, search)
    assert world.own() == ["n1-0"]
    assert 0 < sum(locked) < 10


@pytest.mark.parametrize("size", [0, 2])
def test_a_pod_that_is_refused_again_during_the_search_gets_victims_all_the_same(size, monkeypatch):
    """Each refusal draws other nodes, if kube-scheduler offers many."""
    monkeypatch.setattr(preemption, "_MAX_NODES", 4)
    world = due_world(size, **{f"n{i:02}": [LOW] for i in range(40)})

    def refuse_again() -> None:
        world.only = list(world.nodes)
        assert [world.filter(f"g{i}" if size else "p")[0] for i in range(max(1, size))] == [[]] * max(1, size)
        world.only = []

    world.meanwhile(2, refuse_again)
    assert len(world.own()) == max(1, size)


def test_after_the_search_a_refusal_draws_other_nodes(monkeypatch):
    monkeypatch.setattr(preemption, "_MAX_NODES", 4)
    world = due_world(0, **{f"n{i:02}": [LOW] for i in range(40)})
    assert len(world.own()) == 1
    samples = set()
    for _ in range(20):
        world.only = list(world.nodes)
        world.filter("p")
        samples.add(world.state._queue.preemption_nodes("uid-p"))
    assert len(samples) > 1


@pytest.mark.parametrize("size", [0, 1])
def test_a_search_that_fails_is_charged(size, monkeypatch):
    world = due_world(size, n1=[LOW])

    def fail(_: object) -> None:
        world.clock.worked += 1.0
        raise RuntimeError("planted")

    on_victim_search(world.state, fail)
    with pytest.raises(RuntimeError, match="planted"):
        world.own()
    with world.state.queue() as queue:
        assert queue._search_pauses.is_paused("default")


def test_a_budget_that_covers_no_pod_of_the_gangs_nodes_is_no_reason_to_search_again():
    """Also if it changes at each step, and is of the victims' namespace."""
    world = Full(**{f"n{i:02}": [LOW] for i in range(20)})
    gang(world, 20)
    elsewhere = (LabelCondition("place", "In", frozenset(["elsewhere"])),)
    steps = world.on_step(
        lambda step: world.state.preemption.set_budget("default/b", Budget("default", step, elsewhere))
    )
    assert len(world.asks("g0")) == 1
    assert steps.count("plan") < 10


def test_only_so_many_labels_are_compared_with_a_changed_budget(monkeypatch):
    """Afterwards each pod of the budget's namespace counts as covered, and its node is searched again."""

    def count_steps(max_labels: int) -> int:
        monkeypatch.setattr(clusterview, "_MAX_COMPARED_LABELS", max_labels)
        world = Full(**{f"n{i:02}": [LOW] for i in range(10)})
        gang(world, 10)
        elsewhere = Budget("default", 0, (LabelCondition("place", "In", frozenset(["elsewhere"])),))
        steps = world.meanwhile(3, lambda: world.state.preemption.set_budget("default/b", elsewhere))
        assert len(world.asks("g0")) == 1
        return len(steps)

    assert count_steps(max_labels=2000) < count_steps(max_labels=3)
