"""The GPUQuotas by namespace, and their remaining amounts.

The ledger has the used amounts. Not thread-safe: the caller holds the lock of `State`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from cardwise.core.api import quotas
from cardwise.core.api.quotas import Charge, GPUQuota, Headroom, QuotaEntry
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.placement.ledger import Ledger


class FullEntry(NamedTuple):
    """A quota entry that a pod would exceed: the key of its quota, the used amounts and the requested amounts."""

    quota: str
    entry: QuotaEntry
    used: Charge
    requested: Charge


class Quotas:
    """The quotas by "namespace/name". All quotas of a namespace apply, whatever their names are."""

    def __init__(self) -> None:
        # By namespace and key. The inner mappings are replaced, never changed: snapshots share them.
        self._by_namespace: dict[str, Mapping[str, GPUQuota]] = {}

    def snapshot(self) -> "Quotas":
        """A copy of the quotas, independent of the original."""
        duplicate = Quotas()
        duplicate._by_namespace = self._by_namespace.copy()
        return duplicate

    def set_quota(self, key: str, quota: GPUQuota) -> bool:
        """Set the quota. Returns whether the quota has changed."""
        of_namespace = self._by_namespace.get(quota.namespace, {})
        if of_namespace.get(key) == quota:
            return False
        self._by_namespace[quota.namespace] = {**of_namespace, key: quota}
        return True

    def remove_quota(self, key: str) -> bool:
        """Remove the quota. Returns whether the quota existed."""
        namespace, _, _ = key.partition("/")
        of_namespace = self._by_namespace.get(namespace, {})
        if key not in of_namespace:
            return False
        other_quotas = {other_key: quota for other_key, quota in of_namespace.items() if other_key != key}
        if other_quotas:
            self._by_namespace[namespace] = other_quotas
        else:
            del self._by_namespace[namespace]
        return True

    def has_quota(self, namespace: str) -> bool:
        """Whether the namespace has any quota."""
        return namespace in self._by_namespace

    def headroom(self, ledger: Ledger, namespace: str) -> list[Headroom]:
        """The amounts that each entry of each quota still allows to the namespace."""
        of_namespace = self._by_namespace.get(namespace)
        if of_namespace is None:
            return []
        return [
            quotas.headroom(entry, ledger.used_amounts(namespace, entry))
            for quota in of_namespace.values()
            for entry in quota.entries
        ]

    def is_exceeded_by(self, ledger: Ledger, namespace: str, request: PodRequest) -> bool:
        """Whether the request exceeds an entry for every possible choice of cards.

        If not, the request may still exceed a quota: with the cards that are free, or because it exceeds several
        entries only together.
        """
        return any(
            not headroom.has_room_for(fitting.min_charge_of_share(request, ledger.kinds, headroom.entry))
            for headroom in self.headroom(ledger, namespace)
        )

    def full_entry(self, ledger: Ledger, namespace: str, request: PodRequest) -> FullEntry | None:
        """The entry to name in an event for a pod that waits for its quota; None if no entry is full.

        Of several full entries, an entry that the pod exceeds with every choice of cards comes first. Then come entries
        for the requested class, and last an entry for all cards.

        The MiB of a whole card are unknown before the card is chosen, so the MiB of the smallest card are used. A pod
        that waits because only larger cards are free gets no event.
        """
        requested_classes = {container.resource_class for container in request.containers} - {""}
        full_entries: list[tuple[tuple[bool, bool], FullEntry]] = []
        for key, quota in self._by_namespace.get(namespace, {}).items():
            for entry in quota.entries:
                used, requested = ledger.used_amounts(namespace, entry), _requested_charge(ledger, entry, request)
                headroom = quotas.headroom(entry, used)
                if not headroom.has_room_for(requested):
                    is_certain = not headroom.has_room_for(fitting.min_charge_of_share(request, ledger.kinds, entry))
                    full_entries.append(
                        (
                            (is_certain, entry.resource_class in requested_classes),
                            FullEntry(key, entry, used, requested),
                        )
                    )
        return max(full_entries, key=lambda candidate: candidate[0])[1] if full_entries else None


def _requested_charge(ledger: Ledger, entry: QuotaEntry, request: PodRequest) -> Charge:
    """The sum of the card requests that may get a card of the entry's class."""
    kinds = ledger.kinds
    charges = []
    for container in request.containers:
        if not kinds.is_class_counted(container.resource_class, entry):
            continue  # this request gets no card that the entry counts
        smallest = max(0, kinds.smallest(container.resource_class, entry)) if container.whole else 0
        charges.append(quotas.min_charge_of_share(container.cards, container.mem, smallest))
    return quotas.sum_charges(charges)
