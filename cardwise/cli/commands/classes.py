"""`cardwise classes`: what types of cards there are, what is left of each, and who uses it."""

from collections.abc import Iterable

import click

from cardwise.cli import console, options, rights
from cardwise.cli.cluster import visible
from cardwise.cli.render import classtable, printing
from cardwise.core.placement import totals
from cardwise.kube import errors, survey
from cardwise.kube.client import KubeClient


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
    of_cards = totals.classes_of_cards(seen.ledger, seen.classes, name)
    of_devices = totals.classes_of_devices(seen.ledger, seen.classes, name)
    if output in ("json", "yaml"):
        printing.dump(
            {"classes": classtable.cards_as_json(of_cards), "deviceClasses": classtable.devices_as_json(of_devices)},
            output,
        )
    elif not seen.classes:
        console.say("there is no ResourceClass yet; the first card of a model brings one", err=True)
    elif name is not None and output == "table":
        of_one = (
            classtable.one_of_devices(of_devices[0])
            if of_devices
            else classtable.one_of_cards(of_cards[0], console.columns())
        )
        console.show(of_one)
    else:
        wide = output == "wide"
        parts = [classtable.of_cards(of_cards, None if wide else console.columns(), wide=wide)] if of_cards else []
        parts += [classtable.of_devices(of_devices, wide=wide)] if of_devices else []
        console.show("\n".join(parts))


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
        printing.dump({"classes": [classtable.type_as_json(one) for one in found]}, output)
        return
    console.show(classtable.of_types(found, None if output == "wide" else console.columns()))
