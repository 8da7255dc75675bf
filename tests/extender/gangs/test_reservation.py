"""What is reserved for a gang that has waited long: what it can really have, no more than it asks, not for ever."""

from collections import Counter
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from cardwise.core.placement import placement
from cardwise.core.values.refusals import Refusal
from extender.gangs import cardsearch, reservation
from extender.gangs.cardsearch import GangWithOffers
from extender.gangs.gangs import Gangs
from extender.gangs.reservation import GangReservation
from extender.records.pod import Pod
from tests.build import P100, extended_resource
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_card, as_pod, as_quota, bound
from tests.theory import theory_of

RESERVED = Refusal.GANG_RESERVED.text
WAITS = Refusal.GANG_WAITS.text


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
    assert "cannot run within the GPUQuotas of its namespace" in world.reason("evil")
    assert "whatever else" not in world.reason("evil"), "it could, once pods of its own namespace end"


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
    world = World({"n1": 2}, reserve_limit=120.0)
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
    world = World({"n1": 2}, reserve_limit=120.0)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    members = [*(member(f"a{i}", "a", 2, created=1 + i, gpu_mem=P100) for i in range(2))]
    waiting_long(world, *members, *(member(f"b{i}", "b", 2, created=11 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") == RESERVED
    world.clock.advance(100)
    world.run(1)
    for name in ("a0", "a1"):
        world.delete(name)
    world.run(1)
    assert world.schedule("z") == RESERVED, "the second keeps them for what is left"
    world.clock.advance(21)
    world.run(2)
    assert "z" in world.bound()
    world.delete("z")
    for name in ("b0", "b1"):
        world.delete(name)
    waiting_long(world, *(member(f"c{i}", "c", 2, created=21 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("y", created=95, gpu_mem=P100))
    world.run(1)
    assert "y" in world.bound(), "the namespace rests"


@pytest.mark.parametrize("also_ends", [False, True])
def test_a_later_gang_waits_for_what_is_kept_and_is_planned_when_that_is_over(also_ends):
    """`also_ends`: a pod without cards has ended meanwhile."""
    world = World({"n1": 2}, reserve_limit=120.0)
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
    world.state.next_requeue_node()
    world.delete("a0", "a1")
    world.clock.advance(10)
    world.keep()
    assert world.phase("b") == "Reserved"
    assert world.state.next_requeue_node() == "n1"


def test_the_reservation_of_a_deleted_gang_ends_at_once():
    world = World({"n1": 2})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") == RESERVED
    freed = world.state._cache.capacity.freed_count
    world.delete("g0", "g1")
    assert world.state._cache.gang_cards._by_node == {}
    assert world.state._cache.capacity.freed_count > freed
    assert world.schedule("z") == ""


def test_it_reserves_no_more_cards_than_it_asks_for():
    """A member with one card on each of four nodes of four cards reserves four, not sixteen."""
    world = World({f"n{i}": NodeSpec(4, labels={"name": f"n{i}"}) for i in range(4)})
    for i in range(4):
        world.create(*(single(f"s{i}{j}", selector={"name": f"n{i}"}, gpu_mem=P100 // 2) for j in range(7)))
    world.run(2)
    gang = (member(f"g{i}", "g", 4, created=30, selector={"name": f"n{i}"}, whole_gpu=1) for i in range(4))
    waiting_long(world, *gang)
    world.create(*(single(f"t{i}", created=90 + i, gpu_mem=P100 // 2, selector={"name": f"n{i}"}) for i in range(4)))
    assert set(world.run(2).values()) == {RESERVED, WAITS}
    world.delete(*(f"s{i}0" for i in range(4)))
    world.run(2)
    assert len([name for name in world.bound() if name.startswith("t")]) == 4


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


def test_the_cpu_of_a_pod_with_several_cards_becomes_free_once():
    """Free: 5 cpu, and 4 more once the other pod has ended. The two members need 10."""
    world = World({"n1": NodeSpec(2, cpu=9)})
    world.create(single("other", cpu="4", whole_gpu=2))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, cpu="5", whole_gpu=1) for i in range(2)))
    assert "cannot run even if all other pods end" in world.reason("g")


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


@pytest.fixture
def during_search(monkeypatch):
    """Return a function: a change that comes once, during the next search for cards, after which it is sick, too: a
    card that was well when the search began.
    """
    search_cards = reservation.search_cards

    def set_change(world, change=lambda: None):
        changes = [change]

        def search_then_change(*args):
            assert not world.state._lock._lock.locked(), "filter waits"
            cards_found = search_cards(*args)
            if changes:
                changes.pop()()
                world.state.set_card(*as_card(extended_resource(1, node="n1", health="Unhealthy")))
            return cards_found

        monkeypatch.setattr(reservation, "search_cards", search_then_change)

    return set_change


def only_n1() -> World:
    """The gang `g` waits, and only n1 could take it."""
    world = World({"n1": NodeSpec(2, labels={"name": "n1"}), "n2": 1, "n3": 1})
    world.create(single("x", gpu_mem=P100, selector={"name": "n1"}))
    world.run(1)
    world.create(member("g", "g", 1, created=1, whole_gpu=2))
    world.run(3)
    world.clock.advance(61)
    return world


def test_a_search_for_a_gang_that_waits_no_more_is_not_used_when_one_of_its_name_waits_later(during_search):
    world = only_n1()

    def recreate():
        world.delete("g")
        world.create(member("g", "g", 1, created=90, whole_gpu=2))

    during_search(world, recreate)
    world.run(1)
    assert holder(world) == ""
    world.run(3)
    world.clock.advance(61)
    world.run(5)
    assert "cannot run while suitable GPUs or nodes are cordoned or unhealthy" in world.reason("g")


def test_a_search_of_an_earlier_epoch_is_not_used(during_search):
    world = only_n1()
    during_search(world, world.state.forget_plans)
    world.run(1)
    assert holder(world) == ""
    world.run(5)
    assert "cannot run while suitable GPUs or nodes are cordoned or unhealthy" in world.reason("g")


@pytest.fixture
def slow_searches(monkeypatch):
    """Return a function: from now on each search takes so many seconds. It returns the names of the gangs' first
    members, by search.
    """

    def slow_down(world: World, seconds: float) -> list[str]:
        searches, search_cards = [], reservation.search_cards

        def slow(snapshot, gang, *args):
            searches.append(gang.members[0].name)
            world.clock.advance(seconds)
            return search_cards(snapshot, gang, *args)

        monkeypatch.setattr(reservation, "search_cards", slow)
        return searches

    return slow_down


def gangs_that_never_fit(world: World, count: int) -> None:
    """Each asks for more cards than a node has, and waits long enough for a reservation."""
    for i in range(count):
        pods = [member(f"bad{i:02}-{j}", f"bad{i:02}", 9, namespace="bad", gated=False, gpu_mem=P100) for j in range(9)]
        world.create(*pods)
        world.filter(f"bad{i:02}-0")
    world.clock.advance(61)
    for i in range(count):
        world.filter(f"bad{i:02}-0")


@pytest.mark.parametrize(("count", "seconds"), [(1, 40.0), (4, 11.0), (32, 1.0)])
def test_a_gang_that_fits_is_planned_in_the_next_step_however_long_searches_take(count, seconds, slow_searches):
    world = World({"n1": 1, "n2": 1}, max_waiting=1000, refusals=2)
    world.create(*(single(f"x{i}", priority=5, gpu_mem=P100) for i in range(2)))
    world.run(1)
    gangs_that_never_fit(world, count)
    world.create(*(member(f"g{i}", "g", 2, created=90, gated=False, gpu_mem=P100) for i in range(2)))
    assert world.filter("g0")[0] == []
    assert world.filter("g1")[0] == []
    searches = slow_searches(world, seconds)
    world.delete("x0", "x1")
    world.keep()
    assert world.phase("g") == "Reserved"
    assert len(searches) == 1


def test_each_gang_that_waits_long_gets_a_search_however_long_searches_take(slow_searches):
    """Searches for those before it come due again before its own has begun."""
    world = World({"n1": 1, "n2": 1}, max_waiting=1000, refusals=2)
    gangs_that_never_fit(world, 5)
    searches = slow_searches(world, 20.0)
    for _ in range(10):
        world.keep()
    assert [name[:5] for name in searches] == [f"bad0{i}" for i in range(5)] * 2


def test_a_search_that_fails_stops_no_other_gang(monkeypatch):
    world = World({"n1": 1, "n2": 1}, max_waiting=1000, refusals=2)
    world.create(*(single(f"x{i}", priority=5, gpu_mem=P100) for i in range(2)))
    world.run(1)
    gangs_that_never_fit(world, 2)
    world.create(*(member(f"g{i}", "g", 2, created=90, gated=False, gpu_mem=P100) for i in range(2)))
    world.filter("g0")
    world.filter("g1")
    searches, search_cards = [], reservation.search_cards

    def fail_for_first(snapshot, gang, *args):
        searches.append(gang.members[0].name)
        if gang.members[0].name.startswith("bad00"):
            raise RuntimeError("planted")
        return search_cards(snapshot, gang, *args)

    monkeypatch.setattr(reservation, "search_cards", fail_for_first)
    world.delete("x0", "x1")
    with capture_logs() as logs:
        world.keep()
        assert world.phase("g") == "Reserved"
        for _ in range(5):
            world.keep()
    assert [name[:5] for name in searches] == ["bad00", "bad01"], "it is tried again later"
    assert [(log["log_level"], log["gang"]) for log in logs] == [("error", "bad/bad00")]
    world.clock.advance(31)
    for _ in range(3):
        world.keep()
    assert sorted(name[:5] for name in searches[2:]) == ["bad00", "bad01"]


def test_a_search_that_fails_for_a_gang_that_is_gone_delays_no_later_gang_of_its_name(monkeypatch):
    world = World({"n1": 1, "n2": 1}, max_waiting=1000, refusals=1)
    gangs_that_never_fit(world, 1)
    searches, search_cards = [], reservation.search_cards

    def fail(*args):
        searches.append(1)
        if len(searches) > 1:
            return search_cards(*args)
        world.delete(*(f"bad00-{j}" for j in range(9)))
        raise RuntimeError("planted")

    monkeypatch.setattr(reservation, "search_cards", fail)
    world.keep()
    world.create(*(member(f"new{j}", "bad00", 2, namespace="bad", gated=False, whole_gpu=2) for j in range(2)))
    world.filter("new0")
    for _ in range(2):
        world.keep()
    assert len(searches) == 2


def test_no_cards_are_searched_for_gangs_after_the_one_that_has_the_reservation(slow_searches):
    world = World({"n1": 2})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    searches = slow_searches(world, 0.1)
    waiting_long(world, *(member(f"g{i}", f"g{i}", 1, created=i, whole_gpu=2) for i in range(3)))
    for _ in range(40):
        world.clock.advance(1)
        world.keep()
    assert len(searches) > 1
    assert set(searches) == {"g0"}


def test_what_a_gang_that_could_not_run_was_told_is_not_said_of_it_as_it_is_now():
    world = World({"n1": 1, "n2": 1})
    world.create(member("g0", "g", 2, created=1, whole_gpu=2), member("g1", "g", 2, created=2, whole_gpu=1))
    world.run(3)
    world.clock.advance(61)
    world.run(5)
    assert "even if all other pods end: no node has capacity for g0" in world.reason()
    world.create(single("x", whole_gpu=1))
    world.run(1)
    world.delete("g0")
    world.create(member("g2", "g", 2, created=3, whole_gpu=1))
    world.run(3)
    assert "even if all other pods end" not in world.reason()


def test_what_was_found_for_former_members_is_not_said_of_those_that_came_during_the_search(monkeypatch):
    world = World({"n1": 1, "n2": 1})
    world.create(single("other", whole_gpu=1))
    world.run(1)
    search_cards = reservation.search_cards

    def search_then_change(*args):
        cards_found = search_cards(*args)
        if "g0" in world.pods:
            assert "no node has capacity for g0" in cards_found.problem
            world.create(member("g2", "g", 2, gated=False, created=3, whole_gpu=1))
            world.delete("g0")
        return cards_found

    monkeypatch.setattr(reservation, "search_cards", search_then_change)
    waiting_long(world, member("g0", "g", 2, created=1, whole_gpu=2), member("g1", "g", 2, created=2, whole_gpu=1))
    assert "g2" in world.pods
    assert "even if all other pods end" not in world.reason()


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


# What of a card, and of a node.

FIRST = {"cardwise.dev/queue-priority": "999999999"}


def test_a_gang_of_a_few_mib_has_these_mib_reserved_and_no_more():
    """Seen: 4 members of 1 MiB closed 64 GiB for minutes."""
    world = World({"n1": NodeSpec(1, labels={"name": "n1"}), "n2": 1})
    here = {"name": "n1"}
    world.create(single("x", selector=here, gpu_mem=P100))
    world.run(1)
    gang = (member(f"g{i}", "g", 4, created=1, gpu_mem=1, selector=here, annotations=FIRST) for i in range(4))
    waiting_long(world, *gang)
    world.delete("x")
    world.create(single("all", created=90, selector=here, gpu_mem=P100))
    assert world.schedule("all") == RESERVED
    world.create(single("rest", created=90, selector=here, gpu_mem=P100 - 4))
    assert world.schedule("rest") == ""
    world.settle()
    world.run(1)
    assert {"g0", "g1", "g2", "g3", "rest"} <= set(world.bound())


def test_what_a_card_has_beside_the_gangs_part_is_for_others_once_pods_there_have_ended():
    world = World({"n1": 1})
    world.create(*(single(f"x{i}", gpu_mem=P100 // 4) for i in range(4)))
    world.run(1)
    waiting_long(world, member("g", "g", 1, created=1, gpu_mem=P100 // 2))
    world.delete("x0")
    world.create(single("z", created=90, gpu_mem=P100 // 4))
    assert world.schedule("z") == RESERVED
    world.create(single("vip", created=91, priority=1, gpu_mem=P100 // 4))
    assert world.schedule("vip") == "", "pods that come before the gang leave it nothing"
    world.settle()
    world.delete("x1", "x2", "x3")
    assert world.schedule("z") == "", "a quarter is left beside the gang's half"


def test_the_example_of_the_docstring():
    theory, gib = theory_of("extender.gangs.reservation"), 1024
    card, member_size, ends, stays, other = 64, 40, 40, 10, 60
    world = World({"n1": NodeSpec(2, mem=card * gib)})
    for name, size in (("ends", ends), ("stays", stays), ("other", other)):
        world.create(single(name, gpu_mem=size * gib))
        assert world.schedule(name) == ""
    world.settle()
    assert f"two members of {member_size} GiB each wait for two cards of {card} GiB" in theory
    assert f"{ends + stays} GiB of the first card are in use, and {other} GiB of the second" in theory
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1, gpu_mem=member_size * gib) for i in range(2)))
    assert f"On each card {member_size} GiB are reserved, so no later pod gets memory there" in theory
    world.create(single("least", created=90, gpu_mem=1))
    assert world.schedule("least") == RESERVED

    world.delete("ends")
    free = card - stays
    rest = free - member_size
    assert f"When a pod of {ends} GiB on the first card ends, {free} GiB are free: {member_size} for the gang" in theory
    assert f"and {rest} for other pods" in theory
    world.create(*(single(f"takes-{mib}", created=91, gpu_mem=mib) for mib in (rest * gib + 1, rest * gib)))
    assert world.schedule(f"takes-{rest * gib + 1}") == RESERVED
    assert world.schedule(f"takes-{rest * gib}") == ""
    world.settle()

    assert "As soon as both members fit, the gang is planned and the reservation ends" in theory
    world.delete("other")
    world.run(3)
    assert {"g0", "g1"} <= set(world.bound())
    assert world.schedule("least") == ""


def test_the_example_of_the_docstring_of_the_search(monkeypatch):
    theory, gib, size, requested, in_use = theory_of("extender.gangs.cardsearch"), 1024, 64, 40, (10, 50, 30, 60)
    world = World({"n1": NodeSpec(len(in_use), mem=size * gib)})
    for i, used in enumerate(in_use):
        world.state.set_pod(as_pod(bound(f"p{i}", used * gib, i)))
    world.create(*(member(f"g{i}", "g", 2, created=1, gpu_mem=requested * gib) for i in range(2)))
    members = list(world.state.gangs.gang_of("uid-g0").members.values())
    with world.state.view():
        snapshot = world.state._cache.snapshot()
    cards = snapshot.ledger.node("n1").cards
    copied, find_unplaceable_member = [], cardsearch._CardSearch._find_unplaceable_member

    def recorded(search):
        lacking = find_unplaceable_member(search)
        capacity = sum(search._vacant(members[0].request, members[0].load).counts.values())
        copied.append((sorted(search._added["n1"]), capacity))
        return lacking

    monkeypatch.setattr(cardsearch._CardSearch, "_find_unplaceable_member", recorded)

    def search(*given_up: int) -> tuple[list[int], int]:
        """The planned cards, and the GiB to be freed on them."""
        copied.clear()
        gang = GangWithOffers("default", members, frozenset(), {}, {cards[i].uuid: 1 for i in given_up})
        planned = cardsearch.search_cards(snapshot, gang, "binpack", lambda: None).outcome
        indices = sorted(share.index for assignment in planned.assignments.values() for share in assignment.shares())
        return indices, sum(max(0, in_use[i] + requested - size) for i in indices)

    assert f"two members request {requested} GiB each. A node has four cards of {size} GiB" in theory
    assert f"with {in_use[0]}, {in_use[1]}, {in_use[2]} and {in_use[3]} GiB in use" in theory
    (first, second), missing = search()
    (cards_before, capacity), (cards_then, enough) = copied
    assert cards_before == [0]
    assert f"With card 0, the copy has capacity for {capacity} member." in theory
    assert (cards_then, enough) == ([0, 2], len(members))
    assert "With card 2, the next in order, the copy has capacity for both" in theory
    assert f"on cards {first} and {second}, and {missing} GiB must be freed on card {second}" in theory
    (first, second), missing = search(2)
    assert "If card 2 was given up, card 1 comes first" in theory
    assert f"on cards {first} and {second}, and {missing} GiB must be freed." in theory
    assert [on_copy for on_copy, _ in copied] == [[0], [0, 1]]


def test_whole_cards_and_percent_of_sms_are_reserved_too():
    world = World({"n1": NodeSpec(2, labels={"name": "n1"}), "n2": NodeSpec(1, labels={"name": "n2"})})
    whole, part = {"name": "n1"}, {"name": "n2"}
    world.create(single("x", selector=whole, gpu_mem=100), single("y", selector=part, gpu_mem=100, gpu_core=80))
    world.create(single("w", selector=whole, whole_gpu=1))
    world.run(1)
    waiting_long(
        world,
        member("g0", "g", 2, created=1, selector=whole, whole_gpu=1),
        member("g1", "g", 2, created=1, selector=part, gpu_mem=100, gpu_core=60),
    )
    world.delete("y")
    world.create(
        single("a", created=90, selector=whole, gpu_mem=1),
        single("b", created=90, selector=part, gpu_mem=1, gpu_core=41),
        single("c", created=90, selector=part, gpu_mem=1, gpu_core=40),
    )
    refused = world.run(1)
    assert RESERVED in refused["a"], "a card that is to be given whole"
    assert refused["b"] == RESERVED
    assert "c" in world.bound()


def test_nothing_is_reserved_where_only_cpu_is_short():
    world = World({"n1": NodeSpec(1, cpu=8)})
    world.create(single("x", cpu="5", gpu_mem=P100 // 2))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=i, cpu="2", gpu_mem=P100 // 4) for i in range(2)))
    assert world.phase() == "Waiting"
    world.create(single("other", created=90, gpu_mem=P100 // 2, cpu="1"))
    assert world.schedule("other") == ""


def test_cards_that_are_short_are_reserved_and_those_of_a_node_that_lacks_only_cpu_are_not():
    world = World({"n1": NodeSpec(1, cpu=8, labels={"name": "n1"}), "n2": NodeSpec(1, labels={"name": "n2"})})
    world.create(
        single("x", cpu="7", selector={"name": "n1"}, gpu_mem=100), single("y", selector={"name": "n2"}, gpu_mem=P100)
    )
    world.run(1)
    waiting_long(
        world,
        *(member(f"g{i}", "g", 3, created=1, selector={"name": "n1"}, cpu="1", gpu_mem=P100 // 4) for i in range(2)),
        member("g2", "g", 3, created=1, selector={"name": "n2"}, gpu_mem=P100 // 2),
    )
    assert world.phase() == "Waiting"
    world.delete("y")
    world.create(
        single("a", created=90, cpu="1", selector={"name": "n1"}, gpu_mem=P100 - 100),
        single("b", created=90, selector={"name": "n2"}, gpu_mem=P100),
    )
    assert world.run(1) == {"b": RESERVED} | {f"g{i}": WAITS for i in range(3)}
    assert "a" in world.bound()


def test_it_is_reserved_only_what_quotas_leave_by_now():
    """A quota that became smaller, or that pods of the namespace have used since the search."""
    world = World({"n1": 2})
    world.state.set_quota(*as_quota({"memoryMiB": 2 * P100}))
    world.create(single("x", gpu_mem=P100, namespace="team-b"))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=i, gpu_mem=P100) for i in range(2)))
    world.create(single("z", created=90, gpu_mem=P100, namespace="team-b"))
    assert world.schedule("z") == RESERVED
    world.state.set_quota(*as_quota({"memoryMiB": P100}))
    world.run(2)
    assert "z" in world.bound()


def test_a_gang_that_became_smaller_has_less_reserved():
    world = World({"n1": 2})
    world.put_group("g", minMember=2)
    world.create(*(single(f"x{i}", gpu_mem=P100) for i in range(2)))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", None, created=i, gpu_mem=P100) for i in (1, 2)))
    world.put_group("g", minMember=1)
    world.run(1)
    world.delete("x0", "x1")
    world.create(single("z", created=90, gpu_mem=P100))
    assert world.schedule("z") == ""


# Which cards.


def test_a_card_on_which_nothing_ends_is_left_for_others_that_would_do_sooner():
    """A pod of 1 MiB that runs for ever keeps its card from being the emptiest for ever."""
    world = World({"n1": NodeSpec(1, labels={"name": "n1"}), "n2": NodeSpec(1, labels={"name": "n2"})})
    world.create(single("stays", selector={"name": "n1"}, gpu_mem=1))
    world.create(single("old", selector={"name": "n2"}, gpu_mem=P100))
    world.run(1)
    waiting_long(world, member("g", "g", 1, created=1, whole_gpu=1))
    world.create(single("a", created=90, selector={"name": "n1"}, gpu_mem=100))
    assert world.schedule("a") == RESERVED
    world.run(100)
    assert "a" in world.bound(), "the reservation has moved"
    world.delete("old")
    world.create(single("b", created=90, selector={"name": "n2"}, gpu_mem=100))
    assert world.schedule("b") == RESERVED
    world.run(2)
    assert world.phase() == "Running"


def test_a_stream_of_small_pods_on_every_card_does_not_starve_a_gang_of_whole_cards():
    """Each pod runs for 90 seconds, and another comes at once. Without a reservation no card is ever empty."""
    world = World({f"n{i}": 4 for i in range(2)}, reserve_limit=600.0)
    began: dict[str, int] = {}

    def stream(second: int) -> None:
        for name in [name for name, at in began.items() if second - at >= 90]:
            if name in world.bound():
                world.delete(name)
                del began[name]
        for name in world.bound():
            began.setdefault(name, second)
        waiting = [name for name in world.pods if name.startswith("s") and name not in world.bound()]
        for i in range(4 - len(waiting)):
            world.create(single(f"s{second}-{i}", created=100 + second, gpu_mem=P100 // 4))

    for second in range(40):
        stream(second)
        world.run(1)
    world.create(*(member(f"g{i}", "g", 2, created=50, whole_gpu=2) for i in range(2)))
    for second in range(40, 400):
        stream(second)
        world.run(1)
        if world.phase() == "Running":
            break
    assert world.phase() == "Running"
    assert second < 300, "after a minute, and then at most as long as a pod runs"


def test_the_emptiest_cards_are_reserved():
    world = World({f"n{i}": NodeSpec(1, labels={"name": f"n{i}"}) for i in range(3)})
    for i in range(3):
        world.create(single(f"x{i}", selector={"name": f"n{i}"}, gpu_mem=(3 - i) * 1000))
    world.run(1)
    waiting_long(world, member("g", "g", 1, created=1, whole_gpu=1))
    world.create(*(single(f"a{i}", created=90, selector={"name": f"n{i}"}, gpu_mem=10) for i in range(3)))
    world.run(1)
    assert set(world.bound()) == {"x0", "x1", "x2", "a0", "a1"}


# For whom.


def test_between_namespaces_the_place_in_the_queue_that_a_user_may_set_counts_nothing():
    """Neither for a gang against older pods of others, nor for small pods against an older gang."""
    world = World({"n1": 2})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=50, gpu_mem=P100, annotations=FIRST) for i in range(2)))
    jumper = single("jumper", created=90, gpu_mem=P100)
    jumper["metadata"] |= {"namespace": "team-b", "annotations": FIRST}
    older = single("older", created=10, gpu_mem=P100)
    older["metadata"]["namespace"] = "team-b"
    world.create(jumper)
    assert world.schedule("jumper") == RESERVED
    world.create(older)
    assert world.schedule("older") == ""


def gangs_of(world: World, *namespaces: str, per_namespace: int = 1) -> None:
    """Gangs of two whole cards, those of the first namespace first by their place in the queue."""
    for place, namespace in enumerate(namespaces):
        annotations = {"cardwise.dev/queue-priority": str(100 - place)}
        for i in range(per_namespace):
            name = f"{namespace}{i}"
            world.create(
                member(name, name, 1, namespace=namespace, created=10 + place, whole_gpu=2, annotations=annotations)
            )


def holder(world: World) -> str:
    """The namespace for which cards are reserved, or ""."""
    gang = world.state._cache.gang_cards._gang
    return gang.namespace if gang is not None else ""


def test_namespaces_take_turns_whatever_places_in_the_queue_they_give_themselves():
    """Two that use up their time in turns would leave none for the third, though each rests after its time."""
    world = World({"n1": 2}, reserve_limit=120.0, refusals=1)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    gangs_of(world, "team-a", "team-b", "team-c")
    seen = []
    for _ in range(90):
        world.run(1, seconds=5.0)
        if holder(world) != (seen[-1] if seen else ""):
            seen.append(holder(world))
    assert seen[:4] == ["team-a", "team-b", "team-c", "team-a"]


def test_many_gangs_of_one_namespace_that_could_never_run_delay_those_of_another_by_one_search_only(monkeypatch):
    world = World({f"n{i}": NodeSpec(2, labels={"name": f"n{i}"}) for i in range(1, 5)}, refusals=1)
    world.create(single("x", selector={"name": "n1"}, gpu_mem=P100))
    world.run(1)
    searches, search_cards = [], reservation.search_cards

    def recorded(snapshot, gang, *args):
        searches.append(gang.namespace)
        return search_cards(snapshot, gang, *args)

    monkeypatch.setattr(reservation, "search_cards", recorded)
    for i in range(12):
        world.create(member(f"e{i}", f"e{i}", 1, namespace="team-a", created=1, whole_gpu=3))
    world.create(member("b", "b", 1, namespace="team-b", created=10, selector={"name": "n1"}, whole_gpu=2))
    world.run(15)
    assert holder(world) == "team-b"
    assert searches.index("team-b") == 1


def test_preemption_leaves_a_gang_its_reservation():
    """A pod that comes after the gang makes room beside what is reserved, or nowhere."""
    world = World({"n1": 1})
    world.create(*(single(f"x{i}", priority=-i, gpu_mem=P100 // 4) for i in range(4)))
    world.run(1)
    waiting_long(world, member("g", "g", 1, created=1, gpu_mem=P100 // 2))
    claimant = Pod(single("p", created=90, gpu_mem=P100 // 4)).waiting()
    victims = world.state.preemption.answer_preempt(claimant, "binpack", {"n1": []}, member=False)
    assert len(victims["n1"].uids) == 3


def record_lock(monkeypatch, world, module, name):
    """A list to which each call of this function of the module adds whether the state lock is held."""
    held, function = [], getattr(module, name)

    def record(*arguments):
        held.append(world.state._lock._lock.locked())
        return function(*arguments)

    monkeypatch.setattr(module, name, record)
    return held


def test_what_the_reserved_cards_lack_is_not_computed_under_the_lock(monkeypatch):
    """A gang of 500 members of 8 cards has 4,000 reserved cards."""
    world = World({"n1": 2})
    held = record_lock(monkeypatch, world, reservation, "_missing_by_card")
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    world.clock.advance(61)
    world.run(3)
    assert held
    assert not any(held)


def test_charges_of_the_reserved_cards_are_not_summed_under_the_lock(monkeypatch):
    """A step compares the sums with each entry of a quota. They are summed again only after a card's kind changed."""
    world = World({"n1": 2})
    held = record_lock(monkeypatch, world, placement, "charges_by_kind")
    world.state.set_quota(*as_quota({"memoryMiB": 3 * P100}, {"shares": 5, "model": "P100"}))
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    world.run(5)
    assert held
    assert not any(held)
    summed = len(held)
    world.state.set_card(*as_card(extended_resource(1, model="V100")))
    world.run(3)
    assert len(held) == summed + 2, "once for each member"
    assert not any(held)


def test_while_charges_are_to_be_summed_again_the_reservation_stays(monkeypatch):
    """A kind changed between the sums and the hold that chooses the gang."""
    world = World({"n1": 2})
    world.state.set_quota(*as_quota({"memoryMiB": 3 * P100}, {"shares": 5, "model": "P100"}))
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    waiting_long(world, *(member(f"g{i}", "g", 2, created=1 + i, gpu_mem=P100) for i in range(2)))
    places = world.state.gangs._places._reservation
    before = places._gang
    assert before is not None
    monkeypatch.setattr(GangReservation, "_update_charges", lambda *_: None)
    world.state.set_card(*as_card(extended_resource(1, model="V100")))
    world.run(3)
    assert places._gang is before
    monkeypatch.undo()
    world.run(1)
    assert places._gang is before


def test_of_20000_gangs_that_wait_few_are_read_and_each_namespace_has_its_turn():
    """All of them were read three times a step with the lock held: 34 to 49 ms."""
    names = [
        f"{namespace}/g{i:05}" for namespace, count in (("evil", 20_000), ("a", 2), ("b", 40)) for i in range(count)
    ]
    gangs = [((0, 0, name[-5:], name), SimpleNamespace(namespace=name.partition("/")[0])) for name in names]
    first = SimpleNamespace(namespace="default")
    due = reservation.select_due([*gangs, ((-1, 0, "z", "default/g1"), first)])
    assert due[0] is first
    assert [gang.namespace for gang in due[1:7]] == ["a", "b", "evil", "a", "b", "evil"]
    assert Counter(gang.namespace for gang in due) == {"evil": 32, "b": 32, "a": 2, "default": 1}
    single_gangs = [((0, 0, "t", f"n{i:04}/g"), SimpleNamespace(namespace=f"n{i:04}")) for i in range(2000)]
    assert len(reservation.select_due(single_gangs)) == reservation._MAX_DUE


def test_an_error_in_the_work_of_one_gang_does_not_end_the_step_of_others(monkeypatch):
    world = World({"n1": 1})
    world.create(*(member(f"p-{i}", f"g{i}", 2, gpu_mem=P100) for i in range(3)))
    advanced, advance = [], Gangs._advance_gang

    def fail(gangs, gang, work, due):
        advanced.append(gang.key)
        if gang.key == "default/g1":
            raise KeyError(gang.key)
        advance(gangs, gang, work, due)

    monkeypatch.setattr(Gangs, "_advance_gang", fail)
    with capture_logs() as logs:
        world.state.gangs.step()
    assert sorted(advanced) == ["default/g0", "default/g1", "default/g2"]
    assert [line["gang"] for line in logs] == ["default/g1"]
