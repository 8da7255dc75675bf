"""The life of one MPS daemon as a state machine: the next act, and the effect of its outcome. Pure.

Theory of operation. `_ROW_BY_PHASE` has a row for each phase: the act to perform, and the published MPS state.
`next_act` returns the act once it is due, `daemon` performs the act, and `next_machine` computes the next state of the
machine from the act's outcome. A property test draws failures in any order and checks two properties. A daemon counts
as ready only if it has just answered with the right settings. A daemon always becomes ready again.

Example, with the default pace: a ready daemon times out at 10 s and is SUSPECT, so the published state is Down. It
times out again at 13 s and is killed. Its first failure delays the next start by 1 s, the second by 2 s, up to 60 s.
After 60 s of READY the failures are forgotten.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from cardwise.core.api.mps import MpsState

_RETRY_SECONDS = 0.2
# Seconds between the publication that the cards take no containers without MPS any more, and the search for pods that
# hold them. The extender learns of it in this time, and binds no further pods to the cards.
SETTLE_SECONDS = 5.0
_SWEEP_SECONDS = 0.5


class DaemonPhase(StrEnum):
    """The phase of a daemon. `mps_state` returns the MPS state that is published for it."""

    OFF = "off"  # not enabled; no process runs
    DOWN = "down"  # no process runs; processes of a former daemon are ended before the next start
    SPAWNING = "spawning"
    AWAITING = "awaiting"  # runs, but has not answered yet
    CONFIGURING = "configuring"
    WARMING = "warming"  # its server is starting
    READY = "ready"
    SUSPECT = "suspect"  # a probe timed out once
    FAULT = "fault"  # after a client's fault: the server waits until all affected clients have ended
    DRAINING = "draining"  # clients are being detached
    QUITTING = "quitting"
    KILLING = "killing"
    RELEASING = "releasing"  # the former compute modes of the cards are being restored
    UNAVAILABLE = "unavailable"  # MPS cannot run, and containers start without it; no process runs
    CHECKING = "checking"  # MPS can run again, and no container starts; pods that run without MPS are searched for


class Act(StrEnum):
    """An act that `daemon` performs in a phase; REST means that no act is due."""

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
    CHECK = "check"


class Outcome(StrEnum):
    """The outcome of an act."""

    OK = "ok"
    BUSY = "busy"  # not finished yet
    FAILED = "failed"
    TIMEOUT = "timeout"
    DEAD = "dead"  # the daemon has ended
    FAULT = "fault"  # the server reports a fault
    FROZEN = "frozen"  # the server's process makes no progress, although the daemon lists it
    LOST = "lost"  # settings were changed or lost


@dataclass(frozen=True, slots=True)
class ActResult:
    """The outcome of an act and its reason; "" without one."""

    outcome: Outcome
    reason: str = ""


OK_RESULT: Final = ActResult(Outcome.OK)


PROBE_TIMEOUT_SECONDS: Final = 3.0  # the default of `--probe-timeout`


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonPace:
    """Times of a daemon in seconds."""

    probe_interval: float = 2.0  # pods may start on the card of a frozen daemon for this time and two timeouts
    probe_timeout: float = PROBE_TIMEOUT_SECONDS
    start_timeout: float = 15.0  # maximum time until a new daemon answers and has its settings
    server_timeout: float = 30.0  # maximum time until the server of a new daemon is active
    fault_grace: float = 20.0  # time for the card's clients to exit after a fault, before they are detached
    drain_timeout: float = 20.0  # time for detached clients to exit before their daemon is ended
    quit_grace: float = 5.0  # time for the server to exit after `quit`
    orphan_grace: float = 10.0  # time for clients of a server to exit after its daemon has died
    backoff: float = 1.0
    max_backoff: float = 60.0
    stable_after: float = 60.0  # time in READY after which failures are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The state machine of a daemon. Times are seconds of the caller's clock.

    unavailable: why MPS cannot run; "" if it can. The daemon is enabled only if MPS can run.
    act_due_at: when the next act is due.
    phase_deadline: when the phase times out.
    ready_since: when READY began.
    fault_deadline: when the fault times out; other phases of the daemon do not change it.
    failures: consecutive failures, for the back-off.
    """

    phase: DaemonPhase = DaemonPhase.DOWN
    enabled: bool = True
    unavailable: str = ""
    reason: str = ""
    act_due_at: float = 0.0
    phase_deadline: float = math.inf
    ready_since: float = 0.0
    fault_deadline: float = math.inf
    failures: int = 0


class _PhaseRow(NamedTuple):
    """A row of the table: the act of a phase, the published MPS state, and whether the daemon's process should run."""

    act: Act
    state: MpsState
    is_running: bool


_ROW_BY_PHASE: Final = {
    DaemonPhase.OFF: _PhaseRow(Act.REST, MpsState.OFF, is_running=False),
    DaemonPhase.DOWN: _PhaseRow(Act.SWEEP, MpsState.DOWN, is_running=False),
    DaemonPhase.SPAWNING: _PhaseRow(Act.SPAWN, MpsState.STARTING, is_running=False),
    DaemonPhase.AWAITING: _PhaseRow(Act.CONTACT, MpsState.STARTING, is_running=True),
    DaemonPhase.CONFIGURING: _PhaseRow(Act.CONFIGURE, MpsState.STARTING, is_running=True),
    DaemonPhase.WARMING: _PhaseRow(Act.WARM, MpsState.STARTING, is_running=True),
    DaemonPhase.READY: _PhaseRow(Act.PROBE, MpsState.READY, is_running=True),
    DaemonPhase.SUSPECT: _PhaseRow(Act.PROBE, MpsState.DOWN, is_running=True),
    DaemonPhase.FAULT: _PhaseRow(Act.PROBE, MpsState.FAULT, is_running=True),
    DaemonPhase.DRAINING: _PhaseRow(Act.DETACH, MpsState.DRAINING, is_running=True),
    DaemonPhase.QUITTING: _PhaseRow(Act.QUIT, MpsState.DRAINING, is_running=True),
    DaemonPhase.KILLING: _PhaseRow(Act.KILL, MpsState.DOWN, is_running=False),
    DaemonPhase.RELEASING: _PhaseRow(Act.RELEASE, MpsState.DRAINING, is_running=False),
    DaemonPhase.UNAVAILABLE: _PhaseRow(Act.REST, MpsState.UNAVAILABLE, is_running=False),
    DaemonPhase.CHECKING: _PhaseRow(Act.CHECK, MpsState.STARTING, is_running=False),
}
RUNNING_PHASES: Final = frozenset(phase for phase, row in _ROW_BY_PHASE.items() if row.is_running)


def mps_state(machine: Machine) -> MpsState:
    """The MPS state that is published for the daemon's phase."""
    return _ROW_BY_PHASE[machine.phase].state


def next_act(machine: Machine, now: float) -> Act:
    """The act that is due now, REST if no act is due."""
    return _ROW_BY_PHASE[machine.phase].act if now >= machine.act_due_at else Act.REST


def set_enabled(
    machine: Machine, enabled: bool, now: float, pace: DaemonPace, reason: str = "", *, unavailable: str = ""
) -> Machine:
    """The state machine after the daemon was enabled or disabled.

    reason: why it is disabled.
    unavailable: why MPS cannot run on the cards, if it is disabled for that.
    """
    may_check = machine.unavailable or now >= machine.act_due_at
    if machine.phase is DaemonPhase.UNAVAILABLE and not unavailable and may_check:
        return _enter_checking(replace(machine, enabled=enabled, unavailable=""), now)
    if (enabled, unavailable) == (machine.enabled, machine.unavailable):
        return machine
    machine = replace(machine, enabled=enabled, unavailable=unavailable)
    if machine.phase in (DaemonPhase.UNAVAILABLE, DaemonPhase.CHECKING):
        return _enter_unavailable(machine) if unavailable else machine
    if machine.phase is DaemonPhase.OFF and unavailable:
        return replace(machine, phase=DaemonPhase.RELEASING, act_due_at=now)
    if enabled:
        is_off = machine.phase in (DaemonPhase.OFF, DaemonPhase.RELEASING)
        return _enter_down(machine, now) if is_off else machine
    if machine.phase in RUNNING_PHASES - {DaemonPhase.QUITTING, DaemonPhase.DRAINING}:
        return _start_drain(machine, now, pace, unavailable or reason or "MPS is switched off on this GPU")
    # The daemon was not started, or waits for its next start: there is nothing to drain.
    return _enter_down(machine, now) if machine.phase in (DaemonPhase.DOWN, DaemonPhase.SPAWNING) else machine


def take_over(now: float, pace: DaemonPace) -> Machine:
    """The state machine of a running daemon that is taken over from a former manager."""
    return Machine(
        phase=DaemonPhase.AWAITING,
        reason="taken over from a former manager",
        phase_deadline=now + pace.start_timeout,
        act_due_at=now,
    )


def start_unavailable(reason: str) -> Machine:
    """The state machine for cards whose containers a former manager has let start without MPS.

    reason: why MPS cannot run; "" if it can run again.
    """
    return _enter_unavailable(Machine(enabled=False, unavailable=reason or "the MPS manager has restarted"))


def replace_daemon(now: float, pace: DaemonPace, reason: str) -> Machine:
    """The state machine of a running daemon that has to be replaced: the daemon is drained, and then ended."""
    return _start_drain(Machine(), now, pace, reason)


def next_machine(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    """The state machine after an act, or after the daemon has ended between two acts."""
    outcome, reason = act_result.outcome, act_result.reason
    if outcome is Outcome.DEAD and machine.phase in RUNNING_PHASES:
        if machine.phase in (DaemonPhase.QUITTING, DaemonPhase.DRAINING):
            return _enter_down(machine, now)
        return _enter_failed(machine, now, pace, reason or "the daemon died")
    match machine.phase:
        case DaemonPhase.OFF | DaemonPhase.UNAVAILABLE:
            return machine
        case DaemonPhase.DOWN:
            return _after_sweep(machine, act_result, now, pace)
        case DaemonPhase.SPAWNING:
            if outcome is Outcome.OK:
                return replace(
                    machine, phase=DaemonPhase.AWAITING, phase_deadline=now + pace.start_timeout, act_due_at=now
                )
            return _enter_failed(machine, now, pace, reason)
        case DaemonPhase.AWAITING | DaemonPhase.CONFIGURING | DaemonPhase.WARMING:
            return _after_start(machine, act_result, now, pace)
        case DaemonPhase.READY | DaemonPhase.SUSPECT | DaemonPhase.FAULT:
            return _after_probe(machine, act_result, now, pace)
        case DaemonPhase.DRAINING:
            if outcome is Outcome.TIMEOUT:
                return _start_kill(machine, now, reason)
            if outcome is Outcome.OK or now >= machine.phase_deadline:
                return replace(machine, phase=DaemonPhase.QUITTING, act_due_at=now, phase_deadline=math.inf)
            return replace(machine, act_due_at=now + min(1.0, pace.probe_interval))
        case DaemonPhase.QUITTING:
            return _enter_down(machine, now) if outcome is Outcome.OK else _start_kill(machine, now, reason)
        case DaemonPhase.KILLING:
            if outcome is Outcome.OK:
                return _enter_failed(machine, now, pace, machine.reason)
            return replace(machine, act_due_at=now + 1.0, reason=reason or machine.reason)
        case DaemonPhase.RELEASING:
            if outcome is not Outcome.OK:
                return replace(machine, act_due_at=now + pace.probe_interval, reason=reason)
            if machine.unavailable:
                return _enter_unavailable(machine)
            return replace(machine, phase=DaemonPhase.OFF, act_due_at=math.inf, phase_deadline=math.inf, reason="")
        case DaemonPhase.CHECKING:
            if outcome is Outcome.OK:
                return _enter_down(replace(machine, reason=""), now)
            # Enabled still: the manager has not observed yet what the check has found.
            return replace(_enter_unavailable(machine), reason=reason, act_due_at=now + SETTLE_SECONDS)


def _after_sweep(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    if act_result.outcome is Outcome.OK:
        return replace(
            machine, phase=DaemonPhase.SPAWNING if machine.enabled else DaemonPhase.RELEASING, act_due_at=now
        )
    if act_result.outcome is Outcome.BUSY:
        return replace(machine, act_due_at=now + _SWEEP_SECONDS, reason=act_result.reason)
    return _enter_failed(machine, now, pace, act_result.reason)


def _after_start(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    if act_result.outcome is Outcome.OK:
        if machine.phase is DaemonPhase.AWAITING:
            return replace(machine, phase=DaemonPhase.CONFIGURING, act_due_at=now)
        if machine.phase is DaemonPhase.CONFIGURING:
            return replace(machine, phase=DaemonPhase.WARMING, act_due_at=now, phase_deadline=now + pace.server_timeout)
        ready = replace(
            machine,
            phase=DaemonPhase.READY,
            reason="",
            act_due_at=now + pace.probe_interval,
            phase_deadline=math.inf,
            ready_since=now,
        )
        return replace(ready, fault_deadline=math.inf)
    if act_result.outcome is Outcome.FAULT:
        return _enter_fault(machine, now, pace, act_result.reason)
    if act_result.outcome is Outcome.FROZEN:  # the same rule as for a ready daemon
        machine = replace(machine, phase_deadline=min(machine.phase_deadline, now + pace.probe_timeout))
    if now >= machine.phase_deadline:
        return _start_kill(machine, now, f"not ready in time: {act_result.reason or machine.phase}")
    return replace(machine, act_due_at=now + _RETRY_SECONDS, reason=act_result.reason or machine.reason)


def _after_probe(machine: Machine, act_result: ActResult, now: float, pace: DaemonPace) -> Machine:
    match act_result.outcome:
        case Outcome.OK:
            failures = 0 if now - machine.ready_since >= pace.stable_after else machine.failures
            if machine.fault_deadline < math.inf:
                # The server has recovered by itself; check its settings first.
                return replace(
                    machine,
                    phase=DaemonPhase.CONFIGURING,
                    act_due_at=now,
                    phase_deadline=now + pace.start_timeout,
                    reason="",
                )
            ready = replace(
                machine, phase=DaemonPhase.READY, act_due_at=now + pace.probe_interval, phase_deadline=math.inf
            )
            return replace(ready, failures=failures, reason="")
        case Outcome.LOST:
            return replace(
                machine,
                phase=DaemonPhase.CONFIGURING,
                act_due_at=now,
                phase_deadline=now + pace.start_timeout,
                reason=act_result.reason,
            )
        case Outcome.FAULT:
            if now >= machine.fault_deadline:
                return _start_drain(machine, now, pace, f"the fault did not heal by itself: {act_result.reason}")
            return _enter_fault(machine, now, pace, act_result.reason)
        case Outcome.BUSY:
            return replace(
                machine,
                phase=DaemonPhase.WARMING,
                act_due_at=now,
                phase_deadline=now + pace.server_timeout,
                reason=act_result.reason,
            )
        case Outcome.FROZEN:
            # A frozen server is detected at once, so wait here for as long as a timeout takes.
            if machine.phase is not DaemonPhase.SUSPECT:
                machine = replace(machine, phase=DaemonPhase.SUSPECT, phase_deadline=now + pace.probe_timeout)
            elif now >= machine.phase_deadline:
                return _start_kill(machine, now, act_result.reason)
            return replace(machine, act_due_at=now + min(1.0, pace.probe_interval), reason=act_result.reason)
        case _:
            if machine.phase is not DaemonPhase.SUSPECT:
                return replace(
                    machine, phase=DaemonPhase.SUSPECT, act_due_at=now, phase_deadline=now, reason=act_result.reason
                )
            return _start_kill(machine, now, act_result.reason)


def _enter_fault(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    fault_deadline = min(machine.fault_deadline, now + pace.fault_grace)
    return replace(
        machine,
        phase=DaemonPhase.FAULT,
        act_due_at=now + min(1.0, pace.probe_interval),
        phase_deadline=fault_deadline,
        fault_deadline=fault_deadline,
        reason=reason,
    )


def _start_drain(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    return replace(
        machine, phase=DaemonPhase.DRAINING, act_due_at=now, phase_deadline=now + pace.drain_timeout, reason=reason
    )


def _start_kill(machine: Machine, now: float, reason: str) -> Machine:
    return replace(machine, phase=DaemonPhase.KILLING, act_due_at=now, phase_deadline=math.inf, reason=reason)


def _enter_unavailable(machine: Machine) -> Machine:
    return replace(
        machine,
        phase=DaemonPhase.UNAVAILABLE,
        reason=machine.unavailable,
        act_due_at=math.inf,
        phase_deadline=math.inf,
        fault_deadline=math.inf,
        failures=0,
    )


def _enter_checking(machine: Machine, now: float) -> Machine:
    reason = "MPS can run on the GPU again; looking for pods that run there without it"
    return replace(machine, phase=DaemonPhase.CHECKING, reason=reason, act_due_at=now + SETTLE_SECONDS)


def _enter_down(machine: Machine, now: float) -> Machine:
    """The state machine after the daemon has shut down cleanly: no failure, no back-off."""
    return replace(machine, phase=DaemonPhase.DOWN, act_due_at=now, phase_deadline=math.inf, fault_deadline=math.inf)


def _enter_failed(machine: Machine, now: float, pace: DaemonPace, reason: str) -> Machine:
    # No back-off if the daemon is not enabled, since it is not started.
    delay = min(pace.max_backoff, pace.backoff * 2 ** min(machine.failures, 30)) if machine.enabled else 0.0
    return replace(
        machine,
        phase=DaemonPhase.DOWN,
        act_due_at=now + delay,
        phase_deadline=math.inf,
        fault_deadline=math.inf,
        failures=machine.failures + 1,
        reason=reason,
    )
