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
from cardwise.core.api.quotas import Headroom
from cardwise.core.placement import fitting
from cardwise.core.placement.fitting import Claim, Plan, Want
from cardwise.core.placement.ledger import Holding
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import setcover
from cardwise.core.preemption.setcover import Cover, CoverEffort, Thing

Needs = Mapping[object, int]
MEM, CORE, CLIENTS = "mem", "core", "clients"
_AT_LEAST: Final = 16  # choices of cards that are looked at, also when the effort is spent
MPS = "mps"  # a need: shares of pods with which the newcomer cannot share a daemon; by daemon and MPS client


def amounts(node: NodeState, held: Holding) -> dict[object, int]:
    """What becomes free on which cards when this holding is released."""
    found: dict[object, int] = {}
    for share in held.assignment.shares():
        i = node.position(share)
        if i is not None:
            for what, amount in ((MEM, share.mem), (CORE, share.core), (CLIENTS, 1)):
                found[what, i] = found.get((what, i), 0) + amount
            if node.mps.managed:
                freed = MPS, node.mps.daemons[i], held.mps_client
                found[freed] = found.get(freed, 0) + 1
    return found


def cheapest(
    node: NodeState,
    plan: Plan,
    things: Sequence[Thing],
    *,
    needs: Needs,
    allowed: Mapping[str, int],
    good: Callable[[Cover], bool],
    effort: CoverEffort,
) -> Cover | None:
    """The cheapest victims. `needs`: what is short besides cards. `good`: the final check of what was found."""
    return _Choice(node, plan, things, needs=needs, allowed=allowed, good=good, effort=effort).best()


@dataclass(frozen=True, slots=True)
class _Use:
    """What the request takes of one card."""

    mem: int = 0
    core: int = 0
    clients: int = 0
    whole: bool = False
    untolerated: int = 0
    user: int = NOBODY

    def plus(self, claim: Claim) -> "_Use":
        return _Use(
            self.mem + claim.mem,
            self.core + claim.core,
            self.clients + len(claim.keys),
            self.whole or claim.whole,
            self.untolerated | claim.untolerated,
            claim.user,
        )


class _Choice:
    def __init__(
        self,
        node: NodeState,
        plan: Plan,
        things: Sequence[Thing],
        *,
        needs: Needs,
        allowed: Mapping[str, int],
        good: Callable[[Cover], bool],
        effort: CoverEffort,
    ) -> None:
        self._node = node
        self._things = things
        self._needs = needs
        self._allowed = allowed
        self._good = good
        self._headroom = plan.headroom
        self._slots = [want for want in plan.wants for _ in range(want.claim.cards)]
        self._found: Cover | None = None
        self._looks = 0
        self._effort = effort
        # The pods on each card: only they can clear it.
        self._on: list[list[Thing]] = [[] for _ in node.cards]
        for thing in things:
            of_cards = [key for key in thing.amounts if isinstance(key, tuple)]
            daemons = {key[1] for key in of_cards if key[0] == MPS}
            cards = {key[1] for key in of_cards if key[0] == CLIENTS}
            for i in cards | {i for i in range(len(node.cards)) if daemons and node.mps.daemons[i] in daemons}:
                self._on[i].append(thing)
        # If no pod is on two cards, cards are cleared independently of each other.
        self._apart = sum(map(len, self._on)) == len({thing.name for on in self._on for thing in on})
        self._alone = {want.claim: self._costs(want) for want in plan.wants}
        self._order = {claim: _cheapest_first(costs) for claim, costs in self._alone.items()}

    def best(self) -> Cover | None:
        if not self._slots:
            found = setcover.cover(self._things, self._needs, self._allowed, self._effort)
            return found if found is not None and self._good(found) else None
        if all(self._order[want.claim] for want in self._slots):
            self._choose(0, 0, {}, (), self._headroom)
        return self._found

    def _costs(self, want: Want) -> dict[int, int]:
        """By position of the card, the least cost of clearing it for the claim."""
        costs = {}
        for i, card in enumerate(self._node.cards):
            if not card.takes or not any(kinds is None or self._node.kinds[i] in kinds for _, kinds in want.levels):
                continue
            if self._node.mps.never(i, want.claim.untolerated, want.claim.user):
                continue
            short = self._short(i, _Use().plus(want.claim))
            found = setcover.cover(self._on[i], short, self._allowed, self._effort) if short is not None else None
            if found is not None:
                costs[i] = found.cost
        return costs

    def _short(self, i: int, use: _Use) -> dict[object, int] | None:
        """What must become free on the card for this use of it; None where that can never be."""
        node = self._node
        others: dict[object, int] = {
            (MPS, *who): shares for who, shares in node.mps.in_the_way(i, use.untolerated, use.user).items()
        }
        if use.whole:
            return {(CLIENTS, i): node.clients[i], **others} if use.mem == 0 and use.clients == 1 else None
        return {
            (MEM, i): use.mem - node.free[i],
            # It may be below zero, where fewer are given than before; a pod that asks for none does not mind.
            (CORE, i): use.core - node.free_core[i] if use.core else 0,
            (CLIENTS, i): node.clients[i] + use.clients - node.most[i],
            **others,
        }

    def _choose(
        self, slot: int, start: int, uses: dict[int, _Use], spent: tuple[int, ...], headroom: Sequence[Headroom]
    ) -> None:
        """Tries all choices for the slots from this one on. `start`: a place in the order of the slot's claim; `spent`:
        the sum of the single costs of the cards chosen so far for this claim.
        """
        if slot == len(self._slots):
            self._look(uses)
            return
        want = self._slots[slot]
        claim = want.claim
        order, costs = self._order[claim], self._alone[claim]
        last_of_claim = slot + 1 == len(self._slots) or self._slots[slot + 1] is not want
        missing = sum(other is want for other in self._slots[slot:])
        for at in range(start, len(order) - missing + 1):
            i = order[at]
            # The cards are in order of cost: those that follow cost at least as much.
            if self._apart and not self._worth(sum(spent) + missing * costs[i]):
                return
            if not self._worth(costs[i]):
                return
            if self._effort.spent and (self._found is not None or self._looks >= _AT_LEAST):
                return
            before = uses.get(i, _Use())
            if before.whole or (claim.whole and before.clients):
                continue
            left = fitting.charged(headroom, self._node, i, claim) if headroom else headroom
            if left is None:
                continue
            now = uses | {i: before.plus(claim)}
            if last_of_claim:
                self._choose(slot + 1, 0, now, (), left)
            else:
                self._choose(slot + 1, at + 1, now, (*spent, costs[i]), left)

    def _worth(self, cost: int) -> bool:
        return self._found is None or cost < self._found.cost

    def _look(self, uses: Mapping[int, _Use]) -> None:
        self._looks += 1
        needs = dict(self._needs)
        for i, use in uses.items():
            short = self._short(i, use)
            if short is None:
                return
            needs |= short
        # If nothing else is short, only pods on these cards matter.
        among = self._things if self._needs else {thing.name: thing for i in uses for thing in self._on[i]}.values()
        below = self._found.cost if self._found is not None else None
        found = setcover.cover(list(among), needs, self._allowed, self._effort, below)
        if found is not None and self._good(found):
            self._found = found


def _cheapest_first(costs: Mapping[int, int]) -> list[int]:
    return sorted(costs, key=lambda i: (costs[i], i))
