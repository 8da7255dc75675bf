"""The tables and the JSON of `cardwise.cli.cluster.visible`."""

from collections.abc import Iterable
from typing import Any

from cardwise.cli import console, rights
from cardwise.cli.cluster.visible import PodShare, Visible
from cardwise.cli.render import classtable, printing, tables
from cardwise.kube import errors


def show(seen: Visible, missing: errors.Forbidden, output: str) -> None:
    """Prints it in the place of cards, and the right that is missing."""
    console.say(f"note: types, and the cards of your own pods: {rights.missing(missing)}", err=True)
    if output in ("json", "yaml"):
        found = {
            "nodes": None,
            "classes": None if seen.types is None else [classtable.type_as_json(one) for one in seen.types],
            "pods": None if seen.shares is None else [_pod(one) for one in seen.shares],
        }
        printing.dump(found, output)
        return
    parts = [classtable.of_types(seen.types, console.columns())] if seen.types else []
    parts += [tables.aligned(_of_pods(seen.shares))] if seen.shares else []
    console.show("\n".join(parts))
    if seen.shares is not None and not seen.shares:
        console.say(f"no pod of namespace {seen.namespace!r} holds a card", err=True)


def _of_pods(found: Iterable[PodShare]) -> list[list[str]]:
    rows = [["POD", "NODE", "GPU", "MIB"]]
    rows += [[f"{one.namespace}/{one.pod}", one.node, str(one.card), str(one.mem)] for one in found]
    return rows


def _pod(one: PodShare) -> dict[str, Any]:
    return {"namespace": one.namespace, "name": one.pod, "node": one.node, "card": one.card, "memoryMiB": one.mem}
