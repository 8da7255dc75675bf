"""`cardwise inspect`: GPUs and the pods on them, in the layout of `kubectl inspect gpushare`.

The modules that read and print are imported when the command runs, so `--help` starts without them.
"""

import click

from cardwise.cli import console, options


@click.command()
@options.cluster
@click.option("-d", "--details", is_flag=True, help="Show the pods of each node with their shares, and devices.")
@options.plain_output
@click.argument("node", required=False)
def inspect(details: bool, output: str, node: str | None) -> None:
    """List GPUs and the MiB that pods hold on them, in the tables of `kubectl inspect gpushare`."""
    from cardwise.cli.cluster import nodestates  # noqa: PLC0415 - see above
    from cardwise.cli.render import inspecttable, printing  # noqa: PLC0415 - see above
    from cardwise.kube import clusterstate, errors  # noqa: PLC0415 - see above

    client = options.load_client()
    try:
        cluster_state = clusterstate.read_cluster_state(client, own_namespace=client.namespace)
    except errors.Forbidden as error:
        # Imported only if the user may not read cards, so that other users do not wait for the import.
        from cardwise.cli.cluster import visible  # noqa: PLC0415 - see above
        from cardwise.cli.render import visibletable  # noqa: PLC0415 - see above

        visibletable.print_visible(visible.read_visible(client, error, [node] if node else []), error, output)
        return
    nodes = (inspecttable.nodes_with_devices if details or output != "table" else inspecttable.nodes_with_cards)(
        cluster_state.ledger
    )
    if node is not None and node not in {state.name for state in nodes}:
        available = ", ".join(state.name for state in nodes) or "none"
        raise click.ClickException(f"node {node!r} has no GPU that Cardwise shares; nodes that have: {available}")
    reasons = nodestates.read_unschedulable_reasons(
        client, [state.name for state in nodes if node in (None, state.name)]
    )
    for note in nodestates.describe_unschedulable(reasons):
        console.print_text(f"note: {note}", err=True)
    ledger, addresses = cluster_state.ledger, cluster_state.addresses
    isolation = {
        resource.spec.uuid: resource.status.isolation
        for resource in cluster_state.resources
        if resource.status.isolation is not None
    }
    if output != "table":
        printing.print_object(inspecttable.as_json(ledger, addresses, reasons, node, isolation=isolation), output)
        return
    if not details:
        console.print_lines(inspecttable.summary(ledger, addresses, node))
    else:
        console.print_lines(inspecttable.details(ledger, addresses, node, isolation=isolation))
        from cardwise.cli.cluster import podgroups  # noqa: PLC0415 - needed for the details only
        from cardwise.cli.render import gangtable  # noqa: PLC0415 - the same

        reservations = gangtable.reservations_table(podgroups.reserving_gangs(client), node)
        if reservations is not None:
            console.print_lines(reservations)
    printing.print_cluster_warnings(cluster_state)
