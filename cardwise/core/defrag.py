"""Which pods to move so that something big fits again: the fewest, one after another, each where the engine puts it.

Nothing keeps a card free while pods move, so a plan is what would really happen: who is evicted is made anew by its
controller and placed by the engine, while the old one still holds its cards or after that. A move counts only where
both ends on the same other cards. Small cases are searched through; else the search goes node by node after the fewest
who stand in the way (`preemption`), and `Plan.least` says how many it takes at least.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from cardwise.core import preemption
from cardwise.core.covering import Effort
from cardwise.core.gangs import Load
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.nodestate import NodeState
from cardwise.core.placement import Placement
from cardwise.core.quotas import Room
from cardwise.core.request import PodRequest

_NOBODY: Final = "defrag-goal-"  # + a number: UIDs of pods that are put somewhere to see whether they fit
_EFFORT: Final = 10_000  # times that a pod is put somewhere in the search: some seconds
_NODES: Final = 512  # those with the most free on a card, where somebody may be in the way

Undo = Callable[[], None]


class Placer(Protocol):
    """The engine, with what nodes have left beside cards."""

    def place(
        self,
        request: PodRequest,
        load: Load,
        policy: str,
        nodes: Collection[str] | None = None,
        rooms: Sequence[Room] = (),
    ) -> Placement | None:
        """Where the pod goes now; None where it has no room."""

    def take(self, node: str, load: Load, sign: int = 1) -> None:
        """A pod with this load comes (1) or goes (-1)."""

    def left(self, node: str) -> Load | None:
        """What the node has for further pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A pod that would come back. `nodes`: those it may be on, None: all; `mem`: MiB it holds; `age` in seconds."""

    uid: str
    request: PodRequest
    load: Load
    policy: str
    nodes: frozenset[str] | None = None
    priority: int = 0
    mem: int = 0
    age: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """So many pods that ask this are to fit at once. `rooms`: what quotas leave to their namespace."""

    request: PodRequest
    load: Load
    count: int
    policy: str
    rooms: Sequence[Room] = ()


class Move(NamedTuple):
    """One pod: what it holds now, and what it will."""

    before: Holding
    after: Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`moves` in order. `fits`: how many of the goal's pods fit now and after each move; `least`: no plan has fewer
    moves; with fewer fits than the goal's count none was found.
    """

    moves: tuple[Move, ...]
    fits: tuple[int, ...]
    least: int

    @property
    def exact(self) -> bool:
        """Whether no plan has fewer moves."""
        return len(self.moves) <= self.least


class World:
    """The cluster as it would be. `rooms`: what quotas leave to a namespace now."""

    def __init__(self, ledger: Ledger, placer: Placer, rooms: Callable[[str], Sequence[Room]]) -> None:
        self.ledger = ledger
        self._placer = placer
        self._rooms = rooms

    def fits(self, goal: Goal) -> int:
        """How many of the goal's pods fit as things are, at most as many as it wants."""
        placed: list[Placement] = []
        for i in range(goal.count):
            found = self._placer.place(goal.request, goal.load, goal.policy, None, goal.rooms)
            if found is None:
                break
            party = goal.request.party
            self.ledger.hold(Holding(f"{_NOBODY}{i}", "", "", found.node, found.assignment, party=party))
            self._placer.take(found.node, goal.load)
            placed.append(found)
        for i, found in enumerate(placed):
            self.ledger.release(f"{_NOBODY}{i}")
            self._placer.take(found.node, goal.load, -1)
        return len(placed)

    def move(self, pod: Movable) -> tuple[Move, Undo] | None:
        """The pod is evicted and comes again; None where that would not certainly bring it to other cards."""
        before = self.ledger.holding(pod.uid)
        if before is None:
            return None
        beside = self._place(pod, before.namespace)  # while the old one still holds its cards
        self.ledger.release(pod.uid)
        self._placer.take(before.node, pod.load, -1)
        found = self._place(pod, before.namespace)
        if found is None or _same(found, before) or (beside is not None and beside.assignment != found.assignment):
            self.ledger.hold(before)
            self._placer.take(before.node, pod.load)
            return None
        party = pod.request.party
        after = Holding(pod.uid, before.namespace, before.name, found.node, found.assignment, party=party)
        self.ledger.hold(after)
        self._placer.take(after.node, pod.load)

        def undo() -> None:
            self.ledger.hold(before)
            self._placer.take(after.node, pod.load, -1)
            self._placer.take(before.node, pod.load)

        return Move(before, after), undo

    def left(self, node: str) -> Load:
        """What the node has for further pods beside cards."""
        return self._placer.left(node) or Load(0, 0, 0)

    def _place(self, pod: Movable, namespace: str) -> Placement | None:
        return self._placer.place(pod.request, pod.load, pod.policy, pod.nodes, self._rooms(namespace))


def _same(found: Placement, before: Holding) -> bool:
    """Whether it would be on a card that it was on."""
    was = {share.uuid for share in before.assignment.shares()}
    return found.node == before.node and any(share.uuid in was for share in found.assignment.shares())


def plan(
    world: World, goal: Goal, movables: Sequence[Movable], *, most: int | None = None, effort: int = _EFFORT
) -> Plan:
    """The fewest moves, at most `most`, after which the goal's pods fit. The world is as before."""
    now = world.fits(goal)
    if now >= goal.count:
        return Plan(moves=(), fits=(now,), least=0)
    order = sorted(movables, key=lambda pod: (pod.priority, pod.mem, pod.age, pod.uid))
    bound = len(order) if most is None else min(most, len(order))
    found = _Greedy(world, goal, order, bound).plan(now)
    reached = found.fits[-1] >= goal.count
    search = _Search(world, goal, order, Effort(effort))
    for depth in range(1, (len(found.moves) if reached else bound) + 1):
        better = search.within(depth, now)  # of as many moves, perhaps of less important pods
        if better is not None:
            return better
        if search.effort.spent:
            return Plan(moves=found.moves, fits=found.fits, least=depth)
    return Plan(moves=found.moves, fits=found.fits, least=bound + 1)


def _harm(pods: Sequence[Movable]) -> tuple[int, int]:
    """Of moving these: the smaller, the better. There is at least one."""
    return max(pod.priority for pod in pods), sum(pod.mem for pod in pods)


_State = tuple[str, str, tuple[str, ...]]  # of a pod: UID, node and cards


def _state(move: Move) -> _State:
    after = move.after
    return after.uid, after.node, tuple(sorted(share.uuid for share in after.assignment.shares()))


class _Search:
    """All orders of all moves, but none twice that leads to the same cluster."""

    def __init__(self, world: World, goal: Goal, movables: Sequence[Movable], effort: Effort) -> None:
        self.effort = effort
        self._world = world
        self._goal = goal
        self._movables = movables

    def within(self, depth: int, now: int) -> Plan | None:
        """The least harmful plan of so many moves; None where there is none, or the effort is spent before."""
        found: Plan | None = None
        least: tuple[int, int] | None = None
        by_uid = {pod.uid: pod for pod in self._movables}
        for moves, fits in self._walk(depth, [], [now], set()):
            harm = _harm([by_uid[move.before.uid] for move in moves])
            if least is None or harm < least:
                found, least = Plan(moves=moves, fits=fits, least=depth), harm
        return found

    def _walk(
        self, depth: int, moves: list[Move], fits: list[int], seen: set[frozenset[_State]]
    ) -> Iterator[tuple[tuple[Move, ...], tuple[int, ...]]]:
        gone = {move.before.uid for move in moves}
        for pod in self._movables:
            if pod.uid in gone or self.effort.spent:
                continue
            self.effort.spend(2 + self._goal.count)
            moved = self._world.move(pod)
            if moved is None:
                continue
            move, undo = moved
            moves.append(move)
            state = frozenset(map(_state, moves))
            if state not in seen:
                seen.add(state)
                fits.append(self._world.fits(self._goal))
                if depth > 1:
                    yield from self._walk(depth - 1, moves, fits, seen)
                elif fits[-1] >= self._goal.count:
                    yield tuple(moves), tuple(fits)
                fits.pop()
            moves.pop()
            undo()


class _Greedy:
    """Makes room for one of the goal's pods after another, each time where the fewest pods are in the way."""

    def __init__(self, world: World, goal: Goal, movables: Sequence[Movable], most: int) -> None:
        self._world = world
        self._goal = goal
        self._most = most
        self._movables = {pod.uid: pod for pod in movables}
        self._moves: list[Move] = []
        self._ways: dict[str, list[Movable]] = {}  # by node, who is in the way there; as long as the node is as it was
        self._newcomer = preemption.Newcomer(
            request=goal.request, load=goal.load, priority=1, policy=goal.policy, rooms=goal.rooms
        )

    def plan(self, now: int) -> Plan:
        """With all moves that were of use. The world is as before."""
        fits, undos = [now], list[Undo]()
        while fits[-1] < self._goal.count:
            step = next((done for way in self._cheapest_first() if (done := self._go(way, fits[-1])) is not None), None)
            if step is None:
                break
            undos += step[0]
            fits += step[1]
        for undo in reversed(undos):
            undo()
        return Plan(moves=tuple(self._moves), fits=tuple(fits), least=1)

    def _cheapest_first(self) -> list[list[Movable]]:
        nodes = sorted(self._world.ledger.nodes(), key=lambda node: (-max(node.free, default=0), node.name))[:_NODES]
        for node in nodes:
            if node.name not in self._ways:
                self._ways[node.name] = self._in_the_way(node)
        left = self._most - len(self._moves)
        ways = [way for way in self._ways.values() if 0 < len(way) <= left]
        return sorted(ways, key=lambda way: (len(way), *_harm(way), way[0].uid))

    def _in_the_way(self, node: NodeState) -> list[Movable]:
        """The fewest of those who may still move, the biggest first; nobody where that would not be enough."""
        moved = {move.before.uid for move in self._moves}
        residents = []
        for holding in self._world.ledger.holdings(node.name):
            pod = self._movables.get(holding.uid)
            fixed = pod is None or holding.uid in moved
            load = pod.load if pod is not None else Load(0, 0, 0)
            residents.append(preemption.Resident(holding.uid, 0, load, holding, fixed=fixed))
        # What nodes have left counts the loads of these pods already.
        full = preemption.Full(node=node, left=self._world.left(node.name), residents=residents)
        victims = preemption.best(full, self._newcomer)
        found = [self._movables[uid] for uid in victims.uids] if victims is not None else []
        return sorted(found, key=lambda pod: (-pod.mem, pod.uid))

    def _go(self, way: Sequence[Movable], before: int) -> tuple[list[Undo], list[int]] | None:
        """All of them move; None where one cannot, or nothing more fits afterwards. How to undo it, and what fits."""
        undos: list[Undo] = []
        moves: list[Move] = []
        fits: list[int] = []
        for pod in way:
            moved = self._world.move(pod)
            if moved is None:
                break
            moves.append(moved[0])
            undos.append(moved[1])
            fits.append(self._world.fits(self._goal))
        if len(moves) == len(way) and fits[-1] > before:
            self._moves += moves
            for move in moves:
                self._ways.pop(move.before.node, None)
                self._ways.pop(move.after.node, None)
            return undos, fits
        for undo in reversed(undos):
            undo()
        return None
