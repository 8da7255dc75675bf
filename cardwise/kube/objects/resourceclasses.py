"""ResourceClasses: the class, or why it cannot be read, and the fields for writes and statuses."""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from cardwise.core.api import classes
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.decoded import Json
from cardwise.kube.objects.unreadable import Unreadable, parse_or_unreadable
from cardwise.kube.wire import trim_object

_decode_json: Final = msgspec.json.Decoder(Json).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRecord:
    """A ResourceClass.

    created: the creationTimestamp in UTC; comparing the texts compares the times.
    auto_models: the models of an automatic class; empty if a person has created or edited the class.
    """

    name: str = ""
    parsed: ResourceClass | Unreadable
    uid: str = ""
    version: str = ""
    created: str = ""
    generation: int = 0
    auto_models: tuple[str, ...] = ()
    status: Json = field(default_factory=dict)

    @property
    def resource_class(self) -> ResourceClass | None:
        """The class; None if it cannot be read."""
        return None if isinstance(self.parsed, Unreadable) else self.parsed

    @property
    def problem(self) -> str | None:
        """Why the class cannot be read; None if it can."""
        return self.parsed.problem if isinstance(self.parsed, Unreadable) else None


def decode(raw: bytes) -> ClassRecord:
    """Decode a ResourceClass. Raises msgspec.DecodeError if the JSON is invalid."""
    return record_of(_decode_json(trim_object(raw)))


def record_of(manifest: Json) -> ClassRecord:
    """The record of a ResourceClass that is decoded already."""
    metadata = manifest["metadata"]
    return ClassRecord(
        name=metadata["name"],
        parsed=parse_or_unreadable(classes.parse, manifest),
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        created=metadata.get("creationTimestamp", ""),
        generation=metadata.get("generation", 0),
        auto_models=classes.auto_models(manifest),
        status=manifest.get("status") or {},
    )
