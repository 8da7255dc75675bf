"""Devices that are not GPUs, on every screen: how many there are of a class, which are free, and who has them.

A device is given whole or not at all, so counts are added up and no memory. What `explain` finds is a type only:
`inspect` and `classes` wait for none of its search.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cardwise.cli.render import tables
from cardwise.core.placement import inventory
from cardwise.core.placement.inventory import DeviceClassView
from cardwise.core.placement.ledger import Holding, Ledger
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.values import wording
from cardwise.core.values.refusals import Refusal
from cardwise.kube.survey import Survey

if TYPE_CHECKING:
    from cardwise.core.preemption.explanation import DevicesView

_FEW = 10  # nodes named in one line
_NOBODY = "Nobody uses it.\n"


# `cardwise classes`.


def table(seen: Sequence[DeviceClassView], *, wide: bool = False) -> str:
    """One row for each class; wide, also who uses each."""
    heads = ["DEVICE-CLASS", "DEVICES", "NODES", "FREE", "USED"]
    rows = [[*heads, "HEALTHY"] if wide else heads]
    for view in seen:
        counts = (view.devices, view.nodes, view.free, view.used)
        row = [view.known.name, *map(str, counts)]
        rows.append([*row, str(view.healthy)] if wide else row)
    return tables.together([rows, _users(seen)]) if wide else tables.aligned(rows)


def single(view: DeviceClassView) -> str:
    """The row of one class and who uses it."""
    users = [row[1:] for row in _users([view])]
    return f"{table([view])}\n{tables.aligned(users) if view.users else _NOBODY}"


def _users(seen: Sequence[DeviceClassView]) -> list[list[str]]:
    rows = [["DEVICE-CLASS", "NAMESPACE", "DEVICES"]]
    return rows + [[view.known.name, namespace, str(count)] for view in seen for namespace, count in view.users]


def as_json(seen: Sequence[DeviceClassView]) -> list[dict[str, Any]]:
    """All of it, for programs."""
    return [
        {
            "name": view.known.name,
            "devices": view.devices,
            "healthyDevices": view.healthy,
            "nodes": view.nodes,
            "free": view.free,
            "used": view.used,
            "users": [{"namespace": namespace, "devices": count} for namespace, count in view.users],
        }
        for view in seen
    ]


# `cardwise inspect`.


def of_node(ledger: Ledger, node: NodeState) -> str:
    """The table of a node's devices and who holds each; nothing where it has none."""
    held = inventory.device_holders(ledger, node)
    rows = [["DEVICE", "KIND", "MODEL", "CLASSES", "HELD-BY"]]
    for device in node.devices:
        by = ", ".join(name(holding) for holding in held.get(device.uuid, ()))
        why = ", ".join(["unhealthy"] * (not device.healthy) + ["cordoned"] * device.cordoned)
        state = (by or "-") + (f" ({why})" if why and (device.cordoned or not by) else "")
        rows.append([device.uuid, device.kind, device.model or "-", ",".join(sorted(device.classes)) or "-", state])
    return tables.together([rows])


def objects(ledger: Ledger, node: NodeState) -> list[dict[str, Any]]:
    """The devices of the node as objects, for programs."""
    held = inventory.device_holders(ledger, node)
    return [
        {
            "index": device.index,
            "uuid": device.uuid,
            "kind": device.kind,
            "model": device.model,
            "healthy": device.healthy,
            "cordoned": device.cordoned,
            "classes": sorted(device.classes),
            "pods": [{"namespace": h.namespace, "name": h.name, "uid": h.uid} for h in held.get(device.uuid, ())],
        }
        for device in node.devices
    ]


# `cardwise explain`.


def of_class(name_of_class: str, survey: Survey) -> str:
    """Which devices are of the class and where some are free, in one line."""
    by_node = {
        node: [device for device in node.devices if name_of_class in device.classes] for node in survey.ledger.nodes()
    }
    devices = [device for of_one in by_node.values() for device in of_one]
    if not devices:
        return (
            f"No device is of class {name_of_class}: see its selector with "
            f"`kubectl get resourceclass {name_of_class} -o yaml`."
        )
    free = {node.name: sum(inventory.is_free(node, one) for one in of_one) for node, of_one in by_node.items()}
    sick = sum(not device.healthy for device in devices)
    return (
        f"Of class {name_of_class}: {wording.count(len(devices), 'device')} on "
        f"{_listed({node.name: len(of_one) for node, of_one in by_node.items()})}"
        + (f", {sick} of them unhealthy" if sick else "")
        + f"; free: {_listed(free) or 'none'}."
    )


def shortage(seen: "Sequence[DevicesView]") -> list[str]:
    """What a node that was refused for its devices has of each class that is asked for, and who holds it."""
    lines = [f"    {_of_node(view)}" for view in seen if view.total]
    if lines and all(view.free >= view.asked for view in seen):
        lines.append("    each class has enough free, but some of these devices are of several: together too few")
    return lines


def _of_node(view: "DevicesView") -> str:
    short, sick = view.asked - view.free, view.total - view.healthy
    return (
        f"{view.device_class}: {view.asked} asked, {view.free} of {wording.count(view.total, 'device')} free"
        + (f", {short} short" if short > 0 else "")
        + (f", {sick} unhealthy" if sick else "")
        + (f", held by {', '.join(sorted(map(name, view.holders)))}" if view.holders else "")
    )


def is_about_devices(refusal: Refusal | None) -> bool:
    """Whether a node was refused for its devices, so that its cards say nothing."""
    return refusal in (Refusal.NO_SUCH_DEVICE, Refusal.NO_DEVICE)


def name(holding: Holding) -> str:
    """A pod, and what is special about its hold."""
    plain = f"{holding.namespace}/{holding.name}"
    return f"{plain} ({holding.mark})" if holding.mark else plain


def _listed(counts: Mapping[str, int]) -> str:
    """Nodes with a number each, without those that have none."""
    on = [f"{node} ({count})" for node, count in counts.items() if count]
    return wording.few(on, _FEW, "node")
