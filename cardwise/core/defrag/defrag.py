"""Defragmentation: finds the fewest moves of pods after which a big request fits.

The placement engine chooses where each moved pod goes, so moves are simulated with the engine (`moving`). There are two
searches: in the first, any pod may take the cards that pods leave; in the second, these cards are cordoned until all
pods have moved. The plan with fewer moves is taken. In small cases all plans are tried. Otherwise a greedy search
clears node after node, and each time takes the node with the fewest pods to move (`preemption`); `MovePlan.min_moves`
is then a lower bound.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cardwise.core.api.request import Load
from cardwise.core.defrag.moving import DefragGoal, MovablePod, Move, Undo, WhatIfCluster
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import preemption
from cardwise.core.preemption.setcover import CoverEffort

_MAX_TRIED_PLACEMENTS: Final = 10_000  # placements that the search of all plans tries: takes some seconds
_MAX_FAILED_MOVE_SETS: Final = 1000  # sets of moves that the greedy search tries without success: takes some seconds
_MAX_NODES: Final = 512  # nodes on which the greedy search looks for moves: those with the most free memory on a card


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """A plan of moves.

    moves: the moves, in the order in which to make them.
    fit_counts: how many of the goal's pods fit now, and after each move. If the last number is below the goal, no plan
        was found.
    min_moves: a lower bound: no plan has fewer moves.
    is_exhaustive: whether all plans were tried. If all were tried without a result, no plan exists.
    cordons: whether the cards of each moved pod are cordoned from before its move until all pods have moved.
    """

    moves: tuple[Move, ...]
    fit_counts: tuple[int, ...]
    min_moves: int
    is_exhaustive: bool = True
    cordons: bool = False

    @property
    def is_minimal(self) -> bool:
        """Whether no plan has fewer moves."""
        return len(self.moves) <= self.min_moves


def plan(
    world: WhatIfCluster,
    goal: DefragGoal,
    movables: Sequence[MovablePod],
    *,
    max_moves: int | None = None,
    effort: int = _MAX_TRIED_PLACEMENTS,
    cordon: bool = True,
) -> MovePlan:
    """Find the fewest moves, at most `max_moves`, after which the goal's pods fit. `world` is unchanged afterwards.

    max_moves: None for no limit.
    effort: the number of placements that may be tried.
    cordon: whether cards may be cordoned during the moves. Such moves are used only if they save other moves, or if
        there is no other plan.
    """
    current_count = world.count_fitting(goal)
    if current_count >= goal.count:
        return MovePlan(moves=(), fit_counts=(current_count,), min_moves=0)
    order = sorted(movables, key=lambda pod: (pod.priority, pod.mem, pod.age, pod.uid))
    bound = len(order) if max_moves is None else min(max_moves, len(order))
    plain = _plan(_DefragProblem(world, goal, order, cordon=False), current_count, bound, effort)
    reached = plain.fit_counts[-1] >= goal.count
    if not cordon or (reached and len(plain.moves) <= 1):
        return plain
    closing = _plan(
        _DefragProblem(world, goal, order, cordon=True),
        current_count,
        len(plain.moves) - 1 if reached else bound,
        effort,
    )
    better = closing if closing.fit_counts[-1] > plain.fit_counts[-1] or closing.fit_counts[-1] >= goal.count else plain
    min_moves, is_exhaustive = min(plain.min_moves, closing.min_moves), plain.is_exhaustive and closing.is_exhaustive
    return replace(better, min_moves=min_moves, is_exhaustive=is_exhaustive)


@dataclass(frozen=True, slots=True)
class _DefragProblem:
    """The cluster, the goal, and the moves that are allowed.

    movables: the pods that may move, the least important first.
    cordon: whether the cards that pods leave are cordoned.
    """

    world: WhatIfCluster
    goal: DefragGoal
    movables: Sequence[MovablePod]
    cordon: bool

    def move(self, pod: MovablePod) -> tuple[Move, Undo] | None:
        return self.world.move(pod, cordon=self.cordon)

    def count_fitting(self) -> int:
        return self.world.count_fitting(self.goal)


def _plan(attempt: _DefragProblem, current_count: int, bound: int, effort: int) -> MovePlan:
    greedy = _Greedy(attempt, bound).plan(current_count)
    reached = greedy.fit_counts[-1] >= attempt.goal.count
    search = _Search(attempt, CoverEffort(effort))
    for depth in range(1, (len(greedy.moves) if reached else bound) + 1):
        better = search.search_depth(depth, current_count)  # at the last depth: as many moves, but perhaps less harm
        if better is not None:
            return better
        if search.effort.is_spent:
            return replace(greedy, min_moves=depth, is_exhaustive=False)
    return replace(greedy, min_moves=bound + 1)


def _harm_of_moves(pods: Sequence[MovablePod]) -> tuple[int, int]:
    """The harm of moving these pods, at least one: their highest priority, then their MiB. Smaller is better."""
    return max(pod.priority for pod in pods), sum(pod.mem for pod in pods)


_State = tuple[str, str, tuple[str, ...]]  # of a moved pod: its UID, its node and the UUIDs of its cards


def _state(move: Move) -> _State:
    after = move.after
    return after.uid, after.node, tuple(sorted(share.uuid for share in after.assignment.shares()))


class _Search:
    """Tries all orders of all moves, but continues only once from each resulting state of the cluster."""

    def __init__(self, attempt: _DefragProblem, effort: CoverEffort) -> None:
        self.effort = effort
        self._attempt = attempt

    def search_depth(self, depth: int, current_count: int) -> MovePlan | None:
        """The least harmful plan with this number of moves; None if none was found before the effort was spent."""
        best: MovePlan | None = None
        least_harm: tuple[int, int] | None = None
        by_uid = {pod.uid: pod for pod in self._attempt.movables}
        for moves, fit_counts in self._walk_moves(depth, [], [current_count], set()):
            harm = _harm_of_moves([by_uid[move.before.uid] for move in moves])
            if least_harm is None or harm < least_harm:
                best, least_harm = (
                    MovePlan(moves=moves, fit_counts=fit_counts, min_moves=depth, cordons=self._attempt.cordon),
                    harm,
                )
        return best

    def _walk_moves(
        self, depth: int, moves: list[Move], fit_counts: list[int], seen_states: set[frozenset[_State]]
    ) -> Iterator[tuple[tuple[Move, ...], tuple[int, ...]]]:
        moved_uids = {move.before.uid for move in moves}
        for pod in self._attempt.movables:
            if pod.uid in moved_uids or self.effort.is_spent:
                continue
            self.effort.spend(2 + self._attempt.goal.count)
            moved = self._attempt.move(pod)
            if moved is None:
                continue
            move, undo = moved
            moves.append(move)
            state = frozenset(map(_state, moves))
            if state not in seen_states:
                seen_states.add(state)
                fit_counts.append(self._attempt.count_fitting())
                if depth > 1:
                    yield from self._walk_moves(depth - 1, moves, fit_counts, seen_states)
                elif fit_counts[-1] >= self._attempt.goal.count:
                    yield tuple(moves), tuple(fit_counts)
                fit_counts.pop()
            moves.pop()
            undo()


class _Greedy:
    """Frees cards for the goal's pods, one pod after another, each time on the node where the fewest pods must move."""

    def __init__(self, attempt: _DefragProblem, max_moves: int) -> None:
        self._attempt = attempt
        self._world = attempt.world
        self._max_moves = max_moves
        self._movables = {pod.uid: pod for pod in attempt.movables}
        self._moves: list[Move] = []
        self._stuck_uids: set[str] = set()  # pods whose moves do not help at present
        self._remaining_failures = _MAX_FAILED_MOVE_SETS
        # By node: the cards that `fill_with` gave to the goal's pods, and the pods that must move for a further pod of
        # the goal. An entry is removed when the node changes.
        self._ways_by_node: dict[str, tuple[set[str], list[MovablePod]]] = {}
        goal = attempt.goal
        self._newcomer = preemption.Preemptor(
            request=goal.request, load=goal.load, priority=1, policy=goal.policy, headroom=goal.headroom
        )

    def plan(self, current_count: int) -> MovePlan:
        """The plan with all moves that help. The simulated cluster is unchanged afterwards."""
        fit_counts, undos = [current_count], list[Undo]()
        while fit_counts[-1] < self._attempt.goal.count and (step := self._step(fit_counts[-1])) is not None:
            undos += step[0]
            fit_counts += step[1]
        for undo in reversed(undos):
            undo()
        return MovePlan(
            moves=tuple(self._moves), fit_counts=tuple(fit_counts), min_moves=1, cordons=self._attempt.cordon
        )

    def _step(self, count_before: int) -> tuple[list[Undo], list[int]] | None:
        """Make the next moves that help. Returns the functions that undo these moves, and how many of the goal's pods
        fit after each; None if no moves help.
        """
        while ways := self._sort_move_sets_by_harm():
            for way in ways:
                step = self._move_all(way, count_before)
                if step is not None:
                    self._forget_nodes_of(self._stuck_uids)  # a stuck pod may be able to move now
                    self._stuck_uids.clear()
                    return step
                self._remaining_failures -= 1
                if self._remaining_failures < 0:
                    return None
        return None

    def _forget_nodes_of(self, uids: Collection[str]) -> None:
        """Discard the cache `_ways_by_node` of the nodes where these pods are."""
        for uid in uids:
            holding = self._world.ledger.holding(uid)
            if holding is not None:
                self._ways_by_node.pop(holding.node, None)

    def _sort_move_sets_by_harm(self) -> list[list[MovablePod]]:
        ways = []
        # The goal's pods that fit already are placed first, so that the search frees cards for further pods.
        with self._world.fill_with(self._attempt.goal) as placements:
            filled_cards: dict[str, set[str]] = {}
            for placement in placements:
                filled_cards.setdefault(placement.node, set()).update(
                    share.uuid for share in placement.assignment.shares()
                )
            allowed_nodes = self._attempt.goal.nodes
            candidates = (
                node for node in self._world.ledger.nodes() if allowed_nodes is None or node.name in allowed_nodes
            )
            nodes = sorted(candidates, key=lambda node: (-max(node.free, default=0), node.name))
            for node in nodes[:_MAX_NODES]:
                known_way, filled = self._ways_by_node.get(node.name), filled_cards.get(node.name, set())
                if known_way is None or known_way[0] != filled:
                    self._ways_by_node[node.name] = known_way = filled, self._blocking_pods(node)
                ways.append(known_way[1])
        remaining_moves = self._max_moves - len(self._moves)
        return sorted(
            (way for way in ways if 0 < len(way) <= remaining_moves),
            key=lambda way: (len(way), *_harm_of_moves(way), way[0].uid),
        )

    def _blocking_pods(self, node: NodeState) -> list[MovablePod]:
        """The fewest movable pods whose moves free enough on the node, the largest first; empty if
        no such set exists.
        """
        fixed_uids = {move.before.uid for move in self._moves} | self._stuck_uids
        residents = []
        for holding in self._world.ledger.holdings(node.name):
            pod = self._movables.get(holding.uid)
            fixed = pod is None or holding.uid in fixed_uids
            load = pod.load if pod is not None else Load(0, 0, 0)
            residents.append(preemption.Resident(holding.uid, 0, load, holding, fixed=fixed))
        # The free load of the node already counts the loads of these pods.
        full_node = preemption.FullNode(
            kinds=self._world.ledger.kinds, node=node, free=self._world.free_load(node.name), residents=residents
        )
        victims = preemption.least_harmful_victims(full_node, self._newcomer)
        blocking = [self._movables[uid] for uid in victims.uids] if victims is not None else []
        return sorted(blocking, key=lambda pod: (-pod.mem, pod.uid))

    def _move_all(self, way: Sequence[MovablePod], count_before: int) -> tuple[list[Undo], list[int]] | None:
        """Move all of these pods. Returns the functions that undo the moves, and how many of the goal's pods fit after
        each. If a pod cannot move, or if the moves do not let more of the goal's pods fit, undoes the moves and returns
        None.
        """
        stuck = list(way)
        undos: list[Undo] = []
        moves: list[Move] = []
        fit_counts: list[int] = []
        for pod in way:
            moved = self._attempt.move(pod)
            if moved is None:
                stuck = [pod]
                break
            moves.append(moved[0])
            undos.append(moved[1])
            fit_counts.append(self._attempt.count_fitting())
        if len(moves) == len(way) and fit_counts[-1] > count_before:
            self._moves += moves
            for move in moves:
                self._ways_by_node.pop(move.before.node, None)
                self._ways_by_node.pop(move.after.node, None)
            return undos, fit_counts
        for undo in reversed(undos):
            undo()
        leading_nowhere = {pod.uid for pod in stuck}
        self._stuck_uids |= leading_nowhere
        self._forget_nodes_of(leading_nowhere)
        return None
