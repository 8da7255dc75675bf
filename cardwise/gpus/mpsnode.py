"""Tells from the node's own files whether a card's MPS takes a container. No API server is asked.

What the files say is `cardwise.core.api.mps`; here is asked what no file can say of itself: whether the manager that
wrote it and the daemon that it is about are alive.
"""

import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from cardwise.clock import BOOT, Clock
from cardwise.core.api import mps
from cardwise.core.api.mps import MpsState, Status
from cardwise.core.values.quantity import MiB

_CONNECT_SECONDS = 0.5


def problem(
    root: Path, uuid: str, *, wanted: MpsState = MpsState.READY, need: MiB = MiB(0), clock: Clock = BOOT
) -> str:
    """Why no container may start on the card yet, "" if one may. `need`: its memory limit there. Takes milliseconds.

    `clock` is the manager's, which all containers of a node have in common.
    """
    if not manager_lives(root):
        return f"no MPS manager runs on this node ({root / mps.LOCK} is not held)"
    return look(root, uuid, wanted=wanted, need=need, clock=clock).problem


@dataclass(frozen=True, slots=True)
class CardLook:
    """`problem`: why no container may start on the card yet, "" if one may. `state` is None where none can be read."""

    problem: str
    state: MpsState | None


def look(
    root: Path, uuid: str, *, wanted: MpsState = MpsState.READY, need: MiB = MiB(0), clock: Clock = BOOT
) -> CardLook:
    """As `problem`, but for the manager's lock, which no pod may open: who can open it can lock it."""
    home, status = find(root, uuid)
    if home is None or status is None:
        return CardLook(f"the MPS manager of the node does not serve card {uuid} (yet)", None)
    why = mps.unusable(status, uuid, now=clock.now(), wanted=wanted, need=need)
    if not why and wanted is MpsState.READY and not answers(home / mps.CLIENTS):
        why = f"the MPS daemon of card {uuid} takes no connection"
    return CardLook(why, status.state)


def find(root: Path, uuid: str) -> tuple[Path | None, Status | None]:
    """The folder of the daemon that serves the card, and what its state file says; the card's own comes first."""
    for home in (Path(mps.folder(str(root), uuid)), Path(mps.node_folder(str(root)))):
        status = read(home)
        if status is not None and uuid in status.uuids:
            return home, status
    return None, None


def read(home: Path) -> Status | None:
    """What the state file in a folder says; None where there is none that can be read."""
    try:
        return mps.decode((home / mps.READY).read_text())
    except (OSError, UnicodeDecodeError, mps.UnreadableState):
        return None


def left_closed(root: Path, uuid: str) -> bool:
    """Whether a manager closed the card to programs without MPS and has not opened it again: its note is there.

    A manager that ends leaves cards so that pods hold (`--stop-daemons=idle`), with the daemons that serve these pods.
    """
    for home in (Path(mps.folder(str(root), uuid)), Path(mps.node_folder(str(root)))):
        try:
            if uuid in json.loads((home / mps.MODES).read_bytes()):
                return True
        except (OSError, ValueError, TypeError):
            continue
    return False


def manager_lives(root: Path) -> bool:
    """Whether somebody holds the manager's lock. The kernel lets it go with the process, whatever ends it."""
    try:
        descriptor = os.open(root / mps.LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    else:
        return False
    finally:
        os.close(descriptor)


def silent(root: Path, uuid: str, *, clock: Clock = BOOT) -> bool:
    """Whether the last MPS state of the card is stale: no manager runs, or none that checks this card.

    A state in which no container starts is never stale by its age: nobody needs to check it again. `clock`: as for
    `problem`.
    """
    if not manager_lives(root):
        return True
    _, status = find(root, uuid)
    return status is None or mps.stale(status, clock.now())


def answers(folder: Path) -> bool:
    """Whether a daemon listens in this folder: the socket of a dead one refuses at once, a frozen one still listens.

    Asked in the wrong way on purpose: MPS listens for packets, and the kernel says so without troubling the daemon.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(folder / mps.CONTROL))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True
