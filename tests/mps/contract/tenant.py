"""Root in a container on a card: plants links and locks where the card's daemon has its files, as fast as it can.

Run with the folder that is mounted, the file of the node that a link leads to, and how often to try before it says so.
"""

import fcntl
import itertools
import socket
import sys
from contextlib import suppress
from pathlib import Path

NAMES = ("control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid", "new")
kept = []


def plant(path: Path, target: Path) -> None:
    with suppress(OSError):
        path.rename(f"{path}.aside")
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        path.symlink_to(target)
    with suppress(OSError):
        path.mkdir()


def fill(path: Path) -> None:
    with suppress(OSError), path.open("r+b", buffering=0) as file:
        file.write(b"tenant" * 1000)


def lock(path: Path) -> None:
    with suppress(OSError):
        kept.append(path.open())
        fcntl.lockf(kept[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
        del kept[:-100]


def connects(pipe: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        return client.connect_ex(str(pipe / "control")) == 0


mounted, target, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
reached = False
for turn in itertools.count():
    if turn == rounds:
        print("connected" if reached else "never connected", flush=True)
    for name in NAMES:
        plant(mounted / name, target)
        fill(mounted / name)
    lock(mounted / "control_lock")
    reached = reached or connects(mounted)
