"""Explains why a pod waits or where it could go, with the names and numbers that refusal texts must not have.

And what would have to change for it to run, by the same search that finds whom preemption evicts.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cardwise.core.api.quotas import NOTHING, Charge, Entry, Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.devices import WantedDevices
from cardwise.core.placement.fitting import Claim
from cardwise.core.placement.ledger import Holding, Ledger, Undo
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import preemption
from cardwise.core.values.quantity import MiB
from cardwise.core.values.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class CardView:
    """A card with its holders. `short` is how many MiB are missing for the request, 0 where it fits.

    `closed` says why the card is not for the request, whatever is free on it: "type", "mps", "quota", or "" where it
    is.
    """

    index: int
    uuid: str
    model: str
    classes: frozenset[str]
    healthy: bool
    cordoned: bool
    total: int
    free: int
    short: int
    closed: str
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesView:
    """The devices of one class on a node, of which the request asks for `asked`, and who holds some of them.

    A device may be in several classes, and then it is free in each.
    """

    device_class: str
    asked: int
    free: int
    healthy: int
    total: int
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node for a request: its score under the policy, or the refusal, each card, and each class of devices asked for.

    There are no cards to see for a request that asks for devices only. `roomy`: it has what the pod takes beside cards,
    as far as anybody has looked.
    """

    name: str
    score: int | None
    roomy: bool
    refusal: Refusal | None
    cards: tuple[CardView, ...]
    devices: tuple[DevicesView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The node where least has to go for the request: its cards of these indices, once these pods have ended.

    `short`: MiB that are missing on them. Without holders, those that are ending already are enough.
    """

    node: str
    cards: tuple[int, ...]
    short: int
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Smaller:
    """What could be asked for instead: MiB over all its cards, and where that would be placed now."""

    mem: MiB
    node: str
    cards: tuple[int, ...]


_LOOKED_AT: Final = 64  # nodes, those with the least missing on a card, for whom should go
_PLENTY: Final = Load(1 << 60, 1 << 60, 1 << 30)  # what nodes have beside cards: that is not asked here


def explain(
    ledger: Ledger,
    nodes: Iterable[str],
    request: PodRequest,
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    ranked: Mapping[str, int] | None = None,
) -> list[NodeView]:
    """Every node for the request, the best first, refused ones last.

    `ranked`: how good the engine finds each node that takes the pod, where the policy compares all nodes.
    """
    scorer = placement.Scorer(request, policy, headroom)
    wanted = WantedDevices(request.devices).counts
    views = []
    for name in nodes:
        node = ledger.node(name)
        score = scorer.score(node)
        refused = isinstance(score, Refusal)
        roomy = ranked is None or name in ranked
        if ranked is not None and not refused:
            score = ranked.get(name, score)
        views.append(
            NodeView(
                name=name,
                score=None if isinstance(score, Refusal) else score,
                roomy=roomy,
                refusal=score if isinstance(score, Refusal) else None,
                cards=_cards(ledger, node, request, headroom, refused=refused) if node and request.containers else (),
                devices=tuple(_devices(ledger, node, one, asked) for one, asked in wanted.items()) if node else (),
            )
        )
    return sorted(views, key=lambda view: (view.score is None, not view.roomy, -(view.score or 0), view.name))


def nearest(
    ledger: Ledger,
    views: Iterable[NodeView],
    request: PodRequest,
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    kept: Collection[str] = (),
) -> Nearest | None:
    """Where the fewest pods would have to end, of equal ones those with the least memory; None where that helps not.

    `views`: of the nodes that have refused it. `kept`: UIDs of those that are not asked. Priorities and disruption
    budgets play no part: people are asked.
    """
    nothing = Load(0, 0, 0)
    newcomer = preemption.Newcomer(request=request, load=nothing, priority=1, policy=policy, headroom=headroom)
    refused = [view for view in views if view.refusal is not None and view.refusal.resolvable]
    found = []
    for view in sorted(refused, key=lambda view: (_least_short(view), view.name))[:_LOOKED_AT]:
        node = ledger.node(view.name)
        here = {holding.uid: holding for holding in ledger.holdings(view.name) if holding.uid not in kept}
        residents = [preemption.Resident(h.uid, 0, Load(0, 0, 0), h, going=bool(h.mark)) for h in here.values()]
        victims = preemption.best(preemption.Full(node=node, left=_PLENTY, residents=residents), newcomer)
        if node is None or victims is None:
            continue
        holders = tuple(sorted((here[uid] for uid in victims.uids), key=lambda h: (h.namespace, h.name)))
        chosen = victims.assignment.indices() if victims.assignment is not None else ()
        cards = [card for card in view.cards if card.index in chosen]
        found.append(
            Nearest(
                node=view.name,
                cards=tuple(card.index for card in cards),
                short=sum(card.short for card in cards),
                holders=holders,
            )
        )
    return min(found, key=lambda one: (len(one.holders), sum(h.assignment.mem for h in one.holders)), default=None)


def smaller(
    ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str, headroom: Sequence[Headroom] = ()
) -> Smaller | None:
    """The most that the request could ask for instead and be placed now; None where it is not for one share alone."""
    if len(request.containers) != 1 or request.devices or request.containers[0].whole:
        return None
    (asked,) = request.containers
    found = []
    for name in nodes:
        node = ledger.node(name)
        open_ = [] if node is None else [
            node.free[i]
            for i, card in enumerate(node.cards)
            if card.takes and not fitting.served(node, i, request, headroom)[1]
        ]  # fmt: skip
        each = sorted(open_, reverse=True)[asked.cards - 1 : asked.cards]
        found += [(free, name) for free in each if 0 < free < asked.mem_per_card]
    for free, name in sorted(found, key=lambda one: (-one[0], one[1]))[:_LOOKED_AT]:
        less = replace(request, containers=(replace(asked, mem=MiB(free * asked.cards)),))
        placed = placement.place_on(ledger.node(name), less, policy, headroom)
        if not isinstance(placed, Refusal):
            return Smaller(MiB(free * asked.cards), name, tuple(placed.assignment.indices()))
    return None


def together(
    ledger: Ledger,
    nodes: Sequence[str],
    requests: Sequence[PodRequest],
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    kept: Collection[str] = (),
) -> tuple[Holding, ...] | None:
    """Who would have to end so that all these requests are placed, one after another; None where that helps not.

    `kept`: as `nearest`. The ledger is as before afterwards.
    """
    undo: list[Undo] = []
    gone: list[Holding] = []
    placed: list[str] = []
    try:
        for i, request in enumerate(requests):
            views = explain(ledger, nodes, request, policy, headroom)
            where = next((view.name for view in views if view.refusal is None), "")
            if not where:
                near = nearest(ledger, views, request, policy, headroom, kept=[*kept, *placed])
                if near is None:
                    return None
                gone += near.holders
                undo += [ledger.release(holding.uid) for holding in near.holders]
                where = near.node
            found = placement.place_on(ledger.node(where), request, policy, headroom)
            if isinstance(found, Refusal):
                return None
            placed.append(f"member/{i}")
            undo.append(
                ledger.hold(Holding(placed[-1], "", "", where, found.assignment, mps_client=request.mps_client))
            )
    finally:
        for back in reversed(undo):
            back()
    return tuple(gone)


def _least_short(view: NodeView) -> int:
    """Of its cards that may serve the request."""
    return min((card.short for card in view.cards if not card.closed), default=0)


def _cards(
    ledger: Ledger, node: NodeState, request: PodRequest, headroom: Sequence[Headroom], *, refused: bool
) -> tuple[CardView, ...]:
    holders: dict[int, list[Holding]] = {}
    for holding in ledger.holdings(node.name):
        for position in {node.position(share) for share in holding.assignment.shares()} - {None}:
            holders.setdefault(position or 0, []).append(holding)
    views = []
    for i, card in enumerate(node.cards):
        claims, closed = fitting.served(node, i, request, headroom)
        views.append(
            CardView(
                index=card.index,
                uuid=card.uuid,
                model=card.model,
                classes=card.classes,
                healthy=card.healthy,
                cordoned=card.cordoned,
                total=card.mem,
                free=node.free[i],
                short=_short(node, i, claims) if refused and claims else 0,
                closed=closed,
                holders=tuple(holders.get(i, ())),
            )
        )
    return tuple(views)


def _devices(ledger: Ledger, node: NodeState, device_class: str, asked: int) -> DevicesView:
    here = [device for device in node.devices if device_class in device.classes]
    uuids = {device.uuid for device in here}
    return DevicesView(
        device_class=device_class,
        asked=asked,
        free=sum(device.takes and device.uuid not in node.taken for device in here),
        healthy=sum(device.healthy for device in here),
        total=len(here),
        holders=tuple(
            holding
            for holding in ledger.holdings(node.name)
            if any(share.uuid in uuids for share in holding.assignment.device_shares())
        ),
    )


def _short(node: NodeState, i: int, claims: Sequence[fitting.Claim]) -> int:
    """MiB that are missing on the card for the largest share; whole cards are short of whatever others hold."""
    largest = max(claim.mem for claim in claims)
    return max(0, largest - node.free[i]) if largest else node.used[i]


def exceeding(claims: Sequence[Claim], headroom: Headroom, ledger: Ledger) -> tuple[Charge, bool] | None:
    """What the pod would take at least of an entry that has not so much left; and whether it can get no other cards.

    None where the entry is not in its way.
    """
    bound, loose = NOTHING, []
    for claim in claims:
        if ledger.kinds.allowed(claim.device_class, (headroom.entry,)) == frozenset():
            bound = bound.plus(_least(claim, claim.cards, headroom.entry, ledger))
        else:  # one of its cards at least would be of the entry, the others need not
            loose.append(_least(claim, 1, headroom.entry, ledger))
    if not headroom.takes(bound):
        return bound, True
    return next(((bound.plus(one), False) for one in loose if not headroom.takes(bound.plus(one))), None)


def _least(claim: Claim, cards: int, entry: Entry, ledger: Ledger) -> Charge:
    """What so many cards for the claim charge the entry that counts them; nothing where it can have none of those."""
    sizes = list(_sizes(claim, entry, ledger, empty=claim.whole)) or list(_sizes(claim, entry, ledger, empty=False))
    if not sizes:
        return NOTHING
    holds = cards * len(claim.keys)
    if claim.whole:
        return Charge(holds, cards * min(sizes), cards)
    return Charge(holds, cards * claim.mem, 0)


def _sizes(claim: Claim, entry: Entry, ledger: Ledger, *, empty: bool) -> Iterator[int]:
    """MiB of the cards, or of those nobody holds, that the claim may have and the entry counts."""
    for node in ledger.nodes():
        for i, card in enumerate(node.cards):
            of_class = not claim.device_class or claim.device_class in card.classes
            if of_class and entry.covers(card.classes, card.model) and (node.empty(i) or not empty):
                yield card.mem - node.kept_back
