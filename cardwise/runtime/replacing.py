"""Replaces a file atomically: readers see the old or the new content, never a part of it.

For files that belong together, use `filesets`.
"""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file atomically; it may be lost in a power cut. Raises OSError, and then leaves no other file."""
    # Hidden and without the suffix, so that readers of the folder ignore it.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        scratch.write_bytes(content)
        scratch.chmod(mode)  # whatever the umask
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
