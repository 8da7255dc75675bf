"""Which pods count when: the rules of extender/state.py, one test each."""

import json

import pytest

from cardwise.core.api import names, quotas, request
from cardwise.core.gangs.gangs import Load
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.cache.nodeload import STEADY_SECONDS, NodeLoads
from extender.cache.reservations import Assumed, KnownBinding, Phase
from extender.placing.placing import PlacementRequest
from extender.records import podinfo
from extender.records.nodeinfo import NodeRecord, PlacedPod
from extender.records.podref import PodRef
from tests.build import P100, asking, extended_resource, reported_share
from tests.extender.states import (
    ENDED,
    RUNNING,
    WAITING,
    as_card,
    as_pod,
    as_quota,
    bound,
    free,
    make_state,
    mark,
    refuse,
    with_cards,
)


@pytest.fixture
def world(clock):
    """One node with two cards."""
    state = with_cards(make_state(clock), n1=2)
    assert free(state) == [P100, P100]
    return state


def plan(world, name="p", mem=8138, nodes=("n1",)):
    return world.plan_pod(
        PlacementRequest(
            PodRef(f"uid-{name}", "default", name), request.parse(asking(name, gpu_mem=mem)), nodes, "binpack"
        )
    )


def begin(world, name="p", mem=8138, node="n1"):
    pod_request = request.parse(asking(name, gpu_mem=mem))
    begun = world.assume(PodRef(f"uid-{name}", "default", name), pod_request, node, "binpack", epoch=0)
    return begun.assignment if isinstance(begun, Assumed) else begun


def test_a_bound_pod_holds_its_share(world):
    world.set_pod(as_pod(bound("a", 4069, 1)))
    assert free(world) == [P100, P100 - 4069]


def test_a_pod_that_is_being_deleted_still_holds_its_share(world):
    world.set_pod(as_pod(bound("a", 4069, 1, deleting=True)))
    assert free(world) == [P100, P100 - 4069]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_pod_holds_nothing(world, phase):
    world.set_pod(as_pod(bound("a", 4069, 1)))
    world.set_pod(as_pod(bound("a", 4069, 1, phase=phase, containers=ENDED)))
    assert free(world) == [P100, P100]


def test_a_finished_pod_whose_container_still_runs_holds_its_share_for_the_grace_time(world, clock):
    world.set_pod(as_pod(bound("a", 4069, 1)))
    world.set_pod(as_pod(bound("a", 4069, 1, phase="Failed", containers=RUNNING)))
    assert free(world) == [P100, P100 - 4069]
    clock.advance(21)
    world.expire_reservations()
    assert free(world) == [P100, P100]


def test_a_deleted_pod_whose_containers_have_ended_is_free_at_once(world):
    last = as_pod(bound("a", 4069, 1, deleting=True, containers=ENDED))
    world.set_pod(last)
    world.remove_pod(last)
    assert free(world) == [P100, P100]


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(bound("a", 4069, 1), id="running"),
        pytest.param(bound("a", 4069, 1, containers=None), id="no statuses: the kubelet may be starting it"),
        pytest.param(bound("a", 4069, 1, containers=WAITING), id="waiting"),
        pytest.param(bound("a", 4069, 1, containers=ENDED), id="terminated, but it may restart"),
        pytest.param(bound("a", 4069, 1, deleting=True), id="running when it was deleted by force"),
        pytest.param(bound("a", 4069, 1, deleting=True, containers=None), id="deleted while it started"),
        pytest.param(bound("a", 4069, 1, deleting=True, containers=WAITING), id="deleted while it waited"),
    ],
)
def test_a_vanished_pod_without_proof_counts_for_the_grace_time(world, clock, last):
    world.set_pod(as_pod(last))
    world.remove_pod(as_pod(last))
    assert mark(world, "uid-a") == "terminating"
    assert free(world) == [P100, P100 - 4069]
    clock.advance(19)
    world.expire_reservations()
    assert free(world) == [P100, P100 - 4069]
    clock.advance(2)
    world.expire_reservations()
    assert free(world) == [P100, P100]


def test_a_ghost_that_its_node_reports_counts_until_the_node_lets_go(world, clock):
    last = as_pod(bound("a", 4069, 1))
    world.set_pod(last)
    world.remove_pod(last)
    world.set_card(*as_card(extended_resource(1, reported=[reported_share("uid-a", 4069)])))
    clock.advance(1000)
    world.expire_reservations()
    assert mark(world, "uid-a") == "reported"
    assert free(world) == [P100, P100 - 4069]
    world.set_card(*as_card(extended_resource(1)))
    assert free(world) == [P100, P100]


def test_a_ghost_is_free_before_its_time_when_the_node_lets_go(world):
    last = as_pod(bound("a", 4069, 1))
    world.set_pod(last)
    world.set_card(*as_card(extended_resource(1, reported=[reported_share("uid-a", 4069)])))
    world.remove_pod(last)
    world.set_card(*as_card(extended_resource(1)))
    assert free(world) == [P100, P100]


def test_after_a_restart_what_nodes_report_counts(world):
    world.set_card(*as_card(extended_resource(1, reported=[reported_share("unknown", 4069)])))
    assert mark(world, "n1/unknown") == "reported"
    assert free(world) == [P100, P100 - 4069]
    world.remove_card(as_card(extended_resource(1))[0])
    assert mark(world, "n1/unknown") is None
    assert free(world) == [P100]


def test_after_a_restart_each_container_that_the_former_extender_has_noted_counts(clock):
    world = with_cards(make_state(clock))
    world.set_node("n1")
    world.set_quota(*as_quota({"shares": 3}))
    reported = [reported_share("gone", P100 // 2) | {"corePercent": 50, "container": key} for key in ("0", "1")]
    world.set_card(*as_card(extended_resource(0, reported=reported, terminating=reported)))
    world.set_card(
        *as_card(
            extended_resource(1, reported=[reported_share("other", 100)], terminating=[reported_share("other", 100)])
        )
    )
    clock.advance(1000)
    world.expire_reservations()
    with world.view() as ledger:
        used = ledger.used_amounts("default", quotas.QuotaEntry())
        clients = ledger.node("n1").clients
    assert (used.shares, used.cards) == (3, 0), "two halves are no whole card"
    assert clients == [2, 1]
    assert free(world) == [0, P100 - 100]


@pytest.mark.parametrize(
    ("fields", "cards"),
    [
        ({"container": "0", "whole": True}, 1),
        ({"container": "0"}, 0),  # a share of all MiB and all cores
    ],
)
def test_after_a_restart_a_whole_card_is_one_where_it_was_asked_for_as_such(clock, fields, cards):
    world = with_cards(make_state(clock))
    world.set_node("n1")
    reported = [reported_share("gone", P100) | {"corePercent": 100} | fields]
    world.set_card(*as_card(extended_resource(0, reported=reported, terminating=reported)))
    with world.view() as ledger:
        assert ledger.used_amounts("default", quotas.QuotaEntry()).cards == cards


def test_a_report_on_a_pod_that_exists_counts_once(world):
    world.set_card(*as_card(extended_resource(1, reported=[reported_share("uid-a", 4069)])))
    world.set_pod(as_pod(bound("a", 4069, 1)))
    assert free(world) == [P100, P100 - 4069]


def test_pods_of_gpushare_count_by_card_index(world):
    annotations = {names.IDX: "1", names.POD_MEM: "3000", names.DEV_MEM: str(P100), names.ASSIGNED: "true"}
    world.set_pod(as_pod(bound("old", 3000, 1, annotations=annotations)))
    assert free(world) == [P100, P100 - 3000]


def test_unreadable_annotations_on_a_bound_pod_are_a_problem_and_hold_nothing(world):
    record = as_pod(bound("bad", 3000, 1, annotations={names.ASSIGNMENT: "{"}))
    assert "unreadable" in record.problem
    world.set_pod(record)
    assert free(world) == [P100, P100]


def test_annotations_that_become_unreadable_leave_the_share_as_it_was(world):
    world.set_pod(as_pod(bound("a", 3000, 1)))
    world.set_pod(as_pod(bound("a", 3000, 1, annotations={names.ASSIGNMENT: "{"})))
    assert free(world) == [P100, P100 - 3000]


def test_of_pods_that_are_none_of_our_business_only_their_load_and_who_they_are_is_kept():
    manifest = {"metadata": {"name": "x", "namespace": "d", "uid": "u"}, "spec": {"nodeName": "n"}}
    manifest["spec"]["containers"] = [{"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}}]
    placed = PlacedPod("n", Load(250, 1 << 30, 1), "u", "d", "x")
    assert podinfo.decode_pod(json.dumps(manifest).encode()) == ("d/x", placed)
    manifest["status"] = {"phase": "Succeeded"}
    assert podinfo.decode_pod(json.dumps(manifest).encode()) is None
    del manifest["spec"]["nodeName"], manifest["status"]
    assert podinfo.decode_pod(json.dumps(manifest).encode()) is None


def test_a_pod_that_calls_itself_a_mirror_holds_nothing():
    forged = bound("a", 3000, 1)
    forged["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "x"
    key, placed = podinfo.decode_pod(json.dumps(forged).encode()) or ("", None)
    assert (key, type(placed)) == ("default/a", PlacedPod)
    assert (placed.node, placed.load, placed.fixed) == ("n1", Load(0, 0, 1), True)


def test_a_card_counts_only_once_it_was_reported_healthy(world):
    world.set_card(*as_card(extended_resource(2, health="")))
    placed = plan(world, mem=P100)
    assert isinstance(placed, Placement)
    assert placed.assignment.indices() == [0]
    world.set_card(*as_card(extended_resource(0, health="Unhealthy")))
    world.set_card(*as_card(extended_resource(1, health="Unhealthy")))
    refused = plan(world, "q")
    assert isinstance(refused, Unplaceable)
    assert refused.refusals == {"n1": Refusal.UNHEALTHY}


def test_cards_of_a_node_that_is_gone_are_gone(world):
    world.remove_node("n1")
    assert free(world) == []
    world.set_node("n1")
    assert free(world) == [P100, P100]


def test_a_plan_holds_its_memory_so_that_the_next_pod_takes_other_memory(world):
    first, second, third = plan(world, "a", P100), plan(world, "b", P100), plan(world, "c", P100)
    assert first.assignment.indices() == [0]
    assert second.assignment.indices() == [1]
    assert isinstance(third, Unplaceable)


def test_a_plan_is_replaced_by_the_pods_next_one(world):
    plan(world, mem=P100)
    placed = plan(world, mem=P100)
    assert placed.assignment.indices() == [0]
    assert free(world) == [0, P100]


def test_a_plan_ends_with_its_pod(world):
    plan(world)
    world.remove_pod(as_pod(asking("p", gpu_mem=8138)))
    assert free(world) == [P100, P100]


def test_a_plan_ends_with_its_time(world, clock):
    plan(world)
    clock.advance(31)
    world.expire_reservations()
    assert free(world) == [P100, P100]


def test_a_plan_ends_when_filter_finds_no_node_for_the_pod_any_more(world):
    plan(world)
    assert isinstance(plan(world, nodes=["other"]), Unplaceable)
    assert free(world) == [P100, P100]


def test_bind_takes_the_planned_cards(world):
    world.set_pod(as_pod(bound("x", P100 - 8138, 0)))
    planned = plan(world)
    assert planned.assignment.indices() == [0]
    world.set_pod(as_pod(bound("y", P100 - 8138, 1)))  # now card 1 would do as well
    assert begin(world) == planned.assignment
    assert mark(world, "uid-p") == "binding"


def test_bind_on_another_node_than_planned_chooses_there(world):
    with_cards(world, n2=1)
    plan(world, nodes=["n1"])
    chosen = begin(world, node="n2")
    assert chosen.shares()[0].uuid == "GPU-n2-0"
    assert free(world, "n1") == [P100, P100]
    assert free(world, "n2") == [P100 - 8138]


def test_bind_chooses_another_card_when_the_planned_one_becomes_unhealthy(world):
    assert plan(world).assignment.indices() == [0]
    world.set_card(*as_card(extended_resource(0, health="Unhealthy")))
    assert begin(world).indices() == [1]


def test_bind_chooses_another_card_when_the_planned_one_was_filled(world):
    assert plan(world).assignment.indices() == [0]
    world.set_pod(as_pod(bound("legacy", P100 - 100, 0)))
    assert begin(world).indices() == [1]


def test_bind_is_refused_when_no_card_of_the_node_has_room_any_more(world):
    world.set_pod(as_pod(bound("x", P100, 0)))
    world.set_pod(as_pod(bound("y", P100, 1)))
    assert begin(world) is Refusal.NO_MEMORY
    assert mark(world, "uid-p") is None


def test_a_failed_bind_frees_the_cards(world):
    begin(world)
    world.record_binding_outcome("uid-p", None)
    assert free(world) == [P100, P100]


def test_a_bind_counts_until_the_watch_shows_the_pod_and_then_by_the_pod(world):
    chosen = begin(world)
    world.record_binding_outcome("uid-p", Phase.ACCEPTED)
    assert mark(world, "uid-p") == "bound"
    world.set_pod(as_pod(asking("p", gpu_mem=8138)))  # an event from before the bind
    assert mark(world, "uid-p") == "bound"
    world.set_pod(as_pod(bound("p", 8138, *chosen.indices())))
    assert mark(world, "uid-p") == ""
    assert free(world) == [P100 - 8138, P100]


def test_a_second_bind_while_one_is_posting_learns_so(world):
    begin(world)
    assert begin(world) == KnownBinding(node="n1", assignment=begin(world).assignment, phase=Phase.BINDING)


def test_filter_answers_a_bound_pod_with_its_node(world):
    begin(world)
    world.record_binding_outcome("uid-p", Phase.ACCEPTED)
    assert plan(world, nodes=["n1", "n2"]).node == "n1"


def test_a_pod_deleted_while_its_bind_was_posted_counts_as_a_ghost(world):
    begin(world)
    world.remove_pod(as_pod(asking("p", gpu_mem=8138)))
    assert free(world) == [P100 - 8138, P100]
    world.record_binding_outcome("uid-p", Phase.ACCEPTED)
    assert mark(world, "uid-p") == "terminating"


def test_a_pod_that_vanished_before_its_bind_was_seen_counts_as_a_ghost(world):
    begin(world)
    world.record_binding_outcome("uid-p", Phase.ACCEPTED)
    world.remove_pod(as_pod(asking("p", gpu_mem=8138)))
    assert mark(world, "uid-p") == "terminating"


def test_an_unsure_bind_keeps_its_cards_and_the_next_bind_writes_the_same(world):
    chosen = begin(world)
    world.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    assert plan(world, nodes=["n1"]) == KnownBinding(node="n1", assignment=chosen, phase=Phase.UNCONFIRMED)
    world.set_card(*as_card(extended_resource(0, health="Unhealthy")))
    assert begin(world) == chosen
    assert isinstance(begin(world, node="n2"), KnownBinding)


@pytest.mark.parametrize(
    ("bound_", "exists", "then"), [(True, True, "unconfirmed"), (False, True, None), (False, False, "terminating")]
)
def test_an_unconfirmed_bind_is_settled_by_a_later_lookup(world, clock, bound_, exists, then):
    begin(world)
    world.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    world.expire_reservations()
    assert world.overdue_bindings() == []
    clock.advance(76)
    world.expire_reservations()
    (holding,) = world.overdue_bindings()
    world.on_lookup(holding.uid, bound=bound_, exists=exists)
    assert mark(world, "uid-p") == then


def test_waiting_pods_are_woken_when_memory_comes_back_by_time(world, clock):
    last = as_pod(bound("a", P100, 0))
    world.set_pod(last)
    world.remove_pod(last)
    refuse(world)
    clock.advance(5)
    assert world.next_requeue_node() is None
    clock.advance(30)
    world.expire_reservations()
    assert world.next_requeue_node() == "n1"
    assert world.next_requeue_node() is None


def test_the_end_of_a_pod_of_the_former_name_of_a_node_frees_the_card_where_it_is(world, clock):
    pod = bound("a", P100, 0)
    pod["spec"]["nodeName"] = "former"
    world.set_node("former")
    world.take_changed_nodes()
    world.set_pod(as_pod(pod))
    assert world.take_changed_nodes() == {"former", "n1"}
    refuse(world)
    pod["status"] |= {"phase": "Succeeded", "containerStatuses": [{"name": "main", "state": {ENDED: {}}}]}
    world.set_pod(as_pod(pod))
    assert world.take_changed_nodes() == {"former", "n1"}
    assert world.next_requeue_node() == "n1"


def test_no_pod_is_requeued_without_pending_pods(world, clock):
    plan(world)
    clock.advance(31)
    world.expire_reservations()
    assert world.next_requeue_node() is None


def test_waiting_pods_are_woken_at_most_once_a_second_by_a_card_that_heals(world, clock):
    refuse(world)
    for expected in ("n1", None):
        world.set_card(*as_card(extended_resource(0, health="Unhealthy")))
        world.set_card(*as_card(extended_resource(0)))
        assert world.next_requeue_node() == expected
    clock.advance(1.1)
    assert world.next_requeue_node() == "n1"


def test_a_deletion_that_the_scheduler_sees_requeues_only_just_refused_pods(world, clock):
    last = as_pod(bound("a", P100, 0, deleting=True, containers=ENDED))
    world.next_requeue_node()
    world.set_pod(last)
    refuse(world)
    clock.advance(10)
    world.remove_pod(last)
    assert world.next_requeue_node() is None
    world.set_pod(last)
    refuse(world)
    world.remove_pod(last)
    assert world.next_requeue_node() == "n1"


def test_a_late_proof_that_the_containers_have_ended_ends_the_ghost(world):
    world.set_pod(as_pod(bound("a", P100, 0)))
    world.set_pod(as_pod(bound("a", P100, 0, phase="Failed", containers=RUNNING)))
    assert mark(world, "uid-a") == "terminating"
    world.set_pod(as_pod(bound("a", P100, 0, phase="Failed", containers=ENDED)))
    assert free(world) == [P100, P100]


def test_a_pod_that_may_have_run_keeps_its_share_when_an_old_filter_or_bind_call_comes(world):
    with_cards(world, n2=1)
    begin(world)
    world.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    world.remove_pod(as_pod(asking("p", gpu_mem=8138)))
    assert mark(world, "uid-p") == "terminating"
    assert isinstance(plan(world, nodes=["n2"]), KnownBinding)
    assert isinstance(begin(world), KnownBinding)
    assert mark(world, "uid-p") == "terminating"
    assert free(world) == [P100 - 8138, P100]


@pytest.fixture
def waiting(clock):
    """One node with one card that a plan holds whole, and a pod that was refused for it some time ago."""
    state = with_cards(make_state(clock), n1=1, n2=1)
    plan(state, "a", P100, ["n1"])
    assert isinstance(plan(state, "b", P100, ["n1"]), Unplaceable)
    clock.advance(5)
    state.next_requeue_node()
    clock.advance(5)
    assert state.next_requeue_node() is None
    return state


def test_a_plan_that_moves_to_another_node_wakes(waiting):
    assert plan(waiting, "a", P100, ["n2"]).node == "n2"
    assert waiting.next_requeue_node() == "n1"


def test_a_plan_that_ends_because_no_node_is_left_for_the_pod_wakes(waiting):
    assert isinstance(plan(waiting, "a", P100, ["other"]), Unplaceable)
    assert waiting.next_requeue_node() == "n1"


def test_a_repeated_plan_requeues_no_pod(waiting):
    assert plan(waiting, "a", P100, ["n1"]).node == "n1"
    assert waiting.next_requeue_node() is None


def test_a_plan_that_takes_less_than_before_wakes(waiting):
    assert plan(waiting, "a", P100 - 1, ["n1"]).node == "n1"
    assert waiting.next_requeue_node() == "n1"


def test_a_refusal_is_known_before_anything_can_be_freed(world, clock):
    """Another thread may free capacity right after the decision of filter, before its response is sent."""
    plan(world, "a", P100)
    plan(world, "b", P100)
    clock.advance(31)
    assert isinstance(plan(world, "c", P100), Unplaceable)
    world.expire_reservations()
    assert world.next_requeue_node() == "n1"


def test_a_refusal_among_all_nodes_is_known_too(world, clock):
    plan(world, "a", P100)
    plan(world, "b", P100)
    clock.advance(31)
    pod_request = request.parse(asking("c", gpu_mem=P100))
    assert isinstance(
        world.score_fitting_nodes(PlacementRequest(PodRef("uid-c", "default", "c"), pod_request, ["n1"], "binpack")),
        Unplaceable,
    )
    world.expire_reservations()
    assert world.next_requeue_node() == "n1"
    assert list(
        world.score_fitting_nodes(PlacementRequest(PodRef("uid-c", "default", "c"), pod_request, ["n1"], "binpack"))
    ) == ["n1"]


def test_the_node_to_touch_is_one_that_exists(waiting, clock):
    waiting.remove_node("n1")
    clock.advance(2)
    assert waiting.next_requeue_node() == "n2"


def because(world, uid, reason):
    with world.queue() as queue:
        queue.set_refusal_reason(uid, reason)


def test_a_refusal_of_long_ago_is_forgotten(world, clock):
    refuse(world)
    world.remove_pod(as_pod(asking("w", gpu_mem=P100 + 1)))
    refuse(world)  # filter was under way when the pod vanished
    because(world, "uid-w", "full")
    clock.advance(601)
    refuse(world, "x")
    because(world, "uid-x", "full")
    assert world.refusal_counts() == {"full": 1}


def test_a_cordoned_card_gets_nothing_new_and_keeps_what_it_has(world):
    chosen = begin(world)
    world.record_binding_outcome("uid-p", Phase.ACCEPTED)
    busy = chosen.indices()[0]
    world.set_card(*as_card(extended_resource(busy, unschedulable=True)))
    assert free(world)[busy] == P100 - 8138, "what runs stays counted"
    placed = plan(world, "q")
    assert isinstance(placed, Placement)
    assert placed.assignment.indices() == [1 - busy]
    refused = plan(world, "r", mem=P100)
    assert isinstance(refused, Unplaceable)
    assert refused.refusals == {"n1": Refusal.NO_MEMORY}
    world.set_card(*as_card(extended_resource(1 - busy, unschedulable=True)))
    refused = plan(world, "s", mem=1)
    assert isinstance(refused, Unplaceable)
    assert refused.refusals == {"n1": Refusal.CORDONED}


def test_a_pod_bound_after_its_card_was_cordoned_gets_another_card(world):
    """Filter has seen the card, bind does not."""
    asked_first = plan(world, "q")
    assert isinstance(asked_first, Placement)
    (seen,) = asked_first.assignment.indices()
    world.set_card(*as_card(extended_resource(seen, unschedulable=True)))
    chosen = begin(world, "q")
    assert chosen.indices() == [1 - seen]


def test_nothing_is_bound_to_a_node_whose_device_plugin_has_taken_its_slots_off(world):
    """The plugin ends a moment later; pods that the kubelet admits after that fail for good."""
    plan(world)
    world.set_node("n1", NodeRecord(offers_shares=False))
    assert begin(world) is Refusal.NO_SLOTS
    assert free(world) == [P100, P100]


def test_slots_that_are_back_count_once_they_have_stayed(world, clock):
    """While a device plugin ends, the kubelet's own report restores the slots for a moment."""
    plan(world)
    world.set_node("n1", NodeRecord(offers_shares=False))
    world.set_node("n1", NodeRecord())
    world.expire_reservations()
    assert begin(world) is Refusal.NO_SLOTS
    clock.advance(STEADY_SECONDS - 0.1)
    world.set_node("n1", NodeRecord(offers_shares=False))
    world.set_node("n1", NodeRecord())
    clock.advance(STEADY_SECONDS - 0.1)
    world.expire_reservations()
    assert begin(world) is Refusal.NO_SLOTS
    clock.advance(0.1)
    world.expire_reservations()
    assert begin(world).indices() == [0]
    assert free(world) == [P100 - 8138, P100]


def test_a_gang_is_not_planned_on_a_node_whose_slots_are_only_just_back(clock):
    loads = NodeLoads()
    loads.set_node("n1", NodeRecord(offers_shares=False), clock.now())
    assert not loads.is_open("n1")
    loads.set_node("n1", NodeRecord(), clock.now())
    before = loads.freed_count
    clock.advance(STEADY_SECONDS - 0.1)
    assert not loads.reopen_steady_nodes(clock.now())
    assert (loads.is_open("n1"), list(loads.open_nodes())) == (False, [])
    clock.advance(0.1)
    assert loads.reopen_steady_nodes(clock.now())
    assert (loads.is_open("n1"), list(loads.open_nodes())) == (True, ["n1"])
    assert loads.freed_count > before  # gangs that wait are tried again


def test_the_first_word_of_a_node_counts_at_once(clock):
    """As after a start of the extender."""
    loads = NodeLoads()
    loads.set_node("n1", NodeRecord(), clock.now())
    assert loads.is_open("n1")


def test_a_pod_that_ends_without_a_node_holds_nothing(world):
    """For example, its phase is set to Failed while it is pending."""
    plan(world)
    assert free(world) != [P100, P100]
    world.set_pod(as_pod(asking("p", gpu_mem=8138) | {"status": {"phase": "Failed"}}))
    assert free(world) == [P100, P100]
    world.expire_reservations()
    assert world.overdue_bindings() == []


def test_one_that_ends_while_its_binding_may_land_is_not_looked_up(world, clock):
    plan(world)
    begin(world)
    world.record_binding_outcome("uid-p", Phase.UNCONFIRMED)
    world.set_pod(as_pod(asking("p", gpu_mem=8138) | {"status": {"phase": "Failed"}}))
    assert free(world) == [P100, P100], "its containers never start"
