"""Searches one node for cards for all card requests of a pod.

Theory of operation. The card requests are placed in order, the hardest first (`fitting.card_requests`). Each gets the
policy's first choice of the cards that the earlier ones leave. If a card request then gets no cards, although each
would fit alone, the search backtracks: depth first, it tries all choices of the earlier card requests, in the policy's
order of preference. Each card that it tries is a step of `SearchEffort`, which limits the steps on one node and on all
nodes. So a node may be refused although a choice exists.

Example: with `binpack`, a pod requests 5 GiB of one card and 4 GiB of each of two cards. Card 0 has 9 GiB free, and
card 1 has 8 GiB. The first choice for 5 GiB is the fuller card 1, which then has 3 GiB free: too little. The search
backtracks: with the 5 GiB on card 0, the cards have 4 and 8 GiB free. The pod gets 9 GiB of card 0 and 4 GiB of card 1,
after 2 steps.
"""

from collections.abc import Callable, Sequence
from typing import Final

from cardwise.core.api.assignment import CardUse
from cardwise.core.api.cards import POSITION_BITS
from cardwise.core.api.policies import PickCard
from cardwise.core.placement.fitting import (
    CardRequest,
    ChosenCards,
    QuotaHeadroom,
    SearchPlan,
    TypedRequest,
    choose_cards,
    iterate_choices,
    make_share,
    refusal_of_node,
    usable_codes,
)
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.quantity import MiB, Percent
from cardwise.core.values.refusals import Refusal

_MAX_TRIED_CARDS: Final = (
    256  # cards that are tried for a pod on one node; with more, the pod counts as not fitting there
)
_MAX_STEPS: Final = 4096  # cards that are tried for a pod on all nodes together; docs/measured.md has the time
_EMPTY_NODE_EFFORT: Final = 8  # steps that count for a search of the node without its pods
_FREE_TRIES: Final = (
    8  # cards that a card request may try without steps, in addition to the number of cards it requests
)

# The checks of cards that count for the search of one node. With 8 cards it takes about as long.
NODE_CHECKS: Final = 8

_Choice = tuple[int, list[list[int]]]  # the score, and the card positions for each card request


class SearchTooLong(Exception):
    """The search for a pod is incomplete, although it has checked as many cards as the `CheckLimit` allows."""


class CheckLimit:
    """The number of cards and nodes that the searches for one pod may check. Other calls wait for the lock meanwhile.

    Cards that the index offers first, and nodes that the memory index refuses, are not counted.
    """

    def __init__(self, checks: int) -> None:
        self._remaining = checks

    def count(self, checks: int = 1) -> None:
        """Count checks of cards before they are made. Raises SearchTooLong if no more are allowed."""
        self._remaining -= checks
        if self._remaining < 0:
            raise SearchTooLong


class SearchEffort:
    """The remaining number of cards that a request may try on all nodes, beyond the policy's first choices.

    reasons: whether to find the exact reason of a refusal, which takes longer than to find that the pod does not fit.
    """

    def __init__(self, steps: int | None = None, *, reasons: bool = True) -> None:
        self.remaining = _MAX_STEPS if steps is None else steps
        self.reasons = reasons

    def limit_tries(self, free: int = 0) -> Callable[[], bool]:
        """Limit one search on one node. Returns a function that the search calls before it tries a card. The function
        returns False once the search has taken `_MAX_TRIED_CARDS` steps or the effort is spent.

        free: the number of tries, at the start, that do not count as steps.
        """
        min_remaining = max(0, self.remaining - _MAX_TRIED_CARDS)

        def may_try() -> bool:
            nonlocal free
            if free > 0:
                free -= 1
                return True
            if self.remaining <= min_remaining:
                return False
            self.remaining -= 1
            return True

        return may_try


def fit_request(node: NodeState, plan: SearchPlan, pick_card: PickCard, effort: SearchEffort) -> _Choice | Refusal:
    """The score, and the card positions for each card request; or the refusal."""
    outcome = _search(node, plan.typed_requests, plan.headroom, pick_card, effort)
    if outcome is not None and not isinstance(outcome, TypedRequest):
        return outcome
    return refusal_reason(node, plan, outcome, pick_card, effort) if effort.reasons else Refusal.TOGETHER


def refusal_reason(
    node: NodeState, plan: SearchPlan, failed: TypedRequest | None, pick_card: PickCard, effort: SearchEffort
) -> Refusal:
    """Why the node cannot take the pod.

    failed: the card request that gets no card even alone; None if each request fits alone, but not all together.
    """
    typed_requests = plan.typed_requests if plan.unlimited is None else plan.unlimited
    if plan.unlimited is not None:
        outcome = _search(node, typed_requests, (), pick_card, effort)
        if outcome is not None and not isinstance(outcome, TypedRequest):
            return Refusal.QUOTA
        failed = outcome
    if failed is not None:
        return refusal_of_node(node, failed.card_request, failed.typed)
    if effort.remaining <= 0:
        return Refusal.TOGETHER
    effort.remaining -= _EMPTY_NODE_EFFORT
    ever = _search(node.copy_without_pods(), typed_requests, (), pick_card, effort)
    return Refusal.NEVER_TOGETHER if ever is None or isinstance(ever, TypedRequest) else Refusal.TOGETHER


def _search(
    node: NodeState,
    typed_requests: Sequence[TypedRequest],
    headroom: Sequence[QuotaHeadroom],
    pick_card: PickCard,
    effort: SearchEffort,
) -> _Choice | TypedRequest | None:
    """The choice of cards for all card requests. If there is none: the card request that gets no cards even alone, or
    None if each would fit alone.

    Each card request gets the policy's choice of the cards that earlier card requests leave. If a card request then
    gets no cards, although each would fit alone, other choices are tried until the effort is spent.
    """
    scratch, new_headroom = node, headroom
    score = 0
    positions: list[list[int]] = []
    for typed_request in typed_requests:
        if positions:
            if len(positions) == 1 and _lacks_memory(node, typed_requests):
                return _unplaceable_request(node, typed_requests, headroom, pick_card, effort)
            scratch = node_after(scratch, typed_requests[len(positions) - 1].card_request, positions[-1])
        choice = _choose_first(scratch, typed_request, new_headroom, pick_card, effort)
        if choice is None:
            unplaceable_request = (
                typed_request
                if not positions
                else _unplaceable_request(node, typed_requests, headroom, pick_card, effort)
            )
            if unplaceable_request is not None or _lacks_cards(
                node, [request.card_request for request in typed_requests]
            ):
                return unplaceable_request
            return _Backtracking(typed_requests, pick_card, effort).search(node, headroom)
        points, chosen, new_headroom = choice
        score += points
        positions.append(sorted(chosen))
    return score, positions


def _choose_first(
    node: NodeState,
    typed_request: TypedRequest,
    headroom: Sequence[QuotaHeadroom],
    pick_card: PickCard,
    effort: SearchEffort,
) -> ChosenCards | None:
    """The policy's choice of cards for one card request; None if too few cards are allowed and free, or if all choices
    that were tried exceed quotas.

    The effort is limited, because with quotas a node that reports a different size for each card has thousands of
    choices. Other nodes have few.
    """
    return choose_cards(
        node, typed_request, headroom, pick_card, effort.limit_tries(typed_request.card_request.cards + _FREE_TRIES)
    )


def _unplaceable_request(
    node: NodeState,
    typed_requests: Sequence[TypedRequest],
    headroom: Sequence[QuotaHeadroom],
    pick_card: PickCard,
    effort: SearchEffort,
) -> TypedRequest | None:
    """The first card request that gets no cards even if it is alone; None if there is none."""
    return next(
        (
            typed_request
            for typed_request in typed_requests
            if _choose_first(node, typed_request, headroom, pick_card, effort) is None
        ),
        None,
    )


def _lacks_memory(node: NodeState, typed_requests: Sequence[TypedRequest]) -> bool:
    """Whether the cards have too little memory for all card requests, however they are placed. Takes a tenth of the
    time of a search.
    """
    shares = [
        (typed_request.card_request.mem, typed_request.card_request.cards)
        for typed_request in typed_requests
        if not typed_request.card_request.whole
    ]
    free = [room for code in node.codes_fullest_first() if (room := code >> POSITION_BITS) > 0]
    if sum(free) < sum(mem * cards for mem, cards in shares):
        return True
    for min_mem, _ in shares:
        # An upper bound of the shares of at least this size that fit on a card.
        places = sum(cards for mem, cards in shares if mem >= min_mem)
        if min_mem and sum(room // min_mem for room in free) < places:
            return True
    return False


def _lacks_cards(node: NodeState, card_requests: Sequence[CardRequest]) -> bool:
    """A quick check: whether the card requests that cannot share a card need more cards than are free."""
    most_free = max(node.free)
    unshared_requests = [
        card_request for card_request in card_requests if card_request.whole or 2 * card_request.mem > most_free
    ]
    min_mem = min((card_request.mem for card_request in unshared_requests), default=0)
    return sum(card_request.cards for card_request in unshared_requests) > sum(free >= min_mem for free in node.free)


def node_after(node: NodeState, card_request: CardRequest, positions: Sequence[int]) -> NodeState:
    """A copy of the node after the card request has taken these cards."""
    node_copy = node.copy()
    amounts = None if card_request.whole else (MiB(card_request.mem), Percent(card_request.core))
    for i in positions:
        card_share = make_share(node_copy, i, amounts)
        shares = len(card_request.keys)
        node_copy.apply_card_use(CardUse(card_share.index, card_share.uuid, card_share.mem, card_share.core, shares), 1)
    return node_copy


class _Backtracking:
    """Tries all choices of cards for the card requests, in the policy's order of preference."""

    def __init__(self, typed_requests: Sequence[TypedRequest], pick_card: PickCard, effort: SearchEffort) -> None:
        self._typed_requests = typed_requests
        self._pick_card = pick_card
        self._may_try = effort.limit_tries()

    def search(self, node: NodeState, headroom: Sequence[QuotaHeadroom], request_index: int = 0) -> _Choice | None:
        """The first choice that gives cards to all card requests from `request_index` on; None if there is none."""
        typed_request = self._typed_requests[request_index]
        if request_index + 1 == len(self._typed_requests):
            choice = choose_cards(node, typed_request, headroom, self._pick_card, self._may_try)
            return (choice[0], [sorted(choice[1])]) if choice is not None else None
        codes = usable_codes(node, typed_request.card_request)
        card_choices = iterate_choices(
            node, codes, typed_request, headroom, self._pick_card, equivalence_key=_state, may_try=self._may_try
        )
        for score, chosen, new_headroom in card_choices:
            later_choice = self.search(
                node_after(node, typed_request.card_request, chosen), new_headroom, request_index + 1
            )
            if later_choice is not None:
                return score + later_choice[0], [sorted(chosen), *later_choice[1]]
        return None


def _state(node: NodeState, i: int) -> tuple[object, ...]:
    """All properties of a card that matter to a card request; cards with equal properties are interchangeable."""
    counts = node.free[i], node.free_core[i], node.clients[i], node.max_card_clients[i]
    return *counts, node.kinds[i], node.cards[i].mem, node.mps.taints[i], node.mps.users[i], node.tenants.state(i)
