"""The tables and the JSON of `cardwise.cli.cluster.visible`."""

from collections.abc import Collection, Iterable
from typing import Any

import click

from cardwise.cli import options
from cardwise.cli.cluster import visible
from cardwise.cli.cluster.visible import COLUMNS, Share, Type
from cardwise.cli.render import printing, tables
from cardwise.kube import errors
from cardwise.kube.client import KubeClient


def show(client: KubeClient, missing: errors.Forbidden, output: str, nodes: Collection[str] = ()) -> None:
    """Prints it in the place of cards, and the right that is missing. Raises `missing` where nothing may be read."""
    seen = visible.look(client, missing, nodes)
    click.echo(f"note: types, and the cards of your own pods: {options.missing(missing)}", err=True)
    if output in ("json", "yaml"):
        found = {
            "nodes": None,
            "classes": None if seen.types is None else [as_json(one) for one in seen.types],
            "pods": None if seen.shares is None else [_pod(one) for one in seen.shares],
        }
        printing.dump(found, output)
        return
    click.echo(tables.together([of_types(seen.types or ()), _of_pods(seen.shares or ())]), nl=False)
    if seen.shares is not None and not seen.shares:
        click.echo(f"no pod of namespace {client.namespace!r} holds a card", err=True)


def of_types(found: Iterable[Type]) -> list[list[str]]:
    rows = [["CLASS", *COLUMNS, "SHARE"]]
    for one in found:
        amounts = (one.amounts[key] for key in COLUMNS.values())
        rows.append([one.name, *("-" if each is None else str(each) for each in amounts), one.one])
    return rows


def as_json(one: Type) -> dict[str, Any]:
    return {"name": one.name, "one": one.one, **one.amounts}


def _of_pods(found: Iterable[Share]) -> list[list[str]]:
    rows = [["POD", "NODE", "GPU", "MIB"]]
    rows += [[f"{one.namespace}/{one.pod}", one.node, str(one.card), str(one.mem)] for one in found]
    return rows


def _pod(one: Share) -> dict[str, Any]:
    return {"namespace": one.namespace, "name": one.pod, "node": one.node, "card": one.card, "memoryMiB": one.mem}
