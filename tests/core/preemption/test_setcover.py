"""The cheapest cover against a slow reference, which tries all sets of few victims."""

from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.preemption import setcover
from cardwise.core.preemption.setcover import EXCESS_COST, CoverEffort, Victim
from tests.examples import examples
from tests.theory import theory_of
from tests.working import work

DIMENSIONS, BUDGETS = ("mem", "cpu", "pods"), ("a", "b", "c")

amounts = st.dictionaries(st.sampled_from(DIMENSIONS), st.sampled_from([1, 2, 3, 5, 8]))
budgets = st.lists(st.sampled_from(BUDGETS), max_size=2, unique=True).map(tuple)
victims = st.lists(st.tuples(amounts, budgets), max_size=8).map(
    lambda drawn: [Victim(f"t{i}", gives, charged) for i, (gives, charged) in enumerate(drawn)]
)
needs = st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(-1, 16))
allowed = st.dictionaries(st.sampled_from(BUDGETS), st.integers(-1, 3))


def least(of: list[Victim], short: Mapping[str, int], budget: Mapping[str, int]) -> int | None:
    """The minimum cost of all sets that meet the needs."""
    sets = [some for size in range(len(of) + 1) for some in combinations(of, size)]
    return min((cost(some, budget) for some in sets if meets(some, short)), default=None)


def meets(some: tuple[Victim, ...], short: Mapping[str, int]) -> bool:
    return all(sum(victim.amounts.get(dimension, 0) for victim in some) >= need for dimension, need in short.items())


def cost(some: tuple[Victim, ...], budget: Mapping[str, int]) -> int:
    return EXCESS_COST * setcover.budget_excess(some, budget) + len(some)


@settings(max_examples=examples(300, soak=5000))
@given(victims, needs, allowed)
def test_nothing_is_cheaper(of, short, budget):
    cover = setcover.cheapest_cover(of, short, budget, CoverEffort())
    assert (cover.cost if cover is not None else None) == least(of, short, budget)
    if cover is not None:
        assert meets(cover.victims, short)
        assert cover.cost == cost(cover.victims, budget)


@settings(max_examples=examples(150, soak=3000))
@given(victims, needs, allowed)
def test_without_any_effort_left_there_is_still_an_answer_where_one_exists(of, short, budget):
    cover = setcover.cheapest_cover(of, short, budget, CoverEffort(0))
    assert (cover is None) == (least(of, short, budget) is None)
    if cover is not None:
        assert meets(cover.victims, short)
        assert cover.cost == cost(cover.victims, budget)


class Counted(CoverEffort):
    looks = 0

    def spend(self, looks: int) -> None:
        super().spend(looks)
        self.looks += looks


def test_a_search_with_a_cover_ends_with_its_effort():
    """Each pod has its own budget and a common one, which is exceeded: no bound shows that no cover is cheaper."""
    of = [Victim(f"t{i}", {"mem": 1}, (f"own-{i}", "z")) for i in range(60)]
    budget = {f"own-{i}": 1 for i in range(60)} | {"z": 20}
    of += [Victim("other", {"cpu": 1}, ("own-0", "own-1"))]
    effort = Counted(1000)
    assert setcover.cheapest_cover(of, {"mem": 40, "cpu": 1}, budget, effort, cost_limit=20 * EXCESS_COST) is None
    assert 1000 < effort.looks < 2000


@pytest.mark.parametrize("pods", [500, 2000])
def test_a_cover_of_one_need_takes_no_longer_than_its_pods_are_many(pods):
    of = [Victim(f"t{i}", {"mem": 1}) for i in range(pods)]
    with work() as done:
        cover = setcover.cheapest_cover(of, {"mem": pods // 2}, {}, CoverEffort())
    assert cover is not None
    assert cover.cost == pods // 2
    assert done.steps < 120 * pods


@settings(max_examples=examples(150, soak=3000))
@given(victims, needs, allowed, st.integers(0, 4), st.integers(0, 2))
def test_nothing_that_does_not_cost_less_than_was_said(of, short, budget, pods, beyond):
    below = EXCESS_COST * beyond + pods
    cover = setcover.cheapest_cover(of, short, budget, CoverEffort(), below)
    best = least(of, short, budget)
    assert (cover.cost if cover is not None else None) == (best if best is not None and best < below else None)


def test_the_example_of_the_docstring():
    theory, short, sizes = theory_of("cardwise.core.preemption.setcover"), 10, (8, 6, 5, 3)
    pods = [Victim(str(gib), {"mem": gib}, (f"budget-{gib}",)) for gib in sizes]

    def cheapest(*protected: int) -> tuple[int, str]:
        """The cost and the pods of the cheapest set, if the budgets of these pods allow no eviction."""
        budgets = {f"budget-{gib}": int(gib not in protected) for gib in sizes}
        cover = setcover.cheapest_cover(pods, {"mem": short}, budgets, CoverEffort())
        assert cover is not None
        return cover.cost, ", ".join(pod.name for pod in cover.victims)

    (cost, chosen), (cost_without_8, without_8), (cost_beyond, beyond) = cheapest(), cheapest(8), cheapest(8, 6)
    assert f"a card is {short} GiB short, and its pods hold 8, 6, 5 and 3 GiB" in theory
    assert f"that adds the missing {short - sizes[0]} GiB: {{{chosen}}} at a cost of {cost}." in theory
    assert f"the 8 GiB pod allows no eviction, the result is {{{without_8}}} at the same cost" in theory
    assert cost_without_8 == cost
    assert f"none of the 6 GiB pod either, no set stays within the budgets (5 + 3 are {5 + 3} GiB)" in theory
    assert (
        f"{{{beyond}}} exceeds them by one eviction, and costs `EXCESS_COST` + {cost_beyond - EXCESS_COST}." in theory
    )
