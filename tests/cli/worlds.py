"""A surveyed cluster of several types, for the screens, and the API server that it is read from."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from cardwise.core import assignment, names
from cardwise.core.assignment import Assignment, CardShare, DeviceShare
from cardwise.kube import errors

Json = dict[str, Any]

K80, P100 = 11441, 16276  # MiB
K80_CLASS = "nvidia.tesla.k80"


class Lists:
    """A KubeClient that only lists. A path that is not here is a kind that the cluster does not know.

    `forbidden`: kinds, such as "pods", or "pods of all" where those of one namespace may be read.
    """

    def __init__(self, objects: dict[str, list[Json]], forbidden: tuple[str, ...] = ()) -> None:
        self.namespace = "default"  # that of the kubeconfig's context
        self.objects = objects
        self.forbidden = forbidden

    def list_pages(self, path: str, query: Mapping[str, str] | None = None) -> Iterator[bytes]:
        plural = path.rpartition("/")[2]
        if plural in self.forbidden or ("/namespaces/" not in path and f"{plural} of all" in self.forbidden):
            raise errors.Forbidden(403, "Forbidden", f'User "jane" cannot list resource "{plural}"')
        if plural not in self.objects:
            raise errors.NotFound(404, "NotFound", "the server could not find the requested resource")
        parts = path.split("/")
        within = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        items = [o for o in self.objects[plural] if within in ("", o["metadata"].get("namespace"))]
        key, _, value = (query or {}).get("labelSelector", "").partition("=")
        if key:
            found = ((o, o["metadata"].get("labels", {}).get(key)) for o in items)
            items = [o for o, has in found if has is not None and value in ("", has)]
        yield json.dumps({"items": items, "metadata": {}}).encode()

    def clock(self) -> datetime:
        return datetime.now(UTC)

    def get(self, path: str) -> Json:
        *_, namespace, kind, name = path.split("/")
        if kind in self.forbidden:
            raise errors.Forbidden(403, "Forbidden", f'User "jane" cannot get resource "{kind}"')
        for pod in self.objects.get(kind, []):
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == (namespace, name):
                return pod
        raise errors.NotFound(404, "NotFound", name)


def card(node: str, index: int, model: str = "Tesla K80", memory: int = K80, **more: Any) -> Json:
    uuid = f"GPU-{node}-{index}"
    spec = {"node": node, "index": index, "uuid": uuid, "model": model, "memoryMiB": memory}
    metadata = {"name": uuid.lower(), "labels": more.pop("labels", {})}
    health = more.pop("health", "Healthy")
    return {"metadata": metadata, "spec": spec | more, "status": {"health": health}}


def device(node: str, index: int, kind: str = "rdma", **more: Any) -> Json:
    """A device that is no GPU."""
    uuid = f"{kind}-{node}-{index}"
    metadata = {"name": uuid, "labels": more.pop("labels", {})}
    status = {"health": more.pop("health", "Healthy"), "held": more.pop("held", [])}
    spec = {"node": node, "index": index, "uuid": uuid, "kind": kind, "model": "MT4119"}
    return {"metadata": metadata, "spec": spec | more, "status": status}


def resource_class(name: str, *, auto: bool = False, edited: bool = False, **spec: Any) -> Json:
    metadata: Json = {"name": name}
    if auto:
        written = {} if edited else spec
        metadata |= {"labels": {names.AUTO_LABEL: "true"}, "annotations": {names.AUTO_SPEC: json.dumps(written)}}
    return {"metadata": metadata, "spec": spec}


def allocated(resource: Json, mem: int, shares: int = 1, core: int = 0, *, whole: bool = False) -> Json:
    """The ExtendedResource with what the extender says is held of it."""
    amounts = {"memoryMiB": mem, "corePercent": core, "shares": shares, "whole": whole, "pods": shares}
    return resource | {"status": resource["status"] | {"allocated": amounts}}


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


def with_devices(pod: Json, *shares: tuple[str, str], cards: bool = False) -> Json:
    """The placed pod with these devices, by class and UUID; with `cards` beside its cards."""
    annotations = pod["metadata"]["annotations"]
    held = assignment.decode(annotations)
    assert held is not None
    both = Assignment(held.containers if cards else {}, {"0": tuple(DeviceShare(*share) for share in shares)})
    return pod | {"metadata": pod["metadata"] | {"annotations": assignment.encode(both, assume_time_ns=1)}}


def waiting(namespace: str, name: str, limits: dict[str, str], *, devices: str = "") -> Json:
    """`devices`: the classes among the limits that are no GPUs."""
    containers = [{"name": "main", "resources": {"limits": limits}}]
    metadata: Json = {"namespace": namespace, "name": name, "uid": name}
    if devices:
        metadata["annotations"] = {names.DEVICE_CLASSES: devices}
    return {"metadata": metadata, "spec": {"containers": containers}}


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


RDMA_CLASS = resource_class("rdma", selector={"matchLabels": {"kind": "rdma"}})
FAST_CLASS = resource_class("fast", selector={"matchLabels": {"kind": "rdma", "speed": "fast"}})


def lists_with_devices(**more: list[Json]) -> Lists:
    """As `lists`, where n1 has two RDMA devices, n2 one that is sick, and n3 no card but one.

    Of n1's, team-a's pod `train` has one beside its share, and one that has gone holds the fast one.
    """
    api = lists()
    held = [{"podUID": "gone", "namespace": "team-b", "name": "gone", "memoryMiB": 0, "container": "0"}]
    api.objects["nodes"].append({"metadata": {"name": "n3"}})
    api.objects["extendedresources"] += [
        device("n1", 0),
        device("n1", 1, labels={"speed": "fast"}, held=held),
        device("n2", 0, health="Unhealthy"),
        device("n3", 0),
    ]
    api.objects["resourceclasses"] += [RDMA_CLASS, FAST_CLASS]
    beside = with_devices(placed("team-a", "both", "n1", 1, 100, total=P100), ("rdma", "rdma-n1-0"), cards=True)
    api.objects["pods"].append(beside)
    api.objects |= more
    return api
