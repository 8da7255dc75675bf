"""A surveyed cluster of several types, for the screens, and the API server that it is read from."""

import json
from collections.abc import Iterator
from typing import Any

from cardwise.core import assignment, names
from cardwise.core.assignment import Assignment, CardShare
from cardwise.kube import errors

Json = dict[str, Any]

K80, P100 = 11441, 16276  # MiB
K80_CLASS = "nvidia.tesla.k80"


class Lists:
    """A KubeClient that only lists. A path that is not here is a kind that the cluster does not know."""

    def __init__(self, objects: dict[str, list[Json]], forbidden: tuple[str, ...] = ()) -> None:
        self.objects = objects
        self.forbidden = forbidden

    def list_pages(self, path: str) -> Iterator[bytes]:
        plural = path.rpartition("/")[2]
        if plural in self.forbidden:
            raise errors.Forbidden(403, "Forbidden", f'User "jane" cannot list resource "{plural}"')
        if plural not in self.objects:
            raise errors.NotFound(404, "NotFound", "the server could not find the requested resource")
        parts = path.split("/")
        within = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        items = [o for o in self.objects[plural] if within in ("", o["metadata"].get("namespace"))]
        yield json.dumps({"items": items, "metadata": {}}).encode()

    def get(self, path: str) -> Json:
        *_, namespace, _, name = path.split("/")
        for pod in self.objects["pods"]:
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
                return pod
        raise errors.NotFound(404, "NotFound", name)


def card(node: str, index: int, model: str = "Tesla K80", memory: int = K80, **more: Any) -> Json:
    uuid = f"GPU-{node}-{index}"
    spec = {"node": node, "index": index, "uuid": uuid, "model": model, "memoryMiB": memory}
    metadata = {"name": uuid.lower(), "labels": more.pop("labels", {})}
    health = more.pop("health", "Healthy")
    return {"metadata": metadata, "spec": spec | more, "status": {"health": health}}


def resource_class(name: str, *, auto: bool = False, edited: bool = False, **spec: Any) -> Json:
    metadata: Json = {"name": name}
    if auto:
        written = {} if edited else spec
        metadata |= {"labels": {names.AUTO_LABEL: "true"}, "annotations": {names.AUTO_SPEC: json.dumps(written)}}
    return {"metadata": metadata, "spec": spec}


def gpu_quota(namespace: str, *hard: Json, name: str = "team", **spec: Any) -> Json:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"hard": list(hard)} | spec}


def native_quota(namespace: str, hard: dict[str, str], used: dict[str, str], name: str = "gpus") -> Json:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"hard": hard}, "status": {"used": used}}


def placed(namespace: str, name: str, node: str, index: int, mem: int, *, total: int = K80, core: int = 0) -> Json:
    """A pod that holds so much of one card; with 100 percent of its cores the whole of it."""
    share = CardShare(index, f"GPU-{node}-{index}", mem, core, total, whole=core == 100)
    metadata = {
        "namespace": namespace,
        "name": name,
        "uid": f"{namespace}-{name}",
        "annotations": assignment.encode(Assignment({"0": (share,)}), assume_time_ns=1),
    }
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [{"name": "main"}]}, "status": {}}


def waiting(namespace: str, name: str, limits: dict[str, str]) -> Json:
    containers = [{"name": "main", "resources": {"limits": limits}}]
    return {"metadata": {"namespace": namespace, "name": name, "uid": name}, "spec": {"containers": containers}}


def lists(**more: list[Json]) -> Lists:
    """n1 has a K80 and a P100, n2 two K80s; team-a holds a whole K80 and a share, team-b a share."""
    objects: dict[str, list[Json]] = {
        "nodes": [{"metadata": {"name": node}} for node in ("n1", "n2")],
        "extendedresources": [
            card("n1", 0),
            card("n1", 1, "Tesla P100", P100),
            card("n2", 0, health="Unhealthy"),
            card("n2", 1),
        ],
        "resourceclasses": [
            resource_class(K80_CLASS, auto=True, selector={"matchLabels": {"model": "Tesla K80"}}),
            resource_class(
                "big",
                selector=[{"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["12GiB"]}]}],
                share={"memoryMiB": 4069, "corePercent": 25},
                priority=10,
            ),
        ],
        "gpuquotas": [gpu_quota("team-a", {"class": K80_CLASS, "shares": 2, "cards": 1}, {"memoryMiB": "32Gi"})],
        "resourcequotas": [],
        "pods": [
            placed("team-a", "train", "n2", 1, K80, core=100),
            placed("team-a", "notebook", "n1", 0, 2000),
            placed("team-b", "serve", "n1", 0, 1000),
            placed("team-b", "big", "n1", 1, 4069, total=P100, core=25),
        ],
    }
    return Lists(objects | more)
