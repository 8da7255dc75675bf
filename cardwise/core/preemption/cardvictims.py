"""Victims by card: chooses which cards of a full node to clear for a request, and so which pods must go.

Each choice of cards is a set of needs, and `setcover` finds the cheapest set of pods that meets them. `preemption` says
which pods may go and what else is short. For a request of one card that is one question for each card. For several
cards, choices that cannot be cheaper are skipped, and so are those that leave a later request too few cards.

Each card that is tried costs effort, whether it leads to a set or nowhere: the number of choices is exponential in the
number of cards that a pod requests. When the effort is spent, the search ends with the best set so far. Without one it
goes on a little; then the node counts as one where no eviction helps, though there may be a set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cardwise.core.api.mpsprofile import NOBODY
from cardwise.core.placement import fitting
from cardwise.core.placement.fitting import AllowedKinds, CardRequest, KindHeadroom, SearchPlan
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import setcover
from cardwise.core.preemption.setcover import Cover, CoverEffort, Victim

Needs = Mapping[object, int]
MEM, CORE, CLIENTS = "mem", "core", "clients"
_STEP: Final = 4  # effort of trying a card
_CHECK: Final = 256  # effort of the engine's check of a set
_IN_VAIN: Final = 6_000  # effort beyond the usual, as long as there is no set
_IN_ADVANCE: Final = 12_000  # effort beyond the usual, to find the cards that can be cleared for several requests
_MAX_CARDS: Final = 128  # cards of all requests together; for a pod with more no victims are searched for
MPS = "mps"  # a need: shares of pods with which the newcomer cannot share a daemon; by daemon and MPS client


def freed_amounts(node: NodeState, held: Holding) -> dict[object, int]:
    """What becomes free on which cards if this holding is released."""
    amounts_by_card: dict[object, int] = {}
    for share in held.assignment.shares():
        i = node.position(share)
        if i is not None:
            for dimension, amount in ((MEM, share.mem), (CORE, share.core), (CLIENTS, 1)):
                amounts_by_card[dimension, i] = amounts_by_card.get((dimension, i), 0) + amount
            if node.mps.managed:
                freed = MPS, node.mps.daemons[i], held.mps_client
                amounts_by_card[freed] = amounts_by_card.get(freed, 0) + 1
    return amounts_by_card


def cheapest(
    node: NodeState,
    plan: SearchPlan,
    candidates: Sequence[Victim],
    *,
    needs: Needs,
    allowed: Mapping[str, int],
    is_good: Callable[[Cover], bool],
    effort: CoverEffort,
) -> Cover | None:
    """The cheapest victims; None if there are none, or the effort ends before any are found.

    needs: what is short besides cards.
    is_good: the final check of a set.
    """
    return _CardChoice(node, plan, candidates, needs=needs, allowed=allowed, is_good=is_good, effort=effort).best()


@dataclass(frozen=True, slots=True)
class _Use:
    """What the request takes of one card."""

    mem: int = 0
    core: int = 0
    clients: int = 0
    whole: bool = False
    untolerated: int = 0
    user: int = NOBODY

    def add(self, card_request: CardRequest) -> "_Use":
        return _Use(
            self.mem + card_request.mem,
            self.core + card_request.core,
            self.clients + len(card_request.keys),
            self.whole or card_request.whole,
            self.untolerated | card_request.untolerated,
            card_request.user,
        )


class _Wanted(NamedTuple):
    """A card request and the cards that can be cleared for it.

    costs: by position of a card, the least cost of clearing it for this request alone.
    order: these positions, the cheapest first.
    bits: these positions, a bit for each.
    """

    card_request: CardRequest
    costs: Mapping[int, int]
    order: Sequence[int]
    bits: int


class _Chosen(NamedTuple):
    """The cards that are chosen so far.

    uses: by position, what the pod takes of the card.
    costs: by position, the least cost of clearing the card.
    used: the positions of these cards, a bit for each.
    whole: those that are taken whole.
    headroom: what quotas leave.
    """

    uses: Mapping[int, _Use]
    costs: Mapping[int, int]
    used: int
    whole: int
    headroom: Sequence[KindHeadroom]


class _CardChoice:
    def __init__(
        self,
        node: NodeState,
        plan: SearchPlan,
        candidates: Sequence[Victim],
        *,
        needs: Needs,
        allowed: Mapping[str, int],
        is_good: Callable[[Cover], bool],
        effort: CoverEffort,
    ) -> None:
        self._node = node
        self._plan = plan
        self._candidates = candidates
        self._needs = needs
        self._allowed = allowed
        self._is_good = is_good
        self._wanted: list[_Wanted] = []
        self._best: Cover | None = None
        self._effort = effort
        self._limit = -_IN_ADVANCE  # the remaining effort at which a search that has no set ends
        # The pods on each card: only they can clear it.
        self._on: list[list[Victim]] = [[] for _ in node.cards]
        for victim in candidates:
            of_cards = [key for key in victim.amounts if isinstance(key, tuple)]
            daemons = {key[1] for key in of_cards if key[0] == MPS}
            cards = {key[1] for key in of_cards if key[0] == CLIENTS}
            for i in cards | {i for i in range(len(node.cards)) if daemons and node.mps.daemons[i] in daemons}:
                self._on[i].append(victim)
        # If no pod is on two cards, cards are cleared independently of each other.
        self._apart = sum(map(len, self._on)) == len({victim.name for indices in self._on for victim in indices})
        self._clearable = [self._most_free(i) for i in range(len(node.cards))]

    def best(self) -> Cover | None:
        if not self._plan.wants:
            cover = setcover.cheapest_cover(self._candidates, self._needs, self._allowed, self._effort)
            return cover if cover is not None and self._is_good(cover) else None
        if self._find_clearable_cards():
            self._limit = min(0, self._effort.remaining) - _IN_VAIN
            self._choose_for(0, _Chosen({}, {}, 0, 0, self._plan.headroom))
        return self._best

    def _find_clearable_cards(self) -> bool:
        """Find the cards for each request. False if there are too few for some request, or it takes too much effort."""
        wants = self._plan.wants
        if sum(want.card_request.cards for want in wants) > _MAX_CARDS:
            return False
        possible_cards = [self._possible_cards(want) for want in wants]
        if any(len(cards) < want.card_request.cards for want, cards in zip(wants, possible_cards, strict=True)):
            return False
        for want, cards in zip(wants, possible_cards, strict=True):
            if self._is_over():
                return False
            costs = self._costs(want.card_request, cards)
            if len(costs) < want.card_request.cards:
                return False
            bits = sum(1 << i for i in costs)
            self._wanted.append(_Wanted(want.card_request, costs, _cheapest_first(costs), bits))
        self._wanted.sort(key=_spare_cards)
        return True

    def _possible_cards(self, want: AllowedKinds) -> list[int]:
        """The positions of the cards that the request may have and that have enough free if all candidates go."""
        node, request = self._node, want.card_request
        use = _Use().add(request)
        return [
            i
            for i, card in enumerate(node.cards)
            if card.accepts_shares
            and any(kinds is None or node.kinds[i] in kinds for _, kinds in want.levels)
            and not node.mps.is_closed_for_good(i, request.untolerated, request.user)
            and self._can_have_free(i, use)
        ]

    def _costs(self, card_request: CardRequest, cards: Sequence[int]) -> dict[int, int]:
        """By position of the card, the least cost of clearing it for the request."""
        costs = {}
        for i in cards:
            self._effort.spend(_STEP)
            short = self._missing_amounts(i, _Use().add(card_request))
            cover = (
                setcover.cheapest_cover(self._on[i], short, self._allowed, self._effort) if short is not None else None
            )
            if cover is not None:
                costs[i] = cover.cost
        return costs

    def _missing_amounts(self, i: int, use: _Use) -> dict[object, int] | None:
        """What must become free on the card for this use of it; None where that can never be."""
        node = self._node
        others: dict[object, int] = {
            (MPS, *daemon_and_client): shares
            for daemon_and_client, shares in node.mps.blocking_shares(i, use.untolerated, use.user).items()
        }
        if use.whole:
            return {(CLIENTS, i): node.clients[i], **others} if use.mem == 0 and use.clients == 1 else None
        return {
            (MEM, i): use.mem - node.free[i],
            # It may be below zero, where fewer are given than before; a pod that asks for none does not mind.
            (CORE, i): use.core - node.free_core[i] if use.core else 0,
            (CLIENTS, i): node.clients[i] + use.clients - node.max_card_clients[i],
            **others,
        }

    def _most_free(self, i: int) -> tuple[int, int, int]:
        """The memory, SMs and clients that are free on the card if all candidates go."""
        node = self._node
        free = (
            (MEM, node.free[i]),
            (CORE, node.free_core[i]),
            (CLIENTS, node.max_card_clients[i] - node.clients[i]),
        )
        mem, core, clients = (
            amount + sum(victim.amounts.get((dimension, i), 0) for victim in self._on[i]) for dimension, amount in free
        )
        return mem, core, clients

    def _can_have_free(self, i: int, use: _Use) -> bool:
        """Whether the card has enough free for this use if all candidates go."""
        mem, core, clients = self._clearable[i]
        if use.whole:
            return clients >= self._node.max_card_clients[i]
        return use.mem <= mem and (not use.core or use.core <= core) and use.clients <= clients

    def _choose_for(self, at: int, chosen: _Chosen) -> None:
        """Tries all choices of cards for the requests from this one on."""
        if at == len(self._wanted):
            self._evaluate(chosen.uses)
        else:
            self._choose(at, chosen, self._wanted[at].card_request.cards, 0, 0)

    def _choose(self, at: int, chosen: _Chosen, missing: int, start: int, cost: int) -> None:
        """Tries all choices of the missing cards for the request.

        at: the request's position.
        start: the first position in the request's order that may be chosen.
        cost: of the cards that are chosen for the request already, each alone.
        """
        wanted = self._wanted[at]
        for position in range(start, len(wanted.order) - missing + 1):
            i = wanted.order[position]
            cost_alone = wanted.costs[i]
            # The cards are in order of cost: those that follow cost at least as much.
            if not self._can_improve(cost + missing * cost_alone if self._apart else cost_alone) or self._is_over():
                return
            with_card = self._add_card(at, chosen, i)
            if with_card is None:
                continue
            if missing == 1:
                self._choose_for(at + 1, with_card)
            else:
                self._choose(at, with_card, missing - 1, position + 1, cost + cost_alone)

    def _add_card(self, at: int, chosen: _Chosen, i: int) -> _Chosen | None:
        """The choice with this card for the request; None if it leads nowhere: the card, or what it leaves to later
        requests, is not enough, or it costs as much as the best set.
        """
        card_request = self._wanted[at].card_request
        bit = 1 << i
        self._effort.spend(1)
        if bit & (chosen.used if card_request.whole else chosen.whole):
            return None
        self._effort.spend(_STEP)
        use = chosen.uses.get(i, _Use()).add(card_request)
        if not self._can_have_free(i, use):
            return None
        costs = {**chosen.costs, i: max(chosen.costs.get(i, 0), self._wanted[at].costs[i])}
        if self._apart and not self._can_improve(sum(costs.values())):
            return None
        used, whole = chosen.used | bit, chosen.whole | bit if use.whole else chosen.whole
        if used != chosen.used and not self._is_enough_for_later(at, used, whole):
            return None
        headroom = chosen.headroom
        if headroom:
            remaining = fitting.headroom_after(headroom, self._node, i, card_request)
            if remaining is None:
                return None
            headroom = remaining
        return _Chosen({**chosen.uses, i: use}, costs, used, whole, headroom)

    def _is_enough_for_later(self, at: int, used: int, whole: int) -> bool:
        """Whether the requests after this one have enough cards left by their number."""
        open_to_whole, whole_cards = 0, 0
        self._effort.spend(len(self._wanted) - at)
        for later in self._wanted[at + 1 :]:
            request = later.card_request
            open_cards = later.bits & ~(used if request.whole else whole)
            if open_cards.bit_count() < request.cards:
                return False
            if request.whole:
                open_to_whole, whole_cards = open_to_whole | open_cards, whole_cards + request.cards
        return open_to_whole.bit_count() >= whole_cards

    def _can_improve(self, cost: int) -> bool:
        return self._best is None or cost < self._best.cost

    def _is_over(self) -> bool:
        """Whether the search ends here: its effort is spent. Without a set it goes on, but not for ever."""
        return self._effort.remaining <= (self._limit if self._best is None else 0)

    def _evaluate(self, uses: Mapping[int, _Use]) -> None:
        needs = dict(self._needs)
        for i, use in uses.items():
            short = self._missing_amounts(i, use)
            if short is None:
                return
            needs |= short
        # If nothing else is short, only pods on these cards matter.
        candidates = (
            self._candidates if self._needs else {victim.name: victim for i in uses for victim in self._on[i]}.values()
        )
        below = self._best.cost if self._best is not None else None
        cover = setcover.cheapest_cover(list(candidates), needs, self._allowed, self._effort, below)
        if cover is None:
            return
        self._effort.spend(_CHECK)
        if self._is_good(cover):
            self._best = cover


def _spare_cards(wanted: _Wanted) -> tuple[int, bool]:
    """How hard it is to find cards for the request: by how many it could do without, and whole cards first. The hardest
    request comes first: what is left of the cards is enough for the others, or the search knows soon that it is not.
    """
    return len(wanted.order) - wanted.card_request.cards, not wanted.card_request.whole


def _cheapest_first(costs: Mapping[int, int]) -> list[int]:
    return sorted(costs, key=lambda i: (costs[i], i))
