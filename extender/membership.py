"""Which ResourceClasses each card is in, for all cards of a cluster at once.

Apart from the classifier of the core, which it asks: here is what makes 40,000 cards cheap. Selectors that ask about
the same labels are one group, and a group is asked once for all cards that are equal in those labels; so a class that
names nodes does not make every card a case of its own for the classes that name models.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cardwise.core import classes
from cardwise.core.classes import Classifier, DeviceClass
from extender.projection import CardRecord

Read = Callable[[CardRecord], object]

# What a card says for a label that it always has. As cheap as can be: equal cards must only give equal values.
_BUILT_IN: Mapping[str, Read] = {
    "kind": lambda _: classes.KIND,
    "model": lambda record: record.card.model,
    "memory": lambda record: record.card.mem,
    "node": lambda record: record.node,
    "hostname": lambda record: record.node,
    "index": lambda record: record.card.index,
    "uuid": lambda record: record.card.uuid,
}


class Member(NamedTuple):
    """The classes of a card, and the highest of their priorities."""

    classes: frozenset[str]
    priority: int


NO_MEMBER = Member(frozenset(), 0)


class Membership:
    """Of these classes. Remembers what it was asked.

    Equal answers are one object, and that is the one among `known` if there is one: so 40,000 of them are compared by
    their addresses.
    """

    def __init__(self, of: Iterable[DeviceClass], known: Iterable[Member] = ()) -> None:
        of = list(of)
        self._all = Classifier(of)
        by_keys: dict[frozenset[str], list[DeviceClass]] = {}
        for one in of:
            by_keys.setdefault(one.selector.keys, []).append(one)
        self._groups = [_Group(keys, together) for keys, together in by_keys.items()]
        self._members: dict[tuple[frozenset[str], ...], Member] = {}
        self._same = {member: member for member in (NO_MEMBER, *known)}

    def of(self, record: CardRecord) -> Member:
        """The classes of the card."""
        found = tuple([group.of(record) for group in self._groups])
        member = self._members.get(found)
        if member is None:
            together = frozenset().union(*found)
            member = Member(together, self._all.priority_of(together))
            member = self._members[found] = self._same.setdefault(member, member)
        return member


class _Group:
    """Classes whose selectors ask about the same labels."""

    def __init__(self, keys: frozenset[str], together: list[DeviceClass]) -> None:
        self._reads = [_BUILT_IN.get(key) or _read_label(key) for key in sorted(keys)]
        self._classifier = Classifier(together)
        self._known: dict[tuple[object, ...], frozenset[str]] = {}
        self._same: dict[frozenset[str], frozenset[str]] = {}

    def of(self, record: CardRecord) -> frozenset[str]:
        asked = tuple([read(record) for read in self._reads])
        found = self._known.get(asked)
        if found is None:
            found = self._classifier.classes_of(_labels(record))
            found = self._known[asked] = self._same.setdefault(found, found)
        return found


def _read_label(key: str) -> Read:
    return lambda record: record.labels.get(key)


def _labels(record: CardRecord) -> dict[str, str]:
    card = record.card
    return classes.labels(
        node=record.node,
        index=card.index,
        uuid=card.uuid,
        model=card.model,
        memory=card.mem,
        properties=record.labels,
        own={},
    )
