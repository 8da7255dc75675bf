"""Victims by card: chooses which cards of a full node to clear for a request, and so which pods must go.

Each choice of cards is a set of needs, and `setcover` finds the cheapest set of pods that meets them. `preemption` says
which pods may go and what else is short. For a request of one card that is one question for each card. For several
cards, choices that cannot be cheaper are skipped, and the search ends when its effort is spent: with the best set so
far, or after some choices with none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cardwise.core.api.mpsprofile import NOBODY
from cardwise.core.placement import fitting
from cardwise.core.placement.fitting import AllowedKinds, CardRequest, KindHeadroom, SearchPlan
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import setcover
from cardwise.core.preemption.setcover import Cover, CoverEffort, Victim

Needs = Mapping[object, int]
MEM, CORE, CLIENTS = "mem", "core", "clients"
_AT_LEAST: Final = 16  # choices of cards that are looked at, also when the effort is spent
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
    """The cheapest victims. `needs`: what is short besides cards. `is_good`: the final check of what was found."""
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
        self._candidates = candidates
        self._needs = needs
        self._allowed = allowed
        self._is_good = is_good
        self._headroom = plan.headroom
        self._slots = [want for want in plan.wants for _ in range(want.card_request.cards)]
        self._best: Cover | None = None
        self._evaluations = 0
        self._effort = effort
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
        self._alone = {want.card_request: self._costs(want) for want in plan.wants}
        self._order = {card_request: _cheapest_first(costs) for card_request, costs in self._alone.items()}

    def best(self) -> Cover | None:
        if not self._slots:
            cover = setcover.cheapest_cover(self._candidates, self._needs, self._allowed, self._effort)
            return cover if cover is not None and self._is_good(cover) else None
        if all(self._order[want.card_request] for want in self._slots):
            self._choose(0, 0, {}, (), self._headroom)
        return self._best

    def _costs(self, want: AllowedKinds) -> dict[int, int]:
        """By position of the card, the least cost of clearing it for the claim."""
        costs = {}
        for i, card in enumerate(self._node.cards):
            if not card.accepts_shares or not any(
                kinds is None or self._node.kinds[i] in kinds for _, kinds in want.levels
            ):
                continue
            if self._node.mps.is_closed_for_good(i, want.card_request.untolerated, want.card_request.user):
                continue
            short = self._missing_amounts(i, _Use().add(want.card_request))
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

    def _choose(
        self, slot: int, start: int, uses: dict[int, _Use], spent: tuple[int, ...], headroom: Sequence[KindHeadroom]
    ) -> None:
        """Tries all choices for the slots from this one on. `start`: a place in the order of the slot's claim; `spent`:
        the sum of the single costs of the cards chosen so far for this claim.
        """
        if slot == len(self._slots):
            self._evaluate(uses)
            return
        want = self._slots[slot]
        card_request = want.card_request
        order, costs = self._order[card_request], self._alone[card_request]
        last_of_request = slot + 1 == len(self._slots) or self._slots[slot + 1] is not want
        missing = sum(other is want for other in self._slots[slot:])
        for at in range(start, len(order) - missing + 1):
            i = order[at]
            # The cards are in order of cost: those that follow cost at least as much.
            if self._apart and not self._can_improve(sum(spent) + missing * costs[i]):
                return
            if not self._can_improve(costs[i]):
                return
            if self._effort.spent and (self._best is not None or self._evaluations >= _AT_LEAST):
                return
            before = uses.get(i, _Use())
            if before.whole or (card_request.whole and before.clients):
                continue
            remaining = fitting.headroom_after(headroom, self._node, i, card_request) if headroom else headroom
            if remaining is None:
                continue
            now = uses | {i: before.add(card_request)}
            if last_of_request:
                self._choose(slot + 1, 0, now, (), remaining)
            else:
                self._choose(slot + 1, at + 1, now, (*spent, costs[i]), remaining)

    def _can_improve(self, cost: int) -> bool:
        return self._best is None or cost < self._best.cost

    def _evaluate(self, uses: Mapping[int, _Use]) -> None:
        self._evaluations += 1
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
        if cover is not None and self._is_good(cover):
            self._best = cover


def _cheapest_first(costs: Mapping[int, int]) -> list[int]:
    return sorted(costs, key=lambda i: (costs[i], i))
