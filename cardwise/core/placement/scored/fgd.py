"""FGD: the node and card where the expected fragmentation grows least (Weng et al., USENIX ATC 2023).

Theory of operation. To a request that cannot run on a node, all free memory of the node's cards is a fragment. If it
can run there, only the free memory of cards that are too small for it is. The node's expected fragmentation is the mean
over the workload's requests, weighted by their frequency. (To requests without cards all free memory is a fragment; the
node's memory does not matter.) A pod gets the card where the expected fragmentation grows least. As in the authors'
scheduler, the score is a whole number from 0 to 100, 50 where it does not change. So nodes that differ by less than
some 40 thousandths of a card are equal, and the first is taken.

Example: whole cards and halves are equally frequent, and a node has cards with 1000 and 300 free of 1000 MiB. Only the
300 MiB are a fragment, to both requests. A share of 300 MiB on the first card leaves 700 and 300 MiB. No whole card is
free then, so the fragments are 1000 MiB to the one request and 300 MiB to the other, 650 MiB in the mean: 350 MiB more,
which scores 41. On the second card it leaves no fragment: 300 MiB less, which scores 57.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import candidates, cards_after, chosen_cards, used_mib
from cardwise.core.placement.scored.cardtable import CardArrays, CardTable, parts
from cardwise.core.placement.scored.nodetable import ABSENT, Bools, Floats, NodeArrays
from cardwise.core.placement.scored.scoring import (
    NodeLocalScoring,
    NodeScores,
    Scores,
    WeightedShape,
    WorkloadModel,
    best_candidate,
    distinct_by_cards,
)
from cardwise.core.placement.scored.shapes import Shape

_MOST_POINTS: Final = 100
_STEEP: Final = 50.0  # cards, beyond which there is nothing to tell apart
_TYPICAL: Final = 0.95  # of the workload, the most frequent first


class Fgd(NodeLocalScoring):
    """FGD for one workload."""

    def __init__(self, model: WorkloadModel) -> None:
        self._yardstick = model.yardstick
        typical = [weighted for weighted in _typical(model.workload) if weighted.shape.ask.cards]
        shapes, shape_indexes = distinct_by_cards(typical)
        self._cards = CardTable(shapes)
        self.width = 2 * len(shapes)
        # By cpu that a node has left (as many steps as there are different requests) and by shape: the weight of those
        # that it has cpu for.
        cpus = np.array(sorted({weighted.shape.ask.cpu for weighted in typical}), np.float64)
        self._cpus = cpus
        self._weights = np.zeros((len(cpus) + 1, len(shapes)))
        for weighted, at in zip(typical, shape_indexes, strict=True):
            self._weights[np.searchsorted(cpus, weighted.shape.ask.cpu) + 1 :, at] += weighted.weight

    def node_features(self, lines: NodeArrays) -> Floats:
        """By line and shape of the workload: the free MiB of cards that may serve the shape, and their number."""
        return np.concatenate([self._features_of_cards(part) for part in parts(lines)])

    def node_values(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:  # noqa: ARG002
        """The expected MiB that are no fragments."""
        half = len(self._cards)
        free = features[:, :half] * (features[:, half:] >= self._cards.cards)
        values_by_node: Floats = (free * self._weights[np.searchsorted(self._cpus, cpu, side="right")]).sum(axis=1)
        return values_by_node

    def useful(self, lines: NodeArrays) -> Floats:
        """By line and card, the expected MiB that are no fragments; the sum of a line is what it is worth."""
        weights = self._weights[np.searchsorted(self._cpus, lines.cpu, side="right")]
        useful_by_card, at = [], 0
        for part in parts(lines):
            served = self._cards.serves(part)
            heavy = weights[at : at + len(served)] * (served.sum(axis=1) >= self._cards.cards)
            useful_by_card.append(part.free * np.einsum("nga,na->ng", served, heavy))
            at += len(served)
        return np.concatenate(useful_by_card)

    def scores(self, lines: NodeArrays, known: NodeScores, shape: Shape, usable: Bools) -> Scores:
        ask = shape.ask
        cpu = lines.cpu - ask.cpu
        if ask.cards == 1:
            ways = candidates(lines, shape, usable)
            at, card = ways.at, ways.card
            tally = known.features[at] - self._features_of_each(ways.before) + self._features_of_each(ways.after)
            taken_mib = ways.before.free - ways.after.free
        else:
            at, card = np.arange(len(lines)), np.full(len(lines), ABSENT)
            tally, taken_mib = known.features, np.zeros(len(lines))
            if ask.cards:
                chosen = chosen_cards(lines, shape, usable)
                tally, taken_mib = (
                    self._features_of_cards(cards_after(lines, shape, chosen)),
                    used_mib(shape, lines, chosen),
                )
        # Fragments now, less those then: what is taken, less what is then worth less.
        less = taken_mib - (known.values_by_node[at] - self.node_values(tally, cpu[at], lines.memory[at]))
        points = np.floor(_MOST_POINTS / (1.0 + np.exp(np.clip(-less / self._yardstick, -_STEEP, _STEEP))))
        return best_candidate(at, card, points, len(lines))

    def _features_of_cards(self, cards: CardArrays) -> Floats:
        served = self._cards.serves(cards)
        free: Floats = np.einsum("ng,nga->na", cards.free, served)
        return np.concatenate([free, served.sum(axis=1)], axis=1)

    def _features_of_each(self, cards: CardArrays) -> Floats:
        served = self._cards.serves(cards)
        return np.concatenate([cards.free[:, None] * served, served], axis=1)


def _typical(workload: Sequence[WeightedShape]) -> list[WeightedShape]:
    """The most frequent requests, with weights of sum 1. Requests that differ only in the node's memory are one."""
    together: dict[Shape, float] = {}
    for shape, weight in workload:
        alike = shape._replace(ask=shape.ask._replace(memory=0))
        together[alike] = together.get(alike, 0.0) + weight
    selected: list[WeightedShape] = []
    total = 0.0
    for shape, weight in sorted(together.items(), key=lambda entry: -entry[1]):
        if total >= _TYPICAL:
            break
        selected.append(WeightedShape(shape, weight))
        total += weight
    return [WeightedShape(entry.shape, entry.weight / total) for entry in selected]
