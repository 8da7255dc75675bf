"""Replaces a file atomically: readers see the old or the new content, never a part of it.

For files that belong together, use `filesets`.
"""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file atomically. A power cut may lose the file. Raises OSError; then no temporary file is left."""
    # The temporary file is hidden and has another suffix, so that readers of the folder ignore it.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        scratch.write_bytes(content)
        scratch.chmod(mode)  # independent of the umask
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
