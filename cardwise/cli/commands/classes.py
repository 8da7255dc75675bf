"""`cardwise classes`: what types of cards there are, what is left of each, and who uses it."""

from collections.abc import Iterable, Sequence

import click

from cardwise.cli import console, options, rights
from cardwise.cli.cluster import visible
from cardwise.cli.render import devicetable, printing, tables, visibletable
from cardwise.core.placement import inventory
from cardwise.core.placement.inventory import CardClassView
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, survey
from cardwise.kube.client import KubeClient

_NOBODY = "Nobody uses it.\n"


@click.command()
@options.cluster
@options.output
@click.argument("name", required=False)
def classes(output: str, name: str | None) -> None:
    """Types of cards and devices: how many, what is free, what one is; with NAME or -o wide, who uses it."""
    client = options.client()
    try:
        seen = survey.take(client, addresses=False, own=client.namespace)
    except errors.Forbidden as error:
        _by_status(client, name, output, error)
        return
    printing.warn(seen)
    if name is not None and name not in seen.classes:
        raise _unknown(name, seen.classes)
    of_cards = inventory.classes_of_cards(seen.ledger, seen.classes, name)
    of_devices = inventory.classes_of_devices(seen.ledger, seen.classes, name)
    if output in ("json", "yaml"):
        printing.dump({"classes": as_json(of_cards), "deviceClasses": devicetable.as_json(of_devices)}, output)
    elif not seen.classes:
        console.say("there is no ResourceClass yet; the first card of a model brings one", err=True)
    elif name is not None and output == "table":
        of_one = devicetable.single(of_devices[0]) if of_devices else single(of_cards[0], console.columns())
        console.say(of_one, nl=False)
    else:
        wide = output == "wide"
        parts = [table(of_cards, None if wide else console.columns(), wide=wide)] if of_cards else []
        parts += [devicetable.table(of_devices, wide=wide)] if of_devices else []
        console.say("\n".join(parts), nl=False)


def _unknown(name: str, there: Iterable[str]) -> click.ClickException:
    known = ", ".join(sorted(there)) or "none"
    return click.ClickException(f"there is no ResourceClass {name!r} that can be read; those there are: {known}")


def _by_status(client: KubeClient, name: str | None, output: str, missing: errors.Forbidden) -> None:
    """What the extender says of each class, for who may read no card. Raises `KubeError`."""
    there = list(visible.types(client))
    if name is not None and name not in {one.name for one in there}:
        raise _unknown(name, [one.name for one in there])
    found = [one for one in there if name in (None, one.name)]
    why = rights.missing(missing)
    console.say(f"note: as the extender says it, without who uses what: {why}", err=True)
    if output in ("json", "yaml"):
        printing.dump({"classes": [visibletable.as_json(one) for one in found]}, output)
        return
    console.say(visibletable.of_types(found, None if output == "wide" else console.columns()), nl=False)


def table(seen: Sequence[CardClassView], columns: int | None = None, *, wide: bool = False) -> str:
    """One row for each class; wide, also who uses each. `columns`: of the terminal."""
    rows = visibletable.of_cards(visible.typed(view.known, view.amounts) for view in seen)
    if not wide:
        return tables.within(rows, columns, visibletable.SPARE)
    healthy = ["HEALTHY", *(str(view.amounts[visible.HEALTHY]) for view in seen)]
    return tables.together([[[*row, cell] for row, cell in zip(rows, healthy, strict=True)], _users(seen)])


def single(view: CardClassView, columns: int | None = None) -> str:
    """The row of one class and who uses it. `columns`: of the terminal."""
    users = [row[1:] for row in _users([view])]
    return f"{table([view], columns)}\n{tables.aligned(users) if view.users else _NOBODY}"


def as_json(seen: Sequence[CardClassView]) -> list[Json]:
    """All of it, for programs."""
    return [_object(view) for view in seen]


def _object(view: CardClassView) -> Json:
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


def _users(seen: Sequence[CardClassView]) -> list[list[str]]:
    rows = [["CLASS", "NAMESPACE", "SHARES", "MIB", "WHOLE-CARDS"]]
    rows += [
        [view.known.name, namespace, str(held.shares), str(held.memory), str(held.cards)]
        for view in seen
        for namespace, held in view.users
    ]
    return rows
