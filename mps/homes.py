"""A daemon's folder on the node: made so that every user's server can work in it, and what is written there."""

import json
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from cardwise.core import mps
from cardwise.core.invalid import InvalidRequest
from cardwise.core.mps import Status
from cardwise.gpus.protocol import ComputeMode
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
    for name in (mps.PIPE, mps.LOG):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(_OPEN)


def empty(pipe: Path) -> None:
    """For a new daemon: what clients have left there, or planted. Raises OSError.

    A lock on an old `control_lock`, which every client may take, keeps a daemon from starting, and it writes through
    links. The folder itself stays: containers have it mounted.
    """
    for entry in pipe.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def control_socket(home: Path) -> tuple[int, int] | None:
    """Which file the daemon's socket is: another one is not the daemon's. None where there is none."""
    try:
        found = (home / mps.PIPE / mps.CONTROL).lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def write_status(home: Path, status: Status) -> None:
    """Raises OSError."""
    replacing.replace(home / mps.READY, mps.encode(status).encode())


def modes(home: Path) -> dict[str, ComputeMode]:
    """Compute modes of before, by UUID, of cards that were closed and not opened again."""
    try:
        raw = json.loads((home / mps.MODES).read_text())
        return {str(uuid): ComputeMode(mode) for uuid, mode in raw.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def write_modes(home: Path, found: Mapping[str, ComputeMode]) -> None:
    """Raises OSError."""
    if found:
        replacing.replace(home / mps.MODES, json.dumps(dict(found)).encode())
    else:
        (home / mps.MODES).unlink(missing_ok=True)
