"""The serving process as its parent and the kubelet see it, and when the extender publishes its settings."""

from dataclasses import replace

import pytest

from cardwise.runtime.http.health import HealthSettings
from cardwise.runtime.settings import HostPort
from extender.cache import statelock
from extender.process import Extender, ExtenderSettings, Process
from tests.extender.statuscluster import CARDS, er_object
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

SETTINGS = ExtenderSettings(
    policy="binpack", one_best_node=True, headroom=0, max_clients=None, core_overcommit=100, bind_deadline=4.0,
    max_gang_permit_seconds=300.0, gang_reserve_seconds=60.0,
    namespace="ns", lease_duration=5.0, no_lease=True,
)  # fmt: skip


@pytest.fixture
def extender_process(clock):
    return Process(
        ApiServer(clock).client(), SETTINGS, HealthSettings(bind=HostPort("127.0.0.1", 0)), None, 0, clock=clock
    )


def test_a_turn_at_the_state_that_does_not_end_is_a_hung_process(extender_process, clock):
    extender_process.is_alive()
    with extender_process._extender._state.view():
        for _ in range(10):
            clock.advance(statelock.STUCK_SECONDS / 10)
            assert extender_process.is_alive()
        clock.advance(1)
        assert not extender_process.is_alive()
        assert extender_process._lock_problems() == ["a thread has held the state for 11 s"]
    assert extender_process.is_alive()


def test_a_process_that_stood_still_as_a_whole_in_a_turn_gets_its_time_anew(extender_process, clock):
    extender_process.is_alive()
    with extender_process._extender._state.view():
        clock.advance(60)
        for _ in range(10):
            assert extender_process.is_alive()
            clock.advance(1)
        assert extender_process.is_alive()
        clock.advance(1)
        assert not extender_process.is_alive()


class Telling:
    """An extender whose threads are not started, of a cluster with one card."""

    def __init__(self, *, knows: bool = True, leads: bool = True) -> None:
        clock = FakeClock()
        self.api = ApiServer(clock)
        self.api.write_object(CARDS, er_object("GPU-1", "n1"))
        self.extender = Extender(self.api.client(), replace(SETTINGS, no_lease=leads), clock=clock)
        for reflector in self.extender._informers._reflectors if knows else ():
            reflector._relist()

    def write_verbs(self) -> set[str]:
        """The writes of one pass of the publishing controllers."""
        for loop in self.extender._loops._loops:
            if loop._name in ("statuses", "podgroups"):
                loop.run_once()
        return {call.verb for call in self.api.sent()} - {"list"}


def test_the_leader_that_knows_all_makes_classes_and_writes_statuses():
    assert Telling().write_verbs() == {"create", "patch"}


@pytest.mark.parametrize("lacking", ["knows", "leads"])
def test_a_follower_or_unsynced_extender_publishes_nothing(lacking):
    assert Telling(**{lacking: False}).write_verbs() == set()


def test_before_all_is_known_nothing_is_counted():
    telling = Telling(knows=False)
    state = telling.extender._state
    state.set_node("n1")
    telling.write_verbs()
    assert state.take_changed_nodes() == {"n1"}
