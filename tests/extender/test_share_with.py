"""Pods that share GPUs within their namespace only: filter, bind, gangs, preemption, and a restarted extender."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.cache.reservations import Assumed
from extender.placing.placing import PlacementRequest
from extender.records.podref import PodRef
from extender.state import State
from tests.build import asking, extended_resource, reported_share
from tests.extender.states import as_card, as_pod, bound, make_state


@pytest.fixture
def world(clock):
    return with_cards(make_state(clock))


def with_cards(world: State, *, reports: list | None = None) -> State:
    """Node n1 has two cards."""
    world.set_node("n1")
    for index in range(2):
        world.set_card(*as_card(extended_resource(index, node="n1", reported=reports if not index else None)))
    return world


def with_demand(pod: dict, namespace: str, *, exclusive: bool) -> dict:
    pod["metadata"]["namespace"] = namespace
    if exclusive:
        pod["metadata"]["annotations"][names.SHARE_WITH] = "namespace"
    return pod


def runs(world: State, name: str, namespace: str, index: int, *, exclusive: bool = False) -> None:
    world.set_pod(as_pod(with_demand(bound(name, 1000, index), namespace, exclusive=exclusive)))


def place(world: State, name: str, namespace: str, *, exclusive: bool = False, mem: int = 1000):
    """The cards that filter reserves for such a pod on node n1, or the refusal."""
    pod_request = request.parse(with_demand(asking(name, gpu_mem=mem), namespace, exclusive=exclusive))
    placement = world.plan_pod(PlacementRequest(PodRef(f"uid-{name}", namespace, name), pod_request, ["n1"], "binpack"))
    if isinstance(placement, Unplaceable):
        return placement.refusals["n1"]
    assert isinstance(placement, Placement)
    return placement.assignment.indices()


def test_filter_keeps_an_exclusive_pod_apart_from_other_namespaces(world):
    assert place(world, "a", "team", exclusive=True) == [0]
    assert place(world, "b", "other") == [1]
    assert place(world, "c", "team", exclusive=True) == [0]
    assert place(world, "d", "team") == [0]
    assert place(world, "e", "other", exclusive=True) == [1]
    assert place(world, "f", "third") is Refusal.WITHIN_NAMESPACE
    assert place(world, "g", "third", exclusive=True) is Refusal.OTHER_NAMESPACES


def test_a_restarted_extender_finds_the_demand_in_the_pods(clock):
    world = with_cards(make_state(clock))
    runs(world, "a", "team", 0, exclusive=True)
    runs(world, "b", "other", 1)
    assert place(world, "c", "third") == [1]
    assert place(world, "d", "third", exclusive=True) is Refusal.OTHER_NAMESPACES
    assert place(world, "e", "team", exclusive=True) == [0]


def test_bind_checks_the_card_again(world):
    """Between filter and bind, a pod of another namespace came onto the card, as of another extender."""
    pod = with_demand(asking("a", gpu_mem=1000), "team", exclusive=True)
    assert place(world, "a", "team", exclusive=True) == [0]
    runs(world, "b", "other", 0)
    ref = PodRef("uid-a", "team", "a")
    assumed = world.assume(ref, request.parse(pod), "n1", "binpack", epoch=0)
    assert isinstance(assumed, Assumed)
    assert assumed.assignment.indices() == [1]


def test_a_deleted_pod_that_only_its_node_reports_keeps_its_card(clock):
    report = reported_share("gone", 1000) | {"namespace": "team"}
    world = with_cards(make_state(clock), reports=[report])
    assert place(world, "a", "other", mem=9000) == [1]
    assert place(world, "b", "team", mem=9000) == [0]
