"""The nodes on which kube-scheduler might put a pod, by what can be said without the other pods.

Node selector, required node affinity, taints. What depends on other pods, ports or volumes only kube-scheduler knows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cardwise.core.values.decoded import Json

_KEEPING: Final = ("NoSchedule", "NoExecute")
_HARD: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def bound_otherwise(pod: Json) -> str:
    """What else than its nodes decides where the pod may be, in a few words; "" where nothing does."""
    spec = pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    if any((affinity.get(kind) or {}).get(_HARD) for kind in ("podAffinity", "podAntiAffinity")):
        return "affinity to other pods"
    if any(one.get("whenUnsatisfiable") != "ScheduleAnyway" for one in spec.get("topologySpreadConstraints") or ()):
        return "spreading over nodes"
    if any(port.get("hostPort") for c in spec.get("containers") or () for port in c.get("ports") or ()):
        return "ports of the node"
    if any("persistentVolumeClaim" in volume or "ephemeral" in volume for volume in spec.get("volumes") or ()):
        return "volumes"
    return ""


def conditions(spec: Json) -> int:
    """How many are compared of a node to find out whether a pod of this spec may be on it; 0 where it may be on any."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_HARD) or {}
    terms = required.get("nodeSelectorTerms") or ()
    listed = [one for term in terms for key in ("matchExpressions", "matchFields") for one in term.get(key) or ()]
    return len(spec.get("nodeSelector") or {}) + sum(1 + len(one.get("values") or ()) for one in listed)


def nodes(pod: Json, there: Iterable[Json]) -> frozenset[str]:
    """The names of those that the pod may be on."""
    return frozenset(node["metadata"]["name"] for node in there if admits(node, pod))


def admits(node: Json, pod: Json) -> bool:
    """Whether the pod may be on the node."""
    spec, metadata = pod.get("spec") or {}, node["metadata"]
    labels = metadata.get("labels") or {}
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_HARD)
    if required is not None:
        terms = required.get("nodeSelectorTerms") or ()
        if not any(_meets(term, labels, metadata["name"]) for term in terms):
            return False
    return not untolerated(node, spec.get("tolerations") or ())


def untolerated(node: Json, tolerations: Sequence[Json]) -> list[str]:
    """The node's taints that keep a pod away which has these tolerations, as `kubectl taint` spells them."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return [
        f"{taint['key']}{'=' * bool(taint.get('value'))}{taint.get('value') or ''}:{taint['effect']}"
        for taint in taints
        if taint.get("effect") in _KEEPING and not any(tolerates(one, taint) for one in tolerations)
    ]


def _meets(term: Json, labels: Mapping[str, str], name: str) -> bool:
    conditions = [(one, labels.get(one["key"])) for one in term.get("matchExpressions") or ()]
    conditions += [(one, name) for one in term.get("matchFields") or ()]  # metadata.name is the only field there is
    return bool(conditions) and all(_holds(one, value) for one, value in conditions)


def _holds(condition: Json, value: str | None) -> bool:
    values: Sequence[str] = condition.get("values") or ()
    match condition["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            try:
                bound, number = int(values[0]), int(value or "")
            except (ValueError, IndexError):
                return False
            return number > bound if condition["operator"] == "Gt" else number < bound
    return False


def tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator") == "Exists":
        return key in ("", taint["key"])
    return key == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")
