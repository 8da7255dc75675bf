"""Kubernetes objects as msgspec structs, with only the fields that Cardwise reads; decoding skips all other fields.

The structs follow the API; the types of the domain are in `cardwise.core`. This module has the structs that several
components use; for pods, the components have structs of their own.
"""

from enum import StrEnum
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from cardwise.core.api import classes
from cardwise.kube.nesting import tolerate_depth

_T = TypeVar("_T")
_ABSENT: Final = msgspec.Raw(b"")


def prepare_types(*types: type) -> None:
    """Build what msgspec needs of these types for `msgspec.convert`. Call it while the module is imported.

    msgspec builds it at the first use, and two threads that do so at the same time may crash the process. A `Decoder`
    that is made when its module is imported needs no preparation.
    """
    for decoded_type in types:
        msgspec.json.Decoder(decoded_type)


class ObjectMeta(Struct, rename="camel", frozen=True):
    """The metadata of an object. Times are RFC 3339 strings as sent.

    There is no resourceVersion, so that objects with equal content are equal: if a write changes none of these fields,
    a reflector sees no change.
    """

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class EventType(StrEnum):
    """The types of watch events."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    ERROR = "ERROR"


class WatchEvent(Struct):
    """One line of a watch; `object` is still JSON (a Status for ERROR)."""

    type: str
    object: msgspec.Raw


class ListMeta(Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = field(default="", name="continue")


class _TrimmedMeta(Struct, rename="camel", omit_defaults=True):
    """`metadata` without `managedFields`."""

    name: msgspec.Raw = _ABSENT
    generate_name: msgspec.Raw = _ABSENT
    namespace: msgspec.Raw = _ABSENT
    uid: msgspec.Raw = _ABSENT
    resource_version: msgspec.Raw = _ABSENT
    generation: msgspec.Raw = _ABSENT
    creation_timestamp: msgspec.Raw = _ABSENT
    deletion_timestamp: msgspec.Raw = _ABSENT
    deletion_grace_period_seconds: msgspec.Raw = _ABSENT
    labels: msgspec.Raw = _ABSENT
    annotations: msgspec.Raw = _ABSENT
    owner_references: msgspec.Raw = _ABSENT
    finalizers: msgspec.Raw = _ABSENT


class _ManagedMeta(_TrimmedMeta, rename="camel", omit_defaults=True):
    managed_fields: msgspec.Raw = _ABSENT


class _Trimmed(Struct, rename="camel", omit_defaults=True):
    """All fields that Cardwise reads of any object; `template` is a field of PodTemplates, `target` of Bindings."""

    api_version: msgspec.Raw = _ABSENT
    kind: msgspec.Raw = _ABSENT
    metadata: _TrimmedMeta | None = None
    spec: msgspec.Raw = _ABSENT
    status: msgspec.Raw = _ABSENT
    template: msgspec.Raw = _ABSENT
    target: msgspec.Raw = _ABSENT


class _TrimmedWithManagers(_Trimmed, rename="camel", omit_defaults=True):
    metadata: _ManagedMeta | None = None


_decode_trimmed = tolerate_depth(msgspec.json.Decoder(_Trimmed).decode)
_decode_with_managers = tolerate_depth(msgspec.json.Decoder(_TrimmedWithManagers).decode)
_decode_members = tolerate_depth(msgspec.json.Decoder(dict[str, msgspec.Raw]).decode)
_MANAGED_FIELDS = b'"managedFields"'
_encode = msgspec.json.Encoder().encode


def trim_object(raw: bytes, *, managed_fields: bool = False) -> bytes:
    """Copy an object's JSON without the fields that Cardwise does not read, as kube-scheduler trims watched objects.

    Call this before the JSON is decoded to dicts. Users who may change an object can fill its `metadata.managedFields`.
    Decoding one MiB of this field to dicts blocks all other threads for a quarter of a second and takes 24 MiB of
    memory. Skipping the field takes a millisecond.

    Args:
        raw: the object. Its other fields are copied unchanged, without checks.
        managed_fields: keep `metadata.managedFields`.

    Raises:
        msgspec.DecodeError, RecursionError: from the decoder.
    """
    return _encode(_decode_with_managers(raw) if managed_fields else _decode_trimmed(raw))


def drop_managed_fields(raw: bytes) -> bytes:
    """Copy an object's JSON without `metadata.managedFields`, for the reason in `trim_object`.

    All other fields are unchanged; JSON without metadata is returned unchanged. Raises RecursionError from the decoder.
    """
    if _MANAGED_FIELDS not in raw:
        return raw
    try:
        members = _decode_members(raw)
        metadata = _decode_members(members["metadata"])
    except (KeyError, msgspec.DecodeError):
        return raw
    metadata.pop("managedFields", None)
    return _encode(members | {"metadata": metadata})


class ListHead(Struct):
    """A List without its items."""

    metadata: ListMeta = field(default_factory=ListMeta)


class ListBegin(Struct):
    """As ListHead, but the metadata is required."""

    metadata: ListMeta


class ListOf(Struct, Generic[_T]):
    """A List whose items are decoded as records of one kind."""

    items: list[_T] | None = None


class List(Struct):
    """A List with its items as JSON. Items keep the bytes of the whole page in memory, so do not keep them."""

    metadata: ListMeta = field(default_factory=ListMeta)
    items: list[msgspec.Raw] | None = None


class Identity(Struct, rename="camel"):
    """The part of metadata that a reflector reads of each object."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class ObjectHead(Struct):
    """An object of any kind, with its identity only."""

    metadata: Identity


class ExistingObject(Struct):
    """An object whose fields are not read; only its presence matters."""


class ContainerState(Struct):
    """The state of a container: at most one field is set. If no field is set, the container is waiting."""

    running: ExistingObject | None = None
    terminated: ExistingObject | None = None


class RunAs(Struct, rename="camel"):
    """The user in the securityContext of a pod or a container."""

    run_as_user: int | None = None


class PodStatusHead(Struct, rename="camel"):
    phase: str = ""


class NodeAddress(Struct):
    type: str = ""
    address: str = ""


class NodeStatus(Struct):
    """The status of a node. Quantities are text as sent; `cardwise.core.values.quantity` parses them."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    addresses: list[NodeAddress] | None = None


class Node(Struct):
    metadata: ObjectMeta
    status: NodeStatus = field(default_factory=NodeStatus)


class Namespace(Struct):
    metadata: ObjectMeta


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


class OwnerReference(Struct, rename="camel", frozen=True):
    """The owner. Deleting it deletes this object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""


class OwnedMeta(ObjectMeta, frozen=True):
    """Metadata with owner references. ObjectMeta does not have them, since pods have owners that no component reads."""

    owner_references: list[OwnerReference] = []


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
