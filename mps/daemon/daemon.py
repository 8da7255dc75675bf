"""One MPS daemon and its server: carries out what `machine` decides, in a thread of its own.

The thread is the only writer of the machine; others say what they want, and read what is.
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
from cardwise.core.values.wording import quoted
from cardwise.gpus.protocol import CardError, CardUse
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.daemon import computemode, directories, machine, units
from mps.daemon.ceilings import Ceilings
from mps.daemon.child import DaemonProcess
from mps.daemon.daemonlog import Output
from mps.daemon.machine import OK, Act, DaemonPace, DaemonPhase, Machine, Outcome, Result
from mps.daemon.orphans import OrphanSweeper
from mps.daemon.servers import Servers
from mps.daemon.strangers import Strangers
from mps.daemon.units import DaemonUnit
from mps.host.control import Client, CommandRefused, Control, ControlError, NoDaemon, Silent
from mps.host.drivers import Capabilities
from mps.host.processes import LOCAL, Host

_log = structlog.get_logger(__name__)

PERCENT = 100  # of the SMs: containers have limits of their own
_SLICE = 0.25  # seconds within which a death is noticed
_VERIFY_EVERY = 5  # probes


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """`cgroup`: the mounted cgroup root below which daemons live on their own, None: in ours."""

    control: Path
    pace: DaemonPace
    exclusive: bool
    cgroup: Path | None = None


class Daemon:
    """`start`, then `stop`. `on_change` is called from its thread when its status has changed.

    `clock` is one that other parts of the node read too: the state file says by it when the daemon was looked at.
    `whose`: a process for people, by its PID.
    """

    def __init__(
        self,
        unit: DaemonUnit,
        settings: DaemonSettings,
        use: CardUse,
        *,
        capabilities: Capabilities,
        driver: str,
        on_change: Callable[[], None],
        whose: Callable[[int], str] = str,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self.unit = unit
        self._settings = settings
        self._pace = settings.pace
        self._use = use
        self._capabilities = capabilities
        self._driver = driver
        self._on_change = on_change
        self._clock = clock
        self._environment = units.environment(unit, capabilities)
        self._control = Control(host.front_end(settings.control, self._environment), settings.pace.answer)
        self._machine = Machine()
        self._wanted = (True, "")
        self._ceilings = Ceilings(unit, self._control)
        self._enforced = False
        self._ill = False  # since it was ready last
        self._child = DaemonProcess(
            unit, settings.control, self._environment, cgroup=settings.cgroup, host=host, clock=clock
        )
        self._output = Output(unit.home / mps.LOG, unit.name)
        self._probes = 0
        self._servers = Servers(self._control, host, clock, tells_status=capabilities.server_status)
        self._sweeper = OrphanSweeper(unit, use, settings.pace.orphan_grace, host, clock)
        self._strangers = Strangers(unit, use, host, whose, clock)
        self._checked = 0.0
        self._written = -math.inf  # the state file
        self._status = self._make_status(self._clock.wall().timestamp())
        self._hurried = False  # a container may be waiting for its ceiling
        self._loop = Loop(
            "daemon",
            lambda: self._loop.soon(self.turn()),
            failed="a daemon is not looked after",
            failures=metrics.THREADS,
            every=_SLICE,
            clock=clock,
        )

    # What others ask and say.

    @property
    def status(self) -> Status:
        return self._status

    @property
    def running(self) -> bool:
        """Whether a daemon of ours is on the machine at present."""
        return self._child.running

    def want(self, wanted: bool, why: str = "") -> None:
        """Whether there is to be a daemon; without one the cards get their former compute modes back."""
        if self._wanted != (wanted, why):
            self._wanted = (wanted, why)
            self._loop.wake()

    def want_ceilings(self, ceilings: Mapping[str, MiB]) -> None:
        """The limits to set, by UUID. Until the first call the daemon keeps its own, or the whole cards."""
        if ceilings != self._ceilings.wanted:
            self._ceilings.wanted = dict(ceilings)
            self._hurried = True
            self._loop.wake()

    @property
    def past(self) -> frozenset[tuple[str, int]]:
        """Card and PID of those who came upon a card past MPS, at the last look; for any thread."""
        return self._strangers.found

    def clients(self) -> list[Client]:
        """Raises ControlError."""
        return [client for server in self._control.servers() for client in self._control.clients(server)]

    def detach(self, client: Client, why: str) -> None:
        """Takes a client off its server, after which it may be killed. Raises ControlError."""
        self._control.terminate(client)
        metrics.DETACHED.labels(self.unit.name, why).inc()
        _log.info("client detached", card=self.unit.name, pid=client.pid, server=client.server, why=why)

    def start(self) -> None:
        self.begin()
        self._loop.start()

    def stop(self) -> None:
        """Ends the thread, not the daemon: see `want`."""
        self._loop.stop(self._pace.answer * 3 + self._pace.quit_grace + 5.0)
        self._output.close()
        self._child.leave()

    # The thread.

    def begin(self) -> None:
        """Takes over what a former manager left."""
        try:
            directories.prepare(self.unit.home)
            self._output.open()
        except OSError as error:
            _log.error("a daemon's folder cannot be made", card=self.unit.name, error=str(error))
        self._publish()
        if not self._child.take_over():
            return
        now = self._clock.now()
        if self._child.fits():
            _log.info("daemon taken over", card=self.unit.name, pid=self._child.pid)
            self._become(machine.adopted(now, self._pace))
        else:
            self._become(machine.replaced(now, self._pace, "the daemon of a former manager serves other cards"))

    def turn(self) -> float:
        """Does what is due; for how many seconds there is nothing more to do unless somebody wakes it."""
        hurried, self._hurried = self._hurried, False
        now = self._clock.now()
        wanted, why = self._wanted
        self._become(machine.want(self._machine, wanted, now, self._pace, why))
        self._output.pump()
        if self._machine.phase in machine.RUNNING and not self._child.alive():
            self._bury(now)
            return 0.0
        act = machine.plan(self._machine, now)
        if act is Act.REST and hurried and self._machine.phase is DaemonPhase.READY and self._ceilings.behind:
            act = Act.PROBE
        if act is Act.REST:
            if now - self._written >= self._pace.probe:
                off = self._machine.phase is DaemonPhase.OFF
                if off:
                    self._perform(Act.RELEASE)  # a card that did not answer when the others were opened
                self._publish(looked=off)
            return min(_SLICE, max(0.0, self._machine.due - now))
        result = self._perform(act)
        self._become(machine.after(self._machine, result, self._clock.now(), self._pace))
        return 0.0

    def _bury(self, now: float) -> None:
        code = self._child.code
        if self._machine.phase is DaemonPhase.AWAITING:
            self._doubt_options()
        self._child.forget()
        reason = "the daemon died" if code is None else f"the daemon ended with rc {code}; its output is in the log"
        self._become(machine.after(self._machine, Result(Outcome.DEAD, reason), now, self._pace))

    def _doubt_options(self) -> None:
        """After the end of a daemon that has said nothing: rc 0 is how one answers an option that it does not know."""
        if self._child.code == 0 and self._capabilities.multi_user:
            _log.warning("the daemon does not take -multiuser-server; going on without", card=self.unit.name)
            self._capabilities = self._capabilities.without_multi_user()

    def _perform(self, act: Act) -> Result:
        try:
            return self._acts()[act]()
        except NoDaemon as error:
            return Result(Outcome.FAILED if self._child.alive() else Outcome.DEAD, str(error))
        except Silent as error:
            return Result(Outcome.SILENT, str(error))
        except (ControlError, CardError, OSError) as error:
            return Result(Outcome.FAILED, str(error))

    def _acts(self) -> dict[Act, Callable[[], Result]]:
        return {
            Act.SWEEP: self._sweep,
            Act.SPAWN: self._spawn,
            Act.ASK: self._ask,
            Act.CONFIGURE: self._configure,
            Act.WARM: self._warm,
            Act.PROBE: self._probe,
            Act.DETACH: self._detach_all,
            Act.QUIT: self._quit,
            Act.KILL: self._kill,
            Act.RELEASE: self._release,
        }

    def _become(self, new: Machine) -> None:
        old, self._machine = self._machine, new
        if new.failures > old.failures:
            metrics.FAILURES.labels(self.unit.name).inc()
            self._ill = True
        if new.phase in (DaemonPhase.FAULT, DaemonPhase.SUSPECT):
            self._ill = True
        elif new.phase is DaemonPhase.READY and self._ill:
            metrics.HEALS.labels(self.unit.name).inc()
            self._ill = False
        if new.phase in (DaemonPhase.READY, DaemonPhase.OFF):
            self._strangers.none()
        if old.phase is new.phase:
            if new.reason != old.reason:
                self._publish()
            return
        if new.phase is DaemonPhase.FAULT:
            metrics.FAULTS.labels(self.unit.name).inc()
        before, after = machine.state_of(old), machine.state_of(new)
        level = (
            _log.info if after in (MpsState.READY, MpsState.STARTING, MpsState.OFF) or before is after else _log.warning
        )
        level("MPS", card=self.unit.name, phase=str(new.phase), state=str(after), reason=new.reason)
        self._publish(looked=new.phase is DaemonPhase.OFF)

    # The acts.

    def _sweep(self) -> Result:
        swept = self._sweeper.sweep()
        if not (self._machine.wanted and self._settings.exclusive):
            return swept
        if swept.outcome is not Outcome.OK:
            self._strangers.served()
            return swept
        # Closed now, so that nobody more comes while we wait for those who are there.
        self._close()
        return self._strangers.without_server() or swept

    def _spawn(self) -> Result:
        directories.prepare(self.unit.home)
        directories.renew(self.unit.home)
        self._close()
        metrics.STARTS.labels(self.unit.name).inc()
        self._ceilings.forget()
        self._servers.forget()
        self._strangers.tries()
        if self._child.start(self._capabilities.options, self._output.open()):
            return OK
        self._output.pump()
        self._doubt_options()
        return Result(Outcome.FAILED, f"the daemon ended at once with rc {self._child.code}; its output is in the log")

    def _ask(self) -> Result:
        self._control.servers()
        self._ceilings.adopt()
        return OK

    def _configure(self) -> Result:
        self._close()
        self._control.set_percentage(PERCENT)
        self._apply_ceilings()
        # Not sooner: a client without a limit of its own would get the whole card. Every way to Ready comes by here.
        directories.share(self.unit.home)
        self._probes = 0
        return OK

    def _warm(self) -> Result:
        past = self._strangers.beside(self.clients) if self._settings.exclusive else None
        return past or self._good(self._servers.warm())

    def _probe(self) -> Result:
        began = self._clock.now()
        outcome = Outcome.FAILED
        try:
            result = self._look()
            outcome = result.outcome
        except Silent:
            outcome = Outcome.SILENT
            raise
        finally:
            metrics.PROBE.labels(outcome).observe(self._clock.now() - began)
        if result.outcome is Outcome.LOST:
            metrics.LOST.labels(self.unit.name).inc()
        return result

    def _look(self) -> Result:
        result = self._good(self._servers.look())
        if result.outcome is not Outcome.OK or self._machine.phase is not DaemonPhase.READY:
            return result
        self._probes += 1
        if self._probes % _VERIFY_EVERY == 0:
            clients = self.clients()
            self._strangers.clients(client.pid for client in clients)
            metrics.CLIENTS.labels(self.unit.name).set(len(clients))
            if (lost := self._lost()) is not None:
                return Result(Outcome.LOST, lost)
        if self._ceilings.behind:
            self._apply_ceilings()
        return OK

    def _good(self, result: Result) -> Result:
        """Where it is well, that was seen just now; the state file says so at the next rest."""
        if result.outcome is Outcome.OK:
            self._checked = self._clock.now()
            self._written = -math.inf
        return result

    def _lost(self) -> str | None:
        if (said := self._control.percentage()) != f"{PERCENT:.1f}":
            return f"the daemon's percentage is {quoted(said)}, not {PERCENT}: somebody has changed it"
        if changed := self._ceilings.changed():
            return changed
        if self._settings.exclusive and not computemode.is_closed(self._use, self.unit.uuids):
            return "the card's compute mode was changed"
        return None

    def _detach_all(self) -> Result:
        clients = self.clients()
        self._strangers.clients(client.pid for client in clients)
        for client in clients:
            with contextlib.suppress(CommandRefused):
                self.detach(client, "drain")
        return OK if not clients else Result(Outcome.BUSY, self._machine.reason)

    def _quit(self) -> Result:
        grace = self._pace.quit_grace
        with contextlib.suppress(ControlError):  # its end is judged by the process
            self._control.quit(max(1, round(grace)), grace + self._pace.answer)
        if self._child.gone(self._pace.answer):
            return OK
        return Result(Outcome.FAILED, "the daemon did not quit")

    def _kill(self) -> Result:
        if self._child.running:
            _log.warning("killing the daemon", card=self.unit.name, pid=self._child.pid, reason=self._machine.reason)
        if self._child.kill():
            return OK
        return Result(Outcome.FAILED, "the daemon does not even end when killed")

    def _release(self) -> Result:
        problems = computemode.reopen(self.unit.home, self._use)
        self._enforced = False
        return Result(Outcome.FAILED, "; ".join(problems)) if problems else OK

    # Helpers.

    def _close(self) -> None:
        if self._settings.exclusive:
            computemode.close(self.unit.home, self._use, self.unit.uuids)
        self._enforced = self._settings.exclusive

    def _apply_ceilings(self) -> None:
        self._ceilings.apply()
        self._publish()

    def _make_status(self, since: float) -> Status:
        pace = self._pace
        return Status(
            uuids=self.unit.uuids,
            scope=self.unit.scope,
            state=machine.state_of(self._machine),
            reason=self._machine.reason,
            since=since,
            checked=self._checked,
            valid_seconds=2 * (pace.probe + pace.answer) + 2.0,
            driver=self._driver,
            multi_user=self._capabilities.multi_user,
            enforced=self._enforced,
            ceilings=dict(self._ceilings.confirmed),
            daemon_pid=self._child.pid,
            manager_pid=os.getpid(),
            max_clients=min(self._capabilities.most_clients(card) for card in self.unit.cards),
        )

    def _publish(self, *, looked: bool = False) -> None:
        """`looked`: that it is so is certain now, without a daemon to ask."""
        if looked:
            self._checked = self._clock.now()
        before = self._status
        new = self._make_status(before.since)
        if new.state is not before.state:
            new = self._make_status(self._clock.wall().timestamp())
        self._status = new
        self._written = self._clock.now()
        metrics.tell_state(self.unit.name, new.state)
        try:
            directories.write_status(self.unit.home, new)
        except OSError as error:
            # It goes stale by itself, and nothing starts.
            _log.error("the state file was not written", card=self.unit.name, error=str(error))
        if any(mps.wire(new, uuid) != mps.wire(before, uuid) for uuid in self.unit.uuids):
            self._on_change()
