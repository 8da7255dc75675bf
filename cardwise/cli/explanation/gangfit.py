"""Tells whether a pending gang could ever start: on empty cards, and within its namespace's quotas."""

from collections.abc import Sequence
from typing import Final

from cardwise.cli.explanation.blockers import PodContext
from cardwise.core.api import quotas
from cardwise.core.api.quotas import NO_CHARGE
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.preemption import explanation
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json
from cardwise.kube.clusterstate import ClusterState

_MAX_MEMBERS: Final = 32  # maximum number of a gang's pods that are tried: more would take seconds on a big cluster
_MAX_LISTED_NODES: Final = 3  # maximum number of nodes with the same refusal that one line names


def find_obstacles(
    pod: Json,
    pod_request: PodRequest,
    cluster_state: ClusterState,
    *,
    nodes: Sequence[str],
    policy: str,
    context: PodContext,
) -> list[str]:
    """Explain why the pod's gang could never start, even on empty cards.

    Empty if the gang could start, or if cards are reserved for it.

    nodes: the nodes with cards that the pod may use.
    """
    if not context.pending_members or context.is_planned:
        return []
    namespace = pod["metadata"]["namespace"]
    members = {pod["metadata"]["name"]: pod_request, **context.pending_members}
    needed = context.missing_members or len(members)
    lines = _find_exceeded_quotas(namespace, members, cluster_state) if needed >= len(members) else []
    names = list(members)[:_MAX_MEMBERS]
    all_nodes = [node.name for node in cluster_state.ledger.nodes()]
    nodes_by_member = [
        nodes if i == 0 else [node for node in all_nodes if node in context.reachable_nodes.get(name, all_nodes)]
        for i, name in enumerate(names)
    ]
    bound_uids = {
        holding.uid
        for holding in cluster_state.ledger.holdings()
        if holding.namespace == namespace and holding.name in context.bound_members
    }
    requests = [members[name] for name in names]
    fitting_count, first_misfit = explanation.place_on_empty(
        cluster_state.ledger, requests, nodes_by_member, policy, excluded_uids=bound_uids
    )
    if first_misfit is None or fitting_count >= min(needed, len(names)):
        return lines
    nodes_by_text: dict[str, list[str]] = {}
    for node, refusal in first_misfit.refusals.items():
        nodes_by_text.setdefault(refusal.text, []).append(node)
    reasons = "; ".join(
        f"{wording.enumerate_first(node_names, _MAX_LISTED_NODES, 'node')}: {text}"
        for text, node_names in nodes_by_text.items()
    )
    reasons = reasons or "it may run on no node with GPUs"
    name = names[first_misfit.index]
    if first_misfit.fits_nowhere:
        lines.append(f"Its gang cannot start: member {name} would not fit even if every GPU were empty ({reasons}).")
    else:
        lines.append(
            "Its gang would not fit as a whole even if every GPU were empty: placed one after another, "
            f"{fitting_count} of its "
            f"{len(names)} waiting members fit, but {needed} must; {name} does not fit ({reasons})."
        )
    return lines


def _find_exceeded_quotas(namespace: str, members: dict[str, PodRequest], cluster_state: ClusterState) -> list[str]:
    """Return the entries of GPUQuotas whose hard amounts the members exceed together.

    Each entry counts only the requests of its own class. The MiB of whole cards are unknown.
    """
    lines = []
    card_requests = [
        card_request for pod_request in members.values() for card_request in fitting.card_requests(pod_request)
    ]
    for quota, headroom in cluster_state.quota_headroom(namespace):
        entry = headroom.entry
        covers_all = not (entry.resource_class or entry.model)
        covered_requests = [
            card_request
            for card_request in card_requests
            if covers_all or card_request.resource_class == entry.resource_class != ""
        ]
        charge = quotas.sum_charges(card_request.charge(card_request.cards, 0) for card_request in covered_requests)
        lines += [
            f"Its gang cannot start: its {len(members)} waiting members request {limit.requested} {limit.unit} of "
            f"{quotas.entry_title(entry)} together, and GPUQuota {quota.name} allows {limit.hard}."
            for limit in quotas.exceeded_limits(entry, NO_CHARGE, charge)
        ]
    return lines
