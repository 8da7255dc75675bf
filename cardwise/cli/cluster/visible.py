"""The view of a user who may read no card: the types with what is free of each, and the cards of their own pods.

The types are read from the statuses of ResourceClasses, the cards from the annotations of the pods.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cardwise.core.api import classes
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import errors, paths, survey
from cardwise.kube.client import KubeClient

# Of a ResourceClass's status, by the heads of their columns.
COLUMNS: Final = {
    "CARDS": "cards", "NODES": "nodes", "FREE-MIB": "freeMiB", "USED-MIB": "usedMiB", "TOTAL-MIB": "memoryMiB",
}  # fmt: skip
HEALTHY: Final = "healthyCards"
AMOUNTS: Final = (*COLUMNS.values(), HEALTHY)


@dataclass(frozen=True, slots=True)
class Type:
    """A class, with AMOUNTS by their names in its status; None where the extender has not told.

    `one`: what one of it is, in words. `priority` and `auto` as the columns have them, "-" for a class that cannot be
    read; `auto` is whether Cardwise has made it, "edited" where a person has changed it since and Cardwise leaves it
    alone. `other`: it is of devices that are no GPUs.
    """

    name: str
    one: str
    amounts: Mapping[str, int | None]
    priority: str = "-"
    auto: str = "-"
    other: bool = False


@dataclass(frozen=True, slots=True)
class PodShare:
    """What a pod holds of a card."""

    namespace: str
    pod: str
    node: str
    card: int
    mem: int


@dataclass(frozen=True, slots=True)
class Visible:
    """`shares` are of pods of the namespace. Both `types` and `shares` are None where they may not be read either."""

    namespace: str
    types: tuple[Type, ...] | None
    shares: tuple[PodShare, ...] | None


def typed(known: ResourceClass, amounts: Mapping[str, int | None]) -> Type:
    """A class that can be read."""
    auto = "no" if not known.auto else "yes" if known.untouched else "edited"
    one = "device" if known.other else _share(known)
    return Type(known.name, one, amounts, str(known.priority), auto, known.other)


def _share(known: ResourceClass) -> str:
    if known.share is None:
        return "whole card"
    core = f" {known.share.core}%" if known.share.core else ""
    return f"{known.share.memory} MiB{core}"


def _type(obj: Json) -> Type:
    status = obj.get("status") or {}
    amounts = {key: status.get(key) for key in AMOUNTS}
    try:
        return typed(classes.parse(obj), amounts)
    except InvalidRequest:
        return Type(obj["metadata"]["name"], "-", amounts)


def types(client: KubeClient) -> tuple[Type, ...]:
    """All, by name. Raises `KubeError`."""
    found = map(_type, client.objects(paths.resourceclasses()))
    return tuple(sorted(found, key=lambda each: each.name))


def look(client: KubeClient, missing: errors.Forbidden, nodes: Collection[str] = ()) -> Visible:
    """`nodes`: show pods of these only. Raises `missing` where nothing may be read, and `KubeError`."""
    try:
        known: tuple[Type, ...] | None = types(client)
    except errors.Forbidden:
        known = None
    try:
        held = survey.of_pods(client, client.namespace)
    except errors.Forbidden:
        if known is None:
            raise missing from None
        return Visible(client.namespace, known, None)
    shares = (
        PodShare(holding.namespace, holding.name, holding.node, share.index, share.mem)
        for holding in held.holdings()
        for share in holding.assignment.shares()
        if not nodes or holding.node in nodes
    )
    return Visible(client.namespace, known, tuple(sorted(shares, key=lambda one: (one.pod, one.card))))
