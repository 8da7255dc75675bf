"""`cardwise`: what people type. Most of it looks only: doctor sends a probe pod, cordon and drain change a card."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from cardwise.cli import (
    bundling,
    classing,
    completing,
    cordoning,
    defragging,
    devicing,
    draining,
    explained,
    explaining,
    ganging,
    inspecting,
    limiting,
    noding,
    options,
    published,
    simulating,
    snapshots,
    topping,
)
from cardwise.cli.doctor import command as doctoring
from cardwise.cli.doctor import finding
from cardwise.cli.options import kubeconfig as _kubeconfig
from cardwise.core.api import names, policies, schedulerconfig
from cardwise.kube import errors, paths, survey
from cardwise.kube.client import KubeClient

_F = TypeVar("_F", bound=Callable[..., Any])

_INTERRUPTED = 130  # 128 and the number of SIGINT
_REMEDY = "an administrator can give it by a ClusterRole with that verb and resource, and a binding"


def _namespace(function: _F) -> _F:
    return click.option("-n", "--namespace", help="Default: that of the kubeconfig's context.")(function)


def _output(function: _F) -> _F:
    choice = click.Choice(["table", "wide", "json", "yaml"])
    return click.option("-o", "--output", type=choice, default="table", show_default=True)(function)


class _Group(click.Group):
    """Ends without a word when somebody presses Ctrl-C, as the shell expects it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cardwise")
def cli() -> None:
    """Look at shared GPU cards, and at other devices, in a Kubernetes cluster; take some out of use."""


@cli.command()
@_kubeconfig
@click.option("-d", "--details", is_flag=True, help="Show the pods of each node and what they hold, and devices.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
@click.argument("node", required=False)
def inspect(kubeconfig: Path | None, details: bool, output: str, node: str | None) -> None:
    """Cards and who holds how much of them, in MiB: the tables of `kubectl inspect gpushare`."""
    client = KubeClient.load(kubeconfig)
    seen = survey.take(client)
    shown = (inspecting.with_any if details or output != "table" else inspecting.with_cards)(seen.ledger)
    if node is not None and node not in {one.name for one in shown}:
        known = ", ".join(one.name for one in shown) or "none"
        raise click.ClickException(f"node {node!r} has no card that Cardwise shares; nodes that have: {known}")
    if output != "table":
        _dump(_as_json(seen, node), output)
        return
    draw = inspecting.details if details else inspecting.summary
    click.echo(draw(seen.ledger, seen.addresses, node), nl=False)
    if details:
        click.echo(ganging.holds_table(ganging.holds(client), node), nl=False)
    _warn(seen)


def _warn(seen: survey.Survey) -> None:
    if seen.partial:
        click.echo(f"note: {seen.partial}", err=True)
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
                "cordoned": card.cordoned,
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
        address = seen.addresses.get(node.name, "unknown")
        devices = devicing.objects(seen.ledger, node)
        nodes.append({"name": node.name, "address": address, "cards": cards, "devices": devices})
    return {"nodes": nodes}


@cli.command()
@_kubeconfig
@_output
@click.argument("name", required=False)
def classes(kubeconfig: Path | None, output: str, name: str | None) -> None:
    """Types of cards and devices: how many, what is free, what one is; with NAME or -o wide, who uses it."""
    client = KubeClient.load(kubeconfig)
    seen = survey.take(client, addresses=False, own=client.namespace)
    _warn(seen)
    if name is not None and name not in seen.classes:
        known = ", ".join(sorted(seen.classes)) or "none"
        raise click.ClickException(f"there is no ResourceClass {name!r} that can be read; those there are: {known}")
    of_cards, of_devices = classing.views(seen, name), devicing.views(seen, name)
    if output in ("json", "yaml"):
        _dump({"classes": classing.as_json(of_cards), "deviceClasses": devicing.as_json(of_devices)}, output)
    elif not seen.classes:
        click.echo("there is no ResourceClass yet; the first card of a model brings one", err=True)
    elif name is not None and output == "table":
        click.echo(devicing.single(of_devices[0]) if of_devices else classing.single(of_cards[0]), nl=False)
    else:
        wide = output == "wide"
        parts = [classing.table(of_cards, wide=wide)] if of_cards else []
        parts += [devicing.table(of_devices, wide=wide)] if of_devices else []
        click.echo("\n".join(parts), nl=False)


@cli.command()
@_kubeconfig
@_namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Of every namespace.")
@_output
def quota(kubeconfig: Path | None, namespace: str | None, all_namespaces: bool, output: str) -> None:
    """Used and hard amounts of GPUQuotas, and of ResourceQuotas on our resources; -o wide names the pods."""
    client = KubeClient.load(kubeconfig)
    of = "" if all_namespaces else namespace or client.namespace
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


@cli.command()
@_kubeconfig
@_namespace
@click.option("-A", "--all-namespaces", is_flag=True, help="Of every namespace.")
@_output
def gangs(kubeconfig: Path | None, namespace: str | None, all_namespaces: bool, output: str) -> None:
    """Groups of pods that are bound whole or not at all: how far each is; -o wide says what it waits for and holds."""
    client = KubeClient.load(kubeconfig)
    of = "" if all_namespaces else namespace or client.namespace
    views = ganging.views(client, of)
    if output in ("json", "yaml"):
        _dump(ganging.as_json(views), output)
    elif views:
        click.echo(ganging.table(views, options.clock().wall(), wide=output == "wide"), nl=False)
    else:
        click.echo(f"there is no gang{f' in namespace {of!r}; -A shows those of all' if of else ''}", err=True)


@cli.group()
def explain() -> None:
    """Say why something is as it is."""


@explain.command("pod")
@_kubeconfig
@_namespace
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
    gang = ganging.of_pod(client, pod)
    seen = None
    try:
        seen = survey.take(client, addresses=False, own=namespace)
    except errors.Forbidden as error:
        click.echo(f"note: why it is so cannot be said in full: {error.message}; {_REMEDY}", err=True)
    if seen is not None and seen.partial:
        click.echo(f"note: {seen.partial}", err=True)
    told = published.take(client)
    if told.note and not pod["spec"].get("nodeName"):  # of a placed pod no policy decides any more
        click.echo(f"note: the extender's policy is taken as {told.policy}: {told.note}", err=True)
    engine = None
    if seen is not None and explaining.in_force(pod, told) in policies.SCORED:
        from cardwise.cli import deciding  # noqa: PLC0415 - loads numpy

        rooms, unknown = snapshots.read_rooms(client)
        engine = deciding.Deciding(seen.ledger, rooms, told.workload)
        for note in filter(None, (unknown, engine.note)):
            click.echo(f"note: {note}", err=True)
    text = explaining.explain(pod, seen, gang, told, engine)
    if output == "table":
        click.echo(text, nl=False)
    else:
        _dump(explained.as_json(pod, seen, explaining.in_force(pod, told), text), output)


@cli.command()
@_kubeconfig
@_namespace
@click.option("--installed", default=names.NAMESPACE, show_default=True, help="Namespace of Cardwise.")
@click.option(
    "--probe/--no-probe", default=True, show_default=True, help="Send pods that try it, and delete them again."
)
@click.option("--probe-image", default="", help="With a shell. Default: the image of the device plugin.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
def doctor(
    kubeconfig: Path | None, namespace: str | None, installed: str, *, probe: bool, probe_image: str, output: str
) -> None:
    """Say what would not work, or does not, with a remedy for each finding.

    Probe pods go into the namespace of -n: one of 1 MiB, whose image is never pulled, and on each node with cards one
    that asks for none and looks whether it got one. Ends with 1 where there is a problem.
    """
    client = KubeClient.load(kubeconfig)
    probe_in = (namespace or client.namespace) if probe else ""
    found = list(doctoring.examine(client, installed, probe_in, probe_image))
    if output == "table":
        click.echo(finding.table(found), nl=False)
    else:
        _dump(finding.as_json(found), output)
    if finding.worst(found) is finding.Level.PROBLEM:
        sys.exit(1)


@cli.command()
@_kubeconfig
@click.option("--installed", default=names.NAMESPACE, show_default=True, help="Namespace of Cardwise.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path("cardwise-bundle.tar.gz"))
def bundle(kubeconfig: Path | None, installed: str, file: Path) -> None:
    """Collect what a helper needs into FILE: findings, objects, logs of Cardwise's parts; no secrets, see the docs."""
    client = KubeClient.load(kubeconfig)
    try:
        missing = bundling.write(
            client, file, list(doctoring.examine(client, installed)), installed, options.clock().wall()
        )
    except FileExistsError:
        raise click.ClickException(f"{file} is there already; name another file") from None
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from None
    for line in missing:
        click.echo(f"note: not in it: {line}", err=True)
    click.echo(f"wrote {file}; look through it before you send it")


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


cli.add_command(simulating.simulate)
for _command in (
    cordoning.cordon,
    cordoning.uncordon,
    draining.drain,
    defragging.defrag,
    noding.nodes,
    topping.top,
    completing.completion,
):
    cli.add_command(_command)


def main(program: str | None = None) -> None:
    """Run, with errors of the cluster as one line. `program`: what people call it, where not by its file's name."""
    try:
        cli(prog_name=program)
    except errors.Forbidden as error:
        sys.exit(f"cardwise: {error.message}; {_REMEDY}")
    except (errors.KubeError, errors.KubeConfigError) as error:
        sys.exit(f"cardwise: {error}")


def kubectl() -> None:
    """`kubectl cardwise`: all of it as a plugin."""
    main("kubectl cardwise")


def kubectl_complete() -> None:
    """`kubectl_complete-cardwise`, which kubectl runs to complete `kubectl cardwise`."""
    click.echo(completing.for_kubectl(cli, sys.argv[1:]))


def kubectl_inspect() -> None:
    """`kubectl inspect cardwise`: the plugin name that people of gpushare are used to."""
    sys.argv.insert(1, "inspect")
    main()
