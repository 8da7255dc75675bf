"""`priced`: chooses the node and card that lose the least value for the workload.

Theory of operation. There are three prices, all in cards. The first is for a share of one card: the value that the
card's free rest loses (`prices`). The second is for any other request: the capacity that the node loses. For each of
the workload's requests, the capacity counts how many such pods the node could still take. The counts are weighted by
the requests' frequency and size, and higher for requests that fit in few places of the cluster. The third is for cards
of a scarce model: such a card costs more for pods that do not name the model (`_kind_prices`). Prices are rounded:
nodes with a small difference count as equal. Of equal nodes the first in a fixed order is chosen, which keeps free
memory together.

While pods only arrive, the first price is enough, because all rests come from the policy's own placements. When pods
also end, rests of any size come back. Then a share also costs the capacity that its node loses, and its expected
capacity: nodes on which only a few pods must end before cards are empty have a value (`_expected_capacity`).

Example: shares of 500 and 300 thousandths of a card are equally frequent. So rests have these values: 2/3 for a rest of
600, 1/2 for 500, 1/3 for 300, and 0 for 200. A share of 300 costs 2/3 - 1/3 = 1/3 on a card with 600 free, and 1/2 - 0
= 1/2 on a card with 500 free, though it leaves less unused there: `priced` takes the first card, and `binpack` the
second.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import Candidates, candidates, cards_after, chosen_cards
from cardwise.core.placement.scored.cardarrays import QUOTIENT_EPSILON, RequestArrays, card_chunks
from cardwise.core.placement.scored.expectedcapacity import ExpectedCapacity
from cardwise.core.placement.scored.kindprices import KindPrices
from cardwise.core.placement.scored.nodetable import NO_CARD_KIND, Bools, Floats, NodeArrays
from cardwise.core.placement.scored.prices import CARD_PARTS
from cardwise.core.placement.scored.scoring import NodeScores, Scores, WorkloadModel, best_candidates, distinct_by_cards
from cardwise.core.placement.scored.shapes import RequestShape

_CAPACITY_STEP: Final = 0.16  # cards; lost capacities are rounded to multiples of this
_REMAINDER_STEP: Final = (
    0.02  # cards; lost values of remainders and lost expected capacities are rounded to multiples of this
)
# Pods that end per arriving pod. From the high rate on, scores consider that pods end; below the low rate they do not;
# between the two rates, this stays as it was.
_HIGH_DEPARTURE_RATE: Final = 0.4
_LOW_DEPARTURE_RATE: Final = 0.2
_MAX_SCARCITY_FACTOR: Final = 30.0  # the maximum factor of the weight of requests that fit in few places
_MIN_WEIGHT_CHANGE: Final = (
    0.1  # new weights change all scores, so they are used only if more than this fraction has changed
)
_MAX_SHAPES: Final = 160  # shapes of the workload that count: those with the largest total of requested cards


class Pricing:
    """The policy `priced` for one workload."""

    def __init__(self, model: WorkloadModel) -> None:
        self._typical_card_mib = model.typical_card_mib
        self._prices = model.prices
        self._kind_prices = KindPrices(model.workload, model.typical_card_mib)
        with_cards = [weighted for weighted in model.workload if weighted.shape.request_size.cards]
        workload = sorted(with_cards, key=lambda weighted: -weighted.weight * weighted.shape.request_size.cards)[
            :_MAX_SHAPES
        ]
        shapes, self._shape_indexes = distinct_by_cards(workload)
        self._requests = RequestArrays(shapes)
        self.width = len(shapes)
        request_sizes = [weighted.shape.request_size for weighted in workload]
        self._cpu, self._memory = (
            _Limit([request_size.cpu for request_size in request_sizes]),
            _Limit([request_size.memory for request_size in request_sizes]),
        )
        self._amounts = np.array(
            [request_size.cards * self._in_cards(request_size.mem) for request_size in request_sizes]
        )
        self._frequencies = np.array([weighted.weight for weighted in workload])
        self._weights = self._frequencies * self._amounts
        self._expected_capacity = ExpectedCapacity([weighted.shape for weighted in workload])
        self._expected_capacity.set_weights(self._weights)
        self._pods_leave = False

    def node_features(self, nodes: NodeArrays) -> Floats:
        """For each node (row) and each shape of the workload: how many pods of the shape fit, summed over the cards."""
        return np.concatenate([self._requests.count_fitting_pods(part).sum(axis=1) for part in card_chunks(nodes)])

    def remaining_values(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:
        """The value of each line: the capacity for the workload's requests, in cards."""
        values_by_node: Floats = self._capacities(features, cpu, memory) @ self._weights
        return values_by_node

    def measure_supply(self, nodes: NodeArrays, features: Floats) -> Floats:
        """The number of pods of each request that fit, and the free MiB of each kind of card."""
        # Negative for requests for which the node's cpu or memory is overcommitted.
        could = np.maximum(self._capacities(features, nodes.cpu, nodes.memory), 0.0).sum(axis=0)
        return np.concatenate([could, self._kind_prices.measure_supply(nodes)])

    def update_prices(self, supply: Floats, departure_rate: float) -> bool:
        """Update the pressure on models, the weights of requests, and whether pods leave. Returns whether scores
        change.
        """
        before = self._pods_leave
        self._pods_leave = departure_rate >= (_LOW_DEPARTURE_RATE if before else _HIGH_DEPARTURE_RATE)
        possible, free = np.split(supply, [len(self._frequencies)])
        scarcer = self._update_weights(possible, free.sum())
        return self._kind_prices.update_prices(free) or scarcer or self._pods_leave != before

    def scores(self, nodes: NodeArrays, node_scores: NodeScores, shape: RequestShape, usable_cards: Bools) -> Scores:
        request_size = shape.request_size
        line, card, chosen = np.arange(len(nodes)), np.full(len(nodes), NO_CARD_KIND), usable_cards
        cost = np.zeros(len(nodes))
        features = node_scores.features
        if request_size.cards == 1:
            ways = candidates(nodes, shape, usable_cards)
            line, card = ways.line, ways.card
            cost = np.zeros(len(line)) if request_size.whole else self._remainder_costs(nodes, ways)
            if request_size.whole or self._pods_leave:
                count_pods = self._requests.count_fitting_pods
                features = features[line] - count_pods(ways.before) + count_pods(ways.after)
        elif request_size.cards:
            chosen = chosen_cards(nodes, shape, usable_cards)
            features = self._requests.count_fitting_pods(cards_after(nodes, shape, chosen)).sum(axis=1)
        if request_size.whole or request_size.cards != 1 or self._pods_leave:
            values_after = self.remaining_values(
                features, nodes.cpu[line] - request_size.cpu, nodes.memory[line] - request_size.memory
            )
            cost += _rounded(node_scores.values_by_node[line] - values_after, _CAPACITY_STEP)
        if self._pods_leave and request_size.cards:
            taken_cards = card[:, None] == np.arange(nodes.clients.shape[1]) if request_size.cards == 1 else chosen
            before = self._expected_capacity.node_values(nodes.clients, nodes.kind)[line]
            cost += _rounded(
                before - self._expected_capacity.node_values(nodes.clients[line] + taken_cards, nodes.kind[line]),
                _REMAINDER_STEP,
            )
        if self._kind_prices.has_prices and request_size.cards:
            kinds = self._kind_prices.prices_of(nodes.kind)
            cost += self._in_cards(request_size.mem) * (
                kinds[line, card] if request_size.cards == 1 else (kinds * chosen).sum(axis=1)
            )
        return best_candidates(line, card, -cost, len(nodes))

    def _in_cards(self, mem: int) -> float:
        """MiB as a fraction of a typical card; 0 MiB means a whole card."""
        return mem / self._typical_card_mib if mem else 1.0

    def _update_weights(self, possible: Floats, free: float) -> bool:
        """Update the weights of requests: a request that fits in few places weighs more. Returns whether weights have
        changed.
        """
        cards = np.maximum(possible * self._amounts, QUOTIENT_EPSILON)
        scarcity = np.clip(free / self._typical_card_mib / cards, 1.0, _MAX_SCARCITY_FACTOR)
        weights = self._frequencies * self._amounts * scarcity
        if np.abs(weights - self._weights).sum() <= _MIN_WEIGHT_CHANGE * self._weights.sum():
            return False
        self._weights = weights
        self._expected_capacity.set_weights(weights)
        return True

    def _capacities(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:
        """By line and request of the workload, how many pods of the request the node could take."""
        copies = np.floor(features / self._requests.cards + QUOTIENT_EPSILON)[:, self._shape_indexes]
        self._cpu.limit_copies(copies, cpu)
        self._memory.limit_copies(copies, memory)
        return copies

    def _remainder_costs(self, nodes: NodeArrays, ways: Candidates) -> Floats:
        """The value that the remainder of each candidate card loses."""
        size = nodes.size[ways.line, ways.card]
        lost = self._price_remainders(ways.before.free, size) - self._price_remainders(ways.after.free, size)
        return _rounded(lost * size / self._typical_card_mib, _REMAINDER_STEP)

    def _price_remainders(self, free: Floats, size: Floats) -> Floats:
        """The value of remainders: computed from the prices for cards of this size, or from their MiB if there are no
        such prices.
        """
        priced = free / np.maximum(size, 1.0)
        for mem, prices in self._prices.items():
            of_size = size == mem
            priced[of_size] = prices[
                (np.maximum(free[of_size], 0.0) * CARD_PARTS / mem + QUOTIENT_EPSILON).astype(np.int64)
            ]
        return priced


class _Limit:
    """How many pods of each request the node's free cpu or memory allows."""

    def __init__(self, amounts: Sequence[int]) -> None:
        self._per = np.array([1.0 / amount if amount else 0.0 for amount in amounts])
        self._slack = np.array([QUOTIENT_EPSILON if amount else np.inf for amount in amounts])

    def limit_copies(self, copies: Floats, free: Floats) -> None:
        """Limit the counts to the pods that this amount allows."""
        np.minimum(copies, np.floor(free[:, None] * self._per + self._slack), out=copies)


def _rounded(cost: Floats, step: float) -> Floats:
    rounded: Floats = np.rint(cost / step) * step
    return rounded
