"""The life of one MPS daemon as a state machine: what to do next, and what an outcome means. Pure.

Property-tested: whatever fails in whatever order, nothing is called ready that has not just answered with the right
settings, and a daemon always comes back. `daemon` carries it out.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from cardwise.core.api.mps import MpsState

_RETRY_SECONDS = 0.2
_SWEEP_SECONDS = 0.5


class DaemonPhase(StrEnum):
    """Where a daemon is. What others see of it is `state_of`."""

    OFF = "off"  # not wanted; nothing runs
    DOWN = "down"  # nothing of ours runs; leftovers are swept away when it is time
    SPAWNING = "spawning"
    AWAITING = "awaiting"  # runs, has not answered
    CONFIGURING = "configuring"
    WARMING = "warming"  # its server is coming up
    READY = "ready"
    SUSPECT = "suspect"  # did not answer once
    FAULT = "fault"  # the server waits for the end of all that a client's fault reached
    DRAINING = "draining"  # clients are being detached
    QUITTING = "quitting"
    KILLING = "killing"
    RELEASING = "releasing"  # the cards get their compute mode back


class Act(StrEnum):
    """What the shell has to do now."""

    REST = "rest"
    SWEEP = "sweep"
    SPAWN = "spawn"
    ASK = "ask"
    CONFIGURE = "configure"
    WARM = "warm"
    PROBE = "probe"
    DETACH = "detach"
    QUIT = "quit"
    KILL = "kill"
    RELEASE = "release"


class Outcome(StrEnum):
    """How it went."""

    OK = "ok"
    BUSY = "busy"  # not yet
    FAILED = "failed"
    SILENT = "silent"  # no answer in time
    DEAD = "dead"  # the daemon is gone
    FAULT = "fault"  # the server says so
    FROZEN = "frozen"  # the server does not run, whatever the daemon says of it
    LOST = "lost"  # settings are not what they were


@dataclass(frozen=True, slots=True)
class Result:
    """An outcome, and why."""

    outcome: Outcome
    reason: str = ""


OK: Final = Result(Outcome.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPace:
    """Seconds; each is a setting of the manager."""

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
    stable: float = 60.0  # of Ready, after which failures are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`until`: when the phase's patience ends; `due`: when its act is next; `since`: when Ready began; `heals_until`:
    when the patience with a fault ends, whatever comes between.
    """

    phase: DaemonPhase = DaemonPhase.DOWN
    wanted: bool = True
    reason: str = ""
    due: float = 0.0
    until: float = math.inf
    since: float = 0.0
    heals_until: float = math.inf
    failures: int = 0


class _Row(NamedTuple):
    """Of one phase: what is to be done in it, what others see, and whether a daemon of ours should be running."""

    act: Act
    state: MpsState
    runs: bool


_TABLE: Final = {
    DaemonPhase.OFF: _Row(Act.REST, MpsState.OFF, runs=False),
    DaemonPhase.DOWN: _Row(Act.SWEEP, MpsState.DOWN, runs=False),
    DaemonPhase.SPAWNING: _Row(Act.SPAWN, MpsState.STARTING, runs=False),
    DaemonPhase.AWAITING: _Row(Act.ASK, MpsState.STARTING, runs=True),
    DaemonPhase.CONFIGURING: _Row(Act.CONFIGURE, MpsState.STARTING, runs=True),
    DaemonPhase.WARMING: _Row(Act.WARM, MpsState.STARTING, runs=True),
    DaemonPhase.READY: _Row(Act.PROBE, MpsState.READY, runs=True),
    DaemonPhase.SUSPECT: _Row(Act.PROBE, MpsState.DOWN, runs=True),
    DaemonPhase.FAULT: _Row(Act.PROBE, MpsState.FAULT, runs=True),
    DaemonPhase.DRAINING: _Row(Act.DETACH, MpsState.DRAINING, runs=True),
    DaemonPhase.QUITTING: _Row(Act.QUIT, MpsState.DRAINING, runs=True),
    DaemonPhase.KILLING: _Row(Act.KILL, MpsState.DOWN, runs=False),
    DaemonPhase.RELEASING: _Row(Act.RELEASE, MpsState.DRAINING, runs=False),
}
RUNNING: Final = frozenset(phase for phase, row in _TABLE.items() if row.runs)


def state_of(machine: Machine) -> MpsState:
    """What others see."""
    return _TABLE[machine.phase].state


def plan(machine: Machine, now: float) -> Act:
    """What to do now."""
    return _TABLE[machine.phase].act if now >= machine.due else Act.REST


def want(machine: Machine, wanted: bool, now: float, pace: DaemonPace, why: str = "") -> Machine:
    """From now on there should be a daemon, or none."""
    if wanted == machine.wanted:
        return machine
    machine = replace(machine, wanted=wanted)
    if wanted:
        off = machine.phase in (DaemonPhase.OFF, DaemonPhase.RELEASING)
        return _down(machine, now) if off else machine
    if machine.phase in RUNNING - {DaemonPhase.QUITTING, DaemonPhase.DRAINING}:
        return _drain(machine, now, pace, why or "MPS is switched off on this card")
    # Not spawned yet, or tried again later: there is nothing to wait for.
    return _down(machine, now) if machine.phase in (DaemonPhase.DOWN, DaemonPhase.SPAWNING) else machine


def adopted(now: float, pace: DaemonPace) -> Machine:
    """The machine of a daemon that a former manager has left running."""
    return Machine(
        phase=DaemonPhase.AWAITING, reason="taken over from a former manager", until=now + pace.start, due=now
    )


def replaced(now: float, pace: DaemonPace, why: str) -> Machine:
    """The machine of a daemon that runs but is not as it should be: it is ended in good order."""
    return _drain(Machine(), now, pace, why)


def after(machine: Machine, result: Result, now: float, pace: DaemonPace) -> Machine:
    """What the outcome of the phase's act, or a death between two acts, leads to."""
    outcome, reason = result.outcome, result.reason
    if outcome is Outcome.DEAD and machine.phase in RUNNING:
        if machine.phase in (DaemonPhase.QUITTING, DaemonPhase.DRAINING):
            return _down(machine, now)
        return _failed(machine, now, pace, reason or "the daemon died")
    match machine.phase:
        case DaemonPhase.OFF:
            return machine
        case DaemonPhase.DOWN:
            return _after_sweep(machine, result, now, pace)
        case DaemonPhase.SPAWNING:
            if outcome is Outcome.OK:
                return replace(machine, phase=DaemonPhase.AWAITING, until=now + pace.start, due=now)
            return _failed(machine, now, pace, reason)
        case DaemonPhase.AWAITING | DaemonPhase.CONFIGURING | DaemonPhase.WARMING:
            return _after_start(machine, result, now, pace)
        case DaemonPhase.READY | DaemonPhase.SUSPECT | DaemonPhase.FAULT:
            return _after_probe(machine, result, now, pace)
        case DaemonPhase.DRAINING:
            if outcome is Outcome.SILENT:
                return _kill(machine, now, reason)
            if outcome is Outcome.OK or now >= machine.until:
                return replace(machine, phase=DaemonPhase.QUITTING, due=now, until=math.inf)
            return replace(machine, due=now + min(1.0, pace.probe))
        case DaemonPhase.QUITTING:
            return _down(machine, now) if outcome is Outcome.OK else _kill(machine, now, reason)
        case DaemonPhase.KILLING:
            if outcome is Outcome.OK:
                return _failed(machine, now, pace, machine.reason)
            return replace(machine, due=now + 1.0, reason=reason or machine.reason)
        case DaemonPhase.RELEASING:
            if outcome is Outcome.OK:
                return replace(machine, phase=DaemonPhase.OFF, due=math.inf, until=math.inf, reason="")
            return replace(machine, due=now + pace.probe, reason=reason)


def _after_sweep(machine: Machine, result: Result, now: float, pace: DaemonPace) -> Machine:
    if result.outcome is Outcome.OK:
        return replace(machine, phase=DaemonPhase.SPAWNING if machine.wanted else DaemonPhase.RELEASING, due=now)
    if result.outcome is Outcome.BUSY:
        return replace(machine, due=now + _SWEEP_SECONDS, reason=result.reason)
    return _failed(machine, now, pace, result.reason)


def _after_start(machine: Machine, result: Result, now: float, pace: DaemonPace) -> Machine:
    if result.outcome is Outcome.OK:
        if machine.phase is DaemonPhase.AWAITING:
            return replace(machine, phase=DaemonPhase.CONFIGURING, due=now)
        if machine.phase is DaemonPhase.CONFIGURING:
            return replace(machine, phase=DaemonPhase.WARMING, due=now, until=now + pace.warm)
        ready = replace(machine, phase=DaemonPhase.READY, reason="", due=now + pace.probe, until=math.inf, since=now)
        return replace(ready, heals_until=math.inf)
    if result.outcome is Outcome.FAULT:
        return _fault(machine, now, pace, result.reason)
    if result.outcome is Outcome.FROZEN:  # no more time than later on
        machine = replace(machine, until=min(machine.until, now + pace.answer))
    if now >= machine.until:
        return _kill(machine, now, f"not ready in time: {result.reason or machine.phase}")
    return replace(machine, due=now + _RETRY_SECONDS, reason=result.reason or machine.reason)


def _after_probe(machine: Machine, result: Result, now: float, pace: DaemonPace) -> Machine:
    match result.outcome:
        case Outcome.OK:
            failures = 0 if now - machine.since >= pace.stable else machine.failures
            if machine.heals_until < math.inf:
                # It has recovered by itself; what it still knows is compared first.
                return replace(machine, phase=DaemonPhase.CONFIGURING, due=now, until=now + pace.start, reason="")
            ready = replace(machine, phase=DaemonPhase.READY, due=now + pace.probe, until=math.inf)
            return replace(ready, failures=failures, reason="")
        case Outcome.LOST:
            return replace(
                machine, phase=DaemonPhase.CONFIGURING, due=now, until=now + pace.start, reason=result.reason
            )
        case Outcome.FAULT:
            if now >= machine.heals_until:
                return _drain(machine, now, pace, f"the fault did not heal by itself: {result.reason}")
            return _fault(machine, now, pace, result.reason)
        case Outcome.BUSY:
            return replace(machine, phase=DaemonPhase.WARMING, due=now, until=now + pace.warm, reason=result.reason)
        case Outcome.FROZEN:
            # Seen at once, where a silence takes its time: so the time is given here.
            if machine.phase is not DaemonPhase.SUSPECT:
                machine = replace(machine, phase=DaemonPhase.SUSPECT, until=now + pace.answer)
            elif now >= machine.until:
                return _kill(machine, now, result.reason)
            return replace(machine, due=now + min(1.0, pace.probe), reason=result.reason)
        case _:
            if machine.phase is not DaemonPhase.SUSPECT:
                return replace(machine, phase=DaemonPhase.SUSPECT, due=now, until=now, reason=result.reason)
            return _kill(machine, now, result.reason)


def _fault(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    until = min(machine.heals_until, now + pace.fault_grace)
    return replace(
        machine, phase=DaemonPhase.FAULT, due=now + min(1.0, pace.probe), until=until, heals_until=until, reason=reason
    )


def _drain(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    return replace(machine, phase=DaemonPhase.DRAINING, due=now, until=now + pace.drain, reason=reason)


def _kill(machine: Machine, now: float, reason: str) -> Machine:
    return replace(machine, phase=DaemonPhase.KILLING, due=now, until=math.inf, reason=reason)


def _down(machine: Machine, now: float) -> Machine:
    """After an end in good order: no failure, no back-off."""
    return replace(machine, phase=DaemonPhase.DOWN, due=now, until=math.inf, heals_until=math.inf)


def _failed(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    # Whoever only wants to be off need not wait: nothing is tried that could fail again.
    delay = min(pace.backoff_cap, pace.backoff * 2 ** min(machine.failures, 30)) if machine.wanted else 0.0
    return replace(
        machine,
        phase=DaemonPhase.DOWN,
        due=now + delay,
        until=math.inf,
        heals_until=math.inf,
        failures=machine.failures + 1,
        reason=reason,
    )
