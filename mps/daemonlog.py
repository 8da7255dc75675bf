"""What daemons and servers say, repeated in our own log with the card on each line.

By a file, not a pipe: a daemon that outlives its manager must be able to go on talking.
"""

import os
import re
from pathlib import Path

import structlog

_log = structlog.get_logger("mps.daemon.output")

NAME = "daemon.log"
_LARGEST = 1024 * 1024  # bytes, after which the file begins anew
_MOST = 256 * 1024  # bytes at a time
# What the daemon says of each of our own questions.
_CHATTER = re.compile(r"\] (Accepting connection|NEW UI|UI closed|Cmd:get_|INITIALIZING$|ACTIVE$|[\d.]+[KMG]?$)")


class Tail:
    """Of one log folder. `skip`: what is there already was told by a former manager."""

    def __init__(self, folder: Path, card: str, *, skip: bool) -> None:
        self._path = folder / NAME
        self._card = card
        self._offset = self._size() if skip else 0

    def pump(self) -> None:
        """Tells what is new. Never raises OSError: a log is not worth a daemon."""
        try:
            with self._path.open("rb+") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                content = file.read(_MOST)
                whole = content[: content.rfind(b"\n") + 1]
                self._offset += len(whole)
                if size == self._offset and size > _LARGEST:
                    # Daemons append, so the next line is the first again.
                    file.truncate(0)
                    self._offset = 0
        except OSError:
            return
        for line in whole.decode(errors="replace").splitlines():
            if line.strip():
                (_log.debug if _CHATTER.search(line) else _log.info)(line, card=self._card)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0
