"""GPUQuotas: the quota with its status, or the reason why the quota is unreadable."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cardwise.core.api import quotas
from cardwise.core.api.quotas import Charge, GPUQuota
from cardwise.core.values.decoded import Json
from cardwise.kube.objects.unreadable import Unreadable, parse_or_unreadable
from cardwise.kube.wire import trim_object

_decode_json: Final = msgspec.json.Decoder(Json).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRecord:
    """A GPUQuota. `used`: the used amounts from the status, by the (class, model) of each entry."""

    namespace: str
    name: str
    parsed: GPUQuota | Unreadable
    uid: str = ""
    generation: int = 0
    status: Json = field(default_factory=dict)
    used: Mapping[tuple[str, str], Charge] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The quota as "namespace/name"."""
        return f"{self.namespace}/{self.name}"

    @property
    def quota(self) -> GPUQuota | None:
        """The quota; None if it cannot be read."""
        return None if isinstance(self.parsed, Unreadable) else self.parsed

    @property
    def problem(self) -> str | None:
        """Why the quota cannot be read; None if it can."""
        return self.parsed.problem if isinstance(self.parsed, Unreadable) else None


def decode(raw: bytes) -> QuotaRecord:
    """Decode a GPUQuota. Raises msgspec.DecodeError if the JSON is invalid."""
    return record_of(_decode_json(trim_object(raw)))


def record_of(manifest: Json) -> QuotaRecord:
    """The record of a GPUQuota that is decoded already."""
    metadata = manifest["metadata"]
    return QuotaRecord(
        namespace=metadata["namespace"],
        name=metadata["name"],
        parsed=parse_or_unreadable(quotas.parse, manifest),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        status=manifest.get("status") or {},
        used=quotas.used_by_status(manifest),
    )
