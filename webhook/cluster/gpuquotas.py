"""A GPUQuota, with its used amounts from the status."""

from collections.abc import Mapping
from dataclasses import dataclass

from cardwise.core.api import quotas
from cardwise.core.api.quotas import NO_CHARGE, Charge, GPUQuota, QuotaEntry
from cardwise.core.values.decoded import Json


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A quota, with the used amounts of its status by the (class, model) of each entry."""

    quota: GPUQuota
    used: Mapping[tuple[str, str], Charge]

    def used_by(self, entry: QuotaEntry) -> Charge:
        """The amounts in use of a quota entry."""
        return self.used.get((entry.resource_class, entry.model), NO_CHARGE)


def parse(manifest: Json) -> QuotaUsage:
    """Parse a quota under review, with its status. Raises InvalidRequest."""
    return QuotaUsage(quotas.parse(manifest), quotas.used_by_status(manifest))
