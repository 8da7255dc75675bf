"""Plans of moves against a slow search that tries every order of every set of pods, each time on a ledger made anew."""

from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core import placement
from cardwise.core.assignment import Assignment
from cardwise.core.defrag import Goal, Movable, World, plan
from cardwise.core.gangs import Load
from cardwise.core.ledger import Holding, Ledger
from cardwise.core.placement import Placement
from tests.build import cards, shares
from tests.core.test_defrag import SIZE, Placer, share

CARDS = {"n1": 2, "n2": 1, "n3": 1}
NO_LOAD = Load(0, 0, 0)


def made(holdings: dict[str, Holding]) -> Ledger:
    ledger = Ledger()
    for node, count in CARDS.items():
        ledger.set_cards(node, cards(*[SIZE] * count, node=node))
    for holding in holdings.values():
        ledger.hold(holding)
    return ledger


def put(holdings: dict[str, Holding], pod: Movable) -> Placement | None:
    found = placement.place(made(holdings), list(CARDS), pod.request, pod.policy)
    return found if isinstance(found, Placement) else None


def after(holdings: dict[str, Holding], pod: Movable) -> dict[str, Holding] | None:
    """The pod evicted, and come again on other cards for certain."""
    old = holdings[pod.uid]
    beside = put(holdings, pod)
    found = put({uid: one for uid, one in holdings.items() if uid != pod.uid}, pod)
    if found is None or (found.node, found.assignment.indices()) == (old.node, old.assignment.indices()):
        return None
    if beside is not None and (beside.node, beside.assignment) != (found.node, found.assignment):
        return None
    return holdings | {pod.uid: replace(old, node=found.node, assignment=found.assignment)}


def fits(holdings: dict[str, Holding], goal: Goal) -> int:
    now = dict(holdings)
    for i in range(goal.count):
        found = placement.place(made(now), list(CARDS), goal.request, goal.policy)
        if not isinstance(found, Placement):
            return i
        now[f"goal-{i}"] = Holding(f"goal-{i}", "", "", found.node, found.assignment)
    return goal.count


def fewest(holdings: dict[str, Holding], goal: Goal, pods: list[Movable]) -> int | None:
    """How many moves it takes; None where no moves do it."""
    for many in range(len(pods) + 1):
        for some in permutations(pods, many):
            now: dict[str, Holding] | None = holdings
            for pod in some:
                now = after(now, pod) if now is not None else None
            if now is not None and fits(now, goal) >= goal.count:
                return many
    return None


@st.composite
def worlds(draw):
    """Up to four pods on their cards, some of which may move, and what is to fit."""
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
            pods.append(Movable(uid=uid, request=share(mem), load=NO_LOAD, policy=policy, mem=mem))
    goal = Goal(
        request=share(draw(st.sampled_from([0, 0, 500, 700, 900]))),
        load=NO_LOAD,
        count=draw(st.integers(1, 4)),
        policy="binpack",
    )
    return holdings, pods, goal


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_as_few_moves_as_the_slow_search_finds_and_each_of_them_really_happens(found):
    holdings, pods, goal = found
    ledger = made(holdings)
    told = plan(World(ledger, Placer(ledger), lambda _: ()), goal, pods)
    assert {one.uid: one for one in ledger.holdings()} == holdings  # the world is as before
    least = fewest(holdings, goal, pods)
    if least is None:
        assert told.fits[-1] < goal.count
    else:
        assert told.fits[-1] == goal.count
        assert len(told.moves) == least
        assert told.exact
    by_uid = {pod.uid: pod for pod in pods}
    now = holdings
    for move in told.moves:
        assert now[move.before.uid] == move.before
        now = after(now, by_uid[move.before.uid])
        assert now is not None
        assert now[move.after.uid].assignment == move.after.assignment
    assert fits(now, goal) == told.fits[-1]


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_in_a_hurry_it_is_right_and_says_that_fewer_may_do(found):
    holdings, pods, goal = found
    ledger = made(holdings)
    told = plan(World(ledger, Placer(ledger), lambda _: ()), goal, pods, effort=1)
    least = fewest(holdings, goal, pods)
    if told.fits[-1] >= goal.count:
        assert least is not None
        assert min(told.least, len(told.moves)) <= least <= len(told.moves)
    by_uid = {pod.uid: pod for pod in pods}
    now = holdings
    for move in told.moves:
        now = after(now, by_uid[move.before.uid])
        assert now is not None
    assert fits(now, goal) == told.fits[-1]
