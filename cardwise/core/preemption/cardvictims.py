"""Victims by card: chooses the cards of a full node to clear for a request, and so the pods to evict.

Theory of operation. First, `setcover` computes the minimum cost of clearing each card alone. Then choices of cards are
tried depth first, the cheapest cards first. The cards of a choice are a set of needs, and `setcover` finds the cheapest
set of pods that meets all of them. A choice is skipped if it costs at least as much as the best set so far. It is also
skipped if it leaves too few cards for a later card request. `preemption` decides which pods may be evicted and which
amounts besides cards are missing.

Each card that is tried costs effort, because the number of choices is exponential in the number of requested cards.
When the effort is spent, the search ends with the best set so far. If there is no set yet, the search continues for
some extra effort. If the search then still has no set, no eviction on this node is proposed, although a set may exist.

Example: a pod requests 8 GiB of each of 2 cards. Three full cards of 10 GiB hold pods of 5 and 5 GiB (card 0), of 10
GiB (card 1), and of 9 and 1 GiB (card 2). To clear one card costs 2, 1 and 1. So cards 1 and 2 are tried first: {10, 9}
at a cost of 2. Any choice with card 0 costs 3 or more and is skipped. If the budget of the 10 GiB pod forbids its
eviction, card 1 comes last. Then the result is {9, 5, 5} at a cost of 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cardwise.core.api.mpsprofile import NO_USER
from cardwise.core.api.sharing import ANY_TENANT, Tenant
from cardwise.core.placement import fitting
from cardwise.core.placement.fitting import CardRequest, QuotaHeadroom, SearchPlan, TypedRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import setcover
from cardwise.core.preemption.setcover import Cover, CoverEffort, Victim

NeededAmounts = Mapping[object, int]
MEM, CORE, CLIENTS = "mem", "core", "clients"
# In steps of `CoverEffort`:
_CARD_TRY_EFFORT: Final = 4  # the effort of trying a card
_SET_CHECK_EFFORT: Final = 256  # the effort of checking a set with the placement engine
_EXTRA_EFFORT_WITHOUT_SET: Final = 6_000  # extra effort while no set was found
_EXTRA_EFFORT_FOR_CLEARABLE_CARDS: Final = 12_000  # extra effort to find the cards that can be cleared
_MAX_CARDS: Final = 128  # cards of all card requests together; for a pod with more, no victims are searched
# A dimension, with the daemon and the MPS client: the shares of this client at this daemon.
MPS = "mps"
# A dimension, with the card and the tenant: the shares of this tenant on this card.
TENANT = "tenant"


def freed_amounts(node: NodeState, holding: Holding) -> dict[object, int]:
    """The amounts that become free if this holding is released, by dimension (the kind of amount, and the card)."""
    amounts_by_card: dict[object, int] = {}
    for share in holding.assignment.shares():
        i = node.position(share)
        if i is not None:
            for dimension, amount in ((MEM, share.mem), (CORE, share.core), (CLIENTS, 1)):
                amounts_by_card[dimension, i] = amounts_by_card.get((dimension, i), 0) + amount
            of_tenant = TENANT, i, holding.mps_client.tenant
            amounts_by_card[of_tenant] = amounts_by_card.get(of_tenant, 0) + 1
            if node.mps.managed:
                freed = MPS, node.mps.daemons[i], holding.mps_client
                amounts_by_card[freed] = amounts_by_card.get(freed, 0) + 1
    return amounts_by_card


def find_cheapest_victims(
    node: NodeState,
    plan: SearchPlan,
    candidates: Sequence[Victim],
    *,
    needs: NeededAmounts,
    allowed: Mapping[str, int],
    is_valid: Callable[[Cover], bool],
    effort: CoverEffort,
) -> Cover | None:
    """The cheapest victims; None if no set of candidates is enough, or if the effort ended before a set was found.

    needs: the missing amounts besides cards.
    allowed: how many evictions each disruption budget allows.
    is_valid: returns whether the pod fits after the eviction of a set, by the placement engine.
    """
    return _CardChoice(node, plan, candidates, needs=needs, allowed=allowed, is_valid=is_valid, effort=effort).best()


@dataclass(frozen=True, slots=True)
class _Use:
    """The amounts of one card that the pod uses."""

    mem: int = 0
    core: int = 0
    clients: int = 0
    whole: bool = False
    untolerated: int = 0
    user: int = NO_USER
    tenant: Tenant = ANY_TENANT

    def add(self, card_request: CardRequest) -> "_Use":
        return _Use(
            self.mem + card_request.mem,
            self.core + card_request.core,
            self.clients + len(card_request.keys),
            self.whole or card_request.whole,
            self.untolerated | card_request.untolerated,
            card_request.user,
            card_request.tenant,
        )


class _RequestCards(NamedTuple):
    """A card request and the cards that can be cleared for it.

    costs: by position of a card, the minimum cost of clearing the card for this card request alone.
    order: the positions of these cards, the cheapest first.
    bits: the positions of these cards as a bit set.
    """

    card_request: CardRequest
    costs: Mapping[int, int]
    order: Sequence[int]
    bits: int


class _ChosenCards(NamedTuple):
    """The cards that are chosen so far.

    uses: by position, the amounts of the card that the pod uses.
    costs: by position, a lower bound of the cost of clearing the card.
    used_bits: the positions of these cards as a bit set.
    whole_bits: the positions of the cards that the pod uses whole, as a bit set.
    headroom: the amounts that quotas leave after this choice.
    """

    uses: Mapping[int, _Use]
    costs: Mapping[int, int]
    used_bits: int
    whole_bits: int
    headroom: Sequence[QuotaHeadroom]


class _CardChoice:
    def __init__(
        self,
        node: NodeState,
        plan: SearchPlan,
        candidates: Sequence[Victim],
        *,
        needs: NeededAmounts,
        allowed: Mapping[str, int],
        is_valid: Callable[[Cover], bool],
        effort: CoverEffort,
    ) -> None:
        self._node = node
        self._plan = plan
        self._candidates = candidates
        self._needs = needs
        self._allowed = allowed
        self._is_valid = is_valid
        self._requests: list[_RequestCards] = []
        self._best: Cover | None = None
        self._effort = effort
        self._limit = -_EXTRA_EFFORT_FOR_CLEARABLE_CARDS  # the remaining effort at which a search without a set ends
        # By position of a card, the candidates whose eviction helps to clear the card.
        self._victims_by_card: list[list[Victim]] = [[] for _ in node.cards]
        for victim in candidates:
            of_cards = [key for key in victim.amounts if isinstance(key, tuple)]
            daemons = {key[1] for key in of_cards if key[0] == MPS}
            cards = {key[1] for key in of_cards if key[0] == CLIENTS}
            for i in cards | {i for i in range(len(node.cards)) if daemons and node.mps.daemons[i] in daemons}:
                self._victims_by_card[i].append(victim)
        # If no pod is on two cards, cards are cleared independently of each other.
        self._are_cards_independent = sum(map(len, self._victims_by_card)) == len(
            {victim.name for indices in self._victims_by_card for victim in indices}
        )
        self._clearable = [self._max_free(i) for i in range(len(node.cards))]

    def best(self) -> Cover | None:
        if not self._plan.typed_requests:
            cover = setcover.cheapest_cover(self._candidates, self._needs, self._allowed, self._effort)
            return cover if cover is not None and self._is_valid(cover) else None
        if self._find_clearable_cards():
            self._limit = min(0, self._effort.remaining) - _EXTRA_EFFORT_WITHOUT_SET
            self._choose_from_request(0, _ChosenCards({}, {}, 0, 0, self._plan.headroom))
        return self._best

    def _find_clearable_cards(self) -> bool:
        """Find the cards that can be cleared for each card request. Returns False if a card request has too few such
        cards, or if the effort is spent.
        """
        typed_requests = self._plan.typed_requests
        if sum(typed_request.card_request.cards for typed_request in typed_requests) > _MAX_CARDS:
            return False
        possible_cards = [self._possible_cards(typed_request) for typed_request in typed_requests]
        if any(
            len(cards) < typed_request.card_request.cards
            for typed_request, cards in zip(typed_requests, possible_cards, strict=True)
        ):
            return False
        for typed_request, cards in zip(typed_requests, possible_cards, strict=True):
            if self._is_effort_spent():
                return False
            costs = self._clearing_costs(typed_request.card_request, cards)
            if len(costs) < typed_request.card_request.cards:
                return False
            bits = sum(1 << i for i in costs)
            self._requests.append(_RequestCards(typed_request.card_request, costs, _positions_by_cost(costs), bits))
        self._requests.sort(key=_search_order)
        return True

    def _possible_cards(self, typed_request: TypedRequest) -> list[int]:
        """The positions of the cards that the request could use if all candidates were evicted."""
        node, request = self._node, typed_request.card_request
        use = _Use().add(request)
        return [
            i
            for i, card in enumerate(node.cards)
            if card.accepts_shares
            and any(kinds is None or node.kinds[i] in kinds for _, kinds in typed_request.levels)
            and not node.mps.is_closed_for_good(i, request.untolerated)
            and self._can_have_free(i, use)
        ]

    def _clearing_costs(self, card_request: CardRequest, cards: Sequence[int]) -> dict[int, int]:
        """By position of a card, the minimum cost of clearing the card for the card request."""
        costs = {}
        for i in cards:
            self._effort.spend(_CARD_TRY_EFFORT)
            shortfall = self._missing_amounts(i, _Use().add(card_request))
            cover = (
                setcover.cheapest_cover(self._victims_by_card[i], shortfall, self._allowed, self._effort)
                if shortfall is not None
                else None
            )
            if cover is not None:
                costs[i] = cover.cost
        return costs

    def _missing_amounts(self, i: int, use: _Use) -> dict[object, int] | None:
        """The amounts that must become free on the card for this use; None if that is impossible."""
        node = self._node
        blocking_shares: dict[object, int] = {
            (MPS, *daemon_and_client): shares
            for daemon_and_client, shares in node.mps.blocking_shares(i, use.untolerated, use.user).items()
        }
        blocking_shares |= {
            (TENANT, i, tenant): shares for tenant, shares in node.tenants.blocking_shares(i, use.tenant)
        }
        if use.whole:
            return {(CLIENTS, i): node.clients[i], **blocking_shares} if use.mem == 0 and use.clients == 1 else None
        return {
            (MEM, i): use.mem - node.free[i],
            # The free percentage may be negative if the setting was lowered; that matters only if the pod requests SMs.
            (CORE, i): use.core - node.free_core[i] if use.core else 0,
            (CLIENTS, i): node.clients[i] + use.clients - node.max_card_clients[i],
            **blocking_shares,
        }

    def _max_free(self, i: int) -> tuple[int, int, int]:
        """The memory, SMs and clients that are free on the card if all candidates are evicted."""
        node = self._node
        free = (
            (MEM, node.free[i]),
            (CORE, node.free_core[i]),
            (CLIENTS, node.max_card_clients[i] - node.clients[i]),
        )
        mem, core, clients = (
            amount + sum(victim.amounts.get((dimension, i), 0) for victim in self._victims_by_card[i])
            for dimension, amount in free
        )
        return mem, core, clients

    def _can_have_free(self, i: int, use: _Use) -> bool:
        """Whether the card has enough free for this use if all candidates are evicted."""
        mem, core, clients = self._clearable[i]
        if use.whole:
            return clients >= self._node.max_card_clients[i]
        return use.mem <= mem and (not use.core or use.core <= core) and use.clients <= clients

    def _choose_from_request(self, request_index: int, chosen: _ChosenCards) -> None:
        """Try all choices of cards for the card requests from `request_index` on."""
        if request_index == len(self._requests):
            self._evaluate(chosen.uses)
        else:
            self._choose_missing_cards(request_index, chosen, self._requests[request_index].card_request.cards, 0, 0)

    def _choose_missing_cards(
        self, request_index: int, chosen: _ChosenCards, missing: int, start: int, cost: int
    ) -> None:
        """Try all choices of the missing cards for one card request.

        request_index: the position of the card request.
        missing: the number of missing cards.
        start: the first position in `_RequestCards.order` that may be chosen.
        cost: the sum of the costs of the cards that are already chosen for the card request.
        """
        request_cards = self._requests[request_index]
        for position in range(start, len(request_cards.order) - missing + 1):
            i = request_cards.order[position]
            cost_alone = request_cards.costs[i]
            # The cards are in ascending order of cost.
            if (
                not self._can_improve(cost + missing * cost_alone if self._are_cards_independent else cost_alone)
                or self._is_effort_spent()
            ):
                return
            with_card = self._add_card(request_index, chosen, i)
            if with_card is None:
                continue
            if missing == 1:
                self._choose_from_request(request_index + 1, with_card)
            else:
                self._choose_missing_cards(request_index, with_card, missing - 1, position + 1, cost + cost_alone)

    def _add_card(self, request_index: int, chosen: _ChosenCards, i: int) -> _ChosenCards | None:
        """The choice with this card added; None if the card cannot have enough free, if too few cards remain for later
        card requests, if quotas forbid it, or if the choice cannot be cheaper than the best set.
        """
        card_request = self._requests[request_index].card_request
        bit = 1 << i
        self._effort.spend(1)
        if bit & (chosen.used_bits if card_request.whole else chosen.whole_bits):
            return None
        self._effort.spend(_CARD_TRY_EFFORT)
        use = chosen.uses.get(i, _Use()).add(card_request)
        if not self._can_have_free(i, use):
            return None
        costs = {**chosen.costs, i: max(chosen.costs.get(i, 0), self._requests[request_index].costs[i])}
        if self._are_cards_independent and not self._can_improve(sum(costs.values())):
            return None
        used_bits, whole_bits = chosen.used_bits | bit, chosen.whole_bits | bit if use.whole else chosen.whole_bits
        if used_bits != chosen.used_bits and not self._is_enough_for_later(request_index, used_bits, whole_bits):
            return None
        headroom = chosen.headroom
        if headroom:
            new_headroom = fitting.headroom_after(headroom, self._node, i, card_request)
            if new_headroom is None:
                return None
            headroom = new_headroom
        return _ChosenCards({**chosen.uses, i: use}, costs, used_bits, whole_bits, headroom)

    def _is_enough_for_later(self, request_index: int, used_bits: int, whole_bits: int) -> bool:
        """Whether enough cards remain for the later card requests. Only counts cards."""
        open_to_whole, whole_cards = 0, 0
        self._effort.spend(len(self._requests) - request_index)
        for later in self._requests[request_index + 1 :]:
            request = later.card_request
            open_cards = later.bits & ~(used_bits if request.whole else whole_bits)
            if open_cards.bit_count() < request.cards:
                return False
            if request.whole:
                open_to_whole, whole_cards = open_to_whole | open_cards, whole_cards + request.cards
        return open_to_whole.bit_count() >= whole_cards

    def _can_improve(self, cost: int) -> bool:
        return self._best is None or cost < self._best.cost

    def _is_effort_spent(self) -> bool:
        """Whether the search must end because its effort is spent. While no set was found, extra effort is allowed."""
        return self._effort.remaining <= (self._limit if self._best is None else 0)

    def _evaluate(self, uses: Mapping[int, _Use]) -> None:
        needs = dict(self._needs)
        for i, use in uses.items():
            shortfall = self._missing_amounts(i, use)
            if shortfall is None:
                return
            needs |= shortfall
        # If only amounts of cards are missing, only pods on these cards matter.
        candidates = (
            self._candidates
            if self._needs
            else {victim.name: victim for i in uses for victim in self._victims_by_card[i]}.values()
        )
        cost_limit = self._best.cost if self._best is not None else None
        cover = setcover.cheapest_cover(list(candidates), needs, self._allowed, self._effort, cost_limit)
        if cover is None:
            return
        self._effort.spend(_SET_CHECK_EFFORT)
        if self._is_valid(cover):
            self._best = cover


def _search_order(request_cards: _RequestCards) -> tuple[int, bool]:
    """A sort key that puts the hardest card request first: the card request with the fewest spare cards, and of equal
    ones those for whole cards. So the search finds out early whether the remaining cards are enough.
    """
    return len(request_cards.order) - request_cards.card_request.cards, not request_cards.card_request.whole


def _positions_by_cost(costs: Mapping[int, int]) -> list[int]:
    return sorted(costs, key=lambda i: (costs[i], i))
