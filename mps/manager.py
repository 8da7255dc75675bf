"""Runs the MPS daemons of a node: creates and ends them, sets limits, and detaches clients of terminating pods."""

import contextlib
import fcntl
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope, MpsState, Status
from cardwise.core.api.names import MPS_UNAVAILABLE
from cardwise.gpus import mpsfiles
from cardwise.gpus.protocol import HEALTHY, CardControl, GpuCard, Gpus
from cardwise.gpus.selection import NonMigGpus
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.runtime.loops import Loop
from mps import metrics
from mps.audit.audit import Audit, AuditSettings
from mps.daemon import computemode, directories
from mps.daemon.daemon import Daemon, DaemonSettings
from mps.daemon.machine import DaemonPace
from mps.daemon.termination import TerminatingPods
from mps.daemon.units import DaemonUnit
from mps.host import drivers
from mps.host.availability import Availability, Obstacle, describe_pods_without_mps
from mps.host.control import CommandRefused, ControlError
from mps.host.ownnode import OwnNode
from mps.host.pods import (
    CardDemand,
    PodView,
    compute_demands,
    min_ceilings_by_card,
    parse_pod,
    uuids_by_index,
    watch_pods,
)
from mps.host.processes import LOCAL, Host
from mps.host.processowners import ProcessOwners
from mps.publication import MpsStatusPublisher
from mps.usage.sampler import UseSampler

_log = structlog.get_logger(__name__)

_INTERVAL_SECONDS = 1.0
# Pause before clients of a terminating pod are listed again: a process may open the card after they were listed.
_DETACH_RETRY_SECONDS = 1.0
_STUCK_SECONDS = 120.0
_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSettings:
    """Settings of the MPS manager.

    exclusive: whether cards are closed (compute mode EXCLUSIVE_PROCESS) while MPS serves them.
    stop_daemons: idle, always or never; see docs/reference/mps.md.
    cgroup: the mounted cgroup root below which daemons run; None: in the manager's cgroup.
    audit: settings of the audit; None: no audit.
    is_split: whether --gpus divides the node's cards between Cardwise and NVIDIA's device plugin.
    """

    node: str
    root: Path
    scope: DaemonScope
    control: Path
    pace: DaemonPace
    exclusive: bool
    stop_daemons: str
    cgroup: Path | None = None
    audit: AuditSettings | None = None
    is_split: bool = False


class RootLocked(Exception):
    """Another manager has locked the root folder."""


class ManagerLock:
    """The manager's lock. The kernel releases it when the process ends, so a free lock means that no manager runs."""

    def __init__(self, root: Path) -> None:
        """Open the lock file. Raises OSError."""
        directories.create_open_folder(root)
        self._path = root / mps.LOCK_FILE
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)

    def acquire(self) -> None:
        """Acquire the lock without waiting. Raises RootLocked."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RootLocked from error

    def is_lost(self) -> bool:
        """Whether the lock file was removed or replaced. Then readers cannot see the manager."""
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        os.close(self._descriptor)


class MpsManager:
    """The MPS manager of one node. The lock must be held from before `start` until after `stop`."""

    def __init__(
        self,
        settings: ManagerSettings,
        client: KubeClient,
        gpus: Gpus,
        card_control: CardControl,
        *,
        host: Host = LOCAL,
        clock: Clock = BOOT,
    ) -> None:
        self._settings = settings
        self._client = client
        self._all_gpus = gpus
        self._gpus = NonMigGpus(gpus)
        self._card_control = card_control
        self._host = host
        self._clock = clock
        self._stopped = False
        self._lock = threading.Lock()
        self._daemons: dict[Path, Daemon] = {}
        self._stopping_homes: set[Path] = set()  # folders of daemons that have to end, even if pods use them
        self._inherited_daemon: tuple[int, tuple[str, ...]] | None = (
            None  # PID and cards of a daemon of the whole node that a former manager started
        )
        self._leftovers_ended = False  # whether daemons that a former manager left behind were ended
        self._terminating_pods = TerminatingPods()
        self._last_pass_at = clock.now()
        self._loop = Loop(
            "manager",
            lambda: self._loop.run_within(self.reconcile()),
            failed="failed to reconcile the MPS daemons",
            failures=metrics.THREAD_FAILURES,
            every=_INTERVAL_SECONDS,
            clock=clock,
        )
        self._cards = Loop(
            "cards",
            self._watch_cards,
            failed="failed to watch the GPUs",
            failures=metrics.THREAD_FAILURES,
            every=0.0,
            clock=clock,
        )
        self.pods = watch_pods(client, settings.node, self._loop.wake, clock)
        self._node = OwnNode(client, settings.node, self._loop.wake, clock)
        self._availability = Availability(
            settings.control,
            settings.root,
            nvidia_gpus=lambda: 0 if settings.is_split else self._node.nvidia_gpus(),
            is_mig=self._is_mig,
            host=host,
            clock=clock,
        )
        self._obstacles: dict[Path, Obstacle] = {}  # by the folder of the daemon that they prevent
        self._events = EventRecorder(client, "cardwise-mps", instance=settings.node, clock=clock)
        self._publication = MpsStatusPublisher(client, settings.node, self.statuses, clock)
        self._sampler = UseSampler(
            node=settings.node,
            gpus=self._gpus,
            card_control=card_control,
            pods=self.pods,
            tiers=self._publication.memory_tiers,
            host=self._host,
            clock=clock,
        )
        self._audit = None
        if settings.audit is not None:
            self._audit = Audit(
                settings.audit,
                client,
                node=settings.node,
                gpus=self._gpus,
                card_control=card_control,
                pods=self.pods,
                foreign_processes=lambda: {
                    process for daemon in self.daemons() for process in daemon.foreign_processes
                },
                host=self._host,
                clock=clock,
            )

    def start(self) -> None:
        self.inherit_daemons()
        self.pods.start()
        self._node.start()
        self._publication.start()
        self._sampler.start()
        if self._audit is not None:
            self._audit.start()
        self._loop.start()
        self._cards.start()

    def stop(self) -> None:
        """Stop the manager.

        Depending on `stop_daemons`, daemons whose cards pods use keep running for the next manager.
        """
        self._sampler.stop()
        if self._audit is not None:
            self._audit.stop()
        self._loop.stop(_STOP_SECONDS)
        self._cards.stop(_STOP_SECONDS)
        daemons = self.daemons()
        # Where MPS is unavailable no daemon runs, and the cards stay open.
        stoppable_daemons = [
            daemon for daemon in daemons if daemon.status.state is not MpsState.UNAVAILABLE and self._may_stop(daemon)
        ]
        for daemon in stoppable_daemons:
            daemon.set_enabled(False, "the MPS manager stops")
        pace = self._settings.pace
        deadline = self._clock.now() + pace.drain_timeout + pace.quit_grace + pace.probe_timeout * 3
        while (
            any(daemon.status.state is not MpsState.OFF for daemon in stoppable_daemons)
            and self._clock.now() < deadline
        ):
            self._clock.sleep(_POLL_SECONDS)
        for daemon in daemons:
            daemon.stop()
        self._stopped = True
        self._publication.stop()
        self.pods.stop()
        self._node.stop()
        self._events.stop()

    def statuses(self) -> dict[str, Status]:
        """The status of each card, by UUID. Where MPS is unavailable, containers start without a manager too."""
        statuses = {uuid: daemon.status for daemon in self.daemons() for uuid in daemon.status.uuids}
        if not self._stopped:
            return statuses
        return {
            uuid: status
            if status.state is MpsState.UNAVAILABLE
            else replace(
                status, state=MpsState.DOWN, reason="the MPS manager has stopped", since=self._clock.wall().timestamp()
            )
            for uuid, status in statuses.items()
        }

    def usage_report(self) -> bytes:
        """What containers have used in the last hours, as JSON (`cardwise.gpus.usagereport`)."""
        return self._sampler.report()

    def problems(self) -> Sequence[str]:
        """Why the manager is not ready, one line each. One card that is ready, off or unavailable suffices."""
        problems = [] if self.pods.synced else ["the pods of this node are not known yet"]
        if not self._node.synced:
            problems.append("the Node object is not known yet")
        if self._publication.problem:
            problems.append(self._publication.problem)
        statuses = self.statuses()
        healthy_states = (MpsState.READY, MpsState.OFF, MpsState.UNAVAILABLE)
        if statuses and all(status.state not in healthy_states for status in statuses.values()):
            uuid, status = next(iter(statuses.items()))
            problems.append(f"no GPU's MPS is ready; {uuid} is {status.state}: {status.reason}")
        return problems

    def stuck_reasons(self) -> Sequence[str]:
        """Why the manager should be restarted, one line each."""
        elapsed = self._clock.now() - self._last_pass_at
        return [f"the manager's thread has completed no pass for {elapsed:.0f} s"] if elapsed > _STUCK_SECONDS else []

    def detach(self, pods: Sequence[PodView]) -> int:
        """Detach the clients of terminating pods from their servers. Afterwards the kubelet can kill the clients
        safely.

        Returns the number of detached clients. A tenant can make the daemon of their card hang, while pods on other
        cards have only seconds left. So each daemon is called once for all pods, and only if one of them has a share of
        the daemon's cards. Ready daemons are called first.
        """
        owners = self._process_owners()
        detached_counts: Counter[str] = Counter()  # by pod UID
        uids_with_clients: set[str] = set()  # pods that may still have clients
        for daemon in sorted(self.daemons(), key=lambda daemon: daemon.status.state is not MpsState.READY):
            pod_uids = {pod.uid for pod in pods if _has_share_on_unit(pod, daemon.unit)}
            if not pod_uids or not daemon.is_running:
                continue
            try:
                for client in daemon.clients():
                    owner = owners.find_owner(self._host.memberships(client.pid))
                    if owner is None or owner.pod.uid not in pod_uids:
                        continue
                    uids_with_clients.add(owner.pod.uid)
                    with contextlib.suppress(
                        CommandRefused
                    ):  # the client has just ended, or is detached again in a second
                        daemon.detach(client, "terminating")
                        detached_counts[owner.pod.uid] += 1
            except ControlError as error:
                uids_with_clients |= pod_uids
                _log.warning(
                    "failed to detach the clients of terminating pods", card=daemon.unit.name, error=str(error)
                )
        for pod in pods:
            if count := detached_counts[pod.uid]:
                _log.info("detached the clients of a terminating pod", pod=pod.pod, uid=pod.uid, clients=count)
            if pod.uid not in uids_with_clients:
                self._terminating_pods.mark_detached(pod.uid)
        return detached_counts.total()

    def daemons(self) -> list[Daemon]:
        with self._lock:
            return list(self._daemons.values())

    def reconcile(self) -> float:
        """Reconcile the daemons with cards and pods. Returns the maximum number of seconds until the next pass."""
        self._last_pass_at = self._clock.now()
        self._reconcile_daemons()
        self._end_unserved_daemons()
        self._apply_demands_to_daemons()
        return min(_INTERVAL_SECONDS, self._detach_due_clients())

    def _watch_cards(self) -> None:
        if self._gpus.wait_change(_INTERVAL_SECONDS):
            self._loop.wake()

    def _reconcile_daemons(self) -> None:
        """Run a daemon for each unit; a daemon whose cards have changed ends before the next daemon uses its folder."""
        units = {unit.home: unit for unit in self._list_units()}
        self._update_obstacles(units)
        for home, daemon in list(self._daemons.items()):
            unit = units.get(home)
            if unit is not None and unit.uuids == daemon.unit.uuids:
                continue
            self._stopping_homes.add(home)
            daemon.set_enabled(False, "its GPUs have changed")
            if daemon.status.state is MpsState.OFF:
                daemon.stop()
                self._stopping_homes.discard(home)
                with self._lock:
                    del self._daemons[home]
                with contextlib.suppress(OSError):
                    directories.withdraw_files(home)
        for home, unit in units.items():
            if home not in self._daemons and self._may_serve(unit):
                daemon = self._create_daemon(unit)
                if self._has_containers_without_mps(unit):
                    daemon.note_starts_without_mps()
                self._apply_availability(daemon, is_running=self._is_running(unit))
                with self._lock:
                    self._daemons[home] = daemon
                daemon.start()

    def _list_units(self) -> list[DaemonUnit]:
        """The units of the served cards, and one for each card in MIG mode, on which MPS is unavailable."""
        mig_cards = [card for card in self._all_gpus.cards() if self._is_mig(card.uuid)]
        mig_units = daemon_units(replace(self._settings, scope=DaemonScope.CARD), mig_cards)
        return [*daemon_units(self._settings, self._served_cards()), *mig_units]

    def _is_mig(self, uuid: str) -> bool:
        return self._all_gpus.health().get(uuid, HEALTHY).mig

    def _may_serve(self, unit: DaemonUnit) -> bool:
        """Whether a unit without a daemon may get one.

        Until Node object and pods are known, NVIDIA's device plugin or pods without MPS may use its cards, unless a
        manager has served them before.
        """
        return (self._node.synced and self.pods.synced) or self._was_served(unit)

    def _was_served(self, unit: DaemonUnit) -> bool:
        """Whether a manager has served the unit since the machine was started.

        Its daemon, a server of this daemon, or its state file shows it. A server outlives its daemon, and also the
        folder with the state file.
        """
        has_processes = self._is_running(unit) or bool(self._host.servers(unit.pipe))
        return has_processes or mpsfiles.read_state(unit.home) is not None

    def _has_containers_without_mps(self, unit: DaemonUnit) -> bool:
        """Whether containers that do not demand to be without MPS run without it on the unit's cards.

        They started before a manager came to this node. After a reboot none of them runs.
        """
        if self._was_served(unit):
            return False
        running_containers = self._host.running_containers()
        uuid_by_index = uuids_by_index(unit.cards)
        return any(
            container.runtime_id in running_containers
            for pod in self.pods.list_pods()
            if not pod.runs_without_mps(self._settings.scope)
            for container in pod.containers
            if any(
                share.resolve_uuid(uuid_by_index) in unit.uuids
                for share in pod.assignment.containers.get(container.key, ())
            )
        )

    def _is_running(self, unit: DaemonUnit) -> bool:
        return bool(self._host.daemons(unit.pipe))

    def _update_obstacles(self, units: Mapping[Path, DaemonUnit]) -> None:
        self._availability.refresh()
        obstacles = {
            home: obstacle
            for home, unit in units.items()
            if (obstacle := self._availability.find_obstacle(unit.cards)) is not None
        }
        for home in (self._obstacles.keys() - obstacles.keys()) & self._daemons.keys():
            # Create the daemon's object again: the driver, or the control program and its options, may be new.
            if (daemon := self._daemons[home]).status.state is MpsState.UNAVAILABLE:
                daemon.stop()
                with self._lock:
                    del self._daemons[home]
        for home, obstacle in obstacles.items():
            if self._obstacles.get(home) != obstacle:
                self._report_obstacle(units[home], obstacle)
        self._obstacles = obstacles

    def _report_obstacle(self, unit: DaemonUnit, obstacle: Obstacle) -> None:
        _log.warning("MPS is unavailable on a GPU", card=unit.name, cause=str(obstacle.cause), reason=obstacle.reason)
        text = f"pods share GPU {', '.join(unit.uuids)} without MPS, so their limits are advisory: {obstacle.reason}"
        self._events.record(ObjectRef.node(self._settings.node), MPS_UNAVAILABLE, text, "Warning")

    def _apply_availability(self, daemon: Daemon, *, is_running: bool) -> bool:
        """Let containers start without MPS on cards with an obstacle. Returns whether they may.

        A daemon that runs keeps its cards while pods hold them. And cards on which containers started without MPS keep
        to that until no pod holds them.
        """
        unit = daemon.unit
        obstacle = self._obstacles.get(unit.home)
        has_holders = not self.pods.synced or any(_holds_unit(pod, unit) for pod in self.pods.list_pods())
        if has_holders and is_running:
            obstacle = None
        elif has_holders and obstacle is None and daemon.admits_without_mps:
            obstacle = describe_pods_without_mps(unit.uuids)
        metrics.set_unavailable(unit.name, obstacle.cause if obstacle is not None else None)
        if obstacle is not None:
            daemon.set_unavailable(obstacle.reason)
        return obstacle is not None

    def _holders_problem(self, unit: DaemonUnit) -> str | None:
        """Why pods may hold the unit's cards, by a new list of the API server; None if no pod holds them."""
        query = paths.field_query("spec.nodeName", self._settings.node)
        try:
            pods = [parse_pod(msgspec.json.encode(pod)) for pod in self._client.list_objects(paths.pods(), query)]
        except errors.KubeError as error:
            return f"MPS can run again, but it is unknown which pods run without it: {error}"
        has_holders = any(_holds_unit(pod, unit) for pod in pods)
        return describe_pods_without_mps(unit.uuids).reason if has_holders else None

    def _create_daemon(self, unit: DaemonUnit) -> Daemon:
        settings = self._settings
        driver = unit.cards[0].properties.get("driver", "")
        capabilities = drivers.refine_capabilities(
            drivers.capabilities_of(driver), settings.control, root=os.geteuid() == 0
        )
        _log.info(
            "serving a GPU", card=unit.name, home=str(unit.home), driver=driver, multi_user=capabilities.multi_user
        )
        return Daemon(
            unit,
            DaemonSettings(
                control=settings.control, pace=settings.pace, exclusive=settings.exclusive, cgroup=settings.cgroup
            ),
            self._card_control,
            capabilities=capabilities,
            driver=driver,
            on_change=self._publication.wake,
            describe_process=self._describe_process,
            holders_problem=lambda: self._holders_problem(unit),
            host=self._host,
            clock=self._clock,
        )

    def _describe_process(self, pid: int) -> str:
        """A string that describes a process: its PID, name and pod."""
        owner = self._process_owners().find_owner(self._host.memberships(pid))
        name = self._host.name(pid)
        process = f"{pid} ({name})" if name else str(pid)
        return f"{process} of pod {owner.pod.pod}" if owner is not None else process

    def _process_owners(self) -> ProcessOwners:
        return ProcessOwners([*self._terminating_pods.force_deleted, *self.pods.list_pods()])

    def _apply_demands_to_daemons(self) -> None:
        daemons = [
            daemon
            for daemon in self.daemons()
            if daemon.unit.home in self._stopping_homes
            or not self._apply_availability(daemon, is_running=daemon.is_running)
        ]
        if not self.pods.synced:
            return
        demands_by_card = self._demands_by_card()
        ceilings = min_ceilings_by_card(demands_by_card)
        for daemon in daemons:
            unit_demands = [demands_by_card.get(uuid, CardDemand()) for uuid in daemon.unit.uuids]
            demands_with_shares = [demand for demand in unit_demands if demand.shares]
            daemon.set_ceilings({uuid: ceilings[uuid] for uuid in daemon.unit.uuids if uuid in ceilings})
            if daemon.unit.home not in self._stopping_homes:
                is_off = bool(demands_with_shares) and all(demand.without_mps for demand in demands_with_shares)
                daemon.set_enabled(not is_off, "all pods on the GPU run without MPS" if is_off else "")

    def _detach_due_clients(self) -> float:
        """Detach the clients of pods that are about to be killed. Returns the seconds until the next call."""
        due_pods, next_due_seconds = self._terminating_pods.due_pods(
            self.pods.list_pods(),
            api_time=self._client.last_server_time(),
            node_time=self._clock.wall(),
            monotonic=self._clock.now(),
        )
        if due_pods:
            self.detach(due_pods)
        return min(
            _DETACH_RETRY_SECONDS if due_pods else _INTERVAL_SECONDS,
            _INTERVAL_SECONDS if next_due_seconds is None else next_due_seconds,
        )

    def _demands_by_card(self) -> dict[str, CardDemand]:
        return compute_demands(self.pods.list_pods(), self._served_cards(), self._settings.scope)

    def _may_stop(self, daemon: Daemon) -> bool:
        if self._settings.stop_daemons != "idle":
            return self._settings.stop_daemons == "always"
        if not self.pods.synced:
            return False  # unknown which pods use the daemon's cards
        demands_by_card = self._demands_by_card()
        return not any(demands_by_card.get(uuid, CardDemand()).shares for uuid in daemon.unit.uuids)

    def inherit_daemons(self) -> None:
        """Take over a former manager's daemon of the whole node, and end daemons of other folders. Raises OSError."""
        home = Path(mps.node_daemon_folder(str(self._settings.root)))
        status, processes = mpsfiles.read_state(home), self._host.daemons(home / mps.PIPE_FOLDER)
        if status is not None and processes:
            self._inherited_daemon = processes[0].pid, status.uuids
        self._end_unserved_daemons()

    def _served_cards(self) -> list[GpuCard]:
        """The cards that daemons should serve.

        A former manager's daemon of the whole node may serve a card that does not answer now. While that daemon runs,
        this card is included. Otherwise the daemon would seem to serve the wrong cards, and would be ended with its
        clients on the other cards. A new daemon is started without the card.
        """
        unresponsive_indices = self._gpus.unresponsive_indices()
        all_uuids = {card.uuid for card in self._all_gpus.cards()}  # with cards in MIG mode, which are not served
        cards = self._gpus.cards()
        if (
            not unresponsive_indices
            or not cards
            or self._settings.scope is not DaemonScope.NODE
            or self._inherited_daemon is None
        ):
            return cards
        pid, uuids = self._inherited_daemon
        if self._host.activity(pid) is None:
            return cards
        # The card cannot report its properties now, so the properties of another card are copied. The daemon already
        # has the limits of the card.
        missing_uuids = [uuid for uuid in uuids if uuid not in all_uuids | {card.uuid for card in cards}]
        missing_cards = [
            replace(cards[0], index=index, uuid=uuid)
            for index, uuid in zip(unresponsive_indices, missing_uuids, strict=False)
        ]
        return sorted([*cards, *missing_cards], key=lambda card: card.index)

    def _end_unserved_daemons(self) -> None:
        """End a former manager's daemons in folders that are not served, and reopen their cards. Raises OSError.

        A daemon keeps running if it may serve a card that has not answered yet: the card may answer soon, and the
        daemon has clients.
        """
        if self._leftovers_ended:
            return
        has_skipped = False
        served_homes = {unit.home for unit in daemon_units(self._settings, self._gpus.cards())} | self._daemons.keys()
        for pipe in self._settings.root.glob(f"*/{mps.PIPE_FOLDER}"):
            home = pipe.parent
            if home in served_homes:
                continue
            if self._may_serve_unresponsive_card(home):
                has_skipped = True
                continue
            for process in [*self._host.daemons(pipe), *self._host.servers(pipe)]:
                _log.warning("ending a daemon whose GPUs are no longer served", home=str(home), pid=process.pid)
                process.signal(signal.SIGKILL)
            # After a change of scope the card's daemon has another folder, but readers read the card's own folder
            # first.
            uuids = self._list_served_uuids(home)
            try:
                problems = computemode.reopen_cards(
                    home, self._card_control, uuids
                )  # reads the state file if the saved modes are lost
            finally:
                directories.withdraw_files(home)
            for problem in problems:
                _log.error("failed to reopen a GPU", problem=problem)
        self._leftovers_ended = not has_skipped

    def _list_served_uuids(self, home: Path) -> list[str]:
        """The UUIDs of the cards that a daemon in this folder has served, from its last status or the folder's name."""
        status = mpsfiles.read_state(home)
        served_uuids = status.uuids if status is not None else ()
        return [
            card.uuid
            for card in self._all_gpus.cards()
            if card.uuid in served_uuids or Path(mps.card_daemon_folder(str(self._settings.root), card.uuid)) == home
        ]

    def _may_serve_unresponsive_card(self, home: Path) -> bool:
        if not self._gpus.unresponsive_indices():
            return False
        if home == Path(mps.node_daemon_folder(str(self._settings.root))):
            return not self._gpus.cards()  # without this condition two daemons would serve the cards that answer
        status, uuids = mpsfiles.read_state(home), {card.uuid for card in self._all_gpus.cards()}
        return status is None or not uuids.issuperset(status.uuids)


def daemon_units(settings: ManagerSettings, cards: Sequence[GpuCard]) -> list[DaemonUnit]:
    """The units of cards that need a daemon: one for each card, or one for the node. Pure."""
    if settings.scope is DaemonScope.CARD:
        root = str(settings.root)
        return [
            DaemonUnit(
                name=card.uuid,
                home=Path(mps.card_daemon_folder(root, card.uuid)),
                scope=DaemonScope.CARD,
                cards=(card,),
            )
            for card in cards
        ]
    if not cards:
        return []
    home = Path(mps.node_daemon_folder(str(settings.root)))
    return [DaemonUnit(name=mps.NODE_FOLDER, home=home, scope=DaemonScope.NODE, cards=tuple(cards))]


def _holds_unit(pod: PodView, unit: DaemonUnit) -> bool:
    """Whether the pod's containers may use the unit's cards."""
    return not pod.finished and _has_share_on_unit(pod, unit)


def _has_share_on_unit(pod: PodView, unit: DaemonUnit) -> bool:
    """Whether the pod has a share of one of the unit's cards."""
    uuid_by_index = uuids_by_index(unit.cards)
    return any(share.resolve_uuid(uuid_by_index) in unit.uuids for share in pod.assignment.shares())
