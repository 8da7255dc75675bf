"""Each rule of the election alone."""

import math
import re
from datetime import datetime, timedelta

import pytest

from cardwise.kube.leases.election import Election
from cardwise.kube.leases.lease import LeaderElector, new_identity
from tests.fakes.apiserver import Fault
from tests.fakes.clock import FakeClock
from tests.kube.leases.leases import DURATION, EVERY, MARGIN, NOON, PATH, World, leading


def test_a_released_lease_is_taken_at_once_and_kept(world: World):
    a = leading(world)
    assert world.calls == ["get", "update"]
    assert (world.spec["holderIdentity"], world.spec["leaseDurationSeconds"]) == ("a", 15)
    assert world.spec["leaseTransitions"] == 5
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", world.spec["renewTime"])
    assert world.spec["acquireTime"] == world.spec["renewTime"]
    assert world.lease["metadata"]["labels"] == {"kept": "yes"}
    acquired = world.spec
    world.run(a, seconds=100)
    assert a.is_leader
    assert a.epoch == 1
    assert world.spec["acquireTime"] == acquired["acquireTime"]
    assert world.spec["renewTime"] > acquired["renewTime"]
    assert world.spec["leaseTransitions"] == 5


def test_validity_counts_from_before_the_request_was_sent(world: World):
    world.after_requests(lambda: world.clock.advance(4))
    a = world.elector("a")
    a.step()
    sent = world.now
    a.step()
    assert world.now == sent + 4
    assert a.remaining_seconds() == pytest.approx(sent + DURATION - MARGIN - world.now)
    assert a.holds_lease(9.4)
    assert not a.holds_lease(9.6)


def test_candidate_waits_from_the_last_observed_change(world: World):
    a = leading(world)
    world.put_lease(world.spec | dict.fromkeys(("renewTime", "acquireTime"), "1999-01-01T00:00:00.000000Z"))
    b = world.elector("b")
    b.step()
    seen = world.now
    world.run(b, seconds=14)
    assert world.spec["holderIdentity"] == "a"
    world.run(b, seconds=3)
    assert b.is_leader
    assert world.now - seen >= DURATION
    assert not a.is_leader
    assert (world.spec["leaseTransitions"], b.epoch) == (6, 1)


def test_wait_starts_when_the_response_arrives(world: World):
    a, b = leading(world), world.elector("b")

    def held_up() -> None:
        world.now += 5
        a.step()

    world.api.before_request(lambda _: held_up())
    b.step()
    assert world.wait_until_leads(b, a) >= DURATION


def test_a_longer_duration_of_the_holder_is_respected(world: World):
    leading(world, duration=60.0)
    b = world.elector("b")
    world.run(b, seconds=59)
    assert not b.is_leader
    world.run(b, seconds=3)
    assert b.is_leader


def test_wait_is_limited_by_the_maximum_duration(world: World):
    """A user wrote a duration of one hour, and no process renews the Lease."""
    world.put_lease({"holderIdentity": "a", "leaseDurationSeconds": 3600, "leaseTransitions": 4})
    b = world.elector("b")
    world.run(b, seconds=59)
    assert not b.is_leader, "a correct holder may have had it for as long"
    world.run(b, seconds=3)
    assert b.is_leader


def test_holder_uses_its_own_duration(world: World):
    """Otherwise candidates that wait for the longest allowed duration would acquire it too early."""
    a = leading(world)
    world.put_lease(world.spec | {"leaseDurationSeconds": 3600}, **world.lease["metadata"])
    a.step()
    world.now += DURATION
    assert not a.is_leader


def test_each_change_of_the_holder_restarts_the_wait(world: World):
    a, b = leading(world), world.elector("b")
    for _ in range(10):
        world.run(b, seconds=10)
        a.step()
    assert world.spec["holderIdentity"] == "a"


def test_loser_of_a_conflict_rereads_and_waits(world: World):
    a, b = world.elector("a"), world.elector("b")
    a.step()
    world.run(b, seconds=1)
    before = len(world.calls)
    a.step()
    assert world.calls[before:] == ["update"]
    world.now += 1
    a.step()
    assert world.calls[before:] == ["update", "get"]
    assert (a.is_leader, b.is_leader) == (False, True)


def test_overtaken_leader_learns_it_from_the_next_response(world: World):
    changes: list[bool] = []
    a = leading(world, on_change=changes.append)
    world.put_lease(world.spec | {"holderIdentity": "b"})
    world.run(a, seconds=4)
    assert not a.is_leader
    assert changes == [True, False]
    assert world.spec["holderIdentity"] == "b"


def test_missing_lease_is_created_and_held_after_a_wait(world: World):
    a = leading(world)
    until = world.now + a.remaining_seconds()
    world.remove()
    b = world.elector("b")
    b.step()
    b.step()
    assert world.spec["holderIdentity"] == "b"
    assert world.spec["leaseTransitions"] == 0
    assert world.lease["metadata"]["namespace"] == "ns"
    created = world.now
    while world.now < until:
        assert a.is_leader  # the holder has not noticed
        assert not b.is_leader
        world.now += 0.5
        b.step()
    world.run(b, seconds=5)
    assert b.is_leader
    assert world.now - created >= DURATION
    assert not a.is_leader


def test_wait_after_creation_starts_at_the_response(world: World):
    """The former holder may have renewed the deleted Lease while the creation was under way."""
    world.remove()
    a = world.elector("a")
    a.step()
    world.after_requests(lambda: world.clock.advance(4))
    a.step()
    created = world.now
    while not a.is_leader:
        world.clock.advance(a.step())
    assert world.now - created >= DURATION


def test_another_process_created_the_lease_first(world: World):
    world.remove()
    a = world.elector("a")
    a.step()
    world.put_lease({"holderIdentity": "b", "leaseDurationSeconds": 15})
    world.run(a, seconds=10)
    assert not a.is_leader
    assert world.spec["holderIdentity"] == "b"
    world.run(a, seconds=10)
    assert a.is_leader


def test_earlier_process_with_the_same_identity_is_waited_for(world: World):
    a = leading(world)
    held = world.spec
    again = world.elector("a")
    again.step()
    assert world.wait_until_leads(again, a) >= DURATION
    # As in Kubernetes, the same holder continues.
    assert (world.spec["acquireTime"], world.spec["leaseTransitions"]) == (held["acquireTime"], 5)


def test_renew_times_increase_even_if_the_clock_does_not(world: World):
    a, b = (Election("ns", "l", name, duration=DURATION, margin=MARGIN, renew_every=EVERY) for name in "ab")
    times = [NOON - timedelta(seconds=7 * (count // 5)) for count in range(15)]

    def exchange(election: Election, wall: datetime) -> None:
        call = election.next_call(world.now, wall)
        election.on_response(call, world.carry_out(call), world.now, world.clock.wall())

    exchange(a, times[0])
    for wall in times:
        exchange(a, wall)
        exchange(b, wall)
        world.now += 5
        assert a.period.is_valid(world.now)
        assert not b.period.is_valid(world.now)
    assert world.spec["holderIdentity"] == "a"


@pytest.mark.parametrize("seen", ["", "released", "led"])
def test_restored_release_is_waited_for(world: World, seen: str):
    """For a candidate that has just started, one that observed the release, and one that observed a later holder."""
    first = leading(world)
    b = world.elector("b")
    if seen == "released":
        b.step()
    first.release()
    backup = world.lease
    if seen == "released":
        b.step()
    a = leading(world, "c")
    world.run(a, seconds=2 if seen == "led" else DURATION)
    if seen == "led":
        b.step()
    world.put_lease(spec=backup["spec"], annotations=backup["metadata"].get("annotations", {}))
    assert world.wait_until_leads(b, a) >= DURATION
    assert not b.is_successor


@pytest.mark.parametrize("sleeper", ["leader", "standby"])
def test_version_restored_while_a_candidate_was_paused_is_waited_for(world: World, sleeper: str):
    """Another process holds the Lease meanwhile, until it observes the restore of etcd."""
    a, b = leading(world), world.elector("b")
    b.step()
    frozen = a if sleeper == "leader" else b
    backup, tenure = world.lease, frozen.tenure
    c = world.elector("c")
    world.run(c, seconds=3 * DURATION + 1)
    assert c.is_leader
    world.api.restore(PATH, backup)
    restored = world.now
    while not frozen.is_leader:
        frozen.step()
        assert not (frozen.is_leader and c.is_leader)
        world.now += 0.25
    assert world.now - restored >= DURATION
    assert frozen.tenure > tenure


def test_long_silence_starts_a_new_tenure(world: World):
    """Another process may have held the Lease, and a restore of etcd may have hidden that."""
    a = leading(world)
    tenure = a.tenure
    for seconds, bumps in ((2 * DURATION, 0), (3 * DURATION + 1, 1)):
        outage = world.unreachable()
        world.run(a, seconds=seconds)
        outage.end()
        world.run(a, seconds=DURATION + 3)
        assert a.is_leader
        assert a.tenure == tenure + bumps
    locked = world.api.fault(Fault(status=500), "update", times=math.inf)
    world.run(a, seconds=4 * DURATION)
    assert not a.is_leader
    locked.end()
    world.run(a, seconds=3)
    assert a.is_leader
    assert a.tenure == tenure + 1, "it has read the Lease all the while"


def test_lease_with_a_removed_holder_is_waited_for(world: World):
    a, b = leading(world), world.elector("b")
    b.step()
    world.put_lease(world.spec | {"holderIdentity": ""})
    world.wait_until_leads(b, a)


@pytest.mark.parametrize("days", [-1, 1])
def test_age_of_a_release_is_measured_by_the_api_servers_clock(world: World, days: int):
    """The Lease changes its holder without a pause even if the machine's clock is wrong by a day."""
    wrong = FakeClock(wall=world.clock.wall() + timedelta(days=days))
    electors = [LeaderElector(world.api.client(clock=wrong), "ns", "l", name, clock=wrong) for name in "ab"]
    for elector in electors * 2:
        elector.step()
    a, b = electors
    assert a.is_leader
    a.release()
    b.step()
    b.step()
    assert b.is_leader


def test_a_release_with_a_time_that_cannot_be_read_is_waited_for(world: World):
    for stamp in (None, "yesterday", "2026-01-01T00:00:00"):
        world.put_lease({"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": stamp})
        a = world.elector("a")
        world.run(a, seconds=DURATION - 0.25)
        assert not a.is_leader


def test_settings_that_cannot_work_are_refused(world: World):
    for wrong in ({"renew_every": 14.0}, {"margin": -1.0}, {"renew_every": 0.0}, {"margin": 13.5}):
        with pytest.raises(ValueError, match="renew_every"):
            world.elector("a", **wrong)
    with pytest.raises(ValueError, match="identity"):
        world.elector("")
    with pytest.raises(ValueError, match="at most 60"):
        world.elector("a", duration=60.1)


def test_identities_are_unique():
    assert len({new_identity() for _ in range(100)}) == 100
