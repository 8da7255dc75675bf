"""Holds that begin or end by what others do: who else binds a member, who comes before, what is kept from others."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.values.refusals import Refusal
from extender.cache.reservations import Phase
from extender.gangs import reservation
from extender.records.podref import PodRef
from tests.build import P100, extended_resource
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_card


def by_somebody_else(world: World, name: str, node: str) -> None:
    """Somebody else binds the pod, without a card."""
    pod = world.pods[name]
    pod["spec"]["nodeName"] = node
    pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "main", "state": {"running": {}}}]}
    world.show_pod(pod)


@pytest.mark.parametrize("sizes", [{"gpu_mem": P100}, {}])
def test_after_the_hold_of_a_gang_of_one_others_are_planned(sizes):
    world = World({"n1": 2})
    world.create(member("a", "a", 1, **sizes))
    world.keep()
    assert world.filter("a")[0] == ["n1"]
    assert world.phase("a") == "Reserved"
    by_somebody_else(world, "a", "n1")
    assert world.phase("a") == "Running"
    assert world.unbound_shares() == 0
    world.delete("a")
    world.create(*(member(f"b{i}", "b", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.run(3)
    assert world.phase("b") == "Running"


def test_the_card_that_was_held_for_the_member_is_free_and_the_others_follow():
    world = World({"n1": 2, "n2": 2})
    world.create(*(member(f"a{i}", "a", 3, created=i, gpu_mem=P100) for i in range(3)))
    world.keep()
    world.schedule("a0")
    assert world.unbound_shares() == 3
    by_somebody_else(world, "a1", "n1")
    assert world.unbound_shares() == 0, "the hold of all is over"
    assert world.phase("a") == "PartlyBound"
    world.settle()
    assert "a1 was bound by another scheduler" in str(world.errors)
    world.run(5)
    assert world.phase("a") == "Running"
    assert set(world.bound()) == {"a0", "a1", "a2"}
    assert world.unbound_shares() == 0


@pytest.mark.parametrize("comes_again", [True, False])
def test_when_the_one_that_somebody_else_has_bound_goes_the_gang_waits_for_all_again(comes_again):
    world = World({"n1": 2, "n2": 2})
    world.create(*(member(f"a{i}", "a", 3, created=i, gpu_mem=P100) for i in range(3)))
    world.keep()
    by_somebody_else(world, "a1", "n1")
    world.schedule("a0")
    world.delete("a1")
    assert world.phase("a") == "Pending"
    assert world.unbound_shares() == 0
    if comes_again:
        world.create(member("a3", "a", 3, created=3, gpu_mem=P100))
    world.run(5)
    assert set(world.bound()) == ({"a0", "a2", "a3"} if comes_again else set())


def test_a_member_that_goes_forward_and_is_bound_by_somebody_else_holds_nothing():
    world = World({"n1": 2, "n2": 2})
    world.create(*(member(f"a{i}", "a", 3, created=i, gpu_mem=P100) for i in range(3)))
    world.keep()
    for i in range(3):
        world.schedule(f"a{i}")
    world.settle(only="a0")
    by_somebody_else(world, "a1", "n1")
    world.settle()
    world.run(2)
    assert world.phase("a") == "Running"
    assert world.unbound_shares() == 0


def test_a_thread_that_was_let_go_for_a_former_hold_posts_nothing_of_the_next():
    """It stood still meanwhile. The gang is held anew on the same node, and not all its members have come again."""
    world = World({"n1": 2})
    world.create(*(member(f"a{i}", "a", 2, created=i, **sizes) for i, sizes in enumerate(({"gpu_mem": P100}, {}))))
    world.keep()
    assert world.schedule("a0") == world.schedule("a1") == ""
    slow = world.binding.copy()
    assert all(bind.hold.allowed for bind in slow)
    world.binding.clear()
    world.state.forget_plans()
    assert world.filter("a0")[0] == ["n1"]
    assert world.phase("a") == "Reserved"
    assert [world.post(bind) for bind in slow] == [False, False]
    assert world.bound() == {}


def test_a_member_that_may_be_bound_already_is_not_planned_anew_in_a_later_term():
    """Its Binding's answer was lost, the Lease too, and then it came back: its card is its own until it is known."""
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.create(*(member(f"a{i}", "a", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.keep()
    assert world.schedule("a0") == world.schedule("a1") == ""
    first = next(bind for bind in world.binding if bind.pod["metadata"]["name"] == "a0")
    world.state.assume(PodRef("uid-a0", "default", "a0"), request.parse(first.pod), first.node, "binpack", epoch=0)
    world.state.record_binding_outcome("uid-a0", Phase.UNCONFIRMED)
    world.binding.clear()
    world.assumed.clear()
    world.state.forget_plans()
    card = world.state.known_binding("uid-a0")
    world.run(5)
    assert world.state.known_binding("uid-a0") == card
    world.create(*(single(f"s{i}", created=20 + i, gpu_mem=P100) for i in range(3)))
    world.run(5)
    assert first.node not in world.bound().values()
    assert "Binding of a0 may still succeed" in world.reason("a")


@pytest.fixture
def full():
    """Nothing of a node is free, so that kube-scheduler asks for nobody; a gang waits, and one that is before it."""
    world = World({"n1": NodeSpec(2, cpu=2)})
    world.create(*(single(f"s{i}", gpu_mem=P100) for i in range(2)))
    world.run(2)
    raised = {names.QUEUE_PRIORITY: "10"}
    for gang, annotations in (("a", {}), ("b", raised)):
        world.create(
            *(member(f"{gang}{i}", gang, 2, created=i, gpu_mem=P100, annotations=annotations) for i in range(2))
        )
    world.run(3)
    assert world.phase("a") == world.phase("b") == "Waiting"
    return world


def test_a_gang_that_nobody_has_asked_for_comes_before_one_that_is_later_in_the_order(full):
    full.delete("s0", "s1")
    assert full.schedule("a0") != ""
    assert full.phase("b") == "Reserved"
    full.run(2)
    assert full.phase("b") == "Running"
    assert full.phase("a") == "Waiting"


def test_it_is_held_once_only_where_kube_scheduler_does_not_bring_its_pods(full):
    for i in range(2):
        full.pods[f"b{i}"]["spec"]["nodeSelector"] = {"no": "such"}
        full.show_pod(full.pods[f"b{i}"])
    full.delete("s0", "s1")
    full.run(3)
    assert full.phase("b") == "Reserved"
    full.clock.advance(31)
    full.run(5)
    assert full.phase("b") == "Waiting"
    assert full.phase("a") == "Running"


def test_filter_does_not_wait_while_cards_are_searched_for_a_gang(monkeypatch):
    """By then nothing is reserved for the gang."""
    world = World({f"n{i}": 1 for i in range(8)}, reserve=0.0)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    world.create(*(member(f"a{i}", "a", 8, created=i, gpu_mem=P100) for i in range(8)))
    search_cards, refusals = reservation.search_cards, []

    def search_during_filter(*args):
        cards_found = search_cards(*args)
        world.create(single("y", created=20, gpu_mem=P100))
        refusals.append(world.schedule("y"))
        return cards_found

    with monkeypatch.context() as first_search:
        first_search.setattr(reservation, "search_cards", search_during_filter)
        world.run(2)
    assert refusals == [""], "not known yet"
    world.settle()
    world.run(20)
    world.create(single("z", created=30, gpu_mem=P100))
    assert Refusal.GANG_RESERVED.text in world.schedule("z")


@pytest.mark.parametrize(("says", "until"), [(60, 60), (3600, 300)])
def test_no_podgroup_holds_cards_for_longer_than_the_cluster_allows(says, until):
    world = World({"n1": 2})
    world.put_group("a", minMember=2, timeoutSeconds=says)
    world.create(*(member(f"a{i}", "a", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.keep()
    world.schedule("a0")
    assert world.unbound_shares() == 2
    world.clock.advance(until - 1)
    world.keep()
    assert world.unbound_shares() == 2
    world.clock.advance(2)
    world.keep()
    assert world.unbound_shares() == 0


def unheard(world: World, *names: str) -> None:
    """The gang goes forward, and of no Binding an answer comes."""
    world.keep()
    for name in names:
        assert world.schedule(name) == ""
    world.settle(lost=True)


@pytest.fixture
def world_without_answers() -> World:
    """A gang of two, all of whose answers were lost for as long as it may take; nothing of it is bound."""
    world = World({"n1": 2})
    world.create(*(member(f"a{i}", "a", 2, created=i, gpu_mem=P100) for i in range(2)))
    unheard(world, "a0", "a1")
    assert world.phase("a") == "Binding"
    world.clock.advance(121)
    world.keep()
    return world


def test_a_gang_all_of_whose_answers_were_lost_waits_again_and_is_given_up_once(world_without_answers):
    gang = world_without_answers.state.gangs._gangs["default/a"]
    freed = world_without_answers.state._cache.capacity.freed_count
    for _ in range(20):
        world_without_answers.clock.advance(0.1)
        world_without_answers.keep()
    assert (world_without_answers.phase("a"), gang.forward, gang._failures) == ("Waiting", False, 1)
    assert world_without_answers.state._cache.capacity.freed_count == freed, "nobody else is planned anew for it"
    assert world_without_answers.unbound_shares() == 2, "what may land stays its own"


def test_a_gang_nothing_of_which_landed_is_bound_as_a_whole_or_not_at_all(world_without_answers):
    world_without_answers.look_up()
    assert world_without_answers.unbound_shares() == 0
    world_without_answers.clock.advance(1)
    world_without_answers.keep()
    assert world_without_answers.schedule("a0") == ""
    world_without_answers.settle()
    assert (world_without_answers.bound(), world_without_answers.phase("a")) == ({}, "Reserved")
    assert world_without_answers.schedule("a1") == ""
    world_without_answers.settle()
    assert len(world_without_answers.bound()) == 2


def test_what_lands_late_of_a_gang_that_was_given_up_is_followed_by_the_rest(world_without_answers):
    world_without_answers.land("a0")
    assert world_without_answers.phase("a") == "PartlyBound"
    world_without_answers.look_up()
    world_without_answers.run(2)
    assert world_without_answers.phase("a") == "Running"


def test_a_gang_is_not_begun_by_one_member_when_nothing_landed_and_there_is_no_room_for_the_others_any_more():
    """Each was looked up at another time."""
    world = World({"n1": 1, "n2": 1}, rollback=600)
    world.create(*(member(f"a{i}", "a", 2, created=i, gpu_mem=P100) for i in range(2)))
    unheard(world, "a0", "a1")
    world.clock.advance(76)
    world.state.expire_reservations()
    first, second = world.state.overdue_bindings()
    world.unheard.clear()
    world.state.on_lookup(first.uid, bound=False, exists=True)
    world.keep()
    with world.state.view() as ledger:
        node = ledger.holding(second.uid).node
    world.state.set_card(*as_card(extended_resource(0, node=node, health="Unhealthy")))
    world.state.on_lookup(second.uid, bound=False, exists=True)
    world.keep()
    for name in ("a0", "a1"):
        world.schedule(name)
        world.settle()
    assert (world.bound(), world.unbound_shares(), world.phase("a")) == ({}, 0, "Waiting")


def test_while_a_member_may_be_bound_the_gang_goes_on_though_another_has_lost_its_place():
    """It waits for all again only if none is bound; else one alone would sit there while the others do not follow."""
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.create(*(member(f"a{i}", "a", 3, created=i, gpu_mem=P100) for i in range(3)))
    world.keep()
    assert [world.schedule(f"a{i}") for i in range(3)] == [""] * 3
    world.settle(only="a0", lost=True)
    lost, node = next((bind.pod["metadata"]["name"], bind.node) for bind in world.binding)
    world.state.set_card(*as_card(extended_resource(0, node=node, health="Unhealthy")))
    world.settle(only=lost)
    assert (lost, world.bound(), world.phase("a")) == ("a1", {}, "Binding")
    world.settle(only="a2")
    assert list(world.bound()) == ["a2"]
