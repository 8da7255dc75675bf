"""Computes the ResourceClasses of all cards and devices of a cluster.

The core's classifier handles one card; this module makes the classification of 40,000 cards cheap. Classes whose
selectors read the same labels form a group, and a group is evaluated once for all cards with equal values of these
labels. So a class that selects by node does not force an evaluation of each card for the classes that select by model.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cardwise.core.api import classes
from cardwise.core.api.cards import Card
from cardwise.core.api.classes import Classifier, ResourceClass
from cardwise.core.placement.devices import Device
from cardwise.core.values.quantity import MiB
from extender.records.cards import CardRecord

# Maximum number of entries of a table: nodes write labels and models, and may change them at any time. A full table is
# emptied, and then its cards are computed once more. A cluster has tens of models, and fewer combinations of classes.
_MAX_REMEMBERED_GROUPS = 4096
_MAX_REMEMBERED_LABELS = 16_384  # maximum number of label values that a group remembers
_MAX_LABEL_CHARACTERS = 512  # the classes of a card whose labels have more characters are not remembered

ReadProperty = Callable[[CardRecord, Card], object]

# For the labels that each card has: a fast function that returns equal objects for equal label values. The objects need
# not be the label values themselves.
_BUILT_IN_PROPERTIES: Mapping[str, ReadProperty] = {
    "kind": lambda _, __: classes.GPU_KIND,
    "model": lambda _, card: card.model,
    "memory": lambda _, card: card.mem,
    "node": lambda record, _: record.node,
    "hostname": lambda record, _: record.node,
    "index": lambda _, card: card.index,
    "uuid": lambda _, card: card.uuid,
}


class CardClasses(NamedTuple):
    """The classes of a card or device, and the highest of their priorities, which is 0 for devices."""

    classes: frozenset[str]
    priority: int


NO_CLASSES = CardClasses(frozenset(), 0)


class ClassMembership:
    """Computes the classes of a card, and remembers the results.

    Equal results are the same object, if possible one of `known_classes`. So callers can compare 40,000 results by
    identity.
    """

    def __init__(self, resource_classes: Iterable[ResourceClass], known_classes: Iterable[CardClasses] = ()) -> None:
        resource_classes = list(resource_classes)
        self._all = Classifier(resource_classes)  # for devices, models and priorities, which need no groups
        by_keys: dict[frozenset[str], list[ResourceClass]] = {}
        for resource_class in resource_classes:
            if not resource_class.other:
                by_keys.setdefault(resource_class.selector.keys, []).append(resource_class)
        self._groups = [_Group(keys, members) for keys, members in by_keys.items()]
        self._members: dict[tuple[frozenset[str], ...], CardClasses] = {}  # the values are in `_interned`
        self._interned = {member: member for member in (NO_CLASSES, *known_classes)}

    def classes_of(self, record: CardRecord) -> CardClasses:
        """The classes of the card or device."""
        card = record.card
        if isinstance(card, Device):  # devices are few and need no groups
            of_device = CardClasses(self._all.classes_of(_labels(record)), 0)
            return self._intern(of_device)
        key = (self._all.automatic_class_of(card.model), *[group.classes_of(record, card) for group in self._groups])
        member = self._members.get(key)
        if member is None:
            all_classes = frozenset().union(*key)
            member = CardClasses(all_classes, self._all.priority_of(all_classes))
            if len(self._members) >= _MAX_REMEMBERED_GROUPS:
                self._members.clear()
            member = self._members[key] = self._intern(member)
        return member

    def _intern(self, member: CardClasses) -> CardClasses:
        """The shared object that is equal to `member`."""
        if len(self._interned) >= _MAX_REMEMBERED_GROUPS:
            self._members.clear()
            self._interned = {NO_CLASSES: NO_CLASSES}
        return self._interned.setdefault(member, member)


class _Group:
    """Classes whose selectors read the same labels."""

    def __init__(self, keys: frozenset[str], resource_classes: list[ResourceClass]) -> None:
        self._reads = [_BUILT_IN_PROPERTIES.get(key) or _label_reader(key) for key in sorted(keys)]
        self._classes = resource_classes
        self._classes_by_labels: dict[tuple[object, ...], frozenset[str]] = {}
        self._interned: dict[frozenset[str], frozenset[str]] = {}

    def classes_of(self, record: CardRecord, card: Card) -> frozenset[str]:
        key = tuple([read(record, card) for read in self._reads])
        matching = self._classes_by_labels.get(key)
        if matching is None:
            labels = _labels(record)
            matching = frozenset(
                resource_class.name for resource_class in self._classes if resource_class.selector.matches(labels)
            )
            if len(self._interned) >= _MAX_REMEMBERED_GROUPS:
                self._interned.clear()
            matching = self._interned.setdefault(matching, matching)
            if len(self._classes_by_labels) >= _MAX_REMEMBERED_LABELS:
                self._classes_by_labels.clear()
            if sum(len(text) for text in key if isinstance(text, str)) <= _MAX_LABEL_CHARACTERS:
                self._classes_by_labels[key] = matching
        return matching


def _label_reader(key: str) -> ReadProperty:
    return lambda record, _: record.labels.get(key)


def _labels(record: CardRecord) -> dict[str, str]:
    card = record.card
    return classes.card_labels(
        node=record.node,
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory=MiB(0) if isinstance(card, Device) else card.mem,
        properties=record.labels,
        own={},
        kind=card.kind if isinstance(card, Device) else classes.GPU_KIND,
    )
