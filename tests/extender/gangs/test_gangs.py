"""Gangs on the state: what filter and bind answer, what is held, and what happens when something goes wrong."""

import pytest

from cardwise.core.api import names
from cardwise.core.api.assignment import CardDemand
from cardwise.core.api.request import Load
from cardwise.core.gangs.gangs import MAX_REQUEST_KINDS
from cardwise.core.values.refusals import Refusal
from extender.cache.clusterview import ClusterView
from extender.records.nodeinfo import PlacedPod
from tests.build import P100, container, extended_resource
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_card, as_quota

INCOMPLETE, WAITS = Refusal.GANG_INCOMPLETE.text, Refusal.GANG_WAITS.text
BACKS_OFF, FOLLOWS = Refusal.GANG_BACKS_OFF.text, Refusal.GANG_FOLLOWS.text
RESERVED = Refusal.GANG_RESERVED.text


def trio(world, *, gang="g", gated=False, **resources):
    world.create(
        *(member(f"{gang}{i}", gang, gated=gated, created=i, **(resources or {"gpu_mem": P100})) for i in range(3))
    )


def test_the_articles_scene():
    """Three free cards, in the queue A1, x, y, A2, A3: A is never bound in part, and nobody starves."""
    world = World({"n1": 2, "n2": 1})
    order = [
        member("a1", "a", gated=False, gpu_mem=P100),
        single("x", created=1, gpu_mem=P100),
        single("y", created=2, gpu_mem=P100),
        member("a2", "a", gated=False, created=3, gpu_mem=P100),
        member("a3", "a", gated=False, created=4, gpu_mem=P100),
    ]
    for pod in order:
        world.create(pod)
        assert world.schedule(pod["metadata"]["name"]) in ("", INCOMPLETE, WAITS)
        world.settle()
    assert set(world.bound()) == {"x", "y"}
    assert world.unbound_shares() == 0
    world.run(3)
    assert set(world.bound()) == {"x", "y"}, "a gang that does not fit is not bound in part"
    assert world.unbound_shares() == 0, "and holds nothing"
    world.delete("x", "y")
    world.run(4)
    assert set(world.bound()) == {"a1", "a2", "a3"}
    assert world.over_full() == []


def test_a_member_waits_in_bind_until_all_have_come():
    world = World({"n1": 3})
    trio(world)
    world.run(0)
    assert world.schedule("g0") == ""
    world.settle()
    assert world.schedule("g1") == ""
    world.settle()
    assert (world.bound(), world.phase(), world.unbound_shares()) == ({}, "Reserved", 3)
    assert world.schedule("g2") == ""
    assert world.phase() == "Binding"
    world.settle()
    assert set(world.bound()) == {"g0", "g1", "g2"}
    assert world.phase() == "Running"


def test_cards_of_a_plan_are_nobody_elses():
    world = World({"n1": 3})
    trio(world)
    world.schedule("g0")
    world.create(single("x", created=9, priority=100, gpu_mem=P100))
    assert world.schedule("x") == Refusal.NO_MEMORY.text
    world.schedule("g1")
    world.schedule("g2")
    world.settle()
    assert set(world.bound()) == {"g0", "g1", "g2"}


def test_no_hold_is_longer_than_a_podgroup_could_say():
    """Also of a gang without a PodGroup, where `PERMIT_SECONDS` is more."""
    world = World({"n1": 3}, max_permit=10.0)
    trio(world)
    world.schedule("g0")
    world.clock.advance(11)
    world.keep()
    world.settle()
    assert world.errors == [("g0", "g1, g2 did not reach bind within 10 s")]


def test_a_hold_ends_when_a_member_does_not_come():
    world = World({"n1": 3})
    trio(world)
    world.schedule("g0")
    world.schedule("g1")
    world.clock.advance(29)
    world.keep()
    assert world.phase() == "Reserved"
    world.clock.advance(2)
    world.keep()
    world.settle()
    assert world.errors == [(name, "g2 did not reach bind within 30 s") for name in ("g0", "g1")]
    assert (world.unbound_shares(), world.phase(), world.bound()) == (0, "Waiting", {})
    assert world.schedule("g0") == BACKS_OFF
    world.clock.advance(1)
    assert world.schedule("g0") == WAITS, "the one that did not come must show itself first"
    assert world.schedule("g2") == ""
    assert world.schedule("g0") == world.schedule("g1") == ""
    world.settle()
    assert len(world.bound()) == 3


def test_where_nothing_else_changes_a_node_that_failed_once_is_tried_again():
    world = World({"n1": 3})
    trio(world)
    assert world.filter("g0")[0] == ["n1"]
    world.clock.advance(31)
    world.keep()  # the hold has ended: g0 was answered n1, and did not come to bind
    world.run(10)
    assert set(world.bound()) == {"g0", "g1", "g2"}


def test_a_member_that_comes_to_filter_again_and_again_does_not_hold_the_cards_for_longer():
    """kube-scheduler may refuse it after filter, each time: another gang would wait for these cards for ever."""
    world = World({"n1": 3})
    trio(world)
    for _ in range(4):
        world.filter("g0")
        world.clock.advance(10)
        world.keep()
    assert (world.unbound_shares(), world.phase()) == (0, "Waiting")
    trio(world, gang="h")
    for name in ("h0", "h1", "h2"):
        assert world.schedule(name) == ""
    world.settle()
    assert set(world.bound()) == {"h0", "h1", "h2"}


def test_every_member_that_comes_gives_the_others_more_time():
    world = World({"n1": 3})
    trio(world)
    for name in ("g0", "g1", "g2"):
        assert world.schedule(name) == ""
        world.clock.advance(25)
        world.keep()
    world.settle()
    assert len(world.bound()) == 3


@pytest.mark.parametrize("change", ["filter", "delete", "terminate", "cancel", "fail", "stop", "lease"])
def test_what_takes_one_away_ends_the_whole_hold(change):
    world = World({"n1": 3})
    trio(world)
    world.schedule("g0")
    world.schedule("g1")
    hold = world.binding[0].hold
    if change == "filter":
        world.filter("g1")
    elif change == "delete":
        world.delete("g1")
    elif change == "terminate":
        world.terminate("g2")
    elif change == "cancel":
        world.state.gangs.cancel_permit(hold, "the connection closed")
    elif change == "fail":
        world.finish("g2", "Failed")
    elif change == "stop":
        world.state.gangs.cancel_permits("the extender is shutting down")
    else:
        world.state.forget_plans()
    assert hold.done.is_set()
    assert not hold.allowed
    assert hold.reason
    assert world.unbound_shares() == 0
    assert world.phase() != "Reserved"
    world.settle()
    assert world.bound() == {}


def test_after_the_last_has_come_nothing_goes_back():
    world = World({"n1": 3})
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    hold = world.binding[0].hold
    world.settle(only="g0")
    world.state.gangs.cancel_permit(hold, "the connection closed")
    world.filter("g1")
    world.clock.advance(60)
    world.keep()
    assert world.phase() == "Binding"
    world.settle()
    assert len(world.bound()) == 3


def test_a_post_that_fails_is_tried_again_at_the_same_place():
    world = World({"n1": 3})
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    world.settle(only="g0")
    world.settle(land=False)
    assert set(world.bound()) == {"g0"}
    assert world.unbound_shares() == 2, "the others keep their cards"
    world.create(single("x", created=9, priority=9, gpu_mem=P100))
    assert world.schedule("x") == Refusal.NO_MEMORY.text
    assert world.schedule("g1") == world.schedule("g2") == ""
    world.settle()
    assert set(world.bound()) == {"g0", "g1", "g2"}


def test_a_killed_leaders_half_is_finished_first():
    world = World({"n1": 3})
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    world.settle(only="g1")
    world.restart()
    assert world.phase() == "PartlyBound"
    assert world.unbound_shares() == 2, "before anybody asks"
    world.create(single("x", created=9, priority=9, gpu_mem=P100))
    assert world.schedule("x") == Refusal.NO_MEMORY.text
    assert world.schedule("g2") == ""
    world.settle()
    assert world.schedule("g0") == ""
    world.settle()
    assert set(world.bound()) == {"g0", "g1", "g2"}
    assert world.phase() == "Running"


def test_a_half_that_cannot_be_finished_is_evicted_and_tried_whole():
    world = World({"n1": 3}, rollback=120.0)
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    world.settle(only="g1")
    # Somebody else has taken the cards meanwhile.
    world.nodes["n1"].cards = 1
    world.restart()
    assert world.phase() == "PartlyBound"
    world.run(100)
    assert world.evicted == []
    assert world.unbound_shares() == 0
    world.run(25)
    assert world.evicted == ["g1"]
    world.run(3)
    assert world.bound() == {}
    world.create(member("g1-again", created=9, gpu_mem=P100))
    world.add_node("n2", NodeSpec(2))
    world.run(70)
    assert set(world.bound()) == {"g0", "g2", "g1-again"}


@pytest.mark.parametrize("phase", ["Binding", "PartlyBound"])
def test_a_half_is_evicted_in_time_though_leaders_come_and_go(phase):
    world = World({"n1": 3}, rollback=120.0)
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    world.settle(only="g1")
    world.nodes["n1"].cards = 1
    since = world.clock.wall().isoformat()
    world.put_group("g", minMember=3)
    (key,) = world.groups
    for seconds in (40, 40, 25):
        world.groups[key]["status"] = {"phase": phase, "lastTransitionTime": since}
        world.restart()
        assert world.phase() == "PartlyBound"
        world.run(seconds)
    assert world.evicted == []
    world.run(20)
    assert world.evicted == ["g1"]


def test_who_comes_after_long_without_a_leader_tries_first():
    world = World({"n1": 3}, rollback=120.0)
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    world.settle(only="g1")
    world.put_group("g", minMember=3)
    (key,) = world.groups
    world.groups[key]["status"] = {"phase": "PartlyBound", "lastTransitionTime": world.clock.wall().isoformat()}
    world.clock.advance(3600)
    world.restart()
    world.run(25)
    assert world.evicted == []
    for name in ("g0", "g2"):
        assert world.schedule(name) == ""
    world.settle()
    assert len(world.bound()) == 3


@pytest.mark.parametrize("comes_first", ["cards", "the eviction"])
def test_a_half_whose_eviction_a_budget_forbids_takes_what_comes_first(comes_first):
    world = World({"n1": 3}, rollback=120.0)
    world.budget = True
    trio(world)
    for name in ("g0", "g1", "g2"):
        world.schedule(name)
    world.settle(only="g1")
    world.nodes["n1"].cards = 1
    world.restart()
    world.run(200)
    assert world.phase() == "PartlyBound"
    assert set(world.bound()) == {"g1"}, "neither can it go, nor come to be whole"
    if comes_first == "cards":
        world.add_node("n2", NodeSpec(2))
        world.run(70)
        assert world.phase() == "Running"
        assert set(world.bound()) == {"g0", "g1", "g2"}
        world.budget = False
        world.run(200)
        assert world.evicted == [], "it runs: nobody is to go any more"
    else:
        world.budget = False
        world.run(3)
        assert world.evicted == ["g1"]
        assert world.bound() == {}
        world.create(member("g1-again", created=9, gpu_mem=P100))
        world.add_node("n2", NodeSpec(2))
        world.run(70)
        assert set(world.bound()) == {"g0", "g2", "g1-again"}


def test_a_gang_that_lost_a_member_is_not_half_bound():
    """What runs is told by the PodGroup, so that another leader does not evict it."""
    world = World({"n1": 3})
    trio(world)
    world.run(4)
    assert world.phase() == "Running"
    world.delete("g2")
    world.restart()
    assert world.phase() == "Running"
    world.create(member("g3", created=9, gpu_mem=P100))
    world.run(2)
    assert set(world.bound()) == {"g0", "g1", "g3"}, "it is placed alone"
    world.run(200)
    assert world.evicted == []


def test_a_gang_that_runs_no_more_gathers_anew():
    world = World({"n1": 3})
    trio(world)
    world.run(4)
    for i in range(3):
        world.finish(f"g{i}", "Failed")
    world.create(member("h0", "g", created=9, gpu_mem=P100))
    world.run(3)
    assert "h0" not in world.bound()
    assert world.phase() == "Pending"
    world.create(*(member(f"h{i}", "g", created=9, gpu_mem=P100) for i in (1, 2)))
    world.run(3)
    assert {"h0", "h1", "h2"} <= set(world.bound())


def test_a_finished_member_counts_and_more_than_the_minimum_follow():
    world = World({"n1": 5})
    world.create(*(member(f"m{i}", minimum=2, created=i, gpu_mem=P100) for i in range(4)))
    world.keep()
    assert world.schedule("m3") == FOLLOWS
    assert world.schedule("m0") == world.schedule("m1") == ""
    world.settle()
    assert world.schedule("m3") == world.schedule("m2") == ""
    world.settle()
    assert len(world.bound()) == 4
    world.finish("m0")
    world.finish("m1")
    world.create(member("m4", minimum=2, created=9, gpu_mem=P100))
    world.run(2)
    assert "m4" in world.bound()


def test_members_without_cards_and_of_many_sizes():
    world = World({"n1": NodeSpec(2), "cpu": NodeSpec(0)})
    world.create(
        member("ps0", minimum=5),
        member("ps1", minimum=5, created=1),
        member("w0", minimum=5, created=2, gpu_mem=8138),
        member("w1", minimum=5, created=3, gpu_mem=8138),
        member("w2", minimum=5, created=4, whole_gpu=1),
    )
    world.run(4)
    assert set(world.bound()) == {"ps0", "ps1", "w0", "w1", "w2"}
    assert world.bound()["ps0"] == "cpu", "nodes with cards are left to those who need one"


@pytest.mark.parametrize("short", ["cpu", "selector"])
def test_what_is_short_may_be_anything(short):
    """A pod that is none of ours leaves too little CPU on a node, which the extender counts itself."""
    world = World({"n1": NodeSpec(3, cpu=5), "n2": NodeSpec(3, cpu=5, labels={"zone": "b"})})
    other = single("other", cpu="4")
    other["spec"]["nodeName"] = "n2"
    world.pods["other"] = other
    world.state.set_pod_without_request("default/other", PlacedPod("n2", Load(4000, 0, 1)))
    selector = {"zone": "b"} if short == "selector" else None
    cpu = "2" if short == "cpu" else "1"
    world.create(*(member(f"m{i}", created=i, cpu=cpu, selector=selector, gpu_mem=1000) for i in range(3)))
    world.run(4)
    assert world.bound().keys() == {"other"}
    assert world.unbound_shares() == 0
    del world.pods["other"]
    world.state.remove_pod_without_request("default/other")
    world.run(70)
    assert world.bound().keys() == {"m0", "m1", "m2"}


@pytest.mark.parametrize("change", ["priority", "annotation", "group"])
def test_the_order_can_be_raised(change):
    world = World({"n1": 3})
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    trio(world, gang="a", gated=True)
    raised = {"cardwise.dev/queue-priority": "5"} if change == "annotation" else {}
    priority = 7 if change == "priority" else 0
    world.create(
        *(member(f"b{i}", "b", created=10 + i, priority=priority, annotations=raised, gpu_mem=P100) for i in range(3))
    )
    if change == "group":
        world.put_group("b", minMember=3, priority=3)
    world.run(3)
    assert set(world.bound()) == {"x"}
    world.delete("x")
    # Whoever asks first, b goes first.
    world.schedule("a0")
    world.run(3)
    assert {"b0", "b1", "b2"} == set(world.bound())


def test_a_gang_that_waits_long_is_not_starved_by_small_pods():
    world = World({"n1": 3}, reserve=60.0, refusals=1000)
    world.create(single("x", gpu_mem=P100))
    world.run(1)
    trio(world, gated=True)
    world.run(3)
    world.create(single("y", created=30, gpu_mem=P100))
    world.run(1)
    assert set(world.bound()) == {"x", "y"}, "at first others may pass"
    world.run(62)
    world.create(single("z", created=40, gpu_mem=P100))
    assert world.run(1)["z"] == RESERVED
    world.create(single("vip", created=41, priority=10, gpu_mem=P100))
    world.run(1)
    assert "vip" in world.bound(), "who comes before it in the order is not kept off"
    world.delete("x", "y", "vip")
    world.run(5)
    assert {"g0", "g1", "g2"} == set(world.bound())
    world.delete("g0", "g1", "g2")
    world.run(3)
    assert set(world.bound()) == {"z"}


@pytest.mark.parametrize(
    ("minimums", "reason"),
    [
        pytest.param((2, 3), "do not agree", id="members that do not agree"),
        pytest.param((None, None), "PodGroup g", id="a group name alone"),
    ],
)
def test_a_gang_without_one_minimum_waits_with_that_reason_until_a_podgroup_has_it(minimums, reason):
    world = World({"n1": 3})
    world.create(*(member(name, minimum=of, gpu_mem=P100) for name, of in zip("ab", minimums, strict=True)))
    world.run(3)
    assert world.bound() == {}
    assert reason in world.reason()
    world.put_group("g", minMember=2)
    world.run(3)
    assert set(world.bound()) == {"a", "b"}


def test_a_gang_whose_pods_ask_for_too_many_different_things_is_not_planned_and_keeps_nobody_waiting():
    world = World({f"n{i}": 2 for i in range(4)})
    first = {names.QUEUE_PRIORITY: "999999999"}
    asks = range(MAX_REQUEST_KINDS + 1)
    world.create(*(member(f"e{i}", "evil", len(asks), gpu_mem=100 + i, annotations=first) for i in asks))
    world.create(*(member(f"v{i}", "good", 2, gpu_mem=1000, created=5) for i in range(2)))
    world.keep()
    assert world.filter("e0") == ([], INCOMPLETE)
    assert "17 different requests" in world.reason("evil")
    assert world.filter("v0")[0], "another's gang is planned"


def test_a_gang_of_as_many_kinds_as_may_be_is_planned():
    world = World({f"n{i}": 2 for i in range(4)})
    world.create(*(member(f"e{i}", "wide", MAX_REQUEST_KINDS, gpu_mem=100 + i) for i in range(MAX_REQUEST_KINDS)))
    world.keep()
    assert world.filter("e0")[0]


def test_no_more_wait_than_there_are_threads():
    world = World({"n1": 4}, max_waiting=2)
    trio(world, gang="a")
    world.create(*(member(f"b{i}", "b", 2, gated=False, created=10, gpu_mem=1) for i in range(2)))
    assert world.schedule("a0") == ""
    assert world.schedule("b0") == WAITS, "its other pod would have no thread to wait in"
    assert world.schedule("a1") == world.schedule("a2") == ""
    world.settle()
    assert world.schedule("b0") == ""


def test_without_threads_a_gang_says_so():
    world = World({"n1": 4}, max_waiting=0)
    trio(world)
    assert world.schedule("g0") == WAITS
    assert "threads for 0" in world.reason()


def test_a_node_that_is_not_offered_is_replaced():
    world = World({"n1": NodeSpec(1), "n2": NodeSpec(1), "n3": NodeSpec(1), "n4": NodeSpec(1)})
    trio(world)
    assert world.schedule("g0") == ""
    assumed = world.assumed["g0"]
    planned = {view.name: view.reserved for view in world.state.gangs.views()}["g"]
    other = next(node for node, _, _ in planned if node != assumed)
    world.nodes[other].cpu = 0  # the scheduler has put something there that we do not see
    assert world.schedule("g1") == world.schedule("g2") == ""
    world.settle()
    assert len(world.bound()) == 3
    assert world.bound()["g0"] == assumed
    assert other not in world.bound().values()


def test_pods_spread_by_the_scheduler_alone_are_bound():
    """Anti-affinity within the gang is nothing that the planner knows."""
    world = World({f"n{i}": 8 for i in range(5)})
    world.create(*(member(f"m{i}", minimum=5, created=i, gated=False, gpu_mem=100) for i in range(5)))
    free = world.offered

    def spread(pod):
        return [node for node in free(pod) if node not in world.assumed.values()]

    world.offered = spread
    for i in range(5):
        assert world.schedule(f"m{i}") == ""
    world.settle()
    assert len(set(world.bound().values())) == 5


def test_a_quota_counts_for_the_whole_gang():
    world = World({"n1": 3})
    world.state.set_quota(*as_quota({"shares": 2}))
    trio(world)
    assert world.schedule("g0") == WAITS
    assert world.unbound_shares() == 0
    world.state.set_quota(*as_quota({"shares": 3}))
    for name in ("g0", "g1", "g2"):
        assert world.schedule(name) == ""
    world.settle()
    assert len(world.bound()) == 3


@pytest.mark.parametrize(
    ("hard", "binds"),
    [
        ([{"shares": 3}], True),
        ([{"shares": 2}], False),
        ([{"memoryMiB": 3 * P100 - 1}], False),
        ([{"shares": 9}, {"model": "P100", "memoryMiB": P100}], False),
        ([{"shares": 9}, {"model": "V100", "memoryMiB": 0}], True),
    ],
)
def test_a_quota_that_became_smaller_before_the_last_came_ends_the_plan_if_the_gang_exceeds_it(hard, binds):
    world = World({"n1": 3})
    trio(world)
    world.schedule("g0")
    world.schedule("g1")
    world.state.set_quota(*as_quota(*hard))
    world.schedule("g2")
    world.settle()
    assert len(world.bound()) == (3 if binds else 0)
    assert binds or "are no longer available" in world.errors[0][1]


def test_an_exceeded_quota_of_amounts_that_the_gang_does_not_use_does_not_end_its_plan():
    """The namespace holds a whole GPU more than its quota allows now; the gang requests shares."""
    world = World({"n1": 4})
    world.create(single("x", gpu_count=1))
    world.run(1)
    trio(world)
    world.schedule("g0")
    world.schedule("g1")
    world.state.set_quota(*as_quota({"gpus": 0}))
    world.schedule("g2")
    world.settle()
    assert {"g0", "g1", "g2"} <= set(world.bound())


def test_the_last_member_of_a_gang_reads_the_quotas_once_and_not_once_per_member(monkeypatch):
    world, reads = World({"n1": 3}), []
    world.state.set_quota(*as_quota({"shares": 3}, {"model": "P100", "shares": 3}))
    trio(world)
    headroom = ClusterView.headroom
    world.schedule("g0")
    world.schedule("g1")
    monkeypatch.setattr(
        ClusterView, "headroom", lambda view, namespace: reads.append(namespace) or headroom(view, namespace)
    )
    world.schedule("g2")
    assert len(reads) == 1
    world.settle()
    assert len(world.bound()) == 3


def test_what_the_permit_reads_of_hundreds_of_containers_is_computed_before_the_lock_is_taken(monkeypatch):
    """48 containers of 500 members each would take 30 ms."""
    world, under_lock = World({"n1": 4}), []
    compute = CardDemand.__new__

    def record(*demand):
        under_lock.append(world.state._lock._lock.locked())
        return compute(*demand)

    monkeypatch.setattr(CardDemand, "__new__", record)
    members = [member(f"g{i}", gated=False, created=i, gpu_mem=100) for i in range(3)]
    for manifest in members:
        parts = [container("whole", whole_gpu=1, share=1), container("c1", gpu_mem=100, share=1)]
        for part in parts:
            part["resources"]["requests"] = {"cpu": "1"}
        manifest["spec"]["containers"] += parts
    world.create(*members)
    for name in ("g0", "g1", "g2"):
        assert world.schedule(name) == ""
    assert under_lock
    assert not any(under_lock)
    world.settle()
    assert len(world.bound()) == 3


@pytest.mark.parametrize("now", [{"health": "Unhealthy"}, {"unschedulable": True}])
def test_a_card_that_fell_ill_or_was_cordoned_before_the_last_came_ends_the_hold(now):
    world = World({"n1": 3})
    trio(world)
    world.schedule("g0")
    world.schedule("g1")
    world.state.set_card(*as_card(extended_resource(0, **now)))
    world.schedule("g2")
    world.settle()
    assert world.bound() == {}
    assert world.unbound_shares() == 0
    assert "are no longer available" in world.errors[0][1]


def test_a_node_that_went_before_the_last_came_ends_the_hold_also_of_a_member_without_cards():
    world = World({"n1": 2, "cpu": NodeSpec(0)})
    world.create(*(member(f"w{i}", gated=False, created=i, gpu_mem=P100) for i in range(2)))
    world.create(member("ps", gated=False, created=2))
    for name in ("ps", "w0"):
        assert world.schedule(name) == ""
    assert world.assumed["ps"] == "cpu"
    world.state.remove_node("cpu")
    world.schedule("w1")
    world.settle()
    assert world.bound() == {}, "the node of ps is gone"
    assert world.unbound_shares() == 0
    assert "the GPUs planned for ps on node cpu are no longer available" in str(world.errors)


def gate(world, name, gates):
    world.pods[name]["spec"]["schedulingGates"] = [{"name": name_of_gate} for name_of_gate in gates]
    world.show_pod(world.pods[name])


def test_a_gang_waits_for_its_members_with_gates_of_others_and_holds_nothing_meanwhile():
    world = World({"n1": 4})
    trio(world)
    gate(world, "g1", ["tenant.example/never"])
    world.keep()
    assert world.filter("g0") == ([], INCOMPLETE)
    assert world.unbound_shares() == 0
    assert world.reason() == "g1 has the scheduling gate tenant.example/never"
    gate(world, "g1", [])
    assert world.filter("g0")[0]


def wide(world, gang, *, namespace, count=6, **options):
    """A gang of which nobody ever comes to bind but the first."""
    pods = [
        member(f"{gang}{i}", gang, count, namespace=namespace, gated=False, gpu_mem=100, **options)
        for i in range(count)
    ]
    world.create(*pods)


def test_no_namespace_keeps_all_threads_of_bind_from_another():
    first = {names.QUEUE_PRIORITY: "999999999"}
    world = World({"n1": 4, "n2": 4}, max_waiting=10)
    for gang in ("e", "f"):
        world.put_group(gang, "evil", minMember=6, timeoutSeconds=300)
        wide(world, gang, namespace="evil", annotations=first)
        assert world.schedule(f"{gang}0") == ""
    wide(world, "v", namespace="good", count=7)
    assert world.schedule("v0") == WAITS
    assert world.reason("v") == "other gangs are being bound"
    wide(world, "h", namespace="evil", annotations=first)  # it would come first
    world.clock.advance(29.0)
    assert world.schedule("v0") == WAITS
    world.clock.advance(2.0)
    world.keep()
    assert world.schedule("h0") == WAITS
    assert [world.schedule(f"v{i}") for i in range(7)] == [""] * 7
