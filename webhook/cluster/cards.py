"""Sizes of cards, and the number of cards per node: of all cards, or of a class.

Devices other than GPUs are counted in the same way, but only by class: they have no memory, and are not cards.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.quantity import MiB
from cardwise.kube.survey import MAX_CARDS_PER_NODE
from webhook.pods.validate import CardSizes

_MOST_CLASSES: Final = 1024  # whose sums are kept

Sizes = tuple[MiB, ...]  # of the cards of one node, in descending order


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the webhook needs of a card.

    labels: what selectors of classes match.
    other: whether it is a device other than a GPU.
    mps: the scope of its MPS daemon; "" without an MPS manager.
    """

    node: str
    memory: MiB
    labels: Mapping[str, str]
    other: bool = False
    mps: str = ""

    def is_of_class(self, resource_class: ResourceClass | None) -> bool:
        """Whether it is of the class; without a class, whether it is a card."""
        if resource_class is None:
            return not self.other
        return resource_class.other == self.other and resource_class.selector.matches(self.labels)


@dataclass(slots=True)
class _ClassSum:
    """The sums of a class by node. `changed`: nodes whose cards must be counted again."""

    resource_class: ResourceClass | None
    changed: set[str]
    of_node: dict[str, Sizes] = field(default_factory=dict)
    nodes: Counter[Sizes] = field(default_factory=Counter)  # how many nodes have cards of these sizes
    total: CardSizes = field(default_factory=CardSizes)


class CardSums:
    """Handler of the reflector of cards. Thread-safe.

    The sums of a class are cached. When cards of a node change, only that node is counted again, and at most
    `MAX_CARDS_PER_NODE` of its cards count: a node may change its cards all the time, and every review needs the sums.
    """

    def __init__(self, kept_back: MiB) -> None:
        """`kept_back`: what the extender keeps back on each card."""
        self._kept_back = kept_back
        self._lock = threading.Lock()
        self._cards: dict[str, dict[str, CardFacts]] = {}  # by node and name
        self._scopes: Counter[str] = Counter()  # of MPS daemons
        self._sums: OrderedDict[str, _ClassSum] = OrderedDict()  # by class, the one that was used last at the end

    def on_change(self, key: str, old: CardFacts | None, new: CardFacts) -> None:
        """A card was added or changed."""
        with self._lock:
            if old is not None:
                self._remove(key, old.node)
            cards = self._cards.setdefault(new.node, {})
            if len(cards) < MAX_CARDS_PER_NODE:
                cards[key] = new
                self._scopes[new.mps] += 1
            self._mark_changed(new.node)

    def on_delete(self, key: str, old: CardFacts) -> None:
        """A card was deleted."""
        with self._lock:
            self._remove(key, old.node)

    def on_synced(self) -> None:
        """The first list is complete."""

    def class_sizes(self, resource_class: ResourceClass | None) -> CardSizes:
        """The sizes of the class's cards. An edited class is counted again."""
        key = resource_class.name if resource_class else ""
        with self._lock:
            known = self._sums.get(key)
            if known is None or known.resource_class != resource_class:
                known = self._sums[key] = _ClassSum(resource_class, set(self._cards))
                if len(self._sums) > _MOST_CLASSES:
                    self._sums.popitem(last=False)
            self._sums.move_to_end(key)
            if known.changed:
                self._recount(known)
            return known.total

    def unknown_class_sizes(self, resource_class: ResourceClass) -> CardSizes:
        """The sizes of cards of a class that may not exist. Not cached, because a caller may name any class."""
        return _merge_sizes(self._sizes_of(cards, resource_class) for cards in self._copy_cards())

    def sizes_on(self, nodes: Collection[str], resource_class: ResourceClass | None) -> CardSizes:
        """The sizes of cards of these nodes only. Not cached."""
        with self._lock:
            return _merge_sizes(self._sizes(node, resource_class) for node in nodes)

    def has_card_of(self, resource_class: ResourceClass) -> bool:
        """Whether any card is of the class."""
        return any(card.is_of_class(resource_class) for cards in self._copy_cards() for card in cards)

    def mps_scopes(self) -> frozenset[str]:
        """The scopes of the MPS daemons: `CardFacts.mps` of all cards."""
        with self._lock:
            return frozenset(scope for scope in self._scopes if scope)

    def _copy_cards(self) -> list[tuple[CardFacts, ...]]:
        """The cards of each node, to be compared without the lock, since every review needs the sums."""
        with self._lock:
            return [tuple(cards.values()) for cards in self._cards.values()]

    def _sizes_of(self, cards: Iterable[CardFacts], resource_class: ResourceClass | None) -> Sizes:
        sizes = (MiB(max(0, card.memory - self._kept_back)) for card in cards if card.is_of_class(resource_class))
        return tuple(sorted(sizes, reverse=True))

    # Everything below runs under the lock.

    def _remove(self, key: str, node: str) -> None:
        cards = self._cards.get(node, {})
        card = cards.pop(key, None)
        if card is None:
            return
        self._scopes[card.mps] -= 1
        if not self._scopes[card.mps]:
            del self._scopes[card.mps]
        if not cards:
            del self._cards[node]
        self._mark_changed(node)

    def _mark_changed(self, node: str) -> None:
        for known in self._sums.values():
            known.changed.add(node)

    def _recount(self, known: _ClassSum) -> None:
        for node in known.changed:
            before, now = known.of_node.pop(node, ()), self._sizes(node, known.resource_class)
            if before:
                known.nodes[before] -= 1
                if not known.nodes[before]:
                    del known.nodes[before]
            if now:
                known.of_node[node] = now
                known.nodes[now] += 1
        known.changed.clear()
        known.total = _merge_sizes(known.nodes)

    def _sizes(self, node: str, resource_class: ResourceClass | None) -> Sizes:
        return self._sizes_of(self._cards.get(node, {}).values(), resource_class)


def _merge_sizes(nodes: Iterable[Sizes]) -> CardSizes:
    """The sizes of the cards of these nodes together."""
    node_sizes = {sizes for sizes in nodes if sizes}
    by_rank = tuple(max(rank) for rank in zip_longest(*node_sizes, fillvalue=MiB(0)))
    smallest = min((sizes[-1] for sizes in node_sizes), default=MiB(0))
    return CardSizes(max(by_rank, default=MiB(0)), len(by_rank), smallest, by_rank if any(by_rank) else ())
