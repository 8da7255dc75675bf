"""The tables of `cardwise gangs`, and the table of cards reserved for gangs, which `inspect` shows."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from cardwise.cli.cluster.podgroups import GangView
from cardwise.cli.render import tables
from cardwise.core.values import wording
from cardwise.core.values.timestamps import parse_timestamp

_MAX_LISTED = 5  # maximum number of pods named in one cell


def table(views: Sequence[GangView], now: datetime, *, wide: bool = False) -> str:
    """Format one row per gang.

    wide: whether to print also the pods that the gang waits for, and the nodes where cards are reserved for it.
    """
    wide_heads = ["WAITING-FOR", "RESERVED-ON"] if wide else []
    rows = [["NAMESPACE", "NAME", "PHASE", "MEMBERS/MIN", "BOUND", "GPUS-RESERVED", "AGE", *wide_heads, "REASON"]]
    for view in views:
        counts = [f"{len(view.members)}/{view.minimum or '?'}", str(len(view.bound)), str(view.cards)]
        places = ",".join(f"{reservation.node}:{reservation.cards}" for reservation in view.reserved)
        row = [view.namespace, view.name, view.phase, *counts, format_age(view.created, now)]
        rows.append(
            [
                *row,
                *([wording.enumerate_first(view.waiting_for, _MAX_LISTED) or "-", places or "-"] if wide else []),
                view.reason,
            ]
        )
    return tables.align_rows(rows)


def reservations_table(views: Sequence[GangView], node_name: str | None) -> str | None:
    """Format the cards reserved for gangs, by node; None without a reserved card."""
    rows = [["GANG", "NAMESPACE", "NODE", "MEMBERS", "GPUS"]]
    rows += [
        [view.name, view.namespace, reservation.node, str(reservation.members), str(reservation.cards)]
        for view in views
        for reservation in view.reserved
        if node_name in (None, reservation.node)
    ]
    if len(rows) == 1:
        return None
    return f"\nReserved for gangs that are not bound yet:\n{tables.align_rows(rows)}"


def as_json(views: Sequence[GangView]) -> dict[str, Any]:
    """The output as JSON, with all fields."""
    return {
        "gangs": [
            {
                "namespace": view.namespace,
                "name": view.name,
                "phase": view.phase,
                "reason": view.reason,
                "minMember": view.minimum,
                "members": list(view.members),
                "bound": list(view.bound),
                "waitingFor": list(view.waiting_for),
                "gpusReserved": view.cards,
                "reserved": [
                    {"node": reservation.node, "members": reservation.members, "gpus": reservation.cards}
                    for reservation in view.reserved
                ],
                "created": view.created,
                "lastTransitionTime": view.since,
            }
            for view in views
        ]
    }


def format_age(created: str, now: datetime) -> str:
    """Format the time since an object's creation, such as 5m."""
    created_at = parse_timestamp(created)
    return "-" if created_at is None else tables.format_age((now - created_at).total_seconds())
