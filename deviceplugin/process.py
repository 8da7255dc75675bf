"""The parts of the device plugin put together: what is made from what, and in which order it starts and stops."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from cardwise.clock import BOOT, SYSTEM, Clock
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.mps import DEFAULT_ROOT, Mode
from cardwise.devices.protocol import Devices, OtherDevice
from cardwise.gpus.chosen import CardChoice, ChosenGpus
from cardwise.gpus.protocol import HEALTHY, GpuCard, Gpus, Health
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.runtime.loops import Loop
from deviceplugin.grants import access as card_access
from deviceplugin.grants import adoption, cdi
from deviceplugin.grants.access import Access, Delivery
from deviceplugin.grants.grants import Grant, GrantStore
from deviceplugin.grants.hardware import Hardware
from deviceplugin.grants.mpswait import MpsWait
from deviceplugin.grants.prestart import Active, PreStart, StartRefused
from deviceplugin.grants.release import Releaser
from deviceplugin.plugin.registration import Registration
from deviceplugin.plugin.server import PluginServer
from deviceplugin.publish import cardlevels, metrics, shutdown
from deviceplugin.publish.cardlevels import CardLevel
from deviceplugin.publish.cordons import Cordons
from deviceplugin.publish.handover import HandOver
from deviceplugin.publish.inventory import NodePublisher
from deviceplugin.publish.marking import Marker
from deviceplugin.publish.stalemps import StaleMpsStatus
from deviceplugin.sources.containers import Containers, RuntimeSilent
from deviceplugin.sources.kubelet import Kubelet, KubeletSilent
from deviceplugin.sources.pods import Pods

_log = structlog.get_logger("deviceplugin.agent")  # as lines of the log have called it

COMPONENT = "cardwise-deviceplugin"
_RELEASE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAgentSettings:
    """`access` None: ask the runtime. `nvidia_specs` None: the cards are simulated. `slots` are the slot IDs.

    `cards`: those of the machine that are shared; None: all, unless NVIDIA's device plugin serves the node.
    `mps`: what holds for pods that do not say, and whether the node has an MPS manager; `mps_root` is that one's.
    """

    node: str
    kubelet_dir: Path
    cdi_dir: Path
    state_dir: Path
    cri_socket: Path
    access: Access | None
    slots: tuple[str, ...]
    nvidia_specs: tuple[Path, ...] | None
    start_on_sick_cards: bool = False
    cards: CardChoice | None = None
    mps: Mode = Mode.PREFERRED
    mps_root: Path = Path(DEFAULT_ROOT)
    core_overcommit: int = FULL_CORE


class NodeAgent:
    """`start`, then `stop`. Raises OSError when its folders cannot be used."""

    def __init__(
        self,
        settings: NodeAgentSettings,
        *,
        client: KubeClient,
        gpus: Gpus,
        devices: Devices,
        kubelet: Kubelet,
        containers: Containers,
        events: EventRecorder,
        clock: Clock = SYSTEM,
        mps_clock: Clock = BOOT,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._chosen = None if settings.cards is None else ChosenGpus(gpus, settings.cards)
        self._gpus = gpus = self._chosen or gpus
        self._devices = devices
        self._access = settings.access
        self._restored = False
        self._settled = False
        self._unwritable = ""
        self.grants = GrantStore(settings.state_dir / "grants", settings.core_overcommit, clock)
        nvidia = None if settings.nvidia_specs is None else cdi.NvidiaSpecs(settings.nvidia_specs)
        self._delivery = Delivery(settings.cdi_dir, nvidia)
        self._containers = containers
        self._kubelet = kubelet
        self._handover = HandOver(settings.kubelet_dir)
        self._events = events
        self._marker = Marker(client, clock)
        self.pods = Pods(client, settings.node, self._pod_ended, clock)
        self._releaser = Releaser(
            pods=self.pods,
            containers=containers,
            grants=self.grants,
            delivery=self._delivery,
            on_change=self._held_changed,
        )
        mps_wait = MpsWait(settings.mps, settings.mps_root, settings.state_dir, clock, mps_clock)
        self._inventory = NodePublisher(
            client,
            settings.node,
            gpus=gpus,
            devices=devices,
            pods=self.pods,
            access=lambda: self._access,
            health=self._health,
            held=self._releaser.held,
            granted=self.grants.held,
            cordons=Cordons(settings.state_dir / "cordons.json"),
            events=events,
            split=settings.cards is not None,
            mps=StaleMpsStatus(settings.mps, settings.mps_root, mps_wait.has_manager, clock, mps_clock),
            core=settings.core_overcommit,
            clock=clock,
        )
        self._prestart = PreStart(
            kubelet=kubelet,
            pods=self.pods,
            hardware=self._hardware,
            grants=self.grants,
            delivery=self._delivery,
            access=lambda: self._access,
            health=self._health,
            mps_wait=mps_wait,
            release=self._releaser.free,
            granted=self._marker.mark,
            start_on_sick_cards=settings.start_on_sick_cards,
            clock=clock,
        )
        self._registration = Registration(
            settings.kubelet_dir / "device-plugins", self._serve, self._inventory.node.share_allocatable, clock
        )
        self._release = Loop(
            "release",
            self._look_after_grants,
            failed="a release round failed",
            failures=metrics.FAILURES,
            every=_RELEASE_SECONDS,
            clock=clock,
        )

    def start(self) -> None:
        self._tell_problems()
        self.pods.start()
        self._marker.start()
        self._release.start()
        self._inventory.start()
        self._registration.start()

    def _tell_problems(self) -> None:
        """What the start has found, and where metrics come from."""
        metrics.observe(
            lambda: len(self.grants.all()),
            lambda: sum(map(len, (self._releaser.held() or {}).values())),
            len(self.grants.unreadable),
            self.levels,
        )
        for problem in self.grants.unreadable:
            self._events.record(ObjectRef.node(self._settings.node), "GrantUnreadable", problem, "Warning")
        for problem in self._chosen.problems() if self._chosen else ():
            # Not refused: a card may only be off the bus just now, and one setting is for nodes of several kinds.
            _log.error("a setting does not fit this node", problem=problem)
            self._events.record(ObjectRef.node(self._settings.node), "CardsSettingUnfit", problem, "Warning")

    def leave(self) -> None:
        """Before `stop`, where the node and its kubelet go on: takes some seconds, in which all is served."""
        node = self._inventory.node
        shutdown.leave(
            node.withdraw_slots,
            lambda: node.share_allocatable() not in ("", "0"),
            lambda: shutdown.not_admitted(self.pods.all(), self._kubelet),
            self._clock,
        )

    def stop(self) -> None:
        """In the order of who calls whom. Grants and CDI specs stay: the containers go on."""
        self._registration.stop()
        self._inventory.node.withdraw_slots()
        self._gpus.close()  # ends the inventory's wait for a change
        self._devices.close()
        self._inventory.stop()
        self._release.stop()
        self._marker.stop()
        self.pods.stop()
        self._events.stop()
        self._kubelet.close()
        self._containers.close()

    def problems(self) -> Sequence[str]:
        """Why it is not ready, a line each."""
        found = [self._registration.problem, self._releaser.silent, self._unwritable]
        if self._access is None:
            found.append(f"the container runtime at {self._settings.cri_socket} does not answer; see --cri-socket")
        if not self._inventory.settled:
            found.append("the API server has not taken the cards of this node yet")
        cards = self._gpus.cards()
        if self._chosen and not cards:
            found += self._chosen.problems()
        undeliverable = self._undeliverable(cards)
        if undeliverable and len(undeliverable) == len(cards):
            found.append(f"no card can be given to a container: {undeliverable[cards[0].uuid]}")
        return [problem for problem in found if problem]

    def cards(self) -> list[GpuCard]:
        """Those that are shared here."""
        return self._gpus.cards()

    def levels(self) -> list[CardLevel]:
        """How full those are."""
        cards = self._gpus.cards()
        return cardlevels.levels(cards, self._health_of_cards(cards), self.pods.all(), self.grants.all())

    def _hardware(self) -> Hardware:
        return Hardware.look(self._gpus, self._devices)

    def _undeliverable(self, cards: list[GpuCard]) -> dict[str, str]:
        return self._delivery.undeliverable(cards) if self._access is Access.CDI else {}

    def _health(self, cards: list[GpuCard], devices: list[OtherDevice]) -> dict[str, Health]:
        """The health of cards and devices, by UUID. One is sick, too, if no container can get it; a card also if
        another plugin serves it.
        """
        troubles = {
            device.uuid: self._unwritable or card_access.device_trouble(device, self._access) for device in devices
        }
        return self._health_of_cards(cards) | {
            uuid: Health(healthy=not trouble, reason=trouble) for uuid, trouble in troubles.items()
        }

    def _health_of_cards(self, cards: list[GpuCard]) -> dict[str, Health]:
        living = (pod.uid for pod in self.pods.all() if not pod.finished)
        of_all = self._inventory.node.nvidia_problem() or self._handover.why_not(living) or self._unwritable
        if of_all:
            return {card.uuid: Health(healthy=False, reason=of_all) for card in cards}
        health = self._gpus.health()
        known = {card.uuid: health.get(card.uuid, HEALTHY) for card in cards}
        for uuid, why in self._undeliverable(cards).items():
            if known[uuid].healthy:
                known[uuid] = Health(healthy=False, reason=why)
        return known

    def _pod_ended(self) -> None:
        self._release.wake()
        self._inventory.wake()

    def _held_changed(self) -> None:
        self._inventory.wake()

    def _serve(self, socket: Path) -> PluginServer | None:
        access = self._known_access()
        if access is None:
            return None
        metrics.REGISTRATIONS.inc()
        return PluginServer(socket, slot_ids=self._settings.slots, access=access, prestart=self._timed_prestart)

    def _known_access(self) -> Access | None:
        if self._settings.access is None:
            # Asked anew for each registration: the runtime may be another one since. Silent: what it said last.
            self._access = card_access.probe(self._containers, self._settings.cdi_dir) or self._access
        if self._access is Access.CDI and not self._restored:
            self._delivery.restore(self.grants, self._hardware())
            self._restored = True
        return self._access

    def _timed_prestart(self, slots: Sequence[str], active: Active) -> Grant:
        began = self._clock.now()
        outcome = "failed"
        try:
            grant = self._prestart(slots, active)
            outcome = "granted"
        except StartRefused:
            outcome = "refused"
            raise
        finally:
            metrics.PRE_START.labels(outcome).observe(self._clock.now() - began)
        return grant

    def _look_after_grants(self) -> None:
        self.grants.mend()
        self._tell_unwritable()
        if self.pods.synced and not self._settled:
            self._settle()
        self._releaser.sweep(complete=self._settled)

    def _tell_unwritable(self) -> None:
        cdi_trouble = self._delivery.trouble() if self._access is Access.CDI else ""
        before, self._unwritable = self._unwritable, self.grants.problem or cdi_trouble
        if before == self._unwritable:
            return
        node = ObjectRef.node(self._settings.node)
        if self._unwritable:
            _log.error("no container with a share can start", why=self._unwritable)
            remedy = "no container with a share starts here; make room there, or make it writable"
            self._events.record(node, "StateUnwritable", f"{self._unwritable}: {remedy}", "Warning")
        else:
            _log.info("containers with a share can start again")
            self._events.record(
                node, "StateWritable", "what containers with a share need can be written again: they start"
            )
        self._inventory.wake()

    def _settle(self) -> None:
        """Once after the start: what may have been lost or left undone while nobody ran here."""
        try:
            self._adopt()
        except (KubeletSilent, RuntimeSilent, OSError) as error:
            _log.warning("running containers are not compared with the grants yet", error=str(error))
            return
        granted = {grant.pod_uid for grant in self.grants.all()}
        for pod in self.pods.all():
            if pod.uid in granted:
                self._marker.mark(pod)
        self._settled = True

    def _adopt(self) -> None:
        known, sandboxes = self._kubelet.checkpoint(), self._containers.sandboxes()
        uids = {holder.pod_uid for holders in known.values() for holder in holders}
        alive = self._containers.alive(uids.union(one.pod_uid for one in sandboxes))
        adopted = adoption.adopt(known, self.pods, self.grants, sandboxes, alive)
        if adopted and self._access is Access.CDI:
            slots = [slot for grant in adopted for slot in grant.slots]
            self._delivery.refresh(slots, self.grants, self._hardware())
