"""`cardwise`: what people type. Looks only; nothing here changes the cluster."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from cardwise.cli import classing, explaining, inspecting, limiting
from cardwise.core import schedulerconfig
from cardwise.kube import errors, paths, survey
from cardwise.kube.client import KubeClient

_F = TypeVar("_F", bound=Callable[..., Any])


def _kubeconfig(function: _F) -> _F:
    return click.option(
        "--kubeconfig",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Credentials of the cluster. Default: $KUBECONFIG, then ~/.kube/config.",
    )(function)


def _namespace(function: _F) -> _F:
    return click.option("-n", "--namespace", default="default", show_default=True)(function)


def _output(function: _F) -> _F:
    choice = click.Choice(["table", "wide", "json", "yaml"])
    return click.option("-o", "--output", type=choice, default="table", show_default=True)(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cardwise")
def cli() -> None:
    """Look at shared GPU cards in a Kubernetes cluster."""


@cli.command()
@_kubeconfig
@click.option("-d", "--details", is_flag=True, help="Show the pods of each node and what they hold.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.argument("node", required=False)
def inspect(kubeconfig: Path | None, details: bool, output: str, node: str | None) -> None:
    """Cards and who holds how much of them, in MiB: the tables of `kubectl inspect gpushare`."""
    seen = survey.take(KubeClient.load(kubeconfig))
    if node is not None and seen.ledger.node(node) is None:
        known = ", ".join(n.name for n in seen.ledger.nodes()) or "none"
        raise click.ClickException(f"node {node!r} has no card that Cardwise shares; nodes that have: {known}")
    if output == "json":
        click.echo(json.dumps(_as_json(seen, node), indent=2))
        return
    draw = inspecting.details if details else inspecting.summary
    click.echo(draw(seen.ledger, seen.addresses, node), nl=False)
    _warn(seen)


def _warn(seen: survey.Survey) -> None:
    for problem in seen.problems:
        click.echo(f"warning: {problem}", err=True)


def _dump(data: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(data, indent=2))
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False), nl=False)


def _as_json(seen: survey.Survey, only: str | None) -> dict[str, Any]:
    nodes = []
    for node in seen.ledger.nodes():
        if only not in (None, node.name):
            continue
        holdings = seen.ledger.holdings(node.name)
        cards = [
            {
                "index": card.index,
                "uuid": card.uuid,
                "model": card.model,
                "healthy": card.healthy,
                "totalMiB": card.mem,
                "usedMiB": node.used[i],
                "pods": [
                    {"namespace": h.namespace, "name": h.name, "uid": h.uid, "usedMiB": share.mem}
                    for h in holdings
                    for share in h.assignment.shares()
                    if node.position(share) == i
                ],
            }
            for i, card in enumerate(node.cards)
        ]
        nodes.append({"name": node.name, "address": seen.addresses.get(node.name, "unknown"), "cards": cards})
    return {"nodes": nodes}


@cli.command()
@_kubeconfig
@_output
@click.argument("name", required=False)
def classes(kubeconfig: Path | None, output: str, name: str | None) -> None:
    """Types of cards: how many, what is free, what one is; with NAME or -o wide, which namespaces use it."""
    seen = survey.take(KubeClient.load(kubeconfig), addresses=False)
    _warn(seen)
    if name is not None and name not in seen.classes:
        known = ", ".join(sorted(seen.classes)) or "none"
        raise click.ClickException(f"there is no ResourceClass {name!r} that can be read; those there are: {known}")
    views = classing.views(seen, name)
    if output in ("json", "yaml"):
        _dump(classing.as_json(views), output)
    elif not views:
        click.echo("there is no ResourceClass yet; the first card of a model brings one", err=True)
    elif name is not None and output == "table":
        click.echo(classing.single(views[0]), nl=False)
    else:
        click.echo(classing.table(views, wide=output == "wide"), nl=False)


@cli.command()
@_kubeconfig
@_namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Of every namespace.")
@_output
def quota(kubeconfig: Path | None, namespace: str, all_namespaces: bool, output: str) -> None:
    """Used and hard amounts of GPUQuotas, and of ResourceQuotas on our resources; -o wide names the pods."""
    client = KubeClient.load(kubeconfig)
    of = "" if all_namespaces else namespace
    seen = survey.take(client, namespace=of, addresses=False)
    native = survey.native_quotas(client, of)
    _warn(seen)
    views = limiting.views(seen, of)
    if output in ("json", "yaml"):
        _dump(limiting.as_json(views, native), output)
        return
    click.echo(limiting.table(views, native, wide=output == "wide"), nl=False)
    if not views and not native:
        where = f"namespace {of!r} has" if of else "there is"
        click.echo(f"{where} no GPUQuota, and no ResourceQuota on GPU resources: nothing is limited", err=True)


@cli.group()
def explain() -> None:
    """Say why something is as it is."""


@explain.command("pod")
@_kubeconfig
@_namespace
@click.argument("name")
def explain_pod(kubeconfig: Path | None, namespace: str, name: str) -> None:
    """Why the pod NAME waits, or why it is where it is."""
    client = KubeClient.load(kubeconfig)
    try:
        pod = client.get(paths.pods(namespace, name))
    except errors.NotFound:
        raise click.ClickException(f"there is no pod {name!r} in namespace {namespace!r}; -n names another") from None
    click.echo(explaining.explain(pod, survey.take(client, addresses=False)), nl=False)


@cli.command("scheduler-config")
@click.option("--filter-url", required=True, help="Where kube-scheduler reaches the fast verbs, https://HOST:PORT.")
@click.option("--bind-url", required=True, help="Where it reaches bind (the same URL for a single port).")
@click.option("--tls-dir", type=click.Path(path_type=Path), help="Folder with ca.crt, client.crt, client.key there.")
def scheduler_config(filter_url: str, bind_url: str, tls_dir: Path | None) -> None:
    """Print the KubeSchedulerConfiguration that makes kube-scheduler ask Cardwise."""
    files = {} if tls_dir is None else {
        "ca_file": str(tls_dir / "ca.crt"),
        "cert_file": str(tls_dir / "client.crt"),
        "key_file": str(tls_dir / "client.key"),
    }  # fmt: skip
    if tls_dir is None and not (filter_url.startswith("http://") and bind_url.startswith("http://")):
        raise click.UsageError("https needs --tls-dir: without a CA kube-scheduler does not verify the extender")
    stanzas = schedulerconfig.extender_stanzas(filter_url=filter_url, bind_url=bind_url, **files)
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "percentageOfNodesToScore": 100,
        "extenders": stanzas,
    }
    click.echo(yaml.safe_dump(config, sort_keys=False), nl=False)


def main() -> None:
    """Run, with errors of the cluster as one line."""
    try:
        cli()
    except errors.Forbidden as error:
        remedy = "an administrator can give it by a ClusterRole with that verb and resource, and a binding"
        sys.exit(f"cardwise: {error.message}; {remedy}")
    except (errors.KubeError, errors.KubeConfigError) as error:
        sys.exit(f"cardwise: {error}")


def kubectl_inspect() -> None:
    """`kubectl inspect cardwise`: the plugin name that people of gpushare are used to."""
    sys.argv.insert(1, "inspect")
    main()
