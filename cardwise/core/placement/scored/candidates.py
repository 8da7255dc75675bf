"""Candidates: where a shape fits, which cards of which nodes it could take, and what the cards are then."""

from typing import NamedTuple

import numpy as np

from cardwise.core.api.mpsprofile import MIXED, NO_USER
from cardwise.core.placement.mpstaints import ANY, FREE
from cardwise.core.placement.scored.cardtable import CardArrays
from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import Shape


class NodeFit(NamedTuple):
    """`usable`: which cards may serve one share of the shape; `fits`: whether the node has room for the whole shape."""

    usable: Bools
    fits: Bools


class Candidates(NamedTuple):
    """Ways of placing a shape on one card: `at`: the line of the node; `card`: the position of the card there."""

    at: Ints
    card: Ints
    before: CardArrays
    after: CardArrays


def fit_shape(lines: NodeArrays, shape: Shape, at: Ints | slice = slice(None)) -> NodeFit:
    """On which of these lines there is room for the shape."""
    ask = shape.ask
    cpu = lines.cpu[at]
    fits = cpu >= ask.cpu if ask.cpu else cpu >= 0  # below 0 is a slot of no node
    if ask.memory:
        fits &= lines.memory[at] >= ask.memory
    if ask.whole:
        usable = lines.empty[at]
    else:
        usable = lines.free[at] >= max(ask.mem, 1)
        if ask.core:
            usable &= lines.core[at] >= ask.core
    if shape.kinds is not None:
        usable = usable & np.isin(lines.kind[at], list(shape.kinds))
    if shape.untolerated:
        usable = usable & ((lines.taints[at] & shape.untolerated) == 0)
    if shape.user != NO_USER:
        here = lines.user[at]
        usable = usable & ((here == ANY) | ((shape.user != MIXED) & ((here == FREE) | (here == shape.user))))
    if ask.cards:
        fits &= usable.any(axis=1) if ask.cards == 1 else usable.sum(axis=1) >= ask.cards
    return NodeFit(usable, fits)


def candidates(lines: NodeArrays, shape: Shape, usable: Bools) -> Candidates:
    """For a shape of one card and lines that all take it: one card of each state."""
    ask = shape.ask
    at, card = np.nonzero(usable & lines.first)
    before = CardArrays(lines.free[at, card], lines.core[at, card], lines.empty[at, card], lines.kind[at, card])
    if ask.whole:
        free = core = np.zeros(len(at))
    else:
        free, core = before.free - ask.mem, before.core - ask.core
    return Candidates(at, card, before, CardArrays(free, core, np.zeros(len(at), np.bool_), before.kind))


def chosen_cards(lines: NodeArrays, shape: Shape, usable: Bools) -> Bools:
    """The fullest usable cards, as many as the shape asks, the lowest index first among equals."""
    keys = np.where(usable, lines.free, np.inf)
    rank = np.argsort(np.argsort(keys, axis=1, kind="stable"), axis=1, kind="stable")
    chosen: Bools = usable & (rank < shape.ask.cards)
    return chosen


def cards_after(lines: NodeArrays, shape: Shape, chosen: Bools) -> CardArrays:
    """All cards of the lines once the shape has taken these."""
    free, core = (0.0, 0.0) if shape.ask.whole else (lines.free - shape.ask.mem, lines.core - shape.ask.core)
    return CardArrays(
        np.where(chosen, free, lines.free), np.where(chosen, core, lines.core), lines.empty & ~chosen, lines.kind
    )


def used_mib(shape: Shape, lines: NodeArrays, chosen: Bools) -> Floats:
    """The MiB that the shape takes of these cards."""
    used_mib: Floats = np.where(chosen, lines.free if shape.ask.whole else float(shape.ask.mem), 0.0).sum(axis=1)
    return used_mib
