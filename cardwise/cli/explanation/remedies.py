"""Remedies in `explain`: the pods to delete, the card to uncordon, or the quota to raise so that a pending pod runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cardwise.cli.cluster import nodestates
from cardwise.cli.explanation import holdups
from cardwise.cli.explanation.holdups import PodSurroundings
from cardwise.core.api import names, quotas
from cardwise.core.api.mps import MODE, Mode
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting, totals
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.preemption import explanation
from cardwise.core.preemption.explanation import CardView, NodeView
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.core.values.refusals import Refusal
from cardwise.core.values.shellcommand import command
from cardwise.kube.survey import Survey

ENDING = "ending"  # the phase name of a pod that is deleted and whose containers may still run
_FEW = 5  # pods or cards named in one line
_LEAST = 256  # MiB: less is nothing to advise
_MEMBERS = 16  # of a gang, for whom room is looked for


def suggest_remedies(
    pod: Json,
    pod_request: PodRequest,
    survey: Survey,
    views: Sequence[NodeView],
    policy: str,
    *,
    avoided_nodes: Sequence[str],
    surroundings: PodSurroundings,
) -> list[str]:
    """One line for each remedy that is enough alone, the cheapest first; empty if the pod fits already.

    avoided_nodes: nodes with cards that the pod cannot use.
    """
    if any(view.refusal is None for view in views):
        return []
    namespace = pod["metadata"]["namespace"]
    headroom = [entry_headroom for _, entry_headroom in survey.quota_headroom(namespace)]
    suggestions = [
        *_suggest_less(pod_request, survey.ledger, views, policy, headroom),
        *_suggest_elsewhere(
            pod, explanation.explain(survey.ledger, avoided_nodes, pod_request, policy, headroom), surroundings
        ),
        *_suggest_without_mps(pod_request, survey.ledger, views, policy, headroom),
        *_suggest_withheld(pod_request, views),
        *_suggest_former(namespace, views, surroundings),
        *_suggest_holders(
            pod_request, survey.ledger, views, policy, headroom, namespace=namespace, surroundings=surroundings
        ),
        *_suggest_quotas(pod_request, namespace, survey),
        *_suggest_split(pod_request, survey.ledger, views),
        *_suggest_own_pods(views),
    ]
    return ["It would run if one of these were true:", *(f"  - {line}" for line in suggestions)] if suggestions else []


def describe_holder(holding: Holding, uuid: str = "") -> str:
    """A pod and what it holds, or what it holds of the card `uuid`. Terminating and deleted pods have a mark."""
    state_note = ", is ending" if holding.phase_name == ENDING else ", its pod is gone" if holding.phase_name else ""
    of_card = sum(share.mem for share in holding.assignment.shares() if share.uuid == uuid)
    return f"{holding.namespace}/{holding.name} ({of_card or holding.assignment.mem} MiB{state_note})"


def _suggest_less(
    pod_request: PodRequest, ledger: Ledger, views: Sequence[NodeView], policy: str, headroom: Sequence[Headroom]
) -> Iterator[str]:
    """The largest request that fits now, if any does."""
    smaller = explanation.find_smaller_request(ledger, [view.name for view in views], pod_request, policy, headroom)
    if smaller is not None and smaller.mem >= _LEAST:
        yield f"it requested at most {smaller.mem} MiB: that fits now, on {_name_cards(smaller.node, smaller.cards)}"


def _suggest_former(namespace: str, views: Sequence[NodeView], surroundings: PodSurroundings) -> Iterator[str]:
    """During a rolling update the new pod starts before the old one ends, which still holds the card."""
    holders = (
        holding for view in views for card in view.cards for holding in card.holders if holding.phase_name != ENDING
    )
    own_request = dict.fromkeys(
        holding.name for holding in holders if holding.namespace == namespace and holding.name in surroundings.former
    )
    if own_request:
        yield (
            f"its own previous replica ended ({wording.enumerate_first(list(own_request), _FEW, 'pod')}): "
            "write strategy.type: Recreate in "
            "the Deployment, or maxSurge: 0 with maxUnavailable: 1"
        )


def _suggest_holders(
    pod_request: PodRequest,
    ledger: Ledger,
    views: Sequence[NodeView],
    policy: str,
    headroom: Sequence[Headroom],
    *,
    namespace: str,
    surroundings: PodSurroundings,
) -> Iterator[str]:
    unmovable = {
        holding.uid
        for holding in ledger.holdings()
        if holding.namespace == namespace and holding.name in surroundings.siblings
    }
    if surroundings.partners:
        asking = [pod_request, *surroundings.partners.values()][:_MEMBERS]
        every = explanation.pods_in_the_way(
            ledger, [view.name for view in views], asking, policy, headroom, kept=unmovable
        )
        if every:
            holder_names = wording.enumerate_first([describe_holder(holding) for holding in every], _FEW, "pod")
            bare = _warn_bare_pods(every, surroundings)
            pods = len(surroundings.partners) + 1
            yield f"these ended, for all {pods} waiting pods of its gang: {holder_names}{bare}"
        return
    cheapest = explanation.find_cheapest_node(ledger, views, pod_request, policy, headroom, kept=unmovable)
    if cheapest is None:
        return
    if cheapest.holders and all(
        holding.namespace == namespace and holding.name in surroundings.former for holding in cheapest.holders
    ):
        return  # said with what to do about it
    place = _name_cards(cheapest.node, cheapest.cards)
    short = f", {cheapest.short} MiB short" if cheapest.short else ""
    if not cheapest.holders:
        yield f"the terminating pods on {cheapest.node} are gone: no other pod has to end"
        return
    holder_names = wording.enumerate_first([describe_holder(holding) for holding in cheapest.holders], _FEW, "pod")
    yield f"these ended ({place}{short}): {holder_names}{_warn_bare_pods(cheapest.holders, surroundings)}"


def _warn_bare_pods(holders: Sequence[Holding], surroundings: PodSurroundings) -> str:
    """Which of these pods no controller recreates, as the end of a sentence; "" for none."""
    bare = [f"{holding.namespace}/{holding.name}" for holding in holders if holding.uid in surroundings.bare]
    if not bare:
        return ""
    return (
        f"; no controller recreates {wording.enumerate_first(bare, _FEW, 'pod')}, so save their manifests first: "
        "kubectl get pod -o yaml"
    )


def _suggest_without_mps(
    pod_request: PodRequest, ledger: Ledger, views: Sequence[NodeView], policy: str, headroom: Sequence[Headroom]
) -> Iterator[str]:
    """A pod that requires MPS, and would run at once if it did not."""
    if pod_request.mps is not Mode.REQUIRED:
        return
    content = replace(pod_request, mps=Mode.PREFERRED)
    node_names = [view.name for view in views]
    fits = [
        view_without_mps.name
        for view_without_mps in explanation.explain(ledger, node_names, content, policy, headroom)
        if view_without_mps.refusal is None
    ]
    if fits:
        yield f"it had {MODE}: {Mode.PREFERRED} and so did not require MPS: that fits now, on {fits[0]}"


def _suggest_elsewhere(pod: Json, avoided_views: Sequence[NodeView], surroundings: PodSurroundings) -> Iterator[str]:
    """Nodes that would take the pod, if it did not exclude them."""
    free = [view.name for view in avoided_views if view.refusal is None]
    closed = holdups.blocking_states(pod, free, surroundings)
    for name, state in list(closed.items())[:_FEW]:
        yield f"node {name} were not {state} ({nodestates.suggest_remedy(state, name)}): its request fits there"
    # What a node's state keeps away as well would not run there for another selector alone.
    free = [name for name in free if name not in holdups.closed_states(pod, free, surroundings)]
    if free:
        causes = holdups.avoidance_reasons(pod, free, surroundings)
        yield (f"it did not exclude {wording.enumerate_first(free, _FEW, 'node')} by {causes}: its request fits there")


def _name_cards(node: str, indices: Sequence[int]) -> str:
    return f"GPU{'s' * (len(indices) > 1)} {', '.join(map(str, indices))} of {node}" if indices else node


def _suggest_withheld(pod_request: PodRequest, views: Sequence[NodeView]) -> Iterator[str]:
    """Cards that would do and that take nothing new."""
    for view in views:
        for card in view.cards:
            if not card.closed and _would_fit(pod_request, card):
                place = f"GPU {card.index} of {view.name}"
                if not card.healthy:
                    yield f"{place} became healthy: it has {card.free} MiB free"
                elif card.cordoned:
                    uncordon_command = command("cardwise uncordon {node}/{index}", node=view.name, index=card.index)
                    yield f"{place} were uncordoned (`{uncordon_command}`)"


def _would_fit(pod_request: PodRequest, card: CardView) -> bool:
    """Whether the card takes the whole request, were it given."""
    card_requests = fitting.card_requests(pod_request)
    if len(card_requests) != 1 or card_requests[0].cards != 1 or (card.healthy and not card.cordoned):
        return False
    return not card.holders if card_requests[0].whole else card.free >= card_requests[0].mem


def _suggest_quotas(pod_request: PodRequest, namespace: str, survey: Survey) -> Iterator[str]:
    """Each entry that the pod exceeds, and the pods that use most of it."""
    card_requests = fitting.card_requests(pod_request)
    for quota, headroom in survey.quota_headroom(namespace):
        if explanation.find_exceeding_charge(card_requests, headroom, survey.ledger) is None:
            continue
        charges = [
            (holding, totals.charge(survey.ledger, holding, headroom.entry).memory)
            for holding in survey.ledger.holdings()
        ]
        here = [(holding, mem) for holding, mem in charges if holding.namespace == namespace and mem]
        largest = sorted(here, key=lambda holding: (-holding[1], holding[0].name))
        quota_names = (
            (
                "; it is held by "
                f"{wording.enumerate_first([describe_holder(holding) for holding, _ in largest], _FEW, 'pod')}"
            )
            if largest
            else ""
        )
        yield f"GPUQuota {quota.name} left capacity on {quotas.title(headroom.entry)}{quota_names}"


def _suggest_split(pod_request: PodRequest, ledger: Ledger, views: Sequence[NodeView]) -> Iterator[str]:
    """Split the share, if no existing card could ever hold it."""
    shares = [container for container in pod_request.containers if not container.whole]
    impossible = {Refusal.CARD_TOO_SMALL, Refusal.NOT_OURS, Refusal.NO_SUCH_TYPE}
    if not shares or not views or {view.refusal for view in views} - impossible:
        return
    shares_asked = [card_request for card_request in fitting.card_requests(pod_request) if not card_request.whole]
    classes = {card_request.resource_class for card_request in shares_asked}
    may_be_on = {view.name for view in views}
    sizes = [
        card.mem - node.kept_back
        for node in ledger.nodes()
        if node.name in may_be_on
        for card in node.cards
        if all(not name or name in card.classes for name in classes)
    ]
    if sizes and max(card_request.mem for card_request in shares_asked) > max(sizes):
        split_hint = f"more than that can be split over GPUs with {names.GPU_COUNT}"
        size = f"{max(sizes)} MiB of a GPU, the size of the largest GPU that it may use"
        yield f"it requested at most {size}; {split_hint}"


def _suggest_own_pods(views: Sequence[NodeView]) -> Iterator[str]:
    """Use several pods, if the requests of one pod are too large for the cards of a node."""
    if any(view.refusal is Refusal.NEVER_TOGETHER for view in views):
        yield "its containers requested less, or were separate pods"
