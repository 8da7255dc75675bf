"""The view of a user without the right to read cards: the GPU types with their free amounts, and the user's own pods.

The types are read from the statuses of ResourceClasses, the pods' cards from the pods' annotations.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.decoded import Json
from cardwise.kube import clusterstate, errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import resourceclasses

# Fields of a ResourceClass's status, by the heads of their columns.
STATUS_FIELD_BY_COLUMN: Final = {
    "GPUS": "devices", "NODES": "nodes", "FREE-MIB": "freeMiB", "USED-MIB": "usedMiB", "TOTAL-MIB": "memoryMiB",
}  # fmt: skip
HEALTHY_COUNT_FIELD: Final = "healthyDevices"
AMOUNT_FIELDS: Final = (*STATUS_FIELD_BY_COLUMN.values(), HEALTHY_COUNT_FIELD)


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """A ResourceClass in the tables.

    share: one unit of the class, in words.
    amounts: the AMOUNT_FIELDS of the class by their names in the status; None if the extender has not written them.
    priority: the priority of the class; "-" for an invalid class.
    auto: "yes" if Cardwise created the class; "edited" if a user has changed the class since; then Cardwise leaves it
        as it is; "no" if a user created it; "-" for an invalid class.
    is_device_class: whether the class is for devices other than GPUs.
    """

    name: str
    share: str
    amounts: Mapping[str, int | None]
    priority: str = "-"
    auto: str = "-"
    is_device_class: bool = False


@dataclass(frozen=True, slots=True)
class PodShare:
    """A pod's share of a card. `card`: the card's index; `mem`: MiB."""

    namespace: str
    pod: str
    node: str
    card: int
    mem: int


@dataclass(frozen=True, slots=True)
class VisibleCluster:
    """The GPU types, and the shares of pods in the user's namespace. Each is None if reading it is forbidden."""

    namespace: str
    types: tuple[ClassSummary, ...] | None
    shares: tuple[PodShare, ...] | None


def summarize_class(resource_class: ResourceClass, amounts: Mapping[str, int | None]) -> ClassSummary:
    """Summarize a valid class.

    amounts: as in ClassSummary.
    """
    auto = "no" if not resource_class.auto else "yes" if resource_class.untouched else "edited"
    share = "device" if resource_class.other else _describe_share(resource_class)
    return ClassSummary(resource_class.name, share, amounts, str(resource_class.priority), auto, resource_class.other)


def _describe_share(resource_class: ResourceClass) -> str:
    if resource_class.share is None:
        return "whole GPU"
    core = f" {resource_class.share.core}%" if resource_class.share.core else ""
    return f"{resource_class.share.memory} MiB{core}"


def _summarize_manifest(manifest: Json) -> ClassSummary:
    status = manifest.get("status") or {}
    amounts = {key: status.get(key) for key in AMOUNT_FIELDS}
    record = resourceclasses.record_of(manifest)
    if record.resource_class is None:
        return ClassSummary(record.name, "-", amounts)
    return summarize_class(record.resource_class, amounts)


def read_classes(client: KubeClient) -> tuple[ClassSummary, ...]:
    """Read all ResourceClasses, sorted by name. Raises `KubeError`."""
    summaries = map(_summarize_manifest, client.list_objects(paths.resourceclasses()))
    return tuple(sorted(summaries, key=lambda summary: summary.name))


def read_visible(client: KubeClient, denied: errors.Forbidden, only_nodes: Collection[str] = ()) -> VisibleCluster:
    """Read the view. Raises `denied` if neither types nor pods may be read, and `KubeError`.

    only_nodes: include only pods on these nodes; empty for all.
    """
    try:
        summaries: tuple[ClassSummary, ...] | None = read_classes(client)
    except errors.Forbidden:
        summaries = None
    try:
        own_ledger = clusterstate.read_own_ledger(client, client.namespace)
    except errors.Forbidden:
        if summaries is None:
            raise denied from None
        return VisibleCluster(client.namespace, summaries, None)
    shares = (
        PodShare(holding.namespace, holding.name, holding.node, card_share.index, card_share.mem)
        for holding in own_ledger.holdings()
        for card_share in holding.assignment.shares()
        if not only_nodes or holding.node in only_nodes
    )
    return VisibleCluster(client.namespace, summaries, tuple(sorted(shares, key=lambda share: (share.pod, share.card))))
