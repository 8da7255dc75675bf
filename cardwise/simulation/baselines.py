"""Policies of others, simulated for comparison; nobody places pods by them."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import chosen_cards, used
from cardwise.core.placement.scored.engine import SCORINGS, Score
from cardwise.core.placement.scored.nodetable import ABSENT, Bools, Floats, Lines
from cardwise.core.placement.scored.scoring import Known, Market, Nearsighted, Scores
from cardwise.core.placement.scored.shapes import Shape

_MOST_POINTS: Final = 100
_MOST_CPU: Final = 128_000.0  # milli, of a node of the trace;
_MOST_CARDS: Final = 8.0  # what is left is counted as a share of these


class BestFit(Nearsighted):
    """Best fit as FGD's authors compare with it (USENIX ATC 2023): the node where the least cpu and cards are left,
    both counted the same, in whole points of 100; and on it the fullest card.
    """

    width = 0

    def __init__(self, market: Market) -> None:
        self._yardstick = market.yardstick

    def tally(self, lines: Lines) -> Floats:
        """Nothing is to be kept."""
        return np.zeros((len(lines), 0))

    def worth(self, tally: Floats, cpu: Floats, memory: Floats) -> Floats:  # noqa: ARG002
        """As above."""
        return np.zeros(len(tally))

    def scores(self, lines: Lines, known: Known, shape: Shape, usable: Bools) -> Scores:  # noqa: ARG002
        ask = shape.ask
        chosen = chosen_cards(lines, shape, usable)
        cards = (lines.free.sum(axis=1) - used(shape, lines, chosen)) / self._yardstick
        left = ((lines.cpu - ask.cpu) / _MOST_CPU + cards / _MOST_CARDS) / 2
        card = chosen.argmax(axis=1) if ask.cards == 1 else np.full(len(lines), ABSENT)
        return Scores(np.floor(_MOST_POINTS * (1 - left)), card)


BASELINES: Final[Mapping[str, Score]] = {**SCORINGS, "bestfit": BestFit}
