"""No two processes lead at once, in any order of events."""

import itertools
import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cardwise.kube import errors
from cardwise.kube.leases.election import SILENT_DURATIONS, Election, LeaseCall
from tests.build import build_released_lease
from tests.examples import examples
from tests.kube.leases.leases import DURATION, EVERY, MARGIN, NOON, PATH, World
from tests.theory import theory_of


@dataclass(eq=False)
class Process:
    """A candidate with its own clocks and at most one request under way."""

    name: str
    rate: float
    offset: float
    ahead: timedelta
    election: Election
    call: LeaseCall | None = None
    answers: list[dict | errors.KubeError] = field(default_factory=list)
    stopping: bool = False

    def local(self, true: float) -> float:
        return self.offset + self.rate * true

    def true(self, local: float) -> float:
        return (local - self.offset) / self.rate


RATES = [0.951, 0.97, 1.0, 1.03, 1.049]


class ElectionMachine(RuleBasedStateMachine):
    """Requests may be late, lost, done twice, and their answers too; the Lease may be deleted; clocks run unequally.

    Three candidates have their own identities; the fourth has that of the first: an earlier process that still runs.
    """

    number = st.integers(0, 3)
    steps = st.sampled_from([0.01, 0.5, 2.0, 5.0, 13.0, 14.0, 16.0])
    delays = st.sampled_from([0.0, 1.0, 5.0])

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.leases = World()
        self.started = 0
        self.releases: list[tuple[float, dict]] = []  # the times when each was carried out
        self.versions: list[tuple[float, dict | None]] = []  # the versions of the Lease, and when each was observed
        self.on_the_way: list[tuple[Process, LeaseCall]] = []
        starts = (("p0", 0.951), ("p1", 1.049), ("p2", 1.0), ("p0", 1.049))
        self.processes = [self.launch(name, rate) for name, rate in starts]

    @initialize(released=st.booleans())
    def begins(self, released: bool) -> None:
        if released:
            self.leases.put_lease(build_released_lease(self.wall))

    @property
    def wall(self) -> datetime:
        """The API server's time as a process estimates it."""
        return NOON + timedelta(seconds=math.floor(self.time))

    def launch(self, name: str, rate: float) -> Process:
        self.started += 1
        # Attributes that belong to one process.
        ahead = timedelta(microseconds=1000 * self.started)
        election = Election("ns", "l", name, duration=DURATION, margin=MARGIN, renew_every=EVERY)
        return Process(name, rate, 37.0 * self.started, ahead, election)

    def send(self, process: Process) -> None:
        now = process.local(self.time)
        if process.stopping:
            process.call = process.election.release_call(now, self.wall + process.ahead)
            if process.call is None:
                self.replace(process, process.rate)
                return
        else:
            process.call = process.election.next_call(now, self.wall + process.ahead)
        process.answers.clear()
        self.on_the_way.append((process, process.call))

    def replace(self, process: Process, rate: float) -> None:
        self.processes[self.processes.index(process)] = self.launch(process.name, rate)

    def arrive(self, process: Process, call: LeaseCall) -> None:
        try:
            answer: dict | errors.KubeError = self.leases.carry_out(call)
            if call.kind == "release":
                self.releases.append((self.time, answer["spec"]))
        except errors.KubeError as error:
            answer = error
        self.note_version()
        if process.call is call:
            process.answers.append(answer)

    def note_version(self) -> None:
        lease = self.leases.lease
        if not self.versions or lease != self.versions[-1][1]:
            self.versions.append((self.time, lease))

    def hear(self, process: Process, answer: dict | errors.KubeError) -> None:
        call, process.call = process.call, None
        if isinstance(answer, dict):
            process.election.on_response(call, answer, process.local(self.time), self.wall)
        else:
            process.election.on_failure(call, answer)

    @rule(seconds=steps)
    def time_passes(self, seconds: float) -> None:
        self.time += seconds

    @rule(number=number, count=st.integers(1, 3))
    def exchanges(self, number: int, count: int) -> None:
        for _ in range(count):
            process = self.processes[number]
            if process.call is not None:
                return
            self.send(process)
            if process.call is not None:
                self.arrive(*self.on_the_way.pop())
                self.hear(process, process.answers[-1])

    @rule(order=st.permutations(range(4)), seconds=steps, again=number)
    def all_exchange_and_one_repeats(self, order: list[int], seconds: float, again: int) -> None:
        for number in order:
            self.exchanges(number, 1)
        self.time += seconds
        self.exchanges(again, 1)

    @rule(number=number, other=number, there=delays, back=delays)
    def exchanges_slowly(self, number: int, other: int, there: float, back: float) -> None:
        process = self.processes[number]
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

    @rule(number=number)
    def does_not_hear(self, number: int) -> None:
        process = self.processes[number]
        if process.call is None:
            self.send(process)
            if process.call is not None:
                self.arrive(*self.on_the_way.pop())
                self.hear(process, errors.Unreachable("cut"))

    @rule(number=number)
    def sends(self, number: int) -> None:
        if self.processes[number].call is None:
            self.send(self.processes[number])

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

    @rule(data=st.data(), number=number)
    def hears(self, data: st.DataObject, number: int) -> None:
        process = self.processes[number]
        if process.answers and process.call is not None:
            self.hear(process, data.draw(st.sampled_from(process.answers)))

    @rule(number=number)
    def gives_up(self, number: int) -> None:
        if self.processes[number].call is not None:
            self.hear(self.processes[number], errors.Unreachable("timed out"))

    @rule(number=number)
    def stops(self, number: int) -> None:
        self.processes[number].stopping = True

    @rule(number=number, rate=st.sampled_from(RATES))
    def process_is_killed_and_restarts(self, number: int, rate: float) -> None:
        self.replace(self.processes[number], rate)

    @rule()
    def user_deletes_the_lease(self) -> None:
        self.leases.remove()

    @rule(spec=st.sampled_from([{}, {"holderIdentity": 5}, {"holderIdentity": "x", "leaseDurationSeconds": 15}]))
    def user_writes_the_lease(self, spec: dict) -> None:
        if self.leases.lease is not None:
            self.leases.put_lease(spec)

    @precondition(lambda self: self.leases.lease is not None)
    @rule(data=st.data(), count=st.integers(0, 9))
    def backup_of_a_released_version_is_restored(self, data: st.DataObject, count: int) -> None:
        old = [spec for moment, spec in self.releases if self.time - moment > DURATION]
        if old:
            self.leases.put_lease(data.draw(st.sampled_from(old)) | {"leaseTransitions": count})

    @rule(data=st.data())
    def etcd_is_restored(self, data: st.DataObject) -> None:
        """Restore etcd to a version that was replaced longer ago than a restore takes."""
        self.note_version()
        until = [moment for moment, _ in self.versions[1:]] + [self.time]  # the version may have been restored before
        latest = {str(lease): (moment, lease) for moment, (_, lease) in zip(until, self.versions, strict=True)}
        replaced = [
            lease
            for moment, lease in latest.values()
            if lease is not None and self.time - moment > SILENT_DURATIONS * DURATION / min(RATES)
        ]
        if replaced:
            self.leases.api.restore(PATH, data.draw(st.sampled_from(replaced)))

    @precondition(lambda self: self.leases.lease is not None)
    @rule()
    def user_empties_the_holder(self) -> None:
        self.leases.put_lease(self.leases.spec | {"holderIdentity": ""})

    @invariant()
    def no_two_processes_hold_the_lease(self) -> None:
        self.note_version()
        # Each process already knows the end of its period, so periods must not overlap, now or later.
        spans = []
        for process in self.processes:
            claim = process.election.period
            begins, until = max(process.true(claim.begins), self.time), process.true(claim.until)
            if not process.stopping and begins < until:
                spans.append((begins, until))
        spans.sort()
        for (_, until), (begins, _) in itertools.pairwise(spans):
            assert until <= begins, spans

    @invariant()
    def time_never_goes_back(self) -> None:
        for process in self.processes:
            now = process.local(self.time)
            assert process.election.period.until <= now + DURATION - MARGIN + 1e-6
            assert process.election.seconds_to_call(now) >= 0
            assert process.election.seconds_to_change(now) > 0

    def teardown(self) -> None:
        """After all faults have ended, one candidate leads within two durations."""
        for process in self.processes:
            if process.stopping:
                self.replace(process, process.rate)
            elif process.call is not None:
                self.hear(process, errors.Unreachable("timed out"))
        for _ in range(90):
            for index, process in enumerate(self.processes):
                if process.election.seconds_to_call(process.local(self.time)) <= 0:
                    self.exchanges(index, 1)
            self.no_two_processes_hold_the_lease()
            self.time += 0.5
        holding = [
            process for process in self.processes if process.election.period.is_valid(process.local(self.time), 5.0)
        ]
        assert len(holding) == 1
        assert not math.isinf(holding[0].election.period.until)


TestElection = ElectionMachine.TestCase
TestElection.settings = settings(max_examples=examples(25, soak=3000), stateful_step_count=60)


def test_the_example_of_the_docstring():
    theory, duration, margin = theory_of("cardwise.kube.leases.election"), 5.0, 0.5
    assert f"with a duration of {duration:g} s and a margin of {margin:g} s" in theory
    leases = World()
    leases.put_lease(build_released_lease(NOON))
    a, b = (Election("ns", "l", name, duration=duration, margin=margin, renew_every=1.0) for name in ("a", "b"))

    def send(election: Election, now: float) -> str:
        call = election.next_call(now, NOON)
        election.on_response(call, leases.carry_out(call), now, NOON)
        return call.kind

    assert [send(a, 9.9), send(a, 10.0)] == ["get", "update"]
    assert "A sends a renewal at 10.0 s and stops" in theory
    ends = a.period.until
    assert f"it holds the Lease until {ends} s" in theory
    assert "B reads the renewal at 10.2 s" in theory
    assert send(b, 10.2) == "get"
    acquired_at = next(tenth / 10 for tenth in range(103, 200) if send(b, tenth / 10) == "update")
    assert f"takes the Lease at {acquired_at} s at the earliest: {acquired_at - ends:.1f} s later" in theory
