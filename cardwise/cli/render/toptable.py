"""The table of `cardwise top`: one line per card, nodes with the most use first; and its JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec

from cardwise.cli.cluster.usage import CardUsage, Holder, NodeUsage, sum_granted_mib
from cardwise.cli.render import tables
from cardwise.core.api import mps
from cardwise.core.values import wording

_BAR_WIDTH = 10  # characters of a bar
_MAX_LISTED = 3  # maximum number of holders named in one line
_UNKNOWN_TEXT = "-"
_AMOUNT_HEADS = ("USED-MIB", "GRANTED-MIB", "TOTAL-MIB")
_MAX_NODE_WIDTH = 24  # maximum number of characters of a node's name on a narrow terminal
_NARROW_HEADS = ("NODE", "GPU", "STATE", "GRANTED/TOTAL", "HOLDERS(USED/GRANTED)")
_HEADS = (
    "NODE",
    "GPU",
    "MODEL",
    "GRANTED",
    "",
    *_AMOUNT_HEADS,
    "CORE",
    "PODS",
    "STATE",
    "ISOLATION",
    "HOLDERS(USED/GRANTED)",
)


def summary_line(nodes: Sequence[NodeUsage]) -> str:
    """Summarize the whole cluster in one line."""
    cards = [card for node in nodes for card in node.cards]
    granted, total = sum_granted_mib(cards), sum(card.total for card in cards)
    unhealthy_count, cordoned_count = sum(not card.healthy for card in cards), sum(card.cordoned for card in cards)
    counts_text = f"{wording.pluralize(len(cards), 'GPU')} on {wording.pluralize(len(nodes), 'node')}"
    return (
        f"{counts_text}: {granted} of {total} MiB granted ({format_percent(granted, total)})"
        + f", {unhealthy_count} unhealthy" * bool(unhealthy_count)
        + f", {cordoned_count} cordoned" * bool(cordoned_count)
    )


def table(nodes: Sequence[NodeUsage], columns: int | None = None) -> str:
    """Format one line per card; on a narrow terminal only the important columns, cut to its width."""
    rows = [list(_HEADS)]
    rows += [_wide_row(card) for node in nodes for card in node.cards]
    wide_table = tables.align_rows(rows)
    if columns is None or max(map(len, wide_table.splitlines())) <= columns:
        return wide_table
    rows = [list(_NARROW_HEADS)]
    rows += [_narrow_row(card) for node in nodes for card in node.cards]
    return "".join(f"{_truncate(line, columns)}\n" for line in tables.align_rows(rows).splitlines())


def _narrow_row(card: CardUsage) -> list[str]:
    name = _truncate(card.node, _MAX_NODE_WIDTH)
    return [
        name,
        str(card.index),
        describe_state(card),
        f"{_format_known(card.granted)}/{card.total}",
        _format_holders(card),
    ]


def _truncate(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def _wide_row(card: CardUsage) -> list[str]:
    return [
        card.node,
        str(card.index),
        card.model or _UNKNOWN_TEXT,
        draw_bar(card.granted or 0, card.total),
        format_percent(card.granted, card.total),
        _format_known(card.used),
        _format_known(card.granted),
        str(card.total),
        _UNKNOWN_TEXT if card.core is None else f"{card.core}%",
        _format_known(card.pods),
        describe_state(card),
        card.isolation.memory if card.isolation is not None else _UNKNOWN_TEXT,
        _format_holders(card),
    ]


def draw_bar(part: int, whole: int) -> str:
    """Draw a bar. It looks full only if all memory is granted, and empty only if all memory is free."""
    marks = min(_BAR_WIDTH, part * _BAR_WIDTH // whole) if whole else 0
    if part > 0:
        marks = max(1, marks)
    return f"[{'#' * marks}{'.' * (_BAR_WIDTH - marks)}]"


def format_percent(part: int | None, whole: int) -> str:
    return _UNKNOWN_TEXT if part is None or not whole else f"{part * 100 // whole}%"


def describe_state(card: CardUsage) -> str:
    """Describe the card's state besides its memory; `ok` if there is nothing to report."""
    states = ["unhealthy"] * (not card.healthy) + ["cordoned"] * card.cordoned + ["whole"] * card.whole
    if card.mps not in ("", "Ready", "Off"):
        states.append(f"MPS-{card.mps}")
    if card.only_namespace:
        states.append(f"only:{card.only_namespace}")
    return ",".join(states) or "ok"


def _format_holders(card: CardUsage) -> str:
    """Format the pods on the card, each with its memory in the form `used/granted`."""
    if card.holders is None:
        return _UNKNOWN_TEXT
    return (
        wording.enumerate_first([_format_holder(holder) for holder in card.holders], _MAX_LISTED, "pod")
        or _UNKNOWN_TEXT
    )


def _format_holder(holder: Holder) -> str:
    excess_mark = "!" * (holder.used is not None and holder.used > holder.granted + mps.MAX_CONTEXT_MIB)
    return (
        f"{holder.namespace}/{holder.name} {_format_known(holder.used)}/{holder.granted}{excess_mark}"
        + " (terminating)" * holder.terminating
    )


def _format_known(amount: int | None) -> str:
    return _UNKNOWN_TEXT if amount is None else str(amount)


def as_json(all_nodes: Sequence[NodeUsage], shown_nodes: Sequence[NodeUsage], notes: Sequence[str]) -> dict[str, Any]:
    """The output as JSON; unknown amounts are null."""
    cards = [card for node in all_nodes for card in node.cards]
    return {
        "gpus": len(cards),
        "grantedMiB": sum_granted_mib(cards),
        "totalMiB": sum(card.total for card in cards),
        "unhealthyGPUs": sum(not card.healthy for card in cards),
        "cordonedGPUs": sum(card.cordoned for card in cards),
        "nodeCount": len(all_nodes),
        "nodes": [
            {
                "name": node.name,
                "unschedulableReason": node.unschedulable_reason,
                "gpus": [_card_as_json(card) for card in node.cards],
            }
            for node in shown_nodes
        ],
        "notes": list(notes),
    }


def _card_as_json(card: CardUsage) -> dict[str, Any]:
    holders = None if card.holders is None else [
        {
            "namespace": holder.namespace,
            "name": holder.name,
            "grantedMiB": holder.granted,
            "usedMiB": holder.used,
            "terminating": holder.terminating,
        }
        for holder in card.holders
    ]  # fmt: skip
    return {
        "index": card.index,
        "uuid": card.uuid,
        "model": card.model,
        "totalMiB": card.total,
        "grantedMiB": card.granted,
        "usedMiB": card.used,
        "corePercent": card.core,
        "pods": card.pods,
        "whole": card.whole,
        "healthy": card.healthy,
        "reason": card.reason,
        "cordoned": card.cordoned,
        "onlyNamespace": card.only_namespace,
        "mps": card.mps,
        "isolation": None if card.isolation is None else msgspec.to_builtins(card.isolation),
        "holders": holders,
    }
