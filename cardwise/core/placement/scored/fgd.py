"""FGD: the node and card where the expected fragmentation grows least (Weng et al., USENIX ATC 2023).

For a request that cannot run on a node, all free cards of the node are fragments; if it can run there, those cards are
that are too small for it. Expected means: the mean over the workload's requests, including those without cards (for
them all free cards are fragments); the node's memory does not matter. As in the authors' scheduler, the score is a
whole number from 0 to 100. So nodes that differ by less than some 40/1000 of a card are equal, and the first is taken.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import candidates, chosen_cards, used, without
from cardwise.core.placement.scored.cardtable import CardArrays, CardTable, parts
from cardwise.core.placement.scored.nodetable import ABSENT, Bools, Floats, Lines
from cardwise.core.placement.scored.scoring import (
    Known,
    Market,
    Nearsighted,
    Scores,
    Weighted,
    best_candidate,
    by_cards,
)
from cardwise.core.placement.scored.shapes import Shape

_MOST_POINTS: Final = 100
_STEEP: Final = 50.0  # cards, beyond which there is nothing to tell apart
_TYPICAL: Final = 0.95  # of the workload, the most frequent first


class Fgd(Nearsighted):
    """FGD for one workload."""

    def __init__(self, market: Market) -> None:
        self._yardstick = market.yardstick
        typical = [one for one in _typical(market.workload) if one.shape.ask.cards]
        shapes, which = by_cards(typical)
        self._cards = CardTable(shapes)
        self.width = 2 * len(shapes)
        # By cpu that a node has left (as many steps as there are different requests) and by shape: the weight of those
        # that it has cpu for.
        cpus = np.array(sorted({one.shape.ask.cpu for one in typical}), np.float64)
        self._cpus = cpus
        self._weights = np.zeros((len(cpus) + 1, len(shapes)))
        for one, at in zip(typical, which, strict=True):
            self._weights[np.searchsorted(cpus, one.shape.ask.cpu) + 1 :, at] += one.weight

    def tally(self, lines: Lines) -> Floats:
        """By line and shape of the workload: the free MiB of cards that may serve the shape, and their number."""
        return np.concatenate([self._of(part) for part in parts(lines)])

    def worth(self, tally: Floats, cpu: Floats, memory: Floats) -> Floats:  # noqa: ARG002
        """The expected MiB that are no fragments."""
        half = len(self._cards)
        free = tally[:, :half] * (tally[:, half:] >= self._cards.cards)
        worth: Floats = (free * self._weights[np.searchsorted(self._cpus, cpu, side="right")]).sum(axis=1)
        return worth

    def useful(self, lines: Lines) -> Floats:
        """By line and card, the expected MiB that are no fragments; the sum of a line is what it is worth."""
        weights = self._weights[np.searchsorted(self._cpus, lines.cpu, side="right")]
        found, at = [], 0
        for part in parts(lines):
            served = self._cards.serves(part)
            heavy = weights[at : at + len(served)] * (served.sum(axis=1) >= self._cards.cards)
            found.append(part.free * np.einsum("nga,na->ng", served, heavy))
            at += len(served)
        return np.concatenate(found)

    def scores(self, lines: Lines, known: Known, shape: Shape, usable: Bools) -> Scores:
        ask = shape.ask
        cpu = lines.cpu - ask.cpu
        if ask.cards == 1:
            ways = candidates(lines, shape, usable)
            at, card = ways.at, ways.card
            tally = known.tally[at] - self._of_each(ways.before) + self._of_each(ways.after)
            taken = ways.before.free - ways.after.free
        else:
            at, card = np.arange(len(lines)), np.full(len(lines), ABSENT)
            tally, taken = known.tally, np.zeros(len(lines))
            if ask.cards:
                chosen = chosen_cards(lines, shape, usable)
                tally, taken = self._of(without(lines, shape, chosen)), used(shape, lines, chosen)
        # Fragments now, less those then: what is taken, less what is then worth less.
        less = taken - (known.worth[at] - self.worth(tally, cpu[at], lines.memory[at]))
        points = np.floor(_MOST_POINTS / (1.0 + np.exp(np.clip(-less / self._yardstick, -_STEEP, _STEEP))))
        return best_candidate(at, card, points, len(lines))

    def _of(self, cards: CardArrays) -> Floats:
        served = self._cards.serves(cards)
        free: Floats = np.einsum("ng,nga->na", cards.free, served)
        return np.concatenate([free, served.sum(axis=1)], axis=1)

    def _of_each(self, cards: CardArrays) -> Floats:
        served = self._cards.serves(cards)
        return np.concatenate([cards.free[:, None] * served, served], axis=1)


def _typical(workload: Sequence[Weighted]) -> list[Weighted]:
    """The most frequent requests, with weights of sum 1. Requests that differ only in the node's memory are one."""
    together: dict[Shape, float] = {}
    for shape, weight in workload:
        alike = shape._replace(ask=shape.ask._replace(memory=0))
        together[alike] = together.get(alike, 0.0) + weight
    found: list[Weighted] = []
    total = 0.0
    for shape, weight in sorted(together.items(), key=lambda one: -one[1]):
        if total >= _TYPICAL:
            break
        found.append(Weighted(shape, weight))
        total += weight
    return [Weighted(one.shape, one.weight / total) for one in found]
