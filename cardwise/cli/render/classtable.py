"""The tables of `cardwise classes`: classes of cards and of devices, and what the extender says of either.

A device is given whole or not at all, so devices are counted, and no memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from cardwise.cli.cluster import visible
from cardwise.cli.cluster.visible import COLUMNS, HEALTHY, Type
from cardwise.cli.render import tables
from cardwise.core.placement.totals import CardClassView, DeviceClassView
from cardwise.core.values.decoded import Json

_SPARE: Final = ("AUTO", "PRIORITY", "NODES", "USED-MIB")  # of a terminal that has few columns
_NOBODY: Final = "Nobody uses it.\n"


# Classes of cards.


def of_cards(seen: Sequence[CardClassView], columns: int | None = None, *, wide: bool = False) -> str:
    """One row for each class; wide, also who uses each. `columns`: of the terminal."""
    rows = _cards(visible.typed(view.known, view.amounts) for view in seen)
    if not wide:
        return tables.within(rows, columns, _SPARE)
    healthy = ["HEALTHY", *(str(view.amounts[HEALTHY]) for view in seen)]
    return tables.together([[[*row, cell] for row, cell in zip(rows, healthy, strict=True)], _users_of_cards(seen)])


def one_of_cards(view: CardClassView, columns: int | None = None) -> str:
    """The row of one class and who uses it. `columns`: of the terminal."""
    users = [row[1:] for row in _users_of_cards([view])]
    return f"{of_cards([view], columns)}\n{tables.aligned(users) if view.users else _NOBODY}"


def cards_as_json(seen: Sequence[CardClassView]) -> list[Json]:
    """All of it, for programs."""
    return [_card_class(view) for view in seen]


def _card_class(view: CardClassView) -> Json:
    share = view.known.share
    return {
        "name": view.known.name,
        **view.amounts,
        "share": None if share is None else {"memoryMiB": int(share.memory), "corePercent": int(share.core)},
        "priority": view.known.priority,
        "auto": view.known.auto,
        "edited": view.known.auto and not view.known.untouched,
        "users": [
            {"namespace": namespace, "shares": held.shares, "memoryMiB": held.memory, "cards": held.cards}
            for namespace, held in view.users
        ],
    }


def _users_of_cards(seen: Sequence[CardClassView]) -> list[list[str]]:
    rows = [["CLASS", "NAMESPACE", "SHARES", "MIB", "WHOLE-CARDS"]]
    rows += [
        [view.known.name, namespace, str(held.shares), str(held.memory), str(held.cards)]
        for view in seen
        for namespace, held in view.users
    ]
    return rows


# Classes of devices.


def of_devices(seen: Sequence[DeviceClassView], *, wide: bool = False) -> str:
    """One row for each class; wide, also who uses each."""
    heads = ["DEVICE-CLASS", "DEVICES", "NODES", "FREE", "USED"]
    rows = [[*heads, "HEALTHY"] if wide else heads]
    for view in seen:
        counts = (view.devices, view.nodes, view.free, view.used)
        row = [view.known.name, *map(str, counts)]
        rows.append([*row, str(view.healthy)] if wide else row)
    return tables.together([rows, _users_of_devices(seen)]) if wide else tables.aligned(rows)


def one_of_devices(view: DeviceClassView) -> str:
    """The row of one class and who uses it."""
    users = [row[1:] for row in _users_of_devices([view])]
    return f"{of_devices([view])}\n{tables.aligned(users) if view.users else _NOBODY}"


def devices_as_json(seen: Sequence[DeviceClassView]) -> list[Json]:
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


def _users_of_devices(seen: Sequence[DeviceClassView]) -> list[list[str]]:
    rows = [["DEVICE-CLASS", "NAMESPACE", "DEVICES"]]
    return rows + [[view.known.name, namespace, str(count)] for view in seen for namespace, count in view.users]


# Both, as the extender says it.


def of_types(found: Sequence[Type], columns: int | None) -> str:
    """As `of_cards` and `of_devices` have them. `columns`: of the terminal."""
    cards = _cards(one for one in found if not one.other)
    devices = [["DEVICE-CLASS", "DEVICES", "NODES", "HEALTHY"]]
    devices += [[one.name, *(_amount(one, key) for key in ("cards", "nodes", HEALTHY))] for one in found if one.other]
    parts = [tables.within(cards, columns, _SPARE)] if len(cards) > 1 or len(devices) == 1 else []
    return "\n".join([*parts, *([tables.aligned(devices)] if len(devices) > 1 else [])])


def type_as_json(one: Type) -> dict[str, Any]:
    """All of it, for programs."""
    return {"name": one.name, "one": one.one, **one.amounts}


def _cards(found: Iterable[Type]) -> list[list[str]]:
    """The rows of classes of cards, with their heads."""
    rows = [["CLASS", *COLUMNS, "SHARE", "PRIORITY", "AUTO"]]
    rows += [
        [one.name, *(_amount(one, key) for key in COLUMNS.values()), one.one, one.priority, one.auto] for one in found
    ]
    return rows


def _amount(one: Type, key: str) -> str:
    amount = one.amounts[key]
    return "-" if amount is None else str(amount)
