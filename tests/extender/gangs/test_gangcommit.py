"""Gangs are planned on a snapshot, without the lock: what changes between a plan and its commit, and that a gang is
planned in the end, whatever comes and goes.
"""

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from cardwise.core.api import names
from cardwise.core.api.request import Load
from cardwise.core.gangs.gangplan import Planned
from cardwise.core.placement.ledger import Ledger
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints
from extender.cache import commit
from extender.cache.commit import Commit
from extender.cache.nominated import NominatedPods
from extender.cache.reservations import Phase, Reservations
from extender.gangs import gangplaces
from extender.gangs.bindthreads import BindThreadAdmission
from extender.gangs.gangplanner import GangPlanner
from extender.queue.schedulingqueue import SchedulingQueue
from extender.records.nodeinfo import NodeRecord, PlacedPod
from tests.build import P100, extended_resource, resource_class
from tests.extender.gangcluster import NodeSpec, World, member, reserve, single
from tests.extender.states import as_card, as_class, as_pod, as_quota, bound
from tests.theory import theory_of

GIB = 1 << 30


@pytest.fixture
def meanwhile(monkeypatch):
    """Return a function: a change of the cluster that comes after each plan, before its commit, so many times.

    plans: the nodes of each plan.
    """
    plans: list[dict[str, str]] = []
    plan = GangPlanner.plan

    def set_change(change: Callable[[], object], times: int = 1) -> list[dict[str, str]]:
        def plan_then_change(planner, *args, **kwargs):
            planned = plan(planner, *args, **kwargs)
            plans.append(dict(planned.nodes) if isinstance(planned, Planned) else {})
            if len(plans) <= times:
                change()
            return planned

        monkeypatch.setattr(GangPlanner, "plan", plan_then_change)
        return plans

    return set_change


def set_node(world: World, allocatable: Load = Load(4000, 512 * GIB, 500), **changes: bool) -> None:
    world.state.set_node("n1", NodeRecord(allocatable, node_labels=NodeLabelsAndTaints({"zone": "n1"}), **changes))


class Two(World):
    """Two nodes with a card each. A gang of one is planned on n1, as the first by name."""

    def __init__(self, **options):
        super().__init__({node: NodeSpec(1, cpu=4, labels={"zone": node}) for node in ("n1", "n2")}, **options)
        self.state.set_quota(*as_quota({"memoryMiB": 100 * P100}))
        self.state.set_class(as_class(resource_class("good", model="P100")))
        annotations = {names.ISOLATION: "mps", names.POLICY: "spread-by=zone"}
        manifest = member("a", "a", 1, gated=False, annotations=annotations, gpu_mem=P100 // 2)
        manifest["spec"]["containers"][0]["resources"]["limits"][f"{names.CLASS_PREFIX}good"] = "1"
        self.create(manifest)
        for node in self.nodes:
            self.report_card(node)

    def report_card(self, node: str, *, users: bool = True, **status):
        """The card as its node reports it now."""
        card = extended_resource(0, node=node, **status)
        card["status"]["mps"] = {"mode": "card", "state": "Ready", "multiUser": users, "ceilingMiB": 1 << 20}
        card["status"]["mps"] |= {"maxClients": 48, "reason": "", "lastTransitionTime": "2026-11-21T10:00:00Z"}
        self.state.set_card(*as_card(card))

    def hold_card(self, node: str, namespace: str = "other") -> None:
        self.state.set_pod(as_pod(bound("holder", P100, 0, node=node, namespace=namespace)))

    def share_card(self, node: str) -> None:
        """A pod that shares cards within another namespace only."""
        manifest = bound("holder", 1, 0, node=node, namespace="other")
        manifest["metadata"]["annotations"][names.SHARE_WITH] = "namespace"
        self.state.set_pod(as_pod(manifest))

    def take_cpu(self, node: str, cpu: int = 3500) -> None:
        self.state.set_pod_without_request("big", PlacedPod(node, Load(cpu, 0, 1)))

    def nominate(self, node: str) -> None:
        """A pod of high priority has been nominated to the node."""
        self.create(single("other", priority=10, gpu_mem=P100))
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        self.pods["other"]["status"] |= {"nominatedNodeName": node, "conditions": [refused]}
        self.show_pod(self.pods["other"])


# By the entry of `commit.CHECKS` that finds it, changes of the node n1. Each leaves n2 as it was.
CHANGES_OF_N1 = {
    "nodes": {
        "the node is cordoned": lambda world: set_node(world, schedulable=False),
        "the node has no slots": lambda world: set_node(world, offers_shares=False),
        "the node is deleted": lambda world: world.state.remove_node("n1"),
    },
    "cpu, memory, slots": {
        "a pod without GPUs takes the cpu": lambda world: world.take_cpu("n1"),
        "the node becomes smaller": lambda world: set_node(world, Load(10, 512 * GIB, 500)),
        "the node has no room for another pod": lambda world: set_node(world, Load(4000, 512 * GIB, 0)),
    },
    "cards": {
        "a pod takes the card": lambda world: world.hold_card("n1"),
        "a pod that shares within its namespace comes": lambda world: world.share_card("n1"),
        "the card becomes unhealthy": lambda world: world.report_card("n1", health="Unhealthy"),
        "the card is cordoned": lambda world: world.report_card("n1", unschedulable=True),
        "the card becomes smaller": lambda world: world.report_card("n1", mem=100),
        "the card leaves the class": lambda world: world.report_card("n1", model="other"),
        "MPS ends": lambda world: world.state.set_card(*as_card(extended_resource(0, node="n1"))),
        "the card goes": lambda world: world.state.remove_card(extended_resource(0, node="n1")["metadata"]["name"]),
    },
    "labels": {
        "the label goes": lambda world: world.state.set_node("n1", NodeRecord(Load(4000, 512 * GIB, 500))),
    },
    "nominated pods": {"a pod is nominated": lambda world: world.nominate("n1")},
    "gang reservation": {"the card is reserved for a gang": lambda world: reserve(world.state, "n1", P100)},
}
CASES = [(check, change) for check, changes in CHANGES_OF_N1.items() for change in changes]


@pytest.mark.parametrize(("check", "change"), CASES)
def test_a_gang_gets_no_place_that_has_become_impossible_since_it_was_planned(check, change, meanwhile):
    world = Two()
    plans = meanwhile(lambda: CHANGES_OF_N1[check][change](world))
    assert world.filter("a")[0] == ["n2"]
    assert plans == [{"uid-a": "n1"}, {"uid-a": "n2"}]
    with world.state.view() as ledger:
        assert ledger.holding("uid-a").node == "n2"
        assert ledger.violations() == []


# "the node is deleted" is found by "cpu, memory, slots" as well.
@pytest.mark.parametrize(("check", "change"), [case for case in CASES if case[1] != "the node is deleted"])
def test_each_check_is_needed(check, change, meanwhile, monkeypatch):
    """Without the check the gang gets the place that has become impossible."""
    world = Two()
    meanwhile(lambda: CHANGES_OF_N1[check][change](world))
    monkeypatch.delitem(commit.CHECKS, check)
    assert world.filter("a")[0] == ["n1"]


def delete_member(world: World) -> None:
    world.delete("b1")


def add_older_member(world: World) -> None:
    world.create(member("b9", "b", 2, gated=False, gpu_mem=P100 // 4))


def change_request(world: World) -> None:
    world.create(member("b1", "b", 2, created=6, gated=False, gpu_mem=P100 // 4))


def lower_place_in_queue(world: World) -> None:
    """Cards that are reserved for another gang of the namespace may concern it from now on."""
    for name in ("b0", "b1"):
        world.pods[name]["metadata"]["annotations"]["cardwise.dev/queue-priority"] = "-5"
        world.show_pod(world.pods[name])


def use_quota(world: World) -> None:
    world.state.set_quota(*as_quota({"memoryMiB": 100}))


def end_epoch(world: World) -> None:
    world.state.forget_plans()


def bind_member(world: World) -> None:
    """A former Binding of b1 may still bind it."""
    world.state._reservations.set_plan(as_pod(world.pods["b1"]).ref, "n2", None, Phase.RESERVED, load=Load(1, 1, 1))
    world.state._reservations.assume(as_pod(world.pods["b1"]).ref, "n2", None, mps_client=None, epoch=1)


CHANGES_OF_GANG = {
    "pods": [delete_member, add_older_member, change_request, bind_member, lower_place_in_queue],
    "quotas": [use_quota],
    "leader epoch": [end_epoch],
}
GANG_CASES = [(check, change) for check, changes in CHANGES_OF_GANG.items() for change in changes]


def gang_of_two() -> World:
    world = World({"n1": 1, "n2": 1})
    world.create(*(member(f"b{i}", "b", 2, created=5 + i, gated=False, gpu_mem=P100 // 2) for i in range(2)))
    return world


def planned_uids(world: World) -> set[str]:
    return set(world.state.gangs.gang_of("uid-b0").plan)


@pytest.mark.parametrize(("check", "change"), GANG_CASES)
def test_a_plan_that_is_not_wanted_any_more_reserves_nothing(check, change, meanwhile, monkeypatch):
    """The plan of before is not reserved, not even for one member, and the gang is planned as it is now."""
    world, reserved = gang_of_two(), []
    plans = meanwhile(lambda: change(world))
    set_plan = type(world.state._reservations).set_plan

    def recorded(reservations, pod, node, *args, **kwargs):
        if kwargs.get("gang"):
            reserved.append((len(plans), pod.uid))
        set_plan(reservations, pod, node, *args, **kwargs)

    monkeypatch.setattr(type(world.state._reservations), "set_plan", recorded)
    world.filter("b0")
    assert all(count > 1 for count, _ in reserved), "only a plan after the change is reserved"
    assert planned_uids(world) == {uid for _, uid in reserved}
    assert len(planned_uids(world)) in (0, 2)


@pytest.mark.parametrize(("check", "change"), GANG_CASES)
def test_each_check_of_the_gang_is_needed(check, change, meanwhile, monkeypatch):
    world, at = gang_of_two(), []
    plans = meanwhile(lambda: change(world))
    monkeypatch.delitem(commit.CHECKS, check)
    set_plan = type(world.state._reservations).set_plan

    def recorded(reservations, pod, node, *args, **kwargs):
        if kwargs.get("gang"):
            at.append(len(plans))
        set_plan(reservations, pod, node, *args, **kwargs)

    monkeypatch.setattr(type(world.state._reservations), "set_plan", recorded)
    try:
        world.filter("b0")
    except (AssertionError, KeyError):
        return  # a transition that is not allowed
    assert 1 in at, "the first plan is reserved"


def test_all_checks_are_in_these_tests():
    assert commit.CHECKS.keys() == {check for check, _ in (*CASES, *GANG_CASES)}


def test_what_does_not_matter_is_no_conflict(meanwhile):
    world = Two()

    def change():
        world.state.set_pod_without_request("small", PlacedPod("n1", Load(100, 0, 1)))
        world.state.set_pod(as_pod(bound("small-share", P100 // 4, 0, node="n1", namespace="other")))
        world.hold_card("n2")

    plans = meanwhile(change)
    assert world.filter("a")[0] == ["n1"]
    assert len(plans) == 1


def test_what_becomes_free_while_a_gang_is_planned_in_vain_counts_for_its_next_plan(meanwhile):
    world = World({"n1": 1, "n2": 1})
    world.offered = lambda _: ["n1"]
    world.create(single("other", gpu_mem=P100))
    world.run(1)
    world.create(member("a", "a", 1, gpu_mem=P100))
    plans = meanwhile(lambda: world.delete("other"))
    world.run(3)
    assert plans == [{}, {"uid-a": "n1"}]
    assert world.bound() == {"a": "n1"}


def test_the_example_of_the_docstring(meanwhile, monkeypatch):
    theory, conflicts, find_conflict = theory_of("extender.cache.commit"), [], Commit.find_conflict

    def recorded(comparison):
        conflicts.append(find_conflict(comparison))
        return conflicts[-1]

    monkeypatch.setattr(Commit, "find_conflict", recorded)
    world = Two()
    cards, node_cpu = {(spec.cards, spec.cpu) for spec in world.nodes.values()}.pop()
    cpu = int(world.pods["a"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    other_cpu = 3.5
    assert f"n1 and n2 have {cards} GPU and {node_cpu} cpu each" in theory
    assert f"a gang member that requests {cpu} cpu is planned on n1" in theory
    plans = meanwhile(lambda: world.take_cpu("n1", int(other_cpu * 1000)))
    (chosen,) = world.filter("a")[0]
    assert plans == [{"uid-a": "n1"}, {"uid-a": chosen}]
    assert f"a pod without GPUs takes {other_cpu} cpu of n1. So {node_cpu - other_cpu} cpu are free" in theory
    check, no_conflict = conflicts
    assert f"the check `{check}` fails, and the second plan puts the member on {chosen}." in theory
    assert no_conflict is None


def test_the_example_of_the_docstring_without_a_conflict(meanwhile):
    theory, other_cpu = theory_of("extender.cache.commit"), 3
    world = Two()
    plans = meanwhile(lambda: world.take_cpu("n1", other_cpu * 1000))
    assert world.filter("a")[0] == ["n1"]
    rest = world.nodes["n1"].cpu - other_cpu
    assert f"If the other pod takes only {other_cpu} cpu, {rest} cpu is free" in theory
    assert f"all checks succeed, and plan {len(plans)} is reserved" in theory


# In the end each gang is planned.


def test_unrelated_pods_that_come_and_go_for_ever_do_not_keep_a_gang_of_100_from_being_planned(meanwhile):
    world = World({f"n{i:03}": 1 for i in range(100)}, max_waiting=1000)
    world.create(*(member(f"g{i:02}", "g", 100, created=i, gpu_mem=P100 // 2 - 2000) for i in range(100)))
    world.keep()

    def come_and_go():
        for i, node in enumerate(world.nodes):
            world.state.set_pod_without_request(f"other{i}", PlacedPod(node, Load(100 * (len(plans) % 2), 0, 1)))
            world.state.set_pod(as_pod(bound(f"share{i}", 100 + len(plans), 0, node=node, namespace="other")))

    plans = meanwhile(come_and_go, times=1000)
    world.filter("g00")
    world.keep()
    assert world.phase("g") == "Reserved"
    assert len(plans) == 1


def test_pods_that_take_a_place_of_each_plan_do_not_keep_a_gang_of_100_from_being_planned(meanwhile):
    """After three conflicts it is planned with the lock held."""
    world = World({f"n{i:03}": 1 for i in range(110)}, max_waiting=1000)
    world.create(*(member(f"g{i:02}", "g", 100, created=i, gpu_mem=P100) for i in range(100)))
    world.keep()

    def occupy_place():
        if not world.state._lock._lock.locked():
            occupied_nodes.append(next(node for node in sorted(plans[-1].values()) if node not in occupied_nodes))
            world.state.set_pod(as_pod(bound(f"p{len(plans)}", P100, 0, node=occupied_nodes[-1], namespace="other")))

    occupied_nodes: list[str] = []
    plans = meanwhile(occupy_place, times=1000)
    world.filter("g00")
    assert world.phase("g") == "Reserved"
    assert len(plans) == 4
    with world.state.view() as ledger:
        assert ledger.violations() == []


def test_a_gang_for_which_the_lock_would_be_held_for_long_waits(meanwhile, monkeypatch):
    world = Two()
    find_unplaceable_member = GangPlanner.find_unplaceable_member

    def slow(planner, members, pace=lambda: None):
        if world.state._lock._lock.locked():
            world.clock.worked += 1
            pace()
        return find_unplaceable_member(planner, members, pace)

    monkeypatch.setattr(GangPlanner, "find_unplaceable_member", slow)

    plans = meanwhile(lambda: world.hold_card(plans[-1]["uid-a"]), times=3)
    assert world.filter("a")[0] == []
    assert world.phase("a") == "Waiting"
    assert "changes faster" in world.reason("a")


def test_a_gang_of_many_members_whose_commit_would_take_all_the_time_waits(meanwhile, monkeypatch):
    """Plan and commit are one hold of the lock."""
    monkeypatch.setattr(gangplaces, "_COMMIT_SECONDS", 2 * gangplaces._LOCKED_SECONDS)
    world = Two()
    plans = meanwhile(lambda: world.hold_card(plans[-1]["uid-a"]), times=3)
    assert world.filter("a")[0] == []
    assert len(plans) == 3
    assert "changes faster" in world.reason("a")


def test_a_gang_that_its_owner_changes_in_each_plan_is_not_planned_with_the_lock_held(meanwhile):
    """A label of a member is part of its shape, and its owner can patch it 50 times a second."""
    world = Two()

    def change() -> None:
        locked.append(world.state._lock._lock.locked())
        world.pods["a"]["metadata"]["labels"]["patched"] = str(len(locked))
        world.show_pod(world.pods["a"])

    locked = list[bool]()
    meanwhile(change, times=3)
    assert world.filter("a")[0] == []
    assert locked == [False] * 3
    assert "the gang changes faster than it is planned" in world.reason("a")
    world.clock.advance(1)
    world.keep()
    assert world.phase("a") == "Reserved"


def test_unknown_cards_of_nominated_pods_are_searched_for_a_few_ms_under_the_lock(meanwhile, monkeypatch):
    """Another extender has answered their preemption, and pods without GPUs come to their nodes after each plan."""
    nodes = [f"n{i:02}" for i in range(60)]
    world = World(dict.fromkeys(nodes, 2), max_waiting=1000)
    for node in nodes:
        world.create(single(f"nominated-{node}", priority=10, gpu_mem=P100))
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        world.pods[f"nominated-{node}"]["status"] |= {"nominatedNodeName": node, "conditions": [refused]}
        world.show_pod(world.pods[f"nominated-{node}"])
    gang = [member(f"g{i:02}", "g", 60, created=i, gated=False, gpu_mem=P100 // 2 + 1) for i in range(60)]
    world.create(*gang)
    lock, searches = world.state._lock._lock, list[bool]()
    search, find_conflict = NominatedPods.place_after_termination, Commit.find_conflict
    in_commits, in_plans = list[int](), list[int]()

    def costly(*args, **kwargs):
        world.clock.worked += 0.001
        searches.append(lock.locked())
        return search(*args, **kwargs)

    def counted(function, counts):
        def call(*args, **kwargs):
            before = sum(searches)
            try:
                return function(*args, **kwargs)
            finally:
                counts.append(sum(searches) - before)

        return call

    def change():
        if not lock.locked():
            for node in nodes:
                world.state.set_pod_without_request(f"other-{node}", PlacedPod(node, Load(len(plans), 0, 1)))

    monkeypatch.setattr(NominatedPods, "place_after_termination", costly)
    monkeypatch.setattr(Commit, "find_conflict", counted(find_conflict, in_commits))
    plans = meanwhile(change, times=1000)
    monkeypatch.setattr(GangPlanner, "plan", counted(GangPlanner.plan, in_plans))
    world.filter("g00")
    for _ in range(6):
        world.clock.advance(1)
        world.keep()
    assert max(in_commits) == 4
    assert max(in_plans) == 17, "20 ms, of which 3 are for the commit of 60 members"
    assert world.phase("g") == "Reserved"


# An unexpected error while the plan is reserved.


class Broken(Exception):
    """An internal error."""


FAILING = [
    (Reservations, "set_plan"),
    (Reservations, "release_plan"),
    (Ledger, "set_holding"),
    (SchedulingQueue, "requeue_all"),
    (BindThreadAdmission, "mark_admitted"),
]


def fail_each_call(monkeypatch, owner, name, make_scene) -> Iterator[tuple[World, object]]:
    """Worlds in which the call of the scene has raised: in the first call of the function, in the second, and so on."""
    function = getattr(owner, name)
    for failing in count(1):
        world, call = make_scene()
        calls: list[int] = []

        def fail(*args, calls=calls, failing=failing, **kwargs):
            calls.append(1)
            if len(calls) == failing:
                raise Broken
            return function(*args, **kwargs)

        before = state_of(world)
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, fail)
            try:
                call()
            except Broken:
                pass
            else:
                assert failing > 1, "the scene never calls it"
                return
        yield world, before


def state_of(world: World) -> object:
    gang = world.state.gangs.gang_of("uid-b0")
    with world.state.view() as ledger:
        holdings = {holding.uid: holding for holding in ledger.holdings()}
    return (
        dict(gang.plan),
        holdings,
        set(world.state._loads._planned),
        set(world.state.gangs._permits),
        (gang.since, gang._refused_since, gang._refusals, set(gang.passed), set(gang.arrived)),
    )


def refused_gang_that_fits() -> tuple[World, Callable[[], object]]:
    world = World({f"n{i}": 1 for i in range(3)})
    world.create(*(single(f"x{i}", priority=5, gpu_mem=P100) for i in range(3)))
    world.run(1)
    world.create(*(member(f"b{i}", "b", 3, created=i, gated=False, gpu_mem=P100 // 2) for i in range(3)))
    for i in range(3):
        assert world.schedule(f"b{i}")
    world.keep()
    world.delete("x0", "x1", "x2")
    return world, lambda: world.filter("b0")


def gang_that_must_move() -> tuple[World, Callable[[], object]]:
    world = World({f"n{i}": 1 for i in range(4)})
    world.create(*(member(f"b{i}", "b", 3, created=i, gated=False, gpu_mem=P100) for i in range(3)))
    nodes, _ = world.filter("b0")
    world.nodes[nodes[0]].cpu = 0
    return world, lambda: world.filter("b0")


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=[name for _, name in FAILING])
def test_an_error_while_a_plan_is_reserved_leaves_no_part_of_it(owner, name, monkeypatch):
    for world, before in fail_each_call(monkeypatch, owner, name, refused_gang_that_fits):
        assert state_of(world) == before
        assert world.unbound_shares() == 0
        world.run(2)
        assert {"b0", "b1", "b2"} <= world.bound().keys()


@pytest.mark.parametrize("name", ["set_plan", "release_plan"])
def test_an_error_while_members_are_moved_leaves_them_where_they_were(name, monkeypatch):
    for world, before in fail_each_call(monkeypatch, Reservations, name, gang_that_must_move):
        assert state_of(world)[:4] == before[:4]
        world.run(2)
        assert {"b0", "b1", "b2"} <= world.bound().keys()
