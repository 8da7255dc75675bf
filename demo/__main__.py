"""`python -m demo`: brings a cluster up, plays the scenes, shows the cards, and takes everything down."""

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
from cardwise.core.api.policies import BY_CARDS
from cardwise.kube import survey
from cardwise.kube.errors import KubeError
from demo.scenes import FOUR_CARDS, SCENES, Failed, Scene
from tests.cluster import Cluster, ClusterSpec
from tests.cluster.cluster import check_owner

_CARD = {"model": "Tesla-P100", "memoryMiB": 16276}
# Three nodes of two cards, and a simulated one of four for the scene that needs it.
_CARDS = {"nodes": {FOUR_CARDS: [_CARD] * 4}, "default": [_CARD] * 2}
STATE = Path(tempfile.gettempdir(), f"cardwise-demo-{os.getuid()}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--once", is_flag=True, help="Take everything down after the scenes; exit 0 only if each came out right.")
@click.option("--state-dir", type=click.Path(file_okay=False, path_type=Path), default=STATE, show_default=True)
def demo(once: bool, state_dir: Path) -> None:
    """Three nodes of two simulated 16276 MiB cards, real kubelets if root, and plain pods that share them."""
    check_owner(state_dir)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it is taken down as by Ctrl-C
    real = os.geteuid() == 0
    click.echo("bringing a Kubernetes up" if real else "not root: the three nodes are simulated, their pods do not run")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as cards:
        yaml.safe_dump(_CARDS, cards)
        cards.flush()
        spec = ClusterSpec(
            state_dir=state_dir,
            nodes=3 if real else 0,
            sim_nodes=1 if real else 4,
            cards=Path(cards.name),
            # The articles' figures are of this policy; the default would know the pods of the scenes before.
            part_args={"extender": [f"--policy={BY_CARDS}"]},
        )
        cluster = Cluster.start(spec, click.echo)
    failed = ["the scenes were interrupted"]
    try:
        cluster.kubectl("taint", "node", FOUR_CARDS, "demo=only:NoSchedule")
        with _live_table(cluster):
            failed = [scene.title for scene in SCENES if not _play(cluster, scene)]
        click.echo(_cards(cluster))
        click.echo("all scenes came out right" if not failed else f"came out wrong: {', '.join(failed)}")
        if not once:
            _wait(state_dir)
    except KeyboardInterrupt:
        click.echo("")
    finally:
        click.echo("taking everything down")
        cluster.stop()
    left = Cluster.leftovers(state_dir)
    if left:
        failed.append(f"left behind: {'; '.join(left)}")
        click.echo(failed[-1])
    sys.exit(1 if failed else 0)


def _play(cluster: Cluster, scene: Scene) -> bool:
    started = time.monotonic()
    try:
        seen = scene.play(cluster)
    except (Failed, KubeError) as error:
        click.echo(f"✗ {scene.title}\n    {error}")
        return False
    click.echo(f"✓ {scene.title} ({time.monotonic() - started:.1f} s)\n    {seen}")
    return True


@contextmanager
def _live_table(cluster: Cluster) -> Iterator[None]:
    """Prints the table of cards whenever it has changed, while the scenes play."""
    stop = threading.Event()

    def watch() -> None:
        last = ""
        while not stop.wait(0.5):
            try:
                table = _cards(cluster)
            except KubeError:
                continue
            if table != last:
                click.echo("\n".join(f"    │ {line}" for line in table.splitlines()))
                last = table

    thread = threading.Thread(target=watch, daemon=True)
    if sys.stdout.isatty():
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.is_alive():
            thread.join(10)


def _cards(cluster: Cluster) -> str:
    """The summary, then each holder."""
    seen = survey.take(cluster.api)
    lines = [inspecttable.summary(seen.ledger, seen.addresses)]
    for node in seen.ledger.nodes():
        for holding in seen.ledger.holdings(node.name):
            on = ", ".join(f"card {share.index}: {share.mem} MiB" for share in holding.assignment.shares())
            lines.append(f"{node.name}  {holding.namespace}/{holding.name}  {on}\n")
    return "".join(lines)


def _wait(state_dir: Path) -> None:
    python = Path(sys.executable)
    click.echo(
        "\nLook further in another terminal:\n"
        f'  eval "$({python} -m tests.cluster env --state-dir {state_dir})"\n'
        "  kubectl get pods -o wide\n"
        "  kubectl exec deploy/binpack-1 -- env | grep -E 'ALIYUN|CARDWISE|NVIDIA|XLA'\n"
        f"  {python.parent}/cardwise inspect -d\n"
        f"  {python.parent}/cardwise explain pod POD\n"
        "Ctrl-C takes it all down."
    )
    while True:
        time.sleep(1)


if __name__ == "__main__":
    demo()
