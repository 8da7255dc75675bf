"""Where gangs are planned: what is kept for others, who holds what already, and when a plan is worth another try."""

from collections import Counter

import pytest

from cardwise.core.api import names
from cardwise.core.gangs.gangplan import Planned
from extender.gangs import gangplanner, offers
from extender.gangs.gangplaces import CHEAP_PLAN_SECONDS
from extender.gangs.gangplanner import GangToPlan
from extender.records.pod import Pod
from tests.build import P100, container, extended_resource
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_card

# Cards that are kept for nominated pods.


@pytest.fixture
def many_kept(monkeypatch):
    """As if something were kept on so many nodes that it is not counted before other nodes were tried."""
    monkeypatch.setattr(gangplanner, "MAX_RESERVED_NODES", 0)


def nominate(world: World, name: str, node: str) -> None:
    """The pod's status names the node: another extender has answered a preemption for it."""
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.pods[name]["status"] |= {"nominatedNodeName": node, "conditions": [refused]}
    world.show_pod(world.pods[name])


def world_with_nominee(node: str, **nodes: int | NodeSpec) -> World:
    """A card of the node is kept for a pod of high priority."""
    world = World(nodes)
    world.create(single("other", priority=10, gpu_mem=P100))
    nominate(world, "other", node)
    return world


@pytest.mark.usefixtures("many_kept")
def test_a_gang_does_not_get_the_card_that_is_kept_for_a_nominated_pod():
    world = world_with_nominee("n1", n1=1)
    world.create(member("a", "a", 1, gpu_mem=P100))
    world.keep()
    assert world.schedule("a") != ""
    assert world.phase("a") == "Waiting"
    assert world.schedule("other") == ""


@pytest.mark.usefixtures("many_kept")
def test_what_is_kept_on_other_nodes_is_not_counted_for_a_gang_and_members_without_cards_may_go_there():
    world = world_with_nominee("n1", n1=NodeSpec(1, labels={"name": "n1"}), n2=1)
    world.create(member("a", "a", 2, gpu_mem=P100), member("b", "a", 2, selector={"name": "n1"}))
    world.keep()
    assert world.schedule("a") == world.schedule("b") == ""
    assert {bind.node for bind in world.binding} == {"n1", "n2"}
    assert world.state._nominated.nodes_with_unknown_cards() == ["n1"], "which card is kept"


@pytest.mark.usefixtures("many_kept")
def test_what_is_kept_where_no_member_has_room_anyway_is_not_counted_either():
    world = world_with_nominee("n1", n1=1, n2=1)
    world.create(single("ends", priority=20, gpu_mem=P100))
    world.offered = lambda _: ["n1"]
    assert world.schedule("ends") == ""
    world.settle()
    world.terminate("ends")
    world.offered = lambda _: ["n1", "n2"]
    world.create(*(member(f"a{i}", "a", 2, created=i, gpu_mem=P100 - i) for i in range(2)))
    world.keep()
    assert world.schedule("a0") != ""
    assert world.state._nominated.nodes_with_unknown_cards() == ["n1"], "which card is kept"


@pytest.mark.usefixtures("many_kept")
def test_a_member_that_moves_gets_no_kept_card_either():
    world = world_with_nominee("n2", n1=1, n2=1)
    world.create(member("a", "a", 1, gpu_mem=P100))
    world.keep()
    assert world.filter("a")[0] == ["n1"]
    world.offered = lambda _: ["n2"]
    assert world.filter("a")[0] == []
    assert world.phase("a") == "Waiting"


# Nodes that kube-scheduler has named for members.


def test_nominated_members_get_the_nodes_that_are_named_for_them_and_the_others_what_is_left():
    """kube-scheduler offers these nodes to nobody else, and asks for each nominated pod with its node alone."""
    world = World({f"n{i}": 1 for i in range(4)})
    names_of = [f"g{i}" for i in range(4)]
    world.create(*(member(name, "g", 4, created=i, gated=False, gpu_mem=P100) for i, name in enumerate(names_of)))
    named = {"g0": "n2", "g1": "n3", "g3": "n0"}
    for name, node in named.items():
        nominate(world, name, node)
    for name in names_of:
        world.offered = lambda pod: [named.get(pod["metadata"]["name"], "n1")]
        assert world.schedule(name) == ""
    assert {bind.pod["metadata"]["name"]: bind.node for bind in world.binding} == named | {"g2": "n1"}
    assert world.phase("g") == "Binding"


def test_a_member_gets_the_node_that_is_named_for_it_although_nothing_has_become_free_since_a_plan_in_vain():
    world = World({"n1": 1, "n2": 1})
    world.create(*(member(f"g{i}", "g", 2, created=i, gated=False, gpu_mem=P100) for i in range(2)))
    world.offered = lambda _: ["n1"]
    assert world.filter("g0")[0] == []
    nominate(world, "g0", "n2")
    world.offered = lambda _: ["n1", "n2"]
    assert world.filter("g1")[0] == ["n1"]
    assert world.filter("g0")[0] == ["n2"]


def test_a_named_node_that_kube_scheduler_does_not_allow_any_more_is_not_planned():
    world = World({"n1": 1, "n2": 1})
    world.create(member("a", "a", 1, gated=False, gpu_mem=P100))
    nominate(world, "a", "n1")
    world.keep()
    assert world.filter("a")[0] == ["n1"]
    world.offered = lambda _: ["n2"]
    assert world.filter("a")[0] == ["n2"]


@pytest.mark.parametrize("later", [0, 70])
@pytest.mark.parametrize("named", [("g0",), ("g1",), ("g0", "g1")])
def test_a_named_node_that_has_no_room_keeps_no_gang_waiting(named, later):
    """kube-scheduler tries it first and alone, which says nothing about the other nodes. The name may stay for ever."""
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.create(single("x", gpu_mem=P100 // 2))
    world.offered = lambda _: ["n1"]
    world.run(1)
    world.offered = lambda _: ["n1", "n2", "n3"]
    world.create(*(member(f"g{i}", "g", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.keep()
    for name in named:
        nominate(world, name, "n1")
    world.clock.advance(later)
    world.run(2)
    assert world.phase("g") == "Running"


def test_a_gang_whose_members_may_have_their_named_nodes_only_is_told_so_by_the_second_call():
    world = World({"n1": 1, "n2": 1})
    world.create(member("a", "a", 1, gated=False, gpu_mem=P100))
    world.keep()
    assert world.filter("a")[0] == ["n1"]
    nominate(world, "a", "n2")
    world.offered = lambda _: ["n2"]
    assert world.filter("a")[0] == ["n2"]


# What a planned gang holds.


def test_cpu_of_members_is_held_as_their_cards_are():
    world = World({"n1": NodeSpec(4, cpu=3)})
    for gang in "ab":
        world.create(*(member(f"{gang}{i}", gang, 2, created=i, gpu_mem=100) for i in range(2)))
    world.keep()
    world.schedule("a0")
    world.keep()
    world.schedule("b0")
    assert (world.phase("a"), world.phase("b")) == ("Reserved", "Waiting")


def test_a_gang_is_not_planned_on_a_card_whose_mps_is_not_for_both():
    """A member of another gang is planned there, without MPS."""
    world = World({"n1": 1})
    card = extended_resource(0)
    card["status"]["mps"] = {"mode": "card", "state": "Ready", "multiUser": True, "ceilingMiB": 1, "maxClients": 48}
    card["status"]["mps"] |= {"reason": "", "lastTransitionTime": "2026-11-21T10:00:00Z"}
    world.state.set_card(*as_card(card))
    world.create(member("a", "a", 1, gpu_mem=100, annotations={names.ISOLATION: "none"}))
    world.create(member("b", "b", 1, gpu_mem=100, annotations={names.ISOLATION: "mps"}))
    world.keep()
    world.schedule("a")
    assert world.schedule("b") != ""
    assert (world.phase("a"), world.phase("b")) == ("Binding", "Waiting")


# When a plan is worth another try.


@pytest.mark.parametrize("less", [0, 1])
def test_the_podgroup_says_for_which_member_there_is_no_place(less):
    """`less`: of each sort of members one would fit."""
    world = World({"n1": 1})
    world.create(*(member(f"a{i}", "a", 2, created=i, gpu_mem=P100 - i * less) for i in range(2)))
    world.run(1)
    assert world.reason("a") == "no node has capacity for a1 in addition to the other members"


def test_after_a_plan_that_failed_at_once_a_gang_is_planned_as_soon_as_there_is_room():
    world = World({"n1": 1})
    world.clock.worked = 1000 * CHEAP_PLAN_SECONDS  # before
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    world.create(member("a", "a", 1, gpu_mem=P100))
    world.keep()
    assert world.schedule("a") != ""
    world.delete("x")
    world.keep()
    assert world.phase("a") == "Reserved"


def test_what_a_gang_without_cards_has_held_is_planned_for_the_next():
    world = World({"n1": NodeSpec(0, cpu=1)})
    for created, gang in enumerate("ab"):
        world.create(member(gang, gang, 1, created=created))
    world.keep()
    assert world.filter("a")[0] == ["n1"]
    assert world.filter("b")[0] == []
    world.delete("a")
    world.keep()
    assert world.phase("b") == "Reserved"


def test_a_gang_that_did_not_fit_is_planned_again_when_it_needs_fewer_pods():
    """Nothing else happens in the cluster."""
    world = World({"n1": 2})
    world.put_group("g", minMember=3)
    world.create(*(member(f"a{i}", "g", None, created=i, gpu_mem=P100) for i in range(3)))
    world.run(3)
    assert world.phase() == "Waiting"
    world.put_group("g", minMember=2)
    world.run(1)
    assert world.phase() == "Running"


def test_a_gang_that_did_not_fit_is_planned_again_when_a_smaller_pod_has_taken_the_place_of_a_large_one():
    world = World({"n1": 2})
    world.create(member("a0", "g", 2, whole_gpu=2), member("a1", "g", 2, created=1, gpu_mem=P100))
    world.run(3)
    assert world.phase() == "Waiting"
    world.delete("a0")
    world.create(member("a2", "g", 2, created=2, gpu_mem=P100))
    world.run(2)
    assert world.phase() == "Running"


def test_the_nodes_that_a_gang_was_offered_are_kept_once_and_not_when_it_runs():
    world = World({"n1": 2, "n2": 2})
    world.create(*(member(f"g{i}", "g", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.create(*(member(f"h{i}", "h", 9, created=i, gpu_mem=P100) for i in range(9)))
    world.run(1)
    places = world.state.gangs._places
    (offer,) = places._offers.get("default/h").values()
    (ever,) = places._reservation._offers.get("default/h").values()
    assert offer is ever
    assert world.phase("g") == "Running"
    assert set(places._known) == {"default/h"}
    for table in (places._offers, places._reservation._offers):
        assert table.get("default/g") == {}


def test_a_gang_whose_owner_changes_labels_again_and_again_stores_few_offers(monkeypatch):
    """Each change makes another shape: 20,000 of them stopped all threads for a second at each preempt call."""
    monkeypatch.setattr(offers, "_MAX_SHAPES", 3)
    world = World({"n1": 1})
    world.create(member("a", "a", 2, gpu_mem=P100))
    for i in range(10):
        world.pods["a"]["metadata"]["labels"]["changed"] = str(i)
        world.show_pod(world.pods["a"])
        assert world.schedule("a") != ""
    places = world.state.gangs._places
    shape = world.state.gangs.gang_of("uid-a").members["uid-a"].shape
    for shapes in (places._offers.get("default/a"), places._reservation._offers.get("default/a")):
        assert len(shapes) == 3
        assert list(shapes)[-1] == shape


def test_equal_offers_of_several_gangs_are_one_object_though_others_come_between():
    world = World({f"n{i}": NodeSpec(1, labels={"zone": str(i % 2)}) for i in range(4)})
    for gang, zone in (("a", "0"), ("b", "1"), ("c", "0"), ("d", "1")):
        selector = {"zone": zone}
        world.create(*(member(f"{gang}{i}", gang, 3, gated=False, selector=selector, gpu_mem=P100) for i in range(3)))
        world.filter(f"{gang}0")
    table = world.state.gangs._places._offers
    offered = [offer for gang in "abcd" for offer in table.get(f"default/{gang}").values()]
    assert len(offered) == 4
    assert len({id(offer) for offer in offered}) == 2


# Members whose policy ranks nodes.


def racks(cards: int = 4, **zones: int) -> dict[str, NodeSpec]:
    """This many nodes in each rack; "n" is for nodes without the label."""
    labels = {zone: {} if zone == "n" else {"rack": zone} for zone in zones}
    return {f"{zone}{i}": NodeSpec(cards, labels=labels[zone]) for zone, count in zones.items() for i in range(count)}


def spread_members(count: int, gang: str = "g", mem: int = P100, **fields: int) -> list[dict]:
    annotations = {names.POLICY: "spread-by=rack"}
    return [
        member(f"{gang}{i}", gang, count, gpu_mem=mem, annotations=annotations, created=i, **fields)
        for i in range(count)
    ]


def racks_of(world: World) -> Counter[str]:
    """How many pods reached bind in each rack."""
    return Counter(bind.node[0] for bind in world.binding)


def schedule_all(world: World, *pods: dict) -> None:
    world.create(*pods)
    world.keep()
    assert [world.schedule(pod["metadata"]["name"]) for pod in pods] == [""] * len(pods)


@pytest.mark.parametrize("mem", [P100, 1000])
def test_the_members_of_a_gang_are_spread_over_the_domains_of_the_label(mem):
    world = World(racks(a=2, b=1, c=1, n=1))
    schedule_all(world, *spread_members(6, mem=mem))
    assert racks_of(world) == Counter(a=2, b=2, c=2)


def test_members_of_another_gang_do_not_count():
    world = World(racks(a=1, b=1))
    schedule_all(world, *spread_members(1, "one", 1000))
    schedule_all(world, *spread_members(1, "two", 1000))
    assert racks_of(world) == Counter(a=2)


def test_a_full_domain_gives_its_members_to_the_next_and_nodes_without_the_label_come_last():
    world = World(racks(cards=1, a=1, b=3, n=2))
    schedule_all(world, *spread_members(5))
    assert racks_of(world) == Counter(a=1, b=3, n=1)


def test_different_members_of_a_gang_are_spread_together():
    world = World(racks(a=1, b=1, c=1))
    big, small = spread_members(6)[:3], spread_members(6, mem=1000)[3:]
    schedule_all(world, *big, *small)
    assert racks_of(world) == Counter(a=2, b=2, c=2)


def test_members_with_several_card_requests_are_spread():
    world = World(racks(cards=4, a=1, b=1, c=1))
    members = spread_members(3)
    for pod in members:
        whole = container("whole", whole_gpu=1, share=1)
        whole["resources"]["requests"] = {"cpu": "1"}
        pod["spec"]["containers"].append(whole)
    schedule_all(world, *members)
    assert racks_of(world) == Counter(a=1, b=1, c=1)


def test_a_recreated_member_goes_to_the_domain_that_lacks_it():
    world = World(racks(a=1, b=1, c=1))
    members = spread_members(3, mem=1000)
    schedule_all(world, *members)
    world.settle()
    nodes = world.bound()
    lost = next(name for name, node in nodes.items() if node[0] == "b")
    world.delete(lost)
    again = spread_members(3, mem=1000)[int(lost[-1])]
    again["metadata"]["uid"] = "uid-again"
    world.create(again)
    world.keep()
    assert world.schedule(lost) == ""
    assert racks_of(world) == Counter(b=1)


def test_the_former_places_of_members_do_not_count_when_they_get_others():
    world = World(racks(a=1, b=1))
    members = [Pod(manifest).member() for manifest in spread_members(2, mem=1000)]
    former_places = {
        key: {"uid-g0": "a0", "uid-g1": "a0"} for key in {m.request.peer_key for m in members if m.request}
    }
    gang = GangToPlan("default", (0, 0, "", ""), 0, [m.uid for m in members], {}, (), former_places)
    snapshot = world.state.snapshot()
    planner = gangplanner.GangPlanner(snapshot, world.state._nominated.with_snapshot(snapshot), policy="binpack")
    planned = planner.plan(gang, members, lambda: None)
    assert isinstance(planned, Planned)
    assert sorted(planned.nodes.values()) == ["a0", "b0"]
