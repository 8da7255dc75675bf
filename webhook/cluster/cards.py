"""Sizes of cards, and the number of cards per node: of all cards, or of a class.

Devices other than GPUs are counted in the same way, but only by class, because they have no memory.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.mps import DaemonScope
from cardwise.core.placement.nodestate import MAX_CLIENTS
from cardwise.core.values.quantity import MiB
from cardwise.kube.objects.extendedresources import MAX_CARDS_PER_NODE
from webhook import deadline

_MAX_CLASSES: Final = 1024  # maximum number of classes whose sums are cached
# Maximum number of cached combinations of labels of a class, since nodes may write new labels at will.
_MAX_CACHED: Final = 1024
# Maximum number of steps for a class in a review, which any client may send. A step reads one label of one card; to
# compare a value with one condition takes as long as `_COMPARISON_STEPS` steps. All these steps take a tenth of a
# second: 100,000 cards and two labels, or 50,000 comparisons.
_MAX_STEPS: Final = 800_000
_COMPARISON_STEPS: Final = 16

Sizes = tuple[MiB, ...]  # the sizes of the cards of one node, in descending order


@dataclass(frozen=True, slots=True)
class CardSizes:
    """The memory of the largest and of the smallest card that shares can use, and the largest number of cards on one
    node.

    All fields are 0 while no card is known. For devices, only the number is set.

    by_count: for each number n from 1 on, the maximum MiB that a node has on each of n cards. Empty if only the largest
        card is known.
    """

    largest: MiB = MiB(0)
    max_cards: int = 0
    smallest: MiB = MiB(0)
    by_count: tuple[MiB, ...] = ()

    def largest_for(self, count: int) -> MiB:
        """The largest amount, in MiB, that a node has on each of `count` cards. `count` must be at most `max_cards`."""
        return self.by_count[count - 1] if self.by_count else self.largest


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts about a card that the webhook needs.

    labels: the labels for the selectors of classes.
    other: whether the card is a device other than a GPU.
    headroom: MiB that driver and MPS server take.
    mps: the scope of the card's MPS daemon; "" without an MPS manager, or if MPS is unavailable on the card.
    has_kernel_limit: whether the driver limits the memory of shares.
    """

    node: str
    memory: MiB
    labels: Mapping[str, str]
    other: bool = False
    mps: str = ""
    has_kernel_limit: bool = False
    max_clients: int = MAX_CLIENTS
    headroom: MiB = MiB(0)


class _Membership:
    """Decides whether cards are of a class. Without a class, cards are included, and other devices are not.

    Of cards with equal values of the selector's labels only one is compared: usually a cluster has thousands of cards
    of a few models.

    steps: the work so far; see `_MAX_STEPS`.
    """

    def __init__(self, resource_class: ResourceClass | None) -> None:
        self.resource_class = resource_class
        self.steps = 0
        self._keys = sorted(resource_class.selector.keys) if resource_class is not None else []
        self._conditions = (
            sum(map(len, resource_class.selector.alternatives)) if resource_class is not None else 0
        )  # maximum number of conditions with which one card is compared
        self._is_member_by_values: dict[tuple[str | None, ...], bool] = {}

    def includes(self, card: CardFacts) -> bool:
        """Whether the card is of the class."""
        if self.resource_class is None:
            return not card.other
        if self.resource_class.other != card.other:
            return False
        selected_values = tuple(map(card.labels.get, self._keys))
        self.steps += len(self._keys)
        is_member = self._is_member_by_values.get(selected_values)
        if is_member is None:
            self.steps += _COMPARISON_STEPS * self._conditions
            is_member = self.resource_class.selector.matches(card.labels)
            if len(self._is_member_by_values) >= _MAX_CACHED:
                self._is_member_by_values.clear()
            self._is_member_by_values[selected_values] = is_member
        return is_member


@dataclass(slots=True)
class _ClassSum:
    """The sizes of a class's cards, by node and in total. `changed_nodes`: nodes whose cards must be counted again."""

    membership: _Membership
    changed_nodes: set[str]
    sizes_by_node: dict[str, Sizes] = field(default_factory=dict)
    nodes: Counter[Sizes] = field(default_factory=Counter)  # how many nodes have cards of these sizes
    total: CardSizes = field(default_factory=CardSizes)


class CardSums:
    """Handler of the reflector of cards. Thread-safe.

    The sums of a class are cached. Every review needs the sums, and a node may change its cards all the time. So after
    a change only that node is counted again, with at most `MAX_CARDS_PER_NODE` of its cards.
    """

    def __init__(self, kept_back: MiB | None) -> None:
        """`kept_back`: MiB that the extender keeps free on each card; None for the headroom that each card has."""
        self._kept_back = kept_back
        self._lock = threading.Lock()
        self._cards: dict[str, dict[str, CardFacts]] = {}  # by node and name
        self._scopes: Counter[tuple[str, str]] = Counter()  # by scope of an MPS daemon and node, the number of cards
        self._mps_nodes: Counter[str] = Counter()  # by scope of an MPS daemon, the number of nodes
        self._kernel_limited = 0  # the number of cards on which the driver limits the memory of shares
        self._client_limits: Counter[int] = Counter()  # by maximum number of shares, the number of GPUs
        self._sums: OrderedDict[str, _ClassSum] = OrderedDict()  # by class, in the order of the last use

    def on_change(self, key: str, old: CardFacts | None, new: CardFacts) -> None:
        """A card was added or changed."""
        with self._lock:
            if old is not None:
                self._remove(key, old.node)
            cards = self._cards.setdefault(new.node, {})
            if len(cards) < MAX_CARDS_PER_NODE:
                cards[key] = new
                self._count_scope(new, 1)
                self._kernel_limited += new.has_kernel_limit
                if not new.other:
                    self._client_limits[new.max_clients] += 1
            self._mark_changed(new.node)

    def on_delete(self, key: str, old: CardFacts) -> None:
        """A card was deleted."""
        with self._lock:
            self._remove(key, old.node)

    def on_synced(self) -> None:
        """The first list is complete."""

    def class_sizes(self, resource_class: ResourceClass | None) -> CardSizes:
        """The sizes of the class's cards. An edited class is counted again."""
        with self._lock:
            return self._update_sum(resource_class).total

    def unlisted_class_sizes(self, resource_class: ResourceClass) -> CardSizes:
        """The sizes of the cards of a class that the watch does not show yet. Not cached, since the watch may show
        another version of the class. Raises ReviewTimeout.
        """
        membership = _Membership(resource_class)
        node_sizes = set[Sizes]()
        for cards in self._copy_cards():
            deadline.check()
            node_sizes.add(self._sizes_of(cards, membership))
        return _merge_sizes(node_sizes)

    def reviewed_class_sizes(self, resource_class: ResourceClass) -> CardSizes | None:
        """The sizes of the cards of a class in a review, which any client may send. None if this would take more than
        `_MAX_STEPS` steps.
        """
        membership = _Membership(resource_class)
        node_sizes = set[Sizes]()
        for cards in self._copy_cards():
            node_sizes.add(self._sizes_of(cards, membership))
            if membership.steps > _MAX_STEPS:
                return None
        return _merge_sizes(node_sizes)

    def sizes_on(self, nodes: Collection[str], resource_class: ResourceClass | None) -> CardSizes:
        """The sizes of cards of the class on these nodes only."""
        with self._lock:
            sizes_by_node = self._update_sum(resource_class).sizes_by_node
            return _merge_sizes(sizes_by_node.get(node, ()) for node in nodes)

    def mps_scopes(self) -> frozenset[str]:
        """The scopes of the MPS daemons: `CardFacts.mps` of all cards."""
        with self._lock:
            return frozenset(self._mps_nodes)

    def do_node_daemons_prevail(self) -> bool:
        """Whether one MPS daemon serves all cards on more than half of the nodes with MPS.

        Nodes are counted, not cards, since a node could report many cards.
        """
        with self._lock:
            return 2 * self._mps_nodes[DaemonScope.NODE] > self._mps_nodes.total()

    def has_kernel_limit(self) -> bool:
        """Whether the driver limits the memory of shares on any card."""
        with self._lock:
            return self._kernel_limited > 0

    def max_clients(self) -> int:
        """The maximum number of shares that any GPU takes; 0 while no GPU is known."""
        with self._lock:
            return max(self._client_limits, default=0)

    def _copy_cards(self) -> list[tuple[CardFacts, ...]]:
        """A copy of the cards of each node, to compare cards without the lock, which every review needs."""
        with self._lock:
            return [tuple(cards.values()) for cards in self._cards.values()]

    def _sizes_of(self, cards: Iterable[CardFacts], membership: _Membership) -> Sizes:
        sizes = (self._usable(card) for card in cards if membership.includes(card))
        return tuple(sorted(sizes, reverse=True))

    def _usable(self, card: CardFacts) -> MiB:
        """The MiB of the card that shares can use."""
        return MiB(max(0, card.memory - (card.headroom if self._kept_back is None else self._kept_back)))

    # Everything below runs under the lock.

    def _remove(self, key: str, node: str) -> None:
        cards = self._cards.get(node, {})
        card = cards.pop(key, None)
        if card is None:
            return
        self._kernel_limited -= card.has_kernel_limit
        self._count_scope(card, -1)
        if not card.other:
            self._client_limits[card.max_clients] -= 1
            if not self._client_limits[card.max_clients]:
                del self._client_limits[card.max_clients]
        if not cards:
            del self._cards[node]
        self._mark_changed(node)

    def _count_scope(self, card: CardFacts, change: int) -> None:
        if not card.mps:
            return
        key = card.mps, card.node
        cards = self._scopes[key] + change
        self._scopes[key] = cards
        if cards == max(change, 0):  # the node's first card, or its last one
            self._mps_nodes[card.mps] += change
        if not cards:
            del self._scopes[key]
            if not self._mps_nodes[card.mps]:
                del self._mps_nodes[card.mps]

    def _mark_changed(self, node: str) -> None:
        for class_sum in self._sums.values():
            class_sum.changed_nodes.add(node)

    def _update_sum(self, resource_class: ResourceClass | None) -> _ClassSum:
        key = resource_class.name if resource_class else ""
        class_sum = self._sums.get(key)
        if class_sum is None or class_sum.membership.resource_class != resource_class:
            class_sum = self._sums[key] = _ClassSum(_Membership(resource_class), set(self._cards))
            if len(self._sums) > _MAX_CLASSES:
                self._sums.popitem(last=False)
        self._sums.move_to_end(key)
        if class_sum.changed_nodes:
            self._recount(class_sum)
        return class_sum

    def _recount(self, class_sum: _ClassSum) -> None:
        for node in class_sum.changed_nodes:
            cards = self._cards.get(node, {}).values()
            old_sizes, new_sizes = class_sum.sizes_by_node.pop(node, ()), self._sizes_of(cards, class_sum.membership)
            if old_sizes:
                class_sum.nodes[old_sizes] -= 1
                if not class_sum.nodes[old_sizes]:
                    del class_sum.nodes[old_sizes]
            if new_sizes:
                class_sum.sizes_by_node[node] = new_sizes
                class_sum.nodes[new_sizes] += 1
        class_sum.changed_nodes.clear()
        class_sum.total = _merge_sizes(class_sum.nodes)


def _merge_sizes(nodes: Iterable[Sizes]) -> CardSizes:
    """The sizes of the cards of these nodes together."""
    node_sizes = {sizes for sizes in nodes if sizes}
    largest_by_rank = tuple(max(rank) for rank in zip_longest(*node_sizes, fillvalue=MiB(0)))
    smallest = min((sizes[-1] for sizes in node_sizes), default=MiB(0))
    return CardSizes(
        max(largest_by_rank, default=MiB(0)),
        len(largest_by_rank),
        smallest,
        largest_by_rank if any(largest_by_rank) else (),
    )
