"""The GPUQuotas by namespace, and what they leave.

What is held is in the ledger. Not thread-safe: the state locks.
"""

from typing import NamedTuple

from cardwise.core.api import quotas
from cardwise.core.api.quotas import Charge, Entry, GPUQuota, Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.placement.ledger import Ledger


class FullEntry(NamedTuple):
    """An entry that leaves no room: the key of its quota, what is held of it, and what a pod asks."""

    quota: str
    entry: Entry
    used: Charge
    asked: Charge


class Quotas:
    """By "namespace/name". All quotas of a namespace apply, whatever they are called."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, GPUQuota]] = {}  # by namespace and key

    def set(self, key: str, quota: GPUQuota) -> bool:
        """Whether it is another one than before."""
        of_namespace = self._of.setdefault(quota.namespace, {})
        if of_namespace.get(key) == quota:
            return False
        of_namespace[key] = quota
        return True

    def remove(self, key: str) -> bool:
        """Whether it was there."""
        namespace, _, _ = key.partition("/")
        of_namespace = self._of.get(namespace, {})
        if of_namespace.pop(key, None) is None:
            return False
        if not of_namespace:
            del self._of[namespace]
        return True

    def limits(self, namespace: str) -> bool:
        """Whether the namespace has a quota at all."""
        return namespace in self._of

    def headroom(self, ledger: Ledger, namespace: str) -> list[Headroom]:
        """What the entries of all quotas leave to the namespace, for what is held now."""
        of_namespace = self._of.get(namespace)
        if of_namespace is None:
            return []
        return [
            quotas.headroom(entry, ledger.used(namespace, entry))
            for quota in of_namespace.values()
            for entry in quota.entries
        ]

    def full_entry(self, ledger: Ledger, namespace: str, request: PodRequest) -> FullEntry | None:
        """The entry to name to a person whom a quota keeps waiting: of what the pod asks for rather than of all cards.

        A whole card's MiB are not known before it is chosen: they are at least those of the smallest that there is.
        Who is kept waiting because only bigger ones are free is told nothing.
        """
        named = {container.device_class for container in request.containers} - {""}
        full = []
        for key, quota in self._of.get(namespace, {}).items():
            for entry in quota.entries:
                used, asked = ledger.used(namespace, entry), _asked(ledger, entry, request)
                if not quotas.headroom(entry, used).takes(asked):
                    full.append(FullEntry(key, entry, used, asked))
        return max(full, key=lambda one: one.entry.device_class in named, default=None)


def _asked(ledger: Ledger, entry: Entry, request: PodRequest) -> Charge:
    """What the containers ask that may get a card which the entry counts."""
    kinds = ledger.kinds
    charges = []
    for container in request.containers:
        if kinds.allowed(container.device_class, (entry,)) == kinds.allowed(container.device_class):
            continue  # it gets no card that the entry counts
        if container.whole:
            mib = max(0, kinds.smallest(container.device_class, entry) - ledger.kept_back)
            charges.append(Charge(container.cards, container.cards * mib, container.cards))
        else:
            charges.append(Charge(container.cards, container.mem, 0))
    return quotas.total(charges)
