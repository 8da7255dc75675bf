"""The metadata of objects."""

from msgspec import Struct


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


class OwnerReference(Struct, rename="camel", frozen=True):
    """The owner. Deleting it deletes this object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""


class OwnedMeta(ObjectMeta, frozen=True):
    """Metadata with owner references. ObjectMeta does not have them, since pods have owners that no part reads."""

    owner_references: list[OwnerReference] = []
