"""Who may act: each rule of the election alone, and all of them against every order of events."""

import copy
import itertools
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardwise.kube import errors
from cardwise.kube.election import Call, Election
from cardwise.kube.lease import LeaderElector, identity

DURATION, MARGIN, EVERY = 15.0, 1.5, 2.0
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PATH = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


class Leases:
    """The API server's one Lease: versions that only grow, compare and swap, no write without a version."""

    def __init__(self) -> None:
        self.version = 100
        self.lease: dict | None = None

    def get(self, path: str = f"{PATH}/l", *, timeout: float = 0) -> dict:
        assert path == f"{PATH}/l"
        if self.lease is None:
            raise errors.NotFound(404, "NotFound")
        return copy.deepcopy(self.lease)

    def create(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        assert path == PATH
        if self.lease is not None:
            raise errors.AlreadyExists(409, "AlreadyExists")
        return self.put(body)

    def update(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        assert path == f"{PATH}/l"
        if self.lease is None:
            raise errors.NotFound(404, "NotFound")
        version = body["metadata"]["resourceVersion"]  # a KeyError is a test that failed
        if version != self.lease["metadata"]["resourceVersion"]:
            raise errors.Conflict(409, "Conflict")
        if body["spec"] == self.lease.get("spec"):
            return copy.deepcopy(self.lease)  # nothing changed: no new version
        return self.put(body)

    def put(self, body: dict) -> dict:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def carry_out(self, call: Call) -> dict:
        if call.kind == "get":
            return self.get()
        if call.kind == "create":
            return self.create(PATH, call.body)
        return self.update(f"{PATH}/l", call.body)


class World(Leases):
    """With a clock, and hooks that run before and after a request is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda verb: None
        self.after: Callable[[str], None] = lambda verb: None

    def clock(self) -> float:
        return self.now

    def get(self, path: str = f"{PATH}/l", *, timeout: float = 0) -> dict:
        return self._hooked("get", lambda: super(World, self).get(path))

    def create(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        return self._hooked("create", lambda: super(World, self).create(path, body))

    def update(self, path: str, body: dict, *, timeout: float = 0) -> dict:
        return self._hooked("update", lambda: super(World, self).update(path, body))

    def _hooked(self, verb: str, work: Callable[[], dict]) -> dict:
        self.calls.append(verb)
        self.before(verb)
        answer = work()
        self.after(verb)
        return answer

    def elector(self, name: str, **settings: object) -> LeaderElector:
        return LeaderElector(self, "ns", "l", name, clock=self.clock, **settings)  # type: ignore[arg-type]

    def run(self, *electors: LeaderElector, seconds: float, step: float = 0.25) -> None:
        """Lets each of them act when it is due."""
        due = dict.fromkeys(electors, self.now)
        until = self.now + seconds
        while self.now <= until:
            for each in electors:
                if due[each] <= self.now:
                    due[each] = self.now + each.step()
            assert sum(each.leader for each in electors) <= 1
            self.now += step

    def released(self, transitions: int = 4) -> None:
        self.put(
            {
                "metadata": {"name": "l", "labels": {"kept": "yes"}},
                "spec": {"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": transitions},
            }
        )

    @property
    def spec(self) -> dict:
        return self.lease["spec"]


@pytest.fixture
def world() -> World:
    made = World()
    made.released()
    return made


def unreachable(verb: str) -> None:
    raise errors.Unreachable("cut")


def nothing(verb: str) -> None: ...


def leading(world: World, name: str = "a", **settings: object) -> LeaderElector:
    elector = world.elector(name, **settings)
    world.run(elector, seconds=1)
    assert elector.leader
    return elector


def test_a_released_lease_is_taken_at_once_and_kept(world: World):
    a = leading(world)
    assert world.calls == ["get", "update"]
    assert (world.spec["holderIdentity"], world.spec["leaseDurationSeconds"]) == ("a", 15)
    assert world.spec["leaseTransitions"] == 5
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", world.spec["renewTime"])
    assert world.spec["acquireTime"] == world.spec["renewTime"]
    assert world.lease["metadata"]["labels"] == {"kept": "yes"}
    taken = world.spec
    world.run(a, seconds=100)
    assert a.leader
    assert a.epoch == 1
    assert world.spec["acquireTime"] == taken["acquireTime"]
    assert world.spec["renewTime"] > taken["renewTime"]
    assert world.spec["leaseTransitions"] == 5


def test_validity_counts_from_before_the_request_was_sent(world: World):
    def slow(verb: str) -> None:
        world.now += 4

    world.after = slow
    a = world.elector("a")
    a.step()
    sent = world.now
    a.step()
    assert world.now == sent + 4
    assert a.remaining() == pytest.approx(sent + DURATION - MARGIN - world.now)
    assert a.holds(9.4)
    assert not a.holds(9.6)


def test_another_is_waited_for_from_its_last_change_whatever_its_times_say(world: World):
    a = leading(world)
    world.spec.update(renewTime="1999-01-01T00:00:00.000000Z", acquireTime="1999-01-01T00:00:00.000000Z")
    b = world.elector("b")
    b.step()
    seen = world.now
    world.run(b, seconds=14)
    assert world.spec["holderIdentity"] == "a"
    world.run(b, seconds=3)
    assert b.leader
    assert world.now - seen >= DURATION
    assert not a.leader
    assert (world.spec["leaseTransitions"], b.epoch) == (6, 1)


def test_the_wait_counts_from_after_the_news_came(world: World):
    a, b = leading(world), world.elector("b")

    def held_up(verb: str) -> None:
        world.before = nothing
        world.now += 5
        a.step()

    world.before = held_up
    b.step()
    came = world.now
    while not b.leader:
        world.now += 0.25
        b.step()
        assert not (a.leader and b.leader)
    assert world.now - came >= DURATION


def test_a_longer_duration_of_the_holder_is_respected(world: World):
    leading(world, duration=60.0)
    b = world.elector("b")
    world.run(b, seconds=59)
    assert not b.leader
    world.run(b, seconds=3)
    assert b.leader


def test_each_change_of_the_holder_starts_the_wait_anew(world: World):
    a, b = leading(world), world.elector("b")
    for _ in range(10):
        world.run(b, seconds=10)
        a.step()
    assert world.spec["holderIdentity"] == "a"


def test_a_conflict_is_read_again_and_the_loser_stands_by(world: World):
    a, b = world.elector("a"), world.elector("b")
    a.step()
    world.run(b, seconds=1)
    world.calls.clear()
    a.step()
    assert world.calls == ["update"]
    world.now += 1
    a.step()
    assert world.calls == ["update", "get"]
    assert (a.leader, b.leader) == (False, True)


def test_leadership_ends_while_the_api_server_hangs(world: World):
    told: list[bool] = []
    a = leading(world, on_change=told.append)
    epoch = a.epoch
    seen: list[tuple[bool, float]] = []

    def hangs(verb: str) -> None:
        for _ in range(40):
            world.now += 0.5
            seen.append((a.leader, a.remaining()))
        raise errors.Unreachable("timed out")

    world.before = hangs
    world.now += 1
    a.step()
    assert seen[0][0]
    assert seen[-1] == (False, 0.0)
    assert sum(leads for leads, _ in seen) * 0.5 <= DURATION - MARGIN
    assert told == [True, False]
    # Nobody took it. It is ours again, as a new epoch: who read for the old one must read again.
    world.before = nothing
    world.run(a, seconds=3)
    assert told == [True, False, True]
    assert a.epoch == epoch + 1
    assert a.holds(0, a.epoch)
    assert not a.holds(0, epoch)


def test_a_renewal_whose_answer_was_lost_is_recognised(world: World):
    a = leading(world)
    world.after = lambda verb: unreachable(verb) if verb == "update" else None
    world.now += 2
    a.step()
    assert world.spec["renewTime"]
    before = a.remaining()
    world.after = nothing
    a.step()  # reads
    assert a.remaining() == before
    a.step()  # writes
    assert a.remaining() == DURATION - MARGIN
    assert a.epoch == 1


def test_a_takeover_whose_answer_was_lost_is_recognised(world: World):
    world.after = lambda verb: unreachable(verb) if verb == "update" else None
    a = world.elector("a")
    a.step()
    a.step()
    assert world.spec["holderIdentity"] == "a"
    assert not a.leader
    world.after = nothing
    world.run(a, seconds=1)
    assert a.leader
    assert world.spec["leaseTransitions"] == 5


def test_an_overtaken_leader_knows_it_with_the_next_answer(world: World):
    told: list[bool] = []
    a = leading(world, on_change=told.append)
    world.spec["holderIdentity"] = "b"
    world.put(world.lease)
    world.run(a, seconds=4)
    assert not a.leader
    assert told == [True, False]
    assert world.spec["holderIdentity"] == "b"


def test_stop_gives_the_lease_back_after_telling(world: World):
    told: list[tuple[bool, bool, str]] = []
    a = world.elector("a", on_change=lambda leads: told.append((leads, a.leader, world.spec["holderIdentity"])))
    world.run(a, seconds=1)
    b = world.elector("b")
    b.step()
    a.start()
    a.stop()
    assert told == [(True, True, "a"), (False, False, "a")]
    assert not a.leader
    assert a.remaining() == 0
    assert (world.spec["holderIdentity"], world.spec["leaseDurationSeconds"]) == ("", 1)
    assert world.spec["leaseTransitions"] == 5
    before = world.now
    world.run(b, seconds=EVERY)
    assert b.leader
    assert world.now - before <= EVERY + 0.25
    assert world.spec["leaseTransitions"] == 6


def test_at_stop_also_who_was_never_told_that_it_leads_is_told_that_it_does_not(world: World):
    """`holds` may have said yes, and posts begun, before the thread could say so."""
    told: list[bool] = []
    a = leading(world, on_change=told.append)
    told.clear()
    a._told = 0
    a.start()
    a.stop()
    assert told[-1:] == [False]
    assert world.spec["holderIdentity"] == ""


def test_giving_back_finds_its_lost_renewal(world: World):
    a = leading(world)
    world.after = lambda verb: unreachable(verb) if verb == "update" else None
    world.now += 2
    a.step()
    world.after = nothing
    a.leave()
    assert world.spec["holderIdentity"] == ""


def test_what_is_not_ours_is_not_given_back(world: World):
    leading(world)
    b = world.elector("b")
    b.step()
    b.leave()
    assert world.spec["holderIdentity"] == "a"


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
def test_a_lease_that_cannot_be_read_is_held_by_somebody(world: World, spec: object):
    world.put({"metadata": {"name": "l"}, "spec": spec})
    a = world.elector("a")
    world.run(a, seconds=DURATION - 0.25)
    assert not a.leader
    world.run(a, seconds=1)
    assert a.leader
    assert world.spec["leaseTransitions"] == 1


def test_an_answer_that_is_no_object_is_trouble_and_not_a_free_lease(world: World):
    world.lease = {"metadata": {}, "kind": "Ingress page"}
    a = world.elector("a")
    for _ in range(5):
        world.now += 20
        a.step()
    assert world.calls == ["get"] * 5
    assert not a.leader


def test_a_missing_lease_is_created_and_waited_for(world: World):
    a = leading(world)
    until = world.now + a.remaining()
    world.lease = None
    b = world.elector("b")
    b.step()
    b.step()
    assert world.spec["holderIdentity"] == "b"
    assert world.spec["leaseTransitions"] == 0
    assert world.lease["metadata"]["namespace"] == "ns"
    created = world.now
    while world.now < until:
        assert a.leader  # it has not noticed
        assert not b.leader
        world.now += 0.5
        b.step()
    world.run(b, seconds=5)
    assert b.leader
    assert world.now - created >= DURATION
    assert not a.leader


def test_a_creation_whose_answer_was_lost_is_waited_for(world: World):
    a = leading(world)
    world.lease = None
    b = world.elector("b")
    b.step()
    world.after = unreachable
    b.step()
    assert world.spec["holderIdentity"] == "b"
    world.after = nothing
    created = world.now
    while not b.leader:
        world.now += 0.5
        b.step()
        assert not (a.leader and b.leader)
    assert world.now - created >= DURATION


def test_who_only_waits_for_the_lease_it_made_does_not_give_it_back(world: World):
    world.lease = None
    b = world.elector("b")
    world.run(b, seconds=5)
    b.leave()
    assert world.spec["holderIdentity"] == "b"


def test_somebody_else_created_it_first(world: World):
    world.lease = None
    a = world.elector("a")
    a.step()
    world.put({"metadata": {"name": "l"}, "spec": {"holderIdentity": "b", "leaseDurationSeconds": 15}})
    world.run(a, seconds=10)
    assert not a.leader
    assert world.spec["holderIdentity"] == "b"
    world.run(a, seconds=10)
    assert a.leader


def test_the_own_identity_of_an_earlier_process_is_waited_for(world: World):
    a = leading(world)
    held = world.spec
    again = world.elector("a")
    again.step()
    seen = world.now
    while not again.leader:
        world.now += 0.25
        again.step()
        assert not (again.leader and a.leader)
    assert world.now - seen >= DURATION
    # As Kubernetes has it: the same holder goes on.
    assert (world.spec["acquireTime"], world.spec["leaseTransitions"]) == (held["acquireTime"], 5)


def test_a_wall_clock_that_stands_still_or_goes_back_still_shows_each_renewal(world: World):
    a, b = (Election("ns", "l", each, duration=DURATION, margin=MARGIN, renew_every=EVERY) for each in "ab")
    times = [NOON - timedelta(seconds=7 * (count // 5)) for count in range(15)]

    def exchange(who: Election, wall: datetime) -> None:
        call = who.call(world.now, wall)
        who.answered(call, world.carry_out(call), world.now)

    exchange(a, times[0])
    for wall in times:
        exchange(a, wall)
        exchange(b, wall)
        world.now += 5
        assert a.claim.holds(world.now)
        assert not b.claim.holds(world.now)
    assert world.spec["holderIdentity"] == "a"


def test_a_standby_is_not_in_a_hurry_and_errors_are_retried_soon(world: World):
    leading(world)
    b = world.elector("b")
    assert b.step() == EVERY / 2
    world.before = unreachable
    delays = [b.step() for _ in range(12)]
    assert delays[0] < 0.2
    assert max(delays) <= EVERY
    assert min(delays[-3:]) > 0.5


def test_a_failing_on_change_costs_nothing(world: World):
    def fails(leads: bool) -> None:
        raise RuntimeError("theirs")

    a = leading(world, on_change=fails)
    world.run(a, seconds=30)
    assert a.leader


def test_the_thread_survives_what_is_no_answer_at_all(world: World):
    changed = threading.Event()
    failures = iter([RuntimeError("the credentials plugin"), OSError("too")])

    def fails(verb: str) -> None:
        for error in failures:
            raise error

    world.before = fails
    a = world.elector("a", on_change=lambda leads: changed.set())
    a.start()
    try:
        assert changed.wait(5)
        assert a.leader
    finally:
        a.stop()
    assert world.spec["holderIdentity"] == ""


def test_settings_that_cannot_work_are_refused(world: World):
    for wrong in ({"renew_every": 14.0}, {"margin": -1.0}, {"renew_every": 0.0}, {"margin": 13.5}):
        with pytest.raises(ValueError, match="renew_every"):
            world.elector("a", **wrong)
    with pytest.raises(ValueError, match="identity"):
        world.elector("")


def test_identities_are_unique():
    assert len({identity() for _ in range(100)}) == 100


@dataclass(eq=False)
class Process:
    """A candidate with clocks of its own, and its one request under way."""

    name: str
    rate: float
    offset: float
    wall: datetime
    election: Election
    call: Call | None = None
    answers: list[dict | errors.KubeError] = field(default_factory=list)
    stopping: bool = False

    def local(self, true: float) -> float:
        return self.offset + self.rate * true

    def true(self, local: float) -> float:
        return (local - self.offset) / self.rate


RATES = [0.951, 0.97, 1.0, 1.03, 1.049]


class ElectionMachine(RuleBasedStateMachine):
    """Requests may be late, lost, done twice, and their answers too; the Lease may be deleted; clocks run unequally.

    Three have identities of their own and a fourth has that of the first: the process before, not dead at all.
    """

    who = st.integers(0, 3)
    steps = st.sampled_from([0.01, 0.5, 2.0, 5.0, 13.0, 14.0, 16.0])
    delays = st.sampled_from([0.0, 1.0, 5.0])

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.leases = Leases()
        self.started = 0
        self.on_the_way: list[tuple[Process, Call]] = []
        starts = (("p0", 0.951), ("p1", 1.049), ("p2", 1.0), ("p0", 1.049))
        self.processes = [self.launch(name, rate) for name, rate in starts]

    @initialize(released=st.booleans())
    def begins(self, released: bool) -> None:
        if released:
            self.leases.put({"metadata": {"name": "l"}, "spec": {"holderIdentity": ""}})

    def launch(self, name: str, rate: float) -> Process:
        self.started += 1
        # Walls of whole seconds that stand still, apart by what no two processes would share.
        wall = NOON + timedelta(hours=7 * self.started % 5, microseconds=1000 * self.started)
        election = Election("ns", "l", name, duration=DURATION, margin=MARGIN, renew_every=EVERY)
        return Process(name, rate, 37.0 * self.started, wall, election)

    def send(self, process: Process) -> None:
        now = process.local(self.time)
        if process.stopping:
            process.call = process.election.farewell(now, process.wall)
            if process.call is None:
                self.replace(process, process.rate)
                return
        else:
            process.call = process.election.call(now, process.wall)
        process.answers.clear()
        self.on_the_way.append((process, process.call))

    def replace(self, process: Process, rate: float) -> None:
        self.processes[self.processes.index(process)] = self.launch(process.name, rate)

    def arrive(self, process: Process, call: Call) -> None:
        try:
            answer: dict | errors.KubeError = self.leases.carry_out(call)
        except errors.KubeError as error:
            answer = error
        if process.call is call:
            process.answers.append(answer)

    def hear(self, process: Process, answer: dict | errors.KubeError) -> None:
        call, process.call = process.call, None
        if isinstance(answer, dict):
            process.election.answered(call, answer, process.local(self.time))
        else:
            process.election.failed(call, answer)

    @rule(seconds=steps)
    def time_passes(self, seconds: float) -> None:
        self.time += seconds

    @rule(who=who, count=st.integers(1, 3))
    def exchanges(self, who: int, count: int) -> None:
        for _ in range(count):
            process = self.processes[who]
            if process.call is not None:
                return
            self.send(process)
            if process.call is not None:
                self.arrive(*self.on_the_way.pop())
                self.hear(process, process.answers[-1])

    @rule(order=st.permutations(range(4)), seconds=steps, again=who)
    def everybody_exchanges_and_one_does_again(self, order: list[int], seconds: float, again: int) -> None:
        for who in order:
            self.exchanges(who, 1)
        self.time += seconds
        self.exchanges(again, 1)

    @rule(who=who, other=who, there=delays, back=delays)
    def exchanges_slowly(self, who: int, other: int, there: float, back: float) -> None:
        process = self.processes[who]
        if process.call is not None:
            return
        self.send(process)
        self.time += there
        self.exchanges(other, 1)
        if process.call is not None:
            self.arrive(*self.on_the_way.pop())
            self.exchanges(other, 1)
            self.time += back
            self.hear(process, process.answers[-1])

    @rule(who=who)
    def does_not_hear(self, who: int) -> None:
        process = self.processes[who]
        if process.call is None:
            self.send(process)
            if process.call is not None:
                self.arrive(*self.on_the_way.pop())
                self.hear(process, errors.Unreachable("cut"))

    @rule(who=who)
    def sends(self, who: int) -> None:
        if self.processes[who].call is None:
            self.send(self.processes[who])

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), twice=st.booleans())
    def arrives(self, data: st.DataObject, twice: bool) -> None:
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        self.arrive(*self.on_the_way[index])
        if not twice:
            del self.on_the_way[index]

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        del self.on_the_way[data.draw(st.integers(0, len(self.on_the_way) - 1))]

    @rule(data=st.data(), who=who)
    def hears(self, data: st.DataObject, who: int) -> None:
        process = self.processes[who]
        if process.answers and process.call is not None:
            self.hear(process, data.draw(st.sampled_from(process.answers)))

    @rule(who=who)
    def gives_up(self, who: int) -> None:
        if self.processes[who].call is not None:
            self.hear(self.processes[who], errors.Unreachable("timed out"))

    @rule(who=who)
    def stops(self, who: int) -> None:
        self.processes[who].stopping = True

    @rule(who=who, rate=st.sampled_from(RATES))
    def is_killed_and_comes_back(self, who: int, rate: float) -> None:
        self.replace(self.processes[who], rate)

    @rule()
    def somebody_deletes_it(self) -> None:
        self.leases.lease = None

    @rule(spec=st.sampled_from([{}, {"holderIdentity": 5}, {"holderIdentity": "x", "leaseDurationSeconds": 15}]))
    def somebody_writes_it(self, spec: dict) -> None:
        if self.leases.lease is not None:
            self.leases.put({**self.leases.lease, "spec": spec})

    @invariant()
    def no_two_hold(self) -> None:
        # What each believes now already says until when: no two may overlap, now or later.
        spans = []
        for each in self.processes:
            claim = each.election.claim
            begins, until = max(each.true(claim.begins), self.time), each.true(claim.until)
            if not each.stopping and begins < until:
                spans.append((begins, until))
        spans.sort()
        for (_, until), (begins, _) in itertools.pairwise(spans):
            assert until <= begins, spans

    @invariant()
    def time_is_only_told_forward(self) -> None:
        for each in self.processes:
            now = each.local(self.time)
            assert each.election.claim.until <= now + DURATION - MARGIN + 1e-6
            assert each.election.pause(now) >= 0
            assert each.election.turn(now) > 0

    def teardown(self) -> None:
        """When all is well again, one of them leads, within the time of two durations."""
        for each in self.processes:
            if each.stopping:
                self.replace(each, each.rate)
            elif each.call is not None:
                self.hear(each, errors.Unreachable("timed out"))
        for _ in range(90):
            for index, each in enumerate(self.processes):
                if each.election.pause(each.local(self.time)) <= 0:
                    self.exchanges(index, 1)
            self.no_two_hold()
            self.time += 0.5
        holding = [each for each in self.processes if each.election.claim.holds(each.local(self.time), 5.0)]
        assert len(holding) == 1
        assert not math.isinf(holding[0].election.claim.until)


TestElection = ElectionMachine.TestCase
TestElection.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
