"""A cluster whose GPUs are partly used, for defrag, and the command."""

from datetime import UTC, datetime, timedelta

import pytest

from cardwise.core.api import names
from cardwise.core.api.cardlimits import CardLimits
from cardwise.core.api.policies import DEFAULT_POLICY
from tests.build import resource_class
from tests.cli import clusters
from tests.cli.clusters import Cluster, card, placed
from tests.fakes.clock import FakeClock

K80S = resource_class("nvidia.tesla.k80")
PUBLISHED = {
    "metadata": {"namespace": names.NAMESPACE, "name": names.WORKLOAD},
    "data": {names.WORKLOAD_POLICY: DEFAULT_POLICY, **CardLimits().configmap_data()},
}
GROUPS = {"Job": "batch/v1", "ReplicationController": "v1", "Node": "v1", "Workflow": "argoproj.io/v1alpha1"}
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def with_controller(pod: dict, kind: str = "ReplicaSet", group: str = "", **metadata: object) -> dict:
    """The pod with a controller, with annotations by their names, labels, and priority."""
    name = pod["metadata"]["name"]
    version = group or GROUPS.get(kind, "apps/v1")
    owner = {"apiVersion": version, "kind": kind, "name": f"{name}-rs", "uid": f"rs-{name}", "controller": True}
    pod["metadata"]["ownerReferences"] = [owner]
    pod["metadata"]["labels"] = metadata.get("labels", {})
    pod["metadata"]["annotations"] |= metadata.get("annotations", {})
    pod["spec"]["priority"] = metadata.get("priority", 0)
    pod["status"] = {"phase": "Running", "startTime": "2026-11-20T10:00:00Z"}
    return pod


def running(name: str, node: str, index: int, mem: int) -> dict:
    """A pod as it runs: it asks what it holds."""
    pod = placed("team", name, node, index, mem)
    pod["spec"]["containers"] = [{"name": "main", "resources": {"limits": {names.GPU_MEM: str(mem), names.SHARE: "1"}}}]
    return pod


def objects(*pods: dict) -> dict[str, list[dict]]:
    """Two nodes of two K80 cards, on which these pods are."""
    there = {"allocatable": {"cpu": "8", "memory": "64Gi", "pods": "100"}}
    return {
        "nodes": [{"metadata": {"name": node, "labels": {"zone": node}}, "status": there} for node in ("n1", "n2")],
        "extendedresources": [card(node, index) for node in ("n1", "n2") for index in (0, 1)],
        "resourceclasses": [K80S],
        "configmaps": [PUBLISHED],
        "pods": list(pods),
    }


def cluster(*pods: dict, **objects_by_kind: list[dict]) -> Cluster:
    return Cluster(objects(*pods) | objects_by_kind)


def three(**metadata: object) -> list[dict]:
    """Of the four cards none is free; the 3000 MiB of `small` have room beside the 8000 of `big`."""
    return [
        with_controller(running("small", "n1", 0, 3000), **metadata),
        running("big", "n1", 1, 8000),
        running("left", "n2", 0, 9000),
        running("right", "n2", 1, 9500),
    ]


def run(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str):
    """On a machine whose time of day is wrong."""
    api.clock.set_wall(NOW)
    return clusters.run(monkeypatch, api, "defrag", *args, clock=FakeClock(wall=NOW + timedelta(days=-100)))


# Of a policy that puts a pod back on the card that it has left.
SPREADING = PUBLISHED | {"data": PUBLISHED["data"] | {names.WORKLOAD_POLICY: "spread"}}
