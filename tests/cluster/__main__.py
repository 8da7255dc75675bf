"""`python -m tests.cluster`: a real Kubernetes on this machine, for people who want to look."""

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cardwise.kube.errors import KubeError
from tests.cluster import binaries, cluster, debian, node, processes, toolkit, versions
from tests.cluster.cluster import Cluster, ClusterSpec
from tests.cluster.controlplane import APISERVER, CONTROLLERS, ETCD, SCHEDULER, ControlPlane

_ERRORS = (
    binaries.NoBinaries,
    processes.CommandFailed,
    processes.NotReady,
    PermissionError,
    LookupError,
    ValueError,
    KubeError,
)


def _state_dir(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=cluster.default_state_dir,
        help="Folder of the cluster: logs, sockets, data. Keep it short: socket paths end at 108 bytes.",
        show_default=str(cluster.default_state_dir()),
    )(function)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Bring a real Kubernetes up on this machine, with simulated GPU cards; root for real nodes."""


@cli.command()
@_state_dir
@click.option("--nodes", type=click.IntRange(0, 9), default=1, show_default=True, help="Real nodes n1, n2, … (root).")
@click.option("--sim-nodes", type=click.IntRange(0, 10_000), default=0, show_default=True, help="Nodes sim-1, sim-2, …")
@click.option("--cards", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="YAML: cards by node.")
@click.option("--rdma-devices", type=click.IntRange(0, 8), default=0, help="RDMA devices of each real node.")
@click.option(
    "--mps",
    is_flag=True,
    help="An MPS manager on each real node, with a double of NVIDIA's program, and the share agent in pods.",
)
@click.option("--parts/--no-parts", default=True, show_default=True, help="Run webhook, extender and device plugins.")
@click.option("--chart", is_flag=True, help="Run them in pods, installed by Helm. One such cluster on a machine.")
def up(
    *,
    state_dir: Path,
    nodes: int,
    sim_nodes: int,
    cards: Path | None,
    rdma_devices: int,
    mps: bool,
    parts: bool,
    chart: bool,
) -> None:
    """Start a cluster; an earlier one in the same folder is taken down first."""
    cluster.check_owner(state_dir)
    if mps and chart:
        raise click.UsageError("--mps is of clusters without --chart; there: helm upgrade with mps.enabled=true")
    spec = ClusterSpec(
        state_dir=state_dir,
        nodes=nodes,
        sim_nodes=sim_nodes,
        cards=cards,
        rdma_devices=rdma_devices,
        mps=mps,
        agent=mps and parts and not chart,
        parts=parts,
        chart=chart,
    )
    Cluster.start(spec, click.echo)
    this, options = f"{sys.executable} -m tests.cluster", f"--state-dir {state_dir}"
    click.echo(f'look at it: eval "$({this} env {options})"; take it down: {this} down {options}')


@cli.command()
@_state_dir
def env(state_dir: Path) -> None:
    """Print KUBECONFIG, PATH and URLs as shell exports, for eval."""
    for key, setting in Cluster.attach(state_dir).environment().items():
        click.echo(f"export {key}={shlex.quote(setting)}")


@cli.command()
@_state_dir
def down(state_dir: Path) -> None:
    """End the cluster, also one whose `up` was killed. Removes the folder."""
    cluster.check_owner(state_dir)
    if not state_dir.exists():
        click.echo(f"no cluster in {state_dir}")
        return
    started = time.monotonic()
    Cluster(state_dir).stop()
    leftovers = Cluster.leftovers(state_dir)
    if leftovers:
        raise click.ClickException("still there: " + "; ".join(leftovers))
    click.echo(f"down in {time.monotonic() - started:.1f} s, nothing left")


@cli.command("binaries")
def build() -> None:
    """Build the programs of the cluster into the cache, if they are not there; as root also install what nodes need."""
    if os.geteuid() == 0:
        debian.install(node.missing_packages, click.echo)
    wanted = [binaries.kube, binaries.runtime, binaries.helm]
    if os.environ.get(toolkit.MOCK):
        wanted.append(binaries.nvidia)
    for get in wanted:
        click.echo(get(click.echo))


@cli.command()
@click.argument("version")
def add(version: str) -> None:
    """Write the Go module of a Kubernetes version (1.38.0), build it, and see its control plane come up.

    If one of these fails, what the tests had of that minor stays.
    """
    go = binaries.go(click.echo)
    with versions.added(version, go) as minor, tempfile.TemporaryDirectory(prefix="cw-add-") as folder:
        os.environ[versions.CHOSEN] = minor
        bin_dir = binaries.kube(click.echo)
        plane = ControlPlane(Path(folder), bin_dir)
        plane.write_credentials(())
        try:
            plane.start_api()
            plane.start_controllers()
            plane.start_scheduler(())
            kubectl = [str(bin_dir / "kubectl"), f"--kubeconfig={plane.kubeconfig('admin')}", "version"]
            click.echo(processes.run(kubectl))
        finally:
            for name in (SCHEDULER, CONTROLLERS, APISERVER, ETCD):
                plane.process(name).stop()


def main() -> None:
    """Run, with what can go wrong as one message."""
    try:
        cli()
    except _ERRORS as error:
        sys.exit(f"tests.cluster: {error}")


if __name__ == "__main__":
    main()
