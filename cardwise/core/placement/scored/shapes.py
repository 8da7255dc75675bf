"""Shapes: the request of a pod as plain numbers. Scores are cached by shape, and the workload is counted by request
size.

A pod with more than one card request (`fitting.CardRequest`), or with devices, has no request size, and is placed node
by node.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cardwise.core.api.mpsprofile import NO_USER
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.fitting import CardRequest


class RequestSize(NamedTuple):
    """The size of a pod's request.

    cards: the number of different cards.
    mem, core: MiB and percent of the SMs on each card; a `mem` of 0 means a whole card.
    resource_class: the requested class; "" for any card.
    cpu, memory: the node's cpu and memory, in millicores and bytes.
    """

    cards: int
    mem: int
    core: int
    resource_class: str
    cpu: int
    memory: int

    @property
    def whole(self) -> bool:
        return self.cards > 0 and not self.mem


class RequestShape(NamedTuple):
    """A request size, and the cards that the request may use.

    kinds: the allowed kinds of cards; None for all.
    untolerated, user, avoided: the MPS fields of its `CardRequest`.
    """

    request_size: RequestSize
    kinds: frozenset[int] | None = None
    untolerated: int = 0
    user: int = NO_USER
    avoided: int = 0


def make_request_size(request: PodRequest, card_requests: Sequence[CardRequest], load: Load) -> RequestSize | None:
    """The size of the request; None if it has devices or several card requests."""
    if request.devices or len(card_requests) > 1:
        return None
    if not card_requests:
        return RequestSize(0, 0, 0, "", load.cpu, load.memory)
    card_request = card_requests[0]
    mem = 0 if card_request.whole else card_request.mem
    return RequestSize(card_request.cards, mem, card_request.core, card_request.resource_class, load.cpu, load.memory)
