"""The rules of a daemon's life, whatever happens in whatever order."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.mps import MpsState
from mps.daemon import machine
from mps.daemon.machine import OK_RESULT, Act, ActResult, DaemonPace, DaemonPhase, Machine, Outcome
from tests.theory import theory_of

PACE = DaemonPace()
GOOD = [Act.SWEEP, Act.SPAWN, Act.CONTACT, Act.CONFIGURE, Act.WARM]


def drive(
    subject: Machine, outcomes: dict[Act, ActResult], until: float, now: float = 0.0
) -> tuple[Machine, list[Act]]:
    """Plays acts with these results (OK where none is given) until a time; what was done."""
    done = []
    while now < until:
        act = machine.next_act(subject, now)
        if act is Act.REST:
            now = max(now + 0.01, min(subject.act_due_at, until))
            continue
        done.append(act)
        subject = machine.next_machine(subject, outcomes.get(act, OK_RESULT), now, PACE)
        now += 0.01
    return subject, done


def ready() -> Machine:
    subject, done = drive(Machine(), {}, 1.0)
    assert done == GOOD
    assert subject.phase is DaemonPhase.READY
    return subject


def test_the_example_of_the_docstring():
    theory, silent = theory_of("mps.daemon.machine"), ActResult(Outcome.TIMEOUT, "no answer")
    timed_out = 10.0
    suspect = machine.next_machine(ready(), silent, timed_out, PACE)
    text = f"a ready daemon times out at {timed_out:g} s and is {suspect.phase.name}, so the published state is"
    assert f"{text} {machine.mps_state(suspect).value}." in theory
    killed = suspect.act_due_at + PACE.probe_timeout
    assert f"It times out again at {killed:g} s and is killed" in theory
    subject = machine.next_machine(suspect, silent, killed, PACE)
    assert machine.next_act(subject, killed) is Act.KILL

    delays = []
    for _ in range(8):
        failed = machine.next_machine(subject, OK_RESULT, 20.0, PACE)
        assert failed.phase is DaemonPhase.DOWN
        delays.append(failed.act_due_at - 20.0)
        subject = machine.next_machine(
            machine.next_machine(failed, OK_RESULT, failed.act_due_at, PACE), OK_RESULT, failed.act_due_at, PACE
        )
        subject = machine.next_machine(
            machine.next_machine(subject, silent, 20.0, PACE), silent, subject.phase_deadline, PACE
        )
    first, second, longest = delays[0], delays[1], delays[-1]
    assert (
        f"Its first failure delays the next start by {first:g} s, the second by {second:g} s, up to {longest:g} s"
        in theory
    )
    assert max(delays) == longest
    stable = machine.next_machine(Machine(phase=DaemonPhase.READY, failures=3), OK_RESULT, PACE.stable_after, PACE)
    before = machine.next_machine(
        Machine(phase=DaemonPhase.READY, failures=3), OK_RESULT, PACE.stable_after - 0.1, PACE
    )
    assert f"After {PACE.stable_after:g} s of READY the failures are forgotten" in theory
    assert (before.failures, stable.failures) == (3, 0)


def test_nothing_is_ready_before_its_settings_and_its_server_are():
    subject, now = Machine(), 0.0
    for act in GOOD:
        assert machine.mps_state(subject) is not MpsState.READY
        assert machine.next_act(subject, now) is act
        subject = machine.next_machine(subject, OK_RESULT, now, PACE)
    assert machine.mps_state(subject) is MpsState.READY


@pytest.mark.parametrize("act", [Act.SPAWN, Act.CONTACT, Act.CONFIGURE, Act.WARM])
def test_what_never_succeeds_is_tried_at_growing_distances(act):
    _, done = drive(Machine(), {act: ActResult(Outcome.FAILED, "no")}, 3600.0)
    attempts = done.count(Act.SPAWN)
    assert 20 < attempts < 70, "about once a minute in the end"


def test_the_back_off_is_forgotten_after_a_stable_time():
    subject = machine.next_machine(ready(), ActResult(Outcome.DEAD), 2.0, PACE)
    assert (subject.failures, subject.act_due_at) == (1, 3.0)
    subject, _ = drive(subject, {}, 30.0, 2.0)
    assert machine.next_machine(subject, ActResult(Outcome.DEAD), 30.0, PACE).act_due_at == 32.0
    subject, _ = drive(subject, {}, 100.0, 30.0)
    assert machine.next_machine(subject, ActResult(Outcome.DEAD), 100.0, PACE).act_due_at == 101.0


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FAILED])
def test_one_silence_makes_a_card_not_ready_and_two_end_the_daemon(outcome):
    subject = machine.next_machine(ready(), ActResult(outcome, "hm"), 2.0, PACE)
    assert machine.mps_state(subject) is MpsState.DOWN
    assert machine.next_act(subject, 2.0) is Act.PROBE, "at once"
    assert machine.next_machine(subject, OK_RESULT, 2.0, PACE).phase is DaemonPhase.READY
    assert machine.next_act(machine.next_machine(subject, ActResult(outcome), 2.0, PACE), 2.0) is Act.KILL


def test_a_frozen_server_has_the_time_of_an_answer_and_then_its_daemon_ends():
    frozen = ActResult(Outcome.FROZEN, "server 7 is stopped")
    subject = machine.next_machine(ready(), frozen, 2.0, PACE)
    assert (machine.mps_state(subject), subject.reason) == (MpsState.DOWN, "server 7 is stopped")
    subject, done = drive(subject, {Act.PROBE: frozen}, 2.0 + PACE.probe_timeout, 2.0)
    assert set(done) == {Act.PROBE}, "a moment under a debugger costs no daemon"
    assert machine.next_machine(subject, OK_RESULT, 5.0, PACE).phase is DaemonPhase.READY
    assert machine.next_act(machine.next_machine(subject, frozen, 5.0, PACE), 5.0) is Act.KILL
    subject, _ = drive(machine.take_over(0.0, PACE), {Act.WARM: frozen}, PACE.probe_timeout + 1.0)
    assert subject.reason == "not ready in time: server 7 is stopped", "also where a former manager left it so"
    silent = machine.next_machine(ready(), ActResult(Outcome.TIMEOUT), 2.0, PACE)
    assert machine.next_act(machine.next_machine(silent, frozen, 2.0, PACE), 2.0) is Act.KILL, "it had its time"


def test_what_was_killed_or_frozen_is_back_within_thirty_seconds():
    for wound, noticed in (
        (Outcome.DEAD, 0.0),
        (Outcome.TIMEOUT, 2 * PACE.probe_timeout),
        (Outcome.FROZEN, PACE.probe_timeout),
    ):
        subject, now = machine.next_machine(ready(), ActResult(wound), 0.0, PACE), noticed
        if noticed:
            subject = machine.next_machine(subject, ActResult(wound), now, PACE)
        orphans = now + PACE.backoff + PACE.orphan_grace
        subject, _ = drive(subject, {Act.SWEEP: ActResult(Outcome.BUSY)}, orphans, now)
        subject, _ = drive(subject, {}, 28.0, orphans)
        assert subject.phase is DaemonPhase.READY


def test_a_fault_waits_then_detaches_then_restarts():
    subject, done = drive(ready(), {Act.PROBE: ActResult(Outcome.FAULT, "f")}, 2.0 + PACE.fault_grace, 1.0)
    assert (subject.phase, set(done)) == (DaemonPhase.FAULT, {Act.PROBE})
    subject, done = drive(subject, {Act.PROBE: ActResult(Outcome.FAULT)}, 26.0, 2.0 + PACE.fault_grace)
    assert [act for act in done if act is not Act.PROBE][:2] == [Act.DETACH, Act.QUIT]
    subject, _ = drive(subject, {}, 40.0, 26.0)
    assert subject.phase is DaemonPhase.READY


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FAILED])
def test_one_silence_in_a_fault_ends_nothing_and_two_do(outcome):
    subject = machine.next_machine(ready(), ActResult(Outcome.FAULT, "f"), 2.0, PACE)
    subject = machine.next_machine(subject, ActResult(outcome, "slow"), 4.0, PACE)
    assert machine.next_act(subject, 4.0) is Act.PROBE, "at once"
    assert machine.next_act(machine.next_machine(subject, OK_RESULT, 4.0, PACE), 4.0) is Act.CONFIGURE, (
        "healed meanwhile"
    )
    assert machine.next_act(machine.next_machine(subject, ActResult(outcome), 4.0, PACE), 4.0) is Act.KILL


@pytest.mark.parametrize("between", [Outcome.TIMEOUT, Outcome.FROZEN, Outcome.LOST, Outcome.OK])
def test_whatever_comes_between_a_faults_grace_is_given_once(between):
    subject, now = machine.next_machine(ready(), ActResult(Outcome.FAULT, "f"), 2.0, PACE), 2.0
    while now < 2.0 + PACE.fault_grace - 1.0:
        subject = machine.next_machine(subject, ActResult(between), now, PACE)
        subject = machine.next_machine(subject, ActResult(Outcome.FAULT, "f"), now, PACE)
        assert subject.phase is DaemonPhase.FAULT
        now += 1.0
    subject = machine.next_machine(subject, ActResult(Outcome.FAULT, "f"), 2.0 + PACE.fault_grace, PACE)
    assert (subject.phase, subject.reason) == (DaemonPhase.DRAINING, "the fault did not heal by itself: f")


def test_the_next_fault_has_a_grace_of_its_own():
    subject = machine.next_machine(ready(), ActResult(Outcome.FAULT), 2.0, PACE)
    subject, _ = drive(subject, {}, 10.0, 2.0)
    assert subject.phase is DaemonPhase.READY
    subject = machine.next_machine(subject, ActResult(Outcome.FAULT), 100.0, PACE)
    assert (
        machine.next_machine(subject, ActResult(Outcome.FAULT), 99.0 + PACE.fault_grace, PACE).phase
        is DaemonPhase.FAULT
    )


def test_a_fault_that_heals_is_compared_before_it_is_ready():
    subject = machine.next_machine(ready(), ActResult(Outcome.FAULT), 2.0, PACE)
    subject = machine.next_machine(subject, OK_RESULT, 4.0, PACE)
    assert machine.next_act(subject, 4.0) is Act.CONFIGURE


def test_off_is_reached_in_good_order_and_gives_the_cards_back():
    subject = machine.set_enabled(ready(), False, 5.0, PACE, "no one wants it")
    subject, done = drive(subject, {}, 20.0, 5.0)
    assert done == [Act.DETACH, Act.QUIT, Act.SWEEP, Act.RELEASE]
    assert machine.mps_state(subject) is MpsState.OFF
    subject, done = drive(machine.set_enabled(subject, True, 20.0, PACE), {}, 21.0, 20.0)
    assert done == GOOD


@pytest.mark.parametrize("acts", range(len(GOOD) + 1))
def test_off_is_reached_from_wherever_a_start_is(acts):
    subject = Machine()
    for _ in range(acts):
        subject = machine.next_machine(subject, OK_RESULT, 0.0, PACE)
    subject, _ = drive(machine.set_enabled(subject, False, 0.0, PACE), {}, 20.0)
    assert machine.mps_state(subject) is MpsState.OFF


outcomes = st.builds(ActResult, st.sampled_from(list(Outcome)))
CANNOT = "the control program is missing"
wishes = st.sampled_from([None, None, None, True, False, CANNOT])
events = st.lists(st.tuples(outcomes, st.floats(0.0, 100.0), wishes))
OPEN = (DaemonPhase.UNAVAILABLE, DaemonPhase.CHECKING)  # containers may run without MPS


def wish(subject: Machine, wanted: bool | str, now: float) -> Machine:
    """On, off, or why it cannot run."""
    return machine.set_enabled(
        subject, wanted is True, now, PACE, unavailable=wanted if isinstance(wanted, str) else ""
    )


def test_where_mps_cannot_run_the_cards_are_given_back_first_and_taken_after_a_check_only():
    subject = wish(ready(), CANNOT, 5.0)
    subject, done = drive(subject, {}, 20.0, 5.0)
    assert done == [Act.DETACH, Act.QUIT, Act.SWEEP, Act.RELEASE]
    assert (machine.mps_state(subject), subject.reason) == (MpsState.UNAVAILABLE, CANNOT)
    subject = wish(subject, True, 20.0)
    assert machine.mps_state(subject) is MpsState.STARTING, "nothing starts without MPS any more"
    assert machine.next_act(subject, 20.0) is Act.REST, "all learn of it first"
    subject, done = drive(subject, {Act.CHECK: ActResult(Outcome.BUSY, "pods")}, 26.0, 20.0)
    assert (done, machine.mps_state(subject), subject.reason) == ([Act.CHECK], MpsState.UNAVAILABLE, "pods")
    assert wish(subject, True, 27.0) == subject
    subject, done = drive(wish(subject, True, 31.0), {}, 60.0, 31.0)
    assert done[: len(GOOD) + 1] == [Act.CHECK, *GOOD]


def test_where_mps_becomes_impossible_during_the_check_the_cards_are_open_again_at_once():
    subject = wish(machine.start_unavailable(CANNOT), True, 1.0)
    assert machine.mps_state(subject) is MpsState.STARTING
    subject = wish(subject, CANNOT, 2.0)
    assert (machine.mps_state(subject), subject.reason) == (MpsState.UNAVAILABLE, CANNOT)


def test_off_becomes_unavailable_and_a_reason_that_changes_is_told():
    subject, _ = drive(machine.set_enabled(ready(), False, 5.0, PACE), {}, 20.0, 5.0)
    subject, done = drive(wish(subject, CANNOT, 20.0), {}, 21.0, 20.0)
    assert (done, machine.mps_state(subject)) == ([Act.RELEASE], MpsState.UNAVAILABLE)
    assert wish(subject, "the driver is too old", 22.0).reason == "the driver is too old"


@settings(deadline=None)
@given(events)
def test_whatever_fails_readiness_is_earned_and_a_daemon_comes_back(happened):
    subject, now = Machine(), 0.0
    for act_result, step, wanted in happened:
        now += step
        if wanted is not None:
            subject = wish(subject, wanted, now)
        act = machine.next_act(subject, now)
        if act is Act.REST:
            if act_result.outcome is Outcome.DEAD:
                subject = machine.next_machine(subject, act_result, now, PACE)  # a death between two acts
            continue
        was_open = subject.phase in OPEN
        subject = machine.next_machine(subject, act_result, now, PACE)
        if was_open and subject.phase not in OPEN:
            assert (act, act_result.outcome) == (Act.CHECK, Outcome.OK)
        if machine.mps_state(subject) is MpsState.UNAVAILABLE and not was_open:
            assert (act, act_result.outcome) == (Act.RELEASE, Outcome.OK)
        if machine.mps_state(subject) is MpsState.READY:
            assert (act, act_result.outcome) in ((Act.WARM, Outcome.OK), (Act.PROBE, Outcome.OK))
        assert subject.act_due_at == math.inf or subject.act_due_at <= now + PACE.max_backoff + 1e-6
    now += machine.SETTLE_SECONDS
    subject = machine.set_enabled(subject, True, now, PACE)
    subject, _ = drive(subject, {}, now + 200.0, now)
    assert subject.phase is DaemonPhase.READY
    subject, _ = drive(machine.set_enabled(subject, False, now + 200.0, PACE), {}, now + 300.0, now + 200.0)
    assert subject.phase is DaemonPhase.OFF


@settings(deadline=None)
@given(events)
def test_nothing_is_spawned_while_a_daemon_may_live(happened):
    subject, now, lives = Machine(), 0.0, False
    for act_result, step, wanted in happened:
        now += step
        if wanted is not None:
            subject = wish(subject, wanted, now)
        act = machine.next_act(subject, now)
        if act is Act.REST:
            continue
        if act is Act.SPAWN:
            assert not lives
            lives = act_result.outcome is Outcome.OK
        elif (act_result.outcome is Outcome.DEAD and subject.phase in machine.RUNNING_PHASES) or (
            act in (Act.QUIT, Act.KILL) and act_result.outcome is Outcome.OK
        ):
            lives = False
        subject = machine.next_machine(subject, act_result, now, PACE)
        if subject.phase in (*OPEN, DaemonPhase.OFF, DaemonPhase.DOWN, DaemonPhase.SPAWNING, DaemonPhase.RELEASING):
            assert not lives
