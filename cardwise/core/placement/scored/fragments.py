"""The measure of fragmentation of FGD (Weng et al., USENIX ATC 2023).

Theory of operation. If a request cannot run on a node, all free memory of the node's cards is a fragment to this
request. If the request can run there, only cards with too little free memory count, and their free memory is a
fragment. The node's expected fragmentation is the mean over the workload's requests, weighted by their frequency. (To
requests without cards all free memory is a fragment. The node's main memory does not matter.)

Example: half of the pods request a whole card and half request 500 MiB; a node has two cards of 1000 MiB, one empty and
one with 300 MiB free. Only the 300 MiB are a fragment, to both requests. A share of 300 MiB on the first card leaves
700 and 300 MiB. No whole card is free then, so the fragments are 1000 MiB to the one request and 300 MiB to the other,
on average 650 MiB.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cardwise.core.placement.scored.cardarrays import RequestArrays, card_chunks
from cardwise.core.placement.scored.nodetable import Floats, NodeArrays
from cardwise.core.placement.scored.scoring import WeightedShape, distinct_by_cards
from cardwise.core.placement.scored.shapes import RequestShape

_TYPICAL_WEIGHT: Final = 0.95  # the fraction of the workload that its typical shapes cover


class FragmentMeasure:
    """Measures fragmentation for one workload: which free memory of cards its pods could use."""

    def __init__(self, workload: Sequence[WeightedShape]) -> None:
        typical = [weighted for weighted in _typical_shapes(workload) if weighted.shape.request_size.cards]
        shapes, shape_indexes = distinct_by_cards(typical)
        self._requests = RequestArrays(shapes)
        # By free cpu of a node (a row for each different cpu request) and by shape: the total weight of the requests
        # for which this cpu is enough.
        cpus = np.array(sorted({weighted.shape.request_size.cpu for weighted in typical}), np.float64)
        self._cpus = cpus
        self._weights = np.zeros((len(cpus) + 1, len(shapes)))
        for weighted, shape_index in zip(typical, shape_indexes, strict=True):
            self._weights[np.searchsorted(cpus, weighted.shape.request_size.cpu) + 1 :, shape_index] += weighted.weight

    def useful_mib(self, nodes: NodeArrays) -> Floats:
        """By line and card, the expected free MiB that are not fragments."""
        weights = self._weights[np.searchsorted(self._cpus, nodes.cpu, side="right")]
        useful_by_card, start = [], 0
        for cards in card_chunks(nodes):
            served = self._requests.can_serve(cards)
            heavy = weights[start : start + len(served)] * (served.sum(axis=1) >= self._requests.cards)
            useful_by_card.append(cards.free * np.einsum("nga,na->ng", served, heavy))
            start += len(served)
        return np.concatenate(useful_by_card)


def _typical_shapes(workload: Sequence[WeightedShape]) -> list[WeightedShape]:
    """The most frequent requests, with weights that sum to 1. Requests that differ only in the node's memory are
    merged.
    """
    weight_by_shape: dict[RequestShape, float] = {}
    for shape, weight in workload:
        shape_without_memory = shape._replace(request_size=shape.request_size._replace(memory=0))
        weight_by_shape[shape_without_memory] = weight_by_shape.get(shape_without_memory, 0.0) + weight
    selected: list[WeightedShape] = []
    total = 0.0
    for shape, weight in sorted(weight_by_shape.items(), key=lambda entry: -entry[1]):
        if total >= _TYPICAL_WEIGHT:
            break
        selected.append(WeightedShape(shape, weight))
        total += weight
    return [WeightedShape(entry.shape, entry.weight / total) for entry in selected]
