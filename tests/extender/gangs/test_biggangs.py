"""Gangs of many pods, and many gangs: what one event or call does does not grow with them."""

import pytest

from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangs import MAX_REQUEST_KINDS
from extender.gangs.gangqueue import GANGS_BEFORE_NEXT_NAMESPACE
from extender.gangs.gangtypes import PlannedNode
from tests.build import P100
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_pod, bound
from tests.working import work


def crowd(count):
    """A gang of two with many pods beside those."""
    world = World({"n1": 2})
    world.create(*(member(f"g{i:04}", minimum=2, created=i) for i in range(count)))
    return world


def ungated(world):
    pod = world.pods["g0007"]
    del pod["spec"]["schedulingGates"]
    world.show_pod(pod)


def deleted_pods(world):
    world.delete("g0007")


def added(world):
    world.create(member("new", minimum=2, created=3000))


def ended(world):
    world.terminate("g0007")


@pytest.mark.parametrize("event", [ungated, deleted_pods, added, ended])
def test_an_event_of_a_member_costs_the_same_in_a_gang_of_thousands(event):
    steps = []
    for count in (50, 1000):
        world = crowd(count)
        with work() as done:
            event(world)
        steps.append(done.steps)
    small, big = steps
    assert big < 1.5 * small


def test_of_thousands_some_are_shown_to_the_scheduler_at_a_time():
    world = crowd(1200)
    world.keep()
    shown = [name for name, pod in world.pods.items() if "schedulingGates" not in pod["spec"]]
    assert shown[:2] == ["g0000", "g0001"]
    assert len(shown) < 600
    for _ in range(2):
        world.keep()
    assert not any("schedulingGates" in pod["spec"] for pod in world.pods.values())


def test_what_pods_that_are_gone_have_asked_for_is_forgotten():
    world = World({"n1": 2})
    world.create(*(member(f"g{i}", minimum=2, gpu_mem=100) for i in range(2)))
    for i in range(MAX_REQUEST_KINDS + 1):
        world.create(member("other", minimum=2, gpu_mem=200 + i))
        world.delete("other")
    world.run(3)
    assert set(world.bound()) == {"g0", "g1"}


def greedy(count, **options):
    """Gangs of one tenant that come before all others and never fit, since no card is wholly free."""
    world = World({"n1": 2}, max_waiting=1000, **options)
    for card in range(2):
        world.state.set_pod(as_pod(bound(f"r{card}", 100, card)))
    first = {"cardwise.dev/queue-priority": "999999999"}
    for gang in range(count):
        pods = (
            member(f"e{gang:03}-{i}", f"e{gang:03}", 2, namespace="evil", gated=False, annotations=first, gpu_mem=P100)
            for i in range(2)
        )
        world.create(*pods)
    return world


def asks(world, count):
    for gang in range(count):
        world.state.gangs.filter_member(f"uid-e{gang:03}-0", ["n1"])


def test_a_thousand_gangs_of_one_tenant_are_not_all_looked_at_before_one_of_another(monkeypatch):
    steps = []
    for count in (2 * GANGS_BEFORE_NEXT_NAMESPACE, 10 * GANGS_BEFORE_NEXT_NAMESPACE):
        world = greedy(count)
        asks(world, count)
        world.state._cache.capacity.mark_freed()  # so that each may fit again
        world.create(*(member(f"v{i}", "v", 2, namespace="other", gated=False, gpu_mem=100) for i in range(2)))
        with work() as done:
            assert world.state.gangs.filter_member("uid-v0", ["n1"]) == PlannedNode("n1")
        steps.append(done.steps)
    small, large = steps
    assert large < 1.5 * small


def test_a_pass_plans_another_tenants_gang_before_all_of_one(monkeypatch):
    world = greedy(2 * GANGS_BEFORE_NEXT_NAMESPACE)
    asks(world, 2 * GANGS_BEFORE_NEXT_NAMESPACE)
    world.create(*(member(f"v{i}", "v", 2, namespace="other", created=9, gated=False, gpu_mem=P100) for i in range(2)))
    world.filter("v0")
    world.clock.advance(10)
    world.state._cache.capacity.mark_freed()
    planned = []
    plan_gang = world.state.gangs._plan_gang

    def recorded(gang, pace):
        planned.append(gang.name)
        return plan_gang(gang, pace)

    monkeypatch.setattr(world.state.gangs, "_plan_gang", recorded)
    world.keep()
    assert planned.index("v") == GANGS_BEFORE_NEXT_NAMESPACE
    assert len(planned) == 2 * GANGS_BEFORE_NEXT_NAMESPACE + 1, "the others are planned after it"


def test_a_plan_costs_little_more_among_many_nodes_that_have_no_room():
    """Only the generations of nodes are compared."""
    steps = []
    for count in (50, 500):
        nodes = {f"n{i:03}": NodeSpec(1, mem=100) for i in range(count)}
        world = World({**nodes, "z": NodeSpec(4)}, max_waiting=1000)
        for gang in "ab":
            pods = (member(f"{gang}{i}", gang, 2, gated=False, gpu_mem=P100) for i in range(2))
            world.create(*pods)
        for _ in range(6):
            world.filter("a0")
        assert world.phase("a") == "Reserved", "by now all nodes were looked at"
        offered = list(world.nodes)
        with work() as done:
            assert world.state.gangs.filter_member("uid-b0", offered) == PlannedNode("z")
        steps.append(done.steps)
    small, large = steps
    assert large - small < 10 * (500 - 50)


def test_a_new_leader_plans_what_is_bound_in_part_first(monkeypatch):
    halves = 4
    world = World({f"n{i}": 2 for i in range(halves)}, max_waiting=1000)
    for gang in range(halves):
        world.create(*(member(f"h{gang}{i}", f"h{gang}", 2, gated=False, created=gang, gpu_mem=P100) for i in range(2)))
        for i in range(2):
            world.schedule(f"h{gang}{i}")
        world.settle(only=f"h{gang}0")
    plan, planned = gangplan.plan, []

    def recorded(ledger, nodes, members, terms, pace):
        planned.append(members[0].name)
        return plan(ledger, nodes, members, terms, pace)

    monkeypatch.setattr(gangplan, "plan", recorded)
    world.restart()
    assert planned == ["h01", "h11", "h21", "h31"]


@pytest.mark.parametrize("seconds", [0.5, 100])
def test_before_an_epoch_only_so_much_time_goes_into_that(seconds, monkeypatch):
    """The Lease is ours meanwhile, and no pod is placed. A gang may take long, or many gangs some time each."""
    world = World({f"n{i}": 1 for i in range(40)}, max_waiting=1000)
    for i in range(20):
        world.create(*(member(f"h{i}-{j}", f"h{i}", 2, gated=False, created=i, gpu_mem=P100) for j in range(2)))
        for j in range(2):
            world.schedule(f"h{i}-{j}")
        world.settle(only=f"h{i}-0")
    plan = gangplan.plan

    def slow(ledger, nodes, members, terms, pace):
        for _ in range(10):
            world.clock.worked += seconds / 10
            world.clock.advance(seconds / 10)
            pace()
        return plan(ledger, nodes, members, terms, pace)

    monkeypatch.setattr(gangplan, "plan", slow)
    began = world.clock.now()
    world.restart()
    assert world.clock.now() - began < 3.5 + seconds / 10


def test_a_gang_of_many_sizes_that_cannot_fit_is_not_planned(monkeypatch):
    plans = []
    monkeypatch.setattr(gangplan, "plan", lambda *args: plans.append(args))
    world = World({"n1": 4, "n2": 4})
    # Each size has room on all eight cards, but no two members on one card.
    sizes = [P100 // 2 + 1 + i for i in range(MAX_REQUEST_KINDS)]
    world.create(*(member(f"g{i:02}", minimum=MAX_REQUEST_KINDS, gpu_mem=size) for i, size in enumerate(sizes)))
    world.keep()
    world.filter("g00")
    world.keep()
    assert world.reason().startswith("no node has capacity for")
    assert not plans


def test_equal_requests_of_members_are_one_object():
    world = World({"n1": 2})
    world.create(*(member(f"g{i}", minimum=8, gpu_mem=1024 + i % 2) for i in range(8)))
    assert (
        len({id(member_of_gang.request) for member_of_gang in world.state.gangs.gang_of("uid-g0").members.values()})
        == 2
    )


def test_a_pod_that_comes_and_goes_touches_no_node_for_gangs_that_wait():
    world = World({"n1": 4})
    for gang in ("a", "b"):
        world.create(*(member(f"{gang}{i}", gang, 6, gpu_mem=P100) for i in range(6)))
    world.run(5)
    for _ in range(5):
        world.create(single("small", gpu_mem=1))
        world.run(2)
        assert "small" in world.bound()
        world.state.next_requeue_node()
        world.delete("small")
        world.clock.advance(3.0)
        world.keep()
        assert world.state.next_requeue_node() is None


def test_gangs_that_wait_are_tried_again_when_one_fits():
    world = World({"n1": 4})
    world.create(*(single(f"busy{i}", gpu_mem=P100) for i in range(4)))
    world.run()
    world.create(*(member(f"g{i}", minimum=4, gpu_mem=P100) for i in range(4)))
    world.run(5)
    for i in range(4):
        assert world.state.next_requeue_node() is None
        world.delete(f"busy{i}")
        world.clock.advance(3.0)
        world.keep()
    assert world.state.next_requeue_node() == "n1"
