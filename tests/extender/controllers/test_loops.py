"""The loops: a failed step is retried at the next pass, and a slow step does not delay others."""

import threading

import pytest
from prometheus_client import REGISTRY

from cardwise.core.api import names
from cardwise.kube import paths
from extender.controllers.loops import Loops
from tests.build import extended_resource
from tests.extender.states import as_card, make_state, refuse, with_cards
from tests.fakes.apiserver import ApiServer, Fault

N1 = paths.nodes("n1")


@pytest.fixture
def api(clock):
    server = ApiServer(clock)
    server.write_object(paths.nodes(), {"metadata": {"name": "n1"}})
    return server


@pytest.fixture
def state(clock):
    """A state with one card, and a pod that was refused."""
    state = with_cards(make_state(clock), n1=1)
    state.next_requeue_node()
    refuse(state)
    return state


def heals(state):
    state.set_card(*as_card(extended_resource(0, health="Unhealthy")))
    state.set_card(*as_card(extended_resource(0)))


def one_round(loops):
    loops.step()
    loops.requeue_pods()


def test_pending_pods_are_requeued_when_a_card_is_uncordoned(api, clock):
    state = with_cards(make_state(clock), n1=1)
    state.set_card(*as_card(extended_resource(0, unschedulable=True)))
    state.next_requeue_node()
    refuse(state)
    loops = Loops(api.client(), state, clock=clock)
    one_round(loops)
    assert api.requests == []
    state.set_card(*as_card(extended_resource(0)))
    one_round(loops)
    assert [call.path for call in api.requests] == [N1]


def test_a_touch_that_failed_is_tried_again(api, state, clock):
    heals(state)
    api.fault(Fault(refused=True))
    api.fault(Fault(status=500))
    loops = Loops(api.client(), state, clock=clock)
    for _ in range(10):
        one_round(loops)
        clock.advance(0.5)
    assert [call.path for call in api.requests] == [N1] * 3
    assert names.REQUEUE in api.get(N1)["metadata"]["annotations"]


def test_a_long_pause_that_one_answer_asks_for_does_not_stop_all_wake_ups(api, state, clock):
    heals(state)
    api.fault(Fault(status=429, retry_after=3600))
    loops = Loops(api.client(), state, clock=clock)
    for _ in range(14):
        one_round(loops)
        clock.advance(0.5)
    assert [call.path for call in api.requests] == [N1] * 2


def full(api, name):
    """A node whose annotations are at the API's limit: every change of them is refused."""
    api.write_object(paths.nodes(), {"metadata": {"name": name}})
    return api.fault(Fault(status=422, reason="Invalid"), path=paths.nodes(name), times=1_000_000)


def test_nodes_that_cannot_be_changed_do_not_delay_a_wake_up_by_a_round(api, clock):
    """This holds whichever node has capacity, and also if a quota was raised, which concerns no node."""
    for name in ("a", "b"):
        full(api, name)
    state = with_cards(make_state(clock), a=1, b=1, n1=1)
    state.next_requeue_node()
    loops = Loops(api.client(), state, clock=clock)
    for wakes in (lambda queue: queue.requeue_all("a"), lambda queue: queue.requeue_all()):
        with state.queue() as queue:
            queue.mark_refused("pod")
            wakes(queue)
        one_round(loops)
        assert (api.requests[-1].verb, api.requests[-1].path) == ("patch", N1), "in the same round"
        clock.advance(1.0)
    assert [call.path for call in api.requests].count(paths.nodes("a")) == 1, "it is remembered"


def test_a_node_that_cannot_be_changed_is_tried_again_after_minutes(api, clock):
    bad = full(api, "a")
    state = with_cards(make_state(clock), a=1, n1=1)
    state.next_requeue_node()
    loops = Loops(api.client(), state, clock=clock)

    def wake():
        api.requests.clear()
        with state.queue() as queue:
            queue.mark_refused("pod")
            queue.requeue_all("a")
        one_round(loops)
        return [call.path for call in api.requests]

    assert wake() == [paths.nodes("a"), N1]
    clock.advance(299.0)
    assert wake() == [N1]
    bad.end()
    clock.advance(2.0)
    assert wake() == [paths.nodes("a")]


def test_a_node_that_takes_long_to_change_delays_neither_wake_ups_nor_the_end_of_plans(api, clock):
    """As one whose object is large: the write has no answer in time."""
    api.write_object(paths.nodes(), {"metadata": {"name": "a"}})
    api.fault(Fault(seconds=60.0), path=paths.nodes("a"), times=1_000_000)
    state = with_cards(make_state(clock), a=1, n1=1)
    state.next_requeue_node()
    loops = Loops(api.client(), state, clock=clock)
    with state.queue() as queue:
        queue.mark_refused("pod")
        queue.requeue_all("a")
    began = clock.now()
    for _ in range(3):
        one_round(loops)
        clock.advance(0.5)
    assert any(call.path == N1 for call in api.requests), "another node is touched"
    assert clock.now() - began <= 3.0
    began = clock.now()
    loops.step()
    assert clock.now() == began, "what has no answer is waited for by a thread of its own"


def test_while_the_api_server_is_down_nodes_are_tried_one_by_one_and_less_often(api, clock):
    state = with_cards(make_state(clock), **{f"m{i}": 1 for i in range(50)}, n1=1)
    state.next_requeue_node()
    down = api.fault(Fault(refused=True), times=1_000_000)
    loops = Loops(api.client(), state, clock=clock)
    with state.queue() as queue:
        queue.mark_refused("pod")
        queue.requeue_all("n1")
    for _ in range(120):
        one_round(loops)
        clock.advance(0.5)
    assert 20 <= len(api.requests) <= 70, "in a minute"
    down.end()
    api.requests.clear()
    for i in range(50):
        api.write_object(paths.nodes(), {"metadata": {"name": f"m{i}"}})
    for _ in range(5):
        one_round(loops)
        clock.advance(0.5)
    assert [call.verb for call in api.requests] == ["patch"], "the first answer ends it"


def test_a_process_that_stood_still_has_waiting_pods_tried_again(api, clock):
    state = with_cards(make_state(clock), n1=1)
    state.next_requeue_node()
    loops = Loops(api.client(), state, clock=clock)
    one_round(loops)
    clock.advance(0.5)
    one_round(loops)
    assert api.requests == [], "nobody waits that we know of"
    clock.advance(1.1)  # a preempt call of kube-scheduler had no answer in a second
    one_round(loops)
    assert [call.path for call in api.requests] == [N1]
    clock.advance(0.5)
    one_round(loops)
    assert len(api.requests) == 1


def test_a_slow_write_of_statuses_does_not_keep_waiting_pods_from_being_woken(api, state, clock):
    heals(state)
    hanging, go_on = threading.Event(), threading.Event()

    def hang():
        hanging.set()
        go_on.wait(60)

    loops = Loops(api.client(), state, statuses=[hang], clock=clock)
    loops.start()
    try:
        assert hanging.wait(60)
        clock.step(threads=2)
        clock.until_waiting(threads=2)
        assert api.requests, "the other loop goes on"
    finally:
        go_on.set()
        loops.stop()


def test_a_slow_write_of_a_podgroup_keeps_no_status_waiting(api, state, clock):
    hanging, go_on, status_written = threading.Event(), threading.Event(), threading.Semaphore(0)

    def hang():
        hanging.set()
        go_on.wait(60)

    loops = Loops(api.client(), state, statuses=[status_written.release], podgroups=[hang], clock=clock)
    loops.start()
    try:
        assert hanging.wait(60)
        assert status_written.acquire(timeout=60)
        clock.step(threads=3)
        assert status_written.acquire(timeout=60), "the other loop goes on"
    finally:
        go_on.set()
        loops.stop()


def test_a_step_that_fails_is_counted_and_keeps_neither_the_others_nor_the_next_round(api, state, clock):
    rounds = threading.Semaphore(0)

    def fails():
        raise RuntimeError("odd")

    def failures():
        return REGISTRY.get_sample_value("cardwise_extender_thread_failures_total", {"thread": "statuses"}) or 0.0

    before = failures()
    loops = Loops(api.client(), state, statuses=[fails, rounds.release], clock=clock)
    loops.start()
    for _ in range(3):
        assert rounds.acquire(timeout=60)
        clock.until_waiting(threads=3)
        clock.advance(5.0)
    loops.stop()
    assert failures() >= before + 3
