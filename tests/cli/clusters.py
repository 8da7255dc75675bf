"""A cluster of several types, for the screens, and the API server that it is read from."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cardwise.cli import main
from cardwise.clock import Clock
from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.core.values.decoded import Json
from cardwise.kube.client import KubeClient
from tests.build import automatic_class, extended_resource, gpu_quota, resource_class
from tests.fakes.apiobjects import KINDS
from tests.fakes.apiserver import ApiServer, Fault, Rule
from tests.fakes.clock import FakeClock

K80, P100 = 11441, 16276  # MiB
NAMESPACES = ("default", "team-a", "team-b")
K80_CLASS = "nvidia.tesla.k80"


_COLLECTIONS = {collection.rpartition("/")[2]: collection for collection in KINDS}


class Cluster(ApiServer):
    """The API server of these objects, by the plurals of their kinds; `kube` is a client of it."""

    def __init__(self, objects: Mapping[str, Sequence[Json]], clock: Clock | None = None) -> None:
        super().__init__(clock or FakeClock())
        self.kube = self.client()
        self._forbidden: list[Rule] = []
        for plural, some in objects.items():
            self.add(plural, *some)
        if "namespaces" not in objects:
            self.add("namespaces", *({"metadata": {"name": name}} for name in NAMESPACES))

    def add(self, plural: str, *objects: Json) -> None:
        for manifest in objects:
            self.write_object(_COLLECTIONS[plural], manifest)

    def replace(self, plural: str, *objects: Json) -> None:
        """There are these of the kind now, and no others."""
        for manifest in self.objects(plural):
            metadata = manifest["metadata"]
            self.remove(path_of(plural, metadata["name"], metadata.get("namespace", "")))
        self.add(plural, *objects)

    def objects(self, plural: str) -> list[Json]:
        return self.all(_COLLECTIONS[plural])

    def change(self, plural: str, name: str, namespace: str = "", **change: Any) -> None:
        self.edit(path_of(plural, name, namespace), **change)

    def lack(self, *plurals: str) -> None:
        """The cluster does not know these kinds."""
        self.missing = {_COLLECTIONS[plural] for plural in plurals}

    def forbid(self, *plurals: str) -> None:
        """Plurals of kinds that may not be read, and no others; "pods of all": those of one namespace may."""
        for rule in self._forbidden:
            rule.end()
        self._forbidden = []
        for plural in plurals:
            kind = plural.removesuffix(" of all")
            _, *group, _, _ = _COLLECTIONS[kind].removeprefix("/").split("/")
            scope = f'in API group "{"".join(group)}" at the cluster scope'
            for verb in ("list", "get"):
                fault = Fault(status=403, message=f'User "jane" cannot {verb} resource "{kind}" {scope}')
                path = _COLLECTIONS[kind] if kind != plural else f"*/{kind}{'/*' if verb == 'get' else ''}"
                self._forbidden.append(self.fault(fault, verb, path, times=math.inf))


def path_of(plural: str, name: str, namespace: str = "") -> str:
    base = _COLLECTIONS[plural].rpartition("/")[0]
    return "/".join([base, *(["namespaces", namespace] if namespace else []), plural, name])


def run(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str, clock: Clock | None = None) -> Result:
    """The program, called with these words."""
    monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
    return CliRunner().invoke(main.cli, args, obj=clock)


def card(node: str, index: int, model: str = "Tesla K80", memory: int = K80, **fields: Any) -> Json:
    return extended_resource(index, node=node, model=model, mem=memory, **fields)


def device(node: str, index: int, kind: str = "rdma", **fields: Any) -> Json:
    """A device that is no GPU."""
    return extended_resource(index, node=node, kind=kind, model="MT4119", **fields)


def allocated(resource: Json, mem: int, shares: int = 1, core: int = 0, *, whole: bool = False) -> Json:
    """The ExtendedResource with what the extender says is held of it."""
    amounts = {"memoryMiB": mem, "corePercent": core, "shares": shares, "whole": whole, "pods": shares}
    return resource | {"status": resource["status"] | {"allocated": amounts}}


def sharing_within(pod: Json) -> Json:
    """The pod, which shares GPUs within its namespace only."""
    pod["metadata"]["annotations"][names.SHARE_WITH] = "namespace"
    return pod


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
    assigned = Assignment(held.containers if cards else {}, {"0": tuple(AssignedDevice(*share) for share in shares)})
    return pod | {"metadata": pod["metadata"] | {"annotations": assignment.encode(assigned, assume_time_ns=1)}}


def waiting(namespace: str, name: str, limits: dict[str, str], *, devices: str = "") -> Json:
    """`devices`: the classes among the limits that are no GPUs."""
    containers = [{"name": "main", "resources": {"limits": limits}}]
    metadata: Json = {"namespace": namespace, "name": name, "uid": name}
    if devices:
        metadata["annotations"] = {names.DEVICE_CLASSES: devices}
    return {"metadata": metadata, "spec": {"containers": containers}}


def lists(**objects_by_kind: list[Json]) -> Cluster:
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
            automatic_class(),
            resource_class(
                "big",
                selector=[{"matchExpressions": [{"key": "memory", "operator": "Gt", "values": ["12GiB"]}]}],
                share={"memoryMiB": 4069, "corePercent": 25},
                priority=10,
            ),
        ],
        "gpuquotas": [
            gpu_quota({"class": K80_CLASS, "shares": 2, "gpus": 1}, {"memoryMiB": "32Gi"}, namespace="team-a")
        ],
        "resourcequotas": [],
        "pods": [
            placed("team-a", "train", "n2", 1, K80, core=100),
            placed("team-a", "notebook", "n1", 0, 2000),
            placed("team-b", "serve", "n1", 0, 1000),
            placed("team-b", "big", "n1", 1, 4069, total=P100, core=25),
        ],
    }
    return Cluster(objects | objects_by_kind)


RDMA_CLASS = resource_class("rdma", kind="rdma")
FAST_CLASS = resource_class("fast", selector={"matchLabels": {"kind": "rdma", "speed": "fast"}})


def lists_with_devices(**objects_by_kind: list[Json]) -> Cluster:
    """As `lists`, where n1 has two RDMA devices, n2 one that is sick, and n3 no card but one.

    Of n1's, team-a's pod `train` has one beside its share, and one that has gone holds the fast one.
    """
    api = lists()
    held = [{"podUID": "gone", "namespace": "team-b", "name": "gone", "memoryMiB": 0, "container": "0"}]
    api.add("nodes", {"metadata": {"name": "n3"}})
    api.add(
        "extendedresources",
        device("n1", 0),
        device("n1", 1, labels={"speed": "fast"}, reported=held),
        device("n2", 0, health="Unhealthy"),
        device("n3", 0),
    )
    api.add("resourceclasses", RDMA_CLASS, FAST_CLASS)
    pod = with_devices(placed("team-a", "both", "n1", 1, 100, total=P100), ("rdma", "rdma-n1-0"), cards=True)
    api.add("pods", pod)
    for plural, objects in objects_by_kind.items():
        api.replace(plural, *objects)
    return api
