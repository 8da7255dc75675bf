"""`cardwise explain pod`: why a pod waits, or why it is where it is."""

from pathlib import Path

import click

from cardwise.cli import options
from cardwise.cli.cluster import published, snapshots
from cardwise.cli.explanation import objects, sentences
from cardwise.cli.render import gangtable, printing
from cardwise.core.api import policies
from cardwise.kube import errors, paths, survey
from cardwise.kube.client import KubeClient


@click.group()
def explain() -> None:
    """Say why something is as it is."""


@explain.command("pod")
@options.kubeconfig
@options.namespace
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
@click.argument("name")
def explain_pod(kubeconfig: Path | None, namespace: str | None, output: str, name: str) -> None:
    """Why the pod NAME waits, or why it is where it is."""
    client = KubeClient.load(kubeconfig)
    namespace = namespace or client.namespace
    try:
        pod = client.get(paths.pods(namespace, name))
    except errors.NotFound:
        raise click.ClickException(f"there is no pod {name!r} in namespace {namespace!r}; -n names another") from None
    gang = gangtable.of_pod(client, pod)
    seen = None
    try:
        seen = survey.take(client, addresses=False, own=namespace)
    except errors.Forbidden as error:
        click.echo(f"note: why it is so cannot be said in full: {error.message}; {options.RIGHT_REMEDY}", err=True)
    if seen is not None and seen.partial:
        click.echo(f"note: {seen.partial}", err=True)
    told = published.take(client)
    if told.note and not pod["spec"].get("nodeName"):  # of a placed pod no policy decides any more
        click.echo(f"note: the extender's policy is taken as {told.policy}: {told.note}", err=True)
    engine = None
    if seen is not None and published.in_force(pod, told) in policies.SCORED:
        from cardwise.cli.cluster.engine import Deciding  # noqa: PLC0415 - loads numpy

        rooms, unknown = snapshots.read_rooms(client)
        engine = Deciding(seen.ledger, rooms, told.workload)
        for note in filter(None, (unknown, engine.note)):
            click.echo(f"note: {note}", err=True)
    text = sentences.explain(pod, seen, gang, told, engine)
    if output == "table":
        click.echo(text, nl=False)
    else:
        printing.dump(objects.as_json(pod, seen, published.in_force(pod, told), text), output)
