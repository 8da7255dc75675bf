"""A daemon's directory on the node: its permissions, so that every user's server works in it, and its files."""

import os
import shutil
import stat
from pathlib import Path

from cardwise.core.api import mps
from cardwise.core.api.mps import Status
from cardwise.core.values.invalid import InvalidRequest
from cardwise.runtime import replacing

_OPEN = 0o755


def check_open(root: Path) -> None:
    """Raises InvalidRequest where a folder on the way to `root` is closed to the users that servers become."""
    for folder in [root, *root.parents]:
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            continue  # made by us
        if not stat.S_ISDIR(mode):
            raise InvalidRequest("--root", f"{folder} is no folder", "name one that may be made")
        if not mode & stat.S_IXOTH:
            raise InvalidRequest(
                "--root",
                f"{folder} is closed to other users, and MPS servers become the user of their clients",
                f"chmod o+x {folder}, or take a root such as {mps.DEFAULT_ROOT}",
            )


def make_open(folder: Path) -> None:
    """Makes a folder and what is missing above it, open to all whatever our umask is. Raises OSError."""
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir(exist_ok=True)
            each.chmod(_OPEN)


def prepare(home: Path) -> None:
    """Makes a daemon's folders. Raises OSError."""
    make_open(home)
    for name in (mps.PIPE, mps.CLIENTS, mps.LOG):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(_OPEN)


def renew(home: Path) -> None:
    """Empties the folder of pipes for the next daemon: nothing of the one before is in it. Raises OSError.

    The folder itself stays. Share agents have a tmpfs mounted over it, and the kernel would take that away with the
    folder: then they would see the files of the next daemon.
    """
    (home / mps.CLIENTS / mps.CONTROL).unlink(missing_ok=True)
    pipe = home / mps.PIPE
    for entry in pipe.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    os.chown(pipe, os.geteuid(), os.getegid())
    prepare(home)


def share(home: Path) -> None:
    """Lets clients reach the daemon: they see a link to its socket and no other file of it. Raises OSError.

    It locks some of its files, writes into others and opens them by name. Who could write names in their folder would
    have a privileged process write where he likes, and who could open them would keep the next daemon from starting.
    """
    socket, link = home / mps.PIPE / mps.CONTROL, home / mps.CLIENTS / mps.CONTROL
    if not (link.exists() and link.samefile(socket)):
        link.unlink(missing_ok=True)
        link.hardlink_to(socket)


def withdraw(home: Path) -> None:
    """Takes the state file and the clients' link from a folder that no daemon serves any more. Raises OSError."""
    (home / mps.READY).unlink(missing_ok=True)
    (home / mps.CLIENTS / mps.CONTROL).unlink(missing_ok=True)


def write_status(home: Path, status: Status) -> None:
    """Raises OSError."""
    replacing.replace(home / mps.READY, mps.encode(status).encode())
