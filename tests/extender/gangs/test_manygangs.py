"""Many waiting gangs: no call plans for long, the lock is free while gangs are planned, and their order is kept all the
same.
"""

from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from cardwise.core.gangs import gangplan
from extender.cache.pacing import LOCKED_SECONDS
from extender.cache.statelock import StateLock
from extender.gangs import gangplanner
from extender.gangs.gangplaces import _ERROR_SECONDS
from extender.gangs.gangplanner import GangPlanner
from extender.gangs.gangs import _CALL_SECONDS, Gangs
from tests.build import P100
from tests.extender.gangcluster import World, member, single

GANGS = 6


@pytest.fixture
def plans(monkeypatch):
    """The gangs that were planned, in order; each plan costs more than a call may."""
    done: list[str] = []
    plan = gangplan.plan

    def costly(ledger, nodes, members, terms, pace):
        assert not worlds[0].state._lock._lock.locked(), "other calls wait"
        done.append(members[0].name[:2])
        planned = plan(ledger, nodes, members, terms, pace)
        worlds[0].clock.worked += 2 * _CALL_SECONDS
        return planned

    worlds: list[World] = []
    monkeypatch.setattr(gangplan, "plan", costly)
    return done, worlds


def waiting(done, worlds, **options):
    """Gangs of two whole cards each that a full cluster keeps waiting; the planner knows what each was offered."""
    world = World({"n1": 2, "n2": 1}, max_waiting=1000, **options)
    worlds.append(world)
    world.create(*(member(f"x{i}", "x", 3, gpu_mem=P100) for i in range(3)))
    world.run(3)
    assert world.phase("x") == "Running"
    done.clear()
    for gang in range(GANGS):
        world.create(*(member(f"g{gang}{i}", f"g{gang}", 2, created=gang, gpu_mem=P100) for i in range(2)))
    world.keep()
    return world


def test_where_nothing_can_fit_nothing_is_planned(plans):
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(2)
    assert not done
    assert {world.phase(f"g{gang}") for gang in range(GANGS)} == {"Waiting"}


def test_a_call_for_the_last_gang_plans_no_longer_than_a_call_may_and_the_first_comes_first(plans):
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(1)
    for name in ("x0", "x1"):  # two cards become free
        world.delete(name)
    refusal = world.schedule(f"g{GANGS - 1}0")
    assert done == ["g0"]
    assert refusal is not None
    assert world.phase("g0") == "Reserved"


def plans_in_vain(monkeypatch, done, world):
    """The planner finds nothing, whatever the bound says."""

    def vain(ledger, nodes, members, terms, pace):
        done.append(members[0].name[:2])
        world.clock.worked += 2 * _CALL_SECONDS
        return gangplan.Unplanned(member=members[0])

    monkeypatch.setattr(gangplan, "plan", vain)


def test_a_pass_of_the_controller_plans_all_of_them_in_order_and_the_lock_is_free_between(plans, monkeypatch):
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(1)
    for name in ("x0", "x1"):
        world.delete(name)
    plans_in_vain(monkeypatch, done, world)
    holds, enter, leave = [], StateLock.__enter__, StateLock.__exit__

    def record_entry(lock):
        enter(lock)
        holds.append(world.clock.worked)

    def record_release(lock, *args):
        holds.append(world.clock.worked - holds.pop())
        leave(lock, *args)

    monkeypatch.setattr(StateLock, "__enter__", record_entry)
    monkeypatch.setattr(StateLock, "__exit__", record_release)
    world.clock.advance(10)
    world.keep()
    assert done == [f"g{gang}" for gang in range(GANGS)]
    assert max(holds) == 0, "no plan is made while the lock is held"


def test_plans_that_take_long_keep_no_gate_closed(plans, monkeypatch):
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(1)
    plans_in_vain(monkeypatch, done, world)
    plan = gangplan.plan

    def slow(*args):
        world.clock.advance(0.6)
        return plan(*args)

    monkeypatch.setattr(gangplan, "plan", slow)
    monkeypatch.setattr(GangPlanner, "find_unplaceable_member", lambda *_: None)
    world.state._cache.capacity.mark_freed()
    world.clock.advance(10)
    done.clear()
    world.keep()
    assert len(done) == 2, "a step begins no plan after a second"
    world.create(*(member(f"n{i}", "n", 2, gpu_mem=P100) for i in range(2)))
    world.keep()
    assert not any("schedulingGates" in pod["spec"] for pod in world.pods.values())


def test_a_plan_that_takes_longer_than_a_call_may_is_made_in_the_background(costly_members):
    world = World({"n1": 4}, max_waiting=1000)
    world.create(*(member(f"g0{i}", "g0", 3, gpu_mem=P100) for i in range(3)), single("s", gpu_mem=P100))
    costly_members(world)
    for i in range(3):
        del world.pods[f"g0{i}"]["spec"]["schedulingGates"]
        world.show_pod(world.pods[f"g0{i}"])
    assert world.schedule("g00") != ""
    assert (world.phase("g0"), world.unbound_shares()) == ("Waiting", 0)
    assert world.reason("g0") == "gangs are being planned"
    assert world.schedule("s") == ""
    world.clock.advance(1)
    world.keep()
    assert world.phase("g0") == "Reserved"
    world.run(3)
    assert set(world.bound()) == {"g00", "g01", "g02", "s"}
    with world.state.view() as ledger:
        assert ledger.violations() == []


@pytest.fixture
def costly_members(monkeypatch):
    """Return a function: in this world each member that a plan places costs as much as a call may plan."""
    put = gangplan._Attempt._add_member

    def make(world):
        def costly(*args):
            world.clock.worked += _CALL_SECONDS
            put(*args)

        monkeypatch.setattr(gangplan._Attempt, "_add_member", costly)

    return make


def test_beside_many_nodes_with_kept_cards_a_call_plans_no_longer_either(costly_members, monkeypatch):
    monkeypatch.setattr(gangplanner, "MAX_RESERVED_NODES", 0)
    world = World({"n1": 3, "n2": 1}, max_waiting=1000)
    world.create(single("other", priority=10, gpu_mem=P100))
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.pods["other"]["status"] |= {"nominatedNodeName": "n2", "conditions": [refused]}
    world.show_pod(world.pods["other"])
    world.create(*(member(f"g0{i}", "g0", 3, gated=False, gpu_mem=P100) for i in range(3)))
    costly_members(world)
    before = world.clock.worked
    assert world.schedule("g00") != ""
    assert world.clock.worked - before <= 2 * _CALL_SECONDS
    assert (world.phase("g0"), world.unbound_shares()) == ("Waiting", 0)
    world.keep()
    assert world.phase("g0") == "Reserved"


def test_a_gang_for_which_a_plan_has_cost_much_is_left_alone_for_a_moment_whatever_becomes_free(plans, monkeypatch):
    done, worlds = plans
    world = World({"n1": 2}, max_waiting=1000)
    worlds.append(world)

    plans_in_vain(monkeypatch, done, world)
    world.create(single("s0", gpu_mem=P100))
    world.run(1)
    world.create(member("a", "a", 1, gated=False, gpu_mem=P100))
    world.schedule("a")
    world.delete("s0")
    world.schedule("a")
    assert done == ["a"]
    world.clock.advance(0.5)
    world.schedule("a")
    assert done == ["a", "a"]


@pytest.fixture
def expensive(monkeypatch) -> tuple[World, list[str]]:
    """Gangs of namespace evil, whose plans cost a second and find nothing, and the list of these plans."""
    world, done, plan = World({"n1": 2}, max_waiting=1000), list[str](), gangplan.plan

    def vain(ledger, nodes, members, terms, pace):
        if not members[0].name.startswith("evil"):
            return plan(ledger, nodes, members, terms, pace)
        done.append(members[0].name)
        world.clock.worked += 1.0
        return gangplan.Unplanned(member=members[0])

    monkeypatch.setattr(gangplan, "plan", vain)
    for gang in range(3):
        create_offered(
            world, *(member(f"evil{gang}{i}", f"evil{gang}", 2, namespace="evil", gpu_mem=P100) for i in range(2))
        )
    done.clear()
    return world, done


def create_offered(world: World, *pods: dict) -> None:
    """Create members, and let kube-scheduler offer the nodes."""
    world.create(*pods)
    for pod in pods:
        world.filter(pod["metadata"]["name"])


def pass_seconds(world: World, seconds: int) -> None:
    """Capacity is freed in each second."""
    for _ in range(seconds):
        world.clock.advance(1)
        with world.state._lock:
            world.state._cache.capacity.mark_freed()
        world.keep()


def test_expensive_plans_of_one_namespace_take_a_tenth_of_the_time(expensive):
    """32 gangs of 500 members that fit nowhere kept a gang of two of another namespace waiting for minutes."""
    world, done = expensive
    pass_seconds(world, 60)
    assert 3 <= len(done) <= 7
    assert {name[:5] for name in done} == {"evil0", "evil1", "evil2"}
    create_offered(world, member("fair", "fair", 1, created=9, namespace="fair", gpu_mem=P100))
    pass_seconds(world, 1)
    assert world.phase("fair", namespace="fair") == "Reserved"


def test_a_gang_that_fits_has_its_turn_behind_expensive_ones_of_its_namespace(expensive):
    world, _ = expensive
    create_offered(world, member("small", "small", 1, created=9, namespace="evil", gpu_mem=P100))
    pass_seconds(world, 60)
    assert world.phase("small", namespace="evil") == "Reserved"


def test_a_new_leader_plans_a_big_gang_that_is_bound_in_part_and_the_lock_is_free_meanwhile(monkeypatch):
    world = World({f"n{i}": 1 for i in range(4)}, max_waiting=1000)
    world.create(*(member(f"g0{i}", "g0", 4, gated=False, gpu_mem=P100) for i in range(4)))
    for i in range(4):
        world.schedule(f"g0{i}")
    world.settle(only="g00")
    put, locked = gangplan._Attempt._add_member, []

    def recorded(*args):
        locked.append(world.state._lock._lock.locked())
        put(*args)

    monkeypatch.setattr(gangplan._Attempt, "_add_member", recorded)
    world.restart()
    assert locked == [False] * 3
    assert len(world.state.gangs.gang_of("uid-g01").plan) == 3
    world.run(3)
    assert world.phase("g0") == "Running"


@pytest.mark.parametrize("costs", [False, True])
def test_members_change_places_when_that_takes_no_longer_than_a_call_may(costly_members, costs):
    """kube-scheduler offers the first member the other member's node only: both must move."""
    world = World({"n1": 1, "n2": 1}, max_waiting=1000)
    world.create(*(member(f"g0{i}", "g0", 2, gpu_mem=P100 - i) for i in range(2)))
    world.keep()
    nodes, _ = world.filter("g00")
    (other,) = set(world.nodes) - set(nodes)
    offered = world.offered
    world.offered = lambda pod: [other] if pod["metadata"]["name"] == "g00" else offered(pod)
    if costs:
        costly_members(world)
    before = world.clock.worked
    assert (world.filter("g00")[0] == [other]) is not costs
    assert world.clock.worked - before <= 2 * _CALL_SECONDS
    world.clock.advance(60)
    world.run(4)
    assert world.bound()["g00"] == other
    assert world.phase("g0") == "Running"


@pytest.fixture
def at_first_plan(monkeypatch):
    """Gangs `a` and `c`, for which kube-scheduler has not called filter, come before `b`; all fit.

    Returns the world, and a function that sets what happens while `a` is planned.
    """
    world = World({"n1": 7}, max_waiting=1000)
    world.create(single("s", gpu_mem=P100))
    world.run(1)
    world.create(*(member(f"b{i}", "b", 7, created=1, gpu_mem=P100) for i in range(7)))
    world.run(2)
    for created, gang in enumerate("ac"):
        pods = [
            member(f"{gang}{i}", gang, 2, created=5 + created, priority=10, gated=False, gpu_mem=P100 // 2)
            for i in range(2)
        ]
        world.create(*pods)
    world.delete("s")
    plan, planned = GangPlanner.plan, []

    def set_change(change):
        def plan_then_change(planner, gang, members, *args, **kwargs):
            outcome = plan(planner, gang, members, *args, **kwargs)
            planned.append(members[0].name[0])
            if planned == ["a"]:
                change()
            return outcome

        monkeypatch.setattr(GangPlanner, "plan", plan_then_change)
        world.clock.advance(10)
        world.keep()
        return planned

    return world, set_change


def test_gangs_without_offers_come_in_their_order(at_first_plan):
    world, plan_with = at_first_plan
    assert plan_with(lambda: None)[:2] == ["a", "c"]
    assert (world.phase("a"), world.phase("c"), world.phase("b")) == ("Reserved", "Reserved", "Waiting")


def test_a_gang_that_is_deleted_during_a_pass_stops_nobody(at_first_plan):
    world, plan_with = at_first_plan
    assert "c" not in plan_with(lambda: world.delete("c0", "c1"))
    world.state.gangs.cancel_permits("it ends")


def test_a_gang_that_loses_a_member_during_a_pass_is_not_planned_without_it(at_first_plan):
    world, plan_with = at_first_plan
    assert "c" not in plan_with(lambda: world.delete("c1"))
    assert world.phase("c") == "Pending"


def test_a_gang_that_gets_a_plan_during_a_pass_keeps_it(at_first_plan):
    world, plan_with = at_first_plan
    assert plan_with(lambda: world.schedule("c0")).count("c") == 1
    assert world.schedule("c1") == ""
    world.settle()
    assert world.phase("c") == "Running"


def test_a_gang_that_comes_to_run_during_a_pass_is_not_planned_again(at_first_plan):
    world, plan_with = at_first_plan

    def run():
        for name in ("c0", "c1"):
            assert world.schedule(name) == ""
        world.settle()

    plan_with(run)
    assert world.phase("c") == "Running"
    assert set(world.state.gangs._permits) == {"default/a"}


def test_the_pause_after_a_costly_pass_ends_also_where_the_controller_comes_more_often_than_it_lasts(monkeypatch):
    world = World({"n1": 2})
    world.create(*(member(f"g{i}", gated=False, gpu_mem=P100) for i in range(3)))
    for i in range(3):
        world.filter(f"g{i}")
    rounds, wants_plan = list[float](), world.state.gangs._wants_plan

    def costly(*args):
        rounds.append(world.clock.now())
        world.clock.worked += 0.03
        return wants_plan(*args)

    monkeypatch.setattr(world.state.gangs, "_wants_plan", costly)
    for _ in range(100):
        world.state.gangs.step()
        world.state.gangs.plan_waiting()
        world.clock.advance(0.1)
    pauses = [later - earlier for earlier, later in pairwise(rounds)]
    assert len(rounds) > 20
    assert min(pauses) > 0.25  # ten times the cost
    assert max(pauses) < 0.45  # and then the next step of the controller


def test_calls_for_gangs_that_cannot_be_planned_plan_a_tenth_of_the_time_and_the_controller_goes_on(plans, monkeypatch):
    """Something becomes free all the time, so that each plan is worth a try, and kube-scheduler brings all members."""
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(1)
    done.clear()
    plans_in_vain(monkeypatch, done, world)
    monkeypatch.setattr(GangPlanner, "find_unplaceable_member", lambda *_: None)
    worked = world.clock.worked
    for call in range(1000):
        with world.state.view():
            world.state._cache.capacity.mark_freed()
        assert world.schedule(f"g{call % GANGS}0")
        world.clock.advance(0.001)
    assert 0.05 < world.clock.worked - worked < 0.15
    done.clear()
    for _ in range(20):
        world.state.gangs.step()
        world.state.gangs.plan_waiting()
        world.clock.advance(0.1)
    assert set(done) == {f"g{gang}" for gang in range(GANGS)}


@pytest.mark.parametrize(
    "visit_all",
    [Gangs.step, Gangs.views, Gangs.phase_counts, Gangs.foreign_groups, lambda gangs: gangs.cancel_permits("it ends")],
    ids=["step", "views", "phase_counts", "foreign_groups", "cancel_permits"],
)
def test_the_lock_is_free_from_time_to_time_while_all_gangs_are_visited(visit_all, monkeypatch):
    """One may have hundreds of members to ungate, to view, or to take out of its plan."""
    world = World({"n1": GANGS}, max_waiting=1000)
    world.create(*(member(f"g{i}", f"g{i}", 1, gated=False, gpu_mem=P100) for i in range(GANGS)))
    visits, enter = [], StateLock.__enter__

    class Costly(dict):
        def get(self, key, default=None):
            visits[-1].append(key)
            world.clock.worked += 2 * LOCKED_SECONDS
            return super().get(key, default)

    def counted(lock):
        visits.append([])
        enter(lock)

    monkeypatch.setattr(StateLock, "__enter__", counted)
    world.state.gangs._gangs = Costly(world.state.gangs._gangs)
    visit_all(world.state.gangs)
    assert [keys for keys in visits if keys] == [[f"default/g{i}"] for i in range(GANGS)]


def test_a_gang_that_ends_meanwhile_is_not_visited():
    world = World({"n1": GANGS}, max_waiting=1000)
    world.create(*(member(f"g{i}", f"g{i}", 1, gated=False, gpu_mem=P100) for i in range(3)))
    views, visit = [], world.state.gangs._visit_gangs

    def record_visit(gang):
        views.append(gang.name)
        world.clock.worked += 2 * LOCKED_SECONDS

    world.clock.sleep = lambda _: world.pods.get("g2") and world.delete("g2")
    visit(record_visit)
    assert views == ["g0", "g1"]


@pytest.mark.parametrize("caller", ["controller", "filter", "recover"])
def test_a_gang_whose_plan_fails_unexpectedly_stops_no_other_gang(caller, monkeypatch):
    world = World({"n1": 1, "n2": 1}, max_waiting=1000)
    world.create(*(single(f"x{i}", priority=5, gpu_mem=P100) for i in range(2)))
    world.run(1)
    for gang in ("bad", "g"):
        world.create(member(f"{gang}0", gang, 1, gated=False, gpu_mem=P100))
        assert world.filter(f"{gang}0")[0] == []
    find_unplaceable_member, tries = GangPlanner.find_unplaceable_member, []

    def fail_for_bad(planner, members, *args):
        if members[0].name == "bad0":
            tries.append(world.clock.now())
            raise RuntimeError("planted")
        return find_unplaceable_member(planner, members, *args)

    monkeypatch.setattr(GangPlanner, "find_unplaceable_member", fail_for_bad)
    world.delete("x0", "x1")
    with capture_logs() as logs:
        if caller == "controller":
            for _ in range(3):
                world.keep()
        elif caller == "filter":
            assert world.filter("g0")[0]
        else:
            for gang in world.state.gangs._gangs.values():
                gang.forward = True  # as if other members were bound
            world.state.gangs.plan_partly_bound_gangs()
        assert world.state.gangs.gang_of("uid-g0").plan
    assert len(tries) == 1, "it is tried again later"
    assert [(log["log_level"], log["gang"]) for log in logs] == [("error", "default/bad")]
    world.clock.advance(_ERROR_SECONDS + 1)
    world.keep()
    assert len(tries) == (1 if caller == "recover" else 2), "without members that are bound it has ended"
