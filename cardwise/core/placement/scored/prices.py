"""Prices of a cutting-stock problem: the value of the free remainder of a card for pods that share cards.

Theory of operation. Placing the workload's shares on the fewest cards is a linear program. A *cut* is one way to divide
a card into shares; each variable counts the cards with one cut. The dual variables are the prices of the sizes of
shares. The free rest of a card is worth the most valuable set of shares that fits into the rest. The program is solved
by column generation (Gilmore and Gomory, 1961). The simplex method begins with few cuts, and a knapsack over the
current prices finds each further cut.

Example: shares of 500 and of 300 thousandths of a card are equally frequent. The prices are 1/2 and 1/3 of a card: two
large shares, or three small shares, fill a card. A rest of 400 is worth 1/3, because it takes one small share; a rest
of 299 is worth nothing. With shares of 700 and 300 the price of the small share is 0: each large share leaves a rest
for a small share, so such rests are never scarce.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from cardwise.core.placement.scored.nodetable import Floats

CARD_PARTS: Final = 1000  # parts of a card; sizes of shares are rounded up to whole parts
_MAX_SIZES: Final = 32  # sizes of shares that are priced: those with the largest demand
_MAX_ROUNDS: Final = 600  # rounds of the simplex method
_EPSILON: Final = 1e-9  # smaller differences are rounding errors


def remainder_prices(demand: Mapping[int, float]) -> Floats:
    """The value, in cards, of a remainder of 0 to PARTS parts.

    demand: by size of a share in parts, how often it is requested.
    """
    frequency_by_size = {
        parts: frequency for parts, frequency in demand.items() if 0 < parts <= CARD_PARTS and frequency > 0
    }
    if not frequency_by_size:
        return np.floor(np.arange(CARD_PARTS + 1) / CARD_PARTS)
    chosen_sizes = sorted(frequency_by_size, key=lambda parts: (-parts * frequency_by_size[parts], parts))[:_MAX_SIZES]
    sizes = sorted(chosen_sizes)
    total = sum(frequency_by_size[parts] for parts in sizes)
    return _solve_prices(sizes, np.array([frequency_by_size[parts] / total for parts in sizes]))


def _solve_prices(sizes: list[int], demand: Floats) -> Floats:
    count = len(sizes)
    columns = np.diag([float(CARD_PARTS // parts) for parts in sizes])
    costs = np.ones(count)
    for _ in range(_MAX_ROUNDS):
        prices = np.asarray(np.linalg.solve(columns.T, costs), np.float64)
        lowest = int(prices.argmin())
        if prices[lowest] < -_EPSILON:
            entering, cost = np.zeros(count), 0.0  # the slack: more shares of this size than are requested
            entering[lowest] = -1.0
        else:
            worth = _knapsack(sizes, prices)
            if worth[CARD_PARTS] <= 1.0 + _EPSILON:
                break
            entering, cost = _most_valuable_share_counts(sizes, prices, worth), 1.0
        used = np.linalg.solve(columns, demand)
        change = np.linalg.solve(columns, entering)
        rising = change > _EPSILON
        if not rising.any():
            break
        limits = np.where(rising, used / np.where(rising, change, 1.0), np.inf)
        leaving = int(limits.argmin())
        columns[:, leaving], costs[leaving] = entering, cost
    return np.minimum(_knapsack(sizes, np.maximum(np.linalg.solve(columns.T, costs), 0.0)), 1.0)


def _knapsack(sizes: list[int], prices: Floats) -> Floats:
    """By remainder of 0 to PARTS parts, the value of the most valuable set of shares that fits. A set may have any
    number of shares of each size.
    """
    worth = np.zeros(CARD_PARTS + 1)
    for parts, price in zip(sizes, prices, strict=True):
        times = 1
        while price > _EPSILON and parts * times <= CARD_PARTS:  # 1, 2, 4, ... shares: sums of these are all numbers
            np.maximum(
                worth[parts * times :],
                worth[: CARD_PARTS + 1 - parts * times] + price * times,
                out=worth[parts * times :],
            )
            times *= 2
    return worth


def _most_valuable_share_counts(sizes: list[int], prices: Floats, worth: Floats) -> Floats:
    """The number of shares of each size in the most valuable set for a whole card."""
    counts = np.zeros(len(sizes))
    remainder = CARD_PARTS
    while worth[remainder] > _EPSILON:
        for i, parts in enumerate(sizes):
            if (
                parts <= remainder
                and prices[i] > _EPSILON
                and worth[remainder] <= worth[remainder - parts] + prices[i] + _EPSILON
            ):
                counts[i] += 1
                remainder -= parts
                break
        else:
            break
    return counts
