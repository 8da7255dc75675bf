"""`cardwise quota`: what a namespace may hold of which cards, what it holds, and which pods hold it."""

import click

from cardwise.cli import console, options, rights
from cardwise.cli.render import printing, quotatable
from cardwise.core.placement import totals
from cardwise.kube import errors, paths, survey


@click.command()
@options.cluster
@options.namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Show all namespaces.")
@options.output
def quota(namespace: str | None, all_namespaces: bool, output: str) -> None:
    """Used and hard amounts of GPUQuotas, and of ResourceQuotas on our resources; -o wide names the pods."""
    client = options.client()
    of = "" if all_namespaces else namespace or client.namespace
    native = survey.native_quotas(client, of)
    try:
        seen = survey.take(client, namespace=of, addresses=False)
    except errors.Forbidden as error:
        why = rights.missing(error)
        views = totals.entries_by_status(client.objects(paths.gpuquotas(of)))
        console.say(f"note: as the extender says it, without the pods: {why}", err=True)
    else:
        printing.warn(seen)
        views = totals.entries(seen.ledger, seen.quotas, seen.missing, of)
    if of and not views and not native:
        options.check_namespace(client, of)
    if output in ("json", "yaml"):
        printing.dump(quotatable.as_json(views, native), output)
        return
    console.show(quotatable.table(views, native, wide=output == "wide"))
    if not views and not native:
        where = f"namespace {of!r} has" if of else "there is"
        console.say(f"{where} no GPUQuota, and no ResourceQuota on GPU resources: nothing is limited", err=True)
