"""The nodes on which kube-scheduler might put a pod, by what can be said without the other pods.

Node selector, required node affinity, taints. What depends on other pods, ports or volumes only kube-scheduler knows.
"""

from collections.abc import Iterable, Sequence

from cardwise.core.values.decoded import Json
from cardwise.kube.pods import nodeconstraints
from cardwise.kube.pods.nodeconstraints import REQUIRED, NodeLabels


def other_constraint(pod: Json) -> str:
    """What besides its nodes decides where the pod may be, in a few words; "" where nothing does."""
    spec = pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    if any((affinity.get(kind) or {}).get(REQUIRED) for kind in ("podAffinity", "podAntiAffinity")):
        return "affinity to other pods"
    if any(
        constraint.get("whenUnsatisfiable") != "ScheduleAnyway"
        for constraint in spec.get("topologySpreadConstraints") or ()
    ):
        return "spreading over nodes"
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    if spec.get("hostNetwork") or any(port.get("hostPort") for c in containers for port in c.get("ports") or ()):
        return "ports of the node"
    if any("persistentVolumeClaim" in volume or "ephemeral" in volume for volume in spec.get("volumes") or ()):
        return "volumes"
    if spec.get("resourceClaims"):
        return "claims of devices"
    return ""


def count_conditions(spec: Json) -> int:
    """How many are compared of a node to find out whether a pod of this spec may be on it; 0 where it may be on any."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or ()
    listed = [
        expression
        for term in terms
        for key in ("matchExpressions", "matchFields")
        for expression in term.get(key) or ()
    ]
    return len(spec.get("nodeSelector") or {}) + sum(1 + len(expression.get("values") or ()) for expression in listed)


def eligible_nodes(pod: Json, there: Iterable[Json]) -> frozenset[str]:
    """The names of those that the pod may be on."""
    may = nodeconstraints.constraints_of(pod.get("spec") or {})
    return frozenset(
        node["metadata"]["name"] for node in there if may.admits(node["metadata"]["name"], NodeLabels.from_node(node))
    )


def is_node_eligible(node: Json, pod: Json) -> bool:
    """Whether the pod may be on the node."""
    return bool(eligible_nodes(pod, [node]))


def untolerated_taints(node: Json, tolerations: Sequence[Json]) -> list[str]:
    """The node's taints that keep a pod away which has these tolerations, as `kubectl taint` spells them."""
    pod = nodeconstraints.constraints_of({"tolerations": tolerations})
    return [str(taint) for taint in pod.untolerated_taints(NodeLabels.from_node(node))]
