"""Candidates: the nodes where a shape fits, the cards that it could take, and the state of the cards afterwards."""

from typing import NamedTuple

import numpy as np

from cardwise.core.api.mpsprofile import MIXED, NO_USER
from cardwise.core.placement.mpstaints import ANY, FREE
from cardwise.core.placement.scored.cardtable import CardArrays
from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import Shape


class NodeFit(NamedTuple):
    """Where a shape fits, as arrays.

    usable_cards: by node and card, whether the card may serve one share of the shape.
    fits: by node, whether it has capacity for the whole shape.
    """

    usable_cards: Bools
    fits: Bools


class Candidates(NamedTuple):
    """The possible placements of a shape on one card, as arrays.

    at: the line of the node.
    card: the position of the card on the node.
    before, after: the state of the card before and after the placement.
    """

    at: Ints
    card: Ints
    before: CardArrays
    after: CardArrays


def fit_shape(lines: NodeArrays, shape: Shape, positions: Ints | slice = slice(None)) -> NodeFit:
    """Where the shape fits on these lines."""
    request_size = shape.request_size
    cpu = lines.cpu[positions]
    fits = cpu >= request_size.cpu if request_size.cpu else cpu >= 0  # negative in a slot without a node
    if request_size.memory:
        fits &= lines.memory[positions] >= request_size.memory
    if request_size.whole:
        usable_cards = lines.empty[positions]
    else:
        usable_cards = lines.free[positions] >= max(request_size.mem, 1)
        if request_size.core:
            usable_cards &= lines.core[positions] >= request_size.core
    if shape.kinds is not None:
        usable_cards = usable_cards & np.isin(lines.kind[positions], list(shape.kinds))
    if shape.untolerated:
        usable_cards = usable_cards & ((lines.taints[positions] & shape.untolerated) == 0)
    if shape.user != NO_USER:
        users = lines.user[positions]
        usable_cards = usable_cards & (
            (users == ANY) | ((shape.user != MIXED) & ((users == FREE) | (users == shape.user)))
        )
    if request_size.cards:
        fits &= usable_cards.any(axis=1) if request_size.cards == 1 else usable_cards.sum(axis=1) >= request_size.cards
    return NodeFit(usable_cards, fits)


def candidates(lines: NodeArrays, shape: Shape, usable_cards: Bools) -> Candidates:
    """The candidates of a shape of one card. Of cards of a node with equal states, only one is a candidate. The shape
    must fit on all lines.
    """
    request_size = shape.request_size
    at, card = np.nonzero(usable_cards & lines.first)
    before = CardArrays(lines.free[at, card], lines.core[at, card], lines.empty[at, card], lines.kind[at, card])
    if request_size.whole:
        free = core = np.zeros(len(at))
    else:
        free, core = before.free - request_size.mem, before.core - request_size.core
    return Candidates(at, card, before, CardArrays(free, core, np.zeros(len(at), np.bool_), before.kind))


def chosen_cards(lines: NodeArrays, shape: Shape, usable_cards: Bools) -> Bools:
    """The cards that the shape takes: the fullest usable ones; of equally full cards the one with the lowest index."""
    keys = np.where(usable_cards, lines.free, np.inf)
    rank = np.argsort(np.argsort(keys, axis=1, kind="stable"), axis=1, kind="stable")
    chosen: Bools = usable_cards & (rank < shape.request_size.cards)
    return chosen


def cards_after(lines: NodeArrays, shape: Shape, chosen: Bools) -> CardArrays:
    """All cards of the lines after the shape has taken the chosen ones."""
    free, core = (
        (0.0, 0.0)
        if shape.request_size.whole
        else (lines.free - shape.request_size.mem, lines.core - shape.request_size.core)
    )
    return CardArrays(
        np.where(chosen, free, lines.free), np.where(chosen, core, lines.core), lines.empty & ~chosen, lines.kind
    )


def used_mib(shape: Shape, lines: NodeArrays, chosen: Bools) -> Floats:
    """The MiB that the shape takes of these cards."""
    used_mib: Floats = np.where(
        chosen, lines.free if shape.request_size.whole else float(shape.request_size.mem), 0.0
    ).sum(axis=1)
    return used_mib
