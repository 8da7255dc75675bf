"""`python -m demo`: starts a cluster, runs the scenes, shows the GPUs, and removes everything."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import yaml

from cardwise.cli.render import inspecttable
from cardwise.core.api.policies import FALLBACK_POLICY
from cardwise.kube import clusterstate
from cardwise.kube.errors import KubeError
from demo.scenes import FOUR_CARDS, SCENES, Scene, SceneFailed
from tests.cluster import Cluster, ClusterSpec
from tests.cluster.cluster import check_owner

_CARD = {"model": "Tesla-P100", "memoryMiB": 16276}
# Three nodes of two cards, and a simulated node of four cards for `choose_smallest_card_that_fits`.
_CARDS = {"nodes": {FOUR_CARDS: [_CARD] * 4}, "default": [_CARD] * 2}
STATE = Path(tempfile.gettempdir(), f"cardwise-demo-{os.getuid()}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--once", is_flag=True, help="Stop the cluster after the scenes; exit 0 only if all passed.")
@click.option("--state-dir", type=click.Path(file_okay=False, path_type=Path), default=STATE, show_default=True)
def demo(once: bool, state_dir: Path) -> None:
    """Show GPU sharing on three nodes with two simulated 16276 MiB GPUs each; as root, with real kubelets."""
    check_owner(state_dir)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the cluster, as Ctrl-C
    real = os.geteuid() == 0
    click.echo("starting Kubernetes" if real else "not root: the three nodes are simulated, and pods do not run")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as cards:
        yaml.safe_dump(_CARDS, cards)
        cards.flush()
        spec = ClusterSpec(
            state_dir=state_dir,
            nodes=3 if real else 0,
            sim_nodes=1 if real else 4,
            cards=Path(cards.name),
            # Alibaba's articles use this policy; the default one learns from the pods of earlier scenes.
            part_args={"extender": [f"--policy={FALLBACK_POLICY}"]},
        )
        cluster = Cluster.start(spec, click.echo)
    failed = ["the scenes were interrupted"]
    try:
        cluster.kubectl("taint", "node", FOUR_CARDS, "demo=only:NoSchedule")
        with _live_table(cluster):
            failed = [scene.title for scene in SCENES if not _run_scene(cluster, scene)]
        click.echo(_gpu_table(cluster))
        click.echo("all scenes passed" if not failed else f"failed: {', '.join(failed)}")
        if not once:
            _wait_for_interrupt(state_dir)
    except KeyboardInterrupt:
        click.echo("")
    finally:
        click.echo("stopping the cluster")
        cluster.stop()
    leftovers = Cluster.leftovers(state_dir)
    if leftovers:
        failed.append(f"left behind: {'; '.join(leftovers)}")
        click.echo(failed[-1])
    sys.exit(1 if failed else 0)


def _run_scene(cluster: Cluster, scene: Scene) -> bool:
    start = time.monotonic()
    try:
        observation = scene.play(cluster)
    except (SceneFailed, KubeError) as error:
        click.echo(f"✗ {scene.title}\n    {error}")
        return False
    click.echo(f"✓ {scene.title} ({time.monotonic() - start:.1f} s)\n    {observation}")
    return True


@contextmanager
def _live_table(cluster: Cluster) -> Iterator[None]:
    """Print the table of GPUs whenever it changes, while the scenes run."""
    stop = threading.Event()

    def print_changes() -> None:
        last = ""
        while not stop.wait(0.5):
            try:
                table = _gpu_table(cluster)
            except KubeError:
                continue
            if table != last:
                click.echo("\n".join(f"    │ {line}" for line in table.splitlines()))
                last = table

    thread = threading.Thread(target=print_changes, daemon=True)
    if sys.stdout.isatty():
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.is_alive():
            thread.join(10)


def _gpu_table(cluster: Cluster) -> str:
    """The summary of the GPUs, then each pod with its GPUs."""
    snapshot = clusterstate.read_cluster_state(cluster.api)
    lines = [inspecttable.summary(snapshot.ledger, snapshot.addresses)]
    for node in snapshot.ledger.nodes():
        for holding in snapshot.ledger.holdings(node.name):
            places = ", ".join(f"card {share.index}: {share.mem} MiB" for share in holding.assignment.shares())
            lines.append(f"{node.name}  {holding.namespace}/{holding.name}  {places}\n")
    return "".join(lines)


def _wait_for_interrupt(state_dir: Path) -> None:
    python = Path(sys.executable)
    click.echo(
        "\nTry in another terminal:\n"
        f'  eval "$({python} -m tests.cluster env --state-dir {state_dir})"\n'
        "  kubectl get pods -o wide\n"
        "  kubectl exec deploy/binpack-1 -- env | grep -E 'ALIYUN|CARDWISE|NVIDIA|XLA'\n"
        f"  {python.parent}/cardwise inspect -d\n"
        f"  {python.parent}/cardwise explain pod POD\n"
        "Ctrl-C stops the cluster."
    )
    while True:
        time.sleep(1)


if __name__ == "__main__":
    demo()
