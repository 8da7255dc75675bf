"""GPUQuotas in the state: the entry in a pod's event, and the requeued pods."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.placement.placement import Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.state import State
from tests.build import P100, container, extended_resource, pod, resource_class
from tests.extender.states import as_card, as_class, as_pod, as_quota, bound, make_state, plan, refuse, with_cards
from tests.fakes.clock import FakeClock


def of_class(name: str, resource_class: str, **resources: int) -> dict:
    typed = container(name, **resources)
    typed["resources"]["limits"][names.CLASS_PREFIX + resource_class] = "1"
    return typed


def full(state: State, *containers: dict) -> str | None:
    """The class ("" for all cards) of the entry in the event of such a pod; None if there is no event."""
    pod_request = request.parse(pod(containers=list(containers)))
    assert pod_request is not None
    with state.view():  # counts the cards
        pass
    entry = state.full_quota_entry("default", pod_request)
    return entry.entry.resource_class if entry is not None else None


def with_class() -> State:
    """A card of the class p100, and no card of the class k80."""
    state = with_cards(make_state(), n1=1)
    state.set_class(as_class(resource_class("p100", model="P100")))
    state.set_class(as_class(resource_class("k80", model="K80")))
    with state.view():
        return state


def test_the_entry_of_a_class_is_named_although_another_container_may_have_any_card():
    state = with_class()
    state.set_quota(*as_quota({"shares": 0}, {"class": "p100", "shares": 0}))
    assert full(state, container("a", gpu_mem=1000), of_class("b", "p100", gpu_mem=1000)) == "p100"


def test_a_container_that_the_entry_does_not_count_hides_none_that_it_does():
    state = with_class()
    state.set_quota(*as_quota({"class": "p100", "shares": 0}))
    assert full(state, of_class("a", "k80", gpu_mem=1000), of_class("b", "p100", gpu_mem=1000)) == "p100"


def test_the_entry_that_surely_keeps_a_pod_waiting_is_named_before_one_that_it_could_go_past():
    state = with_class()
    state.set_card(*as_card(extended_resource(1, model="K80")))
    state.set_quota(*as_quota({"class": "p100", "shares": 2}, {"class": "k80", "shares": 0}))
    containers = [
        of_class("a", "p100", gpu_mem=1000),
        of_class("b", "p100", gpu_mem=1000),
        container("c", gpu_mem=1000),
    ]
    assert full(state, *containers, of_class("d", "k80", gpu_mem=1000)) == "k80", (
        "the third share may be of another card"
    )


def test_a_whole_card_asks_what_pods_get_of_it():
    state = with_cards(State(clock=FakeClock(), headroom=100), n1=1)
    with state.view():
        pass
    state.set_quota(*as_quota({"memoryMiB": P100 - 100}))
    assert full(state, container("a", gpu_count=1)) is None
    state.set_quota(*as_quota({"memoryMiB": P100 - 101}))
    assert full(state, container("a", gpu_count=1)) == ""


def test_deleting_an_unknown_quota_requeues_no_pod(clock):
    state = with_cards(make_state(clock), n1=1)
    state.set_quota(*as_quota({"shares": 9}))
    refuse(state)
    clock.advance(5)
    state.next_requeue_node()
    clock.advance(5)
    state.remove_quota("default/unreadable")
    assert state.next_requeue_node() is None
    state.remove_quota("default/team")
    assert state.next_requeue_node() == "n1"


@pytest.mark.parametrize("lie", [False, True])
def test_a_node_does_not_free_quota_by_a_report_of_another_nodes_card(lie):
    """A new leader has never seen the true object of the card: it is away, or the liar's is in its place."""
    state = with_cards(make_state(), n1=2)
    state.remove_card("gpu-n1-0")
    state.set_node("evil")
    if lie:
        card = extended_resource(0, mem=1, model="Lie")
        card["spec"]["node"] = "evil"
        state.set_card(*as_card(card))
    state.set_quota(*as_quota({"class": "nvidia.p100", "memoryMiB": P100 // 2}))
    state.set_pod(as_pod(bound("a", P100 // 2, 0)))
    assert isinstance(refusal := plan(state, "b", 100), Unplaceable)
    assert refusal.refusals == {"n1": Refusal.QUOTA}
    state.remove_card("gpu-n1-0")
    state.set_card(*as_card(extended_resource(0)))
    assert isinstance(plan(state, "b", 100), Unplaceable), "also when the true object is back"
