"""Why a whole node takes no new pods, whatever cards it has: the node is unready, cordoned, or under pressure.

Kubernetes puts taints on such nodes. Pods should not tolerate these taints; the node's state must change instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cardwise.core.values.decoded import Json
from cardwise.core.values.shellcommand import command
from cardwise.kube import errors, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.pods.nodeconstraints import HARD_TAINT_EFFECTS

CORDONED: Final = "cordoned"
NOT_READY: Final = "NotReady"
_TAINT_DOMAIN: Final = "node.kubernetes.io/"  # the prefix of the taints that Kubernetes writes itself
_STATE_BY_TAINT: Final[Mapping[str, str]] = {
    f"{_TAINT_DOMAIN}not-ready": NOT_READY,
    f"{_TAINT_DOMAIN}unreachable": "NotReady (its kubelet does not report)",
    f"{_TAINT_DOMAIN}unschedulable": CORDONED,
    f"{_TAINT_DOMAIN}memory-pressure": "under MemoryPressure",
    f"{_TAINT_DOMAIN}disk-pressure": "under DiskPressure",
    f"{_TAINT_DOMAIN}pid-pressure": "under PIDPressure",
    f"{_TAINT_DOMAIN}network-unavailable": "without network (NetworkUnavailable)",
    f"{_TAINT_DOMAIN}out-of-service": "out of service",
    "node.cloudprovider.kubernetes.io/uninitialized": "not initialized by its cloud provider",
    "node.cloudprovider.kubernetes.io/shutdown": "shut down",
}
_CACHED_LIST_QUERY: Final = {"resourceVersion": "0"}
_MAX_NODES_READ_SINGLY: Final = 32  # maximum number of nodes read one by one; for more, one list request is cheaper
_STATE_BY_CONDITION: Final = {  # the state by the type of a node's condition
    "MemoryPressure": _STATE_BY_TAINT[f"{_TAINT_DOMAIN}memory-pressure"],
    "DiskPressure": _STATE_BY_TAINT[f"{_TAINT_DOMAIN}disk-pressure"],
    "PIDPressure": _STATE_BY_TAINT[f"{_TAINT_DOMAIN}pid-pressure"],
    "NetworkUnavailable": _STATE_BY_TAINT[f"{_TAINT_DOMAIN}network-unavailable"],
}


def state_of_taint(key: str) -> str | None:
    """The node state that Kubernetes marks by a taint with this key; None for taints of users and other programs."""
    return _STATE_BY_TAINT.get(key)


def unschedulable_reason(node: Json) -> str | None:
    """Why the node takes no new pods, by its conditions, taints and cordon; None if it takes pods."""
    spec = node.get("spec") or {}
    states: list[str] = []
    for condition in (node.get("status") or {}).get("conditions") or ():
        condition_type, status = condition.get("type"), condition.get("status")
        if condition_type == "Ready" and status == "Unknown":
            states.append(_STATE_BY_TAINT[f"{_TAINT_DOMAIN}unreachable"])
        elif condition_type == "Ready" and status != "True":
            states.append(NOT_READY)
        elif condition_type in _STATE_BY_CONDITION and status == "True":
            states.append(_STATE_BY_CONDITION[condition_type])
    taints = [taint["key"] for taint in spec.get("taints") or () if taint.get("effect") in HARD_TAINT_EFFECTS]
    states += [state for state in map(state_of_taint, taints) if state and not (state == NOT_READY and states)]
    if spec.get("unschedulable"):
        states.append(CORDONED)
    return " and ".join(dict.fromkeys(states)) or None


def unschedulable_reasons(nodes: Iterable[Json]) -> dict[str, str]:
    """Why nodes take no new pods, by node name. Nodes that take new pods are left out."""
    states = ((node["metadata"]["name"], unschedulable_reason(node)) for node in nodes)
    return {name: state for name, state in states if state is not None}


def read_unschedulable_reasons(client: KubeClient, names: Sequence[str]) -> dict[str, str]:
    """Read why the nodes with these names take no new pods, by name; {} if nodes may not be read. Raises `KubeError`.

    Reads from the API server's cache, which may be a second old.
    """
    queries = (
        [paths.field_query("metadata.name", name) for name in names] if len(names) <= _MAX_NODES_READ_SINGLY else [{}]
    )
    states: dict[str, str] = {}
    try:
        for query in queries:
            states |= unschedulable_reasons(
                client.list_as(paths.nodes(), wire.ListOf[Json], _CACHED_LIST_QUERY | query, 0)
            )
    except errors.Forbidden:
        return {}
    return {name: states[name] for name in names if name in states}


def describe_unschedulable(states: Mapping[str, str]) -> list[str]:
    """A sentence for each of these unschedulable nodes.

    states: the reason by the node's name.
    """
    return [f"node {name} takes no new pods: it is {states[name]}" for name in sorted(states)]


def suggest_remedy(state: str, node: str) -> str:
    """The command with which an administrator can change, or inspect, the node's state."""
    if state == CORDONED:
        return command("`kubectl uncordon {node}`", node=node)
    return command("`kubectl describe node {node}` says why", node=node)
