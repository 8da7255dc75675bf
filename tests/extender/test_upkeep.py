"""The loops: what fails once is done at the next round, and what is slow keeps nothing else from being done."""

import threading

from cardwise.core import names
from cardwise.kube import errors
from extender.upkeep import Loop, Upkeep
from tests.extender.worlds import as_card, refuse, resource, state, with_cards
from tests.fakes.clock import FakeClock


class FakeApi:
    def __init__(self, *answers):
        self.answers = list(answers)
        self.touched = []

    def patch(self, path, patch, kind, *, timeout):
        self.touched.append((path, patch))
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer


def test_who_waits_is_tried_again_when_a_card_is_uncordoned():
    made = with_cards(state(), n1=1)
    made.set_card(*as_card(resource(0, cordoned=True)))
    made.waiters.touch_due()
    refuse(made)
    api = FakeApi()
    upkeep = Upkeep(api, made)
    upkeep.step()
    assert api.touched == []
    made.set_card(*as_card(resource(0)))
    upkeep.step()
    assert [path for path, _ in api.touched] == ["/api/v1/nodes/n1"]


def test_a_touch_that_failed_is_tried_again():
    clock = FakeClock()
    made = with_cards(state(clock), n1=1)
    made.waiters.touch_due()
    refuse(made)
    made.set_card(*as_card(resource(0, health="Unhealthy")))
    made.set_card(*as_card(resource(0)))
    api = FakeApi(errors.Unreachable("timed out"), errors.ServerError(500, "InternalError", ""))
    upkeep = Upkeep(api, made, clock=clock)
    for _ in range(4):
        upkeep.step()
        clock.advance(1.5)
    assert [path for path, _ in api.touched] == ["/api/v1/nodes/n1"] * 3
    assert names.NODE_CHANGED in api.touched[-1][1]["metadata"]["annotations"]


def test_a_process_that_stood_still_has_waiting_pods_tried_again():
    made = with_cards(state(), n1=1)
    made.waiters.touch_due()
    api, clock = FakeApi(), FakeClock()
    upkeep = Upkeep(api, made, clock=clock)
    upkeep.step()
    clock.advance(0.5)
    upkeep.step()
    assert api.touched == [], "nobody waits that we know of"
    clock.advance(8.0)
    upkeep.step()
    assert [path for path, _ in api.touched] == ["/api/v1/nodes/n1"]
    clock.advance(0.5)
    upkeep.step()
    assert len(api.touched) == 1


def test_a_slow_write_of_statuses_does_not_keep_waiting_pods_from_being_woken():
    made = with_cards(state(), n1=1)
    made.waiters.touch_due()
    refuse(made)
    made.set_card(*as_card(resource(0, health="Unhealthy")))
    made.set_card(*as_card(resource(0)))
    api, hanging, go_on = FakeApi(), threading.Event(), threading.Event()

    def hang():
        hanging.set()
        go_on.wait(60)

    clock = FakeClock()
    upkeep = Upkeep(api, made, tell=[hang], clock=clock)
    upkeep.start()
    try:
        clock.step(threads=2)
        assert hanging.wait(60)
        clock.step()
        clock.until_waiting()
        assert api.touched, "the other loop goes on"
    finally:
        go_on.set()
        upkeep.stop()


def test_a_step_that_fails_keeps_neither_the_others_nor_the_next_round():
    rounds = []

    def fails():
        raise RuntimeError("odd")

    clock = FakeClock()
    loop = Loop("test", 0.01, [fails, lambda: rounds.append(1)], clock)
    loop.start()
    clock.step()
    clock.step()
    clock.until_waiting()
    assert len(rounds) == 2
    loop.stop()
    loop.join(60)
    assert len(rounds) == 2
