"""ExtendedResources: cards of nodes, and other devices, with their whole status."""

import re
from collections.abc import Iterator
from functools import lru_cache
from sys import intern

import msgspec
from msgspec import Struct, field

from cardwise.core.api import classes, names
from cardwise.core.api.cards import FULL_CORE, Card
from cardwise.core.api.classes import Classifier
from cardwise.core.api.mps import DaemonScope, MpsState
from cardwise.core.api.mpsprofile import CardMps
from cardwise.core.placement.devices import Device
from cardwise.core.values import quantity
from cardwise.core.values.quantity import MAX_MIB, MiB
from cardwise.kube.objects.meta import OwnedMeta

MAX_CARDS_PER_NODE = 256  # cards and devices of a node that count; a compromised node may report more
MAX_REPORTED_PER_CARD = 512  # reported shares of a card that count; far more than pods that fit on a node
_UID = re.compile(names.POD_UID)
_NO_CLASSES: frozenset[str] = frozenset()  # one shared object for tens of thousands of cards
_TAKING = (MpsState.READY, MpsState.OFF)


class Cordon(Struct, frozen=True, omit_defaults=True):
    """Why, by which user and when (RFC 3339) a card or device was cordoned; for users."""

    reason: str = ""
    user: str = ""
    time: str = ""


class ExtendedResourceSpec(Struct, rename="camel"):
    """A card or other device, as its device plugin describes it (docs/design/0001 and 0004).

    index: the number of the card or device on the node; each kind has its own numbers.
    memory_mib: total MiB; 0 for devices other than GPUs.
    unschedulable, cordon: set by users, to cordon the card or device.
    """

    node: str
    index: int
    uuid: str
    kind: str = classes.KIND
    model: str = ""
    memory_mib: int = field(default=0, name="memoryMiB")
    properties: dict[str, str] = {}
    unschedulable: bool = False
    cordon: Cordon = field(default_factory=Cordon)


class ContainerShare(Struct, rename="camel"):
    """A container's share of a card, or its device (with 0 MiB). The pod's object is deleted, but its containers may
    still run.

    container: the container's key; "" if an older version of the device plugin granted the share. Such a version did
        not record `whole`.
    whole: whether the share is a whole card.
    """

    pod_uid: str = field(name="podUID")
    namespace: str = ""
    name: str = ""
    memory_mib: int = field(default=0, name="memoryMiB")
    core_percent: int = 0
    container: str = ""
    whole: bool = False

    def to_json(self) -> dict[str, object]:
        """The share as in the JSON of an ExtendedResource's status."""
        return {
            "podUID": self.pod_uid,
            "namespace": self.namespace,
            "name": self.name,
            "memoryMiB": self.memory_mib,
            "corePercent": self.core_percent,
            **({"container": self.container} if self.container else {}),
            **({"whole": True} if self.whole else {}),
        }


class MpsStatus(Struct, rename="camel"):
    """The state of a card's MPS, as its node's MPS manager reports it (docs/design/0005-mps.md)."""

    mode: str = ""
    state: str = ""
    reason: str = ""
    multi_user: bool = False
    max_clients: int = 0


class ExtendedResourceStatus(Struct, rename="camel"):
    """The status of an ExtendedResource.

    health: Healthy or Unhealthy; "" before the first report.
    reason: why the card or device is unhealthy.
    gpu_access: how containers get the card: cdi or env.
    mps: None if the node has no MPS manager.
    reported: the shares of deleted pods, as the device plugin reports them.
    terminating: the shares of deleted pods that the extender still counts.
    """

    health: str = ""
    reason: str = ""
    gpu_access: str = ""
    mps: MpsStatus | None = None
    reported: list[ContainerShare] | None = None
    terminating: list[ContainerShare] | None = None


class ExtendedResource(Struct):
    metadata: OwnedMeta
    spec: ExtendedResourceSpec
    status: ExtendedResourceStatus = field(default_factory=ExtendedResourceStatus)


def is_other_device(resource: ExtendedResource) -> bool:
    """Whether the ExtendedResource is a device other than a GPU."""
    return resource.spec.kind != classes.KIND


def labels_of(resource: ExtendedResource) -> dict[str, str]:
    """The labels for selectors, from the spec and from the labels of the object."""
    spec = resource.spec
    return classes.labels(
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
    """The card of an ExtendedResource. Without a classifier, the card has no classes."""
    spec = resource.spec
    card_classes = _NO_CLASSES
    if classifier is not None:
        card_classes = classifier.classes_of(labels_of(resource))
    return Card(
        index=spec.index,
        uuid=intern(spec.uuid),
        mem=quantity.size(max(0, min(spec.memory_mib, MAX_MIB))),  # the schema of older versions has no maximum
        model=intern(spec.model),
        healthy=resource.status.health == "Healthy",
        cordoned=spec.unschedulable,
        classes=card_classes,
        priority=classifier.priority_of(card_classes) if classifier is not None else 0,
        mps=mps_of_card(resource.status.mps),
    )


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


def mps_of_card(status: MpsStatus | None) -> CardMps | None:
    """The MPS of a card; None if its node has no MPS manager. A card in an unknown MPS state takes no pods."""
    if status is None:
        return None
    return _interned_mps(
        status.state in _TAKING, status.mode == DaemonScope.NODE, status.multi_user, max(0, status.max_clients)
    )


@lru_cache(maxsize=1024)
def _interned_mps(ready: bool, serves_several: bool, multi_user: bool, max_clients: int) -> CardMps:
    """The MPS of a card, as one shared object for equal cards."""
    return CardMps(ready, serves_several, multi_user, max_clients)


def is_whole_card(share: ContainerShare, mem: int) -> bool:
    """Whether the share is a whole card of `mem` MiB. Older versions did not record this; for their shares the amounts
    decide.
    """
    return share.whole or (not share.container and share.core_percent >= FULL_CORE and share.memory_mib >= mem)


def is_uid(uid: str) -> bool:
    """Whether the text is valid as the UID of a pod. Keys of the ledger that are not UIDs of pods contain a "/"."""
    return _UID.fullmatch(uid) is not None


def plausible_shares(resource: ExtendedResource) -> Iterator[ContainerShare]:
    """The shares that the node reports for its card, up to the card's memory; see `extender/cache/reservations.py`."""
    remaining_mib = resource.spec.memory_mib
    for share in (resource.status.reported or ())[:MAX_REPORTED_PER_CARD]:
        if share.memory_mib >= 0 and 0 <= share.core_percent <= FULL_CORE and is_uid(share.pod_uid):
            counted_mib = min(share.memory_mib, remaining_mib)
            remaining_mib -= counted_mib
            yield share if counted_mib == share.memory_mib else msgspec.structs.replace(share, memory_mib=counted_mib)
