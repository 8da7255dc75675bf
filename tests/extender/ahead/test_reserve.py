"""What a gang that has waited long may keep from others: what it can really have, and not for ever."""

import pytest

from cardwise.core.values.refusals import Refusal
from extender.ahead import reserve
from tests.extender.gangworlds import P100, NodeSpec, World, member, single
from tests.extender.worlds import as_card, as_quota, resource

RESERVED = Refusal.GANG_RESERVED.text


def waiting_long(world: World, *members: dict) -> None:
    """The gang has been refused for longer than `reserve`, and whether it could fit is known."""
    world.create(*members)
    world.run(3)
    world.clock.advance(61)
    world.run(3)


def test_a_gang_of_one_that_no_quota_can_take_stops_nobody():
    """Seen: 12Gi of quota, a whole card of 16276 MiB, the first place in the queue, and nobody was placed any more."""
    world = World({"n1": 2, "n2": 2})
    world.state.set_quota(*as_quota({"memoryMiB": 12288}))
    waiting_long(
        world, member("evil", "evil", 1, whole_gpu=1, annotations={"cardwise.dev/queue-priority": "999999999"})
    )
    other = single("other", created=90, gpu_mem=P100)
    other["metadata"]["namespace"] = "team-b"
    world.create(other)
    assert world.schedule("other") == ""
    assert "whatever else ends" in world.reason("evil")


def test_quota_that_is_used_by_its_own_namespace_keeps_nothing_from_others():
    """Others could end, and the gang would wait for its own pods still."""
    world = World({"n1": 2, "n2": 2})
    world.state.set_quota(*as_quota({"memoryMiB": 2 * P100}))
    world.create(single("own", gpu_mem=P100))
    world.run(2)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.create(single("other", created=90, gpu_mem=P100, namespace="team-b"))
    assert world.schedule("other") == ""


def test_it_keeps_the_nodes_that_it_could_have_and_no_more():
    """Of eight nodes that are full but for one card, a gang of two cards keeps one, not all."""
    world = World({f"n{i}": NodeSpec(2, labels={"name": f"n{i}"}) for i in range(8)})
    world.create(*(single(f"s{i}", created=i, selector={"name": f"n{i}"}, gpu_mem=P100) for i in range(8)))
    world.run(2)
    waiting_long(world, member("g", "g", 1, created=30, whole_gpu=2))
    world.create(*(single(f"t{i}", created=90 + i, gpu_mem=P100) for i in range(8)))
    world.run(2)
    went = [name for name in world.bound() if name.startswith("t")]
    assert len(went) == 7, "one node is kept"


def test_it_keeps_nodes_no_longer_than_its_time():
    world = World({"n1": 2}, keep=120.0)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") == RESERVED
    world.clock.advance(121)
    world.run(2)
    assert "z" in world.bound()
    world.delete("z")
    world.create(single("y", created=95, gpu_mem=P100))
    world.clock.advance(60)
    world.run(1)
    assert "y" in world.bound(), "for as long it leaves them to others"
    world.delete("y")
    world.clock.advance(61)
    world.run(3)
    world.create(single("w", created=99, gpu_mem=P100))
    assert world.schedule("w") == RESERVED


def test_another_gang_of_the_namespace_keeps_nodes_no_longer():
    """Neither by another name, nor deleted and made anew."""
    world = World({"n1": 2}, keep=120.0)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    members = [*(member(f"a{i}", "a", 2, created=1 + i, gpu_mem=P100) for i in range(2))]
    waiting_long(world, *members, *(member(f"b{i}", "b", 2, created=11 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") == RESERVED
    world.clock.advance(100)
    world.run(1)
    for each in ("a0", "a1"):
        world.delete(each)
    world.run(1)
    assert world.schedule("z") == RESERVED, "the second keeps them for what is left"
    world.clock.advance(21)
    world.run(2)
    assert "z" in world.bound()
    world.delete("z")
    for each in ("b0", "b1"):
        world.delete(each)
    waiting_long(world, *(member(f"c{i}", "c", 2, created=21 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("y", created=95, gpu_mem=P100))
    world.run(1)
    assert "y" in world.bound(), "the namespace rests"


@pytest.mark.parametrize("also_ends", [False, True])
def test_a_later_gang_waits_for_what_is_kept_and_is_planned_when_that_is_over(also_ends):
    """`also_ends`: a pod without cards has ended meanwhile."""
    world = World({"n1": 2}, keep=120.0)
    world.create(member("c", "c", 1, gpu_mem=P100), single("x", gpu_mem=P100), member("y", "y", 1))
    world.keep()
    assert world.filter("c")[0] == ["n1"]
    world.delete("c")
    world.run(2)
    assert set(world.bound()) == {"x", "y"}
    waiting_long(world, *(member(f"a{i}", "a", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    world.create(member("b", "b", 1, created=90, gpu_mem=P100))
    world.run(3)
    assert world.phase("b") == "Waiting"
    if also_ends:
        world.delete("y")
    world.clock.advance(121)
    world.run(2)
    assert world.phase("b") == "Running"


def test_when_the_gang_for_which_nodes_are_kept_is_deleted_those_that_wait_for_them_are_tried_again():
    """Its pods hold nothing, so nobody else notices that they go."""
    world = World({"n1": 2})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"a{i}", "a", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    world.create(member("b", "b", 1, created=90, gpu_mem=P100), single("z", created=91, gpu_mem=P100))
    assert world.schedule("z") == RESERVED
    world.run(1)
    world.state.touch_due()
    world.delete("a0", "a1")
    world.clock.advance(10)
    world.keep()
    assert world.phase("b") == "Held"
    assert world.state.touch_due() == "n1"


def test_it_keeps_no_more_cards_than_it_asks_for():
    """A member with one card on each of four nodes of four cards would close sixteen."""
    world = World({f"n{i}": NodeSpec(4, labels={"name": f"n{i}"}) for i in range(4)})
    for i in range(4):
        world.create(*(single(f"s{i}{j}", selector={"name": f"n{i}"}, gpu_mem=P100 // 2) for j in range(7)))
    world.run(2)
    gang = (member(f"g{i}", "g", 4, created=30, selector={"name": f"n{i}"}, whole_gpu=1) for i in range(4))
    waiting_long(world, *gang)
    world.create(*(single(f"t{i}", created=90 + i, gpu_mem=P100 // 2, selector={"name": f"n{i}"}) for i in range(4)))
    world.run(2)
    assert len([name for name in world.bound() if name.startswith("t")]) == 3, "one node is kept"


def test_a_gang_that_can_never_run_does_not_take_the_turn_of_the_next():
    world = World({"n1": 2})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    world.create(*(member(f"a{i}", "a", 3, created=1 + i, gpu_mem=P100) for i in range(3)))
    waiting_long(world, *(member(f"b{i}", "b", 2, created=11 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") == RESERVED
    world.delete("x")
    world.run(5)
    assert {"b0", "b1"} <= set(world.bound())


def test_cores_count_in_what_it_could_have():
    """Of a card that gives 200 percent of its SMs two members have 100 each; others have it now."""
    world = World({"n1": 1}, core=200)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, gpu_mem=P100 // 2, gpu_core=100) for i in range(2)))
    world.delete("x")
    world.create(single("z", created=90, gpu_mem=64))
    assert world.schedule("z") == RESERVED
    world.run(2)
    assert {"g0", "g1"} <= set(world.bound())


def half_looked(monkeypatch) -> World:
    """A look at the gang `g`, which only n1 could take, is under way and has seen the cards of n1."""
    monkeypatch.setattr(reserve, "TURN", -1.0)  # a node each turn
    world = World({"n1": NodeSpec(2, labels={"name": "n1"}), "n2": 1, "n3": 1})
    world.create(single("x", gpu_mem=P100, selector={"name": "n1"}))
    world.run(1)
    world.create(member("g", "g", 1, created=1, whole_gpu=2))
    world.run(3)
    world.clock.advance(61)
    world.run(1)
    return world


def test_a_look_at_a_gang_that_waits_no_more_is_not_gone_on_with_when_one_of_its_name_waits_later(monkeypatch):
    """What the look had copied is as the cluster was then: a card was well that is sick now."""
    world = half_looked(monkeypatch)
    world.delete("g")
    world.run(1)
    world.state.set_card(*as_card(resource(1, node="n1", health="Unhealthy")))
    world.create(member("g", "g", 1, created=90, whole_gpu=2))
    world.run(3)
    world.clock.advance(61)
    world.run(5)
    assert "whatever else ends" in world.reason("g")


def test_a_look_of_an_earlier_term_is_not_gone_on_with(monkeypatch):
    world = half_looked(monkeypatch)
    world.state.forget_plans()
    world.state.set_card(*as_card(resource(1, node="n1", health="Unhealthy")))
    world.run(5)
    assert "whatever else ends" in world.reason("g")


def test_what_a_gang_that_could_not_run_was_told_is_not_said_of_it_as_it_is_now():
    world = World({"n1": 1, "n2": 1})
    world.create(member("g0", "g", 2, created=1, whole_gpu=2), member("g1", "g", 2, created=2, whole_gpu=1))
    world.run(3)
    world.clock.advance(61)
    world.run(5)
    assert "whatever else ends: there is no place for g0" in world.reason()
    world.create(single("x", whole_gpu=1))
    world.run(1)
    world.delete("g0")
    world.create(member("g2", "g", 2, created=3, whole_gpu=1))
    world.run(3)
    assert "whatever else ends" not in world.reason()


def test_more_members_than_it_needs_keep_no_nodes_for_a_gang_sooner():
    world = World({"n1": 2})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    world.create(*(member(f"g{i}", "g", 2, created=i, gpu_mem=P100) for i in (1, 2)))
    for i in range(25):
        world.create(member(f"more{i}", "g", 2, created=10 + i, gpu_mem=P100))
        world.run(2)
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") != RESERVED
