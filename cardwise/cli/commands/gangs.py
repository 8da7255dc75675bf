"""`cardwise gangs`: groups of pods that are bound together or not at all, and the phase of each."""

import click

from cardwise.cli import console, options
from cardwise.cli.cluster import podgroups
from cardwise.cli.render import gangtable, printing


@click.command()
@options.cluster
@options.namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Show all namespaces.")
@options.output
def gangs(namespace: str | None, all_namespaces: bool, output: str) -> None:
    """List gangs (groups of pods that are bound together or not at all) and the phase of each.

    -o wide adds the pods that a gang waits for, and the nodes where GPUs are reserved for it.
    """
    client = options.load_client()
    scope = "" if all_namespaces else namespace or client.namespace
    views = podgroups.list_gangs(client, scope)
    if scope and not views:
        options.check_namespace(client, scope)
    if output in ("json", "yaml"):
        printing.print_object(gangtable.as_json(views), output)
    elif views:
        console.print_lines(gangtable.table(views, client.server_time(), wide=output == "wide"))
    else:
        console.print_text(
            f"there is no gang{f' in namespace {scope!r}; -A shows all namespaces' if scope else ''}",
            err=True,
        )
