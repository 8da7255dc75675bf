"""Whether a pod leaves the choice of its node to the extender, or kube-scheduler is to weigh all nodes that fit."""

from collections.abc import Mapping
from typing import Any

from cardwise.core.api import names
from extender.records import members


def one_best_node(pod: Mapping[str, Any], *, default: bool) -> bool:
    """Whether the extender names the best node alone: not where the pod has wishes that only the scheduler can weigh.

    `default`: of pods that have none, and no annotation that decides. A member of a PodGroup of Kubernetes gets one in
    any case: the next member is filtered before it is bound, and must not be offered the same room.
    """
    if members.grouped(pod):
        return True
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    wish = annotations.get(names.ONE_NODE)
    if wish in ("true", "false"):
        return bool(wish == "true")
    if not default:
        return False
    spec = pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    soft = any(
        (affinity.get(kind) or {}).get("preferredDuringSchedulingIgnoredDuringExecution")
        for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")
    )
    spreads = spec.get("topologySpreadConstraints") or ()
    return not soft and not any(spread.get("whenUnsatisfiable") == "ScheduleAnyway" for spread in spreads)
