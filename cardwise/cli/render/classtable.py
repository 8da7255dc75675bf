"""The tables of `cardwise classes`: classes of GPUs and of other devices.

A device is allocated as a whole, so devices are counted, without memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from cardwise.cli.cluster import visible
from cardwise.cli.cluster.visible import HEALTHY_COUNT_FIELD, STATUS_FIELD_BY_COLUMN, ClassSummary
from cardwise.cli.render import tables
from cardwise.core.placement.totals import CardClassView, DeviceClassView
from cardwise.core.values.decoded import Json

_OPTIONAL_COLUMNS: Final = ("AUTO", "PRIORITY", "NODES", "USED-MIB")  # columns that are left out on a narrow terminal
_NO_USERS_TEXT: Final = "No pod uses it.\n"


# Classes of cards.


def format_card_classes(views: Sequence[CardClassView], columns: int | None = None, *, wide: bool = False) -> str:
    """Format one row per class; wide: also the namespaces that use it. `columns`: the width of the terminal."""
    rows = _card_rows(visible.summarize_class(view.resource_class, view.amounts) for view in views)
    if not wide:
        return tables.fit_columns(rows, columns, _OPTIONAL_COLUMNS)
    healthy_column = ["HEALTHY", *(str(view.amounts[HEALTHY_COUNT_FIELD]) for view in views)]
    return tables.stack_tables(
        [[[*row, cell] for row, cell in zip(rows, healthy_column, strict=True)], _card_user_rows(views)]
    )


def format_card_class(view: CardClassView, columns: int | None = None) -> str:
    """Format the row of one class and the namespaces that use it. `columns`: the width of the terminal."""
    users = [row[1:] for row in _card_user_rows([view])]
    return f"{format_card_classes([view], columns)}\n{tables.align_rows(users) if view.users else _NO_USERS_TEXT}"


def card_classes_as_json(views: Sequence[CardClassView]) -> list[Json]:
    """The output as JSON, with all fields."""
    return [_class_as_json(view) for view in views]


def _class_as_json(view: CardClassView) -> Json:
    share = view.resource_class.share
    return {
        "name": view.resource_class.name,
        **view.amounts,
        "share": None if share is None else {"memoryMiB": int(share.memory), "corePercent": int(share.core)},
        "priority": view.resource_class.priority,
        "auto": view.resource_class.auto,
        "edited": view.resource_class.auto and not view.resource_class.untouched,
        "users": [
            {"namespace": namespace, "shares": used.shares, "memoryMiB": used.memory, "gpus": used.cards}
            for namespace, used in view.users
        ],
    }


def _card_user_rows(views: Sequence[CardClassView]) -> list[list[str]]:
    rows = [["CLASS", "NAMESPACE", "SHARES", "MIB", "WHOLE-GPUS"]]
    rows += [
        [view.resource_class.name, namespace, str(used.shares), str(used.memory), str(used.cards)]
        for view in views
        for namespace, used in view.users
    ]
    return rows


# Classes of devices.


def format_device_classes(views: Sequence[DeviceClassView], *, wide: bool = False) -> str:
    """Format one row per class; wide: also the namespaces that use it."""
    heads = ["DEVICE-CLASS", "DEVICES", "NODES", "FREE", "USED"]
    rows = [[*heads, "HEALTHY"] if wide else heads]
    for view in views:
        counts = (view.devices, view.nodes, view.free, view.used)
        row = [view.resource_class.name, *map(str, counts)]
        rows.append([*row, str(view.healthy)] if wide else row)
    return tables.stack_tables([rows, _device_user_rows(views)]) if wide else tables.align_rows(rows)


def format_device_class(view: DeviceClassView) -> str:
    """Format the row of one class and the namespaces that use it."""
    users = [row[1:] for row in _device_user_rows([view])]
    return f"{format_device_classes([view])}\n{tables.align_rows(users) if view.users else _NO_USERS_TEXT}"


def devices_as_json(views: Sequence[DeviceClassView]) -> list[Json]:
    """The output as JSON, with all fields."""
    return [
        {
            "name": view.resource_class.name,
            "devices": view.devices,
            "healthyDevices": view.healthy,
            "nodes": view.nodes,
            "free": view.free,
            "used": view.used,
            "users": [{"namespace": namespace, "devices": count} for namespace, count in view.users],
        }
        for view in views
    ]


def _device_user_rows(views: Sequence[DeviceClassView]) -> list[list[str]]:
    rows = [["DEVICE-CLASS", "NAMESPACE", "DEVICES"]]
    return rows + [
        [view.resource_class.name, namespace, str(count)] for view in views for namespace, count in view.users
    ]


# Both kinds of classes, from the statuses that the extender writes.


def format_summaries(summaries: Sequence[ClassSummary], columns: int | None) -> str:
    """Format summaries in the tables of `format_card_classes` and `format_device_classes`.

    columns: the width of the terminal.
    """
    cards = _card_rows(summary for summary in summaries if not summary.is_device_class)
    devices = [["DEVICE-CLASS", "DEVICES", "NODES", "HEALTHY"]]
    devices += [
        [summary.name, *(_format_amount(summary, key) for key in ("devices", "nodes", HEALTHY_COUNT_FIELD))]
        for summary in summaries
        if summary.is_device_class
    ]
    parts = [tables.fit_columns(cards, columns, _OPTIONAL_COLUMNS)] if len(cards) > 1 or len(devices) == 1 else []
    return "\n".join([*parts, *([tables.align_rows(devices)] if len(devices) > 1 else [])])


def summary_as_json(summary: ClassSummary) -> dict[str, Any]:
    """The output as JSON, with all fields."""
    return {"name": summary.name, "unit": summary.share, **summary.amounts}


def _card_rows(summaries: Iterable[ClassSummary]) -> list[list[str]]:
    """Return the heads of the columns and one row per class of cards."""
    rows = [["CLASS", *STATUS_FIELD_BY_COLUMN, "SHARE", "PRIORITY", "AUTO"]]
    rows += [
        [
            summary.name,
            *(_format_amount(summary, key) for key in STATUS_FIELD_BY_COLUMN.values()),
            summary.share,
            summary.priority,
            summary.auto,
        ]
        for summary in summaries
    ]
    return rows


def _format_amount(summary: ClassSummary, key: str) -> str:
    amount = summary.amounts[key]
    return "-" if amount is None else str(amount)
