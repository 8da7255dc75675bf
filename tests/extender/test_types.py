"""Classes and quotas in the state: decisions of filter and bind, and the pods that are requeued when they change."""

import json

import pytest

from cardwise.core.api import names, request
from cardwise.core.api.quotas import Charge
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender import informers
from extender.cache.inventory import Inventory
from extender.cache.membership import ClassMembership
from extender.cache.reservations import Assumed, KnownBinding, Phase
from extender.placing.placing import PlacementRequest
from extender.records.podref import PodRef
from extender.reporting.classcontroller import automatic_class
from tests.build import P100, asking, extended_resource, gpu_quota, reported_share, resource_class
from tests.extender.states import (
    ENDED,
    as_card,
    as_class,
    as_pod,
    as_quota,
    begin,
    bound,
    free,
    make_state,
    mark,
    plan,
    with_cards,
)

K80 = as_class(resource_class("k80", model="Tesla K80"))
OF_P100, OF_K80 = "nvidia.p100", "nvidia.tesla.k80"


@pytest.fixture
def world(clock):
    """n1 has a P100 and a K80, n2 a P100; there are classes for both."""
    state = with_cards(make_state(clock), n1=1, n2=1)
    state.set_card(*as_card(extended_resource(1, model="Tesla K80")))
    state.set_class(K80)
    state.set_class(as_class(resource_class("p100", model="P100")))
    return state


def all_classes_of(state, node="n1"):
    with state.view() as ledger:
        return [set(card.classes) for card in ledger.node(node).cards]


def classes_of(state, node="n1"):
    """The classes of a card, without the automatic classes of models."""
    return [of - {OF_P100, OF_K80} for of in all_classes_of(state, node)]


def woken(state, clock):
    """Whether pods are requeued now."""
    clock.advance(5)
    return state.next_requeue_node() is not None


def calm(state, clock):
    """Handle all requeues that are due."""
    clock.advance(5)
    state.next_requeue_node()
    clock.advance(5)


def refused(answer):
    assert isinstance(answer, Unplaceable)
    return set(answer.refusals.values())


# Classes.


def test_a_pod_gets_a_card_of_the_class_that_it_names_and_no_other(world):
    assert plan(world, "a", 8138, "n1", "n2", resource_class="k80").assignment.indices() == [1]
    assert plan(world, "b", 8138, "n1", "n2", resource_class="p100").assignment.indices() == [0]
    assert refused(plan(world, "c", P100, "n2", resource_class="k80")) == {Refusal.NO_SUCH_TYPE}
    assert refused(plan(world, "d", 100, "n1", resource_class="unknown")) == {Refusal.NO_SUCH_TYPE}


def test_membership_follows_classes_and_cards(world):
    assert classes_of(world) == [{"p100"}, {"k80"}]
    world.set_class(as_class(resource_class("k80", model=["Tesla K80", "P100"])))
    assert classes_of(world) == [{"p100", "k80"}, {"k80"}]
    world.remove_class("k80")
    assert classes_of(world) == [{"p100"}, set()]
    world.set_card(*as_card(extended_resource(1, model="P100")))
    assert classes_of(world) == [{"p100"}, {"p100"}]


def test_a_card_is_in_the_class_of_its_model_whether_or_not_that_has_an_object(world):
    assert all_classes_of(world) == [{"p100", OF_P100}, {"k80", OF_K80}]
    world.take_changed_nodes()
    world.set_class(as_class(automatic_class(OF_K80, "Tesla K80")))
    assert all_classes_of(world) == [{"p100", OF_P100}, {"k80", OF_K80}]
    world.set_card(*as_card(extended_resource(2, model="NVIDIA Tesla K80")))
    assert all_classes_of(world)[2] == {OF_K80}, "before the class says so"
    world.take_changed_nodes()
    world.remove_class(OF_K80)
    assert all_classes_of(world)[1] == {"k80", OF_K80}
    assert world.take_changed_nodes() == set()


def test_the_object_of_a_models_class_is_no_reason_to_look_at_all_cards_anew():
    inventory, kept = Inventory(), automatic_class(OF_K80, "Tesla K80")
    assert not inventory.set_class(as_class(kept))
    assert not inventory.remove_class(OF_K80)
    assert inventory.set_class(as_class(resource_class(OF_K80, model="P100")))
    assert inventory.set_class(as_class(kept))
    assert inventory.set_class(as_class(resource_class(OF_K80, model="P100")))
    assert inventory.remove_class(OF_K80)


def test_a_persons_class_of_a_models_name_says_itself_what_is_in_it(world):
    kept = automatic_class(OF_K80, "Tesla K80")
    world.set_class(as_class(kept))
    world.set_card(*as_card(extended_resource(2, model="NVIDIA Tesla K80")))
    del kept["metadata"]["annotations"]
    world.set_class(as_class(kept))
    assert all_classes_of(world)[1:] == [{"k80", OF_K80}, set()]
    world.set_class(as_class(resource_class(OF_K80, model="P100")))
    assert all_classes_of(world)[:2] == [{"p100", OF_P100, OF_K80}, {"k80"}]
    world.set_class(as_class(resource_class(OF_K80, kind="rdma")))
    assert all_classes_of(world)[1:] == [{"k80"}, set()]


def test_labels_and_properties_of_the_object_can_be_selected(world):
    world.set_class(as_class(resource_class("gold", selector={"matchLabels": {"Tier": "gold"}})))
    world.set_class(as_class(resource_class("driver", selector={"matchLabels": {"driver": "550.90"}})))
    assert classes_of(world) == [{"p100"}, {"k80"}]
    world.set_card(*as_card(extended_resource(0, labels={"tier": "gold"}, properties={"Driver": "550.90"})))
    assert classes_of(world) == [{"p100", "gold", "driver"}, {"k80"}]
    world.set_card(*as_card(extended_resource(0)))
    assert classes_of(world) == [{"p100"}, {"k80"}]


def test_the_label_that_we_put_on_is_none_of_a_persons():
    _, record = as_card(extended_resource(0, labels={"tier": "gold"}))
    assert record.labels == {"tier": "gold"}
    assert names.NODE_LABEL not in record.labels


def test_many_changes_of_classes_are_found_out_once(world, monkeypatch):
    world.next_requeue_node()
    built = []
    monkeypatch.setattr(
        "extender.cache.inventory.ClassMembership",
        lambda *args, **kwargs: built.append(1) or ClassMembership(*args, **kwargs),
    )
    for i in range(200):
        world.set_class(as_class(resource_class(f"class-{i}", model="P100")))
    assert built == []
    assert len(classes_of(world)[0]) == 201
    assert plan(world, "a", 100, resource_class="class-7").assignment.indices() == [0]
    assert built == [1]


def test_a_class_that_only_looks_different_changes_nothing(world):
    world.next_requeue_node()
    other = resource_class("k80", model="Tesla K80")
    other["spec"]["share"] = {"memoryMiB": 1000}
    world.take_changed_nodes()
    world.set_class(as_class(other))
    assert world.take_changed_nodes() == set()


def test_bind_chooses_another_card_when_the_planned_one_left_the_class(world):
    assert plan(world, "a", 8138, resource_class="k80").assignment.indices() == [1]
    world.set_class(as_class(resource_class("k80", model="P100")))
    assert begin(world, "a", 8138, resource_class="k80").assignment.indices() == [0]


def test_bind_is_refused_when_the_class_is_gone(world):
    plan(world, "a", 8138, resource_class="k80")
    world.remove_class("k80")
    assert begin(world, "a", 8138, resource_class="k80") is Refusal.NO_SUCH_TYPE
    assert free(world) == [P100, P100]


def test_an_unsure_bind_keeps_its_card_whatever_became_of_class_and_quota(world):
    first = begin(world, "a", 8138, resource_class="k80")
    world.record_binding_outcome("uid-a", Phase.UNCONFIRMED)
    world.remove_class("k80")
    world.set_quota(*as_quota({"shares": 0}))
    assert begin(world, "a", 8138, resource_class="k80") == Assumed(assignment=first.assignment, unconfirmed=True)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w.set_class(as_class(resource_class("big", model="Tesla K80"))), id="added"),
        pytest.param(lambda w: w.set_class(as_class(resource_class("p100", model="Tesla K80"))), id="changed"),
        pytest.param(lambda w: w.remove_class("p100"), id="removed"),
    ],
)
def test_a_change_of_classes_requeues_waiting_pods(world, clock, change):
    plan(world, "w", P100 + 1)
    calm(world, clock)
    change(world)
    assert woken(world, clock)
    assert not woken(world, clock)


def test_waiting_pods_are_found_by_class(world):
    for name, wanted in (("a", "k80"), ("b", "k80"), ("c", "p100"), ("d", "")):
        world.set_pod(as_pod(asking(name, gpu_mem=1, namespace="team", resource_class=wanted)))
    asking_for_k80 = {tuple(pod) for pod in world.pods_requesting_class("k80")}
    assert asking_for_k80 == {("uid-a", "team", "a"), ("uid-b", "team", "b")}
    world.set_pod(as_pod(bound("a", 100, 1)))
    assert [pod.name for pod in world.pods_requesting_class("k80")] == ["b"]
    world.remove_pod(as_pod(asking("b", gpu_mem=1, namespace="team", resource_class="k80")))
    assert world.pods_requesting_class("k80") == []


def test_a_class_is_in_use_while_a_pod_waits_for_it_or_holds_its_cards(world):
    assert not world.is_class_in_use("k80")
    world.set_pod(as_pod(asking("w", gpu_mem=1, resource_class="k80")))
    assert world.is_class_in_use("k80")
    world.remove_pod(as_pod(asking("w", gpu_mem=1)))
    assert not world.is_class_in_use("k80")
    world.set_pod(as_pod(bound("a", 100, 1)))
    assert world.is_class_in_use("k80")
    assert not world.is_class_in_use("none")
    world.remove_card(as_card(extended_resource(1))[0])
    assert world.is_class_in_use("k80"), "nobody knows any more what card that was"


# Quotas.


def test_the_pods_own_plan_is_not_counted_against_it(world):
    world.set_quota(*as_quota({"shares": 1}))
    for _ in range(2):
        assert isinstance(plan(world, "a", 8138), Placement)
    pod_request = request.parse(asking("a", gpu_mem=8138))
    assert list(
        world.score_fitting_nodes(
            PlacementRequest(PodRef("uid-a", "default", "a"), pod_request, ["n1", "n2"], "binpack")
        )
    ) == [
        "n1",
        "n2",
    ]
    assert set(
        world.score_nodes(PlacementRequest(PodRef("uid-a", "default", "a"), pod_request, ["n1", "n2"], "binpack"))
    ) == {
        "n1",
        "n2",
    }
    assert (
        world.score_nodes(PlacementRequest(PodRef("uid-b", "default", "b"), pod_request, ["n1", "n2"], "binpack")) == {}
    )
    assert isinstance(begin(world, "a", 8138), Assumed)
    assert begin(world, "b", 1) is Refusal.QUOTA
    assert mark(world, "uid-a") == "binding"


def test_all_quotas_of_a_namespace_apply(world):
    world.set_quota(*as_quota({"shares": 2}, name="one"))
    world.set_quota(*as_quota({"class": "k80", "shares": 0}, name="two"))
    assert plan(world, "a", 100).assignment.indices() == [0]
    assert refused(plan(world, "b", 100, resource_class="k80")) == {Refusal.QUOTA}
    world.remove_quota("default/two")
    assert isinstance(plan(world, "b", 100, resource_class="k80"), Placement)
    assert refused(plan(world, "c", 100)) == {Refusal.QUOTA}


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param(lambda w: w.set_pod(as_pod(bound("a", 8138, 0))), id="bound"),
        pytest.param(lambda w: plan(w, "a", 8138), id="planned"),
        pytest.param(lambda w: begin(w, "a", 8138), id="binding"),
        pytest.param(
            lambda w: (
                w.remove_card(as_card(extended_resource(0))[0]),
                w.set_card(
                    *as_card(
                        extended_resource(
                            0, reported=[reported_share("uid-a", 8138)], terminating=[reported_share("uid-a", 8138)]
                        )
                    )
                ),
            ),
            id="held",
        ),
        pytest.param(
            lambda w: (w.set_pod(as_pod(bound("a", 8138, 0))), w.remove_pod(as_pod(bound("a", 8138, 0)))),
            id="terminating",
        ),
    ],
)
def test_whatever_the_namespace_holds_counts(world, hold):
    world.set_quota(*as_quota({"memoryMiB": 8138}))
    hold(world)
    assert refused(plan(world, "b", 1)) == {Refusal.QUOTA}


def test_after_a_restart_a_pod_counts_in_the_quota_of_a_class_while_its_card_is_away(clock):
    state = make_state(clock)
    state.set_node("n1")
    state.set_card(*as_card(extended_resource(1, model="Tesla K80")))
    state.set_class(as_class(resource_class("k80", model="Tesla K80")))
    state.set_quota(*as_quota({"class": "k80", "shares": 1}))
    state.set_pod(as_pod(bound("a", 100, 0)))  # and its ExtendedResource comes back later
    assert refused(plan(state, "b", 100, resource_class="k80")) == {Refusal.QUOTA}
    state.set_card(*as_card(extended_resource(0, model="Tesla P100")))
    assert isinstance(plan(state, "b", 100, resource_class="k80"), Placement), "it was another one"


def test_bind_checks_a_plan_against_a_quota_that_was_lowered_since(world):
    assert isinstance(plan(world, "a", 8138), Placement)
    world.set_quota(*as_quota({"memoryMiB": 8137}))
    assert begin(world, "a", 8138) is Refusal.QUOTA
    assert free(world) == [P100, P100]


def test_bind_moves_a_plan_to_a_card_of_the_node_that_the_lowered_quota_leaves(world):
    assert plan(world, "a", 8138).assignment.indices() == [0]
    world.set_quota(*as_quota({"class": "p100", "shares": 0}))
    assert begin(world, "a", 8138).assignment.indices() == [1]


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        pytest.param({"shares": 0}, lambda w: w.set_quota(*as_quota({"shares": 2})), id="raised"),
        pytest.param({"shares": 0}, lambda w: w.remove_quota("default/team"), id="deleted"),
        pytest.param({"class": "p100", "shares": 0}, lambda w: w.remove_class("p100"), id="cards left its class"),
    ],
)
def test_a_raised_quota_requeues_the_pods_that_waited_for_it(world, clock, entry, change):
    world.set_quota(*as_quota(entry))
    assert refused(plan(world, "w", 100, "n2")) == {Refusal.QUOTA}
    calm(world, clock)
    change(world)
    assert woken(world, clock)
    assert not woken(world, clock)
    assert isinstance(plan(world, "w", 100, "n2"), Placement)


def test_a_deleted_pod_requeues_pods_that_waited_for_its_quota(world, clock):
    world.set_quota(*as_quota({"shares": 1}))
    last = as_pod(bound("a", 100, 0))
    world.set_pod(last)
    world.remove_pod(last)
    assert refused(plan(world, "w", 100)) == {Refusal.QUOTA}
    calm(world, clock)
    clock.advance(20)
    world.expire_reservations()
    assert woken(world, clock)
    assert isinstance(plan(world, "w", 100), Placement)


def test_a_share_of_a_quota_is_free_when_the_containers_have_ended(world):
    world.set_quota(*as_quota({"shares": 1}))
    world.set_pod(as_pod(bound("a", 100, 0)))
    assert refused(plan(world, "b", 100)) == {Refusal.QUOTA}
    last = as_pod(bound("a", 100, 0, deleting=True, containers=ENDED))
    world.set_pod(last)
    world.remove_pod(last)
    assert isinstance(plan(world, "b", 100), Placement)


# The interval between two extenders.


def test_plans_end_with_the_epoch_and_what_was_posted_stays(world):
    plan(world, "a", 8138)
    begin(world, "b", 100, epoch=1)
    begin(world, "c", 200, node="n2", epoch=1)
    world.record_binding_outcome("uid-c", Phase.UNCONFIRMED)
    world.forget_plans()
    assert [mark(world, f"uid-{name}") for name in "abc"] == [None, "binding", "unconfirmed"]


def test_what_is_unsure_since_an_earlier_epoch_is_not_posted_again_until_it_is_settled(world, clock):
    chosen = begin(world, "a", 8138, epoch=1).assignment
    world.record_binding_outcome("uid-a", Phase.UNCONFIRMED)
    assert begin(world, "a", 8138, epoch=2) == KnownBinding(node="n1", assignment=chosen, phase=Phase.UNCONFIRMED)
    clock.advance(76)
    world.expire_reservations()
    (holding,) = world.overdue_bindings()
    world.on_lookup(holding.uid, bound=False, exists=True)
    assert begin(world, "a", 8138, epoch=2) == Assumed(assignment=chosen, unconfirmed=False)


def test_a_new_leader_requeues_by_node_without_a_refusal(world, clock):
    calm(world, clock)
    assert not woken(world, clock)
    with world.queue() as queue:
        queue.requeue_all_after_takeover()
    assert woken(world, clock)
    assert not woken(world, clock)


# Records.


def test_classes_and_quotas_are_read_and_unreadable_ones_say_why():
    key, record = informers.project_class(json.dumps(resource_class("k80", model="Tesla K80")).encode())
    assert (key, record.resource_class, record.problem) == ("k80", K80, None)
    broken = resource_class("k80") | {"spec": {"selector": {}}}
    assert "empty selector" in informers.project_class(json.dumps(broken).encode())[1].problem
    key, record = informers.project_quota(json.dumps(gpu_quota({"shares": 1})).encode())
    assert (key, record.quota) == as_quota({"shares": 1})
    key, record = informers.project_quota(json.dumps(gpu_quota({"shares": -1})).encode())
    assert (key, record.quota) == ("default/team", None)
    assert "spec.hard[0].shares" in record.problem


def test_an_unchanged_quota_requeues_no_pod(world, clock):
    quota = as_quota({"class": "k80", "shares": 0})
    world.set_quota(*quota)
    assert refused(plan(world, "p", 100, resource_class="k80")) == {Refusal.QUOTA}
    calm(world, clock)
    world.set_quota(*quota)
    assert not woken(world, clock)
    world.set_quota(*as_quota({"class": "k80", "shares": 1}))
    assert woken(world, clock)


def test_the_entry_in_an_event_counts_cards_that_the_pod_may_use(world):
    world.set_quota(*as_quota({"class": "p100", "shares": 0}, {"model": "Tesla K80", "shares": 0}))
    pod_request = request.parse_mutated(asking("p", gpu_mem=100, resource_class="k80"))
    assert refused(
        world.plan_pod(PlacementRequest(PodRef("uid-p", "default", "p"), pod_request, ["n1"], "binpack"))
    ) == {Refusal.QUOTA}
    full = world.full_quota_entry("default", pod_request)
    assert (full.entry.model, full.requested.shares) == ("Tesla K80", 1)


def test_a_whole_card_counts_the_memory_of_the_smallest_possible_card(world):
    world.set_card(*as_card(extended_resource(1, model="Tesla K80", mem=11441)))
    pod_request = request.parse_mutated(asking("p", whole_gpu=1))
    world.set_quota(*as_quota({"memoryMiB": 11440}))
    assert refused(
        world.plan_pod(PlacementRequest(PodRef("uid-p", "default", "p"), pod_request, ["n1"], "binpack"))
    ) == {Refusal.QUOTA}
    assert world.full_quota_entry("default", pod_request).requested == Charge(1, 11441, 1)
    world.set_quota(*as_quota({"class": "p100", "memoryMiB": 11441}, {"class": "k80", "gpus": 0}))
    assert world.full_quota_entry("default", pod_request).entry.resource_class in ("p100", "k80")
    of_p100 = request.parse_mutated(asking("p", whole_gpu=1, resource_class="p100"))
    assert world.full_quota_entry("default", of_p100).requested == Charge(1, P100, 1)
    world.set_quota(*as_quota({"memoryMiB": P100}))
    assert world.full_quota_entry("default", of_p100) is None, "it may be that bigger ones only are free"
