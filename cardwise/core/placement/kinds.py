"""Kinds of cards: one small integer for all cards with the same classes, model and priority.

Requests and quotas select cards by kind, because a cluster has few kinds and thousands of cards. A kind exists as long
as a card is of this kind. This includes a removed card if a pod still holds a share of it. The integer of a former kind
is never reused.
"""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from cardwise.core.api import quotas
from cardwise.core.api.cards import Card
from cardwise.core.api.quotas import Charge, QuotaEntry
from cardwise.core.values.quantity import MiB

UNKNOWN_KIND: Final = -1  # in place of the kind of a card that no node has reported

_MAX_CACHED = 1024  # cached entries of each cache; a full cache is emptied
# The maximum number of kinds in all entries of a cache together. Compromised nodes may report a kind for each card.
_MAX_CACHED_KINDS = 1 << 20

_NO_KINDS: Final[frozenset[int]] = frozenset()

# A level of preference: its rank, where 0 is tried before 1, and its kinds of cards; None for all kinds.
KindLevel = tuple[int, frozenset[int] | None]
# The levels of a card request that may use any card and prefers no kind.
ANY_CARD: Final[tuple[KindLevel, ...]] = ((0, None),)


class CardKind(NamedTuple):
    """The properties that all cards of one kind have in common."""

    classes: frozenset[str]
    model: str
    priority: int


class CardKinds:
    """The kinds of cards of one ledger."""

    def __init__(self) -> None:
        self._numbers: dict[CardKind, int] = {}
        self._kinds: dict[int, CardKind] = {}
        self._cards: dict[int, int] = {}  # the number of cards by kind
        self._smallest: dict[int, int] = {}  # by kind, the usable MiB of the smallest card that the kind has had
        self._next = 0
        self.changes = 0  # a counter of possible changes of kinds
        self._allowed: dict[tuple[str, tuple[QuotaEntry, ...]], frozenset[int] | None] = {}
        self._levels: dict[tuple[str, tuple[QuotaEntry, ...]], tuple[KindLevel, ...]] = {}
        self._by_property: dict[tuple[str, str], frozenset[int]] = {}  # see `_find_kinds`

    def copy(self) -> "CardKinds":
        """An independent copy: later changes of one do not affect the other."""
        duplicate = CardKinds()
        duplicate._numbers, duplicate._kinds, duplicate._cards = (
            self._numbers.copy(),
            self._kinds.copy(),
            self._cards.copy(),
        )
        duplicate._smallest, duplicate._next, duplicate.changes = self._smallest.copy(), self._next, self.changes
        duplicate._allowed, duplicate._levels = self._allowed.copy(), self._levels.copy()
        duplicate._by_property = self._by_property
        return duplicate

    def add_card(self, card: Card | CardKind, kept_back: MiB | None = MiB(0)) -> int:
        """Count one more card of this kind. Returns the integer of the kind.

        kept_back: as in `Card.usable_mib`.
        """
        kind = CardKind(card.classes, card.model, card.priority)
        number = self._numbers.get(kind)
        if number is None:
            number = self._next
            self._next += 1
            self._numbers[kind], self._kinds[number], self._cards[number] = number, kind, 0
            self._forget()
        self._cards[number] += 1
        if isinstance(card, Card):
            usable = card.usable_mib(kept_back)
            self._smallest[number] = min(usable, self._smallest.get(number, usable))
        return number

    def remove_card(self, number: int) -> None:
        """Remove one card of this kind from the count. The kind ends with its last card."""
        self._cards[number] -= 1
        if not self._cards[number]:
            del self._numbers[self._kinds.pop(number)], self._cards[number]
            self._smallest.pop(number, None)
            self._forget()

    def get(self, number: int) -> CardKind:
        """The kind with this integer. Raises KeyError if no card is of this kind."""
        return self._kinds[number]

    def find_kind(self, number: int) -> CardKind | None:
        """The kind with this integer; None if it no longer exists."""
        return self._kinds.get(number)

    def smallest(self, resource_class: str, entry: QuotaEntry) -> int:
        """A lower bound of the MiB that shares can use on cards of the class ("": any) that the entry covers; 0 if
        there are none.
        """
        covered = self._find_kinds(resource_class) & self.covered_kinds(entry)
        return min((self._smallest[number] for number in covered if number in self._smallest), default=0)

    def is_covered(self, number: int, entry: QuotaEntry) -> bool:
        """Whether the entry of a quota counts cards of this kind. Every entry counts unknown cards, to be safe."""
        if number == UNKNOWN_KIND:
            return True
        kind = self._kinds[number]
        return entry.covers(kind.classes, kind.model)

    def covered_charge(self, charges: Mapping[int, Charge], entry: QuotaEntry) -> Charge:
        """The total of the charges that the entry of a quota counts.

        charges: by kind.
        """
        return quotas.sum_charges(charge for kind, charge in charges.items() if self.is_covered(kind, entry))

    def covered_kinds(self, entry: QuotaEntry) -> frozenset[int]:
        """The kinds of cards that the entry of a quota counts."""
        return self._find_kinds(entry.resource_class, entry.model)

    def is_class_covered(self, resource_class: str, entry: QuotaEntry) -> bool:
        """Whether the entry of a quota counts all cards of the class ("": all cards). False if there is no card."""
        return bool(self._kinds) and self._find_kinds(resource_class) <= self.covered_kinds(entry)

    def is_class_counted(self, resource_class: str, entry: QuotaEntry) -> bool:
        """Whether the entry of a quota counts any card of the class ("": any card)."""
        return not self._find_kinds(resource_class).isdisjoint(self.covered_kinds(entry))

    def allowed(self, resource_class: str, full_entries: Collection[QuotaEntry] = ()) -> frozenset[int] | None:
        """The kinds of the class ("" for any) that no full quota entry covers; None for all kinds."""
        if not resource_class and not full_entries:
            return None
        key = resource_class, tuple(full_entries)
        if key not in self._allowed:
            kinds = self._find_kinds(resource_class).difference(*map(self.covered_kinds, full_entries))
            if len(self._allowed) >= self._max_cached():
                self._allowed.clear()
            self._allowed[key] = kinds if len(kinds) < len(self._kinds) else None
        return self._allowed[key]

    def levels(self, resource_class: str, full_entries: Collection[QuotaEntry] = ()) -> tuple[KindLevel, ...]:
        """The kinds that `allowed` returns, by level, in the order in which they are tried.

        For a request that names a class, all cards of the class are on one level. A request without a class takes the
        cards of the lowest priority first. So scarce cards stay free for requests that name their class.
        """
        key = resource_class, tuple(full_entries)
        if key not in self._levels:
            allowed = self.allowed(resource_class, full_entries)
            if len(self._levels) >= self._max_cached():
                self._levels.clear()
            levels = ((0, allowed),) if resource_class else self._ranked(allowed)
            self._levels[key] = ANY_CARD if levels == ANY_CARD else levels
        return self._levels[key]

    def _ranked(self, allowed: frozenset[int] | None) -> tuple[KindLevel, ...]:
        by_priority: dict[int, set[int]] = {}
        for number, kind in self._kinds.items():
            by_priority.setdefault(kind.priority, set()).add(number)
        if len(by_priority) < 2:
            return ((0, allowed),)
        ranked = enumerate(frozenset(by_priority[priority]) for priority in sorted(by_priority))
        return tuple((rank, of_rank if allowed is None else of_rank & allowed) for rank, of_rank in ranked)

    def _find_kinds(self, resource_class: str, model: str = "") -> frozenset[int]:
        """The kinds of this class; without a class the kinds of this model; without both all kinds."""
        if not self._by_property:
            kinds_by_property: dict[tuple[str, str], set[int]] = {}
            for number, kind in self._kinds.items():
                for name in kind.classes:
                    kinds_by_property.setdefault((name, ""), set()).add(number)
                kinds_by_property.setdefault(("", kind.model), set()).add(number)
            self._by_property = {key: frozenset(numbers) for key, numbers in kinds_by_property.items()}
            self._by_property["", ""] = frozenset(self._kinds)
        return self._by_property.get((resource_class, "" if resource_class else model), _NO_KINDS)

    def _max_cached(self) -> int:
        return min(_MAX_CACHED, 1 + _MAX_CACHED_KINDS // (1 + len(self._kinds)))

    def _forget(self) -> None:
        self.changes += 1
        self._allowed.clear()
        self._levels.clear()
        self._by_property = {}
