"""Creates and connects the components of the device plugin, and starts and stops them in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from prometheus_client import Histogram

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.mps import DEFAULT_ROOT
from cardwise.devices.protocol import Devices, OtherDevice
from cardwise.gpus.protocol import HEALTHY, GpuCard, Gpus, Health
from cardwise.gpus.selection import CardSelection, SelectedGpus
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.runtime.loops import Loop
from deviceplugin.grants import access as card_access
from deviceplugin.grants import adoption, cdi
from deviceplugin.grants.access import NO_CDI_FOR_CLAIMS_TEXT, Access, Delivery
from deviceplugin.grants.claims import ClaimName, ClaimPreparation, ContainerDevices
from deviceplugin.grants.granting import Granting, IsActive, StartRefused
from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.hardware import Hardware
from deviceplugin.grants.mpswait import HasManager, MpsWait
from deviceplugin.grants.prestart import PreStart
from deviceplugin.grants.release import Releaser
from deviceplugin.grants.startblocks import StartBlocks
from deviceplugin.plugin import slots
from deviceplugin.plugin.claimserver import ClaimRegistration
from deviceplugin.plugin.registration import Registration
from deviceplugin.plugin.server import PluginServer
from deviceplugin.publish import cardloads, metrics, shutdown
from deviceplugin.publish.cardloads import CardLoad
from deviceplugin.publish.cordons import Cordons
from deviceplugin.publish.handover import GpushareHandover
from deviceplugin.publish.inventory import NodePublisher
from deviceplugin.publish.marking import PodMarker
from deviceplugin.publish.stalemps import StaleMpsStatus
from deviceplugin.sources.containers import RuntimeContainers, RuntimeUnavailable
from deviceplugin.sources.kubelet import Kubelet, KubeletUnavailable, SharedCall
from deviceplugin.sources.pods import Pods

_log = structlog.get_logger("deviceplugin.agent")  # the documents name this logger

COMPONENT = "cardwise-deviceplugin"
_RELEASE_SECONDS = 1.0
_START_BLOCKS_SECONDS = 0.5  # how long a container may start on a card at most after its health or MPS has changed

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAgentSettings:
    """Settings of the device plugin.

    access: how containers get their cards; None: chosen from what the runtime supports.
    nvidia_specs: paths of NVIDIA's CDI specs; None: the cards are simulated.
    cards: the cards that are shared; None: all cards, or no card while NVIDIA's device plugin serves the node.
    mps: whether the node has an MPS manager.
    mps_root: the --mps-root of the MPS manager.
    core_overcommit: percent of each card's SMs that may be allocated.
    claims: whether pods may have their shares by ResourceClaim.
    """

    node: str
    kubelet_dir: Path
    cdi_dir: Path
    state_dir: Path
    cri_socket: Path
    access: Access | None
    nvidia_specs: tuple[Path, ...] | None
    cards: CardSelection | None = None
    mps: HasManager = HasManager.SEEN
    mps_root: Path = Path(DEFAULT_ROOT)
    core_overcommit: int = FULL_CORE
    claims: bool = False


class NodeAgent:
    """The device plugin of one node. Raises OSError if its folders cannot be used."""

    def __init__(
        self,
        settings: NodeAgentSettings,
        *,
        client: KubeClient,
        gpus: Gpus,
        devices: Devices,
        kubelet: Kubelet,
        containers: RuntimeContainers,
        events: EventRecorder,
        clock: Clock = SYSTEM,
        mps_clock: Clock = BOOT,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._selected_gpus = None if settings.cards is None else SelectedGpus(gpus, settings.cards)
        self._gpus = gpus = self._selected_gpus or gpus
        self._devices = devices
        self._access = settings.access
        self._restored = False
        self._adoption = SharedCall(self._try_adopt, clock)
        self._adopted = False
        self._write_problem: str | None = None
        self.grants = GrantStore(settings.state_dir / "grants", settings.core_overcommit, clock)
        nvidia = None if settings.nvidia_specs is None else cdi.NvidiaSpecs(settings.nvidia_specs)
        self._delivery = Delivery(settings.cdi_dir, nvidia)
        self._containers = containers
        self._kubelet = kubelet
        self._handover = GpushareHandover(settings.kubelet_dir)
        self._events = events
        self._marker = PodMarker(client, clock)
        self.pods = Pods(client, settings.node, self._on_pod_ended, clock)
        self._releaser = Releaser(
            pods=self.pods,
            containers=containers,
            grants=self.grants,
            delivery=self._delivery,
            on_change=self._on_reported_shares_changed,
            clock=clock,
        )
        mps_wait = MpsWait(settings.mps, settings.mps_root, settings.state_dir, clock, mps_clock)
        self._inventory = NodePublisher(
            client,
            settings.node,
            gpus=gpus,
            devices=devices,
            pods=self.pods,
            access=lambda: self._access,
            health=self._health_by_uuid,
            reported_shares=self._releaser.reported_shares,
            granted_mib=self.grants.granted_mib_by_uuid,
            cordons=Cordons(settings.state_dir / "cordons.json"),
            events=events,
            is_split=settings.cards is not None,
            stale_mps=StaleMpsStatus(settings.mps, settings.mps_root, mps_wait.has_manager, clock, mps_clock),
            core_percent=settings.core_overcommit,
            clock=clock,
        )
        granting = Granting(
            pods=self.pods,
            hardware=self._read_hardware,
            grants=self.grants,
            delivery=self._delivery,
            access=lambda: self._access,
            health=self._health_by_uuid,
            mps_wait=mps_wait,
            release=self._releaser.release_ended,
            release_former=self._releaser.release_former_binding,
            has_adopted=lambda: self._adopted,
            adopt=self._adopt_running_containers,
            on_granted=self._marker.queue_mark,
            clock=clock,
        )
        self._prestart = PreStart(
            granting=granting,
            kubelet=kubelet,
            pods=self.pods,
            access=lambda: self._access,
            sandboxes=containers.sandboxes,
            clock=clock,
        )
        self._registration = Registration(
            settings.kubelet_dir / "device-plugins", self._create_server, self._inventory.node.share_allocatable, clock
        )
        self._prepare = ClaimPreparation(client, settings.node, granting.read_pod, granting, clock)
        self._claims = ClaimRegistration(
            settings.kubelet_dir, self._run_timed_prepare, self._on_claim_released, self._find_claim_obstacle, clock
        )
        self._start_blocks = StartBlocks(
            grants=self.grants,
            delivery=self._delivery,
            hardware=self._read_hardware,
            health=self._health_by_uuid,
            access=lambda: self._access,
            mps_wait=mps_wait,
        )
        self._start_block_loop = Loop(
            "start-blocks",
            self._start_blocks.update,
            failed="failed to update the start blocks of containers with a claim",
            failures=metrics.THREAD_FAILURES,
            every=_START_BLOCKS_SECONDS,
            clock=clock,
        )
        self._release = Loop(
            "release",
            self._maintain_grants,
            failed="failed to release grants",
            failures=metrics.THREAD_FAILURES,
            every=_RELEASE_SECONDS,
            clock=clock,
        )

    def start(self) -> None:
        self._report_start_problems()
        self.pods.start()
        self._marker.start()
        self._release.start()
        self._inventory.start()
        self._start_block_loop.start()
        self._registration.start()
        if self._settings.claims:
            self._claims.start()

    def _report_start_problems(self) -> None:
        """Connect the metrics, and report problems of the state on disk and of --gpus."""
        metrics.connect_gauges(
            lambda: len(self.grants.list_grants()),
            lambda: sum(map(len, (self._releaser.reported_shares() or {}).values())),
            len(self.grants.unreadable),
            self.card_loads,
            self._inventory.isolation_by_uuid,
        )
        metrics.BLOCKED_STARTS.set_function(lambda: self._start_blocks.blocked)
        for problem in self.grants.unreadable:
            self._events.record(ObjectRef.node(self._settings.node), "UnreadableGrant", problem, "Warning")
        for problem in self._selected_gpus.problems() if self._selected_gpus else ():
            # Only reported, not fatal: the card may be off the bus for a moment, and nodes of several kinds share one
            # setting.
            _log.error("--gpus does not match the GPUs of this node", problem=problem)
            self._events.record(ObjectRef.node(self._settings.node), "InvalidCardSelection", problem, "Warning")

    def await_admissions(self) -> None:
        """Wait some seconds until pending pods are admitted. Call before `stop` if the node keeps running."""
        node = self._inventory.node
        shutdown.wait_drained(
            node.withdraw_slots,
            lambda: node.share_allocatable() not in (None, "0"),
            lambda: shutdown.list_unadmitted_pods(self.pods.list_pods(), self._kubelet),
            self._clock,
        )

    def stop(self) -> None:
        """Stop callers before the components that they call. Grants and CDI specs stay: the containers keep running."""
        if self._settings.claims:
            self._claims.stop()
        self._registration.stop()
        self._inventory.node.withdraw_slots()
        self._gpus.close()  # wakes the publisher, which waits for a change of the cards
        self._devices.close()
        self._inventory.stop()
        self._start_block_loop.stop()
        self._release.stop()
        self._marker.stop()
        self.pods.stop()
        self._events.stop()
        self._kubelet.close()
        self._containers.close()

    def problems(self) -> Sequence[str]:
        """Why the plugin is not ready, one line each."""
        problems = [self._registration.problem, self._releaser.problem, self._write_problem]
        if self._access is None:
            problems.append(f"the container runtime at {self._settings.cri_socket} does not answer; see --cri-socket")
        if self._settings.claims:
            problems.append(self._claims.problem)
        if not self._inventory.is_published:
            problems.append("the GPUs of this node are not published yet")
        cards = self._gpus.cards()
        if self._selected_gpus and not cards:
            problems += self._selected_gpus.problems()
        undeliverable = self._undeliverable_reasons_by_uuid(cards)
        if undeliverable and len(undeliverable) == len(cards):
            problems.append(f"no container can get a GPU: {undeliverable[cards[0].uuid]}")
        return [problem for problem in problems if problem]

    def cards(self) -> list[GpuCard]:
        """The cards that are shared on this node."""
        return self._gpus.cards()

    def card_loads(self) -> list[CardLoad]:
        """The load of the shared cards."""
        cards = self._gpus.cards()
        return cardloads.card_loads(
            cards, self._card_health_by_uuid(cards), self.pods.list_pods(), self.grants.list_grants()
        )

    def _read_hardware(self) -> Hardware:
        return Hardware.read(self._gpus, self._devices)

    def _undeliverable_reasons_by_uuid(self, cards: list[GpuCard]) -> dict[str, str]:
        return self._delivery.undeliverable_reasons_by_uuid(cards) if self._access is Access.CDI else {}

    def _health_by_uuid(self, cards: list[GpuCard], devices: list[OtherDevice]) -> dict[str, Health]:
        """The health of cards and devices, by UUID.

        A card or device is also unhealthy if no container can get it. A card is also unhealthy if another device plugin
        serves it.
        """
        problems = {
            device.uuid: self._write_problem or card_access.device_problem(device, self._access) for device in devices
        }
        return self._card_health_by_uuid(cards) | {
            uuid: Health(healthy=not problem, reason=problem or "") for uuid, problem in problems.items()
        }

    def _card_health_by_uuid(self, cards: list[GpuCard]) -> dict[str, Health]:
        living_uids = (pod.uid for pod in self.pods.list_pods() if not pod.finished)
        common_problem = (
            self._inventory.node.nvidia_problem() or self._handover.sharing_problem(living_uids) or self._write_problem
        )
        if common_problem:
            return {card.uuid: Health(healthy=False, reason=common_problem) for card in cards}
        reported_health = self._gpus.health()
        health_by_uuid = {card.uuid: reported_health.get(card.uuid, HEALTHY) for card in cards}
        for uuid, reason in self._undeliverable_reasons_by_uuid(cards).items():
            if health_by_uuid[uuid].healthy:
                health_by_uuid[uuid] = Health(healthy=False, reason=reason)
        return health_by_uuid

    def _on_pod_ended(self) -> None:
        self._release.wake()
        self._inventory.reconcile_now()

    def _on_reported_shares_changed(self) -> None:
        self._inventory.reconcile_now()

    def _create_server(self, socket: Path) -> PluginServer | None:
        access = self._probe_access()
        if access is None:
            return None
        metrics.REGISTRATIONS.inc()
        return PluginServer(socket, slot_ids=slots.SLOT_IDS, access=access, prestart=self._run_timed_prestart)

    def _probe_access(self) -> Access | None:
        if self._settings.access is None:
            # Chosen at each registration, since the runtime may have been replaced. If the runtime does not answer, the
            # access stays as it was.
            self._access = (
                card_access.choose_access_of_runtime(self._containers, self._settings.cdi_dir) or self._access
            )
        if self._access is Access.CDI and not self._restored:
            self._delivery.restore_specs(self.grants, self._read_hardware())
            self._restored = True
        return self._access

    def _run_timed_prestart(self, slots: Sequence[str], is_active: IsActive) -> Grant:
        return self._run_timed(metrics.PRE_START, lambda: self._prestart(slots, is_active))

    def _run_timed_prepare(self, claim: ClaimName, is_active: IsActive) -> Sequence[ContainerDevices]:
        return self._run_timed(metrics.PREPARE, lambda: self._prepare(claim, is_active))

    def _run_timed(self, histogram: Histogram, grant: Callable[[], _T]) -> _T:
        started = self._clock.now()
        outcome = "failed"
        try:
            granted = grant()
            outcome = "granted"
        except StartRefused:
            outcome = "refused"
            raise
        finally:
            histogram.labels(outcome).observe(self._clock.now() - started)
        return granted

    def _on_claim_released(self, claim: ClaimName) -> None:
        """Look whether the claim's pod has ended: only API server and runtime together show that its share is free."""
        _log.info("the kubelet released a claim", claim=str(claim), claim_uid=claim.uid)
        self._release.wake()

    def _find_claim_obstacle(self) -> str | None:
        """Why no claim can be prepared at present, None if claims can be prepared."""
        if self._access is Access.ENV:
            return NO_CDI_FOR_CLAIMS_TEXT
        return None if self._restored else "the container runtime has not answered yet whether it serves CDI"

    def _maintain_grants(self) -> None:
        self.grants.restore_files()
        self._report_write_problem()
        self._releaser.sweep_grants(complete=not self._adopt_running_containers())

    def _report_write_problem(self) -> None:
        cdi_problem = self._delivery.write_problem() if self._access is Access.CDI else None
        previous, self._write_problem = self._write_problem, self.grants.problem or cdi_problem
        if previous == self._write_problem:
            return
        node = ObjectRef.node(self._settings.node)
        if self._write_problem:
            _log.error(
                "containers with a share cannot start: the node's state cannot be written", reason=self._write_problem
            )
            remedy = "no container with a share can start on this node; free disk space, or make the folder writable"
            self._events.record(node, "StateUnwritable", f"{self._write_problem}: {remedy}", "Warning")
        else:
            _log.info("containers with a share can start again")
            self._events.record(
                node, "StateWritable", "grants and CDI specs can be written again: containers with a share can start"
            )
        self._inventory.reconcile_now()

    def _adopt_running_containers(self, seconds: float | None = None) -> str | None:
        """Restore lost grants once after the start, and write marks that an earlier process did not write.

        seconds: how long to wait if another thread is adding the grants already. If this thread adds the grants and the
          runtime is slow, the call takes up to `ADOPTION_SECONDS`.

        Returns why running containers may still lack a grant; None if each has a grant. Ignores containers whose
        assignment cannot be read.
        """
        if self._adopted:
            return None
        try:
            return self._adoption.get(seconds, joins=True)
        except TimeoutError:
            return f"the container runtime at {self._settings.cri_socket}, or the disk, has not answered in time"

    def _try_adopt(self) -> str | None:
        if self._adopted:
            return None
        if not self.pods.synced:
            return "the API server has not listed the pods of this node yet"
        try:
            self._adopt_missing_grants()
        except (KubeletUnavailable, RuntimeUnavailable, OSError, errors.KubeError) as error:
            _log.warning("cannot compare running containers with the grants yet; trying again", error=str(error))
            return str(error)
        granted = {grant.pod_uid for grant in self.grants.list_grants()}
        for pod in self.pods.list_pods():
            if pod.uid in granted:
                self._marker.queue_mark(pod)
        self._adopted = True
        return None

    def _adopt_missing_grants(self) -> None:
        containers_by_slot, sandboxes = self._kubelet.checkpoint(), self._containers.sandboxes()
        uids = {holder.pod_uid for holders in containers_by_slot.values() for holder in holders}
        live_containers = self._containers.live_containers(uids.union(sandbox.pod_uid for sandbox in sandboxes))
        ungranted = live_containers.keys() - {grant.pod_uid for grant in self.grants.list_grants()}
        containers_by_slot |= self._prepare.list_slots(self.pods.list_pods(), ungranted)
        adoption_result = adoption.adopt_grants(containers_by_slot, self.pods, self.grants, sandboxes, live_containers)
        metrics.UNKNOWN_HOLDERS.set(len(adoption_result.unknown_holders))
        if adoption_result.grants and self._access is Access.CDI:
            slots = [slot for grant in adoption_result.grants for slot in grant.slots if not grant.claim]
            self._delivery.rewrite_specs(slots, self.grants, self._read_hardware())
        if adoption_result.error is not None:
            raise adoption_result.error
