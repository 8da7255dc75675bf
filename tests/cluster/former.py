"""The tree of the commit before this one: what an upgrade comes from.

Chart and code belong together: a chart names options that its own code has.
"""

import compileall
import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from py_compile import PycInvalidationMode

from tests.cluster.processes import PATIENCE

_ROOT = Path(__file__).parents[2]
_COPIED = ("cardwise", "webhook", "extender", "deviceplugin", "mps", "helm")


def write(folder: Path) -> str:
    """Into this folder; returns which it is. Without the history (a shallow clone, no git) it is this very tree."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD~1^{commit}").decode().strip()
    archive = _git("archive", commit, *_COPIED) if commit else b""
    if archive:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(folder, filter="data")
    else:
        commit = "this tree itself, since there is no history"
        for name in _COPIED:
            shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    # As the image has it: nobody can write beside the sources, and every start would compile them anew.
    compileall.compile_dir(folder, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    return commit


def _git(*words: str) -> bytes:
    """What it says; empty where it fails, or is not there."""
    try:
        command = ["git", "-C", str(_ROOT), *words]
        return subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE).stdout
    except (OSError, subprocess.SubprocessError):
        return b""
