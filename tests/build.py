"""Builders with defaults for the objects that tests talk about."""

from typing import Any

from cardwise.core import names
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.cards import Card
from cardwise.core.ledger import Holding, Ledger

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
    limits = {by_keyword[key]: str(value) for key, value in resources.items()}
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
                ledger.hold(holding(f"{node}-{i}", P100 - free, i, node=node))
    return ledger
