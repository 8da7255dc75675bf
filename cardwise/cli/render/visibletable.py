"""The tables and the JSON of `cardwise.cli.cluster.visible`."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from cardwise.cli import console, rights
from cardwise.cli.cluster import visible
from cardwise.cli.cluster.visible import COLUMNS, HEALTHY, PodShare, Type
from cardwise.cli.render import printing, tables
from cardwise.kube import errors
from cardwise.kube.client import KubeClient

SPARE: Final = ("AUTO", "PRIORITY", "NODES", "USED-MIB")  # of a terminal that has few columns


def show(client: KubeClient, missing: errors.Forbidden, output: str, nodes: Collection[str] = ()) -> None:
    """Prints it in the place of cards, and the right that is missing. Raises `missing` where nothing may be read."""
    seen = visible.look(client, missing, nodes)
    console.say(f"note: types, and the cards of your own pods: {rights.missing(missing)}", err=True)
    if output in ("json", "yaml"):
        found = {
            "nodes": None,
            "classes": None if seen.types is None else [as_json(one) for one in seen.types],
            "pods": None if seen.shares is None else [_pod(one) for one in seen.shares],
        }
        printing.dump(found, output)
        return
    parts = [of_types(seen.types, console.columns())] if seen.types else []
    parts += [tables.aligned(_of_pods(seen.shares))] if seen.shares else []
    console.say("\n".join(parts), nl=False)
    if seen.shares is not None and not seen.shares:
        console.say(f"no pod of namespace {client.namespace!r} holds a card", err=True)


def of_types(found: Sequence[Type], columns: int | None) -> str:
    """As `cardwise classes` has them. `columns`: of the terminal."""
    cards = of_cards(one for one in found if not one.other)
    devices = [["DEVICE-CLASS", "DEVICES", "NODES", "HEALTHY"]]
    devices += [[one.name, *(_amount(one, key) for key in ("cards", "nodes", HEALTHY))] for one in found if one.other]
    parts = [tables.within(cards, columns, SPARE)] if len(cards) > 1 or len(devices) == 1 else []
    return "\n".join([*parts, *([tables.aligned(devices)] if len(devices) > 1 else [])])


def of_cards(found: Iterable[Type]) -> list[list[str]]:
    """The rows of classes of cards, with their heads."""
    rows = [["CLASS", *COLUMNS, "SHARE", "PRIORITY", "AUTO"]]
    rows += [
        [one.name, *(_amount(one, key) for key in COLUMNS.values()), one.one, one.priority, one.auto] for one in found
    ]
    return rows


def _amount(one: Type, key: str) -> str:
    amount = one.amounts[key]
    return "-" if amount is None else str(amount)


def as_json(one: Type) -> dict[str, Any]:
    return {"name": one.name, "one": one.one, **one.amounts}


def _of_pods(found: Iterable[PodShare]) -> list[list[str]]:
    rows = [["POD", "NODE", "GPU", "MIB"]]
    rows += [[f"{one.namespace}/{one.pod}", one.node, str(one.card), str(one.mem)] for one in found]
    return rows


def _pod(one: PodShare) -> dict[str, Any]:
    return {"namespace": one.namespace, "name": one.pod, "node": one.node, "card": one.card, "memoryMiB": one.mem}
