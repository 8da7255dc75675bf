"""ExtendedResources: cards of nodes, and other devices, with their whole status."""

import re
from collections.abc import Iterator
from functools import lru_cache
from sys import intern
from typing import Final

import msgspec
from msgspec import Struct, field

from cardwise.core.api import classes, names
from cardwise.core.api.cards import FULL_CORE, Card
from cardwise.core.api.classes import Classifier
from cardwise.core.api.isolation import MemoryTier
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.api.mpsprofile import CardMps
from cardwise.core.placement.devices import Device
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MAX_MIB, MiB
from cardwise.kube.objects.meta import ObjectMeta
from cardwise.kube.wire import prepare_types, trim_object

MAX_CARDS_PER_NODE = 256  # cards and devices of a node that count; a compromised node may report more
MAX_REPORTED_PER_CARD = 512  # reported shares of a card that count; far more than pods that fit on a node
_UID = re.compile(names.POD_UID)
_NO_CLASSES: frozenset[str] = frozenset()  # one shared object for tens of thousands of cards
_MPS_STATES_THAT_TAKE_PODS = (MpsState.READY, MpsState.OFF)


class Cordon(Struct, frozen=True, gc=False, omit_defaults=True):
    """The cordon of a card or device, for users: its reason, its author and its time (RFC 3339)."""

    reason: str = ""
    user: str = ""
    time: str = ""


class ExtendedResourceSpec(Struct, rename="camel", frozen=True, gc=False):
    """A card or other device, as its device plugin describes it (docs/design/0001 and 0004).

    index: the number of the card or device on the node; each kind has its own numbers.
    memory_mib: total MiB; 0 for devices other than GPUs.
    headroom_mib: MiB that driver and MPS server take.
    unschedulable, cordon: set by users, to cordon the card or device.
    """

    node: str
    index: int
    uuid: str
    kind: str = classes.GPU_KIND
    model: str = ""
    memory_mib: int = field(default=0, name="memoryMiB")
    headroom_mib: int = field(default=0, name="headroomMiB")
    properties: dict[str, str] = {}
    unschedulable: bool = False
    cordon: Cordon = Cordon()


class ContainerShare(Struct, rename="camel", frozen=True, gc=False):
    """A container's share of a card, or its device (with 0 MiB). The pod's object is deleted, but its containers may
    still run.

    uid: the pod's UID.
    mem, core: the memory in MiB, and the percent of the SMs.
    container: the container's key.
    whole: whether the share is a whole card.
    """

    uid: str = field(name="podUID")
    namespace: str = ""
    name: str = ""
    mem: int = field(default=0, name="memoryMiB")
    core: int = field(default=0, name="corePercent")
    whole: bool = False
    container: str = ""

    def to_json(self) -> dict[str, object]:
        """The share as in the JSON of an ExtendedResource's status."""
        return {
            "podUID": self.uid,
            "namespace": self.namespace,
            "name": self.name,
            "memoryMiB": self.mem,
            "corePercent": self.core,
            **({"container": self.container} if self.container else {}),
            **({"whole": True} if self.whole else {}),
        }


class MpsStatus(Struct, rename="camel", frozen=True, gc=False):
    """The state of a card's MPS, as its node's MPS manager reports it (docs/design/0005-mps.md).

    mode: whether the daemon serves this card or all cards of the node.
    ceiling_mib: maximum MiB that one process can get.
    last_transition_time: RFC 3339.
    """

    mode: str = ""
    state: str = ""
    reason: str = ""
    multi_user: bool = False
    ceiling_mib: int = field(default=0, name="ceilingMiB")
    max_clients: int = 0
    last_transition_time: str = ""


class IsolationStatus(Struct, rename="camel", frozen=True, gc=False):
    """The tiers of isolation of a card (`cardwise.core.api.isolation`), as its node's device plugin reports them.

    memory_reason, compute_reason: why a stronger tier is not possible, or which fact about this tier is uncertain; ""
        for nothing.
    """

    memory: str = ""
    memory_reason: str = ""
    compute: str = ""
    compute_reason: str = ""


class Allocated(Struct, rename="camel", frozen=True, gc=False):
    """The amounts that the extender counts on a card or device. None: the extender has not written the field yet.

    memory_mib, core_percent: the sums over all shares.
    shares, pods: the numbers of containers with a share, and of their pods.
    whole: whether one container has the whole card or device.
    """

    memory_mib: int | None = field(default=None, name="memoryMiB")
    core_percent: int | None = None
    shares: int | None = None
    whole: bool | None = None
    pods: int | None = None


class ExtenderStatus(Struct, rename="camel", frozen=True, gc=False):
    """The fields of the status that the extender writes.

    free_mib: the MiB that a new container could get.
    classes: the names of the ResourceClasses that select the card or device, sorted.
    terminating: the shares of deleted pods that the extender still counts, for the next leader.
    """

    allocated: Allocated | None = None
    free_mib: int | None = field(default=None, name="freeMiB")
    classes: tuple[str, ...] = ()
    terminating: tuple[ContainerShare, ...] = ()


class ExtendedResourceStatus(ExtenderStatus, rename="camel", frozen=True, gc=False):
    """The whole status: also the fields that the device plugin and the MPS manager write.

    health: Healthy or Unhealthy; "" before the first report.
    reason: why the card or device is unhealthy.
    gpu_access: how containers get the card: cdi or env.
    reported: the shares of deleted pods, as the device plugin reports them; None before the first report.
    mps: None if the node has no MPS manager.
    isolation: None before the first report, and for devices other than GPUs.
    """

    health: str = ""
    reason: str = ""
    gpu_access: str = ""
    reported: tuple[ContainerShare, ...] | None = None
    mps: MpsStatus | None = None
    isolation: IsolationStatus | None = None


class ExtendedResource(Struct, frozen=True, gc=False):
    """A card of a node, or another device."""

    metadata: ObjectMeta
    spec: ExtendedResourceSpec
    status: ExtendedResourceStatus = ExtendedResourceStatus()


_decode = msgspec.json.Decoder(ExtendedResource).decode
_decode_json = msgspec.json.Decoder(Json).decode
_MALFORMED_SHARE: Final = {"podUID": ""}
prepare_types(ContainerShare)


def decode(raw: bytes) -> ExtendedResource:
    """Decode an ExtendedResource. A malformed share gets the UID "", which belongs to no pod. The schema forbids such
    shares, but a single one must not make the whole card unreadable. Raises msgspec.DecodeError.
    """
    try:
        return _decode(raw)
    except msgspec.ValidationError:
        return _decode(_replace_malformed_shares(raw))


def _replace_malformed_shares(raw: bytes) -> bytes:
    manifest = _decode_json(trim_object(raw))
    status = {key: entry for key, entry in (manifest.get("status") or {}).items() if entry is not None}
    for key in ("reported", "terminating"):
        status[key] = [entry if _is_share(entry) else _MALFORMED_SHARE for entry in status.get(key) or ()]
    return msgspec.json.encode(manifest | {"status": status})


def _is_share(entry: object) -> bool:
    try:
        msgspec.convert(entry, ContainerShare)
    except msgspec.ValidationError:
        return False
    return True


def is_other_device(resource: ExtendedResource) -> bool:
    """Whether the ExtendedResource is a device other than a GPU."""
    return resource.spec.kind != classes.GPU_KIND


def labels_of(resource: ExtendedResource) -> dict[str, str]:
    """The labels for selectors, from the spec and from the labels of the object."""
    spec = resource.spec
    return classes.card_labels(
        node=spec.node,
        index=spec.index,
        uuid=spec.uuid,
        model=spec.model,
        memory=MiB(spec.memory_mib),
        properties=spec.properties,
        own=resource.metadata.labels,
        kind=spec.kind,
    )


def card_of(resource: ExtendedResource, classifier: Classifier | None = None) -> Card:
    """The card of an ExtendedResource. If `classifier` is None, the card has no classes."""
    spec = resource.spec
    card_classes = _NO_CLASSES
    if classifier is not None:
        card_classes = classifier.classes_of(labels_of(resource))
    return Card(
        index=spec.index,
        uuid=intern(spec.uuid),
        mem=quantity.shared_mib(
            max(0, min(spec.memory_mib, MAX_MIB))
        ),  # checked here, too: searches would fail on more
        model=intern(spec.model),
        healthy=resource.status.health == "Healthy",
        cordoned=spec.unschedulable,
        classes=card_classes,
        priority=classifier.priority_of(card_classes) if classifier is not None else 0,
        headroom=headroom_of(resource),
        mps=mps_of_card(resource.status.mps),
        has_kernel_limit=has_kernel_limit(resource),
    )


def headroom_of(resource: ExtendedResource) -> MiB:
    """The MiB of the card's memory that the driver and the MPS server use."""
    return quantity.shared_mib(max(0, min(resource.spec.headroom_mib, resource.spec.memory_mib, MAX_MIB)))


def device_of(resource: ExtendedResource, classifier: Classifier | None = None) -> Device:
    """The device of an ExtendedResource that is not a GPU."""
    spec = resource.spec
    return Device(
        uuid=intern(spec.uuid),
        kind=intern(spec.kind),
        index=spec.index,
        model=intern(spec.model),
        healthy=resource.status.health == "Healthy",
        cordoned=spec.unschedulable,
        classes=classifier.classes_of(labels_of(resource)) if classifier is not None else _NO_CLASSES,
    )


def has_kernel_limit(resource: ExtendedResource) -> bool:
    """Whether the driver limits the memory of containers with a share of this card only."""
    tiers = resource.status.isolation
    return tiers is not None and tiers.memory == MemoryTier.KERNEL


def mps_of_card(status: MpsStatus | None) -> CardMps | None:
    """The MPS of a card; None if its node has no MPS manager, or MPS is unavailable on the card.

    A card in an unknown MPS state takes no pods.
    """
    if status is None or status.state == MpsState.UNAVAILABLE:
        return None
    return _interned_mps(
        status.state in _MPS_STATES_THAT_TAKE_PODS,
        status.mode == DaemonScope.NODE,
        status.multi_user,
        max(0, status.max_clients),
    )


@lru_cache(maxsize=1024)
def _interned_mps(ready: bool, serves_several: bool, multi_user: bool, max_clients: int) -> CardMps:
    """The MPS of a card, as one shared object for equal cards."""
    return CardMps(ready, serves_several, multi_user, max_clients)


def is_uid(uid: str) -> bool:
    """Whether the text is valid as the UID of a pod. Keys of the ledger that are not UIDs of pods contain a "/"."""
    return _UID.fullmatch(uid) is not None


def reported_shares(resource: ExtendedResource) -> Iterator[ContainerShare]:
    """The plausible shares that the node reports for its card, up to the card's memory; see
    `extender/cache/reservations.py`.
    """
    remaining_mib = resource.spec.memory_mib
    for share in (resource.status.reported or ())[:MAX_REPORTED_PER_CARD]:
        if share.mem >= 0 and 0 <= share.core <= FULL_CORE and is_uid(share.uid):
            counted_mib = min(share.mem, remaining_mib)
            remaining_mib -= counted_mib
            yield share if counted_mib == share.mem else msgspec.structs.replace(share, mem=counted_mib)


def terminating_shares(resource: ExtendedResource) -> Iterator[ContainerShare]:
    """The shares of deleted pods that the extender still counted when it last wrote the status."""
    return (share for share in resource.status.terminating if is_uid(share.uid))
