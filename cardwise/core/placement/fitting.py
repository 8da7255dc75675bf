"""Finds cards of one node for one card request. Determines the usable cards, and lets the policy choose.

`searching` finds cards for all card requests of a pod; `placement` compares thousands of nodes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from cardwise.core.api import quotas
from cardwise.core.api.assignment import CardShare
from cardwise.core.api.cards import FULL_CORE, POSITION_BITS, POSITION_MASK, card_code
from cardwise.core.api.mpsprofile import NO_USER
from cardwise.core.api.policies import Pick, PickCard
from cardwise.core.api.quotas import Charge, Headroom
from cardwise.core.api.request import ContainerRequest, PodRequest
from cardwise.core.api.sharing import ANY_TENANT, Tenant
from cardwise.core.placement.cardtenants import refusal_for
from cardwise.core.placement.kinds import ANY_CARD, CardKinds, KindLevel
from cardwise.core.placement.mpstaints import DEMANDS, FOR_GOOD, LAST_EMPTY, avoided_by, untolerated_by
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.quantity import MiB, Percent
from cardwise.core.values.refusals import Refusal

_CLOSING_WEIGHT: Final = 1 << 40  # what closing a card to MPS subtracts from a score: more than the MiB of any card
_LEVEL_WEIGHT: Final = 1 << 50  # what each further level subtracts from a score: more than closing all cards of a node
_ABOVE_ANY_CARD_MIB: Final = 1 << 40  # MiB; larger than any card


class CardRequest(NamedTuple):
    """A request for one card, or for several different cards of one class.

    keys: the keys of the containers that get these cards.
    cards: the number of different cards.
    mem, core: MiB and percent of the SMs on each card.
    whole: whether whole cards are requested; then `mem` is 0.
    resource_class: the requested class; "" for any card.
    untolerated: the MPS taints that close a card to the request, see `mpstaints`.
    user: the user as which the pod uses MPS, see `mpsprofile`.
    avoided: the MPS taints of cards that the request takes only where it must, see `mpstaints`.
    tenant: the pod as a tenant of its cards, see `cardtenants`.
    """

    keys: tuple[str, ...]
    cards: int
    mem: int
    core: int
    whole: bool
    resource_class: str = ""
    untolerated: int = 0
    user: int = NO_USER
    avoided: int = 0
    tenant: Tenant = ANY_TENANT

    def charge(self, cards: int, size: int) -> Charge:
        """The charge of this number of cards to a quota.

        size: MiB of each card; matters only for whole cards.
        """
        if self.whole:
            return Charge(cards, cards * size, cards)
        return Charge(cards * len(self.keys), cards * self.mem, 0)


class TypedRequest(NamedTuple):
    """A card request, and the kinds of cards that it may use.

    levels: the kinds that no quota closes, by level, in the order in which they are tried.
    typed: all kinds of the requested class; None for any kind.
    """

    card_request: CardRequest
    levels: tuple[KindLevel, ...]
    typed: frozenset[int] | None


class QuotaHeadroom(NamedTuple):
    """The remaining amounts of a quota entry, and the kinds of cards that the entry counts."""

    entry_headroom: Headroom
    kinds: frozenset[int]


class SearchPlan(NamedTuple):
    """The input of a search for cards.

    typed_requests: the pod's card requests, with the kinds of cards that each may have.
    headroom: the remaining amounts of the quota entries that this request could exceed.

    unlimited: the card requests without the limits of quotas, to find the reason of a refusal; None if no quota
        matters.
    """

    typed_requests: tuple[TypedRequest, ...]
    headroom: Sequence[QuotaHeadroom]
    unlimited: tuple[TypedRequest, ...] | None


def card_requests(request: PodRequest) -> list[CardRequest]:
    """The card requests of a pod, the hardest to place first. All containers that request a share of one card of the
    same class form one card request: they share one card.

    Card requests that name a class come before those that may use any card.
    """
    requests = []
    user = request.mps_client.user
    single_card = untolerated_by(request.isolation, user=user, several_cards=False)
    containers_by_class: dict[str, list[ContainerRequest]] = {}
    for c in request.containers:
        if c.whole or c.cards > 1:
            untolerated = untolerated_by(
                request.isolation,
                user=user,
                several_cards=c.cards > 1,
                whole=c.whole,
                whole_only=request.has_whole_cards_only,
            )
            mem, core = c.mem_per_card, c.core_per_card
            avoided = 0 if c.whole else avoided_by(request.isolation, several_cards=True)
            requests.append(
                CardRequest(
                    (c.key,), c.cards, mem, core, c.whole, c.resource_class, untolerated, user, avoided, request.tenant
                )
            )
        else:
            containers_by_class.setdefault(c.resource_class, []).append(c)
    for resource_class, of_class in containers_by_class.items():
        keys = tuple(c.key for c in of_class)
        sum_mem, sum_core = sum(c.mem for c in of_class), sum(c.core for c in of_class)
        requests.append(
            CardRequest(
                keys,
                1,
                sum_mem,
                sum_core,
                whole=False,
                resource_class=resource_class,
                untolerated=single_card,
                user=user,
                avoided=avoided_by(request.isolation, several_cards=False),
                tenant=request.tenant,
            )
        )
    return sorted(
        requests,
        key=lambda card_request: (
            not card_request.resource_class,
            not card_request.whole,
            -card_request.mem,
            -card_request.cards,
        ),
    )


def has_several_card_requests(request: PodRequest) -> bool:
    """Whether the pod has several card requests. Then each node must be searched for cards for all of them."""
    return len(card_requests(request)) > 1


def make_share(node: NodeState, i: int, amounts: tuple[MiB, Percent] | None) -> CardShare:
    """A share of the card at position `i`.

    amounts: MiB and percent of the SMs; None for the whole card.
    """
    card = node.cards[i]
    mem, core = amounts if amounts is not None else (MiB(node.free[i]), FULL_CORE)
    return CardShare(card.index, card.uuid, mem, core, card.mem, whole=amounts is None)


# The kinds of cards that a request may use.


def make_search_plan(
    card_requests: Sequence[CardRequest], kinds: CardKinds, headroom: Sequence[Headroom]
) -> SearchPlan:
    """The input of a search. Kinds of cards that a quota closes in any case are left out of the search."""
    unlimited = tuple(
        [TypedRequest(c, kinds.levels(c.resource_class), kinds.allowed(c.resource_class)) for c in card_requests]
    )
    if not headroom:
        return SearchPlan(unlimited, (), None)
    largest_charge = quotas.sum_charges(
        card_request.charge(card_request.cards, _ABOVE_ANY_CARD_MIB) for card_request in card_requests
    )
    tight = [entry_headroom for entry_headroom in headroom if not entry_headroom.has_room_for(largest_charge)]
    if not tight:
        return SearchPlan(unlimited, (), None)
    typed_requests = []
    covered_entries = set()
    for card_request, _, typed in unlimited:
        full_entries = {
            i
            for i, entry_headroom in enumerate(tight)
            if not entry_headroom.has_room_for(_min_charge(card_request, kinds, entry_headroom.entry))
        }
        covered_entries |= set(range(len(tight))) - full_entries
        typed_requests.append(
            TypedRequest(
                card_request,
                kinds.levels(card_request.resource_class, [tight[i].entry for i in sorted(full_entries)]),
                typed,
            )
        )
    limits = tuple([QuotaHeadroom(tight[i], kinds.covered_kinds(tight[i].entry)) for i in sorted(covered_entries)])
    return SearchPlan(tuple(typed_requests), limits, unlimited)


def _min_charge(card_request: CardRequest, kinds: CardKinds, entry: quotas.QuotaEntry) -> Charge:
    """A lower bound of the charge to the entry, if the card request takes at least one card that the entry covers: the
    charge for one card, or for all cards if only cards that the entry covers are allowed.
    """
    cards = card_request.cards if kinds.is_class_covered(card_request.resource_class, entry) else 1
    return card_request.charge(cards, 1)


def min_charge_of_share(request: PodRequest, kinds: CardKinds, entry: quotas.QuotaEntry) -> Charge:
    """A lower bound of the request's charge to a quota entry, whichever cards the pod gets."""
    return min_charges(request, kinds, [entry])[0]


def min_charges(request: PodRequest, kinds: CardKinds, entries: Iterable[quotas.QuotaEntry]) -> list[Charge]:
    """For each entry, a lower bound of the request's charge, as `min_charge_of_share`."""
    requests = card_requests(request)
    return [
        quotas.sum_charges(
            _min_charge(card_request, kinds, entry)
            for card_request in requests
            if kinds.is_class_covered(card_request.resource_class, entry)
        )
        for entry in entries
    ]


def _charge(node: NodeState, i: int, card_request: CardRequest) -> Charge:
    """The charge if the card request takes this card: the sum of `quotas.charge_of_use` of the shares."""
    return card_request.charge(1, node.usable[i])


def headroom_after(
    headroom: Sequence[QuotaHeadroom], node: NodeState, i: int, card_request: CardRequest
) -> list[QuotaHeadroom] | None:
    """The headroom after the card request has taken this card; None if a quota does not allow it."""
    charge, kind = _charge(node, i, card_request), node.kinds[i]
    new_headroom = list(headroom)
    for position, (entry_headroom, kinds) in enumerate(headroom):
        if kind in kinds:
            if not entry_headroom.has_room_for(charge):
                return None
            new_headroom[position] = QuotaHeadroom(entry_headroom.subtract(charge), kinds)
    return new_headroom


# The choice of cards for one card request.


# The score and positions of the cards for one card request, and the remaining headroom.
ChosenCards = tuple[int, list[int], Sequence[QuotaHeadroom]]


def choose_cards(
    node: NodeState,
    typed_request: TypedRequest,
    headroom: Sequence[QuotaHeadroom],
    pick_card: PickCard,
    may_try: Callable[[], bool],
) -> ChosenCards | None:
    """The policy's choice of cards for one card request; None if too few cards are allowed and free.

    may_try: see `iterate_choices`; called only if quotas matter.
    """
    codes = usable_codes(node, typed_request.card_request)
    if headroom:
        return next(
            iterate_choices(
                node, codes, typed_request, headroom, pick_card, equivalence_key=_kind_and_size, may_try=may_try
            ),
            None,
        )
    return _choose_freely(node, codes, typed_request, pick_card)


def _choose_freely(
    node: NodeState, codes: Sequence[int], typed_request: TypedRequest, pick_card: PickCard
) -> ChosenCards | None:
    """The policy's choice of cards for one card request, one card after another, without quotas."""
    card_request, levels, _ = typed_request
    if len(codes) < card_request.cards:
        return None
    score = 0
    chosen: list[int] = []
    remaining_codes, min_code = list(codes) if card_request.cards > 1 else codes, card_code(card_request.mem)
    for _ in range(card_request.cards):
        pick = (
            pick_card(remaining_codes, min_code)
            if levels is ANY_CARD and not card_request.avoided & node.mps.tainted
            else choose_card(node, remaining_codes, typed_request, pick_card)
        )
        if pick is None:
            return None
        score += pick[0]
        chosen.append(pick[1])
        if isinstance(remaining_codes, list):
            del remaining_codes[bisect_left(remaining_codes, card_code(node.free[pick[1]], pick[1]))]
    return score, chosen, ()


def iterate_choices(
    node: NodeState,
    codes: Sequence[int],
    typed_request: TypedRequest,
    headroom: Sequence[QuotaHeadroom],
    pick_card: PickCard,
    *,
    equivalence_key: Callable[[NodeState, int], object],
    may_try: Callable[[], bool],
    chosen_before: tuple[int, ...] = (),
) -> Iterator[ChosenCards]:
    """Yield the choices of cards for one card request that quotas allow, in the policy's order of preference.

    equivalence_key: cards with equal keys are interchangeable; only one of them is tried.

    may_try: called before each card is tried; the search ends when it returns False. Without this limit the number of
        choices is exponential in the number of cards with different keys.
    """
    missing_cards = typed_request.card_request.cards - len(chosen_before)
    while len(codes) >= missing_cards:
        pick = choose_card(node, codes, typed_request, pick_card)
        if pick is None or not may_try():
            return
        score, i = pick
        new_headroom = headroom_after(headroom, node, i, typed_request.card_request)
        if new_headroom is not None and missing_cards == 1:
            yield score, [*chosen_before, i], new_headroom
        elif new_headroom is not None:
            other_codes = [code for code in codes if code & POSITION_MASK != i]
            later_choices = iterate_choices(
                node,
                other_codes,
                typed_request,
                new_headroom,
                pick_card,
                equivalence_key=equivalence_key,
                may_try=may_try,
                chosen_before=(*chosen_before, i),
            )
            for points, chosen, last_headroom in later_choices:
                yield score + points, chosen, last_headroom
        card_key = equivalence_key(node, i)
        codes = [code for code in codes if equivalence_key(node, code & POSITION_MASK) != card_key]


def _kind_and_size(node: NodeState, i: int) -> tuple[int, MiB]:
    """A key that is equal for cards that count the same in every quota."""
    return node.kinds[i], node.cards[i].mem


def choose_card(node: NodeState, codes: Sequence[int], typed_request: TypedRequest, pick_card: PickCard) -> Pick | None:
    """The policy's choice of a card from the first level with a suitable card; None if no level has one."""
    for rank, kinds in typed_request.levels:
        allowed_codes = codes
        if kinds is not None and not kinds >= node.kind_set:
            card_kinds = node.kinds
            allowed_codes = [code for code in codes if card_kinds[code & POSITION_MASK] in kinds]
        pick = _pick(node, allowed_codes, typed_request.card_request, pick_card) if allowed_codes else None
        if pick is not None:
            return pick[0] - rank * _LEVEL_WEIGHT, pick[1]
    return None


def _pick(node: NodeState, codes: Sequence[int], card_request: CardRequest, pick_card: PickCard) -> Pick | None:
    """The policy's choice of these cards, among those first that the card request does not avoid.

    A share without MPS avoids cards that it would close, on all nodes: such cards have lower scores. A share with MPS
    avoids the last empty card of a node while another card of this node with MPS has capacity.
    """
    min_code, avoided = card_code(card_request.mem), card_request.avoided & node.mps.tainted
    if not avoided:
        return pick_card(codes, min_code)
    taints = node.mps.taints
    preferred = [code for code in codes if not taints[code & POSITION_MASK] & avoided]
    if avoided & LAST_EMPTY:
        return pick_card(preferred if _has_mps_capacity(node, preferred, min_code) else codes, min_code)
    pick = pick_card(preferred, min_code) if preferred else None
    if pick is not None:
        return pick
    pick = pick_card(codes, min_code)
    return (pick[0] - _CLOSING_WEIGHT, pick[1]) if pick is not None else None


def _has_mps_capacity(node: NodeState, codes: Iterable[int], min_code: int) -> bool:
    """Whether a card with MPS among these cards has enough free memory."""
    return any(code >= min_code and node.mps.statuses[code & POSITION_MASK] is not None for code in codes)


def is_avoided(
    node: NodeState, i: int, card_request: CardRequest, kinds: frozenset[int] | None, headroom: Sequence[QuotaHeadroom]
) -> bool:
    """Whether the card request avoids the card, which is the last empty card of its node, for the sake of pods without
    MPS.

    kinds: the kinds of cards that the card request may use; None for all.
    """
    if not card_request.avoided & node.mps.taints[i] & LAST_EMPTY:
        return False
    others = (
        code
        for code in usable_codes(node, card_request)
        if code & POSITION_MASK != i
        and (kinds is None or node.kinds[code & POSITION_MASK] in kinds)
        and (not headroom or headroom_after(headroom, node, code & POSITION_MASK, card_request) is not None)
    )
    return _has_mps_capacity(node, others, card_code(card_request.mem))


def usable_codes(node: NodeState, card_request: CardRequest) -> Sequence[int]:
    """The codes of the cards that are open to the card request, in ascending order. Memory and kind are not checked."""
    codes = node.codes_of_empty_cards() if card_request.whole else node.codes_fullest_first()
    if may_be_closed_to(node, card_request):
        codes = [code for code in codes if admits(node, code & POSITION_MASK, card_request)]
    if card_request.whole:
        return codes
    if card_request.core or len(card_request.keys) > 1:
        return [code for code in codes if has_capacity(node, code & POSITION_MASK, card_request)]
    return codes


def has_capacity(node: NodeState, i: int, card_request: CardRequest) -> bool:
    """Whether an open card has what the card request needs besides memory: SMs, and one MPS client per container."""
    cores = not card_request.core or node.free_core[i] >= card_request.core  # negative if the setting was lowered
    return cores and node.clients[i] + len(card_request.keys) <= node.max_card_clients[i]


def admits(node: NodeState, i: int, card_request: CardRequest) -> bool:
    """Whether MPS and the tenants of this card allow the pod of the card request there."""
    return is_admitted_by_mps(node, i, card_request) and node.tenants.admits(i, card_request.tenant)


def is_admitted_by_mps(node: NodeState, i: int, card_request: CardRequest) -> bool:
    """Whether MPS allows the pod of the card request on this card."""
    return node.mps.admits(i, card_request.untolerated, card_request.user)


def may_be_closed_to(node: NodeState, card_request: CardRequest) -> bool:
    """Whether MPS or the tenants of any card may keep the card request from the card."""
    return node.tenants.may_be_closed_to(card_request.tenant) or node.mps.may_be_closed_to(
        card_request.untolerated, card_request.user
    )


def is_refused_for_memory_first(card_request: CardRequest) -> bool:
    """Whether a node where no card has enough memory is always refused for that reason, whatever else is true of it."""
    return (
        card_request.cards == 1
        and len(card_request.keys) == 1
        and not card_request.whole
        and not card_request.core
        and not card_request.untolerated & FOR_GOOD
    )


def refusal_of_node(node: NodeState, card_request: CardRequest, typed: frozenset[int] | None = None) -> Refusal:
    """Why the node has no card for the card request: the most permanent reason."""
    if not node.cards:
        return Refusal.NOT_OURS
    allowed_codes: Sequence[int] | None = None  # all
    if typed is not None and not typed >= node.kind_set:
        allowed_codes = [i for i, kind in enumerate(node.kinds) if kind in typed]
        if not allowed_codes:
            return Refusal.NO_SUCH_TYPE
    elif is_refused_for_memory_first(card_request):
        # The common cases of a full cluster; `MemoryIndex` decides the same for thousands of nodes at once.
        if node.largest < card_request.mem:
            return Refusal.CARD_TOO_SMALL
        # A fast path for nodes whose cards are all open: it reads one packed array. The lists of integers of thousands
        # of nodes do not fit into the CPU cache.
        codes = node.codes
        most_free = codes[-1] >> POSITION_BITS if codes and len(codes) == len(node.free) else max(node.free)
        if most_free < card_request.mem:
            return Refusal.NO_MEMORY
    kind_set = range(len(node.cards)) if allowed_codes is None else allowed_codes
    if card_request.untolerated & FOR_GOOD and node.mps.may_be_closed_to(card_request.untolerated, card_request.user):
        never = [i for i in kind_set if node.mps.taints[i] & card_request.untolerated & FOR_GOOD]
        if len(kind_set) == len(never):
            return node.mps.refusal(never, card_request.untolerated, card_request.user)
    if card_request.cards > 1 and len(kind_set) < card_request.cards:
        return Refusal.TOO_FEW_CARDS
    if card_request.whole:
        open_card_count = (
            node.open_card_count if allowed_codes is None else sum(node.cards[i].accepts_shares for i in allowed_codes)
        )
        if open_card_count < card_request.cards:
            return _withheld_reason(node, card_request, kind_set)
        if not node.mps.may_be_closed_to(card_request.untolerated, card_request.user):
            return Refusal.NO_WHOLE_CARD  # not checked for each card: this runs for thousands of nodes
        empty = [i for i in kind_set if node.is_empty(i)]
        return _closed_reason(node, card_request, empty) or Refusal.NO_WHOLE_CARD
    big = [i for i in kind_set if node.usable[i] >= card_request.mem]
    if len(big) < card_request.cards:
        return Refusal.CARD_TOO_SMALL
    if len(card_request.keys) > 1:
        big = [i for i in big if node.max_card_clients[i] >= len(card_request.keys)]
        if len(big) < card_request.cards:
            return Refusal.TOO_MANY_CONTAINERS
    fitting_positions = [i for i in big if node.free[i] >= card_request.mem]
    if len(fitting_positions) < card_request.cards:
        return Refusal.NO_MEMORY
    taking = [i for i in fitting_positions if node.cards[i].accepts_shares]
    if len(taking) < card_request.cards:
        return _withheld_reason(node, card_request, fitting_positions)
    closing_refusal = _closed_reason(node, card_request, taking)
    if closing_refusal is not None:
        return closing_refusal
    admitting = [i for i in taking if admits(node, i, card_request)]
    if sum(node.is_open(i, len(card_request.keys)) for i in admitting) < card_request.cards:
        return Refusal.TOO_MANY_CLIENTS
    return Refusal.NO_CORE


def _withheld_reason(node: NodeState, card_request: CardRequest, kind_set: Sequence[int]) -> Refusal:
    """Why too few of these cards accept new shares: `CORDONED` if uncordoning would suffice, else `UNHEALTHY`."""
    healthy = sum(node.cards[i].healthy for i in kind_set)
    return Refusal.UNHEALTHY if healthy < card_request.cards else Refusal.CORDONED


def _closed_reason(node: NodeState, card_request: CardRequest, kind_set: Sequence[int]) -> Refusal | None:
    """Why MPS or the tenants close too many of these cards; None if enough stay open, or if there are too few cards
    anyway.
    """
    if len(kind_set) < card_request.cards or not may_be_closed_to(node, card_request):
        return None
    if sum(admits(node, i, card_request) for i in kind_set) >= card_request.cards:
        return None
    if sum(is_admitted_by_mps(node, i, card_request) for i in kind_set) >= card_request.cards:
        return refusal_for(card_request.tenant)
    return node.mps.refusal(kind_set, card_request.untolerated, card_request.user)


class CardClosed(StrEnum):
    """Why a card may serve none of a pod's card requests."""

    TYPE = "type"  # the card is not in the class
    TIER = "tier"  # the card's memory tier is less than the pod demands
    MPS = "mps"
    TENANT = "tenant"  # a pod of another namespace holds the card, and one of the two shares within its namespace only
    QUOTA = "quota"


def servable_requests(
    kinds: CardKinds, node: NodeState, i: int, request: PodRequest, headroom: Sequence[Headroom] = ()
) -> list[CardRequest] | CardClosed:
    """The card requests that the card may serve, regardless of its free amounts, or why there are none."""
    kind = node.kinds[i]
    typed_requests = [
        (card_request, kinds.allowed(card_request.resource_class)) for card_request in card_requests(request)
    ]
    of_type = [card_request for card_request, typed in typed_requests if typed is None or kind in typed]
    open_to = [card_request for card_request in of_type if admits(node, i, card_request)]
    limits = [QuotaHeadroom(entry_headroom, kinds.covered_kinds(entry_headroom.entry)) for entry_headroom in headroom]
    may = [card_request for card_request in open_to if headroom_after(limits, node, i, card_request) is not None]
    if may:
        return may
    if open_to or not of_type:
        return CardClosed.QUOTA if open_to else CardClosed.TYPE
    if any(is_admitted_by_mps(node, i, card_request) for card_request in of_type):
        return CardClosed.TENANT
    is_tier_too_low = all(node.mps.taints[i] & card_request.untolerated & DEMANDS for card_request in of_type)
    return CardClosed.TIER if is_tier_too_low else CardClosed.MPS
