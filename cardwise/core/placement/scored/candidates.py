"""Candidates: the nodes where a shape fits, the cards that it could take, and the state of the cards afterwards."""

from typing import NamedTuple

import numpy as np

from cardwise.core.api.mpsprofile import NO_USER
from cardwise.core.placement.mpstaints import ANY, FREE, LAST_EMPTY, NO_MPS
from cardwise.core.placement.scored.cardarrays import CardArrays
from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeArrays
from cardwise.core.placement.scored.shapes import RequestShape


class NodeFit(NamedTuple):
    """Where a shape fits, as arrays.

    usable_cards: by node and card, whether the card may serve one share of the shape.
    fitting_nodes: by node, whether it has capacity for the whole shape.
    """

    usable_cards: Bools
    fitting_nodes: Bools


class Candidates(NamedTuple):
    """The possible placements of a shape on one card, as arrays.

    line: the line of the node.
    card: the position of the card on the node.
    before, after: the state of the card before and after the placement.
    """

    line: Ints
    card: Ints
    before: CardArrays
    after: CardArrays


def fit_shape(nodes: NodeArrays, shape: RequestShape, positions: Ints | slice = slice(None)) -> NodeFit:
    """Where the shape fits on these nodes."""
    request_size = shape.request_size
    cpu = nodes.cpu[positions]
    fits = cpu >= request_size.cpu if request_size.cpu else cpu >= 0  # negative in a slot without a node
    if request_size.memory:
        fits &= nodes.memory[positions] >= request_size.memory
    if request_size.whole:
        usable_cards = nodes.empty[positions]
    else:
        usable_cards = nodes.free[positions] >= max(request_size.mem, 1)
        if request_size.core:
            usable_cards &= nodes.core[positions] >= request_size.core
    if shape.kinds is not None:
        usable_cards = usable_cards & np.isin(nodes.kind[positions], list(shape.kinds))
    if shape.untolerated:
        usable_cards = usable_cards & ((nodes.taints[positions] & shape.untolerated) == 0)
    if shape.user != NO_USER:
        users = nodes.user[positions]
        usable_cards = usable_cards & ((users == ANY) | (users == FREE) | (users == shape.user))
    if shape.avoided & LAST_EMPTY:
        taints = nodes.taints[positions]
        last = (taints & LAST_EMPTY) != 0
        others_with_mps = usable_cards & ~last & ((taints & NO_MPS) == 0)
        usable_cards = usable_cards & ~(last & others_with_mps.any(axis=1, keepdims=True))
    if request_size.cards:
        fits &= usable_cards.any(axis=1) if request_size.cards == 1 else usable_cards.sum(axis=1) >= request_size.cards
    return NodeFit(usable_cards, fits)


def candidates(nodes: NodeArrays, shape: RequestShape, usable_cards: Bools) -> Candidates:
    """The candidates of a shape of one card. Of cards of a node with equal states, only one is a candidate. The shape
    must fit on all nodes.
    """
    request_size = shape.request_size
    line, card = np.nonzero(usable_cards & nodes.first)
    before = CardArrays(nodes.free[line, card], nodes.core[line, card], nodes.empty[line, card], nodes.kind[line, card])
    if request_size.whole:
        free = core = np.zeros(len(line))
    else:
        free, core = before.free - request_size.mem, before.core - request_size.core
    return Candidates(line, card, before, CardArrays(free, core, np.zeros(len(line), np.bool_), before.kind))


def chosen_cards(nodes: NodeArrays, shape: RequestShape, usable_cards: Bools) -> Bools:
    """The cards that the shape takes: the fullest usable ones; of equally full cards the one with the lowest index."""
    keys = np.where(usable_cards, nodes.free, np.inf)
    rank = np.argsort(np.argsort(keys, axis=1, kind="stable"), axis=1, kind="stable")
    chosen: Bools = usable_cards & (rank < shape.request_size.cards)
    return chosen


def cards_after(nodes: NodeArrays, shape: RequestShape, chosen: Bools) -> CardArrays:
    """The cards of all nodes, after the shape has taken the chosen cards of each node."""
    free, core = (
        (0.0, 0.0)
        if shape.request_size.whole
        else (nodes.free - shape.request_size.mem, nodes.core - shape.request_size.core)
    )
    return CardArrays(
        np.where(chosen, free, nodes.free), np.where(chosen, core, nodes.core), nodes.empty & ~chosen, nodes.kind
    )


def used_mib(shape: RequestShape, nodes: NodeArrays, chosen: Bools) -> Floats:
    """The MiB that the shape takes of these cards."""
    used_mib: Floats = np.where(
        chosen, nodes.free if shape.request_size.whole else float(shape.request_size.mem), 0.0
    ).sum(axis=1)
    return used_mib
