"""Builders with defaults for the objects that tests talk about."""

from datetime import UTC, datetime
from typing import Any

from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.cards import Card
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger

P100 = 16276  # MiB, the card of Alibaba's articles


def container(name: str = "main", **resources: str | int) -> dict[str, Any]:
    """A container; keyword `gpu_mem=8138` and so on become limits."""
    by_keyword = {
        "gpu_mem": names.GPU_MEM,
        "gpu_count": names.GPU_COUNT,
        "gpu_core": names.GPU_CORE,
        "whole_gpu": names.WHOLE_GPU,
        "share": names.SHARE,
    }
    limits = {by_keyword[key]: str(amount) for key, amount in resources.items()}
    return {"name": name, "image": "cardwise.local/busybox:1", "resources": {"limits": limits}}


def pod(
    name: str = "p",
    *,
    containers: list[dict[str, Any]] | None = None,
    init: list[dict[str, Any]] | None = None,
    annotations: dict[str, str] | None = None,
    namespace: str = "default",
    uid: str | None = None,
    **resources: str | int,
) -> dict[str, Any]:
    """A pod; with resources given as keywords it has one container that asks for them."""
    spec: dict[str, Any] = {"containers": containers or [container(**resources)]}
    if init:
        spec["initContainers"] = init
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "annotations": annotations or {}}
    if uid:
        metadata["uid"] = uid
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


# What a card says of whether it takes new shares.
IN_USE: dict[str, bool] = {}
OUT_OF_USE: list[dict[str, bool]] = [{"healthy": False}, {"cordoned": True}]


def cards(*mems: int, node: str = "n1") -> list[Card]:
    """Healthy cards of these sizes in MiB."""
    return [Card(index=i, uuid=f"GPU-{node}-{i}", mem=mem) for i, mem in enumerate(mems)]


def shares(mem: int, *indices: int, node: str = "n1", total: int = P100, core: int = 0) -> tuple[CardShare, ...]:
    return tuple(CardShare(i, f"GPU-{node}-{i}", mem, core, total) for i in indices)


def holding(uid: str, mem: int, index: int, *, node: str = "n1", total: int = P100) -> Holding:
    """A pod that holds `mem` MiB of one card."""
    return Holding(uid, "default", uid, node, Assignment({"0": shares(mem, index, node=node, total=total)}))


def ledger_with_free(**nodes: list[int]) -> Ledger:
    """Nodes of P100 cards with this much free on each."""
    ledger = Ledger()
    for node, frees in nodes.items():
        ledger.set_cards(node, cards(*[P100] * len(frees), node=node))
        for i, free in enumerate(frees):
            if free < P100:
                ledger.set_holding(holding(f"{node}-{i}", P100 - free, i, node=node))
    return ledger


def asking(
    name: str,
    *,
    uid: str | None = None,
    annotations: dict[str, str] | None = None,
    resource_class: str = "",
    namespace: str = "default",
    **resources: int,
) -> dict:
    """A pending pod as the webhook leaves it."""
    resources = {"share": 1} | resources
    manifest = pod(name, uid=uid or f"uid-{name}", annotations=annotations, namespace=namespace, **resources)
    if resource_class:
        manifest["spec"]["containers"][0]["resources"]["limits"][names.CLASS_PREFIX + resource_class] = "1"
    return manifest


def resource(
    index: int,
    *,
    node: str = "n1",
    mem: int = P100,
    model: str = "P100",
    health: str = "Healthy",
    reported: list[dict] | None = None,
    terminating: list[dict] | None = None,
    labels: dict[str, str] | None = None,
    cordoned: bool = False,
    **properties: str,
) -> dict[str, Any]:
    """The ExtendedResource of a card."""
    uuid = f"GPU-{node}-{index}"
    spec = {"node": node, "index": index, "uuid": uuid, "memoryMiB": mem, "model": model, "properties": properties}
    if cordoned:
        spec["unschedulable"] = True
    return {
        "metadata": {
            "name": names.extended_resource_name(uuid), "labels": {names.NODE_LABEL: node} | (labels or {})
        },
        "spec": spec,
        "status": {"health": health, "reported": reported or [], "terminating": terminating or []},
    }  # fmt: skip


def resource_class(name: str, *, priority: int = 0, **labels: object) -> dict[str, Any]:
    """A ResourceClass of the cards with one of the values (a text or several) for each label."""
    expressions = [
        {"key": key, "operator": "In", "values": label if isinstance(label, list) else [label]}
        for key, label in labels.items()
    ]
    spec = {"selector": {"matchExpressions": expressions}, "priority": priority}
    return {"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec}


def gpu_quota(*hard: dict[str, Any], namespace: str = "default", name: str = "team") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": name, "resourceVersion": "1"}, "spec": {"hard": list(hard)}}


def reported_share(uid: str, mem: int) -> dict[str, Any]:
    return {"podUID": uid, "namespace": "default", "name": uid, "memoryMiB": mem, "corePercent": 0}


def build_released_lease(moment: datetime) -> dict[str, Any]:
    """The spec of a Lease that its holder released at that moment."""
    stamp = f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    return {"holderIdentity": "", "leaseDurationSeconds": 1, "acquireTime": stamp, "renewTime": stamp}
