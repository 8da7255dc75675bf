"""Listers: Cardwise's objects as the watch shows them, for the controllers that write these objects.

Controllers read listers instead of the state, which is locked while pods are placed. A lister records the changes since
the last read. So a controller compares only the changed cards, not all 40,000.
"""

import threading
from collections import Counter
from typing import Generic, TypeVar

from cardwise.core.api import classes
from cardwise.core.placement.devices import Device
from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE
from cardwise.kube.objects.gpuquotas import QuotaRecord
from cardwise.kube.objects.resourceclasses import ClassRecord
from extender.gangs.podgroups import GroupRecord
from extender.records.cards import CardRecord

T = TypeVar("T")


class Lister(Generic[T]):
    """The objects of one kind by key, and the keys of changed objects. One thread writes, another thread reads."""

    def __init__(self) -> None:
        self.objects: dict[str, T] = {}
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def set_object(self, key: str, new: T) -> None:
        """Update the object."""
        with self._lock:
            object_before = self.objects.get(key)
            self.objects[key] = new
            self._record_change(key, object_before, new)

    def remove_object(self, key: str) -> None:
        """Remove the object."""
        with self._lock:
            self._record_change(key, self.objects.pop(key, None), None)

    def take_changed(self) -> set[str]:
        """The keys of objects that were changed, created or deleted since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def snapshot(self) -> dict[str, T]:
        """A copy of all objects, taken in one step."""
        with self._lock:
            return dict(self.objects)

    def _record_change(self, key: str, before: T | None, new: T | None) -> None:
        """Record a change of the object. The caller holds the lock. None: the object did not exist, or was deleted."""
        del before, new
        self._changed.add(key)


class CardLister(Lister[CardRecord]):
    """As `Lister`, but changes are recorded by node. Also counts the cards of each model, for automatic classes.

    Stores at most as many cards of a node as the ledger (`inventory`). So a hostile node that invents cards cannot
    cause writes of their statuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_node: dict[str, set[str]] = {}
        self._models: Counter[str] = Counter()

    def set_object(self, key: str, new: CardRecord) -> None:
        object_before = self.objects.get(key)
        if object_before is not None and object_before.node != new.node:
            self.remove_object(key)
            object_before = None
        if object_before is not None or len(self._of_node.get(new.node, ())) < MAX_CARDS_PER_NODE:
            super().set_object(key, new)

    def cards_on(self, node: str) -> list[str]:
        """The cards of the node."""
        with self._lock:
            return list(self._of_node.get(node, ()))

    def nodes(self) -> set[str]:
        """The nodes that have cards."""
        with self._lock:
            return set(self._of_node)

    def models(self) -> set[str]:
        """The models of all present cards."""
        with self._lock:
            return set(filter(None, self._models))

    def automatic_classes(self) -> set[str]:
        """The names of the automatic classes of all present cards, including classes without an object."""
        return {classes.name_of_model(model) for model in self.models()}

    def _record_change(self, key: str, before: CardRecord | None, new: CardRecord | None) -> None:
        if before is not None:
            self._changed.add(before.node)
            node_cards = self._of_node[before.node]
            node_cards.discard(key)
            if not node_cards:
                del self._of_node[before.node]
            model = _model_of(before)
            if model is not None:
                self._models[model] -= 1
                if not self._models[model]:
                    del self._models[model]
        if new is not None:
            self._changed.add(new.node)
            self._of_node.setdefault(new.node, set()).add(key)
            model = _model_of(new)
            if model is not None:
                self._models[model] += 1


def _model_of(record: CardRecord) -> str | None:
    """The model of a GPU; None for other devices."""
    return None if isinstance(record.card, Device) else record.card.model


class ClassLister(Lister[ClassRecord]):
    """As `Lister`, and records which classes were deleted."""

    def __init__(self) -> None:
        super().__init__()
        self._deleted: list[str] = []

    def remove_object(self, key: str) -> None:
        super().remove_object(key)
        with self._lock:
            self._deleted.append(key)

    def take_deleted(self) -> list[str]:
        """The names of the classes that were deleted since the last call."""
        with self._lock:
            deleted, self._deleted = self._deleted, []
            return deleted


class Listers:
    """The listers of all four kinds. Keys: the names of cards and classes, "namespace/name" of quotas and PodGroups."""

    def __init__(self) -> None:
        self.cards = CardLister()
        self.classes = ClassLister()
        self.quotas: Lister[QuotaRecord] = Lister()
        self.groups: Lister[GroupRecord] = Lister()
