"""Explains why a pod is pending or where it could run, with the names and numbers that refusals leave out.

This module also finds changes that would let the pod run: pods that would have to end (with the search of preemption)
and smaller requests.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cardwise.core.api.quotas import NO_CHARGE, Charge, Headroom, QuotaEntry
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.devices import WantedDevices
from cardwise.core.placement.fitting import CardClosed, CardRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import preemption
from cardwise.core.values.quantity import MiB
from cardwise.core.values.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class CardView:
    """A card with its holders.

    missing_mib: the MiB that are missing on the card for the request; 0 if there is enough.
    closed: why the request cannot use the card, regardless of free memory; None if it can.
    """

    index: int
    uuid: str
    model: str
    classes: frozenset[str]
    healthy: bool
    cordoned: bool
    total: int
    free: int
    missing_mib: int
    closed: CardClosed | None
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesView:
    """The devices of one class on a node, and the pods that hold some of these devices.

    requested: the number of devices of the class that the request needs.

    A device that is in several classes counts in each of them.
    """

    resource_class: str
    requested: int
    free: int
    healthy: int
    total: int
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as a candidate for a request.

    score: the node's score under the policy; None if the node is refused.
    has_free_load: whether the node has enough cpu and memory for the pod; True if unknown.
    refusal: why the node cannot take the pod; None if it can.
    cards: the node's cards; empty for a request of devices only.
    devices: one entry for each requested class of devices.
    """

    name: str
    score: int | None
    has_free_load: bool
    refusal: Refusal | None
    cards: tuple[CardView, ...]
    devices: tuple[DevicesView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapestNode:
    """The node where the fewest pods would have to end for the request.

    cards: the indices of the cards.
    missing_mib: the MiB that are missing on these cards.
    holders: the pods that would have to end; empty if pods that are ending already free enough.
    """

    node: str
    cards: tuple[int, ...]
    missing_mib: int
    holders: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class SmallerRequest:
    """The largest request that could be placed now.

    mem: MiB over all its cards.
    node: the node where the smaller request could be placed.
    cards: the indices of the cards there.
    """

    mem: MiB
    node: str
    cards: tuple[int, ...]


_MAX_SEARCHED_NODES: Final = 64  # nodes that one search tries: those where the least MiB are missing
_UNLIMITED_LOAD: Final = Load(1 << 60, 1 << 60, 1 << 30)  # the free cpu, memory and pod slots: ignored here


def explain(
    ledger: Ledger,
    nodes: Iterable[str],
    request: PodRequest,
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    ranked: Mapping[str, int] | None = None,
) -> list[NodeView]:
    """A view of each node for the request, the best node first, refused nodes last.

    ranked: for a scored policy, the engine's score of each node where the pod fits; None for other policies.
    """
    scorer = placement.Scorer(ledger.kinds, request, policy, headroom)
    device_counts = WantedDevices(request.devices).counts
    views = []
    for name in nodes:
        node = ledger.node(name)
        score = scorer.score(node)
        is_refused = isinstance(score, Refusal)
        has_free_load = ranked is None or name in ranked
        if ranked is not None and not is_refused:
            score = ranked.get(name, score)
        views.append(
            NodeView(
                name=name,
                score=None if isinstance(score, Refusal) else score,
                has_free_load=has_free_load,
                refusal=score if isinstance(score, Refusal) else None,
                cards=_card_views(ledger, node, request, headroom, is_refused=is_refused)
                if node and request.containers
                else (),
                devices=tuple(
                    _devices_view(ledger, node, resource_class, requested)
                    for resource_class, requested in device_counts.items()
                )
                if node
                else (),
            )
        )
    return sorted(views, key=lambda view: (view.score is None, not view.has_free_load, -(view.score or 0), view.name))


def find_cheapest_node(
    ledger: Ledger,
    views: Iterable[NodeView],
    request: PodRequest,
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    excluded_uids: Collection[str] = (),
) -> CheapestNode | None:
    """The node where the fewest pods would have to end for the request; of equal choices, the node whose pods hold the
    least memory. None if no choice helps, or if the search ends early because its effort is limited
    (`preemption.least_harmful_victims`).

    views: the nodes, as `explain` returns them; only nodes that refused the request are searched.
    excluded_uids: UIDs of pods that must not end.

    Priorities and disruption budgets do not matter, because a person decides.
    """
    no_load = Load(0, 0, 0)
    newcomer = preemption.Preemptor(request=request, load=no_load, priority=1, policy=policy, headroom=headroom)
    refusing_views = [view for view in views if view.refusal is not None and view.refusal.resolvable]
    options = []
    for view in sorted(refusing_views, key=lambda view: (_min_missing_mib(view), view.name))[:_MAX_SEARCHED_NODES]:
        node = ledger.node(view.name)
        holdings = {holding.uid: holding for holding in ledger.holdings(view.name) if holding.uid not in excluded_uids}
        residents = [
            preemption.Resident(h.uid, 0, Load(0, 0, 0), h, is_leaving=bool(h.phase_name)) for h in holdings.values()
        ]
        victims = preemption.least_harmful_victims(
            preemption.FullNode(kinds=ledger.kinds, node=node, free=_UNLIMITED_LOAD, residents=residents), newcomer
        )
        if node is None or victims is None:
            continue
        holders = tuple(sorted((holdings[uid] for uid in victims.uids), key=lambda h: (h.namespace, h.name)))
        card_indices = victims.assignment.indices() if victims.assignment is not None else ()
        cards = [card for card in view.cards if card.index in card_indices]
        options.append(
            CheapestNode(
                node=view.name,
                cards=tuple(card.index for card in cards),
                missing_mib=sum(card.missing_mib for card in cards),
                holders=holders,
            )
        )
    return min(
        options, key=lambda option: (len(option.holders), sum(h.assignment.mem for h in option.holders)), default=None
    )


def find_smaller_request(
    ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str, headroom: Sequence[Headroom] = ()
) -> SmallerRequest | None:
    """The largest request like this one that could be placed now; None if no smaller request would fit. Also None for
    requests of several containers, whole cards or devices.
    """
    if len(request.containers) != 1 or request.devices or request.containers[0].whole:
        return None
    (container,) = request.containers
    candidates = []
    for name in nodes:
        node = ledger.node(name)
        free_amounts = [] if node is None else [
            node.free[i]
            for i, card in enumerate(node.cards)
            if card.accepts_shares
            and not isinstance(fitting.servable_requests(ledger.kinds, node, i, request, headroom), CardClosed)
        ]  # fmt: skip
        free_for_all = sorted(free_amounts, reverse=True)[container.cards - 1 : container.cards]
        candidates += [(free, name) for free in free_for_all if 0 < free < container.mem_per_card]
    for free, name in sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1]))[:_MAX_SEARCHED_NODES]:
        smaller_request = replace(request, containers=(replace(container, mem=MiB(free * container.cards)),))
        pod_placement = placement.place_on(ledger.kinds, ledger.node(name), smaller_request, policy, headroom)
        if not isinstance(pod_placement, Refusal):
            return SmallerRequest(MiB(free * container.cards), name, tuple(pod_placement.assignment.indices()))
    return None


def pods_in_the_way(
    ledger: Ledger,
    nodes: Sequence[str],
    requests: Sequence[PodRequest],
    policy: str,
    headroom: Sequence[Headroom] = (),
    *,
    excluded_uids: Collection[str] = (),
) -> tuple[Holding, ...] | None:
    """The pods that would have to end before all these requests fit, placed one after another; None if no pods are
    enough.

    excluded_uids: as in `find_cheapest_node`.
    """
    ledger = ledger.snapshot()
    ending_pods: list[Holding] = []
    placed_uids: list[str] = []
    for i, request in enumerate(requests):
        views = explain(ledger, nodes, request, policy, headroom)
        node_name = next((view.name for view in views if view.refusal is None), "")
        if not node_name:
            cheapest = find_cheapest_node(
                ledger, views, request, policy, headroom, excluded_uids=[*excluded_uids, *placed_uids]
            )
            if cheapest is None:
                return None
            ending_pods += cheapest.holders
            for holding in cheapest.holders:
                ledger.release(holding.uid)
            node_name = cheapest.node
        placed_pod = placement.place_on(ledger.kinds, ledger.node(node_name), request, policy, headroom)
        if isinstance(placed_pod, Refusal):
            return None
        placed_uids.append(f"member/{i}")
        ledger.set_holding(
            Holding(placed_uids[-1], "", "", node_name, placed_pod.assignment, mps_client=request.mps_client)
        )
    return tuple(ending_pods)


@dataclass(frozen=True, slots=True)
class UnplaceableOnEmpty:
    """A request that cannot be placed although all cards are empty.

    index: the position of the request in the sequence.
    fits_nowhere: whether the request does not fit even alone; if False, earlier requests use the cards.
    refusals: by node, why the request does not fit there.
    """

    index: int
    fits_nowhere: bool
    refusals: Mapping[str, Refusal]


def place_on_empty(
    ledger: Ledger,
    requests: Sequence[PodRequest],
    nodes: Sequence[Sequence[str]],
    policy: str,
    *,
    excluded_uids: Collection[str] = (),
) -> tuple[int, UnplaceableOnEmpty | None]:
    """The number of these requests that could run at once on empty cards, and the first request that could not; None if
    all could.

    The requests are placed one after another, each on the node that the policy prefers; other orders are not tried.
    Quotas are ignored.

    nodes: for each request, the nodes that its pod may be on.
    excluded_uids: UIDs of pods that keep their cards.
    """
    empty = ledger.snapshot()
    for holding in ledger.holdings():
        if holding.uid not in excluded_uids:
            empty.release(holding.uid)
    filled, count = empty.snapshot(), 0
    first_misfit: tuple[int, dict[str, Refusal]] | None = None
    for i, request in enumerate(requests):
        best, refusals = _best_node(filled, nodes[i], request, policy)
        placed_pod = (
            placement.place_on(filled.kinds, filled.node(best), request, policy, ()) if best is not None else None
        )
        if best is None or placed_pod is None or isinstance(placed_pod, Refusal):
            first_misfit = first_misfit or (i, refusals)
            continue
        filled.set_holding(Holding(f"member/{i}", "", "", best, placed_pod.assignment, mps_client=request.mps_client))
        count += 1
    if first_misfit is None:
        return count, None
    index, refusals = first_misfit
    best, refusals_alone = _best_node(empty, nodes[index], requests[index], policy)
    return count, UnplaceableOnEmpty(
        index, fits_nowhere=best is None, refusals=refusals_alone if best is None else refusals
    )


def _best_node(
    ledger: Ledger, nodes: Iterable[str], request: PodRequest, policy: str
) -> tuple[str | None, dict[str, Refusal]]:
    """The refusals by node, and the node that the policy prefers for the request; None if no node fits."""
    scorer = placement.Scorer(ledger.kinds, request, policy, ())
    scores = {name: scorer.score(ledger.node(name)) for name in nodes}
    refusals = {name: score for name, score in scores.items() if isinstance(score, Refusal)}
    taking = {name: score for name, score in scores.items() if not isinstance(score, Refusal)}
    return max(taking, key=lambda name: (taking[name], name), default=None), refusals


def _min_missing_mib(view: NodeView) -> int:
    """The smallest number of missing MiB on any card that the request may use."""
    return min((card.missing_mib for card in view.cards if not card.closed), default=0)


def _card_views(
    ledger: Ledger, node: NodeState, request: PodRequest, headroom: Sequence[Headroom], *, is_refused: bool
) -> tuple[CardView, ...]:
    holders: dict[int, list[Holding]] = {}
    for holding in ledger.holdings(node.name):
        for position in {node.position(share) for share in holding.assignment.shares()} - {None}:
            holders.setdefault(position or 0, []).append(holding)
    views = []
    for i, card in enumerate(node.cards):
        servable = fitting.servable_requests(ledger.kinds, node, i, request, headroom)
        card_requests, closed = ([], servable) if isinstance(servable, CardClosed) else (servable, None)
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
                missing_mib=_missing_mib(node, i, card_requests) if is_refused and card_requests else 0,
                closed=closed,
                holders=tuple(holders.get(i, ())),
            )
        )
    return tuple(views)


def _devices_view(ledger: Ledger, node: NodeState, resource_class: str, requested: int) -> DevicesView:
    here = [device for device in node.devices if resource_class in device.classes]
    uuids = {device.uuid for device in here}
    return DevicesView(
        resource_class=resource_class,
        requested=requested,
        free=sum(map(node.is_free, here)),
        healthy=sum(device.healthy for device in here),
        total=len(here),
        holders=tuple(
            holding
            for holding in ledger.holdings(node.name)
            if any(share.uuid in uuids for share in holding.assignment.non_gpu_devices())
        ),
    )


def _missing_mib(node: NodeState, i: int, card_requests: Sequence[fitting.CardRequest]) -> int:
    """The MiB that are missing on the card for the largest share; for a whole card, the MiB that other pods hold."""
    largest = max(card_request.mem for card_request in card_requests)
    return max(0, largest - node.free[i]) if largest else node.used[i]


def find_exceeding_charge(
    card_requests: Sequence[CardRequest], headroom: Headroom, ledger: Ledger
) -> tuple[Charge, bool] | None:
    """The smallest charge of the pod that exceeds the remaining amount of a quota entry, and whether the pod can use no
    other cards.

    None if the pod does not exceed the entry.
    """
    bound, loose = NO_CHARGE, []
    for card_request in card_requests:
        if ledger.kinds.is_class_covered(card_request.resource_class, headroom.entry):
            bound = bound.add(_min_charge(card_request, card_request.cards, headroom.entry, ledger))
        else:  # at least one of its cards would count in the entry; its other cards need not
            loose.append(_min_charge(card_request, 1, headroom.entry, ledger))
    if not headroom.has_room_for(bound):
        return bound, True
    return next(
        (
            (bound.add(loose_charge), False)
            for loose_charge in loose
            if not headroom.has_room_for(bound.add(loose_charge))
        ),
        None,
    )


def _min_charge(card_request: CardRequest, cards: int, entry: QuotaEntry, ledger: Ledger) -> Charge:
    """A lower bound of the charge if this number of cards counts in the entry; `NO_CHARGE` if the entry covers no card
    that the request may use.
    """
    sizes = list(_card_sizes(card_request, entry, ledger, empty=card_request.whole)) or list(
        _card_sizes(card_request, entry, ledger, empty=False)
    )
    return card_request.charge(cards, min(sizes)) if sizes else NO_CHARGE


def _card_sizes(card_request: CardRequest, entry: QuotaEntry, ledger: Ledger, *, empty: bool) -> Iterator[int]:
    """Yield the MiB of each card that the card request may use and the entry covers.

    empty: whether to leave out cards with a share.
    """
    for node in ledger.nodes():
        for i, card in enumerate(node.cards):
            of_class = not card_request.resource_class or card_request.resource_class in card.classes
            if of_class and entry.covers(card.classes, card.model) and (node.is_empty(i) or not empty):
                yield node.usable[i]
