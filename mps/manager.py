"""Runs the MPS daemons of a node: which there are, their limits, and which clients are detached when a pod ends."""

import contextlib
import fcntl
import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState, Scope, Status
from cardwise.gpus import mpsfiles
from cardwise.gpus.protocol import CardUse, GpuCard, Gpus
from cardwise.gpus.selection import NonMigGpus
from cardwise.kube.client import KubeClient
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.audit.audit import Audit, AuditSettings
from mps.audit.owners import Owners
from mps.daemon import computemode, directories
from mps.daemon.daemon import Daemon, DaemonSettings
from mps.daemon.machine import DaemonPace
from mps.daemon.termination import Terminations
from mps.daemon.units import DaemonUnit
from mps.host import drivers
from mps.host.control import CommandRefused, ControlError
from mps.host.pods import Demand, PodView, demands, following, indexed, wanted_ceilings
from mps.host.processes import LOCAL, Host
from mps.publication import Publication

_log = structlog.get_logger(__name__)

_EVERY_SECONDS = 1.0
_DETACH_AGAIN = 1.0  # a process may open the card after the first look
_STUCK_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """`stop_daemons`: idle, always, never; see docs/design/0005-mps.md. `driver`: "" to take it from the cards.

    `audit`: None for none.
    """

    node: str
    root: Path
    scope: Scope
    control: Path
    pace: DaemonPace
    exclusive: bool
    stop_daemons: str
    detach_before: float
    cgroup: Path | None = None
    driver: str = ""
    audit: AuditSettings | None = None


class RootTaken(Exception):
    """Another manager holds the root."""


class Lock:
    """The manager's lock: it goes with the process, so whoever finds it free knows that no manager lives."""

    def __init__(self, root: Path) -> None:
        """Raises OSError."""
        directories.make_open(root)
        self._path = root / mps.LOCK
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self) -> None:
        """Raises RootTaken."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RootTaken from error

    def lost(self) -> bool:
        """Whether its file is not the one at its place any more: who looks there takes the manager for gone."""
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        os.close(self._descriptor)


class Manager:
    """`start`, then `stop`. The lock must be held from before the first to after the last."""

    def __init__(
        self,
        settings: ManagerSettings,
        client: KubeClient,
        gpus: Gpus,
        use: CardUse,
        *,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self._settings = settings
        self._all_gpus = gpus
        self._gpus = NonMigGpus(gpus)
        self._use = use
        self._host = host
        self._clock = clock
        self._stopped = False
        self._lock = threading.Lock()
        self._daemons: dict[Path, Daemon] = {}
        self._leaving: set[Path] = set()  # homes whose daemon is to end, whatever pods say
        self._found: tuple[int, tuple[str, ...]] | None = None  # the node's daemon of a former manager: PID, its cards
        self._swept = False  # whether what a former manager left is gone
        self._terminations = Terminations(settings.detach_before)
        self._turned = clock.now()
        self._loop = Loop(
            "manager",
            lambda: self._loop.soon(self.turn()),
            failed="the node's MPS is not looked after",
            failures=metrics.THREADS,
            every=_EVERY_SECONDS,
            clock=clock,
        )
        self._cards = Loop(
            "cards",
            self._watch_cards,
            failed="the cards are not watched",
            failures=metrics.THREADS,
            every=0.0,
            clock=clock,
        )
        self.pods = following(client, settings.node, self._loop.wake, clock)
        self._publication = Publication(client, settings.node, self.statuses, clock)
        self._audit = None
        if settings.audit is not None:
            self._audit = Audit(
                settings.audit,
                client,
                node=settings.node,
                gpus=self._gpus,
                use=use,
                pods=self.pods,
                past=lambda: {one for daemon in self.daemons() for one in daemon.past},
                host=self._host,
                clock=clock,
            )

    def start(self) -> None:
        self.begin()
        self.pods.start()
        self._publication.start()
        if self._audit is not None:
            self._audit.start()
        self._loop.start()
        self._cards.start()

    def stop(self) -> None:
        """Daemons whose cards are held go on for the next manager, unless the setting says otherwise."""
        if self._audit is not None:
            self._audit.stop()
        self._loop.stop(_STOP_SECONDS)
        self._cards.stop(_STOP_SECONDS)
        daemons = self.daemons()
        ending = [daemon for daemon in daemons if self._may_end(daemon)]
        for daemon in ending:
            daemon.want(False, "the MPS manager stops")
        pace = self._settings.pace
        deadline = self._clock.now() + pace.drain + pace.quit_grace + pace.answer * 3
        while any(daemon.status.state is not MpsState.OFF for daemon in ending) and self._clock.now() < deadline:
            self._clock.sleep(_LOOK_SECONDS)
        for daemon in daemons:
            daemon.stop()
        self._stopped = True
        self._publication.stop()
        self.pods.stop()

    def statuses(self) -> dict[str, Status]:
        """The status of each card, by UUID."""
        found = {uuid: daemon.status for daemon in self.daemons() for uuid in daemon.status.uuids}
        if not self._stopped:
            return found
        return {
            uuid: replace(
                status, state=MpsState.DOWN, reason="the MPS manager has stopped", since=self._clock.wall().timestamp()
            )
            for uuid, status in found.items()
        }

    def problems(self) -> Sequence[str]:
        """Why it is not ready, a line each. One sick card is not: it is published, and the others are served."""
        found = [] if self.pods.synced else ["the pods of this node are not known yet"]
        if self._publication.problem:
            found.append(self._publication.problem)
        statuses = self.statuses()
        well = (MpsState.READY, MpsState.OFF)
        if statuses and all(status.state not in well for status in statuses.values()):
            uuid, status = next(iter(statuses.items()))
            found.append(f"no card's MPS is ready; {uuid} is {status.state}: {status.reason}")
        return found

    def stuck(self) -> Sequence[str]:
        """Why it should be restarted, a line each."""
        silent = self._clock.now() - self._turned
        return [f"the manager's thread has not come round for {silent:.0f} s"] if silent > _STUCK_SECONDS else []

    def detach(self, pods: Sequence[PodView]) -> int:
        """Takes the clients of ending pods off their servers, after which they may be killed. How many it took off.

        A tenant can make the daemon of his card silent, and pods on other cards have only seconds left. So each daemon
        is asked once for all pods, only if one of them has a share of its cards, and last if it is not ready.
        """
        owners = self._owners()
        detached: Counter[str] = Counter()  # by the pod's UID
        left: set[str] = set()  # UIDs of pods that may have a client still
        for daemon in sorted(self.daemons(), key=lambda daemon: daemon.status.state is not MpsState.READY):
            theirs = {pod.uid for pod in pods if _holds(pod, daemon.unit)}
            if not theirs or not daemon.running:
                continue
            try:
                for client in daemon.clients():
                    owner = owners.of(self._host.memberships(client.pid))
                    if owner is None or owner.pod.uid not in theirs:
                        continue
                    left.add(owner.pod.uid)
                    with contextlib.suppress(CommandRefused):  # it has just ended, or is asked again in a second
                        daemon.detach(client, "pod")
                        detached[owner.pod.uid] += 1
            except ControlError as error:
                left |= theirs
                _log.warning("clients of ending pods are not detached", card=daemon.unit.name, error=str(error))
        for pod in pods:
            if count := detached[pod.uid]:
                _log.info("clients of an ending pod detached", pod=pod.pod, uid=pod.uid, clients=count)
            if pod.uid not in left:
                self._terminations.over(pod.uid)
        return detached.total()

    def daemons(self) -> list[Daemon]:
        with self._lock:
            return list(self._daemons.values())

    def turn(self) -> float:
        """Brings the daemons in line with cards and pods; after how many seconds to do it again at the latest."""
        self._turned = self._clock.now()
        self._settle_units()
        self._end_unserved()
        self._settle_demands()
        return min(_EVERY_SECONDS, self._detach_ending())

    def _watch_cards(self) -> None:
        if self._gpus.wait_change(_EVERY_SECONDS):
            self._loop.wake()

    def _settle_units(self) -> None:
        """Daemons for the cards that there are; one whose cards are gone ends before another takes its folder."""
        units = {unit.home: unit for unit in units_of(self._settings, self._served())}
        for home, daemon in list(self._daemons.items()):
            unit = units.get(home)
            if unit is not None and unit.uuids == daemon.unit.uuids:
                continue
            self._leaving.add(home)
            daemon.want(False, "its cards have left, or others have come")
            if daemon.status.state is MpsState.OFF:
                daemon.stop()
                self._leaving.discard(home)
                with self._lock:
                    del self._daemons[home]
                with contextlib.suppress(OSError):
                    directories.withdraw(home)
        for home, unit in units.items():
            if home not in self._daemons:
                daemon = self._make(unit)
                with self._lock:
                    self._daemons[home] = daemon
                daemon.start()

    def _make(self, unit: DaemonUnit) -> Daemon:
        settings = self._settings
        driver = settings.driver or unit.cards[0].properties.get("driver", "")
        capabilities = drivers.probed(drivers.of_version(driver), settings.control, root=os.geteuid() == 0)
        _log.info("serving", card=unit.name, home=str(unit.home), driver=driver, multi_user=capabilities.multi_user)
        return Daemon(
            unit,
            DaemonSettings(
                control=settings.control, pace=settings.pace, exclusive=settings.exclusive, cgroup=settings.cgroup
            ),
            self._use,
            capabilities=capabilities,
            driver=driver,
            on_change=self._publication.wake,
            whose=self._whose,
            host=self._host,
            clock=self._clock,
        )

    def _whose(self, pid: int) -> str:
        """The process for people: with its name and its pod."""
        owner = self._owners().of(self._host.memberships(pid))
        name = self._host.name(pid)
        what = f"{pid} ({name})" if name else str(pid)
        return f"{what} of pod {owner.pod.pod}" if owner is not None else what

    def _owners(self) -> Owners:
        return Owners([*self._terminations.vanished, *self.pods.all()])

    def _settle_demands(self) -> None:
        if not self.pods.synced:
            return
        found = self._demands()
        ceilings = wanted_ceilings(found)
        for daemon in self.daemons():
            mine = [found.get(uuid, Demand()) for uuid in daemon.unit.uuids]
            held = [demand for demand in mine if demand.shares]
            daemon.want_ceilings({uuid: ceilings[uuid] for uuid in daemon.unit.uuids if uuid in ceilings})
            if daemon.unit.home not in self._leaving:
                off = bool(held) and all(demand.off for demand in held)
                daemon.want(not off, "all pods on the card do without MPS" if off else "")

    def _detach_ending(self) -> float:
        """Seconds until it is to be called again."""
        due, later = self._terminations.due(self.pods.all(), self._clock.wall().timestamp(), self._clock.now())
        if due:
            self.detach(due)
        return min(_DETACH_AGAIN if due else _EVERY_SECONDS, _EVERY_SECONDS if later is None else later)

    def _demands(self) -> dict[str, Demand]:
        return demands(self.pods.all(), self._served())

    def _may_end(self, daemon: Daemon) -> bool:
        if self._settings.stop_daemons != "idle":
            return self._settings.stop_daemons == "always"
        if not self.pods.synced:
            return False  # nobody knows who holds it
        found = self._demands()
        return not any(found.get(uuid, Demand()).shares for uuid in daemon.unit.uuids)

    def begin(self) -> None:
        """Looks what a former manager left: in folders that this one does not serve, it is ended. Raises OSError."""
        home = Path(mps.node_folder(str(self._settings.root)))
        status, processes = mpsfiles.read_state(home), self._host.daemons(home / mps.PIPE)
        if status is not None and processes:
            self._found = processes[0].pid, status.uuids
        self._end_unserved()

    def _served(self) -> list[GpuCard]:
        """The cards that daemons are for.

        A daemon of the node that a former manager started may serve a card that does not answer now. This card is
        among them while the process lives: without it the daemon would seem to serve other cards than it should, and
        would be ended, with the clients of the cards that answer. For a new daemon it is left out.
        """
        silent = self._gpus.unresponsive_indices()
        others = {card.uuid for card in self._all_gpus.cards()}  # in MIG mode too: those have left
        cards = self._gpus.cards()
        if not silent or not cards or self._settings.scope is not Scope.NODE or self._found is None:
            return cards
        pid, uuids = self._found
        if self._host.pulse(pid) is None:
            return cards
        # What nobody can ask of it now is taken from another card; the daemon has its limits already.
        left = [uuid for uuid in uuids if uuid not in others | {card.uuid for card in cards}]
        waiting = [replace(cards[0], index=index, uuid=uuid) for index, uuid in zip(silent, left, strict=False)]
        return sorted([*cards, *waiting], key=lambda card: card.index)

    def _end_unserved(self) -> None:
        """Ends what a former manager left in folders that are not served, and opens their cards. Raises OSError.

        Not where it may be of a card that has not answered yet: that one may be served in a moment, and has clients.
        """
        if self._swept:
            return
        skipped = False
        served = {unit.home for unit in units_of(self._settings, self._gpus.cards())} | self._daemons.keys()
        for pipe in self._settings.root.glob(f"*/{mps.PIPE}"):
            home = pipe.parent
            if home in served:
                continue
            if self._may_be_of_a_silent_card(home):
                skipped = True
                continue
            for process in [*self._host.daemons(pipe), *self._host.servers(pipe)]:
                _log.warning("ending a daemon of cards that are not served any more", home=str(home), pid=process.pid)
                process.signal(signal.SIGKILL)
            # After a change of scope the card has another folder, but readers look into its own one first.
            directories.withdraw(home)
            for problem in computemode.reopen(home, self._use):
                _log.error("a card was left closed", problem=problem)
        self._swept = not skipped

    def _may_be_of_a_silent_card(self, home: Path) -> bool:
        if not self._gpus.unresponsive_indices():
            return False
        if home == Path(mps.node_folder(str(self._settings.root))):
            return not self._gpus.cards()  # two daemons must not serve the cards that answer
        status, known = mpsfiles.read_state(home), {card.uuid for card in self._all_gpus.cards()}
        return status is None or not known.issuperset(status.uuids)


def units_of(settings: ManagerSettings, cards: Sequence[GpuCard]) -> list[DaemonUnit]:
    """What there is to be a daemon for. Pure."""
    if settings.scope is Scope.CARD:
        root = str(settings.root)
        return [
            DaemonUnit(name=card.uuid, home=Path(mps.folder(root, card.uuid)), scope=Scope.CARD, cards=(card,))
            for card in cards
        ]
    if not cards:
        return []
    home = Path(mps.node_folder(str(settings.root)))
    return [DaemonUnit(name=mps.NODE, home=home, scope=Scope.NODE, cards=tuple(cards))]


def _holds(pod: PodView, unit: DaemonUnit) -> bool:
    """Whether the pod has a share of one of the unit's cards."""
    by_index = indexed(unit.cards)
    return any(share.uuid_by(by_index) in unit.uuids for share in pod.assignment.shares())
