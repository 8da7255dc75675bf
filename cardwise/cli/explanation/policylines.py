"""Explains which placement policy decides for a pod, and how a policy that ranks nodes compares them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from cardwise.cli.cluster import published
from cardwise.cli.cluster.published import PublishedPolicy
from cardwise.core.api import names, policies, request
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.values import wording
from cardwise.core.values.decoded import Json, labels_of

_MAX_DOMAINS = 10  # the most domains named in one line


class NodeFacts(policies.NodeFacts):
    """The labels of the nodes, and the peers of a pod among the pods that the user may see.

    nodes: decoded Nodes.
    pods: decoded pods.
    """

    def __init__(self, pod: Json, pod_request: PodRequest, nodes: Iterable[Json], pods: Iterable[Json]) -> None:
        self._labels: dict[str, Mapping[str, str]] = {node["metadata"]["name"]: labels_of(node) for node in nodes}
        self._peers = Counter(
            other["spec"]["nodeName"]
            for other in pods
            if pod_request.peer_key and _is_running_peer(other, pod["metadata"].get("uid"), pod_request)
        )

    def labels(self, node: str) -> Mapping[str, str]:
        return self._labels.get(node, {})

    def peer_counts_by_node(self) -> Mapping[str, int]:
        return self._peers


def explain_policy(pod: Json, pod_request: PodRequest, settings: PublishedPolicy) -> str:
    """The sentence that names the policy of the pod, and the policy that decides in its place."""
    named, policy = pod_request.policy, published.policy_of_pod(pod, settings)
    source = "its annotation or its namespace's" if named else "the extender's setting"
    extender_note = " (assumed, since it is unknown here)" * bool(settings.note and policy == settings.policy)
    substitute = _substitute_suffix(pod, pod_request, policy)
    if named is None or named == policy:
        return f"Its placement policy is {policy}, from {source}{extender_note}{substitute}."
    return (
        f"Its placement policy is {named}, from {source}. Among equal nodes, and for the choice of GPUs, the "
        f"extender's policy {policy} decides{extender_note}{substitute}."
    )


def rank_nodes(pod_request: PodRequest, facts: NodeFacts, nodes: Collection[str]) -> dict[str, int]:
    """The rank of each node under the pod's policy; empty if the policy ranks no nodes."""
    policy = policies.find_policy(pod_request.policy) if pod_request.policy is not None else None
    if policy is None or policy.rank_nodes is None:
        return {}
    rank = policy.rank_nodes(policy.label, facts)
    return {node: rank(node) for node in nodes}


def explain_domains(pod_request: PodRequest, facts: NodeFacts, nodes: Collection[str]) -> list[str]:
    """The number of the pod's peers in each domain of its policy's label, the domain with the fewest peers first.
    Returns an empty list if the policy has no label.
    """
    policy = policies.find_policy(pod_request.policy) if pod_request.policy is not None else None
    if policy is None or not policy.takes_label:
        return []
    peer_counts_by_node, peers_by_domain = facts.peer_counts_by_node(), Counter[str]()
    unlabeled = 0
    for node in nodes:
        domain = facts.labels(node).get(policy.label)
        if domain is None:
            unlabeled += 1
        else:
            peers_by_domain[domain] += 0
    for node, peers in peer_counts_by_node.items():
        domain = facts.labels(node).get(policy.label)
        if domain is not None:
            peers_by_domain[domain] += peers
    by_domain = sorted(peers_by_domain.items(), key=lambda entry: (entry[1], entry[0]))
    texts = [f"{wording.quote_text(domain)} {peers}" for domain, peers in by_domain]
    unlabeled_note = f"; {wording.pluralize(unlabeled, 'node')} without this label come last" * bool(unlabeled)
    counts = wording.enumerate_first(texts, _MAX_DOMAINS, "domain") or "none"
    return [f"Bound pods of its gang or controller by {policy.label}: {counts}{unlabeled_note}."]


def _is_running_peer(other: Json, uid: str | None, pod_request: PodRequest) -> bool:
    metadata, status = other["metadata"], other.get("status") or {}
    return (
        metadata.get("uid") != uid
        and bool((other.get("spec") or {}).get("nodeName"))
        and not metadata.get("deletionTimestamp")
        and status.get("phase") not in names.FINISHED_PHASES
        and request.peer_key(other, pod_request.policy) == pod_request.peer_key
        and (metadata.get("annotations") or {}).get(names.POLICY) == pod_request.policy
    )


def _substitute_suffix(pod: Json, pod_request: PodRequest, policy: str) -> str:
    """Why `binpack` decides in place of a scored policy, for a reason that the pod shows, as the end of a
    sentence; empty if there is none.
    """
    if not policies.find_policy(policy).is_scored:
        return ""
    reasons: Sequence[tuple[bool, str]] = (
        (bool(labels_of(pod).get(names.GANG)), "it is a member of a gang"),
        (bool(pod_request.devices), "it requests devices other than GPUs"),
        (fitting.has_several_card_requests(pod_request), "it has several separate GPU requests"),
    )
    reason = next((text for applies, text in reasons if applies), None)
    return f"; {policies.FALLBACK_POLICY} decides in place of {policy}, since {reason}" if reason else ""
