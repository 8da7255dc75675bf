"""The MPS manager of a test node, below the node's folder: with the control double, or NVIDIA's own on real cards."""

import os
import sys
from pathlib import Path

CONTROL = Path(__file__).parents[1] / "mps" / "double" / "nvidia-cuda-mps-control"
DRIVER = "550.163.01"


def root(folder: Path) -> Path:
    """--root of the node's manager, and --mps-root of its device plugin."""
    return folder / "mps"


def flags(folder: Path, node: str, *, real_cards: bool = False) -> list[str]:
    """What the node's manager is given beside its kubeconfig."""
    simulated = [f"--simulated-gpus={folder / 'cards.yaml'}", f"--control={CONTROL}", f"--driver={DRIVER}"]
    return [
        f"--node-name={node}",
        *([] if real_cards else simulated),
        f"--root={root(folder)}",
        "--probe-interval=1s",
        "--probe-timeout=10s",  # a daemon on a machine under load is not taken for frozen
        "--metrics-bind=127.0.0.1:0",
    ]


def environment() -> dict[str, str]:
    """The double runs in our interpreter, not in a wrapper that happens to be first in PATH."""
    return {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def open_up(folder: Path, below: Path) -> None:
    """Servers become the user of their clients, so the way to their sockets is open to all."""
    for path in (folder, *folder.parents):
        if path == below:
            break
        path.chmod(path.stat().st_mode | 0o011)
