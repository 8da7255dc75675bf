"""Lays the files that are mounted into containers into one folder of the node.

The hook lies at its root, where PYTHONPATH finds it; below it a `cardwise` package with this reader alone, so that
`python -m cardwise.share` runs in any image. Called by the part that prepares a node; never mounted itself.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent
_READER = ("__init__.py", "__main__.py", "reading.py")


def files() -> dict[str, bytes]:
    """What is mounted: contents by path."""
    hook = {path.name: path.read_bytes() for path in sorted((_PACKAGE / "hook").glob("*.py"))}
    hook.pop("__init__.py")
    reader = {f"cardwise/share/{name}": (_PACKAGE / name).read_bytes() for name in _READER}
    return {**hook, "cardwise/__init__.py": b"", **reader}


def lay_out(folder: Path) -> None:
    """Write `files` below `folder`, each in one step: containers that have it mounted read whole files. Raises OSError.

    A file that has its content already is left alone.
    """
    for directory in (folder, folder / "cardwise", folder / "cardwise" / "share"):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # the programs of a container may run as any user
    for name, content in files().items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(content)
            temporary.chmod(0o644)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
