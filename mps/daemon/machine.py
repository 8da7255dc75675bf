"""The life of one MPS daemon as a state machine: the next act, and the effect of its outcome. Pure.

Theory of operation. `_TABLE` has a row for each phase: the act to perform, and the state that others see. `next_act`
returns the act once it is due, `daemon` performs it, and `next_machine` computes the next machine from its outcome.
Property-tested: whatever fails in whatever order, no daemon counts as ready unless it has just answered with the right
settings, and a daemon always comes back.

Example, with the default pace: a ready daemon times out at 10 s and is SUSPECT, so the state is Down. It times out
again at 13 s and is killed. Its first failure delays the next start by 1 s, the second by 2 s, up to 60 s. After 60 s
of READY the failures are forgotten.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from cardwise.core.api.mps import MpsState

_RETRY_SECONDS = 0.2
_SWEEP_SECONDS = 0.5


class DaemonPhase(StrEnum):
    """The phase of a daemon. `state_of` is the state that others see."""

    OFF = "off"  # not wanted; no process runs
    DOWN = "down"  # no process runs; leftovers are ended before the next start
    SPAWNING = "spawning"
    AWAITING = "awaiting"  # runs, has not answered yet
    CONFIGURING = "configuring"
    WARMING = "warming"  # its server is starting
    READY = "ready"
    SUSPECT = "suspect"  # timed out once
    FAULT = "fault"  # the server waits until all clients that a fault reached have ended
    DRAINING = "draining"  # clients are being detached
    QUITTING = "quitting"
    KILLING = "killing"
    RELEASING = "releasing"  # the cards get their former compute modes


class Act(StrEnum):
    """What `daemon` has to do now."""

    REST = "rest"
    SWEEP = "sweep"
    SPAWN = "spawn"
    CONTACT = "contact"
    CONFIGURE = "configure"
    WARM = "warm"
    PROBE = "probe"
    DETACH = "detach"
    QUIT = "quit"
    KILL = "kill"
    RELEASE = "release"


class Outcome(StrEnum):
    """The outcome of an act."""

    OK = "ok"
    BUSY = "busy"  # not finished yet
    FAILED = "failed"
    TIMEOUT = "timeout"
    DEAD = "dead"  # the daemon is gone
    FAULT = "fault"  # the server reports a fault
    FROZEN = "frozen"  # the server does not run, whatever the daemon reports
    LOST = "lost"  # settings were changed or lost


@dataclass(frozen=True, slots=True)
class ActResult:
    """An outcome and its reason, "" for none."""

    outcome: Outcome
    reason: str = ""


OK: Final = ActResult(Outcome.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPace:
    """Times in seconds; most are options of the manager."""

    probe: float = 2.0
    answer: float = 3.0
    start: float = 15.0  # until a daemon answers and has its settings
    warm: float = 30.0  # until its server is active
    fault_grace: float = 20.0
    drain: float = 20.0
    quit_grace: float = 5.0
    orphan_grace: float = 10.0
    backoff: float = 1.0
    backoff_cap: float = 60.0
    stable: float = 60.0  # after this time in READY failures are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The state of a daemon. Times are seconds of the caller's clock.

    due: when the next act is due.
    until: when the phase times out.
    since: when READY began.
    fault_until: when a fault times out, whatever phases come between.
    failures: failures in a row, for the back-off.
    """

    phase: DaemonPhase = DaemonPhase.DOWN
    wanted: bool = True
    reason: str = ""
    due: float = 0.0
    until: float = math.inf
    since: float = 0.0
    fault_until: float = math.inf
    failures: int = 0


class _PhaseRow(NamedTuple):
    """A row of the table: the act of a phase, the state that others see, and whether the daemon should run."""

    act: Act
    state: MpsState
    runs: bool


_TABLE: Final = {
    DaemonPhase.OFF: _PhaseRow(Act.REST, MpsState.OFF, runs=False),
    DaemonPhase.DOWN: _PhaseRow(Act.SWEEP, MpsState.DOWN, runs=False),
    DaemonPhase.SPAWNING: _PhaseRow(Act.SPAWN, MpsState.STARTING, runs=False),
    DaemonPhase.AWAITING: _PhaseRow(Act.CONTACT, MpsState.STARTING, runs=True),
    DaemonPhase.CONFIGURING: _PhaseRow(Act.CONFIGURE, MpsState.STARTING, runs=True),
    DaemonPhase.WARMING: _PhaseRow(Act.WARM, MpsState.STARTING, runs=True),
    DaemonPhase.READY: _PhaseRow(Act.PROBE, MpsState.READY, runs=True),
    DaemonPhase.SUSPECT: _PhaseRow(Act.PROBE, MpsState.DOWN, runs=True),
    DaemonPhase.FAULT: _PhaseRow(Act.PROBE, MpsState.FAULT, runs=True),
    DaemonPhase.DRAINING: _PhaseRow(Act.DETACH, MpsState.DRAINING, runs=True),
    DaemonPhase.QUITTING: _PhaseRow(Act.QUIT, MpsState.DRAINING, runs=True),
    DaemonPhase.KILLING: _PhaseRow(Act.KILL, MpsState.DOWN, runs=False),
    DaemonPhase.RELEASING: _PhaseRow(Act.RELEASE, MpsState.DRAINING, runs=False),
}
RUNNING: Final = frozenset(phase for phase, row in _TABLE.items() if row.runs)


def state_of(machine: Machine) -> MpsState:
    """The state that others see."""
    return _TABLE[machine.phase].state


def next_act(machine: Machine, now: float) -> Act:
    """The act that is due now."""
    return _TABLE[machine.phase].act if now >= machine.due else Act.REST


def set_wanted(machine: Machine, wanted: bool, now: float, pace: DaemonPace, reason: str = "") -> Machine:
    """Set whether the daemon should run."""
    if wanted == machine.wanted:
        return machine
    machine = replace(machine, wanted=wanted)
    if wanted:
        off = machine.phase in (DaemonPhase.OFF, DaemonPhase.RELEASING)
        return _enter_down(machine, now) if off else machine
    if machine.phase in RUNNING - {DaemonPhase.QUITTING, DaemonPhase.DRAINING}:
        return _start_drain(machine, now, pace, reason or "MPS is switched off on this GPU")
    # Not started, or to be retried later: nothing to wait for.
    return _enter_down(machine, now) if machine.phase in (DaemonPhase.DOWN, DaemonPhase.SPAWNING) else machine


def take_over(now: float, pace: DaemonPace) -> Machine:
    """The machine of a running daemon that is taken over from a former manager."""
    return Machine(
        phase=DaemonPhase.AWAITING, reason="taken over from a former manager", until=now + pace.start, due=now
    )


def replace_daemon(now: float, pace: DaemonPace, reason: str) -> Machine:
    """The machine of a running daemon that has to be replaced: it is drained and ended."""
    return _start_drain(Machine(), now, pace, reason)


def next_machine(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    """The machine after an act of the phase, or after a death between two acts."""
    outcome, reason = act_result.outcome, act_result.reason
    if outcome is Outcome.DEAD and machine.phase in RUNNING:
        if machine.phase in (DaemonPhase.QUITTING, DaemonPhase.DRAINING):
            return _enter_down(machine, now)
        return _enter_failed(machine, now, pace, reason or "the daemon died")
    match machine.phase:
        case DaemonPhase.OFF:
            return machine
        case DaemonPhase.DOWN:
            return _after_sweep(machine, act_result, now, pace)
        case DaemonPhase.SPAWNING:
            if outcome is Outcome.OK:
                return replace(machine, phase=DaemonPhase.AWAITING, until=now + pace.start, due=now)
            return _enter_failed(machine, now, pace, reason)
        case DaemonPhase.AWAITING | DaemonPhase.CONFIGURING | DaemonPhase.WARMING:
            return _after_start(machine, act_result, now, pace)
        case DaemonPhase.READY | DaemonPhase.SUSPECT | DaemonPhase.FAULT:
            return _after_probe(machine, act_result, now, pace)
        case DaemonPhase.DRAINING:
            if outcome is Outcome.TIMEOUT:
                return _start_kill(machine, now, reason)
            if outcome is Outcome.OK or now >= machine.until:
                return replace(machine, phase=DaemonPhase.QUITTING, due=now, until=math.inf)
            return replace(machine, due=now + min(1.0, pace.probe))
        case DaemonPhase.QUITTING:
            return _enter_down(machine, now) if outcome is Outcome.OK else _start_kill(machine, now, reason)
        case DaemonPhase.KILLING:
            if outcome is Outcome.OK:
                return _enter_failed(machine, now, pace, machine.reason)
            return replace(machine, due=now + 1.0, reason=reason or machine.reason)
        case DaemonPhase.RELEASING:
            if outcome is Outcome.OK:
                return replace(machine, phase=DaemonPhase.OFF, due=math.inf, until=math.inf, reason="")
            return replace(machine, due=now + pace.probe, reason=reason)


def _after_sweep(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    if act_result.outcome is Outcome.OK:
        return replace(machine, phase=DaemonPhase.SPAWNING if machine.wanted else DaemonPhase.RELEASING, due=now)
    if act_result.outcome is Outcome.BUSY:
        return replace(machine, due=now + _SWEEP_SECONDS, reason=act_result.reason)
    return _enter_failed(machine, now, pace, act_result.reason)


def _after_start(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    if act_result.outcome is Outcome.OK:
        if machine.phase is DaemonPhase.AWAITING:
            return replace(machine, phase=DaemonPhase.CONFIGURING, due=now)
        if machine.phase is DaemonPhase.CONFIGURING:
            return replace(machine, phase=DaemonPhase.WARMING, due=now, until=now + pace.warm)
        ready = replace(machine, phase=DaemonPhase.READY, reason="", due=now + pace.probe, until=math.inf, since=now)
        return replace(ready, fault_until=math.inf)
    if act_result.outcome is Outcome.FAULT:
        return _enter_fault(machine, now, pace, act_result.reason)
    if act_result.outcome is Outcome.FROZEN:  # no more time than when it is ready
        machine = replace(machine, until=min(machine.until, now + pace.answer))
    if now >= machine.until:
        return _start_kill(machine, now, f"not ready in time: {act_result.reason or machine.phase}")
    return replace(machine, due=now + _RETRY_SECONDS, reason=act_result.reason or machine.reason)


def _after_probe(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    match act_result.outcome:
        case Outcome.OK:
            failures = 0 if now - machine.since >= pace.stable else machine.failures
            if machine.fault_until < math.inf:
                # It has recovered by itself; check its settings first.
                return replace(machine, phase=DaemonPhase.CONFIGURING, due=now, until=now + pace.start, reason="")
            ready = replace(machine, phase=DaemonPhase.READY, due=now + pace.probe, until=math.inf)
            return replace(ready, failures=failures, reason="")
        case Outcome.LOST:
            return replace(
                machine, phase=DaemonPhase.CONFIGURING, due=now, until=now + pace.start, reason=act_result.reason
            )
        case Outcome.FAULT:
            if now >= machine.fault_until:
                return _start_drain(machine, now, pace, f"the fault did not heal by itself: {act_result.reason}")
            return _enter_fault(machine, now, pace, act_result.reason)
        case Outcome.BUSY:
            return replace(machine, phase=DaemonPhase.WARMING, due=now, until=now + pace.warm, reason=act_result.reason)
        case Outcome.FROZEN:
            # Detected at once, while a timeout takes its time: so wait here for as long.
            if machine.phase is not DaemonPhase.SUSPECT:
                machine = replace(machine, phase=DaemonPhase.SUSPECT, until=now + pace.answer)
            elif now >= machine.until:
                return _start_kill(machine, now, act_result.reason)
            return replace(machine, due=now + min(1.0, pace.probe), reason=act_result.reason)
        case _:
            if machine.phase is not DaemonPhase.SUSPECT:
                return replace(machine, phase=DaemonPhase.SUSPECT, due=now, until=now, reason=act_result.reason)
            return _start_kill(machine, now, act_result.reason)


def _enter_fault(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    until = min(machine.fault_until, now + pace.fault_grace)
    return replace(
        machine, phase=DaemonPhase.FAULT, due=now + min(1.0, pace.probe), until=until, fault_until=until, reason=reason
    )


def _start_drain(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    return replace(machine, phase=DaemonPhase.DRAINING, due=now, until=now + pace.drain, reason=reason)


def _start_kill(machine: Machine, now: float, reason: str) -> Machine:
    return replace(machine, phase=DaemonPhase.KILLING, due=now, until=math.inf, reason=reason)


def _enter_down(machine: Machine, now: float) -> Machine:
    """The machine after an orderly end: no failure, no back-off."""
    return replace(machine, phase=DaemonPhase.DOWN, due=now, until=math.inf, fault_until=math.inf)


def _enter_failed(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    # No back-off if the daemon is not wanted: no start is tried.
    delay = min(pace.backoff_cap, pace.backoff * 2 ** min(machine.failures, 30)) if machine.wanted else 0.0
    return replace(
        machine,
        phase=DaemonPhase.DOWN,
        due=now + delay,
        until=math.inf,
        fault_until=math.inf,
        failures=machine.failures + 1,
        reason=reason,
    )
