"""Devices other than GPUs in the state: which pods get them, until when they are held, and their statuses."""

import pytest
from msgspec.structs import replace

from cardwise.core.api import assignment, request
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from cardwise.kube.objects.extendedresources import Allocated
from extender.cache.reservations import Assumed, Phase
from extender.placing.placing import PlacementRequest
from extender.records.podref import PodRef
from extender.reporting import statuses
from extender.reporting.listers import Listers
from tests.build import container, extended_resource, resource_class
from tests.core.others import asking, wanting
from tests.extender.states import ENDED, as_card, as_class, as_pod, make_state, with_cards

RDMA = as_class(resource_class("rdma", kind="rdma"))
SHARE = container(gpu_mem=8138)


def device(index, *, node="n1", kind="rdma", health="Healthy", reported=(), **properties):
    """The ExtendedResource of a device."""
    manifest = extended_resource(
        index, node=node, kind=kind, health=health, reported=list(reported), properties=properties
    )
    return as_card(manifest)


@pytest.fixture
def world(clock):
    """n1 and n2 have a P100 each; n1 has two RDMA devices, n2 none."""
    state = with_cards(make_state(clock), n1=1, n2=1)
    state.set_class(RDMA)
    for i in range(2):
        state.set_card(*device(i))
    return state


def wants(name, *containers):
    return asking(*containers, name=name, uid=f"uid-{name}", of_devices=("rdma",))


def plan(state, name, *containers, nodes=("n1", "n2")):
    pod_request = request.parse_mutated(wants(name, *containers))
    return state.plan_pod(PlacementRequest(PodRef(f"uid-{name}", "default", name), pod_request, list(nodes), "binpack"))


def bind(state, name, *containers, node="n1"):
    pod_request = request.parse_mutated(wants(name, *containers))
    return state.assume(PodRef(f"uid-{name}", "default", name), pod_request, node, "binpack", epoch=0)


def bound(assigned, name, *containers, phase="Running", deleting=False):
    """The pod in the watch event after its bind."""
    pod = wants(name, *containers)
    pod["metadata"]["annotations"] |= assignment.encode(assigned, assume_time_ns=1)
    pod["spec"]["nodeName"] = "n1"
    pod["status"] = {
        "phase": phase,
        "containerStatuses": [{"name": "main", "state": {ENDED if deleting else "running": {}}}],
    }
    if deleting:
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    return as_pod(pod)


def held_devices(placed):
    return [share.uuid for share in placed.assignment.non_gpu_devices()]


def test_where_all_devices_are_held_the_pod_waits_and_is_woken_when_one_is_free(world, clock):
    plan(world, "a", wanting(rdma=2))
    refused = plan(world, "b", wanting(rdma=1))
    assert isinstance(refused, Unplaceable)
    assert refused.refusals == {"n1": Refusal.NO_DEVICE, "n2": Refusal.NO_SUCH_DEVICE}
    clock.advance(31)  # the plan of the first ends
    world.expire_reservations()
    assert world.next_requeue_node() is not None
    assert isinstance(plan(world, "b", wanting(rdma=1)), Placement)


def test_bind_writes_the_planned_device_and_another_pod_never_gets_it(world):
    plan(world, "a", wanting(rdma=1))
    begun = bind(world, "a", wanting(rdma=1))
    assert held_devices(begun) == ["rdma-n1-0"]
    world.record_binding_outcome("uid-a", Phase.ACCEPTED)
    world.set_pod(bound(begun.assignment, "a", wanting(rdma=1)))
    assert held_devices(plan(world, "b", wanting(rdma=1))) == ["rdma-n1-1"]
    assert isinstance(plan(world, "c", wanting(rdma=1)), Unplaceable)


@pytest.mark.parametrize("change", ["sick", "gone", "of another class"])
def test_a_planned_device_that_is_not_good_any_more_is_replaced_at_bind(world, change):
    plan(world, "a", wanting(rdma=1))
    if change == "sick":
        world.set_card(*device(0, health="Unhealthy"))
    elif change == "gone":
        world.remove_card("rdma-n1-0")
    else:
        world.set_class(as_class(resource_class("rdma", selector={"matchLabels": {"index": "1", "kind": "rdma"}})))
    begun = bind(world, "a", wanting(rdma=1))
    assert isinstance(begun, Assumed)
    assert held_devices(begun) == ["rdma-n1-1"]


def test_a_device_is_free_when_its_containers_have_ended_and_not_when_deletion_starts(world):
    begun = bind(world, "a", wanting(rdma=2))
    world.record_binding_outcome("uid-a", Phase.ACCEPTED)
    world.set_pod(bound(begun.assignment, "a", wanting(rdma=2)))
    dying = replace(bound(begun.assignment, "a", wanting(rdma=2), deleting=True), ended=False)
    world.set_pod(dying)
    assert isinstance(plan(world, "b", wanting(rdma=1)), Unplaceable)
    world.remove_pod(bound(begun.assignment, "a", wanting(rdma=2), deleting=True))
    assert isinstance(plan(world, "b", wanting(rdma=1)), Placement)


def test_a_device_that_its_node_still_reports_as_held_is_not_given_away(world, clock):
    held = {"podUID": "uid-old", "namespace": "default", "name": "old", "memoryMiB": 0, "corePercent": 0}
    world.set_card(*device(0, reported=[held]))
    assert held_devices(plan(world, "a", wanting(rdma=1))) == ["rdma-n1-1"]
    assert isinstance(plan(world, "b", wanting(rdma=1)), Unplaceable)
    world.set_card(*device(0))
    assert held_devices(plan(world, "b", wanting(rdma=1))) == ["rdma-n1-0"]


def test_after_a_restart_devices_are_held_as_the_annotations_say_whatever_comes_first(world, clock):
    begun = bind(world, "a", wanting(SHARE, rdma=1))
    pod = bound(begun.assignment, "a", wanting(SHARE, rdma=1))
    again = with_cards(make_state(clock))
    again.set_pod(pod)
    again.set_class(RDMA)
    for i in range(2):
        again.set_card(*device(i))
    again.set_card(*as_card(extended_resource(0)))
    again.set_node("n1")
    assert held_devices(plan(again, "b", wanting(rdma=1), nodes=["n1"])) == ["rdma-n1-1"]
    with again.view() as ledger:
        assert ledger.node("n1").free == [16276 - 8138]
        assert ledger.violations() == []


def test_a_class_of_cards_never_has_a_device_though_its_selector_would_match(world):
    world.set_class(as_class(resource_class("of-n1", selector={"matchLabels": {"node": "n1"}})))
    with world.view() as ledger:
        node = ledger.node("n1")
        assert [set(card.classes) for card in node.cards] == [{"of-n1", "nvidia.p100"}]
        assert [set(card.classes) for card in node.devices] == [{"rdma"}, {"rdma"}]


def test_statuses_of_devices_say_who_is_there_and_what_class_they_are_in(world):
    plan(world, "a", wanting(rdma=1))
    with world.view() as ledger:
        count = statuses.compute_node_totals(ledger, "n1")
    first, second = count.cards["rdma-n1-0"], count.cards["rdma-n1-1"]
    assert (first.allocated, first.classes) == (Allocated(0, 0, shares=1, whole=True, pods=1), ("rdma",))
    assert second.allocated == Allocated(0, 0, shares=0, whole=False, pods=0)
    assert count.sums[frozenset({"rdma"})].cards == 2


def test_no_automatic_class_is_made_for_the_model_of_a_device():
    seen = Listers()
    seen.cards.set_object(*device(0))
    assert seen.cards.models() == set()
    seen.cards.set_object(*as_card(extended_resource(0)))
    assert seen.cards.models() == {"P100"}
