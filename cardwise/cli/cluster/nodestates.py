"""Why a whole node takes no new pods now, whatever its cards have free: not ready, cordoned, under pressure.

Kubernetes puts taints on such nodes. No pod is to tolerate them: the node's state is what must change.
"""

from collections.abc import Mapping
from typing import Final

from cardwise.core.values.decoded import Json
from cardwise.kube.pods.nodeconstraints import HARD

CORDONED: Final = "cordoned"
NOT_READY: Final = "NotReady"
_DOMAIN: Final = "node.kubernetes.io/"  # Kubernetes writes these taints itself
_TAINTS: Final[Mapping[str, str]] = {
    f"{_DOMAIN}not-ready": NOT_READY,
    f"{_DOMAIN}unreachable": "NotReady (its kubelet does not report)",
    f"{_DOMAIN}unschedulable": CORDONED,
    f"{_DOMAIN}memory-pressure": "MemoryPressure",
    f"{_DOMAIN}disk-pressure": "DiskPressure",
    f"{_DOMAIN}pid-pressure": "PIDPressure",
    f"{_DOMAIN}network-unavailable": "NetworkUnavailable",
    f"{_DOMAIN}out-of-service": "out of service",
    "node.cloudprovider.kubernetes.io/uninitialized": "not initialized by its cloud provider",
    "node.cloudprovider.kubernetes.io/shutdown": "shut down",
}
_PRESSURES: Final = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")


def of_taint(key: str) -> str:
    """The state that a taint of this key stands for; "" where people or other programs set it."""
    return _TAINTS.get(key, "")


def closed(node: Json) -> str:
    """Why the node takes no new pods, by its conditions, taints and cordon; "" where it takes them."""
    spec, states = node.get("spec") or {}, []
    for condition in (node.get("status") or {}).get("conditions") or ():
        kind, status = condition.get("type"), condition.get("status")
        if kind == "Ready" and status == "Unknown":
            states.append(_TAINTS[f"{_DOMAIN}unreachable"])
        elif kind == "Ready" and status != "True":
            states.append(NOT_READY)
        elif kind in _PRESSURES and status == "True":
            states.append(kind)
    taints = [one["key"] for one in spec.get("taints") or () if one.get("effect") in HARD]
    states += [state for state in map(of_taint, taints) if state and not (state == NOT_READY and states)]
    if spec.get("unschedulable"):
        states.append(CORDONED)
    return " and ".join(dict.fromkeys(states))


def remedy(state: str, node: str) -> str:
    """What to do about a state, for an administrator."""
    if state == CORDONED:
        return f"`kubectl uncordon {node}`"
    return f"`kubectl describe node {node}` says why"
