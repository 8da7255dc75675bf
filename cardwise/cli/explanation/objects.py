"""The JSON of `cardwise explain`: the text in lines, and each node and card with its numbers."""

from cardwise.cli.explanation import blockers
from cardwise.core.api import assignment, names, request
from cardwise.core.preemption import explanation
from cardwise.core.preemption.explanation import CardView, NodeView
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube.clusterstate import ClusterState


def as_json(pod: Json, cluster_state: ClusterState | None, policy: str, text: str) -> Json:
    """Return the JSON of an explanation.

    For a pending pod, the JSON has the nodes, if cards may be read; for a placed pod, the pod's cards.

    text: the explanation for people.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    is_pending = not spec.get("nodeName") and status.get("phase") not in names.FINISHED_PHASES
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "phase": status.get("phase"),
        "node": spec.get("nodeName"),
        "gpus": _shares_as_json(pod) if spec.get("nodeName") else [],
        "nodes": _nodes_as_json(pod, cluster_state, policy) if is_pending and cluster_state is not None else [],
        "text": text.splitlines(),
    }


def _shares_as_json(pod: Json) -> list[Json]:
    try:
        pod_assignment = assignment.decode(annotations_of(pod))
    except assignment.InvalidAssignment:
        return []  # the text output reports the error
    container_names = {share.key: share.spec.get("name") for share in request.containers(pod)}
    return [
        {
            "container": container_names.get(key) or key,
            "index": share.index,
            "uuid": share.uuid,
            "memoryMiB": share.mem,
            "corePercent": share.core,
        }
        for key, shares in (pod_assignment.containers.items() if pod_assignment is not None else ())
        for share in shares
    ]


def _nodes_as_json(pod: Json, cluster_state: ClusterState, policy: str) -> list[Json]:
    try:
        pod_request = request.parse_mutated(pod)
    except InvalidRequest:
        return []  # the text output reports the error
    if pod_request is None:
        return []
    headroom = [entry_headroom for _, entry_headroom in cluster_state.quota_headroom(pod["metadata"]["namespace"])]
    ledger, only_node = cluster_state.ledger, blockers.daemonset_node(pod)
    node_names = [node.name for node in ledger.nodes() if only_node in (None, node.name)]
    views = explanation.explain(ledger, node_names, pod_request, policy, headroom)
    return [_node_as_json(view) for view in views]


def _node_as_json(view: NodeView) -> Json:
    return {
        "name": view.name,
        "fits": view.refusal is None,
        "reason": "" if view.refusal is None else view.refusal.text,
        "gpus": [_card_as_json(card) for card in view.cards],
        "devices": [
            {"class": device.resource_class, "requested": device.requested, "free": device.free, "total": device.total}
            for device in view.devices
        ],
    }


def _card_as_json(card: CardView) -> Json:
    return {
        "index": card.index,
        "uuid": card.uuid,
        "model": card.model,
        "freeMiB": card.free,
        "totalMiB": card.total,
        "shortMiB": card.missing_mib,
        "unavailableReason": card.closed or "",
        "healthy": card.healthy,
        "cordoned": card.cordoned,
        "pods": [{"namespace": holding.namespace, "name": holding.name} for holding in card.holders],
    }
