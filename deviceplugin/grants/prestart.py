"""The work of PreStartContainer: find the container's pod, check its assignment, grant it, and write its CDI spec.

Nothing is guessed and nothing is chosen: the kubelet says which container has the slot, bind's annotations say which
card it was given. An error here is shown in the pod's events and the kubelet asks again (PreStartContainer is called at
every start), so every refusal says what is the matter and what would end it.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import CardShare
from cardwise.core.values.wording import quoted
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard, Health
from cardwise.kube import errors
from deviceplugin.grants.access import NO_CDI, NO_CDI_NO_MPS, Access, Delivery
from deviceplugin.grants.cdi import NoDevice
from deviceplugin.grants.grants import (
    Claim,
    Grant,
    GrantConflict,
    GrantedDevice,
    GrantStore,
    UnsafeName,
)
from deviceplugin.grants.hardware import Hardware
from deviceplugin.grants.mpswait import MpsWait, NotYet
from deviceplugin.sources.kubelet import (
    CheckpointContainer,
    Holders,
    Kubelet,
    KubeletUnavailable,
    PodResourcesContainer,
)
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)

_CONFLICT_SECONDS = 5.0  # a pod that has just ended frees its share within a second or two
_CONFLICT_PAUSE = 0.1
_GIVEN_UP = "the kubelet has given up this start of the container: its pod is being deleted, or 30 s are over"
_MAX_WAITING = 16  # of the server's threads: the others must stay free for Allocate


Active = Callable[[], bool]  # whether the kubelet still waits for the answer


class StartRefused(Exception):
    """The container may not start now; the message is for the pod's events."""


def identify(
    slots: Sequence[str], holders: Holders, pod_of: Callable[[str], str | None]
) -> tuple[PodResourcesContainer, str]:
    """The container that has all these slots, with its pod's UID. Pure. Raises StartRefused.

    `pod_of` tells "namespace/name" of a pod UID, None if unknown; it decides between entries of the checkpoint that the
    kubelet has not cleaned up yet.
    """
    if not slots:
        raise StartRefused("the kubelet named no device")
    named: dict[PodResourcesContainer, None] = {}
    known: dict[CheckpointContainer, None] = {}
    for slot in slots:
        named |= dict.fromkeys(holders.pod_resources.get(slot, ()))
        known |= dict.fromkeys(holders.checkpoint.get(slot, ()))
    what = f"share slot {', '.join(slots)}"
    if not named:
        raise StartRefused(f"the kubelet does not list a container with {what} yet")
    if len(named) > 1:
        both = " and ".join(f"{one.namespace}/{one.pod} (container {one.container})" for one in named)
        raise StartRefused(f"the kubelet gave {what} to {both}; delete one of these pods")
    who = next(iter(named))
    uids = [one.pod_uid for one in known if one.container == who.container]
    if len(uids) > 1:
        uids = [uid for uid in uids if pod_of(uid) in (f"{who.namespace}/{who.pod}", None)]
    if len(uids) != 1:
        found = ", ".join(f"{one.pod_uid}/{one.container}" for one in known) or "nobody"
        raise StartRefused(
            f"the kubelet's two records disagree on {what}: PodResources says {who.namespace}/{who.pod} "
            f"(container {who.container}), its checkpoint says {found}"
        )
    return who, uids[0]


def grant_of(pod: NodePod, container: str, slots: Sequence[str]) -> Grant:
    """The grant that the pod's annotations order for a container. Pure. Raises StartRefused."""
    what = f"pod {pod.pod}"
    try:
        assignment = codec.decode(pod.annotations)
    except codec.InvalidAssignment as error:
        raise StartRefused(f"{what}: {error}; create the pod again, so that it is placed again") from error
    if assignment is None or assignment.legacy:
        raise StartRefused(
            f"{what} was not placed by the Cardwise extender: it has no cards or devices in its annotations. "
            "Create it without nodeName and let kube-scheduler, configured with the extender, bind it"
        )
    key = pod.keys.get(container)
    shares = assignment.containers.get(key or "", ())
    devices = assignment.devices.get(key or "", ())
    is_agent = container == shareagent.CONTAINER and bool(assignment.containers)
    if key is None or not (shares or devices or is_agent):
        raise StartRefused(
            f"{what}: its assignment has no card or device for container {quoted(container)} (key {key}); create it "
            "again"
        )
    return msgspec.structs.replace(
        Grant.of(pod.uid, pod.namespace, pod.name, container, assignment),
        slots=tuple(slots),
        shares=shares,
        devices=tuple(GrantedDevice.of(share) for share in devices),
        mps_mode=pod.annotations.get(mps.MODE, ""),
        sm_percent=pod.annotations.get(mps.SM_PERCENT, ""),
    )


def check_cards(shares: Sequence[CardShare], cards: Mapping[str, GpuCard]) -> None:
    """Raises StartRefused for a card that is not here or is smaller than its shares. Pure."""
    asked: dict[str, int] = defaultdict(int)
    for share in shares:
        card = cards.get(share.uuid)
        if card is None:
            raise StartRefused(
                f"card {share.index} ({share.uuid}) is not on this node (any more), or --cards leaves it out; delete "
                "the pod, so that it is placed again"
            )
        asked[share.uuid] += share.mem
        if asked[share.uuid] > card.memory:
            raise StartRefused(
                f"card {share.index} ({share.uuid}) has {card.memory} MiB, not the {asked[share.uuid]} MiB that the "
                "pod was given there; delete the pod, so that it is placed again"
            )


def check_devices(given: Sequence[GrantedDevice], devices: Mapping[str, OtherDevice]) -> None:
    """Raises StartRefused for a device that is not here or was given twice. Pure."""
    seen: set[str] = set()
    for one in given:
        if one.uuid not in devices:
            raise StartRefused(
                f"device {one.uuid} of class {one.resource_class} is not on this node (any more), or --devices leaves "
                "it out; delete the pod, so that it is placed again"
            )
        if one.uuid in seen:
            raise StartRefused(f"the pod was given device {one.uuid} twice; delete it, so that it is placed again")
        seen.add(one.uuid)


def _opens_nothing(pod: NodePod, grant: Grant) -> bool:
    """Whether the container has a card that its environment does not name. Pure."""
    visible = pod.annotations.get(names.DEVICES_OF + pod.keys[grant.container])
    return bool(grant.shares) and visible == names.NO_CARDS


class PreStart:
    """The verb. `release` frees the shares of pods of which nothing is alive; `granted` hears of each grant."""

    def __init__(
        self,
        *,
        kubelet: Kubelet,
        pods: Pods,
        hardware: Callable[[], Hardware],
        grants: GrantStore,
        delivery: Delivery,
        access: Callable[[], Access | None],
        health: Callable[[list[GpuCard], list[OtherDevice]], Mapping[str, Health]],
        mps_wait: MpsWait,
        release: Callable[[set[str]], object],
        granted: Callable[[NodePod], None],
        start_on_sick_cards: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._kubelet = kubelet
        self._pods = pods
        self._hardware = hardware
        self._grants = grants
        self._delivery = delivery
        self._access = access
        self._health = health
        self._mps = mps_wait
        self._release = release
        self._granted = granted
        self._start_on_sick_cards = start_on_sick_cards
        self._clock = clock
        self._waiting = threading.BoundedSemaphore(_MAX_WAITING)

    def __call__(self, slots: Sequence[str], active: Active) -> Grant:
        """Raises StartRefused.

        The kubelet gives a call up when the pod is deleted meanwhile (since 1.35): from then on nothing is granted, so
        that the card is not taken by a pod whose containers never start.
        """
        began = self._clock.now()
        try:
            who, uid = identify(slots, self._kubelet.holders(), self._name_of)
        except KubeletUnavailable as error:
            raise StartRefused(str(error)) from error
        structlog.contextvars.bind_contextvars(pod=f"{who.namespace}/{who.pod}", uid=uid)  # of all lines of this call
        grant, pod = self._order(who, uid, slots)
        access = self._access()
        if grant.devices and access is Access.ENV:
            raise StartRefused(f"pod {grant.pod}: {NO_CDI}")
        if pod is not None and access is Access.ENV and _opens_nothing(pod, grant):
            raise StartRefused(
                f"pod {grant.pod} was bound while this node gave cards by CDI, so its environment names none; "
                "create it again"
            )
        hardware = self._hardware()
        check_cards(grant.pod_shares, hardware.cards)
        check_devices(grant.pod_devices, hardware.devices)
        self._check_health(
            [hardware.cards[share.uuid] for share in grant.shares],
            [hardware.devices[device.uuid] for device in grant.devices],
        )
        try:
            grant = self._mps.wait(grant, self._seat, self._waiting.release, active)
            if grant.mps and grant.shares and access is Access.ENV:
                raise StartRefused(f"pod {grant.pod}: {NO_CDI_NO_MPS}")
            claim = self._claim(grant, {card.uuid: card.memory for card in hardware.cards.values()}, active)
            self._mps.confirm(grant)  # the card may have been awaited for seconds
            if not active():
                self._grants.take_back(claim)
                raise StartRefused(_GIVEN_UP)
            if access is not Access.ENV:
                self._delivery.deliver(grant, hardware)
        except NotYet as error:
            raise StartRefused(str(error)) from error
        except (OSError, UnsafeName, NoDevice) as error:
            raise StartRefused(f"the grant of pod {grant.pod} could not be written: {error}") from error
        if pod is not None:
            self._granted(pod)
        _log.info(
            "granted",
            pod=grant.pod,
            uid=uid,
            container=grant.container,
            slots=list(slots),
            cards=[share.index for share in grant.shares],
            mib=sum(share.mem for share in grant.shares),
            devices=[device.uuid for device in grant.devices],
            mps=bool(grant.mps),
            ms=round((self._clock.now() - began) * 1000, 1),
        )
        return grant

    def _name_of(self, uid: str) -> str | None:
        pod = self._pods.known(uid)
        return None if pod is None else pod.pod

    def _order(self, who: PodResourcesContainer, uid: str, slots: Sequence[str]) -> tuple[Grant, NodePod | None]:
        """The grant to make, and the pod unless only the disk remembers it."""
        before = self._grants.get(uid, who.container)
        try:
            pod = self._pods.get_pod(who.namespace, who.pod, uid)
        except errors.KubeError as error:
            # A restart of a container needs no API server: the order is the one it was started with.
            if before is None or (before.namespace, before.name) != (who.namespace, who.pod):
                raise StartRefused(
                    f"the assignment of pod {who.namespace}/{who.pod} is not known here and the API server "
                    f"does not answer: {error}"
                ) from error
            return msgspec.structs.replace(before, slots=tuple(slots)), None
        if pod is None or (pod.namespace, pod.name) != (who.namespace, who.pod):
            raise StartRefused(f"pod {who.namespace}/{who.pod} (uid {uid}) does not exist any more")
        return grant_of(pod, who.container, slots), pod

    def _check_health(self, cards: list[GpuCard], devices: list[OtherDevice]) -> None:
        named = [] if self._start_on_sick_cards else [(f"card {card.index}", card.uuid) for card in cards]
        named += [(f"{device.kind} {device.index}", device.uuid) for device in devices]
        health = self._health(cards, devices)
        for what, uuid in named:
            if not health[uuid].healthy:
                raise StartRefused(
                    f"{what} ({uuid}) is unhealthy: {health[uuid].reason}; the container starts when it has "
                    "recovered, or delete the pod, so that it is placed again"
                )

    def _claim(self, grant: Grant, totals: dict[str, int], active: Active) -> Claim:
        entered = self._enter(grant, totals, active)
        if not isinstance(entered, Claim) and self._seat():
            try:
                entered = self._wait_for_room(entered, grant, totals, active)
            finally:
                self._waiting.release()
        if not isinstance(entered, Claim):
            raise StartRefused(str(entered))
        return entered

    def _enter(self, grant: Grant, totals: dict[str, int], active: Active) -> Claim | GrantConflict:
        if not active():
            raise StartRefused(_GIVEN_UP)
        return self._grants.claim(grant, totals)

    def _seat(self) -> bool:
        """Whether one more call may wait."""
        return self._waiting.acquire(blocking=False)

    def _wait_for_room(
        self, conflict: GrantConflict, grant: Grant, totals: dict[str, int], active: Active
    ) -> Claim | GrantConflict:
        """What holds the card or device has mostly ended already, and only nobody has asked the runtime yet."""
        deadline = self._clock.now() + _CONFLICT_SECONDS
        while True:
            self._release({holder.pod_uid for holder in conflict.holders})  # takes seconds where the runtime is slow
            entered = self._enter(grant, totals, active)
            if isinstance(entered, Claim) or self._clock.now() >= deadline:
                return entered
            conflict = entered
            self._clock.sleep(_CONFLICT_PAUSE)
