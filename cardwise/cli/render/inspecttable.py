"""The tables and the JSON of `cardwise inspect`, from a ledger, in the layout of `kubectl inspect gpushare`.

The layout is that of gpushare (gpushare-device-plugin `cmd/inspect/display.go`), because people and scripts know it.
There are two differences: cards of different sizes in one node show their own size, and nodes are sorted by name.
Devices other than GPUs have a separate table, because they have no memory to add up.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from cardwise.cli.render import tables
from cardwise.core.placement import totals
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values.decoded import Json
from cardwise.kube.objects.extendedresources import IsolationStatus

_NO_ISOLATION: Mapping[str, IsolationStatus] = MappingProxyType({})


def summary(ledger: Ledger, addresses: Mapping[str, str], node_name: str | None = None) -> str:
    """Format one row per node: used/total MiB of each card and of the node."""
    nodes = nodes_with_cards(ledger, node_name)
    columns = max((card.index + 1 for node in nodes for card in node.cards), default=0)
    rows = [["NAME", "IPADDRESS", *(f"GPU{i}(Allocated/Total)" for i in range(columns)), "GPU Memory(MiB)"]]
    for node in nodes:
        cells = ["0/0"] * columns
        for used, card in zip(node.used, node.cards, strict=True):
            cells[card.index] = f"{used}/{card.mem}"
        rows.append([node.name, addresses.get(node.name, "unknown"), *cells, f"{_used_mib(node)}/{_total_mib(node)}"])
    table = tables.align_rows(rows)
    line = "-" * max(len(row) for row in table.splitlines())
    # These lines stand below the table, because scripts parse the rows of the table.
    unusable_text = "".join(
        f"{state}, so they get no new shares: {', '.join(card_names)}\n"
        for state, card_names in (
            ("Unhealthy", _names_of_cards(nodes, _unhealthy_cards)),
            ("Cordoned", _names_of_cards(nodes, _cordoned_cards)),
        )
        if card_names
    )
    shared_within = ", ".join(f"{node.name} {name}" for node in nodes for name in _cards_of_one_namespace(ledger, node))
    sharing_text = f"Shared within one namespace only: {shared_within}\n" if shared_within else ""
    cluster_text = f"Allocated/Total GPU Memory In Cluster:\n{_format_cluster(nodes)}\n"
    return f"{table}{line}\n{cluster_text}{unusable_text}{sharing_text}"


def details(
    ledger: Ledger,
    addresses: Mapping[str, str],
    node_name: str | None = None,
    *,
    isolation: Mapping[str, IsolationStatus] = _NO_ISOLATION,
) -> str:
    """Format two tables per node: the MiB that each pod holds on each card, and the other devices.

    isolation: what limits the shares of cards, by UUID.
    """
    nodes = nodes_with_cards(ledger, node_name)
    parts = []
    for node in nodes_with_devices(ledger, node_name):
        names = [["NAME:", node.name], ["IPADDRESS:", addresses.get(node.name, "unknown")]]
        rows = [*names, *_model_rows(node), *_isolation_rows(node, isolation), *_closed_rows(ledger, node)]
        head = tables.align_rows(rows)
        body = [_pods_table(ledger, node)] if node.cards else []
        body += [_devices_table(ledger, node).rstrip()] if node.devices else []
        parts.append("\n{}\n{}\n".format(head, "\n\n".join(body)))
    return "".join(parts) + f"\n\nAllocated/Total GPU Memory In Cluster:  {_format_cluster(nodes)}\n"


def _pods_table(ledger: Ledger, node: NodeState) -> str:
    """Format the MiB that each pod holds on each card of the node."""
    heads = [f"GPU{card.index}(Allocated)" for card in node.cards]
    rows = [["NAME", "NAMESPACE", *heads]]
    for holding in sorted(ledger.holdings(node.name), key=lambda entry: (entry.namespace, entry.name)):
        if not holding.assignment.containers:
            continue  # the pod holds only devices
        mib_by_card = [0] * len(node.cards)
        for share in holding.assignment.shares():
            position = node.position(share)
            if position is not None:
                mib_by_card[position] += share.mem
        other_node_note = f" (of node {holding.node})" if holding.node != node.name else ""
        rows.append([holding.name_with_phase + other_node_note, holding.namespace, *map(str, mib_by_card)])
    sums = [
        ["Allocated :", f"{_used_mib(node)} ({_format_percent(_used_mib(node), _total_mib(node))})"],
        ["Total :", str(_total_mib(node))],
    ]
    table = tables.align_rows(rows) + tables.align_rows(sums)
    line = "-" * max(len(row) for row in table.splitlines())
    return f"{table}{line}"


def _devices_table(ledger: Ledger, node: NodeState) -> str:
    """Format the devices of the node and the pods that hold them."""
    holders_by_uuid = totals.device_holders(ledger, node)
    rows = [["DEVICE", "KIND", "MODEL", "CLASSES", "USED-BY"]]
    for device in node.devices:
        holder_names = ", ".join(
            f"{holding.namespace}/{holding.name_with_phase}" for holding in holders_by_uuid.get(device.uuid, ())
        )
        reason = ", ".join(["unhealthy"] * (not device.healthy) + ["cordoned"] * device.cordoned)
        state = (holder_names or "-") + (f" ({reason})" if reason and (device.cordoned or not holder_names) else "")
        rows.append([device.uuid, device.kind, device.model or "-", ",".join(sorted(device.classes)) or "-", state])
    return tables.stack_tables([rows])


def nodes_with_cards(ledger: Ledger, node_name: str | None = None) -> list[NodeState]:
    """Return the nodes that have cards; with `node_name` only this node."""
    return [node for node in ledger.nodes() if node.cards and node_name in (None, node.name)]


def nodes_with_devices(ledger: Ledger, node_name: str | None = None) -> list[NodeState]:
    """Return the nodes that have cards or other devices; with `node_name` only this node."""
    return [node for node in ledger.nodes() if (node.cards or node.devices) and node_name in (None, node.name)]


def _model_rows(node: NodeState) -> list[list[str]]:
    """Return rows with the models of the node's cards, which gpushare does not print; one row if all are equal."""
    models = [card.model or "unknown" for card in node.cards]
    if not models:
        return []
    if len(set(models)) == 1:
        return [["MODEL:", models[0]]]
    return [[f"GPU{card.index}:", model] for card, model in zip(node.cards, models, strict=True)]


def _isolation_rows(node: NodeState, isolation: Mapping[str, IsolationStatus]) -> list[list[str]]:
    """Return a row with what limits memory and SMs of shares on the cards whose node reports it."""
    tiers = [
        f"GPU{card.index} memory {isolation[card.uuid].memory}, SMs {isolation[card.uuid].compute}"
        for card in node.cards
        if card.uuid in isolation
    ]
    return [["ISOLATION:", "; ".join(tiers)]] if tiers else []


def _unhealthy_cards(node: NodeState) -> list[str]:
    """Describe the node's unhealthy cards."""
    return [f"GPU{card.index}" for card in node.cards if not card.healthy]


def _cordoned_cards(node: NodeState) -> list[str]:
    """Describe the node's cordoned cards."""
    return [f"GPU{card.index}" for card in node.cards if card.cordoned]


def _names_of_cards(nodes: Sequence[NodeState], cards_of: Callable[[NodeState], list[str]]) -> list[str]:
    return [f"{node.name} {name}" for node in nodes for name in cards_of(node)]


def _cards_of_one_namespace(ledger: Ledger, node: NodeState) -> list[str]:
    """Describe the node's cards that only pods of one namespace may share."""
    namespaces = totals.only_namespaces(ledger, node)
    return [f"GPU{card.index} ({namespaces[i]})" for i, card in enumerate(node.cards) if i in namespaces]


def _closed_rows(ledger: Ledger, node: NodeState) -> list[list[str]]:
    """Return rows with the cards that take no pods, or pods of one namespace only."""
    rows = [
        ["UNHEALTHY:", ", ".join(_unhealthy_cards(node))],
        ["CORDONED:", ", ".join(_cordoned_cards(node))],
        ["ONLY-NAMESPACE:", ", ".join(_cards_of_one_namespace(ledger, node))],
    ]
    return [line for line in rows if line[1]]


def _used_mib(node: NodeState) -> int:
    return sum(node.used)


def _total_mib(node: NodeState) -> int:
    return sum(card.mem for card in node.cards)


def _format_percent(part: int, whole: int) -> str:
    return f"{part * 100 // whole if whole else 0}%"


def _format_cluster(nodes: Sequence[NodeState]) -> str:
    used, total = sum(map(_used_mib, nodes)), sum(map(_total_mib, nodes))
    return f"{used}/{total} ({_format_percent(used, total)})"


def as_json(
    ledger: Ledger,
    addresses: Mapping[str, str],
    unschedulable_reasons: Mapping[str, str],
    node_name: str | None = None,
    *,
    isolation: Mapping[str, IsolationStatus] = _NO_ISOLATION,
) -> Json:
    """The output as JSON, with all fields.

    unschedulable_reasons: why nodes take no new pods, by node.
    node_name: the only node to print; None for all nodes.
    isolation: what limits the shares of cards, by UUID.
    """
    return {
        "nodes": [
            {
                "name": node.name,
                "address": addresses.get(node.name, "unknown"),
                "unschedulableReason": unschedulable_reasons.get(node.name, ""),
                "gpus": _card_objects(ledger, node, isolation),
                "devices": _device_objects(ledger, node),
            }
            for node in ledger.nodes()
            if node_name in (None, node.name)
        ]
    }


def _card_objects(ledger: Ledger, node: NodeState, isolation: Mapping[str, IsolationStatus]) -> list[Json]:
    holdings, namespaces = ledger.holdings(node.name), totals.only_namespaces(ledger, node)
    return [
        {
            "index": card.index,
            "uuid": card.uuid,
            "model": card.model,
            "healthy": card.healthy,
            "cordoned": card.cordoned,
            "onlyNamespace": namespaces.get(i),
            "isolation": msgspec.to_builtins(isolation.get(card.uuid)),
            "totalMiB": card.mem,
            "usedMiB": node.used[i],
            "pods": [
                {"namespace": holding.namespace, "name": holding.name, "uid": holding.uid, "usedMiB": share.mem}
                for holding in holdings
                for share in holding.assignment.shares()
                if node.position(share) == i
            ],
        }
        for i, card in enumerate(node.cards)
    ]


def _device_objects(ledger: Ledger, node: NodeState) -> list[Json]:
    holders_by_uuid = totals.device_holders(ledger, node)
    return [
        {
            "index": device.index,
            "uuid": device.uuid,
            "kind": device.kind,
            "model": device.model,
            "healthy": device.healthy,
            "cordoned": device.cordoned,
            "classes": sorted(device.classes),
            "pods": [
                {"namespace": holding.namespace, "name": holding.name, "uid": holding.uid}
                for holding in holders_by_uuid.get(device.uuid, ())
            ],
        }
        for device in node.devices
    ]
