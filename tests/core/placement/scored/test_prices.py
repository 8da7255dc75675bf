"""Prices of the remainder of a card: known solutions of cutting stock."""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest

from cardwise.core.placement.scored.prices import CARD_PARTS, remainder_prices
from tests.core.placement.scored.engines import load, share, world
from tests.theory import theory_of


def test_a_remainder_that_no_share_fits_into_has_no_value():
    prices = remainder_prices({810: 2.0, 470: 1.0})
    assert prices[190] == pytest.approx(0.0)  # beside an 810
    assert prices[530] == pytest.approx(0.5)  # beside a 470: half of a card that holds two
    assert prices[CARD_PARTS] == pytest.approx(1.0)


def test_small_shares_make_a_rest_valuable_only_where_there_are_enough_of_them():
    rare = remainder_prices({810: 10.0, 190: 1.0})
    frequent = remainder_prices({810: 1.0, 190: 10.0})
    assert rare[190] == pytest.approx(0.0)  # there are more such remainders than shares that fit into them
    assert frequent[190] == pytest.approx(0.2)  # five on a card
    assert frequent[810] == pytest.approx(0.8)


def test_thirds_are_worth_thirds():
    prices = remainder_prices({320: 3.0, 650: 1.0})
    assert prices[320] == pytest.approx(1 / 3)
    assert prices[650] == pytest.approx(2 / 3)
    assert prices[319] == pytest.approx(0.0)


def test_more_room_is_never_worth_less_and_no_rest_more_than_a_card():
    prices = remainder_prices({810: 1078, 470: 750, 320: 328, 650: 253, 230: 140, 460: 128, 160: 74, 50: 7})
    assert np.all(np.diff(prices) >= -1e-9)
    assert prices[CARD_PARTS] == pytest.approx(1.0)
    assert prices[0] == 0.0


def test_without_shares_only_a_whole_card_is_worth_something():
    prices = remainder_prices({})
    assert prices[CARD_PARTS - 1] == 0.0
    assert prices[CARD_PARTS] == 1.0


def prices_of(frequencies: Mapping[int, float], *remainders: int) -> list[Fraction]:
    """The prices of these remainders as fractions of a card."""
    prices = remainder_prices(frequencies)
    return [Fraction(prices[remainder]).limit_denominator(1000) for remainder in remainders]


def test_the_example_of_the_docstring():
    theory = theory_of("cardwise.core.placement.scored.prices")
    large, small, of_400, of_299 = prices_of({500: 1.0, 300: 1.0}, 500, 300, 400, 299)
    assert "shares of 500 and of 300 thousandths of a card are equally frequent" in theory
    assert f"The prices are {large} and {small} of a card" in theory
    assert (
        f"A rest of 400 is worth {of_400}, because it takes one small share; a rest of 299 is worth nothing" in theory
    )
    assert of_299 == 0
    assert "With shares of 700 and 300 the price of the small share is 0" in theory
    assert prices_of({700: 1.0, 300: 1.0}, 300) == [0]


def test_the_example_of_the_policy():
    theory = theory_of("cardwise.core.placement.scored.pricing")
    of_600, of_500, of_300, of_200 = prices_of({500: 1.0, 300: 1.0}, 600, 500, 300, 200)
    assert "shares of 500 and 300 thousandths of a card are equally frequent" in theory
    assert f"{of_600} for a rest of 600, {of_500} for 500, {of_300} for 300, and {of_200} for 200" in theory
    first = f"{of_600} - {of_300} = {of_600 - of_300} on a card with 600 free"
    second = f"{of_500} - {of_200} = {of_500 - of_200} on a card with 500 free"
    assert f"A share of 300 costs {first}, and {second}" in theory
    _, _, engine = world(seen=[(share(500), load()), (share(300), load())], first=[600], second=[500])
    assert "`priced` takes the first card, and `binpack` the second" in theory
    assert engine.place(share(300), load(), "priced").node == "first"
    assert engine.place(share(300), load(), "binpack").node == "second"
