"""Writes a daemon's folder on the node. The permissions of the folder let the MPS servers of all users work there."""

import os
import shutil
import stat
from pathlib import Path

from cardwise.core.api import mps
from cardwise.core.api.mps import Status
from cardwise.core.values.invalid import InvalidRequest
from cardwise.runtime import replacing

_FOLDER_MODE = 0o755


def check_folder_access(root: Path) -> None:
    """Check that MPS servers, which run as the users of their clients, can enter `root`. Raises InvalidRequest."""
    for folder in [root, *root.parents]:
        try:
            mode = folder.stat().st_mode
        except FileNotFoundError:
            continue  # the manager creates it
        if not stat.S_ISDIR(mode):
            raise InvalidRequest("--mps-root", f"{folder} is not a folder", "name a folder that can be created")
        if not mode & stat.S_IXOTH:
            raise InvalidRequest(
                "--mps-root",
                f"{folder} is closed to other users, and MPS servers run as the user of their clients",
                f"chmod o+x {folder}, or take a root such as {mps.DEFAULT_ROOT}",
            )


def create_open_folder(folder: Path) -> None:
    """Create a folder and its missing parents, open to all users whatever the umask. Raises OSError."""
    for parent in reversed([folder, *folder.parents]):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            parent.chmod(_FOLDER_MODE)


def prepare_folders(home: Path) -> None:
    """Create a daemon's folders. Raises OSError."""
    create_open_folder(home)
    for name in (mps.PIPE_FOLDER, mps.CLIENTS_FOLDER, mps.LOG_FOLDER):
        (home / name).mkdir(exist_ok=True)
        (home / name).chmod(_FOLDER_MODE)


def reset_pipe(home: Path) -> None:
    """Remove all files from the pipe folder, for the next daemon. Raises OSError.

    The folder itself stays: share agents have a tmpfs mounted over it. If the folder were removed, the kernel would
    unmount the tmpfs, and the agents would see the files of the next daemon.
    """
    (home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET).unlink(missing_ok=True)
    pipe = home / mps.PIPE_FOLDER
    for entry in pipe.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    os.chown(pipe, os.geteuid(), os.getegid())
    prepare_folders(home)


def open_to_clients(home: Path) -> None:
    """Let clients connect to the daemon. Clients see a hard link to the daemon's socket, and none of its other files.

    The daemon locks some of its files, and opens and writes other files by name. If a client could create files in the
    daemon's folder, it could make a privileged process write anywhere. If a client could open the daemon's files, it
    could prevent the start of the next daemon.

    Raises OSError.
    """
    socket, link = home / mps.PIPE_FOLDER / mps.CONTROL_SOCKET, home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET
    if not (link.exists() and link.samefile(socket)):
        link.unlink(missing_ok=True)
        link.hardlink_to(socket)


def withdraw_files(home: Path) -> None:
    """Remove the state file and the clients' link from a folder that no daemon uses any more. Raises OSError."""
    (home / mps.READY_FILE).unlink(missing_ok=True)
    (home / mps.CLIENTS_FOLDER / mps.CONTROL_SOCKET).unlink(missing_ok=True)


def write_status(home: Path, status: Status) -> None:
    """Write the state file atomically. Raises OSError."""
    replacing.replace_file(home / mps.READY_FILE, mps.encode(status).encode())
