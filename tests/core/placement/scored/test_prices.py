"""Prices of the rest of a card: known answers of cutting stock."""

import numpy as np
import pytest

from cardwise.core.placement.scored.prices import PARTS, remainder_prices


def test_a_rest_that_no_share_fits_into_is_worth_nothing():
    prices = remainder_prices({810: 2.0, 470: 1.0})
    assert prices[190] == pytest.approx(0.0)  # beside an 810
    assert prices[530] == pytest.approx(0.5)  # beside a 470: half of a card that holds two
    assert prices[PARTS] == pytest.approx(1.0)


def test_small_shares_make_a_rest_valuable_only_where_there_are_enough_of_them():
    rare = remainder_prices({810: 10.0, 190: 1.0})
    frequent = remainder_prices({810: 1.0, 190: 10.0})
    assert rare[190] == pytest.approx(0.0)  # there are more such rests than shares that want one
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
    assert prices[PARTS] == pytest.approx(1.0)
    assert prices[0] == 0.0


def test_without_shares_only_a_whole_card_is_worth_something():
    prices = remainder_prices({})
    assert prices[PARTS - 1] == 0.0
    assert prices[PARTS] == 1.0


def test_the_example_of_the_docstring():
    halves_and_thirds = remainder_prices({500: 1.0, 300: 1.0})
    assert [halves_and_thirds[rest] for rest in (500, 300, 400, 299)] == pytest.approx([1 / 2, 1 / 3, 1 / 3, 0.0])
    assert remainder_prices({700: 1.0, 300: 1.0})[300] == pytest.approx(0.0)


def test_the_example_of_the_policy():
    prices = remainder_prices({500: 1.0, 300: 1.0})
    assert [prices[rest] for rest in (600, 500, 300, 200)] == pytest.approx([2 / 3, 1 / 2, 1 / 3, 0.0])
    assert prices[600] - prices[300] < prices[500] - prices[200]
