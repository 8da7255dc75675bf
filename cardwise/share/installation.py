"""Writes the files that containers mount, into a folder of the node.

The hook is at the root of the folder, since PYTHONPATH has this folder. A subfolder is a `cardwise` package that
contains only the reader. So `python -m cardwise.share` runs in any image. The share agent calls this module; the module
itself is never mounted.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent
_READER_FILES = ("__init__.py", "__main__.py", "reading.py")


def list_container_files() -> dict[str, bytes]:
    """The files that are mounted: contents by relative path."""
    hook = {path.name: path.read_bytes() for path in sorted((_PACKAGE / "hook").glob("*.py"))}
    hook.pop("__init__.py")
    reader = {f"cardwise/share/{name}": (_PACKAGE / name).read_bytes() for name in _READER_FILES}
    return {**hook, "cardwise/__init__.py": b"", **reader}


def install_files(folder: Path) -> None:
    """Write the files that are mounted into containers below `folder`, each atomically: no reader gets a partial file.

    Files that already have the right content are not touched. Raises OSError.
    """
    for directory in (folder, folder / "cardwise", folder / "cardwise" / "share"):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # the programs of a container may run as any user
    for name, content in list_container_files().items():
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
