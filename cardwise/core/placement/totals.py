"""Totals for users: for each class and quota entry, the total amounts, the used part, and the pods that use it.

Commands and statuses use these totals, which are computed from the ledger; placement does not. Devices other than GPUs
are allocated as a whole, so they are only counted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from cardwise.core.api import quotas
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.quotas import NO_CHARGE, Charge, GPUQuota, QuotaEntry
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CardClassView:
    """A class of cards, with the totals of its cards.

    amounts: the totals, by field name of a ResourceClass's status.
    users: the amounts that each namespace uses, the namespace with the most memory first.
    """

    resource_class: ResourceClass
    amounts: Mapping[str, int]
    users: tuple[tuple[str, Charge], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClassView:
    """A class of devices other than GPUs, with counts.

    users: how many devices each namespace uses, the largest number first.
    """

    resource_class: ResourceClass
    devices: int
    healthy: int
    nodes: int
    used: int
    free: int
    users: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """One entry of a GPUQuota, with the amounts in use.

    used: the amounts that the namespace uses.
    holders: the pods that use the entry's amounts, with the amounts of each pod. The pod with the most memory is first.
    missing_class_reason: why the entry's class does not exist. Such an entry limits nothing; None if it exists.
    """

    quota: GPUQuota
    entry: QuotaEntry
    used: Charge
    holders: tuple[tuple[Holding, Charge], ...]
    missing_class_reason: str | None = None


def only_namespaces(ledger: Ledger, node: NodeState) -> dict[int, str]:
    """By position of a card, the namespace whose pods alone may share the card, as a pod there demands.

    Whole cards are left out, and so are shares of deleted pods, whose demand is unknown.
    """
    return {
        position: holding.namespace
        for holding in ledger.holdings(node.name)
        if holding.mps_client.tenant.exclusive and holding.phase_name != REPORTED_PHASE
        for share in holding.assignment.shares()
        if not share.whole and (position := node.position(share)) is not None
    }


def classes_of_cards(
    ledger: Ledger, classes: Mapping[str, ResourceClass], only: str | None = None
) -> list[CardClassView]:
    """All classes of cards, ordered by name; or only the class with the name `only`."""
    namespaces = sorted({holding.namespace for holding in ledger.holdings()})
    return [
        _card_class_view(ledger, classes[name], namespaces)
        for name in sorted(classes)
        if not classes[name].other and only in (None, name)
    ]


def _card_class_view(ledger: Ledger, resource_class: ResourceClass, namespaces: Collection[str]) -> CardClassView:
    of_class = [
        (node, i) for node in ledger.nodes() for i, card in enumerate(node.cards) if resource_class.name in card.classes
    ]
    entry = QuotaEntry(resource_class=resource_class.name)
    charges = [(namespace, ledger.used_amounts(namespace, entry)) for namespace in namespaces]
    return CardClassView(
        resource_class=resource_class,
        amounts={
            "devices": len(of_class),
            "healthyDevices": sum(node.cards[i].healthy for node, i in of_class),
            "nodes": len({node.name for node, _ in of_class}),
            "memoryMiB": sum(node.cards[i].mem for node, i in of_class),
            "usedMiB": sum(node.used[i] for node, i in of_class),
            "freeMiB": sum(node.free_mib(i) for node, i in of_class),
        },
        users=tuple(sorted((user for user in charges if user[1] != NO_CHARGE), key=lambda user: -user[1].memory)),
    )


def classes_of_devices(
    ledger: Ledger, classes: Mapping[str, ResourceClass], only: str | None = None
) -> list[DeviceClassView]:
    """All classes of devices other than GPUs, ordered by name; or only the class with the name `only`."""
    by_device = [(node, device_holders(ledger, node)) for node in ledger.nodes() if node.devices]
    return [
        _device_class_view(classes[name], by_device)
        for name in sorted(classes)
        if classes[name].other and only in (None, name)
    ]


def _device_class_view(
    resource_class: ResourceClass, nodes: Iterable[tuple[NodeState, Mapping[str, list[Holding]]]]
) -> DeviceClassView:
    of_class = [
        (node, device, holdings)
        for node, holdings in nodes
        for device in node.devices
        if resource_class.name in device.classes
    ]
    users = Counter(holding.namespace for _, device, holdings in of_class for holding in holdings.get(device.uuid, ()))
    return DeviceClassView(
        resource_class=resource_class,
        devices=len(of_class),
        healthy=sum(device.healthy for _, device, _ in of_class),
        nodes=len({node.name for node, _, _ in of_class}),
        used=sum(device.uuid in node.device_holds for node, device, _ in of_class),
        free=sum(node.is_free(device) for node, device, _ in of_class),
        users=tuple(sorted(users.items(), key=lambda user: (-user[1], user[0]))),
    )


def device_holders(ledger: Ledger, node: NodeState) -> dict[str, list[Holding]]:
    """The holdings of each device of the node, by the device's UUID."""
    by_uuid: dict[str, list[Holding]] = {}
    for holding in ledger.holdings(node.name):
        for share in holding.assignment.non_gpu_devices():
            by_uuid.setdefault(share.uuid, []).append(holding)
    return by_uuid


def quota_entries(
    ledger: Ledger,
    gpu_quotas: Iterable[GPUQuota],
    explain_missing_class: Callable[[str], str | None],
    namespace: str = "",
) -> list[EntryView]:
    """The entries of the GPUQuotas of a namespace ("": of all namespaces), ordered by namespace and name.

    explain_missing_class: returns why a class does not exist; None if it does.
    """
    by_namespace: dict[str, list[Holding]] = {}
    for holding in ledger.holdings():
        if holding.charged:
            by_namespace.setdefault(holding.namespace, []).append(holding)
    views = []
    for quota in sorted(gpu_quotas, key=lambda quota: (quota.namespace, quota.name)):
        for entry in quota.entries if namespace in ("", quota.namespace) else ():
            charges = [
                (holding, charge_to_entry(ledger, holding, entry)) for holding in by_namespace.get(quota.namespace, ())
            ]
            holders = sorted(
                (holder for holder in charges if holder[1] != NO_CHARGE),
                key=lambda holder: (-holder[1].memory, holder[0].name),
            )
            views.append(
                EntryView(
                    quota=quota,
                    entry=entry,
                    used=ledger.used_amounts(quota.namespace, entry),
                    holders=tuple(holders),
                    missing_class_reason=explain_missing_class(entry.resource_class) if entry.resource_class else None,
                )
            )
    return views


def quota_entries_from_statuses(objects: Iterable[Json]) -> list[EntryView]:
    """The entries with the amounts in the statuses of the GPUQuotas, for users who may not read cards. An invalid
    GPUQuota limits nothing and is left out.
    """
    views = []
    for manifest in objects:
        try:
            quota = quotas.parse(manifest)
        except InvalidRequest:
            continue
        used = quotas.used_by_status(manifest)
        for entry in quota.entries:
            charge = used.get((entry.resource_class, entry.model), NO_CHARGE)
            views.append(EntryView(quota=quota, entry=entry, used=charge, holders=()))
    return sorted(views, key=lambda view: (view.quota.namespace, view.quota.name))


def charge_to_entry(ledger: Ledger, holding: Holding, entry: QuotaEntry) -> Charge:
    """The charge of one pod to the entry."""
    uses = holding.assignment.card_uses()
    return quotas.sum_charges(
        quotas.charge_of_use(use)
        for use in uses
        if ledger.kinds.is_covered(ledger.kind_of_share(holding.node, use), entry)
    )
