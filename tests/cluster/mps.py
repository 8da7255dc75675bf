"""The MPS manager of a test node, below the node's folder: with the control double, or NVIDIA's own on real cards."""

import os
import sys
from pathlib import Path

DOUBLE = Path(__file__).parents[1] / "mps" / "double"  # the folder of the control double


def root(folder: Path) -> Path:
    """--mps-root of the node's manager and of its device plugin."""
    return folder / "mps"


def flags(folder: Path, node: str, *, real_cards: bool = False) -> list[str]:
    """What the node's manager is given beside its kubeconfig."""
    return [
        f"--node-name={node}",
        *([] if real_cards else [f"--simulated-gpus={folder / 'cards.yaml'}"]),
        f"--mps-root={root(folder)}",
        "--probe-timeout=10s",  # a daemon on a machine under load is not taken for frozen
        "--metrics-bind=127.0.0.1:0",
    ]


def environment(*, real_cards: bool = False) -> dict[str, str]:
    """The manager finds the double, which runs in our interpreter, not in a wrapper that comes first in PATH."""
    folders = [str(Path(sys.executable).parent), *([] if real_cards else [str(DOUBLE)]), os.environ["PATH"]]
    return {"PATH": os.pathsep.join(folders)}


def open_up(folder: Path, below: Path) -> None:
    """Servers become the user of their clients, so the way to their sockets is open to all."""
    for path in (folder, *folder.parents):
        if path == below:
            break
        path.chmod(path.stat().st_mode | 0o011)
