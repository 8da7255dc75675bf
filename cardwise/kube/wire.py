"""Kubernetes objects as msgspec structs: a field that is not named here costs nothing to skip.

These mirror the wire and change with the API; the types of the domain are in `cardwise.core`. Parts project pods with
structs or dicts of their own; what several of them share is here.
"""

from enum import StrEnum
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from cardwise.core.api import classes
from cardwise.kube.nesting import tolerate_depth

_T = TypeVar("_T")
_ABSENT: Final = msgspec.Raw(b"")


class ObjectMeta(Struct, rename="camel", frozen=True):
    """Times are RFC 3339 strings as sent.

    It has no resourceVersion, which each write changes: records of equal content are equal, so a write that changes
    nothing else is no change to a reflector.
    """

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class EventType(StrEnum):
    """The closed set of watch event types."""

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
    """The fields of an object that some part of ours reads; `template` is a PodTemplate's, `target` a Binding's."""

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
    """Copy an object's JSON without the fields that nobody reads, as kube-scheduler trims what it watches.

    Comes before the JSON is made into dicts. Whoever may change an object can fill its `metadata.managedFields`, and a
    MiB of these as dicts keeps all other threads from running for a quarter of a second and takes 24 MiB. To skip them
    takes a millisecond.

    Args:
        raw: the object. Its other fields are copied as they are, and not checked.
        managed_fields: keep these.

    Raises:
        msgspec.DecodeError, RecursionError: as the decoder does.
    """
    return _encode(_decode_with_managers(raw) if managed_fields else _decode_trimmed(raw))


def drop_managed_fields(raw: bytes) -> bytes:
    """An object's JSON without `metadata.managedFields`, for the reason that `trim_object` gives.

    All else is copied as it is. What is no object with metadata is returned as it is. Raises RecursionError as the
    decoder does.
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
    """As ListHead, of a List that surely has its metadata."""

    metadata: ListMeta


class ListOf(Struct, Generic[_T]):
    """A List whose items are read as records of one kind."""

    items: list[_T] | None = None


class List(Struct):
    """A List whose items are still JSON. They point into the page's bytes: keep projections, not items."""

    metadata: ListMeta = field(default_factory=ListMeta)
    items: list[msgspec.Raw] | None = None


class Identity(Struct, rename="camel"):
    """The part of metadata that a reflector reads of each object."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class ObjectHead(Struct):
    """Any object, of which only the identity is read."""

    metadata: Identity


class ExistingObject(Struct):
    """An object of which it only matters that it is there."""


class ContainerState(Struct):
    """The state of a container: at most one field is set; none means waiting."""

    running: ExistingObject | None = None
    terminated: ExistingObject | None = None


class RunAs(Struct, rename="camel"):
    """The securityContext of a pod or a container, of which only its user is read."""

    run_as_user: int | None = None


class PodStatusHead(Struct, rename="camel"):
    phase: str = ""


class NodeAddress(Struct):
    type: str = ""
    address: str = ""


class NodeStatus(Struct):
    """Quantities are strings as sent; `cardwise.core.values.quantity` parses them."""

    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    addresses: list[NodeAddress] | None = None


class Node(Struct):
    metadata: ObjectMeta
    status: NodeStatus = field(default_factory=NodeStatus)


class Namespace(Struct):
    metadata: ObjectMeta


class Cordon(Struct, frozen=True, omit_defaults=True):
    """Who cordoned a card or device, when and why, for people. `time` is RFC 3339."""

    reason: str = ""
    user: str = ""
    time: str = ""


class ExtendedResourceSpec(Struct, rename="camel"):
    """One card, or a device of another kind, as its device plugin describes it (docs/design/0001 and 0004).

    `index` counts those of its kind. Only cards have memory. `unschedulable` and `cordon` are people's.
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
    """With whose end the object ends."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""


class OwnedMeta(ObjectMeta, frozen=True):
    """Not in ObjectMeta: every pod has owners and nobody asks for them."""

    owner_references: list[OwnerReference] = []


class ContainerShare(Struct, rename="camel"):
    """What a container holds on a card, of a pod whose object is gone and whose containers are not; or the device that
    it holds, without memory then.

    `container` is the container's key, "" where the device plugin that gave the share was of an older version: nobody
    said then whether a card is held as a whole.
    """

    pod_uid: str = field(name="podUID")
    namespace: str = ""
    name: str = ""
    memory_mib: int = field(default=0, name="memoryMiB")
    core_percent: int = 0
    container: str = ""
    whole: bool = False

    def to_json(self) -> dict[str, object]:
        """As JSON of the object."""
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
    """How a card's MPS is, as its node's manager says (docs/design/0005-mps.md)."""

    mode: str = ""
    state: str = ""
    reason: str = ""
    multi_user: bool = False
    max_clients: int = 0


class ExtendedResourceStatus(Struct, rename="camel"):
    """`health` is Healthy or Unhealthy, "" before the first report; `card_access` is cdi or env. `mps`: None where the
    node has no MPS manager. `reported` is the node's word on pods whose object is gone, `terminating` the extender's.
    """

    health: str = ""
    reason: str = ""
    card_access: str = ""
    mps: MpsStatus | None = None
    reported: list[ContainerShare] | None = None
    terminating: list[ContainerShare] | None = None


class ExtendedResource(Struct):
    metadata: OwnedMeta
    spec: ExtendedResourceSpec
    status: ExtendedResourceStatus = field(default_factory=ExtendedResourceStatus)
