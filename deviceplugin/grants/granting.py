"""Adds the grant of a container that is about to start: the steps that are the same however the kubelet asks for it.

`prestart` identifies the container of a share slot, `claims` the containers of a ResourceClaim. Both then take these
steps. An error appears in the pod's events, and the kubelet retries. So every refusal names the problem and the remedy.

Theory of operation. The steps:

1. Read the container's assignment from its pod; if the API server is away, from the container's previous grant.
2. Check hardware and health.
3. Wait for MPS.
4. Only after the plugin's start: make sure that each running container has a grant.
5. Add the grant, waiting up to 5 s for shares of pods that have just ended.
6. Write the CDI spec.

If a step after step 5 fails, the grant stays. The kubelet tries again, and until then no other pod may take the share.
The grant is released when the pod has ended. Only an abandoned start removes it.

Example: a card of 16276 MiB has grants of 8138 and 4096 MiB. A container with 4096 MiB does not fit: 12234 + 4096
exceed 16276. While its start waits, the runtime is asked about the two holders. If the pod with 4096 MiB has ended, its
grant is dropped and the container starts.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names, shareagent
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.isolation import kernel_limit_obstacle
from cardwise.core.values.wording import quote_text
from cardwise.devices.protocol import OtherDevice
from cardwise.gpus.protocol import GpuCard, Health
from cardwise.kube import errors
from deviceplugin.grants.access import NO_CDI_FOR_MPS_TEXT, Access, Delivery
from deviceplugin.grants.cdi import NoDevice
from deviceplugin.grants.grants import (
    AddedGrant,
    FormerBinding,
    Grant,
    GrantConflict,
    GrantedDevice,
    GrantStore,
    UnsafeName,
)
from deviceplugin.grants.hardware import Hardware
from deviceplugin.grants.mpswait import MpsNotReady, MpsWait
from deviceplugin.grants.waitslots import WaitSlots
from deviceplugin.sources.containers import ADOPTION_SECONDS, LIVE_SECONDS
from deviceplugin.sources.kubelet import PodResourcesContainer
from deviceplugin.sources.pods import NodePod, Pods

_log = structlog.get_logger(__name__)

# The maximum time of one call of the kubelet, which waits 30 s for PreStartContainer and 45 s for NodePrepareResources.
# No step begins that may take longer than the remaining time.
CALL_SECONDS = 28.0
_CONFLICT_SECONDS = 5.0  # maximum wait for a card; a pod that has just ended frees its share within two seconds
_CONFLICT_PAUSE_SECONDS = 0.1
_ABANDONED_TEXT = "the kubelet has abandoned this start of the container: its pod is terminating, or 30 s are over"

IsActive = Callable[[], bool]  # returns whether the kubelet still waits for the response


class StartRefused(Exception):
    """The container cannot start now; the message is for the pod's events."""


def build_grant(pod: NodePod, container: str, slots: Sequence[str]) -> Grant:
    """Build the grant of a container from its pod's annotations. Pure. Raises StartRefused."""
    pod_text = f"pod {pod.pod}"
    try:
        assignment = codec.decode(pod.annotations)
    except codec.InvalidAssignment as error:
        raise StartRefused(f"{pod_text}: {error}; create the pod again, so that it is placed again") from error
    if assignment is None or assignment.is_gpushare:
        raise StartRefused(
            f"{pod_text} was not placed by the Cardwise extender: it has no GPUs or devices in its annotations. "
            "Create it without nodeName and let kube-scheduler, configured with the extender, bind it"
        )
    key = pod.keys.get(container)
    shares = assignment.containers.get(key or "", ())
    devices = assignment.devices.get(key or "", ())
    is_agent = container == shareagent.CONTAINER_NAME and bool(assignment.containers)
    if key is None or not (shares or devices or is_agent):
        raise StartRefused(
            f"{pod_text}: its assignment has no GPU or device for container {quote_text(container)} (key {key}); "
            "create it again"
        )
    return msgspec.structs.replace(
        Grant.for_pod(pod.uid, pod.namespace, pod.name, container, assignment),
        slots=tuple(slots),
        shares=shares,
        devices=tuple(GrantedDevice.from_share(share) for share in devices),
        isolation=pod.annotations.get(names.ISOLATION, ""),
        sm_percent=pod.annotations.get(mps.SM_PERCENT, ""),
        claim=pod.claim or "",
    )


def check_cards(shares: Sequence[CardShare], cards: Mapping[str, GpuCard]) -> None:
    """Check that the cards are on this node and are large enough for the shares. Pure. Raises StartRefused."""
    requested: dict[str, int] = defaultdict(int)
    for share in shares:
        card = cards.get(share.uuid)
        if card is None:
            raise StartRefused(
                f"card {share.index} ({share.uuid}) is not on this node (any more), or --gpus leaves it out; delete "
                "the pod, so that it is placed again"
            )
        requested[share.uuid] += share.mem
        if requested[share.uuid] > card.memory:
            raise StartRefused(
                f"card {share.index} ({share.uuid}) has {card.memory} MiB, not the {requested[share.uuid]} MiB that "
                "the pod was given there; delete the pod, so that it is placed again"
            )


def check_devices(granted_devices: Sequence[GrantedDevice], devices: Mapping[str, OtherDevice]) -> None:
    """Check that the devices are on this node, and that each was granted once. Pure. Raises StartRefused."""
    uuids: set[str] = set()
    for device in granted_devices:
        if device.uuid not in devices:
            raise StartRefused(
                f"device {device.uuid} of class {device.resource_class} is not on this node (any more), or --devices "
                "leaves it out; delete the pod, so that it is placed again"
            )
        if device.uuid in uuids:
            raise StartRefused(f"the pod was given device {device.uuid} twice; delete it, so that it is placed again")
        uuids.add(device.uuid)


def check_health(grant: Grant, hardware: Hardware, health: Mapping[str, Health]) -> None:
    """Check that the container's cards and devices, which are on this node, are healthy. Pure. Raises StartRefused."""
    names_and_uuids = [(f"card {hardware.cards[share.uuid].index}", share.uuid) for share in grant.shares]
    for granted_device in grant.devices:
        device = hardware.devices[granted_device.uuid]
        names_and_uuids.append((f"{device.kind} {device.index}", device.uuid))
    for name, uuid in names_and_uuids:
        if not health[uuid].healthy:
            raise StartRefused(
                f"{name} ({uuid}) is unhealthy: {health[uuid].reason}; the container starts when it has "
                "recovered, or delete the pod, so that it is placed again"
            )


def kernel_obstacles(hardware: Hardware, access: Access | None) -> dict[str, str | None]:
    """Why the driver limits no memory on each card, by UUID; None where it does. Pure."""
    return {
        uuid: kernel_limit_obstacle(card.properties.get("driver", ""), has_cdi=access is not Access.ENV)
        for uuid, card in hardware.cards.items()
    }


class Granting:
    """Adds grants.

    health: returns the health of cards and devices, by UUID.
    release: takes UIDs of pods, and releases the grants of the pods that have ended.
    release_former: takes the UID of a pod whose next container is about to start. If no container of the pod runs,
        releases all grants of the pod.
    has_adopted: returns whether each running container has a grant.
    adopt: adds the missing grants of running containers. If another thread is adding them, waits for that thread, up to
        the given number of seconds. Returns why some grants are still missing; None if all exist.
    on_granted: called with the pod of each grant.
    """

    def __init__(
        self,
        *,
        pods: Pods,
        hardware: Callable[[], Hardware],
        grants: GrantStore,
        delivery: Delivery,
        access: Callable[[], Access | None],
        health: Callable[[list[GpuCard], list[OtherDevice]], Mapping[str, Health]],
        mps_wait: MpsWait,
        release: Callable[[set[str]], object],
        release_former: Callable[[str], object],
        has_adopted: Callable[[], bool],
        adopt: Callable[[float], str | None],
        on_granted: Callable[[NodePod], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._pods = pods
        self._hardware = hardware
        self._grants = grants
        self._delivery = delivery
        self._access = access
        self._health = health
        self._mps = mps_wait
        self._release = release
        self._release_former = release_former
        self._has_adopted = has_adopted
        self._adopt = adopt
        self._on_granted = on_granted
        self._clock = clock
        self._wait_slots = WaitSlots(clock)

    def desired_grant(
        self, container: PodResourcesContainer, uid: str, slots: Sequence[str]
    ) -> tuple[Grant, NodePod | None]:
        """Build the grant to add.

        Also returns the container's pod; None if only the grant on disk is known. Raises StartRefused.
        """
        previous = self._grants.get(uid, container.container)
        try:
            pod = self.read_pod(container.namespace, container.pod, uid)
        except errors.KubeError as error:
            # A restart of a container needs no API server: the container gets its previous grant.
            has_same_name = previous is not None and previous.pod == f"{container.namespace}/{container.pod}"
            if previous is not None and has_same_name and previous.has_container_shares:
                return msgspec.structs.replace(previous, slots=tuple(slots)), None
            pod = self._pods.find_pod(uid)
            if pod is None:
                raise StartRefused(
                    f"the assignment of pod {container.namespace}/{container.pod} is not known here and the API server "
                    f"does not answer: {error}"
                ) from error
        if pod is None or (pod.namespace, pod.name) != (container.namespace, container.pod):
            if self._pods.is_static_pod(uid):
                raise StartRefused(
                    f"pod {container.namespace}/{container.pod} is a static pod, and a static pod cannot get a share, "
                    "since kube-scheduler does not place it; create it as an ordinary pod"
                )
            raise StartRefused(f"pod {container.namespace}/{container.pod} (uid {uid}) does not exist any more")
        return build_grant(pod, container.container, slots), pod

    def read_pod(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """The pod with this UID; None if it does not exist. Raises KubeError."""
        if self._grants.grants_of_pod(uid):  # the watch may be behind: the pod may have been bound here again
            return self._pods.fetch_pod(namespace, name, uid)
        return self._pods.get_pod(namespace, name, uid)

    def add(self, grant: Grant, pod: NodePod | None, is_active: IsActive, started: float) -> Grant:
        """Add the grant, and write its CDI spec. Raises StartRefused.

        Kubelets since 1.35 abandon the call if the pod is deleted during the call. Then the card is not granted.
        Otherwise a pod whose containers never start would hold the card.

        pod: the pod of the grant; None if only the grant on disk is known.
        started: when the kubelet's call began.
        """
        deadline = started + CALL_SECONDS
        access, hardware = self._access(), self._hardware()
        check_cards(grant.pod_shares, hardware.cards)
        check_devices(grant.pod_devices, hardware.devices)
        cards = [hardware.cards[share.uuid] for share in grant.shares]
        devices = [hardware.devices[device.uuid] for device in grant.devices]
        check_health(grant, hardware, self._health(cards, devices))
        obstacles = kernel_obstacles(hardware, access)
        try:
            grant = self._mps.wait_ready(grant, obstacles, lambda: self._reserve_wait(grant), is_active)
            if grant.mps and grant.shares and access is Access.ENV:
                raise StartRefused(f"pod {grant.pod}: {NO_CDI_FOR_MPS_TEXT}")
            self._check_adopted(grant, deadline)
            totals = {card.uuid: card.memory for card in hardware.cards.values()}
            added = self._add_or_wait(grant, totals, deadline, is_active)
            self._mps.confirm_ready(grant, obstacles)  # the wait for the card may have taken seconds
            if not is_active():
                self._grants.undo_add(added)
                raise StartRefused(_ABANDONED_TEXT)
            if access is not Access.ENV:
                self._delivery.deliver_grant(grant, hardware)
        except MpsNotReady as error:
            raise StartRefused(str(error)) from error
        except (OSError, UnsafeName, NoDevice) as error:
            raise StartRefused(f"failed to write the grant of pod {grant.pod}: {error}") from error
        if pod is not None:
            self._on_granted(pod)
        _log.info(
            "granted",
            pod=grant.pod,
            uid=grant.pod_uid,
            container=grant.container,
            slots=list(grant.slots),
            cards=[share.index for share in grant.shares],
            mib=sum(share.mem for share in grant.shares),
            devices=[device.uuid for device in grant.devices],
            mps=bool(grant.mps),
            ms=round((self._clock.now() - started) * 1000, 1),
        )
        return grant

    def _check_adopted(self, grant: Grant, deadline: float) -> None:
        """Refuse the start while a running container may have no grant yet. Raises StartRefused.

        Without that grant, the running container's card would count as free. A pod that already has a grant of the same
        binding takes no more of its card, so its containers may restart even while the API server is away.
        """
        if self._has_adopted() or any(map(grant.has_same_binding, self._grants.grants_of_pod(grant.pod_uid))):
            return
        problem: str | None = "other containers wait for it already"
        seconds = deadline - self._clock.now()
        if seconds < ADOPTION_SECONDS:
            problem = "no time is left in this call"
        else:
            with self._reserve_wait(grant) as has_slot:
                if has_slot():
                    problem = self._adopt(seconds)
        if problem:
            raise StartRefused(
                f"pod {grant.pod}: the device plugin has just started, and does not know yet which GPUs the running "
                f"containers use: {problem}; the kubelet tries again"
            )

    def _add_or_wait(self, grant: Grant, totals: Mapping[str, int], deadline: float, is_active: IsActive) -> AddedGrant:
        outcome = self._try_add(grant, totals, is_active)
        last_try = min(self._clock.now() + _CONFLICT_SECONDS, deadline - LIVE_SECONDS)
        if not isinstance(outcome, AddedGrant) and self._clock.now() <= last_try:
            with self._reserve_wait(grant) as has_slot:
                if has_slot():
                    outcome = self._wait_until_free(outcome, grant, totals, last_try, is_active, has_slot=has_slot)
        if not isinstance(outcome, AddedGrant):
            raise StartRefused(str(outcome))
        return outcome

    def _try_add(self, grant: Grant, totals: Mapping[str, int], is_active: IsActive) -> AddedGrant | GrantConflict:
        if not is_active():
            raise StartRefused(_ABANDONED_TEXT)
        return self._grants.add(grant, totals)

    def _reserve_wait(self, grant: Grant) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Reserve a wait slot for a start that waits; see `WaitSlots.reserve`."""
        uuids = [share.uuid for share in grant.shares] + [device.uuid for device in grant.devices]
        return self._wait_slots.reserve(grant.namespace, tuple(sorted(uuids)))

    def _wait_until_free(
        self,
        conflict: GrantConflict,
        grant: Grant,
        totals: Mapping[str, int],
        last_try: float,
        is_active: IsActive,
        *,
        has_slot: Callable[[], bool],
    ) -> AddedGrant | GrantConflict:
        """Wait until the card or device is free. Usually its holder has ended, and only its grant must be released.

        last_try: the time after which the runtime is not called again.
        has_slot: returns whether the start still has its wait slot (`WaitSlots`); without it, the wait ends.
        """
        while True:
            if isinstance(conflict, FormerBinding):
                self._release_former(grant.pod_uid)
            else:
                self._release({holder.pod_uid for holder in conflict.holders})  # takes seconds if the runtime is slow
            outcome = self._try_add(grant, totals, is_active)
            if isinstance(outcome, AddedGrant) or self._clock.now() >= last_try or not has_slot():
                return outcome
            conflict = outcome
            self._clock.sleep(_CONFLICT_PAUSE_SECONDS)
