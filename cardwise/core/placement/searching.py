"""Searches one node for cards for all claims of a request: one claim may have to leave its best card to another.

The policy's first choices are tried first (`fitting`). If they leave a claim without a card, the search backtracks.
"""

from collections.abc import Sequence
from typing import Final

from cardwise.core.api import policies
from cardwise.core.api.cards import POSITION
from cardwise.core.api.quotas import Headroom
from cardwise.core.placement.fitting import (
    Claim,
    Plan,
    Want,
    choices,
    choose,
    refusal,
    share,
    usable,
)
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.quantity import MiB, Percent
from cardwise.core.values.refusals import Refusal

_STEPS: Final = 256  # cards tried for one request on one node; after that it counts as not fitting there
_STEPS_IN_ALL: Final = 4096  # the same on all nodes together; the time: docs/measured.md
_EMPTIED: Final = 8  # steps that it costs to ask the same of a node without its pods

_Found = tuple[int, list[list[int]]]  # score, and card positions for each claim


class SearchEffort:
    """What one request may cost beyond the policy's first choices: so many cards may still be tried, on all nodes.

    `reasons`: whether to find out why a node refuses. That costs more than to find out that it does.
    """

    def __init__(self, steps: int | None = None, *, reasons: bool = True) -> None:
        self.left = _STEPS_IN_ALL if steps is None else steps
        self.reasons = reasons


def fit(node: NodeState, plan: Plan, policy: policies.Policy, effort: SearchEffort) -> _Found | Refusal:
    """Score and card positions for each claim, or why there are none."""
    found = _search(node, plan.wants, plan.headroom, policy, effort)
    if found is not None and not isinstance(found, Want):
        return found
    return why(node, plan, found, policy, effort) if effort.reasons else Refusal.TOGETHER


def why(node: NodeState, plan: Plan, failed: Want | None, policy: policies.Policy, effort: SearchEffort) -> Refusal:
    """Why the node takes no such pod. `failed`: the part that finds no card even alone; None: only all together do not
    fit.
    """
    wants = plan.wants if plan.unlimited is None else plan.unlimited
    if plan.unlimited is not None:
        found = _search(node, wants, (), policy, effort)
        if found is not None and not isinstance(found, Want):
            return Refusal.QUOTA
        failed = found
    if failed is not None:
        return refusal(node, failed.claim, failed.typed)
    if effort.left <= 0:
        return Refusal.TOGETHER
    effort.left -= _EMPTIED
    ever = _search(node.emptied(), wants, (), policy, effort)
    return Refusal.NEVER_TOGETHER if ever is None or isinstance(ever, Want) else Refusal.TOGETHER


def _search(
    node: NodeState, wants: Sequence[Want], headroom: Sequence[Headroom], policy: policies.Policy, effort: SearchEffort
) -> _Found | Want | None:
    """As `fit`; or the part that finds no card even alone; or None if each part fits alone.

    Each claim gets the policy's choice of what the claims before it leave. If a claim then has no card, but each claim
    would fit alone, other choices are tried until the effort is spent.
    """
    scratch, left = node, headroom
    score = 0
    positions: list[list[int]] = []
    for want in wants:
        if positions:
            if len(positions) == 1 and _too_little(node, wants):
                return _hopeless(node, wants, headroom, policy)
            scratch = without(scratch, wants[len(positions) - 1].claim, positions[-1])
        found = choose(scratch, want, left, policy)
        if found is None:
            hopeless = want if not positions else _hopeless(node, wants, headroom, policy)
            if hopeless is not None or _crowded(node, [one.claim for one in wants]):
                return hopeless
            return _Others(wants, policy, effort).search(node, headroom)
        points, chosen, left = found
        score += points
        positions.append(sorted(chosen))
    return score, positions


def _hopeless(
    node: NodeState, wants: Sequence[Want], headroom: Sequence[Headroom], policy: policies.Policy
) -> Want | None:
    """The first part that finds no card even alone, or None."""
    return next((want for want in wants if choose(node, want, headroom, policy) is None), None)


def _too_little(node: NodeState, wants: Sequence[Want]) -> bool:
    """Whether the cards have too little memory for all parts, wherever each goes. Takes a tenth of a search's time."""
    shares = [(one.claim.mem, one.claim.cards) for one in wants if not one.claim.whole]
    free = [room for code in node.ascending() if (room := code >> POSITION) > 0]
    if sum(free) < sum(mem * cards for mem, cards in shares):
        return True
    for least, _ in shares:
        # So many shares of this size or a bigger one fit on a card at most.
        places = sum(cards for mem, cards in shares if mem >= least)
        if least and sum(room // least for room in free) < places:
            return True
    return False


def _crowded(node: NodeState, claims: Sequence[Claim]) -> bool:
    """Whether claims that cannot share a card need more cards than have room. A quick check."""
    most = max(node.free)
    apart = [claim for claim in claims if claim.whole or 2 * claim.mem > most]
    least = min((claim.mem for claim in apart), default=0)
    return sum(claim.cards for claim in apart) > sum(free >= least for free in node.free)


def without(node: NodeState, claim: Claim, positions: Sequence[int]) -> NodeState:
    """The node once the claim has taken these cards of it."""
    left = node.copy()
    part = None if claim.whole else (MiB(claim.mem), Percent(claim.core))
    for i in positions:
        left.count(share(left, i, part), 1)
        left.clients[i] += len(claim.keys) - 1
    return left


class _Others:
    """All choices of cards for the claims, in the policy's order of preference."""

    def __init__(self, wants: Sequence[Want], policy: policies.Policy, effort: SearchEffort) -> None:
        self._wants = wants
        self._policy = policy
        self._effort = effort
        self._until = max(0, effort.left - _STEPS)

    def search(self, node: NodeState, headroom: Sequence[Headroom], at: int = 0) -> _Found | None:
        """The first choice for the claims from this one on that gives cards to all of them."""
        want = self._wants[at]
        if at + 1 == len(self._wants):
            found = choose(node, want, headroom, self._policy)
            return (found[0], [sorted(found[1])]) if found is not None else None
        codes = usable(node, want.claim)
        found_here = choices(node, codes, want, headroom, self._policy, alike=_state, tries=self._tries)
        for score, chosen, left in found_here:
            rest = self.search(without(node, want.claim, chosen), left, at + 1)
            if rest is not None:
                return score + rest[0], [sorted(chosen), *rest[1]]
        return None

    def _tries(self) -> bool:
        """Spends the effort for one more card, if there is any."""
        if self._effort.left <= self._until:
            return False
        self._effort.left -= 1
        return True


def _state(node: NodeState, i: int) -> tuple[int, ...]:
    """All properties of a card that matter to a claim; equal for cards that are alike."""
    counts = node.free[i], node.free_core[i], node.clients[i], node.most[i]
    return *counts, node.kinds[i], node.cards[i].mem, node.mps.taints[i], node.mps.users[i]
