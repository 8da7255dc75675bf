"""`cardwise classes`: the GPU types, how much of each is free, and which namespaces use it."""

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
    """List the types of GPUs and devices: how many there are, and what is free.

    With NAME or -o wide, also the pods that use them.
    """
    client = options.load_client()
    try:
        views = survey.take_survey(client, addresses=False, own=client.namespace)
    except errors.Forbidden as error:
        _print_summaries(client, name, output, error)
        return
    printing.print_survey_warnings(views)
    if name is not None and name not in views.classes:
        raise _unknown_class(name, views.classes)
    of_cards = totals.classes_of_cards(views.ledger, views.classes, name)
    of_devices = totals.classes_of_devices(views.ledger, views.classes, name)
    if output in ("json", "yaml"):
        printing.print_object(
            {"classes": classtable.cards_as_json(of_cards), "deviceClasses": classtable.devices_as_json(of_devices)},
            output,
        )
    elif not views.classes:
        console.print_text(
            "there is no ResourceClass yet; Cardwise creates one for the first GPU of each model", err=True
        )
    elif name is not None and output == "table":
        of_one = (
            classtable.format_device_class(of_devices[0])
            if of_devices
            else classtable.format_card_class(of_cards[0], console.terminal_columns())
        )
        console.print_lines(of_one)
    else:
        wide = output == "wide"
        parts = (
            [classtable.format_card_classes(of_cards, None if wide else console.terminal_columns(), wide=wide)]
            if of_cards
            else []
        )
        parts += [classtable.format_device_classes(of_devices, wide=wide)] if of_devices else []
        console.print_lines("\n".join(parts))


def _unknown_class(name: str, class_names: Iterable[str]) -> click.ClickException:
    known = ", ".join(sorted(class_names)) or "none"
    return click.ClickException(f"there is no ResourceClass {name!r}; available: {known}")


def _print_summaries(client: KubeClient, name: str | None, output: str, missing: errors.Forbidden) -> None:
    """Print the classes from their statuses, for users without the right to read cards. Raises `KubeError`."""
    there = list(visible.read_classes(client))
    if name is not None and name not in {summary.name for summary in there}:
        raise _unknown_class(name, [summary.name for summary in there])
    summaries = [summary for summary in there if name in (None, summary.name)]
    reason = rights.describe_missing(missing)
    console.print_text(f"note: as last written by the extender, without the users of each class: {reason}", err=True)
    if output in ("json", "yaml"):
        printing.print_object({"classes": [classtable.summary_as_json(summary) for summary in summaries]}, output)
        return
    console.print_lines(
        classtable.format_summaries(summaries, None if output == "wide" else console.terminal_columns())
    )
