"""What the API server sends around objects: lists, watch events and identities; and objects without unread fields.

The objects themselves are decoded in `cardwise.kube.objects`.
"""

from enum import StrEnum
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct, field

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
    """Copy only those fields of an object's JSON that Cardwise reads. kube-scheduler trims watched objects in the same
    way.

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
    """Copy an object's JSON without `metadata.managedFields`; `trim_object` has the reason.

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
