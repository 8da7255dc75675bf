"""Replaces a file atomically: a reader meets the old content or the new, never a part of either.

For files that belong together there is `filesets`.
"""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Not meant to survive a power cut. Raises OSError, and leaves nothing behind then."""
    # Hidden, and without the suffix: who looks through the folder takes it for none of the files that it wants.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        scratch.write_bytes(content)
        scratch.chmod(mode)  # whatever the umask
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
