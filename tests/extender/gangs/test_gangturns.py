"""Many waiting gangs: no call plans more of them than a turn has time for, and their order is kept all the same."""

from itertools import pairwise

import pytest

from cardwise.core.api import names
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import MAX_COUNTED_NODES, Capacities
from extender.cache.statelock import StateLock
from extender.cache.yielding import TURN_SECONDS
from extender.gangs import gangplanner
from extender.gangs.gangs import Gangs
from tests.extender.gangworlds import NodeSpec, World, member, single
from tests.extender.worlds import P100

GANGS = 6


@pytest.fixture
def plans(monkeypatch):
    """The gangs that were planned, in order; each plan costs more than a turn has."""
    done: list[str] = []
    plan = gangplan.plan

    def costly(ledger, nodes, members, terms):
        done.append(members[0].name[:2])
        worlds[0].clock.worked += 2 * TURN_SECONDS
        return plan(ledger, nodes, members, terms)

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


def test_a_call_for_the_last_gang_plans_no_more_than_a_turn_has_time_for_and_the_first_comes_first(plans):
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(1)
    for name in ("x0", "x1"):  # two cards become free
        world.delete(name)
    refusal = world.schedule(f"g{GANGS - 1}0")
    assert done == ["g0"]
    assert refusal is not None
    assert world.phase("g0") == "Reserved"


def test_a_round_of_the_controller_looks_at_all_of_them_a_turn_each(plans, monkeypatch):
    done, worlds = plans
    world = waiting(done, worlds)
    world.run(1)
    for name in ("x0", "x1"):
        world.delete(name)

    # The planner finds nothing, whatever the bound says.
    def vain(ledger, nodes, members, terms):
        done.append(members[0].name[:2])
        world.clock.worked += 2 * TURN_SECONDS
        return gangplan.Unplanned(member=members[0])

    turns: list[int] = []
    plan_some = world.state.gangs._plan_some

    def counted():
        before = len(done)
        has_more = plan_some()
        turns.append(len(done) - before)
        return has_more

    monkeypatch.setattr(gangplan, "plan", vain)
    monkeypatch.setattr(world.state.gangs, "_plan_some", counted)
    world.clock.advance(10)
    world.keep()
    assert done == [f"g{gang}" for gang in range(GANGS)]
    assert max(turns) == 1


def test_a_round_without_an_end_keeps_no_gate_closed(monkeypatch):
    """Kinds of cards that change all the time, say: what is known of the nodes is never complete."""
    world = World({"n1": 1}, max_waiting=1000)
    monkeypatch.setattr(world.state.gangs, "_plan_some", lambda: True)
    world.create(*(member(f"g0{i}", "g0", 2, gpu_mem=P100) for i in range(2)))
    world.keep()
    assert not any("schedulingGates" in pod["spec"] for pod in world.pods.values())


def test_thousands_of_nodes_are_looked_at_some_in_a_turn(plans):
    _, worlds = plans
    nodes = {f"n{i}": NodeSpec(1) for i in range(3 * MAX_COUNTED_NODES)}
    world = World(nodes, max_waiting=1000)
    worlds.append(world)
    world.create(*(member(f"g0{i}", "g0", 2, gpu_mem=P100) for i in range(2)))
    world.keep()
    assert world.schedule("g00") is not None  # not all is known yet
    world.keep()
    assert world.phase("g0") == "Reserved"


@pytest.mark.parametrize(("costs", "shapes"), [(TURN_SECONDS, 1), (0, 4)])
def test_a_turn_looks_at_nodes_for_as_many_shapes_as_it_has_time_for(monkeypatch, costs, shapes):
    looks = []
    count_pods = Capacities.count_pods

    def costly(*args):
        looks.append(args)
        world.clock.worked += costs
        return count_pods(*args)

    world = World({f"n{i}": NodeSpec(1) for i in range(2 * MAX_COUNTED_NODES)}, max_waiting=1000)
    world.create(*(member(f"g0{i}", "g0", 4, gpu_mem=1000 + i) for i in range(4)))
    world.keep()
    monkeypatch.setattr(Capacities, "count_pods", costly)
    assert world.schedule("g00") is not None
    assert len(looks) == shapes
    for _ in range(4):
        world.keep()
    assert world.phase("g0") == "Reserved"


def test_nothing_is_planned_before_the_nodes_were_looked_at_for_all_sorts_of_members():
    world = World({f"n{i}": NodeSpec(1) for i in range(2 * MAX_COUNTED_NODES + 1)}, max_waiting=1000)
    world.create(member("a", "a", 1, gpu_mem=100))
    world.keep()
    world.schedule("a")
    world.keep()
    assert world.phase("a") == "Reserved", "for these it is known"
    world.create(*(member(f"g0{i}", "g0", 2, created=1 + i, gpu_mem=200 - 100 * i) for i in range(2)))
    world.state.gangs._plan_some = lambda: False  # the calls plan
    world.keep()
    for phase in ("Waiting", "Waiting", "Reserved"):
        world.schedule("g00")
        assert world.phase("g0") == phase


def test_a_plan_that_takes_several_turns_holds_nothing_before_and_is_right_in_the_end(monkeypatch):
    """A single pod takes a card between two turns on which the plan had a member."""
    world = World({"n1": 4}, max_waiting=1000)
    put = gangplan._Attempt._add_member

    def costly(*args):
        world.clock.worked += 2 * TURN_SECONDS
        put(*args)

    monkeypatch.setattr(gangplan._Attempt, "_add_member", costly)
    world.create(*(member(f"g0{i}", "g0", 3, gpu_mem=P100) for i in range(3)), single("s", gpu_mem=P100))
    world.state.gangs._plan_some = lambda: False  # the calls plan
    world.keep()
    for _ in range(2):
        assert world.schedule("g00") != ""
        assert world.phase("g0") == "Waiting"
        assert world.unbound_shares() == 0
    assert world.schedule("s") == ""
    del world.state.gangs._plan_some
    world.clock.advance(1)
    world.keep()
    assert world.phase("g0") == "Reserved"
    world.run(3)
    assert set(world.bound()) == {"g00", "g01", "g02", "s"}
    with world.state.view() as ledger:
        assert ledger.violations() == []


@pytest.fixture
def costly_members(monkeypatch):
    """A function that says of the world that each member which a plan places costs more than a turn has."""
    put = gangplan._Attempt._add_member

    def make(world):
        def costly(*args):
            world.clock.worked += 2 * TURN_SECONDS
            put(*args)

        monkeypatch.setattr(gangplan._Attempt, "_add_member", costly)

    return make


def test_beside_many_nodes_with_kept_cards_a_plan_takes_several_turns_too(costly_members, monkeypatch):
    monkeypatch.setattr(gangplanner, "MAX_RESERVED_NODES", 0)
    world = World({"n1": 3, "n2": 1}, max_waiting=1000)
    world.create(single("other", priority=10, gpu_mem=P100))
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.pods["other"]["status"] |= {"nominatedNodeName": "n2", "conditions": [refused]}
    world.show_pod(world.pods["other"])
    world.create(*(member(f"g0{i}", "g0", 3, gated=False, gpu_mem=P100) for i in range(3)))
    costly_members(world)
    for _ in range(2):
        before = world.clock.worked
        assert world.schedule("g00") != ""
        assert world.clock.worked - before <= 2 * TURN_SECONDS
        assert (world.phase("g0"), world.unbound_shares()) == ("Waiting", 0)
        world.clock.advance(0.5)  # until calls plan again
    assert world.schedule("g00") == ""
    assert world.phase("g0") == "Reserved"


def test_a_plan_of_several_turns_that_failed_by_what_happened_between_them_is_made_anew(costly_members):
    """A pod takes the card of the big member, when another member has its only other place; nothing becomes free."""
    world = World({"n1": 1, "n2": 1, "n3": 1}, max_waiting=1000)
    world.create(single("small", gpu_mem=P100 // 4))
    world.offered = lambda _: ["n3"]
    world.run(1)
    assert world.bound() == {"small": "n3"}
    del world.offered
    sizes = (P100, P100 // 2, P100 // 4)
    spread = {names.POLICY: "spread"}
    world.create(*(member(f"g0{i}", "g0", 3, gpu_mem=size, annotations=spread) for i, size in enumerate(sizes)))
    world.create(single("s", gpu_mem=P100))
    world.keep()
    costly_members(world)
    world.state.gangs._plan_some = lambda: False  # the calls plan
    for _ in range(2):
        assert world.schedule("g00") != ""
        world.clock.advance(0.5)  # until calls plan again
    assert world.filter("s")[0] == ["n1"]
    assert world.schedule("g00") != ""
    assert world.reason("g0") == "no node has capacity for g00 beside the other members"
    for _ in range(3):
        world.clock.advance(0.5)
        world.schedule("g00")
    assert world.phase("g0") == "Reserved"


def test_a_gang_for_which_a_plan_has_cost_much_is_left_alone_for_a_moment_whatever_becomes_free(plans, monkeypatch):
    done, worlds = plans
    world = World({"n1": 2}, max_waiting=1000)
    worlds.append(world)

    def vain(ledger, nodes, members, terms):
        done.append(members[0].name)
        world.clock.worked += 2 * TURN_SECONDS
        return gangplan.Unplanned(member=members[0])

    monkeypatch.setattr(gangplan, "plan", vain)
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


def test_a_new_leader_plans_a_big_gang_that_is_bound_in_part_in_turns(costly_members, monkeypatch):
    world = World({f"n{i}": 1 for i in range(4)}, max_waiting=1000)
    world.create(*(member(f"g0{i}", "g0", 4, gated=False, gpu_mem=P100) for i in range(4)))
    for i in range(4):
        world.schedule(f"g0{i}")
    world.settle(only="g00")
    some, turns = world.state.gangs._recover_some.__func__, []

    def counted_turn(gangs):
        before = world.clock.worked
        remaining = some(gangs)
        turns.append(world.clock.worked - before)
        return remaining

    monkeypatch.setattr(type(world.state.gangs), "_recover_some", counted_turn)
    costly_members(world)
    world.restart()
    assert max(turns) <= 2 * TURN_SECONDS
    assert sum(turns) >= 3 * 2 * TURN_SECONDS
    world.run(3)
    assert world.phase("g0") == "Running"


@pytest.mark.parametrize("costs", [False, True])
def test_members_change_places_when_that_takes_no_more_than_a_turn(costly_members, costs):
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
    assert world.clock.worked - before <= 2 * TURN_SECONDS
    world.clock.advance(60)
    world.run(4)
    assert world.bound()["g00"] == other
    assert world.phase("g0") == "Running"


@pytest.fixture
def between(monkeypatch):
    """A turn has ended before it came to the gang `a` of two, for which kube-scheduler has not asked; `b` is next."""
    world = World({"n1": 4}, max_waiting=1000)
    world.create(single("s", gpu_mem=P100), single("s2", gpu_mem=P100))
    world.run(2)
    world.create(*(member(f"b{i}", "b", 3, created=1, gpu_mem=P100) for i in range(3)))
    world.run(2)
    world.create(*(member(f"a{i}", "a", 2, created=5, priority=10, gpu_mem=P100) for i in range(2)))
    with monkeypatch.context() as without_plans:
        without_plans.setattr(world.state.gangs, "_plan_some", lambda: False)
        world.keep()  # the gates of `a` are gone
    world.delete("s", "s2")
    put = gangplan._Attempt._add_member

    def costly(*args):
        world.clock.worked += 2 * TURN_SECONDS
        put(*args)

    world.clock.advance(1)
    with monkeypatch.context() as slow:
        slow.setattr(gangplan._Attempt, "_add_member", costly)
        assert world.state.gangs._plan_some()
    assert [gang.name for gang in world.state.gangs._unoffered] == ["a"]
    return world


def test_a_gang_that_is_deleted_between_two_turns_stops_nobody(between):
    between.delete("a0", "a1")
    between.run(3)
    assert between.phase("b") == "Running"
    between.state.gangs.cancel_permits("it ends")


def test_a_gang_that_loses_a_member_between_two_turns_is_not_planned_without_it(between):
    between.delete("a1")
    between.run(3)
    assert (between.phase("a"), between.phase("b")) == ("Pending", "Running")
    assert "a0" not in between.bound()


def test_a_gang_that_gets_a_plan_between_two_turns_keeps_it(between):
    assert between.schedule("a0") == ""
    (waiting,) = between.binding
    while between.state.gangs._plan_some():
        pass
    assert between.schedule("a1") == ""
    assert waiting.hold.allowed, "who waits goes on with the last member"
    between.settle()
    assert between.phase("a") == "Running"


def test_a_gang_that_comes_to_run_between_two_turns_is_not_planned_again(between):
    for name in ("a0", "a1"):
        assert between.schedule(name) == ""
    between.settle()
    assert between.phase("a") == "Running"
    while between.state.gangs._plan_some():
        pass
    assert not between.state.gangs._permits


def test_the_pause_after_a_costly_round_ends_also_where_the_controller_comes_more_often_than_it_lasts(monkeypatch):
    world = World({"n1": 2})
    world.create(*(member(f"g{i}", gated=False, gpu_mem=P100) for i in range(3)))
    for i in range(3):
        world.filter(f"g{i}")
    rounds, look = list[float](), world.state.gangs._plan_if_useful

    def costly(*args):
        rounds.append(world.clock.now())
        world.clock.worked += 0.03
        return look(*args)

    monkeypatch.setattr(world.state.gangs, "_plan_if_useful", costly)
    for _ in range(100):
        world.state.gangs.step()
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

    def vain(ledger, nodes, members, terms):
        done.append(members[0].name[:2])
        world.clock.worked += 2 * TURN_SECONDS
        return gangplan.Unplanned(member=members[0])

    monkeypatch.setattr(gangplan, "plan", vain)
    monkeypatch.setattr(world.state.gangs._places.planner, "find_unplaceable", lambda _: (None, True))
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
        world.clock.advance(0.1)
    assert set(done) == {f"g{gang}" for gang in range(GANGS)}


@pytest.mark.parametrize(
    "visit_all",
    [Gangs.step, Gangs.views, Gangs.phase_counts, Gangs.foreign_groups, lambda gangs: gangs.cancel_permits("it ends")],
    ids=["step", "views", "phase_counts", "foreign_groups", "cancel_permits"],
)
def test_all_gangs_are_visited_in_turns(visit_all, monkeypatch):
    """One may have hundreds of members to ungate, to view, or to take out of its plan."""
    world = World({"n1": GANGS}, max_waiting=1000)
    world.create(*(member(f"g{i}", f"g{i}", 1, gated=False, gpu_mem=P100) for i in range(GANGS)))
    world.state.gangs._plan_some = world.state.gangs._reserve_some = lambda *_: False
    visits, enter = [], StateLock.__enter__

    class Costly(dict):
        def get(self, key, default=None):
            visits[-1].append(key)
            world.clock.worked += 2 * TURN_SECONDS
            return super().get(key, default)

    def counted(lock):
        visits.append([])
        enter(lock)

    monkeypatch.setattr(StateLock, "__enter__", counted)
    world.state.gangs._gangs = Costly(world.state.gangs._gangs)
    visit_all(world.state.gangs)
    assert [keys for keys in visits if keys] == [[f"default/g{i}"] for i in range(GANGS)]


def test_a_gang_that_ends_between_two_turns_is_not_visited():
    world = World({"n1": GANGS}, max_waiting=1000)
    world.create(*(member(f"g{i}", f"g{i}", 1, gated=False, gpu_mem=P100) for i in range(3)))
    views, visit = [], world.state.gangs._visit_gangs

    def record_visit(gang):
        views.append(gang.name)
        world.clock.worked += 2 * TURN_SECONDS

    world.clock.sleep = lambda _: world.pods.get("g2") and world.delete("g2")
    visit(record_visit)
    assert views == ["g0", "g1"]
