"""The serving process as its parent and the kubelet see it."""

import pytest

from cardwise.runtime.http.health import Shown
from cardwise.runtime.settings import HostPort
from extender.cache import statelock
from extender.process import ExtenderSettings, Process
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def made(clock):
    settings = ExtenderSettings(
        policy="binpack", one_best_node=True, headroom=0, max_clients=None, core_overcommit=100, bind_deadline=4.0,
        hold_seconds=30.0, nominate_ahead="never", nominate_above_nodes=1000, gang_seconds=30.0,
        gang_seconds_limit=300.0, gang_reserve_seconds=60.0, gang_reserve_refusals=20, gang_reserve_limit_seconds=600.0,
        gang_rollback_seconds=120.0, preempt_fragmented=False, ghost_seconds=30.0,
        lease_namespace="ns", lease_name="l", lease_duration=5.0, no_lease=True,
    )  # fmt: skip
    return Process(ApiServer(clock).client(), settings, Shown(bind=HostPort("127.0.0.1", 0)), None, 0, clock=clock)


def test_a_turn_at_the_state_that_does_not_end_is_a_hung_process(made, clock):
    made.alive()
    with made._extender._state.view():
        for _ in range(10):
            clock.advance(statelock.STUCK / 10)
            assert made.alive()
        clock.advance(1)
        assert not made.alive()
        assert made._stuck() == ["a thread has had the state for 11 s"]
    assert made.alive()


def test_a_process_that_stood_still_as_a_whole_in_a_turn_gets_its_time_anew(made, clock):
    made.alive()
    with made._extender._state.view():
        clock.advance(60)
        for _ in range(10):
            assert made.alive()
            clock.advance(1)
        assert made.alive()
        clock.advance(1)
        assert not made.alive()
