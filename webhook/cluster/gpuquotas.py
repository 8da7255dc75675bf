"""A GPUQuota and what is used of it, from the quota's status."""

from collections.abc import Mapping
from dataclasses import dataclass

from cardwise.core.api.quotas import NOTHING, Charge, GPUQuota, QuotaEntry


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A quota and the amounts in use according to its status, by (class, model) of its entries."""

    quota: GPUQuota
    used: Mapping[tuple[str, str], Charge]

    def used_by(self, entry: QuotaEntry) -> Charge:
        """The amounts in use of an entry."""
        return self.used.get((entry.resource_class, entry.model), NOTHING)
