"""Builders of the objects that tests speak of, one for each kind, with defaults.

First the JSON of the API server, by kind, then values of the domain: cards, shares, ledgers. A part whose tests want
other defaults has a function of its own that calls these.
"""

import json
from datetime import UTC, datetime
from typing import Any

from cardwise.core.api import classes, names
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


def node(
    name: str = "n1", *, labels: dict[str, str] | None = None, status: dict[str, Any] | None = None, **spec: object
) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec, "status": status or {}}


def extended_resource(
    index: int = 0,
    *,
    node: str = "n1",
    uuid: str = "",
    kind: str = "",
    model: str = "P100",
    mem: int = P100,
    health: str = "Healthy",
    reported: list[dict[str, Any]] | None = None,
    terminating: list[dict[str, Any]] | None = None,
    labels: dict[str, str] | None = None,
    properties: dict[str, str] | None = None,
    unschedulable: bool = False,
    cordon: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A card; with `kind` another device."""
    uuid = uuid or f"{kind or 'GPU'}-{node}-{index}"
    spec: dict[str, Any] = {"kind": kind} if kind else {"memoryMiB": mem}
    if unschedulable:
        spec["unschedulable"] = True
    if cordon:
        spec["cordon"] = cordon
    metadata = {"name": names.extended_resource_name(uuid), "labels": {names.NODE_LABEL: node} | (labels or {})}
    return {
        "kind": "ExtendedResource",
        "metadata": metadata,
        "spec": {"node": node, "index": index, "uuid": uuid, "model": model, "properties": properties or {}} | spec,
        "status": {"health": health, "reported": reported or [], "terminating": terminating or []},
    }


def reported_share(uid: str, mem: int) -> dict[str, Any]:
    """An entry of `reported` or `terminating` in the status of a card."""
    return {"podUID": uid, "namespace": "default", "name": uid, "memoryMiB": mem, "corePercent": 0}


def resource_class(
    name: str = "big",
    *,
    model: str | list[str] = "Tesla K80",
    kind: str = "",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    **spec: object,
) -> dict[str, Any]:
    """A ResourceClass of the cards of one model or several, of the devices of a kind, or of a `selector`."""
    if isinstance(model, list):
        selector: dict[str, Any] = {"matchExpressions": [{"key": "model", "operator": "In", "values": model}]}
    else:
        selector = {"matchLabels": {"kind": kind} if kind else {"model": model}}
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    return {"kind": "ResourceClass", "metadata": metadata, "spec": {"selector": selector} | spec}


def automatic_class(*models: str, edited: bool = False, **changes: object) -> dict[str, Any]:
    """The ResourceClass that the extender makes for a model, here "Tesla K80", and what somebody has changed of it."""
    models = models or ("Tesla K80",)
    written = classes.auto_spec(*models)
    annotations = {names.AUTO_SPEC: json.dumps({} if edited else written)}
    name, labels = classes.name_of_model(models[0]), {names.AUTO_LABEL: "true"}
    return resource_class(name, labels=labels, annotations=annotations, **written | changes)


def gpu_quota(
    *hard: object, namespace: str = "default", name: str = "team", used: list[Any] | None = None, **spec: object
) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name}
    spec = {"hard": list(hard)} | spec
    return {"kind": "GPUQuota", "metadata": metadata, "spec": spec, "status": {"used": used or []}}


def resource_quota(
    hard: dict[str, str], *, namespace: str = "default", name: str = "gpus", used: dict[str, str] | None = None
) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name}
    return {"metadata": metadata, "spec": {"hard": hard}, "status": {"used": used or {}}}


def limit_range(*limits: dict[str, Any], namespace: str = "default", name: str = "limits") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"limits": list(limits)}}


def pod_group(
    name: str = "g",
    minimum: int = 3,
    *,
    namespace: str = "default",
    status: dict[str, Any] | None = None,
    **metadata: object,
) -> dict[str, Any]:
    """A PodGroup of coscheduling."""
    metadata |= {"namespace": namespace, "name": name}
    return {"metadata": metadata, "spec": {"minMember": minimum}, "status": status or {}}


def budget(
    name: str = "budget", *, allowed: int, selector: dict[str, Any], namespace: str = "default"
) -> dict[str, Any]:
    """A PodDisruptionBudget that lets so many go."""
    metadata = {"namespace": namespace, "name": name}
    return {"metadata": metadata, "spec": {"selector": selector}, "status": {"disruptionsAllowed": allowed}}


def binding(pod: str = "p", node: str = "n1", **metadata: object) -> dict[str, Any]:
    return {"metadata": {"name": pod} | metadata, "target": {"kind": "Node", "name": node}}


def event(
    reason: str,
    message: str = "",
    *,
    about: str,
    namespace: str = "default",
    at: str = "2026-01-01T00:00:00Z",
    **fields: object,
) -> dict[str, Any]:
    """An Event about an object of the same namespace, such as "Pod/p"."""
    kind, _, about_name = about.partition("/")
    involved = {"kind": kind, "namespace": namespace, "name": about_name, "uid": about_name}
    text = {"reason": reason, "message": message, "lastTimestamp": at}
    metadata = {"namespace": namespace, "name": f"{about_name}.{reason}.{at}"}
    return {"metadata": metadata, "involvedObject": involved} | text | fields


def build_released_lease(moment: datetime) -> dict[str, Any]:
    """The spec of a Lease that its holder released at that moment."""
    stamp = f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    return {"holderIdentity": "", "leaseDurationSeconds": 1, "acquireTime": stamp, "renewTime": stamp}


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
