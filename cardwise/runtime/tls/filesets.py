"""Replaces a set of files atomically. A reader must not see a new certificate with an old key for long.

For the certificate store on disk and the directory that servers read. Works like the kubelet's Secret volumes. The
files are written to a new directory, and one rename replaces the link `..data`, through which all file names resolve.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

_CURRENT_LINK = "..data"
_READ_ATTEMPTS = 100


def read_files(directory: Path) -> dict[str, bytes]:
    """All files of the set, by name; empty if there is no set yet. Raises OSError."""
    for _ in range(_READ_ATTEMPTS):
        current = _link_target(directory)
        if current is None:
            return {}
        try:
            files = {path.name: path.read_bytes() for path in current.iterdir()}
        except FileNotFoundError:
            files = {}  # the directory is being removed, or the link is broken
        # A directory that is being removed may appear empty. If the link still points to it, the set was complete.
        if _link_target(directory) == current:
            return files
    raise OSError(f"{directory}: it was replaced again and again during the read")


def write_files(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Replace the set by `files`. Names that end in .key get mode 0600, other names 0644. Returns False if nothing has
    changed.

    After a crash at any point, either the old or the new set exists. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if read_files(directory) == dict(files) and all((directory / name).is_symlink() for name in files):
        return False
    former_target = _link_target(directory)
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=directory))
    try:
        fresh.chmod(0o755)
        for name, content in files.items():
            _write_file(fresh / name, content, 0o600 if name.endswith(".key") else 0o644)
        _sync_directory(fresh)
        _link(fresh.name, directory / _CURRENT_LINK)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    for name in files:
        if not (directory / name).is_symlink():
            _link(f"{_CURRENT_LINK}/{name}", directory / name)
    _sync_directory(directory)
    for path in directory.iterdir():
        # A broken link is a file name that the set no longer has.
        if path.is_symlink() and not path.exists():
            path.unlink()
    if former_target is not None and former_target != fresh:
        shutil.rmtree(former_target, ignore_errors=True)
    return True


def _link_target(directory: Path) -> Path | None:
    """The target of `..data`, whether or not it exists; None without the link."""
    with contextlib.suppress(FileNotFoundError):
        return directory / (directory / _CURRENT_LINK).readlink()
    return None


def _write_file(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)  # independent of the umask
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _link(target: str, path: Path) -> None:
    temporary = path.with_name(f"..{path.name.lstrip('.')}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
