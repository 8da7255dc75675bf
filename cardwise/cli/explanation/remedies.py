"""The remedies in `explain` that let a pod run, such as pods to delete, or a quota to raise."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cardwise.cli.cluster import nodestates
from cardwise.cli.explanation import blockers
from cardwise.cli.explanation.blockers import PodContext
from cardwise.core.api import names, quotas
from cardwise.core.api.isolation import Isolation
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
from cardwise.kube.clusterstate import ClusterState

ENDING_PHASE = "ending"  # the phase name of a pod that is deleted and whose containers may still run
_MAX_LISTED = 5  # maximum number of pods or cards named in one line
_MIN_SUGGESTED_MIB = 256  # a smaller request is not suggested
_MAX_MEMBERS = 16  # maximum number of a gang's pods for which free cards are searched


def suggest_remedies(
    pod: Json,
    pod_request: PodRequest,
    cluster_state: ClusterState,
    views: Sequence[NodeView],
    policy: str,
    *,
    avoided_nodes: Sequence[str],
    context: PodContext,
) -> list[str]:
    """Return one line for each remedy that suffices alone, the cheapest first; empty if the pod fits already.

    avoided_nodes: the nodes with cards that the pod cannot use.
    """
    if any(view.refusal is None for view in views):
        return []
    namespace = pod["metadata"]["namespace"]
    headroom = [entry_headroom for _, entry_headroom in cluster_state.quota_headroom(namespace)]
    suggestions = [
        *_suggest_smaller_request(pod_request, cluster_state.ledger, views, policy, headroom),
        *_suggest_other_nodes(
            pod, explanation.explain(cluster_state.ledger, avoided_nodes, pod_request, policy, headroom), context
        ),
        *_suggest_weaker_demand(pod_request, cluster_state.ledger, views, policy, headroom),
        *_suggest_unusable_cards(pod_request, views),
        *_suggest_recreate_strategy(namespace, views, context),
        *_suggest_deletions(
            pod_request, cluster_state.ledger, views, policy, headroom, namespace=namespace, context=context
        ),
        *_suggest_quotas(pod_request, namespace, cluster_state),
        *_suggest_split(pod_request, cluster_state.ledger, views),
        *_suggest_several_pods(views),
    ]
    return ["It would run if one of these were true:", *(f"  - {line}" for line in suggestions)] if suggestions else []


def describe_holder(holding: Holding, uuid: str = "") -> str:
    """Describe a pod and what it holds; terminating and deleted pods are marked.

    uuid: the only card to count; "" for all cards.
    """
    state_note = (
        ", is ending" if holding.phase_name == ENDING_PHASE else ", its pod is gone" if holding.phase_name else ""
    )
    card_mib = sum(share.mem for share in holding.assignment.shares() if share.uuid == uuid)
    return f"{holding.namespace}/{holding.name} ({card_mib or holding.assignment.mem} MiB{state_note})"


def _suggest_smaller_request(
    pod_request: PodRequest, ledger: Ledger, views: Sequence[NodeView], policy: str, headroom: Sequence[Headroom]
) -> Iterator[str]:
    """Suggest the largest request that fits now, if a smaller request fits."""
    smaller_request = explanation.find_smaller_request(
        ledger, [view.name for view in views], pod_request, policy, headroom
    )
    if smaller_request is not None and smaller_request.mem >= _MIN_SUGGESTED_MIB:
        yield (
            f"it requested at most {smaller_request.mem} MiB: that fits now, on "
            f"{_name_cards(smaller_request.node, smaller_request.cards)}"
        )


def _suggest_recreate_strategy(namespace: str, views: Sequence[NodeView], context: PodContext) -> Iterator[str]:
    """Suggest the strategy Recreate if the old pod of a rolling update holds the card until the new pod runs."""
    holders = (
        holding
        for view in views
        for card in view.cards
        for holding in card.holders
        if holding.phase_name != ENDING_PHASE
    )
    former_pods = dict.fromkeys(
        holding.name
        for holding in holders
        if holding.namespace == namespace and holding.name in context.former_replicas
    )
    if former_pods:
        yield (
            f"its own previous replica ended ({wording.enumerate_first(list(former_pods), _MAX_LISTED, 'pod')}): "
            "write strategy.type: Recreate in "
            "the Deployment, or maxSurge: 0 with maxUnavailable: 1"
        )


def _suggest_deletions(
    pod_request: PodRequest,
    ledger: Ledger,
    views: Sequence[NodeView],
    policy: str,
    headroom: Sequence[Headroom],
    *,
    namespace: str,
    context: PodContext,
) -> Iterator[str]:
    sibling_uids = {
        holding.uid
        for holding in ledger.holdings()
        if holding.namespace == namespace and holding.name in context.hopeless_pods
    }
    if context.pending_members:
        gang_requests = [pod_request, *context.pending_members.values()][:_MAX_MEMBERS]
        blocking_pods = explanation.pods_in_the_way(
            ledger, [view.name for view in views], gang_requests, policy, headroom, excluded_uids=sibling_uids
        )
        if blocking_pods:
            holder_names = wording.enumerate_first(
                [describe_holder(holding) for holding in blocking_pods], _MAX_LISTED, "pod"
            )
            bare_warning = _bare_pods_suffix(blocking_pods, context)
            pods = len(context.pending_members) + 1
            yield f"these ended, for all {pods} waiting pods of its gang: {holder_names}{bare_warning}"
        return
    cheapest_node = explanation.find_cheapest_node(
        ledger, views, pod_request, policy, headroom, excluded_uids=sibling_uids
    )
    if cheapest_node is None:
        return
    if cheapest_node.holders and all(
        holding.namespace == namespace and holding.name in context.former_replicas for holding in cheapest_node.holders
    ):
        return  # another line explains the old pod and its remedy
    place = _name_cards(cheapest_node.node, cheapest_node.cards)
    shortage = f", {cheapest_node.missing_mib} MiB short" if cheapest_node.missing_mib else ""
    if not cheapest_node.holders:
        yield f"the terminating pods on {cheapest_node.node} are gone: no other pod has to end"
        return
    holder_names = wording.enumerate_first(
        [describe_holder(holding) for holding in cheapest_node.holders], _MAX_LISTED, "pod"
    )
    yield f"these ended ({place}{shortage}): {holder_names}{_bare_pods_suffix(cheapest_node.holders, context)}"


def _bare_pods_suffix(holders: Sequence[Holding], context: PodContext) -> str:
    """Name the pods that no controller recreates, as the end of a sentence; empty for none."""
    bare_names = [f"{holding.namespace}/{holding.name}" for holding in holders if holding.uid in context.bare_uids]
    if not bare_names:
        return ""
    return (
        f"; no controller recreates {wording.enumerate_first(bare_names, _MAX_LISTED, 'pod')}, so save their "
        "manifests first: "
        "kubectl get pod -o yaml"
    )


def _suggest_weaker_demand(
    pod_request: PodRequest, ledger: Ledger, views: Sequence[NodeView], policy: str, headroom: Sequence[Headroom]
) -> Iterator[str]:
    """Suggest the strongest weaker demand of isolation with which the pod would run at once."""
    node_names = [view.name for view in views]
    for demand in (Isolation.MPS, Isolation.ADVISORY):
        if demand.strength >= pod_request.isolation.strength:
            continue
        weaker_views = explanation.explain(ledger, node_names, replace(pod_request, isolation=demand), policy, headroom)
        fitting_nodes = [view.name for view in weaker_views if view.refusal is None]
        if fitting_nodes:
            yield (
                f"it had {names.ISOLATION}: {demand} and so demanded less than {pod_request.isolation}: that fits now, "
                f"on {fitting_nodes[0]}, if the minimum of its namespace and of the cluster allow it"
            )
            return


def _suggest_other_nodes(pod: Json, avoided_views: Sequence[NodeView], context: PodContext) -> Iterator[str]:
    """Suggest nodes that have free cards for the pod but are excluded by the pod's own fields."""
    fitting_nodes = [view.name for view in avoided_views if view.refusal is None]
    blocking_states = blockers.find_blocking_states(pod, fitting_nodes, context)
    for name, state in list(blocking_states.items())[:_MAX_LISTED]:
        yield f"node {name} were not {state} ({nodestates.suggest_remedy(state, name)}): its request fits there"
    # A node whose state also keeps the pod away is not a remedy: another selector would not suffice.
    fitting_nodes = [
        name for name in fitting_nodes if name not in blockers.unschedulable_states(pod, fitting_nodes, context)
    ]
    if fitting_nodes:
        causes = blockers.avoidance_reasons(pod, fitting_nodes, context)
        yield (
            f"it did not exclude {wording.enumerate_first(fitting_nodes, _MAX_LISTED, 'node')} by {causes}: its "
            "request fits there"
        )


def _name_cards(node: str, indices: Sequence[int]) -> str:
    return f"GPU{'s' * (len(indices) > 1)} {', '.join(map(str, indices))} of {node}" if indices else node


def _suggest_unusable_cards(pod_request: PodRequest, views: Sequence[NodeView]) -> Iterator[str]:
    """Suggest cards on which the pod would fit, but that are cordoned or unhealthy."""
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
    """Whether the card could take the whole request if it took new pods."""
    card_requests = fitting.card_requests(pod_request)
    if len(card_requests) != 1 or card_requests[0].cards != 1 or (card.healthy and not card.cordoned):
        return False
    return not card.holders if card_requests[0].whole else card.free >= card_requests[0].mem


def _suggest_quotas(pod_request: PodRequest, namespace: str, cluster_state: ClusterState) -> Iterator[str]:
    """Suggest raising each entry of a GPUQuota that the pod exceeds, and name the pods that use most of it."""
    card_requests = fitting.card_requests(pod_request)
    for quota, headroom in cluster_state.quota_headroom(namespace):
        if explanation.find_exceeding_charge(card_requests, headroom, cluster_state.ledger) is None:
            continue
        charges = [
            (holding, totals.charge_to_entry(cluster_state.ledger, holding, headroom.entry).memory)
            for holding in cluster_state.ledger.holdings()
        ]
        own_holdings = [(holding, mem) for holding, mem in charges if holding.namespace == namespace and mem]
        largest = sorted(own_holdings, key=lambda holding: (-holding[1], holding[0].name))
        quota_names = (
            (
                "; it is held by "
                f"{wording.enumerate_first([describe_holder(holding) for holding, _ in largest], _MAX_LISTED, 'pod')}"
            )
            if largest
            else ""
        )
        yield f"GPUQuota {quota.name} left capacity on {quotas.entry_title(headroom.entry)}{quota_names}"


def _suggest_split(pod_request: PodRequest, ledger: Ledger, views: Sequence[NodeView]) -> Iterator[str]:
    """Suggest splitting the share if no existing card could ever hold it."""
    share_containers = [container for container in pod_request.containers if not container.whole]
    final_refusals = {Refusal.CARD_TOO_SMALL, Refusal.NOT_OURS, Refusal.NO_SUCH_TYPE}
    if not share_containers or not views or {view.refusal for view in views} - final_refusals:
        return
    share_requests = [card_request for card_request in fitting.card_requests(pod_request) if not card_request.whole]
    classes = {card_request.resource_class for card_request in share_requests}
    node_names = {view.name for view in views}
    sizes = [
        card.usable_mib(node.kept_back)
        for node in ledger.nodes()
        if node.name in node_names
        for card in node.cards
        if all(not name or name in card.classes for name in classes)
    ]
    if sizes and max(card_request.mem for card_request in share_requests) > max(sizes):
        split_hint = f"more than that can be split over GPUs with {names.GPU_COUNT}"
        size = f"{max(sizes)} MiB of a GPU, the size of the largest GPU that it may use"
        yield f"it requested at most {size}; {split_hint}"


def _suggest_several_pods(views: Sequence[NodeView]) -> Iterator[str]:
    """Suggest several pods if the requests of one pod are too large for the cards of a node."""
    if any(view.refusal is Refusal.NEVER_TOGETHER for view in views):
        yield "its containers requested less, or were separate pods"
