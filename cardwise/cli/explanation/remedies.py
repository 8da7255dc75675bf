"""Remedies in `explain`: who would have to go so that a waiting pod runs, which card must come back, which quota."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cardwise.cli.cluster import nodestates
from cardwise.cli.explanation import holdups
from cardwise.cli.explanation.holdups import Around
from cardwise.core.api import names, quotas
from cardwise.core.api.mps import MODE, Mode
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting, totals
from cardwise.core.placement.ledger import Holding, Ledger
from cardwise.core.preemption import explanation
from cardwise.core.preemption.explanation import CardView, NodeView
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.shellcommand import command
from cardwise.kube.survey import Survey

ENDING = "ending"  # mark of a pod that is deleted and whose containers may still run
_FEW = 5  # pods or cards named in one line
_LEAST = 256  # MiB: less is nothing to advise
_MEMBERS = 16  # of a gang, for whom room is looked for


def remedies(
    pod: Json,
    asked: PodRequest,
    survey: Survey,
    views: Sequence[NodeView],
    policy: str,
    *,
    away: Sequence[str],
    around: Around,
) -> list[str]:
    """One line for each thing that would do by itself, the cheapest first; nothing where the pod fits already.

    `away`: nodes with cards that the pod keeps away from.
    """
    if any(view.refusal is None for view in views):
        return []
    namespace = pod["metadata"]["namespace"]
    headroom = [left for _, left in survey.headroom(namespace)]
    found = [
        *_less(asked, survey.ledger, views, policy, headroom),
        *_elsewhere(pod, explanation.explain(survey.ledger, away, asked, policy, headroom), around),
        *_without_mps(asked, survey.ledger, views, policy, headroom),
        *_withheld(asked, views),
        *_former(namespace, views, around),
        *_holders(asked, survey.ledger, views, policy, headroom, namespace=namespace, around=around),
        *_quotas(asked, namespace, survey),
        *_too_big(asked, survey.ledger, views),
        *_apart(views),
    ]
    return ["It would run if:", *(f"  - {line}" for line in found)] if found else []


def holder(holding: Holding, uuid: str = "") -> str:
    """A pod and what it holds, of one card if `uuid` names it. A pod that is ending or gone has a mark."""
    gone = ", is ending" if holding.mark == ENDING else ", its pod has gone" if holding.mark else ""
    of_card = sum(share.mem for share in holding.assignment.shares() if share.uuid == uuid)
    return f"{holding.namespace}/{holding.name} ({of_card or holding.assignment.mem} MiB{gone})"


def _less(
    asked: PodRequest, ledger: Ledger, views: Sequence[NodeView], policy: str, headroom: Sequence[Headroom]
) -> Iterator[str]:
    """What it could have at once, where that is enough for anything."""
    found = explanation.smaller(ledger, [view.name for view in views], asked, policy, headroom)
    if found is not None and found.mem >= _LEAST:
        yield f"it asked for at most {found.mem} MiB: that runs now, on {_cards(found.node, found.cards)}"


def _former(namespace: str, views: Sequence[NodeView], around: Around) -> Iterator[str]:
    """A rolling update starts the new pod before it ends the old one, which holds the card."""
    holders = (one for view in views for card in view.cards for one in card.holders if one.mark != ENDING)
    own = dict.fromkeys(one.name for one in holders if one.namespace == namespace and one.name in around.former)
    if own:
        yield (
            f"its own former replica ended ({wording.few(list(own), _FEW, 'pod')}): write strategy.type: Recreate in "
            "the Deployment, or maxSurge: 0 with maxUnavailable: 1"
        )


def _holders(
    asked: PodRequest,
    ledger: Ledger,
    views: Sequence[NodeView],
    policy: str,
    headroom: Sequence[Headroom],
    *,
    namespace: str,
    around: Around,
) -> Iterator[str]:
    kept = {one.uid for one in ledger.holdings() if one.namespace == namespace and one.name in around.fellows}
    if around.partners:
        asking = [asked, *around.partners.values()][:_MEMBERS]
        every = explanation.together(ledger, [view.name for view in views], asking, policy, headroom, kept=kept)
        if every:
            who = wording.few([holder(one) for one in every], _FEW, "pod")
            bare = _bare_among(every, around)
            yield f"these ended, for all {len(around.partners) + 1} waiting pods of its gang: {who}{bare}"
        return
    near = explanation.nearest(ledger, views, asked, policy, headroom, kept=kept)
    if near is None:
        return
    if near.holders and all(one.namespace == namespace and one.name in around.former for one in near.holders):
        return  # said with what to do about it
    where = _cards(near.node, near.cards)
    short = f", {near.short} MiB short" if near.short else ""
    if not near.holders:
        yield f"what is ending on {near.node} is gone: nobody else has to go"
        return
    who = wording.few([holder(one) for one in near.holders], _FEW, "pod")
    yield f"these ended ({where}{short}): {who}{_bare_among(near.holders, around)}"


def _bare_among(holders: Sequence[Holding], around: Around) -> str:
    """Which of these pods are lost when they end, as the end of a sentence; "" where none is."""
    bare = [f"{one.namespace}/{one.name}" for one in holders if one.uid in around.bare]
    if not bare:
        return ""
    return (
        f"; no controller recreates {wording.few(bare, _FEW, 'pod')}, so save what is deleted: kubectl get pod -o yaml"
    )


def _without_mps(
    asked: PodRequest, ledger: Ledger, views: Sequence[NodeView], policy: str, headroom: Sequence[Headroom]
) -> Iterator[str]:
    """A pod that requires MPS, and would run at once if it did not."""
    if asked.mps is not Mode.REQUIRED:
        return
    content = replace(asked, mps=Mode.PREFERRED)
    there = [view.name for view in views]
    fits = [one.name for one in explanation.explain(ledger, there, content, policy, headroom) if one.refusal is None]
    if fits:
        yield f"it said {MODE}: {Mode.PREFERRED}, so that it need not have MPS: that runs now, on {fits[0]}"


def _elsewhere(pod: Json, away: Sequence[NodeView], around: Around) -> Iterator[str]:
    """Nodes that would take the pod, if it did not keep away from them."""
    free = [view.name for view in away if view.refusal is None]
    closed = holdups.kept_away_by_state(pod, free, around)
    for name, state in list(closed.items())[:_FEW]:
        yield f"node {name} were not {state} ({nodestates.remedy(state, name)}): what it asks for is free there"
    # What a node's state keeps away as well would not run there for another selector alone.
    free = [name for name in free if name not in holdups.closed_nodes(pod, free, around)]
    if free:
        why = holdups.kept_away_by(pod, free, around)
        yield f"it did not keep away from {wording.few(free, _FEW, 'node')} by {why}: what it asks for is free there"


def _cards(node: str, indices: Sequence[int]) -> str:
    return f"card{'s' * (len(indices) > 1)} {', '.join(map(str, indices))} of {node}" if indices else node


def _withheld(asked: PodRequest, views: Sequence[NodeView]) -> Iterator[str]:
    """Cards that would do and that take nothing new."""
    for view in views:
        for card in view.cards:
            if not card.closed and _would_do(asked, card):
                where = f"card {card.index} of {view.name}"
                if not card.healthy:
                    yield f"{where} became healthy: it has {card.free} MiB free"
                elif card.cordoned:
                    again = command("cardwise uncordon {node}/{index}", node=view.name, index=card.index)
                    yield f"{where} were given back (`{again}`)"


def _would_do(asked: PodRequest, card: CardView) -> bool:
    """Whether the card takes the whole request, were it given."""
    claims = fitting.claims(asked)
    if len(claims) != 1 or claims[0].cards != 1 or (card.healthy and not card.cordoned):
        return False
    return not card.holders if claims[0].whole else card.free >= claims[0].mem


def _quotas(asked: PodRequest, namespace: str, survey: Survey) -> Iterator[str]:
    """Each entry that is in the way, and who holds most of it."""
    claims = fitting.claims(asked)
    for quota, left in survey.headroom(namespace):
        if explanation.exceeding(claims, left, survey.ledger) is None:
            continue
        charges = [(one, totals.charge(survey.ledger, one, left.entry).memory) for one in survey.ledger.holdings()]
        here = [(one, mem) for one, mem in charges if one.namespace == namespace and mem]
        most = sorted(here, key=lambda one: (-one[1], one[0].name))
        by = f"; it is held by {wording.few([holder(one) for one, _ in most], _FEW, 'pod')}" if most else ""
        yield f"GPUQuota {quota.name} left room on {quotas.title(left.entry)}{by}"


def _too_big(asked: PodRequest, ledger: Ledger, views: Sequence[NodeView]) -> Iterator[str]:
    """Where no card there is could ever hold the share."""
    shares = [c for c in asked.containers if not c.whole]
    impossible = {Refusal.CARD_TOO_SMALL, Refusal.NOT_OURS, Refusal.NO_SUCH_TYPE}
    if not shares or not views or {view.refusal for view in views} - impossible:
        return
    may = [claim for claim in fitting.claims(asked) if not claim.whole]
    classes = {claim.resource_class for claim in may}
    may_be_on = {view.name for view in views}
    sizes = [
        card.mem - node.kept_back
        for node in ledger.nodes()
        if node.name in may_be_on
        for card in node.cards
        if all(not name or name in card.classes for name in classes)
    ]
    if sizes and max(claim.mem for claim in may) > max(sizes):
        split = f"more than that can be split over cards with {names.GPU_COUNT}"
        yield f"it asked for at most {max(sizes)} MiB of a card, the biggest that it may be on; {split}"


def _apart(views: Sequence[NodeView]) -> Iterator[str]:
    """Where the requests of one pod are too much for the cards of a node."""
    if any(view.refusal is Refusal.NEVER_TOGETHER for view in views):
        yield "its containers asked for less, or were pods of their own"
