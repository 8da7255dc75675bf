"""Runs one MPS daemon and its servers as `machine` decides, in its own thread.

Only this thread changes the state machine. Other threads set the desired state and ceilings, and read the status.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState, Status
from cardwise.core.values.quantity import MiB
from cardwise.core.values.wording import quote_text
from cardwise.gpus.protocol import CardControl, CardError
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.daemon import computemode, directories, machine, units
from mps.daemon.ceilings import Ceilings
from mps.daemon.child import DaemonProcess
from mps.daemon.daemonlog import DaemonOutput
from mps.daemon.foreignprocesses import ForeignProcesses
from mps.daemon.machine import OK_RESULT, Act, ActResult, DaemonPace, DaemonPhase, Machine, Outcome
from mps.daemon.orphanedservers import OrphanedServerSweeper
from mps.daemon.servers import Servers
from mps.daemon.units import DaemonUnit
from mps.host.control import Client, CommandRefused, Control, ControlError, DaemonTimeout, NoDaemon
from mps.host.drivers import MpsCapabilities
from mps.host.processes import LOCAL, Host

_log = structlog.get_logger(__name__)

DEFAULT_SM_PERCENT = 100  # the daemon's default percentage: no limit, since containers have their own limits
_POLL_SECONDS = 0.25  # maximum time until the end of the daemon is noticed
_PROBES_PER_VERIFICATION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Settings of a daemon.

    control: the program nvidia-cuda-mps-control.
    exclusive: whether cards are closed (compute mode EXCLUSIVE_PROCESS) while the daemon serves them.
    cgroup: the mounted cgroup root below which the daemon runs; None: in the manager's cgroup.
    """

    control: Path
    pace: DaemonPace
    exclusive: bool
    cgroup: Path | None = None


class Daemon:
    """One MPS daemon.

    on_change: called from the daemon's thread when the status has changed.
    clock: a clock that all processes of the node share, since the state file has the time of the last check.
    describe_process: returns a string that describes the process with this PID.
    holders_problem: returns why pods may hold the cards, by a new answer of the API server; None if no pod holds them.
    """

    def __init__(
        self,
        unit: DaemonUnit,
        settings: DaemonSettings,
        card_control: CardControl,
        *,
        capabilities: MpsCapabilities,
        driver: str,
        on_change: Callable[[], None],
        describe_process: Callable[[int], str] = str,
        holders_problem: Callable[[], str | None] = lambda: None,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self.unit = unit
        self._settings = settings
        self._pace = settings.pace
        self._card_control = card_control
        self._capabilities = capabilities
        self._driver = driver
        self._on_change = on_change
        self._holders_problem = holders_problem
        self._clock = clock
        self._environment = units.daemon_environment(unit)
        self._control = Control(host.front_end(settings.control, self._environment), settings.pace.probe_timeout)
        self._note = unit.home / mps.UNAVAILABLE_FILE
        self._machine = Machine()
        self._desired_state = (True, "", "")
        self._ceilings = Ceilings(unit, self._control)
        self._enforced = False
        self._is_unhealthy = False  # whether the daemon has failed since it was ready last
        self._child = DaemonProcess(
            unit, settings.control, self._environment, cgroup=settings.cgroup, host=host, clock=clock
        )
        self._output = DaemonOutput(unit.home / mps.LOG_FOLDER, unit.name)
        self._probes = 0
        self._servers = Servers(self._control, host, clock, has_status_command=capabilities.server_status)
        self._sweeper = OrphanedServerSweeper(unit, card_control, settings.pace.orphan_grace, host, clock)
        self._foreign_processes = ForeignProcesses(unit, card_control, host, describe_process, clock)
        self._checked_at = 0.0
        self._state_written_at = -math.inf  # time of the last write of the state file
        self._status = self._make_status(self._clock.wall().timestamp())
        self._ceilings_changed = False  # if so, a container may be waiting for its ceiling
        self._loop = Loop(
            "daemon",
            lambda: self._loop.run_within(self.step()),
            failed="failed to run an MPS daemon",
            failures=metrics.THREAD_FAILURES,
            every=_POLL_SECONDS,
            clock=clock,
        )

    # Methods for other threads.

    @property
    def status(self) -> Status:
        return self._status

    @property
    def is_running(self) -> bool:
        """Whether the daemon runs, as last observed."""
        return self._child.is_running

    @property
    def admits_without_mps(self) -> bool:
        """Whether containers may have started without MPS because MPS was unavailable."""
        return self._note.exists()

    def note_starts_without_mps(self) -> None:
        """Note that containers have started without MPS, before a manager came to the node. Raises OSError."""
        directories.create_open_folder(self.unit.home)
        self._note.touch()

    def set_enabled(self, enabled: bool, reason: str = "") -> None:
        """Set whether the daemon should run. After the daemon's end, the cards get their former compute modes back."""
        self._set_desired_state((enabled, reason, ""))

    def set_unavailable(self, reason: str) -> None:
        """Set that MPS cannot run on the cards. When the daemon has ended, containers may start without MPS."""
        self._set_desired_state((False, "", reason))

    def _set_desired_state(self, desired_state: tuple[bool, str, str]) -> None:
        if self._desired_state != desired_state:
            self._desired_state = desired_state
            self._loop.wake()

    def set_ceilings(self, ceilings: Mapping[str, MiB]) -> None:
        """Set the desired memory limits, by UUID. Until the first call the daemon keeps its limits, or has none."""
        if ceilings != self._ceilings.desired:
            self._ceilings.desired = dict(ceilings)
            self._ceilings_changed = True
            self._loop.wake()

    @property
    def foreign_processes(self) -> frozenset[tuple[str, int]]:
        """Card and PID of the processes that bypass MPS, as of the last check. Thread-safe."""
        return self._foreign_processes.processes

    def clients(self) -> list[Client]:
        """The clients of all servers of the daemon. Raises ControlError."""
        return [client for server in self._control.servers() for client in self._control.clients(server)]

    def detach(self, client: Client, reason: str) -> None:
        """Detach a client from its server. Afterwards the client can be killed safely. Raises ControlError."""
        self._control.terminate(client)
        metrics.CLIENTS_DETACHED.labels(self.unit.name, reason).inc()
        _log.info("detached a client", card=self.unit.name, pid=client.pid, server=client.server, reason=reason)

    def start(self) -> None:
        self.take_over()
        self._loop.start()

    def stop(self) -> None:
        """Stop the thread. The daemon keeps running; `set_enabled` ends it."""
        self._loop.stop(self._pace.probe_timeout * 3 + self._pace.quit_grace + 5.0)
        self._output.close()
        self._child.abandon()

    # Methods for the daemon's own thread.

    def take_over(self) -> None:
        """Take over the daemon of a former manager, if there is one."""
        try:
            directories.prepare_folders(self.unit.home)
            self._output.open()
        except OSError as error:
            _log.error("failed to create the folder of a daemon", card=self.unit.name, error=str(error))
        is_running = self._child.take_over()
        if not is_running and self.admits_without_mps:
            self._machine = machine.start_unavailable(self._desired_state[2])
        self._publish()
        if not is_running:
            return
        now = self._clock.now()
        if self._child.has_same_cards():
            _log.info("took over a daemon", card=self.unit.name, pid=self._child.pid)
            self._transition(machine.take_over(now, self._pace))
        else:
            self._transition(
                machine.replace_daemon(now, self._pace, "the daemon of a former manager serves other GPUs")
            )

    def step(self) -> float:
        """Perform the act that is due. Returns the seconds until the next step; a change wakes the thread earlier."""
        ceilings_changed, self._ceilings_changed = self._ceilings_changed, False
        now = self._clock.now()
        enabled, reason, unavailable = self._desired_state
        self._transition(machine.set_enabled(self._machine, enabled, now, self._pace, reason, unavailable=unavailable))
        self._output.copy_lines()
        if self._machine.phase in machine.RUNNING_PHASES and not self._child.is_alive():
            self._handle_death(now)
            return 0.0
        act = machine.next_act(self._machine, now)
        if (
            act is Act.REST
            and ceilings_changed
            and self._machine.phase is DaemonPhase.READY
            and self._ceilings.is_outdated
        ):
            act = Act.PROBE
        if act is Act.REST:
            if now - self._state_written_at >= self._pace.probe_interval:
                is_open = self._machine.phase in (DaemonPhase.OFF, DaemonPhase.UNAVAILABLE)
                if is_open:
                    self._perform(Act.RELEASE)  # reopens a card that did not answer earlier
                self._publish(confirmed=is_open)
            return min(_POLL_SECONDS, max(0.0, self._machine.act_due_at - now))
        act_result = self._perform(act)
        self._transition(machine.next_machine(self._machine, act_result, self._clock.now(), self._pace))
        return 0.0

    def _handle_death(self, now: float) -> None:
        return_code = self._child.return_code
        if self._machine.phase is DaemonPhase.AWAITING:
            self._drop_multi_user()
        self._child.forget_process()
        reason = (
            "the daemon died"
            if return_code is None
            else f"the daemon ended with rc {return_code}; its output is in the log"
        )
        self._transition(machine.next_machine(self._machine, ActResult(Outcome.DEAD, reason), now, self._pace))

    def _drop_multi_user(self) -> None:
        """Drop -multiuser-server if the daemon exited with 0 before it answered: then it does not know the option."""
        if self._child.return_code == 0 and self._capabilities.multi_user:
            _log.warning("the daemon does not support -multiuser-server; starting it without", card=self.unit.name)
            self._capabilities = self._capabilities.without_multi_user()

    def _perform(self, act: Act) -> ActResult:
        try:
            return self._act_methods()[act]()
        except NoDaemon as error:
            return ActResult(Outcome.FAILED if self._child.is_alive() else Outcome.DEAD, str(error))
        except DaemonTimeout as error:
            return ActResult(Outcome.TIMEOUT, str(error))
        except (ControlError, CardError, OSError) as error:
            return ActResult(Outcome.FAILED, str(error))

    def _act_methods(self) -> dict[Act, Callable[[], ActResult]]:
        return {
            Act.SWEEP: self._sweep,
            Act.SPAWN: self._spawn,
            Act.CONTACT: self._contact,
            Act.CONFIGURE: self._configure,
            Act.WARM: self._warm,
            Act.PROBE: self._probe,
            Act.DETACH: self._detach_all,
            Act.QUIT: self._quit,
            Act.KILL: self._kill,
            Act.RELEASE: self._release,
            Act.CHECK: self._check_holders,
        }

    def _transition(self, new_machine: Machine) -> None:
        old_machine, self._machine = self._machine, new_machine
        if new_machine.failures > old_machine.failures:
            metrics.DAEMON_FAILURES.labels(self.unit.name).inc()
            self._is_unhealthy = True
        if new_machine.phase in (DaemonPhase.FAULT, DaemonPhase.SUSPECT):
            self._is_unhealthy = True
        elif new_machine.phase is DaemonPhase.READY and self._is_unhealthy:
            metrics.RECOVERIES.labels(self.unit.name).inc()
            self._is_unhealthy = False
        if new_machine.phase in (DaemonPhase.READY, DaemonPhase.OFF, DaemonPhase.UNAVAILABLE):
            self._foreign_processes.clear()
        if old_machine.phase is new_machine.phase:
            if new_machine.reason != old_machine.reason:
                self._publish()
            return
        if new_machine.phase is DaemonPhase.FAULT:
            metrics.SERVER_FAULTS.labels(self.unit.name).inc()
        old_state, new_state = machine.mps_state(old_machine), machine.mps_state(new_machine)
        log = (
            _log.info
            if new_state in (MpsState.READY, MpsState.STARTING, MpsState.OFF, MpsState.UNAVAILABLE)
            or old_state is new_state
            else _log.warning
        )
        log("MPS", card=self.unit.name, phase=str(new_machine.phase), state=str(new_state), reason=new_machine.reason)
        self._publish(confirmed=new_machine.phase is DaemonPhase.OFF)

    # The acts, which the machine requests.

    def _sweep(self) -> ActResult:
        sweep_result = self._sweeper.sweep()
        if not (self._machine.enabled and self._settings.exclusive):
            return sweep_result
        if sweep_result.outcome is not Outcome.OK:
            self._foreign_processes.set_all_as_clients()
            return sweep_result
        # Close the cards now, so that no further process opens them while the present processes end.
        self._close_cards()
        return self._foreign_processes.start_block_result() or sweep_result

    def _spawn(self) -> ActResult:
        directories.prepare_folders(self.unit.home)
        directories.reset_pipe(self.unit.home)
        self._close_cards()
        metrics.DAEMON_STARTS.labels(self.unit.name).inc()
        self._ceilings.forget_confirmed()
        self._servers.forget_servers()
        self._foreign_processes.mark_start_tried()
        if self._child.start(self._capabilities.options, self._output.open()):
            return OK_RESULT
        self._output.copy_lines()
        self._drop_multi_user()
        return ActResult(
            Outcome.FAILED, f"the daemon ended at once with rc {self._child.return_code}; its output is in the log"
        )

    def _contact(self) -> ActResult:
        self._control.servers()
        self._ceilings.adopt_ceilings()
        return OK_RESULT

    def _configure(self) -> ActResult:
        self._close_cards()
        self._control.set_percentage(DEFAULT_SM_PERCENT)
        self._apply_ceilings()
        # Clients may connect only after the ceilings are set: without a ceiling, a client that has no limit of its own
        # would get the whole card.
        directories.open_to_clients(self.unit.home)
        self._probes = 0
        return OK_RESULT

    def _warm(self) -> ActResult:
        foreign_processes = (
            self._foreign_processes.server_block_result(self.clients) if self._settings.exclusive else None
        )
        return foreign_processes or self._record_check(self._servers.ensure_server())

    def _probe(self) -> ActResult:
        started = self._clock.now()
        outcome = Outcome.FAILED
        try:
            act_result = self._check_health()
            outcome = act_result.outcome
        except DaemonTimeout:
            outcome = Outcome.TIMEOUT
            raise
        finally:
            metrics.PROBE_SECONDS.labels(outcome).observe(self._clock.now() - started)
        if act_result.outcome is Outcome.LOST:
            metrics.SETTINGS_LOST.labels(self.unit.name).inc()
        return act_result

    def _check_health(self) -> ActResult:
        act_result = self._record_check(self._servers.check_servers())
        if act_result.outcome is not Outcome.OK or self._machine.phase is not DaemonPhase.READY:
            return act_result
        self._probes += 1
        if self._probes % _PROBES_PER_VERIFICATION == 0:
            clients = self.clients()
            self._foreign_processes.set_clients(client.pid for client in clients)
            metrics.CLIENTS.labels(self.unit.name).set(len(clients))
            if (lost_reason := self._lost_settings_reason()) is not None:
                return ActResult(Outcome.LOST, lost_reason)
        if self._ceilings.is_outdated:
            self._apply_ceilings()
        return OK_RESULT

    def _record_check(self, act_result: ActResult) -> ActResult:
        """Record the time of a successful check; the state file is written once no act is due."""
        if act_result.outcome is Outcome.OK:
            self._checked_at = self._clock.now()
            self._state_written_at = -math.inf
        return act_result

    def _lost_settings_reason(self) -> str | None:
        if (answer := self._control.percentage()) != f"{DEFAULT_SM_PERCENT:.1f}":
            return (
                f"the daemon's percentage is {quote_text(answer)}, not {DEFAULT_SM_PERCENT}: "
                "another program has changed it"
            )
        if change := self._ceilings.change_reason():
            return change
        if self._settings.exclusive and not computemode.are_closed(self._card_control, self.unit.uuids):
            return "the GPU's compute mode was changed"
        return None

    def _detach_all(self) -> ActResult:
        clients = self.clients()
        self._foreign_processes.set_clients(client.pid for client in clients)
        for client in clients:
            with contextlib.suppress(CommandRefused):
                self.detach(client, "draining")
        return OK_RESULT if not clients else ActResult(Outcome.BUSY, self._machine.reason)

    def _quit(self) -> ActResult:
        grace = self._pace.quit_grace
        with contextlib.suppress(ControlError):  # only the end of the process shows success
            self._control.quit(max(1, round(grace)), grace + self._pace.probe_timeout)
        if self._child.wait_ended(self._pace.probe_timeout):
            return OK_RESULT
        return ActResult(Outcome.FAILED, "the daemon did not quit")

    def _kill(self) -> ActResult:
        if self._child.is_running:
            _log.warning("killing the daemon", card=self.unit.name, pid=self._child.pid, reason=self._machine.reason)
        if self._child.kill():
            return OK_RESULT
        return ActResult(Outcome.FAILED, "the daemon does not end when killed")

    def _release(self) -> ActResult:
        problems = computemode.reopen_cards(self.unit.home, self._card_control, self.unit.uuids)
        self._enforced = False
        if problems:
            return ActResult(Outcome.FAILED, "; ".join(problems))
        if self._machine.unavailable:
            self._note.touch()  # before a container can start without MPS
        return OK_RESULT

    def _check_holders(self) -> ActResult:
        """Check that no pod runs without MPS on the cards. No further container starts there without MPS.

        The check reads a new list from the API server, because the manager's watch may be late. The list has every pod
        with a container that started without MPS: these pods were bound before the state file was replaced.
        """
        if problem := self._holders_problem():
            return ActResult(Outcome.BUSY, problem)
        return OK_RESULT

    # Helpers of the methods that perform an `Act`.

    def _close_cards(self) -> None:
        self._note.unlink(missing_ok=True)
        if self._settings.exclusive:
            computemode.close_cards(self.unit.home, self._card_control, self.unit.uuids)
        self._enforced = self._settings.exclusive

    def _apply_ceilings(self) -> None:
        self._ceilings.apply_ceilings()
        self._publish()

    def _make_status(self, since: float) -> Status:
        pace = self._pace
        return Status(
            uuids=self.unit.uuids,
            scope=self.unit.scope,
            state=machine.mps_state(self._machine),
            reason=self._machine.reason,
            since=since,
            checked=self._checked_at,
            valid_seconds=2 * (pace.probe_interval + pace.probe_timeout) + 2.0,
            driver=self._driver,
            multi_user=self._capabilities.multi_user,
            enforced=self._enforced,
            ceilings=dict(self._ceilings.confirmed),
            daemon_pid=self._child.pid,
            manager_pid=os.getpid(),
            max_clients=min(self._capabilities.max_clients(card) for card in self.unit.cards),
        )

    def _publish(self, *, confirmed: bool = False) -> None:
        """Update the status and the state file.

        confirmed: whether the status is known to be true now, although no command was sent to the daemon.
        """
        if confirmed:
            self._checked_at = self._clock.now()
        old_status = self._status
        new_status = self._make_status(old_status.since)
        if new_status.state is not old_status.state:
            new_status = self._make_status(self._clock.wall().timestamp())
        self._status = new_status
        self._state_written_at = self._clock.now()
        metrics.set_state(self.unit.name, new_status.state)
        try:
            directories.write_status(self.unit.home, new_status)
        except OSError as error:
            # The old file becomes stale, so no container starts.
            _log.error("failed to write the state file", card=self.unit.name, error=str(error))
        if any(mps.status_fields(new_status, uuid) != mps.status_fields(old_status, uuid) for uuid in self.unit.uuids):
            self._on_change()
