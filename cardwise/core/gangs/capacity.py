"""Capacity: an upper bound of how many pods of one shape fit on the nodes, kept up to date while nodes change.

It counts the memory, the kinds and the number of free cards, and the cpu and memory that nodes have left. It ignores
what kube-scheduler offers, quotas, MPS and devices, which only make the number smaller. So if the bound is too small
for a gang, the gang cannot be placed; to find that out only nodes that have changed are looked at, not thousands.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from cardwise.core.api.cards import PLACE, POSITION
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Member
from cardwise.core.placement import fitting
from cardwise.core.placement.fitting import Claim
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState

LOOKS: Final = 100  # nodes looked at in one call
_MOST_SHAPES: Final = 256  # remembered; for others all nodes are looked at again
_MOST_CHANGES: Final = 20_000  # remembered
_ANY: Final = 1 << 30


class MemberShape(NamedTuple):
    """Pods that ask for the same."""

    request: PodRequest
    load: Load


def shapes(members: Iterable[Member]) -> dict[MemberShape, list[Member]]:
    """The members that ask for cards, by what they ask."""
    alike: dict[MemberShape, list[Member]] = {}
    for member in members:
        if member.request is not None:
            alike.setdefault(MemberShape(member.request, member.load), []).append(member)
    return alike


def demanding(alike: Mapping[MemberShape, list[Member]]) -> dict[MemberShape, int]:
    """How many of the members take no less than a pod of the shape, by shape: of these together no more fit than of it.

    Otherwise a gang of 500 members with 16 sizes is planned although each size has room only by itself.
    """
    claims = {shape: fitting.claims(shape.request) for shape in alike}
    return {
        shape: sum(
            len(members)
            for other, members in alike.items()
            if other is shape or _takes_no_less(other.load, claims[other], shape.load, claims[shape])
        )
        for shape in alike
    }


def _takes_no_less(load: Load, claims: Sequence[Claim], other_load: Load, other_claims: Sequence[Claim]) -> bool:
    """Whether wherever a pod of this load and these claims fits, one of the others would fit in its place."""
    if len(claims) != 1 or len(other_claims) != 1:
        return False
    claim, other = claims[0], other_claims[0]
    return (
        (claim.whole, claim.cards, claim.resource_class) == (other.whole, other.cards, other.resource_class)
        and claim.mem >= other.mem
        and all(has >= needs for has, needs in zip(load, other_load, strict=True))
    )


class WatchedNodes(Protocol):
    """What nodes have left beside cards."""

    def left(self, node: str) -> Load | None:
        """What the node has for further pods; None where there is no such node."""

    def watch(self) -> set[str]:
        """The nodes for which `left` has changed, at first all. The caller empties the set when it has read it."""


class Vacant:
    """The nodes that could take a pod of one shape. `most`: how many each could take at most.

    Iterated, those with most room come first, and those of equal room by name. The order is kept with each change,
    because of thousands of nodes a plan looks at few, at both ends.
    """

    def __init__(self, most: Mapping[str, int] = MappingProxyType({})) -> None:
        self.most = dict(most)
        self._alike: dict[int, list[str]] = {}  # nodes of equal room, by name
        for node in sorted(most):
            self._alike.setdefault(most[node], []).append(node)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._alike[most] for most in sorted(self._alike, reverse=True))

    def __reversed__(self) -> Iterator[str]:
        return chain.from_iterable(reversed(self._alike[most]) for most in sorted(self._alike))

    def put(self, node: str, most: int) -> int:
        """The node could take so many now. Returns by how many that is more than before."""
        before = self.most.pop(node, 0)
        if before:
            alike = self._alike[before]
            del alike[bisect_left(alike, node)]
        if most:
            self.most[node] = most
            insort(self._alike.setdefault(most, []), node)
        return most - before

    def with_one(self, nodes: Iterable[str]) -> "Vacant":
        """The same, where each of these nodes could take one pod at least."""
        more = dict.fromkeys((node for node in nodes if node not in self.most), 1)
        if not more:
            return self
        found = Vacant()
        found.most = self.most | more
        found._alike = self._alike | {1: sorted([*self._alike.get(1, ()), *more])}
        return found


class _Counted:
    """`vacant`: the nodes that could take one. `todo`: nodes not looked at yet."""

    def __init__(self, todo: Iterator[str], seen: int, kinds: int) -> None:
        self.vacant = Vacant()
        self.total = 0
        self.todo: Iterator[str] | None = todo
        self.seen = seen  # how many of all changes are counted here
        self.kinds = kinds

    def put(self, node: str, most: int) -> None:
        self.total += self.vacant.put(node, most)


class Capacities:
    """Not thread-safe."""

    def __init__(self, ledger: Ledger, nodes: WatchedNodes) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._watched = ledger.watch(), nodes.watch()
        self._of: dict[MemberShape, _Counted] = {}  # the last asked for at the end
        self._changes: list[str] = []
        self._gone = 0  # changes that are not remembered any more

    def most(self, shape: MemberShape, looks: int = LOOKS) -> tuple[int, bool]:
        """How many pods of the shape all nodes could take at most; and whether all nodes were looked at. One call looks
        at `looks` nodes.
        """
        counted = self._counted(shape)
        most = _most(shape.request, self._ledger)
        for node in islice(self._changes, counted.seen - self._gone, None):
            counted.put(node, self._on(node, shape, most))
        counted.seen = self._gone + len(self._changes)
        if counted.todo is not None:
            some = list(islice(counted.todo, looks))
            for node in some:
                counted.put(node, self._on(node, shape, most))
            if len(some) < looks:
                counted.todo = None
        self._of[shape] = counted  # last: one that was broken off is begun anew
        if len(self._of) > _MOST_SHAPES:
            del self._of[next(iter(self._of))]
        return counted.total, counted.todo is None

    def nodes(self, shape: MemberShape) -> Vacant:
        """The nodes that `most` has counted last. Not to be kept."""
        counted = self._of.get(shape)
        return counted.vacant if counted is not None else Vacant()

    def _counted(self, shape: MemberShape) -> _Counted:
        for watched in self._watched:
            self._changes.extend(watched)
            watched.clear()
        if len(self._changes) > _MOST_CHANGES:
            self._gone += len(self._changes)
            self._changes.clear()
        counted = self._of.pop(shape, None)
        kinds = self._ledger.kinds.changes
        if counted is None or counted.seen < self._gone or counted.kinds != kinds:
            counted = _Counted(iter(list(self._ledger.by_name())), self._gone + len(self._changes), kinds)
        return counted

    def _on(self, node: str, shape: MemberShape, most: "_Most") -> int:
        state = self._ledger.node(node)
        if state is None:
            return 0
        found = most(state)
        if not found:
            return 0
        left, load = self._nodes.left(node), shape.load
        if left is None:
            return 0
        if load.cpu:
            found = min(found, left.cpu // load.cpu)
        if load.memory:
            found = min(found, left.memory // load.memory)
        return max(0, min(found, left.pods // load.pods if load.pods else _ANY))


_Most = Callable[[NodeState], int]


def _most(request: PodRequest, ledger: Ledger) -> _Most:
    """How many such pods the cards of a node could take at most."""
    wants = [(claim, ledger.kinds.allowed(claim.resource_class)) for claim in fitting.claims(request)]

    def most(state: NodeState) -> int:
        return min((_of(claim, allowed, state) for claim, allowed in wants), default=_ANY)

    return most


def _of(claim: Claim, allowed: frozenset[int] | None, state: NodeState) -> int:
    codes = state.empties() if claim.whole else state.ascending()
    if allowed is not None and not allowed >= state.here:
        codes = [code for code in codes if state.kinds[code & PLACE] in allowed]
    if claim.whole:
        return len(codes) // claim.cards
    cards = sum((code >> POSITION) // claim.mem for code in codes if code >> POSITION >= claim.mem)
    return cards // claim.cards
