"""The loops: what fails once is done at the next round, and what is slow keeps nothing else from being done."""

import threading

import pytest
from prometheus_client import REGISTRY

from cardwise.core.api import names
from cardwise.kube import paths
from extender.controllers.loops import Loops
from tests.extender.worlds import as_card, refuse, resource, state, with_cards
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock

N1 = paths.nodes("n1")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def api(clock):
    made = ApiServer(clock)
    made.put(paths.nodes(), {"metadata": {"name": "n1"}})
    return made


@pytest.fixture
def made(clock):
    """A state of one card, for which somebody was refused."""
    found = with_cards(state(clock), n1=1)
    found.touch_due()
    refuse(found)
    return found


def heals(made):
    made.set_card(*as_card(resource(0, health="Unhealthy")))
    made.set_card(*as_card(resource(0)))


def test_who_waits_is_tried_again_when_a_card_is_uncordoned(api, clock):
    made = with_cards(state(clock), n1=1)
    made.set_card(*as_card(resource(0, cordoned=True)))
    made.touch_due()
    refuse(made)
    loops = Loops(api.client(), made, clock=clock)
    loops.step()
    assert api.requests == []
    made.set_card(*as_card(resource(0)))
    loops.step()
    assert [call.path for call in api.requests] == [N1]


def test_a_touch_that_failed_is_tried_again(api, made, clock):
    heals(made)
    api.fault(Fault(refused=True))
    api.fault(Fault(status=500))
    loops = Loops(api.client(), made, clock=clock)
    for _ in range(10):
        loops.step()
        clock.advance(0.5)
    assert [call.path for call in api.requests] == [N1] * 3
    assert names.NODE_CHANGED in api.get(N1)["metadata"]["annotations"]


def test_a_process_that_stood_still_has_waiting_pods_tried_again(api, clock):
    made = with_cards(state(clock), n1=1)
    made.touch_due()
    loops = Loops(api.client(), made, clock=clock)
    loops.step()
    clock.advance(0.5)
    loops.step()
    assert api.requests == [], "nobody waits that we know of"
    clock.advance(1.1)  # a preempt call of kube-scheduler had no answer in a second
    loops.step()
    assert [call.path for call in api.requests] == [N1]
    clock.advance(0.5)
    loops.step()
    assert len(api.requests) == 1


def test_a_slow_write_of_statuses_does_not_keep_waiting_pods_from_being_woken(api, made, clock):
    heals(made)
    hanging, go_on = threading.Event(), threading.Event()

    def hang():
        hanging.set()
        go_on.wait(60)

    loops = Loops(api.client(), made, statuses=[hang], clock=clock)
    loops.start()
    try:
        assert hanging.wait(60)
        clock.step()
        clock.until_waiting()
        assert api.requests, "the other loop goes on"
    finally:
        go_on.set()
        loops.stop()


def test_a_slow_write_of_a_podgroup_keeps_no_status_waiting(api, made, clock):
    hanging, go_on, told = threading.Event(), threading.Event(), threading.Semaphore(0)

    def hang():
        hanging.set()
        go_on.wait(60)

    loops = Loops(api.client(), made, statuses=[told.release], podgroups=[hang], clock=clock)
    loops.start()
    try:
        assert hanging.wait(60)
        assert told.acquire(timeout=60)
        clock.step(threads=2)
        assert told.acquire(timeout=60), "the other loop goes on"
    finally:
        go_on.set()
        loops.stop()


def test_a_step_that_fails_is_counted_and_keeps_neither_the_others_nor_the_next_round(api, made, clock):
    rounds = threading.Semaphore(0)

    def fails():
        raise RuntimeError("odd")

    def failures():
        return REGISTRY.get_sample_value("cardwise_extender_thread_failures_total", {"thread": "statuses"}) or 0.0

    before = failures()
    loops = Loops(api.client(), made, statuses=[fails, rounds.release], clock=clock)
    loops.start()
    for _ in range(3):
        assert rounds.acquire(timeout=60)
        clock.until_waiting(threads=2)
        clock.advance(5.0)
    loops.stop()
    assert failures() >= before + 3
