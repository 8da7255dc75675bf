"""The nodes that are eligible for a pod by node selector, required node affinity and taints.

Constraints that depend on other pods, ports or volumes are not checked here; only kube-scheduler checks them.
"""

from collections.abc import Iterable, Sequence

from cardwise.core.values.decoded import Json
from cardwise.kube.pods import nodeconstraints
from cardwise.kube.pods.nodeconstraints import REQUIRED_AFFINITY_FIELD, NodeLabelsAndTaints


def other_constraint(pod: Json) -> str | None:
    """A constraint of the pod that only kube-scheduler checks, in a few words; None if there is none."""
    spec = pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    if any((affinity.get(kind) or {}).get(REQUIRED_AFFINITY_FIELD) for kind in ("podAffinity", "podAntiAffinity")):
        return "affinity to other pods"
    if any(
        constraint.get("whenUnsatisfiable") != "ScheduleAnyway"
        for constraint in spec.get("topologySpreadConstraints") or ()
    ):
        return "topology spread constraints"
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    if spec.get("hostNetwork") or any(port.get("hostPort") for c in containers for port in c.get("ports") or ()):
        return "host ports"
    if any("persistentVolumeClaim" in volume or "ephemeral" in volume for volume in spec.get("volumes") or ()):
        return "volumes"
    if spec.get("resourceClaims"):
        return "resource claims"
    return None


def count_conditions(spec: Json) -> int:
    """The number of conditions to check on each node for a pod with this spec. Tolerations are not counted."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED_AFFINITY_FIELD) or {}
    conditions = nodeconstraints.conditions_of(required.get("nodeSelectorTerms") or ())
    return len(spec.get("nodeSelector") or {}) + sum(1 + len(condition.get("values") or ()) for condition in conditions)


def eligible_nodes(pod: Json, nodes: Iterable[Json]) -> frozenset[str]:
    """The names of the nodes that the pod may run on."""
    constraints = nodeconstraints.constraints_of(pod.get("spec") or {})
    return frozenset(
        node["metadata"]["name"]
        for node in nodes
        if constraints.admits(node["metadata"]["name"], NodeLabelsAndTaints.from_node(node))
    )


def is_node_eligible(node: Json, pod: Json) -> bool:
    """Whether the pod may run on the node."""
    return bool(eligible_nodes(pod, [node]))


def untolerated_taints(node: Json, tolerations: Sequence[Json]) -> list[str]:
    """The node's taints that these tolerations do not tolerate, in the format of `kubectl taint`."""
    pod = nodeconstraints.constraints_of({"tolerations": tolerations})
    return [str(taint) for taint in pod.untolerated_taints(NodeLabelsAndTaints.from_node(node))]
