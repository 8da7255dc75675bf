"""Elections while the API server hangs, loses responses or sends unreadable ones, and with failing callbacks."""

import threading

import pytest

from tests.fakes.apiserver import Fault
from tests.kube.leases.leases import DURATION, EVERY, MARGIN, World, leading


def test_leadership_ends_while_the_api_server_hangs(world: World):
    changes: list[bool] = []
    a = leading(world, on_change=changes.append)
    epoch = a.epoch
    seen: list[tuple[bool, float]] = []

    def hangs() -> None:
        for _ in range(40):
            world.now += 0.5
            seen.append((a.is_leader, a.remaining_seconds()))
        raise TimeoutError("timed out")

    world.api.before_request(lambda _: hangs())
    world.now += 1
    a.step()
    assert seen[0][0]
    assert seen[-1] == (False, 0.0)
    assert sum(leads for leads, _ in seen) * 0.5 <= DURATION - MARGIN
    assert changes == [True, False]
    # Nobody took it. The process leads again, in a new epoch: callers of the old epoch must read again.
    world.run(a, seconds=3)
    assert changes == [True, False, True]
    assert a.epoch == epoch + 1
    assert a.holds_lease(0, a.epoch)
    assert not a.holds_lease(0, epoch)


def test_a_renewal_whose_answer_was_lost_is_recognised(world: World):
    a = leading(world)
    unheard = world.unheard("update")
    world.now += 2
    a.step()
    assert world.spec["renewTime"]
    before = a.remaining_seconds()
    unheard.end()
    a.step()  # reads
    assert a.remaining_seconds() == before
    a.step()  # writes
    assert a.remaining_seconds() == DURATION - MARGIN
    assert a.epoch == 1


def test_a_takeover_whose_answer_was_lost_is_recognised(world: World):
    unheard = world.unheard("update")
    a = world.elector("a")
    a.step()
    a.step()
    assert world.spec["holderIdentity"] == "a"
    assert not a.is_leader
    unheard.end()
    world.run(a, seconds=1)
    assert a.is_leader
    assert world.spec["leaseTransitions"] == 5


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {},
        "text",
        {"holderIdentity": None},
        {"holderIdentity": 7, "leaseDurationSeconds": "long", "renewTime": 3, "leaseTransitions": -2},
        {"holderIdentity": "somebody", "leaseDurationSeconds": 0, "renewTime": "yesterday"},
    ],
)
def test_unreadable_lease_counts_as_held(world: World, spec: object):
    world.put_lease(spec)
    a = world.elector("a")
    world.run(a, seconds=DURATION - 0.25)
    assert not a.is_leader
    world.run(a, seconds=1)
    assert a.is_leader
    assert world.spec["leaseTransitions"] == 1


def test_invalid_response_is_an_error_and_not_a_free_lease(world: World):
    world.api.fault(Fault(status=200, body=b'{"metadata": {}, "kind": "Ingress page"}'), times=5)
    a = world.elector("a")
    for _ in range(5):
        world.now += 20
        a.step()
    assert world.calls == ["get"] * 5
    assert not a.is_leader


def test_creation_with_a_lost_response_is_waited_for(world: World):
    a = leading(world)
    world.remove()
    b = world.elector("b")
    b.step()
    unheard = world.unheard()
    b.step()
    assert world.spec["holderIdentity"] == "b"
    unheard.end()
    assert world.wait_until_leads(b, a, step=0.5) >= DURATION


def test_standby_polls_slowly_and_errors_are_retried_soon(world: World):
    leading(world)
    b = world.elector("b")
    assert b.step() == EVERY / 2
    world.unreachable()
    delays = [b.step() for _ in range(12)]
    assert delays[0] < 0.2
    assert max(delays) <= EVERY
    assert min(delays[-3:]) > 0.5


def test_failing_on_change_does_not_lose_the_lease(world: World):
    def fails(leads: bool) -> None:
        raise RuntimeError("theirs")

    a = leading(world, on_change=fails)
    world.run(a, seconds=30)
    assert a.is_leader


def test_thread_survives_unexpected_exceptions(world: World):
    changed = threading.Event()
    failures = iter([RuntimeError("the credentials plugin"), OSError("too")])

    def fails() -> None:
        for error in failures:
            raise error

    world.api.before_request(lambda _: fails(), times=3)
    a = world.elector("a", on_change=lambda leads: changed.set())
    a.start()
    try:
        while not changed.is_set():
            world.clock.step()
        assert a.is_leader
    finally:
        a.stop()
    assert world.spec["holderIdentity"] == ""
