"""`cardwise classes`: the GPU types, how much of each is free, and which namespaces use it."""

from collections.abc import Iterable

import click

from cardwise.cli import console, options, rights
from cardwise.cli.cluster import visible
from cardwise.cli.render import classtable, printing
from cardwise.core.placement import totals
from cardwise.kube import clusterstate, errors
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
        cluster_state = clusterstate.read_cluster_state(client, addresses=False, own_namespace=client.namespace)
    except errors.Forbidden as error:
        _print_summaries(client, name, output, error)
        return
    printing.print_cluster_warnings(cluster_state)
    if name is not None and name not in cluster_state.classes:
        raise _unknown_class_error(name, cluster_state.classes)
    card_classes = totals.classes_of_cards(cluster_state.ledger, cluster_state.classes, name)
    device_classes = totals.classes_of_devices(cluster_state.ledger, cluster_state.classes, name)
    if output in ("json", "yaml"):
        printing.print_object(
            {
                "classes": classtable.card_classes_as_json(card_classes),
                "deviceClasses": classtable.devices_as_json(device_classes),
            },
            output,
        )
    elif not cluster_state.classes:
        console.print_text(
            "there is no ResourceClass yet; Cardwise creates one for the first GPU of each model", err=True
        )
    elif name is not None and output == "table":
        class_text = (
            classtable.format_device_class(device_classes[0])
            if device_classes
            else classtable.format_card_class(card_classes[0], console.terminal_columns())
        )
        console.print_lines(class_text)
    else:
        wide = output == "wide"
        class_tables = (
            [classtable.format_card_classes(card_classes, None if wide else console.terminal_columns(), wide=wide)]
            if card_classes
            else []
        )
        class_tables += [classtable.format_device_classes(device_classes, wide=wide)] if device_classes else []
        console.print_lines("\n".join(class_tables))


def _unknown_class_error(name: str, class_names: Iterable[str]) -> click.ClickException:
    available = ", ".join(sorted(class_names)) or "none"
    return click.ClickException(f"there is no ResourceClass {name!r}; available: {available}")


def _print_summaries(client: KubeClient, name: str | None, output: str, denied: errors.Forbidden) -> None:
    """Print the classes from their statuses, for users without the right to read cards. Raises `KubeError`."""
    all_summaries = list(visible.read_classes(client))
    if name is not None and name not in {summary.name for summary in all_summaries}:
        raise _unknown_class_error(name, [summary.name for summary in all_summaries])
    summaries = [summary for summary in all_summaries if name in (None, summary.name)]
    reason = rights.describe_missing_right(denied)
    console.print_text(f"note: as last written by the extender, without the users of each class: {reason}", err=True)
    if output in ("json", "yaml"):
        printing.print_object({"classes": [classtable.summary_as_json(summary) for summary in summaries]}, output)
        return
    console.print_lines(
        classtable.format_summaries(summaries, None if output == "wide" else console.terminal_columns())
    )
