"""Capacity: an upper bound of how many pods of one shape fit on the nodes, kept up to date while nodes change.

The bound counts the memory, the kinds and the number of free cards, and the free cpu and memory of nodes. The bound
ignores kube-scheduler's constraints, quotas, MPS and devices, since these can only lower the number. So if the bound is
too small for a gang, the gang cannot be placed. Only nodes that have changed are counted again, even if a newer
snapshot replaces the former one (`move_to`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from cardwise.core.api.cards import POSITION_BITS, POSITION_MASK
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import fitting
from cardwise.core.placement.fitting import CardRequest
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState

_NODES_BETWEEN_PACES: Final = 64  # nodes that are counted between two calls of the pace
_MAX_SHAPES: Final = 256  # shapes whose counts are cached; for another shape all nodes are counted from the start
_MAX_CHANGES: Final = 20_000  # node changes that are kept; with more, all shapes are counted from the start
_UNLIMITED_PODS: Final = 1 << 30  # pods; more than fit on any node


class MemberShape(NamedTuple):
    """Pods with equal requests."""

    request: PodRequest
    load: Load


def group_by_shape(members: Iterable[Member]) -> dict[MemberShape, list[Member]]:
    """The members that request cards, by their requests."""
    members_by_shape: dict[MemberShape, list[Member]] = {}
    for member in members:
        if member.request is not None:
            members_by_shape.setdefault(MemberShape(member.request, member.load), []).append(member)
    return members_by_shape


def count_at_least_as_demanding(members_by_shape: Mapping[MemberShape, list[Member]]) -> dict[MemberShape, int]:
    """By shape, the number of members that request at least as much as a pod of the shape. If fewer pods of the shape
    fit, these members do not all fit.

    Without this bound, a gang of 500 members of 16 sizes would be planned as soon as each size fits alone.
    """
    card_requests = {shape: fitting.card_requests(shape.request) for shape in members_by_shape}
    return {
        shape: sum(
            len(members)
            for other_shape, members in members_by_shape.items()
            if other_shape is shape
            or _takes_no_less(other_shape.load, card_requests[other_shape], shape.load, card_requests[shape])
        )
        for shape in members_by_shape
    }


def _takes_no_less(
    load: Load, card_requests: Sequence[CardRequest], other_load: Load, other_requests: Sequence[CardRequest]
) -> bool:
    """Whether a pod with `other_load` and `other_requests` fits on every node on which a pod with `load` and
    `card_requests` fits. False also if this is not certain.
    """
    if len(card_requests) != 1 or len(other_requests) != 1:
        return False
    card_request, other_request = card_requests[0], other_requests[0]
    return (
        (card_request.whole, card_request.cards, card_request.resource_class)
        == (other_request.whole, other_request.cards, other_request.resource_class)
        and card_request.mem >= other_request.mem
        and all(amount >= other_amount for amount, other_amount in zip(load, other_load, strict=True))
    )


Pace = Callable[[], object]


class LoadsByNode(Protocol):
    """The free amounts of nodes besides cards."""

    @property
    def generation(self) -> int:
        """The number of changes of nodes so far."""

    def free_load(self, node: str) -> Load | None:
        """The free amounts for further pods; None if the node does not exist."""

    def nodes_changed_since(self, generation: int) -> Collection[str]:
        """The existing nodes whose last change came after this generation."""

    def known_nodes(self) -> Collection[str]:
        """All existing nodes."""


class ShapeCapacity:
    """The nodes that could take a pod of one shape.

    counts: by node, an upper bound of the pods that fit.

    Iterates over the nodes from the largest count to the smallest, and over nodes of equal count by name. This order is
    updated at each change and not sorted for each plan: a plan reads only a few of thousands of nodes, at both ends.
    """

    def __init__(self, counts: Mapping[str, int] = MappingProxyType({})) -> None:
        self.counts = dict(counts)
        self._nodes_by_count: dict[int, list[str]] = {}  # by count, the nodes in the order of their names
        for node in sorted(counts):
            self._nodes_by_count.setdefault(counts[node], []).append(node)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._nodes_by_count[count] for count in sorted(self._nodes_by_count, reverse=True))

    def __reversed__(self) -> Iterator[str]:
        return chain.from_iterable(reversed(self._nodes_by_count[count]) for count in sorted(self._nodes_by_count))

    def set_count(self, node: str, count: int) -> int:
        """Set the count of a node. Returns the change."""
        count_before = self.counts.pop(node, 0)
        if count_before:
            nodes = self._nodes_by_count[count_before]
            del nodes[bisect_left(nodes, node)]
        if count:
            self.counts[node] = count
            insort(self._nodes_by_count.setdefault(count, []), node)
        return count - count_before

    def with_at_least_one_pod_on(self, nodes: Iterable[str]) -> "ShapeCapacity":
        """A capacity with at least one pod on each of these nodes."""
        added = dict.fromkeys((node for node in nodes if node not in self.counts), 1)
        if not added:
            return self
        vacant = ShapeCapacity()
        vacant.counts = self.counts | added
        vacant._nodes_by_count = self._nodes_by_count | {1: sorted([*self._nodes_by_count.get(1, ()), *added])}
        return vacant


class _Generations(NamedTuple):
    """Generations of the ledger and of the loads."""

    ledger: int
    loads: int


class _ShapeCount:
    """The counts of one shape.

    vacant: the nodes that could take a pod of the shape.
    total: the sum of the counts of all nodes.
    uncounted_nodes: nodes to count, or to count again because they have changed.
    seen_changes: how many changes, since the start, are in `uncounted_nodes` or already counted.
    kinds: `CardKinds.changes` when counting began.
    """

    def __init__(self, shape: MemberShape, nodes: Iterable[str], seen_changes: int, kinds: int) -> None:
        self.vacant = ShapeCapacity()
        self.total = 0
        self.uncounted_nodes = dict.fromkeys(nodes)
        self.seen_changes = seen_changes
        self.kinds = kinds
        self.card_requests = fitting.card_requests(shape.request)

    def set_count(self, node: str, count: int) -> None:
        self.total += self.vacant.set_count(node, count)


class Capacities:
    """The capacities of shapes. Not thread-safe."""

    def __init__(self, ledger: Ledger, loads: LoadsByNode) -> None:
        self._counts_by_shape: dict[MemberShape, _ShapeCount] = {}  # the most recently used last
        self._changes: list[str] = []
        self._forgotten_changes = 0  # the number of changes that were removed from `_changes`
        self._set_cluster(ledger, loads)

    def move_to(self, ledger: Ledger, loads: LoadsByNode) -> None:
        """Use this newer snapshot for all counts from now on. Two kinds of nodes are counted again: nodes that differ
        between the two snapshots, and nodes that a planner has changed in the former snapshot.
        """
        start, former = self._start, (self._ledger, self._loads)
        if self._ledger.kinds.changes != self._start_kinds:
            self._counts_by_shape.clear()  # the kinds of the former snapshot may differ from those of this one
        self._record_changed_nodes()
        for changed_ledger, changed_loads in (former, (ledger, loads)):
            self._changes.extend(changed_ledger.nodes_changed_since(start.ledger))
            self._changes.extend(changed_loads.nodes_changed_since(start.loads))
        self._changes.extend(self._names ^ ledger.nodes_by_name().keys())
        self._changes.extend(self._load_names.symmetric_difference(loads.known_nodes()))
        self._limit_changes()
        self._set_cluster(ledger, loads)

    def count_fitting_pods(self, shape: MemberShape, pace: Pace = lambda: None) -> int:
        """An upper bound of the pods of the shape that fit on all nodes.

        pace: called before every `_NODES_BETWEEN_PACES` nodes. If it raises, the next call continues the count.
        """
        shape_count = self._counts_by_shape[shape] = self._updated_shape_count(shape)
        if len(self._counts_by_shape) > _MAX_SHAPES:
            del self._counts_by_shape[next(iter(self._counts_by_shape))]
        count_on = _card_counter(shape_count.card_requests, self._ledger)
        at_once = max(1, _NODES_BETWEEN_PACES // max(1, len(shape_count.card_requests)))
        while shape_count.uncounted_nodes:
            pace()
            for node in list(islice(shape_count.uncounted_nodes, at_once)):
                shape_count.set_count(node, self._count_on(node, shape, count_on))
                del shape_count.uncounted_nodes[node]
        return shape_count.total

    def shape_capacity(self, shape: MemberShape) -> ShapeCapacity:
        """The nodes that `count_fitting_pods` has counted for this shape. The caller must not keep the object."""
        shape_count = self._counts_by_shape.get(shape)
        return shape_count.vacant if shape_count is not None else ShapeCapacity()

    def _set_cluster(self, ledger: Ledger, loads: LoadsByNode) -> None:
        self._ledger = ledger
        self._loads = loads
        self._start = self._seen = _Generations(ledger.generation, loads.generation)
        self._start_kinds = ledger.kinds.changes
        self._names, self._load_names = set(ledger.nodes_by_name()), set(loads.known_nodes())

    def _record_changed_nodes(self) -> None:
        """Add the nodes that have changed since the last call to `_changes`."""
        current = _Generations(self._ledger.generation, self._loads.generation)
        if current == self._seen:
            return
        names, load_names = set(self._ledger.nodes_by_name()), set(self._loads.known_nodes())
        self._changes.extend(self._ledger.nodes_changed_since(self._seen.ledger))
        self._changes.extend(self._loads.nodes_changed_since(self._seen.loads))
        self._changes.extend((self._names - names) | (self._load_names - load_names))
        self._seen, self._names, self._load_names = current, names, load_names

    def _limit_changes(self) -> None:
        """Forget all changes if there are too many."""
        if len(self._changes) > _MAX_CHANGES:
            self._forgotten_changes += len(self._changes)
            self._changes.clear()

    def _updated_shape_count(self, shape: MemberShape) -> _ShapeCount:
        self._record_changed_nodes()
        self._limit_changes()
        shape_count = self._counts_by_shape.pop(shape, None)
        kinds, change_count = self._ledger.kinds.changes, self._forgotten_changes + len(self._changes)
        if shape_count is None or shape_count.seen_changes < self._forgotten_changes or shape_count.kinds != kinds:
            return _ShapeCount(shape, self._ledger.nodes_by_name(), change_count, kinds)
        shape_count.uncounted_nodes |= dict.fromkeys(
            islice(self._changes, shape_count.seen_changes - self._forgotten_changes, None)
        )
        shape_count.seen_changes = change_count
        return shape_count

    def _count_on(self, node: str, shape: MemberShape, count_by_cards: "_CardCounter") -> int:
        state = self._ledger.node(node)
        if state is None:
            return 0
        count = count_by_cards(state)
        if not count:
            return 0
        free, load = self._loads.free_load(node), shape.load
        if free is None:
            return 0
        if load.cpu:
            count = min(count, free.cpu // load.cpu)
        if load.memory:
            count = min(count, free.memory // load.memory)
        return max(0, min(count, free.pods // load.pods if load.pods else _UNLIMITED_PODS))


_CardCounter = Callable[[NodeState], int]


def _card_counter(card_requests: Iterable[CardRequest], ledger: Ledger) -> _CardCounter:
    """Return a function that returns an upper bound of the pods that fit on the cards of a node."""
    typed_requests = [
        (card_request, ledger.kinds.allowed(card_request.resource_class)) for card_request in card_requests
    ]

    def count_fitting_pods(state: NodeState) -> int:
        return min(
            (_count_for_request(card_request, allowed, state) for card_request, allowed in typed_requests),
            default=_UNLIMITED_PODS,
        )

    return count_fitting_pods


def _count_for_request(card_request: CardRequest, allowed: frozenset[int] | None, state: NodeState) -> int:
    codes = state.codes_of_empty_cards() if card_request.whole else state.codes_fullest_first()
    if allowed is not None and not allowed >= state.kind_set:
        codes = [code for code in codes if state.kinds[code & POSITION_MASK] in allowed]
    if card_request.whole:
        return len(codes) // card_request.cards
    cards = sum(
        (code >> POSITION_BITS) // card_request.mem for code in codes if code >> POSITION_BITS >= card_request.mem
    )
    return cards // card_request.cards
