"""`python -m demo`: starts a cluster, runs the scenes, shows the GPUs, and removes everything, also at Ctrl-C."""

import os
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

import click
import yaml

from cardwise.core.api.policies import FALLBACK_POLICY
from cardwise.kube import clusterstate
from cardwise.kube.errors import KubeError
from demo.scenes import FOUR_CARDS, SCENES, Scene, SceneFailed
from tests.cluster import Cluster, ClusterSpec, binaries, node
from tests.cluster.cluster import check_owner

WIDTH = 80
_SECONDS_TO_DECLINE = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PLURALS = {
    "folder": "folders",
    "process": "processes",
    "mount": "mounts",
    "bridge": "network bridges",
    "cgroup": "cgroups",
    "shim": "containers",
}
_MEMORY_MIB = 16276
# Three nodes of two GPUs, and a simulated node of four GPUs of another model.
_CARDS = {
    "nodes": {FOUR_CARDS: [{"model": "Tesla-V100", "memoryMiB": _MEMORY_MIB}] * 4},
    "default": [{"model": "Tesla-P100", "memoryMiB": _MEMORY_MIB}] * 2,
}
STATE = Path(tempfile.gettempdir(), f"cardwise-demo-{os.getuid()}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--once", is_flag=True, help="Stop the cluster after the scenes; exit 0 only if all passed.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=STATE,
    show_default=True,
    help="Folder of the cluster. It is removed at the end.",
)
def demo(once: bool, state_dir: Path) -> None:
    """Show on a real Kubernetes how pods share GPUs. Takes about two minutes.

    The GPUs are simulated. As root, three nodes run containers; otherwise the nodes are simulated too. The first run
    builds Kubernetes (10 to 30 minutes). Ctrl-C stops the demo at any time, and removes all that it has started.
    """
    check_owner(state_dir)
    started: list[str] = []  # what there is to remove when the demo is interrupted

    def interrupt(_signal: int, _frame: object) -> None:
        _ignore_signals()
        click.echo("\ninterrupted")
        started.extend(Cluster.leftovers(state_dir))
        raise KeyboardInterrupt

    for number in _SIGNALS:
        signal.signal(number, interrupt)
    failed = ["interrupted"]
    try:
        cluster = _start(state_dir)
        failed = [scene.title for number, scene in enumerate(SCENES, 1) if not _run_scene(cluster, number, scene)]
        click.echo(f"\nEach GPU that is used now, with its pods:\n{_format_used_gpus(cluster)}")
        click.echo("all scenes passed" if not failed else f"failed: {', '.join(failed)}")
        if not once:
            _wait_for_interrupt(state_dir)
    except KeyboardInterrupt:
        pass
    finally:
        _ignore_signals()
        has_left = _stop(state_dir, started or Cluster.leftovers(state_dir))
    sys.exit(1 if failed or has_left else 0)


def _ignore_signals() -> None:
    """Let no second Ctrl-C interrupt the removal."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _start(state_dir: Path) -> Cluster:
    """Say what will be started and installed, and start it."""
    is_root = os.geteuid() == 0
    kind = "three nodes that run containers" if is_root else "three simulated nodes (not root: pods do not run)"
    _print_wrapped(f"Starting a real Kubernetes with {kind}. Ctrl-C removes it again.")
    if is_root and (packages := node.missing_packages()):
        _print_wrapped(
            f"The nodes need Debian packages. They are installed in {_SECONDS_TO_DECLINE} seconds, and stay:"
        )
        for package in packages:
            click.echo(f"    {package}: {node.PURPOSE_BY_PACKAGE[package]}")
        time.sleep(_SECONDS_TO_DECLINE)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as cards:
        yaml.safe_dump(_CARDS, cards)
        cards.flush()
        spec = ClusterSpec(
            state_dir=state_dir,
            nodes=3 if is_root else 0,
            sim_nodes=1 if is_root else 4,
            cards=Path(cards.name),
            # Alibaba's articles use this policy; the default one learns from the pods of earlier scenes.
            part_args={"extender": [f"--policy={FALLBACK_POLICY}"]},
        )
        cluster = Cluster.start(spec, click.echo)
    cluster.kubectl("taint", "node", FOUR_CARDS, "demo=only:NoSchedule")
    return cluster


def _stop(state_dir: Path, started: list[str]) -> bool:
    """Remove all that was started, and say what that was. Returns whether something is left behind."""
    if not started:
        click.echo("nothing was started, so nothing is left")
        return False
    click.echo("stopping the cluster")
    if state_dir.exists():  # a start that was interrupted has removed it already
        Cluster(state_dir).stop()
    counts = Counter(entry.partition(" ")[0] for entry in started)
    _print_wrapped("removed: " + ", ".join(f"{_PLURALS[kind]} {count}" for kind, count in sorted(counts.items())))
    if leftovers := Cluster.leftovers(state_dir):
        _print_wrapped(f"left behind: {'; '.join(leftovers)}")
        return True
    _print_wrapped(f"nothing is left; the next run needs the programs in {binaries.cache_root()}")
    return False


def _run_scene(cluster: Cluster, number: int, scene: Scene) -> bool:
    click.echo(f"\n{number}/{len(SCENES)} {click.style(scene.title, bold=True)}\n    {scene.purpose}")
    try:
        observation = scene.play(cluster)
    except (SceneFailed, KubeError) as error:
        _print_wrapped(str(error), "  ✗ ")
        return False
    _print_wrapped(observation, "  ✓ ")
    return True


def _print_wrapped(words: str, mark: str = "") -> None:
    """Print lines that fit the screen. `mark`: stands before the first line."""
    for i, line in enumerate(words.splitlines()):
        first = mark if i == 0 else " " * len(mark)
        rest = " " * (len(mark) + len(line) - len(line.lstrip(" -")))
        click.echo(textwrap.fill(line, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False))


def _format_used_gpus(cluster: Cluster) -> str:
    """A line for each GPU that is used: node, index, MiB, pods."""
    ledger = clusterstate.read_cluster_state(cluster.api).ledger
    pods_by_gpu: dict[tuple[str, int], list[str]] = {}
    mib_by_gpu: Counter[tuple[str, int]] = Counter()
    for gpu_node in ledger.nodes():
        for holding in ledger.holdings(gpu_node.name):
            for share in holding.assignment.shares():
                gpu = gpu_node.name, share.index
                pods_by_gpu.setdefault(gpu, []).append(f"{holding.name} {share.mem}")
                mib_by_gpu[gpu] += share.mem
    lines = []
    for gpu, pods in sorted(pods_by_gpu.items()):
        bar = "#" * round(20 * mib_by_gpu[gpu] / _MEMORY_MIB)
        lines.append(f"{gpu[0]} GPU {gpu[1]}  [{bar:.<20}]  {mib_by_gpu[gpu]} of {_MEMORY_MIB} MiB")
        lines += [f"    {pod} MiB" for pod in sorted(pods)]
    return "\n".join(lines)


def _wait_for_interrupt(state_dir: Path) -> None:
    python = Path(sys.executable)
    click.echo(
        "\nTry in another terminal:\n"
        f'  eval "$({python} -m tests.cluster env --state-dir {state_dir})"\n'
        "  kubectl get pods -o wide\n"
        "  kubectl exec deploy/binpack-1 -- env | grep -E 'ALIYUN|CARDWISE|NVIDIA|XLA'\n"
        "  cardwise top\n"
        "  cardwise explain pod POD\n"
        "Ctrl-C stops the cluster."
    )
    while True:
        time.sleep(1)


if __name__ == "__main__":
    demo()
