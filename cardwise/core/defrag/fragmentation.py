"""Fragmentation: how much idle memory of cards no expected pod can use, by node and by kind of card.

The extender's metrics, `cardwise nodes` and the simulator use the same measure, that of FGD (`scored.fragments`). For a
given pod, the idle memory of a card is a fragment if the pod cannot use it. The measure is the mean over all expected
pods, weighted by their frequency. This module imports numpy, like all users of `scored`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from cardwise.core.api.request import Load
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import CardKinds
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.placement.scored.fragments import FragmentMeasure
from cardwise.core.placement.scored.nodetable import Floats, NodeTable
from cardwise.core.placement.scored.scoring import WeightedShape
from cardwise.core.placement.scored.shapes import RequestShape, RequestSize


class Memory(NamedTuple):
    """The memory of some cards, in MiB.

    free: free memory on cards that accept new shares.
    fragmented: the part of `free` that is fragments, as the mean over the expected pods.
    """

    total: int = 0
    used: int = 0
    free: int = 0
    fragmented: float = 0.0

    def add(self, other: "Memory") -> "Memory":
        return Memory(
            self.total + other.total,
            self.used + other.used,
            self.free + other.free,
            self.fragmented + other.fragmented,
        )

    @property
    def percent(self) -> float:
        """The fragmented part of the free memory, in percent; 0 if nothing is free."""
        return 100 * self.fragmented / self.free if self.free > 0 else 0.0


_NO_MEMORY: Final = Memory()


class _Card(NamedTuple):
    kind: int
    total: int
    used: int
    free: int


_NO_CARD: Final = _Card(0, 0, 0, 0)
_MAX_REQUESTS: Final = 128  # request sizes that `count_requests` returns


def only_card_requests(counts: Mapping[RequestSize, float]) -> dict[RequestSize, float]:
    """The requests that include cards. The others would count all idle memory as fragments."""
    return {request_size: count for request_size, count in counts.items() if request_size.cards}


def count_requests(holdings: Iterable[Holding]) -> dict[RequestSize, float]:
    """The most frequent request sizes of the pods that hold cards, each with the number of these pods. Callers use this
    if no workload has been learned.
    """
    counts: Counter[RequestSize] = Counter()
    for holding in holdings:
        by_card: dict[str | int, tuple[int, int, bool]] = {}
        for share in holding.assignment.shares():
            mem, core, whole = by_card.get(share.uuid or share.index, (0, 0, False))
            by_card[share.uuid or share.index] = mem + share.mem, core + share.core, whole or share.whole
        amounts = {(0, 0) if whole else (mem, core) for mem, core, whole in by_card.values() if mem}
        if len(amounts) == 1:  # different shares of several cards are not one request
            mem, core = amounts.pop()
            counts[RequestSize(len(by_card), mem, core, "", 0, 0)] += 1
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:_MAX_REQUESTS])


def typical_pods(counts: Mapping[RequestSize, float], kinds: CardKinds) -> list[WeightedShape]:
    """The expected pods, weighted by their frequency, on cards of these kinds."""
    total = sum(counts.values())
    return [
        WeightedShape(
            RequestShape(request_size._replace(resource_class=""), kinds.allowed(request_size.resource_class)),
            count / total,
        )
        for request_size, count in counts.items()
    ]


class Fragments:
    """The fragmentation of some nodes, for the workload of `typical_pods`.

    The caller must call `set_node` for each node that changes.
    """

    def __init__(self, pods: Sequence[WeightedShape] = ()) -> None:
        self._table = NodeTable()
        self._cards: dict[str, list[_Card]] = {}  # by node
        self._of_kinds: dict[int, list[int]] = {}  # by kind of card: total, used and free MiB
        self._useful: Floats = np.zeros((0, 1))  # MiB that are not fragments, by slot of the table and card position
        self._counted_changes = 0  # the number of the table's changes that `_useful` contains
        self.set_expected_pods(pods)

    def set_expected_pods(self, pods: Sequence[WeightedShape]) -> None:
        """Set the expected pods."""
        self._measure = FragmentMeasure(pods)
        self._stale = True

    def set_node(self, name: str, node: NodeState | None, free_load: Load | None) -> None:
        """Update a node. `free_load`: its free cpu, memory and pod slots; None if the node no longer exists."""
        self._add_to_sums(self._cards.pop(name, ()), -1)
        if node is not None and free_load is not None:
            self._cards[name] = [
                _Card(node.kinds[i], card.mem, node.used[i], node.free_mib(i)) for i, card in enumerate(node.cards)
            ]
            self._add_to_sums(self._cards[name], 1)
        self._table.set_node(name, node, free_load)

    def memory_of_node(self, name: str) -> Memory:
        """The memory of one node's cards."""
        self._refresh()
        slot = self._table.slots.get(name)
        _, *sums = map(sum, zip(*self._cards.get(name) or [_NO_CARD], strict=True))
        return _memory(sums, self._useful[slot].sum() if slot is not None else 0.0)

    def memory_by_class(self, kinds: CardKinds) -> dict[str, Memory]:
        """The memory by class of card; a card may be in several classes. `kinds`: the kinds of the nodes' ledger."""
        by_class: dict[str, Memory] = {}
        for number, memory in self._memory_by_card_kind().items():
            kind = kinds.find_kind(number)
            for name in sorted(kind.classes) if kind is not None else ():
                by_class[name] = by_class.get(name, _NO_MEMORY).add(memory)
        return by_class

    def _memory_by_card_kind(self) -> dict[int, Memory]:
        self._refresh()
        here = self._table.lines.kind >= 0
        useful_by_card_kind = np.bincount(self._table.lines.kind[here], weights=self._useful[here], minlength=1)
        return {
            kind: _memory(sums, useful_by_card_kind[kind] if kind < len(useful_by_card_kind) else 0.0)
            for kind, sums in self._of_kinds.items()
            if sums[0]
        }

    def total(self) -> Memory:
        """The memory of all nodes' cards."""
        self._refresh()
        return _memory(
            [sum(amounts) for amounts in zip((0, 0, 0), *self._of_kinds.values(), strict=True)], self._useful.sum()
        )

    def _add_to_sums(self, cards: Iterable[_Card], sign: int) -> None:
        for kind, total, used, free in cards:
            sums = self._of_kinds.setdefault(kind, [0, 0, 0])
            sums[0] += sign * total
            sums[1] += sign * used
            sums[2] += sign * free

    def _refresh(self) -> None:
        table = self._table
        changed = table.changed_since(self._counted_changes)
        self._counted_changes = table.change_count
        if self._stale or changed is None or self._useful.shape != table.lines.free.shape:
            self._useful = self._measure.useful_mib(table.lines)
            self._stale = False
        elif len(changed):
            slots = np.unique(changed)
            self._useful[slots] = self._measure.useful_mib(table.lines.pick(slots))


def _memory(sums: Sequence[int], useful: float) -> Memory:
    """The memory with these sums of MiB.

    sums: total, used and free.
    useful: the free MiB that are not fragments. As a sum of floats it may slightly exceed the free MiB, and the output
        must not show -0.0 MiB.
    """
    total, used, free = sums
    return Memory(total, used, free, max(0.0, free - float(useful)))
