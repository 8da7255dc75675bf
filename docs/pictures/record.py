"""Records `cardwise top` as top.svg: the real program, on a real Kubernetes of this machine with simulated nodes.

Usage: `.venv/bin/python -m docs.pictures.record`; takes half a minute, and stops the cluster again.
"""

import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from cardwise.cli.render import livescreen
from cardwise.core.api import names
from cardwise.kube import clusterstate, paths
from tests.cluster import Cluster, ClusterSpec

WIDTH = 156
_T4, _A100 = {"model": "T4", "memoryMiB": 15360}, {"model": "A100-80GB", "memoryMiB": 81920}
_CARDS = {"nodes": {"sim-1": [_A100] * 2, "sim-2": [_T4] * 2, "sim-3": [_T4] * 2}}
# Namespace, name and limits of each pod, in the order of their creation.
_PODS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("ml", "train", {names.GPU_COUNT: "1"}),
    ("ml", "eval", {names.GPU_MEM: "40Gi"}),
    ("web", "chat", {names.GPU_MEM: "20Gi"}),
    ("web", "embed-0", {names.GPU_MEM: "6Gi"}),
    ("web", "embed-1", {names.GPU_MEM: "6Gi"}),
    ("lab", "ada", {names.GPU_MEM: "2Gi"}),
    ("lab", "lin", {names.GPU_MEM: "4Gi"}),
)


def pod(name: str, limits: dict[str, str]) -> dict[str, Any]:
    container = {"name": "main", "image": "registry.example/app:1", "resources": {"limits": limits}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}


def create_pods(cluster: Cluster) -> None:
    """Create the pods one after another, each once the one before has its card; then cordon a card."""
    for namespace, name, limits in _PODS:
        cluster.kubectl("create", "namespace", namespace, check=False)
        cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(pod(name, limits)))
        cluster.wait(partial(_has_card, cluster, name), f"{name} has a card")
    card = next(c for c in cluster.api.get(paths.extendedresources())["items"] if c["spec"]["node"] == "sim-3")
    cluster.api.patch(paths.extendedresources(card["metadata"]["name"]), {"spec": {"unschedulable": True}})


def _has_card(cluster: Cluster, name: str) -> bool:
    return any(holding.name == name for holding in clusterstate.read_cluster_state(cluster.api).ledger.holdings())


def picture(screen: str, command: str) -> str:
    """The SVG of a terminal with the command and its screen."""
    console = Console(record=True, highlight=False, width=WIDTH, file=Path(os.devnull).open("w"))  # noqa: SIM115 - open until the program ends
    console.print(Text(f"$ {command}", style="bold"))
    console.print(livescreen.color_text(screen))
    svg = console.export_svg(title=command, unique_id="cardwise-top")
    # Only fonts of the reader's system: the pages load nothing from other servers.
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cw-pic-") as folder:
        cards = Path(folder, "cards.yaml")
        cards.write_text(yaml.safe_dump(_CARDS))
        cluster = Cluster.start(ClusterSpec(state_dir=Path(folder, "c"), nodes=0, sim_nodes=3, cards=cards), print)
        try:
            create_pods(cluster)
            command = ["top", "--once", "--kubeconfig", str(cluster.kubeconfig)]
            program = str(Path(sys.executable).with_name("cardwise"))
            environment = os.environ | {"COLUMNS": str(WIDTH)}
            screen = subprocess.run(
                [program, *command], env=environment, check=True, capture_output=True, text=True
            ).stdout
        finally:
            cluster.stop()
    Path(__file__).with_name("top.svg").write_text(picture(screen, "cardwise top"))


if __name__ == "__main__":
    main()
