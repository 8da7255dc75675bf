"""Debian's packages, for tests that come to a new machine several at a time.

apt-get fails where another one runs: ours wait for each other, and for those of the machine (a new one often updates
itself while it starts).
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import binaries, processes

_TAKEN = "Could not get lock"


def install(missing: Callable[[], Sequence[str]], say: binaries.Say) -> None:
    """Installs what `missing` names, asked once nobody else installs. Raises CommandFailed."""
    if not missing():
        return
    with binaries.locked("apt.lock", say):
        packages = missing()
        if packages:
            say(f"installing Debian packages for the nodes: {' '.join(packages)}")
            _apt_get(["update"])
            _apt_get(["install", "-y", *packages])


def download(package: str, folder: Path, say: binaries.Say) -> None:
    """The package's file comes into the folder. Raises CommandFailed."""
    with binaries.locked("apt.lock", say):
        try:
            _apt_get(["download", package], folder)
        except processes.CommandFailed:  # lists that are missing or old
            _apt_get(["update"])
            _apt_get(["download", package], folder)


def _apt_get(arguments: Sequence[str], folder: Path | None = None) -> None:
    command = ["apt-get", "-qq", *arguments]
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done: subprocess.CompletedProcess[str] | None = None

    def has_ended() -> bool:
        nonlocal done
        done = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, check=False)
        return _TAKEN not in done.stderr

    processes.wait_for(has_ended)
    assert done is not None
    if done.returncode:
        raise processes.CommandFailed(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
