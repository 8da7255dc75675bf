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


def min_cost(candidates: list[Victim], shortfall: Mapping[str, int], budget: Mapping[str, int]) -> int | None:
    """The minimum cost of all sets that meet the needs."""
    sets = [victims for size in range(len(candidates) + 1) for victims in combinations(candidates, size)]
    return min((cost(victims, budget) for victims in sets if meets(victims, shortfall)), default=None)


def meets(victims: tuple[Victim, ...], shortfall: Mapping[str, int]) -> bool:
    return all(
        sum(victim.amounts.get(dimension, 0) for victim in victims) >= need for dimension, need in shortfall.items()
    )


def cost(victims: tuple[Victim, ...], budget: Mapping[str, int]) -> int:
    return EXCESS_COST * setcover.budget_excess(victims, budget) + len(victims)


@settings(max_examples=examples(300, soak=5000))
@given(victims, needs, allowed)
def test_nothing_is_cheaper(candidates, shortfall, budget):
    cover = setcover.cheapest_cover(candidates, shortfall, budget, CoverEffort())
    assert (cover.cost if cover is not None else None) == min_cost(candidates, shortfall, budget)
    if cover is not None:
        assert meets(cover.victims, shortfall)
        assert cover.cost == cost(cover.victims, budget)


@settings(max_examples=examples(150, soak=3000))
@given(victims, needs, allowed)
def test_without_any_effort_left_there_is_still_an_answer_where_one_exists(candidates, shortfall, budget):
    cover = setcover.cheapest_cover(candidates, shortfall, budget, CoverEffort(0))
    assert (cover is None) == (min_cost(candidates, shortfall, budget) is None)
    if cover is not None:
        assert meets(cover.victims, shortfall)
        assert cover.cost == cost(cover.victims, budget)


class Counted(CoverEffort):
    looks = 0

    def spend(self, looks: int) -> None:
        super().spend(looks)
        self.looks += looks


def test_a_search_with_a_cover_ends_with_its_effort():
    """Each pod has its own budget and a common one, which is exceeded: no bound shows that no cover is cheaper."""
    candidates = [Victim(f"t{i}", {"mem": 1}, (f"own-{i}", "z")) for i in range(60)]
    budget = {f"own-{i}": 1 for i in range(60)} | {"z": 20}
    candidates += [Victim("other", {"cpu": 1}, ("own-0", "own-1"))]
    effort = Counted(1000)
    assert (
        setcover.cheapest_cover(candidates, {"mem": 40, "cpu": 1}, budget, effort, cost_limit=20 * EXCESS_COST) is None
    )
    assert 1000 < effort.looks < 2000


@pytest.mark.parametrize("pods", [500, 2000])
def test_a_cover_of_one_need_takes_no_longer_than_its_pods_are_many(pods):
    candidates = [Victim(f"t{i}", {"mem": 1}) for i in range(pods)]
    with work() as done:
        cover = setcover.cheapest_cover(candidates, {"mem": pods // 2}, {}, CoverEffort())
    assert cover is not None
    assert cover.cost == pods // 2
    assert done.steps < 120 * pods


@settings(max_examples=examples(150, soak=3000))
@given(victims, needs, allowed, st.integers(0, 4), st.integers(0, 2))
def test_nothing_that_does_not_cost_less_than_was_said(candidates, shortfall, budget, pods, beyond):
    below = EXCESS_COST * beyond + pods
    cover = setcover.cheapest_cover(candidates, shortfall, budget, CoverEffort(), below)
    best = min_cost(candidates, shortfall, budget)
    assert (cover.cost if cover is not None else None) == (best if best is not None and best < below else None)


def test_the_example_of_the_docstring():
    theory, shortfall, sizes = theory_of("cardwise.core.preemption.setcover"), 10, (8, 6, 5, 3)
    pods = [Victim(str(gib), {"mem": gib}, (f"budget-{gib}",)) for gib in sizes]

    def cheapest(*protected: int) -> tuple[int, str]:
        """The cost and the pods of the cheapest set, if the budgets of these pods allow no eviction."""
        budgets = {f"budget-{gib}": int(gib not in protected) for gib in sizes}
        cover = setcover.cheapest_cover(pods, {"mem": shortfall}, budgets, CoverEffort())
        assert cover is not None
        return cover.cost, ", ".join(pod.name for pod in cover.victims)

    (cost, chosen), (cost_without_8, without_8), (cost_beyond, beyond) = cheapest(), cheapest(8), cheapest(8, 6)
    assert f"a card is {shortfall} GiB short, and its pods hold 8, 6, 5 and 3 GiB" in theory
    assert f"that adds the missing {shortfall - sizes[0]} GiB: {{{chosen}}} at a cost of {cost}." in theory
    assert f"the 8 GiB pod allows no eviction, the result is {{{without_8}}} at the same cost" in theory
    assert cost_without_8 == cost
    assert f"the 6 GiB pod, every set exceeds the budgets, because 5 + 3 are only {5 + 3} GiB" in theory
    assert (
        f"{{{beyond}}} exceeds them by one eviction, and costs `EXCESS_COST` + {cost_beyond - EXCESS_COST}." in theory
    )
