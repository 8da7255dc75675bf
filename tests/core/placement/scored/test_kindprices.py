"""The price of a card that is scarce for pods that can use no other kind."""

import numpy as np

from cardwise.core.placement.scored.kindprices import KindPrices
from cardwise.core.placement.scored.scoring import WeightedShape
from cardwise.core.placement.scored.shapes import RequestShape, RequestSize
from tests.theory import theory_of

A, OTHER = 0, 1
CARD = 1000  # MiB
WHOLE = RequestSize(1, 0, 0, "", 0, 0)


def prices(free_of_a: int, free_of_others: int) -> list[float]:
    """The prices of a card of kind A and of any other, if half of the demand names A."""
    workload = [WeightedShape(RequestShape(WHOLE, frozenset({A})), 0.5), WeightedShape(RequestShape(WHOLE), 0.5)]
    kinds = KindPrices(workload, typical_card_mib=CARD)
    kinds.update_prices(np.array([free_of_a, free_of_others], np.float64))
    return list(kinds.prices_of(np.array([A, OTHER]))) if kinds.has_prices else [0.0, 0.0]


def test_the_example_of_the_docstring():
    theory = theory_of("cardwise.core.placement.scored.kindprices")
    assert "half of the demand names kind A" in theory
    assert "A quarter of the free MiB is on cards of kind A" in theory
    of_a, of_others = prices(CARD, 3 * CARD)
    assert of_others == 0
    free_of_charge = 0.5
    assert f"The pressure on A is {of_a + free_of_charge:g}, so a card of kind A costs {of_a} cards more" in theory
    assert f"costs the pressure above {free_of_charge}, at most 8 cards" in theory


def test_a_kind_costs_nothing_below_the_pressure_and_no_more_than_eight_cards():
    assert prices(CARD, 0) == [0.0, 0.0], "a pressure of 0.5"
    assert prices(CARD, 99 * CARD) == [8.0, 0.0], "a pressure of 50"
