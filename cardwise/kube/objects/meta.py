"""The metadata of objects."""

from msgspec import Struct


class OwnerReference(Struct, rename="camel", frozen=True, gc=False):
    """An owner. Deleting it deletes this object. `controller`: whether the owner recreates this object after a
    deletion.
    """

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class ObjectMeta(Struct, rename="camel", frozen=True, gc=False):
    """The metadata of an object. Times are RFC 3339 strings as sent.

    The resourceVersion is left out, so objects with equal content are equal. If a write leaves all these fields as they
    are, a reflector sees no change.

    deletion_grace_period_seconds: set while the object is being deleted, as `deletion_timestamp`.
    """

    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None

    @property
    def controller(self) -> OwnerReference | None:
        """The owner that would recreate the object; None for a bare object."""
        return next((owner for owner in self.owner_references if owner.controller), None)
