"""Published policies that are simulated for comparison only; the extender does not offer them."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from cardwise.core.placement.scored.candidates import chosen_cards, used_mib
from cardwise.core.placement.scored.engine import SCORINGS, MakeScoring
from cardwise.core.placement.scored.nodetable import NO_CARD_KIND, Bools, Floats, NodeArrays
from cardwise.core.placement.scored.scoring import NodeScores, Scores, WorkloadModel
from cardwise.core.placement.scored.shapes import RequestShape

_MAX_SCORE: Final = 100
_LARGEST_NODE_CPU: Final = 128_000.0  # millicores of the largest node of the trace
_LARGEST_NODE_CARDS: Final = 8.0  # cards of this node; a node's free CPU and cards are fractions of these two numbers


class BestFit:
    """The best fit of the FGD paper (USENIX ATC 2023), with which its authors compare FGD.

    Chooses the node with the least CPU and GPU free after placement, and on that node the fullest card. CPU and GPU
    have equal weight, and the score is rounded down to whole points of 100.
    """

    width = 0

    def __init__(self, model: WorkloadModel) -> None:
        self._typical_card_mib = model.typical_card_mib

    def node_features(self, nodes: NodeArrays) -> Floats:
        """An empty table: best fit keeps no state per node."""
        return np.zeros((len(nodes), 0))

    def remaining_values(self, features: Floats, cpu: Floats, memory: Floats) -> Floats:  # noqa: ARG002
        """Zero for every node: best fit does not estimate the pods that a node could still take."""
        return np.zeros(len(features))

    def measure_supply(self, nodes: NodeArrays, features: Floats) -> Floats:  # noqa: ARG002
        """An empty table: best fit scores each node by itself."""
        return np.zeros(0)

    def update_prices(self, supply: Floats, departure_rate: float) -> bool:  # noqa: ARG002
        """False: scores never depend on prices."""
        return False

    def scores(self, nodes: NodeArrays, node_scores: NodeScores, shape: RequestShape, usable_cards: Bools) -> Scores:  # noqa: ARG002
        """Score each node by its free CPU and cards after placement: the less is free, the higher is the score."""
        request_size = shape.request_size
        chosen = chosen_cards(nodes, shape, usable_cards)
        free_cards = (nodes.free.sum(axis=1) - used_mib(shape, nodes, chosen)) / self._typical_card_mib
        free_share = ((nodes.cpu - request_size.cpu) / _LARGEST_NODE_CPU + free_cards / _LARGEST_NODE_CARDS) / 2
        card = chosen.argmax(axis=1) if request_size.cards == 1 else np.full(len(nodes), NO_CARD_KIND)
        return Scores(np.floor(_MAX_SCORE * (1 - free_share)), card)


BASELINES: Final[Mapping[str, MakeScoring]] = {**SCORINGS, "bestfit": BestFit}
