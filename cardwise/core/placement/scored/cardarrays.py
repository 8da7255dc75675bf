"""Cards and card requests as arrays: which card may serve which shape, and how many pods of the shape fit on it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import RequestShape

_UNREACHABLE_MIB: Final = 1e18  # MiB; more than any card has
QUOTIENT_EPSILON: Final = (
    1e-9  # added to quotients before they are rounded down, since floats may be slightly too small
)
_CHUNK_NODES: Final = 256  # nodes per chunk, so that intermediate arrays stay in the CPU's cache


class CardArrays(NamedTuple):
    """Some cards, as arrays of equal shape."""

    free: NDArray[np.float64]
    core: NDArray[np.float64]
    empty: NDArray[np.bool_]
    kind: NDArray[np.int64]


class RequestArrays:
    """The card requests of several shapes, as arrays.

    shapes: the shapes; no two of them request the same cards, and each shape requests at least one card.
    """

    def __init__(self, shapes: Sequence[RequestShape]) -> None:
        request_sizes = [shape.request_size for shape in shapes]
        self.cards = np.array([request_size.cards for request_size in request_sizes], np.float64)
        self._mem = np.array([request_size.mem or _UNREACHABLE_MIB for request_size in request_sizes], np.float64)
        self._per_mem = 1.0 / self._mem
        self._core = np.array([request_size.core for request_size in request_sizes], np.float64)
        self._per_core = np.array(
            [1.0 / request_size.core if request_size.core else 0.0 for request_size in request_sizes], np.float64
        )
        self._core_slack = np.array(
            [QUOTIENT_EPSILON if request_size.core else np.inf for request_size in request_sizes], np.float64
        )
        self._whole = np.array([request_size.whole for request_size in request_sizes], np.bool_)
        self._some_core = bool(self._core.any())
        self._some_whole = bool(self._whole.any())
        self._allowed = _allowed(shapes)

    def __len__(self) -> int:
        return len(self.cards)

    def can_serve(self, cards: CardArrays) -> Bools:
        """By card and shape, whether the card may be one of the shape's cards."""
        served = cards.free[..., None] >= self._mem
        if self._some_core:
            served &= cards.core[..., None] >= self._core
        if self._some_whole:
            served |= cards.empty[..., None] & self._whole
        if self._allowed is not None:
            served &= self._allowed[_places(cards.kind, self._allowed)]
        return served

    def count_fitting_pods(self, cards: CardArrays) -> Floats:
        """By card and shape, how many pods of the shape fit on the card."""
        counts = np.floor(cards.free[..., None] * self._per_mem + QUOTIENT_EPSILON)
        if self._some_core:
            np.minimum(counts, np.floor(cards.core[..., None] * self._per_core + self._core_slack), out=counts)
        if self._some_whole:
            counts += cards.empty[..., None] & self._whole
        if self._allowed is not None:
            counts *= self._allowed[_places(cards.kind, self._allowed)]
        return counts


def card_chunks(nodes: NodeArrays) -> list[CardArrays]:
    """The cards of the lines, by line and position, in chunks that fit into the CPU's cache."""
    return [
        CardArrays(nodes.free[rows], nodes.core[rows], nodes.empty[rows], nodes.kind[rows])
        for rows in (slice(start, start + _CHUNK_NODES) for start in range(0, max(len(nodes), 1), _CHUNK_NODES))
    ]


def _allowed(shapes: Sequence[RequestShape]) -> Bools | None:
    """By kind of card and shape, whether the shape may have the kind; None if every shape may have all kinds."""
    kind_sets = [shape.kinds for shape in shapes if shape.kinds is not None]
    if not kind_sets:
        return None
    highest_kind = max(max(kinds, default=0) for kinds in kind_sets)
    allowed = np.zeros((highest_kind + 3, len(shapes)), np.bool_)
    for i, shape in enumerate(shapes):
        if shape.kinds is None:
            allowed[:-1, i] = True
        else:
            allowed[sorted(shape.kinds), i] = True
    return allowed


def _places(kind: Ints, allowed: Bools) -> Ints:
    """The rows of these kinds in the table `allowed`. The last row is for "no card", and the row before it for kinds
    that no shape names.
    """
    last_place = len(allowed) - 1
    return np.where(kind < 0, last_place, np.minimum(kind, last_place - 1))
