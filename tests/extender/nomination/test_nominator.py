"""Which pods are nominated before kube-scheduler calls filter, in which order, and how their reservations end."""

import pytest

from cardwise.core.api import names
from extender.cache.reservations import Assumed, Phase
from extender.gangs.gangplanner import GangPlanner
from extender.nomination import nominator
from extender.nomination.nominator import NominationOutcome, NominationSettings
from extender.records.nodeinfo import NodeRecord
from tests.build import P100
from tests.extender import gangcluster
from tests.extender.nominationcluster import REFUSED, World
from tests.extender.states import as_pod, as_quota, begin, bound, free, mark

HALF = P100 // 2
MOST = P100 * 3 // 4
OLD, NEW = "2026-11-21T09:00:00Z", "2026-11-21T11:00:00Z"


def test_pods_are_decided_about_in_the_order_of_the_queue():
    world = World(*[f"n{i}" for i in range(4)])
    world.create("new", MOST, created=NEW)
    world.create("old", MOST, created=OLD)
    world.create("low", MOST, priority=-1, created=OLD)
    world.create("high", MOST, priority=5, created=NEW)
    assert list(world.nominate_all()) == ["high", "old", "new", "low"]


def test_two_pods_are_not_nominated_for_the_same_room():
    world = World("n1")
    world.create("first", MOST)
    world.create("second", MOST, created=NEW)
    assert world.nominate_all() == {"first": "n1"}
    assert free(world.state) == [P100 - MOST]
    world.node("n2")
    assert world.nominate_all() == {}, "the second was decided about once: it goes the ordinary way"
    assert world.filter("second", "n1", "n2") == ["n2"]


def test_the_choice_is_that_of_filter():
    world = World("n1", "n2")
    world.show_pod(bound("there", P100 - HALF, 0, node="n2"))
    world.create("p", 100)
    assert world.nominate_all() == {"p": "n2"}, "binpack: the fullest card"


@pytest.mark.parametrize("served", [(), ("other",)])
def test_no_pod_is_nominated_for_a_scheduler_that_never_calls(served):
    world = World("n1", served=served)
    world.create("p", HALF)
    world.create("q", HALF, schedulerName="third")
    assert world.nominate_all() == {}
    world.filter("p")
    world.create("r", 100)
    assert world.nominate_all() == {"r": "n1"}, "it has asked by now"


def test_what_waited_for_its_scheduler_comes_then():
    world = World("n1", served=())
    world.create("p", HALF)
    world.create("mine", HALF, schedulerName="mine")
    world.state.nominator.add_scheduler("mine")
    assert world.nominate_all() == {"mine": "n1"}


AFFINITY = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"schedulingGates": [{"name": "example.com/quota"}]}},
        {"spec": {"affinity": {"podAntiAffinity": {REQUIRED: [AFFINITY]}}}},
        {"spec": {"affinity": {"podAffinity": {REQUIRED: [AFFINITY]}}}},
        {"spec": {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {}}]}}}},
        {"spec": {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}},
        {"spec": {"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}},
        {"spec": {"resourceClaims": [{"name": "nic"}]}},
        {"spec": {"hostNetwork": True}},
        {"spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "late"}}]}},
        {"spec": {"volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}}]}},
        {"spec": {"schedulingGroup": {"podGroupName": "g"}}},
        {"metadata": {"labels": {names.GANG: "g"}}},
        {"metadata": {"annotations": {names.ONE_NODE: "false"}}},
        {"metadata": {"deletionTimestamp": NEW}},
        {"status": {"nominatedNodeName": "n1"}},
        {"status": {"conditions": REFUSED}},
        {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}]}},
        {"status": {"phase": "Failed"}},
    ],
    ids=lambda change: str(change)[:60],
)
def test_pods_that_are_not_nominated(change):
    world = World("n1")
    pod = world.create("p", HALF)
    changed = pod | {part: pod.get(part, {}) | fields for part, fields in change.items()}
    world.show_pod(changed)
    assert world.nominate_all() == {}


@pytest.mark.parametrize(
    "container",
    [
        pytest.param({"ports": [{"containerPort": 80, "hostPort": 80}]}, id="with a host port"),
        pytest.param({"resources": {"limits": {names.FILTER_CALL_RESOURCE: "0"}}}, id="that asks for no card"),
    ],
)
def test_a_pod_goes_the_ordinary_way(container):
    world = World("n1")
    pod = world.create("p", HALF)
    pod["spec"]["containers"][0] |= container
    world.show_pod(pod)
    assert world.nominate_all() == {}


def test_what_was_gated_comes_when_its_gates_are_gone():
    world = World("n1")
    pod = world.create("p", HALF, schedulingGates=[{"name": "example.com/quota"}])
    waiting = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}
    world.show_pod(pod | {"status": waiting})
    assert world.nominate_all() == {}
    del pod["spec"]["schedulingGates"]
    world.show_pod(pod | {"status": waiting})
    assert world.nominate_all() == {"p": "n1"}


@pytest.mark.parametrize(
    ("default", "wish", "ahead"), [(False, None, False), (False, "true", True), (True, None, True)]
)
def test_no_pod_is_nominated_if_the_scheduler_weighs_nodes(default, wish, ahead):
    world = World("n1", settings=NominationSettings(above_nodes=0, one_best_node=default))
    pod = world.create("p", HALF)
    if wish is not None:
        pod["metadata"]["annotations"] = {names.ONE_NODE: wish}
        world.show_pod(pod)
    assert bool(world.nominate_all()) == ahead


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {}}]}}},
        {"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]},
    ],
    ids=list,
)
def test_a_pod_with_one_best_node_is_nominated_despite_its_preferences(spec):
    """Filter would return only that node, and the scheduler would have nothing to score."""
    world = World("n1", "n2")
    pod = world.create("p", HALF)
    pod["metadata"]["annotations"] = {names.ONE_NODE: "true"}
    pod["spec"] |= spec
    world.show_pod(pod)
    assert len(world.filter("p", "n1", "n2")) == 1
    other = world.create("q", HALF)
    other["metadata"]["annotations"] = {names.ONE_NODE: "true"}
    other["spec"] |= spec
    world.show_pod(other)
    assert list(world.nominate_all()) == ["q"]


@pytest.mark.parametrize(("settings", "ahead"), [
    (NominationSettings(above_nodes=2), False),
    (NominationSettings(above_nodes=1), True),
    (NominationSettings(above_nodes=0), True),
])  # fmt: skip
def test_when(settings, ahead):
    world = World("n1", "n2", settings=settings)
    world.create("p", HALF)
    assert bool(world.nominate_all()) == ahead


def test_nodes_that_are_full_beside_the_cards_are_passed_over():
    nodes = [f"n{i}" for i in range(10)]
    world = World(*nodes)
    for node in nodes[:9]:
        world.full(node)
        world.show_pod(bound(f"on-{node}", HALF, 0, node=node))  # binpack would take them first
    world.create("p", 100, cpu="1")
    assert world.nominate_all() == {"p": "n9"}


def test_a_node_without_slots_is_passed_over():
    world = World("n1", "n2")
    world.show_pod(bound("on-n1", HALF, 0, node="n1"))  # binpack would take it first
    world.state.set_node("n1", NodeRecord(offers_shares=False))
    world.create("p", 100)
    assert world.nominate_all() == {"p": "n2"}, "kube-scheduler would refuse the other"


def test_what_is_nominated_counts_on_its_node():
    world = World("n1", "n2")
    for name in ("a", "b", "c"):
        world.create(name, 100, cpu="40")
    nominated = world.nominate_all()
    assert sorted(nominated.values()) == ["n1", "n2"], "two of them do not go on one node, and the third has no place"


@pytest.mark.parametrize("heard", [Phase.BINDING, Phase.UNCONFIRMED, Phase.ACCEPTED])
def test_its_cpu_counts_there_until_the_watch_shows_it(heard):
    world = World("n1")
    world.create("a", 100, cpu="40")
    assert world.nominate_all() == {"a": "n1"}
    world.filter("a")
    begin(world.state, "a", 100)
    if heard is not Phase.BINDING:
        world.state.record_binding_outcome("uid-a", heard)
    world.create("b", 100, cpu="40")
    assert world.nominate_all() == {}
    world.create("c", 100, cpu="20")
    assert world.nominate_all() == {"c": "n1"}


def test_a_quota_is_never_exceeded():
    world = World("n1")
    world.state.set_quota(*as_quota({"shares": 1}))
    world.create("a", 100)
    world.create("b", 100)
    assert len(world.nominate_all()) == 1


# What kube-scheduler does then.


def test_the_scheduler_comes_to_the_node_alone_and_binds():
    world = World("n1", "n2")
    world.create("p", HALF)
    node = world.nominate_all()["p"]
    assert world.filter("p", node) == [node]
    assert mark(world.state, "uid-p") == "reserved"
    assert isinstance(begin(world.state, "p", HALF, node=node), Assumed)
    world.show_pod(bound("p", HALF, 0, node=node))
    assert world.outcomes == [NominationOutcome.HIT]
    assert free(world.state, node) == [P100 - HALF]


def test_what_it_refuses_there_is_placed_as_ever_and_not_ahead_again():
    world = World("n1", "n2")
    pod = world.create("p", HALF)
    assert world.nominate_all() == {"p": "n1"}
    assert world.filter("p", "n2") == ["n2"]
    assert (free(world.state, "n1"), free(world.state, "n2")) == ([P100], [P100 - HALF])
    world.show_pod(pod)
    assert world.nominate_all() == {}
    assert world.outcomes == [NominationOutcome.MISS]


def test_what_is_planned_is_let_go_when_no_node_will_do():
    world = World("n1")
    pod = world.create("p", HALF)
    assert world.nominate_all() == {"p": "n1"}
    world.show_pod(pod | {"status": {"conditions": REFUSED}})
    assert free(world.state) == [P100]


def test_pods_that_are_refused_again_and_again_are_left_alone_for_a_while():
    world = World("n1", "n2")
    wish = [{"key": "zonal", "operator": "Exists"}]
    for i in range(4):
        world.create(f"p{i}", 100, tolerations=wish)
        expected = {f"p{i}": "n1"} if i < 3 else {}
        assert world.nominate_all() == expected
        world.filter(f"p{i}", "n2")
        world.show_pod(bound(f"p{i}", 100, 0, node="n1"))  # so that n1 is binpack's choice again
    world.create("other", 100)
    assert len(world.nominate_all()) == 1, "others have nothing to do with it"
    world.passes(61)
    world.create("later", 100, tolerations=wish)
    assert "later" in world.nominate_all()


def test_one_that_was_taken_up_makes_up_for_those_that_were_refused():
    world = World("n1", "n2")
    for i in range(6):
        world.create(f"p{i}", 100)
        (node,) = world.nominate_all().values()
        (other,) = {"n1", "n2"} - {node}
        world.filter(f"p{i}", node if i == 2 else other)


def test_a_bind_that_comes_without_its_filter_is_not_disturbed():
    """As after a restart of the extender: kube-scheduler was told the node by the process before."""
    world = World("n1", "n2")
    world.create("p", HALF)
    assert isinstance(begin(world.state, "p", HALF, node="n2"), Assumed)
    assert world.nominate_all() == {}
    assert mark(world.state, "uid-p") == "binding"


def test_at_the_beginning_of_an_epoch_those_wait_whose_turn_it_is_not():
    world = World("n1")
    away = world.create("high", HALF, priority=9)
    unanswered = [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}]
    world.show_pod(away | {"status": {"conditions": unanswered}})
    with world.state.queue() as queue:
        queue.begin_retry_window()
    world.create("low", 100)
    assert world.nominate_all() == {}
    world.passes(13)
    assert world.nominate_all() == {"low": "n1"}


def test_cards_that_are_reserved_for_a_gang_are_nominated_for_no_other_pod():
    world = World("n1", "n2")
    gangcluster.reserve(world.state, "n1", P100 - HALF + 1)
    world.create("small", 64)
    world.create("p", HALF)
    assert world.nominate_all() == {"small": "n2", "p": "n2"}
    world.create("q", HALF - 10)
    assert world.nominate_all() == {"q": "n1"}, "what the gang leaves of the card is for others"


def test_a_hold_ends_by_itself():
    world = World("n1")
    world.create("p", HALF, cpu="32")
    world.create("q", 100, cpu="32")
    assert len(world.nominate_all()) == 2
    world.filter("q", "n1")
    world.passes(31)
    assert free(world.state) == [P100]
    assert world.outcomes == [NominationOutcome.HIT, NominationOutcome.EXPIRED]
    for waiting in ("p", "q"):
        world.show_pod(world.pods[waiting])
    assert world.nominate_all() == {"p": "n1"}, "the scheduler has come to the other one"
    world.create("r", HALF, cpu="32")
    assert world.nominate_all() == {"r": "n1"}


def test_a_hold_ends_with_its_pod():
    world = World("n1")
    world.create("p", HALF, cpu="64")
    assert world.nominate_all() == {"p": "n1"}
    world.state.remove_pod(as_pod(world.pods["p"]))
    assert free(world.state) == [P100]
    world.create("q", HALF, cpu="64")
    assert world.nominate_all() == {"q": "n1"}


def test_only_so_many_hold_something_at_a_time(monkeypatch):
    monkeypatch.setattr(nominator, "MAX_NOMINATED", 2)
    world = World("n1", "n2")
    for i in range(4):
        world.create(f"p{i}", 100)
    assert list(world.nominate_all()) == ["p0", "p1"]
    world.filter("p0", "n1")
    assert list(world.nominate_all()) == ["p2"]


@pytest.mark.parametrize(
    ("asker", "gets"),
    [
        ({"priority": 1, "created": NEW}, True),
        ({"created": OLD}, True),
        ({"created": NEW}, False),
        ({"priority": -1, "created": OLD}, False),
    ],
)
def test_reservations_ahead_do_not_delay_earlier_pods(asker, gets):
    world = World("n1", "n2")
    world.create("held", MOST)
    world.create("also", MOST)
    assert world.nominate_all() == {"held": "n1", "also": "n2"}
    world.create("asker", MOST, **asker)
    assert world.filter("asker", "n1") == (["n1"] if gets else [])
    assert free(world.state, "n2") == [P100 - MOST], "what it does not need stays held"
    assert world.outcomes == ([NominationOutcome.OVERTAKEN] if gets else [])


def test_a_pod_that_fits_nowhere_takes_no_reservation():
    world = World("n1")
    world.create("held", MOST)
    assert world.nominate_all() == {"held": "n1"}
    world.create("asker", P100 + 1, priority=9)
    assert world.filter("asker", "n1") == []
    assert mark(world.state, "uid-held") == "reserved"


def test_a_quota_gives_way_too():
    world = World("n1", "n2")
    world.state.set_quota(*as_quota({"shares": 1}))
    world.create("held", HALF)
    assert world.nominate_all() == {"held": "n1"}
    world.create("asker", HALF, created=OLD)
    assert world.filter("asker", "n2") == ["n2"]
    assert free(world.state, "n1") == [P100]


def test_one_that_all_nodes_are_offered_to_gets_what_is_held_by_later_ones():
    world = World("n1")
    world.create("held", MOST)
    assert world.nominate_all() == {"held": "n1"}
    pod = world.create("asker", MOST, created=OLD)
    pod["metadata"]["annotations"] = {names.ONE_NODE: "false"}
    assert world.filter("asker", "n1") == ["n1"]


# Preemption's own nominations.


@pytest.mark.parametrize(("priority", "gets"), [(1000, ["n1"]), (0, [])])
def test_a_gang_that_comes_before_gets_what_is_held_by_later_ones(priority, gets):
    world = World("n1")
    world.create("later", P100, created="2026-11-21T10:00:30Z")
    assert world.nominate_all() == {"later": "n1"}
    world.show_pod(gangcluster.member("m", minimum=1, gated=False, created=60, priority=priority, gpu_mem=P100))
    assert world.filter("m", "n1") == gets
    assert world.outcomes == ([NominationOutcome.OVERTAKEN] if gets else [])


def _begin_filter(world: World) -> None:
    """The first step of a filter call. The later ones change the generation of the node."""
    with world.state._lock:
        world.state.nominator.on_filter("uid-later", ["n1"])


@pytest.mark.parametrize("call_filter", [lambda world: world.filter("later", "n1"), _begin_filter])
@pytest.mark.parametrize("one_node", ["true", "false"])
def test_a_gang_does_not_get_the_card_of_a_later_pod_for_which_filter_was_called_before_the_commit(
    monkeypatch, one_node, call_filter
):
    world = World("n1")
    world.create("later", P100, created="2026-11-21T10:00:30Z")["metadata"]["annotations"] = {names.ONE_NODE: one_node}
    assert world.nominate_all() == {"later": "n1"}
    world.show_pod(gangcluster.member("m", minimum=1, gated=False, created=60, priority=1000, gpu_mem=P100))
    plan = GangPlanner.plan

    def plan_then_filter(planner, *args, **kwargs):
        planned = plan(planner, *args, **kwargs)
        call_filter(world)
        return planned

    monkeypatch.setattr(GangPlanner, "plan", plan_then_filter)
    assert world.filter("m", "n1") == []
    assert world.reserved() == {"later": "n1"}
    assert free(world.state, "n1") == [0]
    assert world.outcomes == [NominationOutcome.HIT]


@pytest.mark.parametrize(
    ("held", "needs"),
    [
        ({"mem": P100}, {"gpu_mem": P100 // 3}),
        ({"mem": P100}, {"whole_gpu": 1}),
        ({"mem": P100, "cpu": 1}, {"whole_gpu": 1, "cpu": 0, "memory": 0}),
        ({"mem": 10, "cpu": 64}, {"gpu_mem": 100, "cpu": 20}),
        ({"mem": 10, "memory": 512}, {"gpu_mem": 100, "memory": 160}),
    ],
)
def test_as_many_members_have_places_as_the_room_of_later_ones_gives(held, needs):
    """`cpu`, `memory`: in GiB. Where each member needs a whole card, three later ones hold a card each."""

    def asks(pod: dict, cpu: int = 1, memory: int = 1, **_: int) -> dict:
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": str(cpu), "memory": f"{memory}Gi"}
        return world.show_pod(pod)

    world = World("n1")
    world.node("n1", cards=3 if "whole_gpu" in needs else 1)
    for i in range(3 if "whole_gpu" in needs else 1):
        asks(world.create(f"later{i}", held["mem"], created="2026-11-21T10:00:30Z"), **held)
    assert set(world.nominate_all().values()) == {"n1"}
    cards = {size: amount for size, amount in needs.items() if "gpu" in size}
    for i in range(3):
        asks(gangcluster.member(f"m{i}", gated=False, priority=1000, **cards), **needs)
    assert [world.filter(f"m{i}", "n1") for i in range(3)] == [["n1"]] * 3


def named(world: World, name: str, **status: object) -> dict:
    """Deliver a watch event of the pod with the node in its status."""
    pod = world.pods[name]
    return world.show_pod(pod | {"status": {"nominatedNodeName": "n1"} | status})


def stale(world: World) -> list[str]:
    """The names of pods whose status names a node without a reservation."""
    return [nominee.pod.name for nominee in world.state.nominator.take_stale_nominees()]


def test_a_name_is_stale_once_nothing_is_held_for_it_and_its_pod_has_not_lost_its_turn():
    world = World("n1")
    world.create("p", 100)
    assert world.nominate_all() == {"p": "n1"}
    named(world, "p")
    assert stale(world) == []
    world.passes(31)
    assert world.outcomes == [NominationOutcome.EXPIRED]
    assert stale(world) == []  # as the moment before the scheduler comes
    world.passes(3)
    assert stale(world) == ["p"]
    assert stale(world) == []
    assert world.nominate_all() == {}
    world.show_pod(world.pods["p"] | {"status": {}})
    assert world.nominate_all() == {"p": "n1"}


def test_a_name_that_another_extender_has_left_is_stale_and_one_of_preemption_is_not():
    world = World("n1")
    for name, policy in (("ours", "Never"), ("preempting", "PreemptLowerPriority")):
        world.create(name, 100, preemptionPolicy=policy)
        named(world, name, conditions=REFUSED)
    world.create("fresh", 100)
    named(world, "fresh")
    assert stale(world) == []
    world.passes(3)
    assert stale(world) == ["ours", "fresh"]
    world.passes(3)
    assert stale(world) == []


def test_the_name_of_a_pod_that_is_bound_or_gone_is_nobodys_business():
    world = World("n1")
    world.create("p", 100)
    pod = named(world, "p")
    stale(world)
    world.state.remove_pod(as_pod(pod))
    world.passes(3)
    assert stale(world) == []


def test_what_we_nominate_is_no_preemption():
    """No cards are reserved as for a preemptor: the reservation ahead is a plan, which ends."""
    world = World("n1")
    pod = world.create("p", MOST)
    assert world.nominate_all() == {"p": "n1"}
    world.show_pod(pod | {"status": {"nominatedNodeName": "n1"}})
    world.passes(31)
    world.create("q", MOST, created=NEW)
    assert world.filter("q", "n1") == ["n1"]


def test_what_preemption_nominates_is_kept():
    world = World("n1")
    pod = world.create("p", MOST)
    world.show_pod(pod | {"status": {"nominatedNodeName": "n1", "conditions": REFUSED}})
    world.create("q", MOST, created=NEW)
    assert world.nominate_all() == {}, "what is kept for it is no room for others"
    assert world.filter("q", "n1") == []


# Other leaders.


def test_a_former_leader_reserves_nothing():
    world = World("n1")
    world.create("p", HALF, cpu="64")
    assert world.nominate_all() == {"p": "n1"}
    world.state.forget_plans()
    assert free(world.state) == [P100]
    world.create("q", HALF, cpu="64")
    assert world.nominate_all() == {"q": "n1"}
