"""Plans of moves against a slow search that tries every order of every set of pods, each on a new ledger."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import Load
from cardwise.core.defrag.defrag import MovePlan, plan
from cardwise.core.defrag.moving import DefragGoal, MovablePod, WhatIfCluster
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement
from tests.build import cards, shares
from tests.core.defrag.test_defrag import SIZE, Placer, share
from tests.examples import examples

CARDS = {"n1": 2, "n2": 1, "n3": 1}
NO_LOAD = Load(0, 0, 0)


Closed = frozenset[tuple[str, int]]  # nodes and indices of cards
OPEN: Closed = frozenset()


def ledger_of(holdings: dict[str, Holding], closed: Closed = OPEN) -> Ledger:
    """A ledger in which the closed cards are cordoned."""
    ledger = Ledger()
    for node, count in CARDS.items():
        there = cards(*[SIZE] * count, node=node)
        ledger.set_cards(node, [replace(card, cordoned=(node, card.index) in closed) for card in there])
    for holding in holdings.values():
        ledger.set_holding(holding)
    return ledger


def place_pod(holdings: dict[str, Holding], pod: MovablePod, closed: Closed) -> Placement | None:
    placed = placement.place(ledger_of(holdings, closed), list(CARDS), pod.request, pod.policy)
    return placed if isinstance(placed, Placement) else None


def pinned_to(holding: Holding) -> Closed:
    return frozenset((holding.node, index) for index in holding.assignment.indices())


def moved(holdings: dict[str, Holding], pod: MovablePod, closed: Closed = OPEN) -> dict[str, Holding] | None:
    """The holdings after the pod was evicted and surely placed on other cards; None if that is not certain."""
    old = holdings[pod.uid]
    beside = place_pod(holdings, pod, closed)
    placed = place_pod({uid: holding for uid, holding in holdings.items() if uid != pod.uid}, pod, closed)
    if placed is None or (placed.node, placed.assignment.indices()) == (old.node, old.assignment.indices()):
        return None
    if beside is not None and (beside.node, beside.assignment) != (placed.node, placed.assignment):
        return None
    return holdings | {pod.uid: replace(old, node=placed.node, assignment=placed.assignment)}


def carried(holdings: dict[str, Holding], pods: Sequence[MovablePod], *, cordon: bool) -> dict[str, Holding] | None:
    """The holdings after moving the pods one after another; None if one does not get other cards."""
    now: dict[str, Holding] | None = holdings
    closed = OPEN
    for pod in pods:
        if now is None:
            return None
        closed |= pinned_to(now[pod.uid]) if cordon else OPEN
        now = moved(now, pod, closed)
    return now


def fit_counts(holdings: dict[str, Holding], goal: DefragGoal) -> int:
    now = dict(holdings)
    for i in range(goal.count):
        placed = placement.place(ledger_of(now), list(CARDS), goal.request, goal.policy)
        if not isinstance(placed, Placement):
            return i
        now[f"goal-{i}"] = Holding(f"goal-{i}", "", "", placed.node, placed.assignment)
    return goal.count


def fewest(holdings: dict[str, Holding], goal: DefragGoal, pods: list[MovablePod], *, cordon: bool) -> int | None:
    """The minimum number of moves; None if no moves are enough.

    cordon: whether the cards that pods leave may be cordoned."""
    for count in range(len(pods) + 1):
        for some in permutations(pods, count):
            for closing in (False, True)[: 1 + cordon]:
                now = carried(holdings, some, cordon=closing)
                if now is not None and fit_counts(now, goal) >= goal.count:
                    return count
    return None


@st.composite
def worlds(draw):
    """Up to four pods on their cards, some of which may move, and the goal."""
    free = {(node, i): SIZE for node, count in CARDS.items() for i in range(count)}
    holdings, pods = {}, []
    for i in range(draw(st.integers(1, 4))):
        at = draw(st.sampled_from(sorted(free)))
        mem = draw(st.sampled_from([100, 200, 300, 450, 600, 800]))
        if free[at] < mem:
            continue
        free[at] -= mem
        uid = f"p{i}"
        held = Assignment({"0": shares(mem, at[1], node=at[0], total=SIZE)})
        holdings[uid] = Holding(uid, "default", uid, at[0], held)
        if draw(st.integers(0, 4)):
            policy = draw(st.sampled_from(["binpack", "binpack", "spread"]))
            pods.append(MovablePod(uid=uid, request=share(mem), load=NO_LOAD, policy=policy, mem=mem))
    goal = DefragGoal(
        request=share(draw(st.sampled_from([0, 0, 500, 700, 900]))),
        load=NO_LOAD,
        count=draw(st.integers(1, 4)),
        policy="binpack",
    )
    return holdings, pods, goal


@settings(deadline=None, max_examples=examples(30, soak=600))
@given(worlds(), st.booleans())
def test_as_few_moves_as_the_slow_search_finds_and_each_of_them_really_happens(scene, cordon):
    holdings, pods, goal = scene
    ledger = ledger_of(holdings)
    move_plan = plan(WhatIfCluster(ledger, Placer(ledger), lambda _: ()), goal, pods, cordon=cordon)
    assert {holding.uid: holding for holding in ledger.holdings()} == holdings  # the world is as before
    assert not any(card.cordoned for node in ledger.nodes() for card in node.cards)
    min_moves = fewest(holdings, goal, pods, cordon=cordon)
    assert move_plan.is_exhaustive
    assert cordon or not move_plan.cordons
    if min_moves is None:
        assert move_plan.fit_counts[-1] < goal.count
    else:
        assert move_plan.fit_counts[-1] == goal.count
        assert len(move_plan.moves) == min_moves
        assert move_plan.is_minimal
    happens(holdings, pods, goal, move_plan)


@settings(deadline=None, max_examples=examples(30, soak=600))
@given(worlds(), st.booleans())
def test_a_limited_search_is_valid_and_has_a_lower_bound(scene, cordon):
    holdings, pods, goal = scene
    ledger = ledger_of(holdings)
    move_plan = plan(WhatIfCluster(ledger, Placer(ledger), lambda _: ()), goal, pods, effort=1, cordon=cordon)
    min_moves = fewest(holdings, goal, pods, cordon=cordon)
    if move_plan.fit_counts[-1] >= goal.count:
        assert min_moves is not None
        assert min(move_plan.min_moves, len(move_plan.moves)) <= min_moves <= len(move_plan.moves)
    else:
        assert min_moves is None or not move_plan.is_exhaustive
    happens(holdings, pods, goal, move_plan)


def happens(holdings: dict[str, Holding], pods: list[MovablePod], goal: DefragGoal, move_plan: MovePlan) -> None:
    """Execute the plan's moves, and check that as many pods fit afterwards as it says."""
    by_uid = {pod.uid: pod for pod in pods}
    for i, move in enumerate(move_plan.moves):
        then = carried(
            holdings, [by_uid[step.before.uid] for step in move_plan.moves[: i + 1]], cordon=move_plan.cordons
        )
        assert then is not None
        assert then[move.after.uid].assignment == move.after.assignment
        assert fit_counts(then, goal) == move_plan.fit_counts[i + 1]
    assert move_plan.fit_counts[0] == fit_counts(holdings, goal)
