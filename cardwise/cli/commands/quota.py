"""`cardwise quota`: the GPU quotas of a namespace, the used amounts, and the pods that use them."""

import click

from cardwise.cli import console, options, rights
from cardwise.cli.render import printing, quotatable
from cardwise.core.placement import totals
from cardwise.kube import clusterstate, errors, paths


@click.command()
@options.cluster
@options.namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Show all namespaces.")
@options.output
def quota(namespace: str | None, all_namespaces: bool, output: str) -> None:
    """Show GPUQuotas, and ResourceQuotas on GPU resources, with their use; -o wide names the pods."""
    client = options.load_client()
    scope = "" if all_namespaces else namespace or client.namespace
    native = clusterstate.list_native_quotas(client, scope)
    try:
        cluster_state = clusterstate.read_cluster_state(client, namespace=scope, addresses=False)
    except errors.Forbidden as error:
        reason = rights.describe_missing_right(error)
        views = totals.quota_entries_from_statuses(client.list_objects(paths.gpuquotas(scope)))
        console.print_text(f"note: as last written by the extender, without the pods: {reason}", err=True)
    else:
        printing.print_cluster_warnings(cluster_state)
        views = totals.quota_entries(cluster_state.ledger, cluster_state.quotas, cluster_state.missing_class, scope)
    if scope and not views and not native:
        options.check_namespace(client, scope)
    if output in ("json", "yaml"):
        printing.print_object(quotatable.as_json(views, native), output)
        return
    console.print_lines(quotatable.table(views, native, wide=output == "wide"))
    if not views and not native:
        subject = f"namespace {scope!r} has" if scope else "there is"
        console.print_text(
            f"{subject} no GPUQuota, and no ResourceQuota on GPU resources: nothing is limited", err=True
        )
