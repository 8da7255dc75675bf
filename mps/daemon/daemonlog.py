"""Copies the log lines of a daemon and its servers into the manager's log, and adds the card to each line.

The daemon writes to a FIFO and keeps it open itself. So the daemon can continue to write after its manager has ended,
and the next manager reads the last lines. Lines that are not read in time are lost: otherwise a tenant could fill the
node's memory by making the daemon write.
"""

import contextlib
import os
import re
from pathlib import Path

import structlog

_log = structlog.get_logger("mps.daemon.output")

FIFO_NAME = "output"
_MAX_BYTES = 64 * 1024  # maximum number of bytes per read: the capacity of a FIFO
_MAX_LINES = 200  # maximum number of lines per read
# Lines that the daemon writes for each command of the manager.
_OWN_COMMANDS = re.compile(r"\] (Accepting connection|NEW UI|UI closed|Cmd:get_|INITIALIZING$|ACTIVE$|[\d.]+[KMG]?$)")


class DaemonOutput:
    """The output of the daemon that uses one log folder. Not thread-safe."""

    def __init__(self, folder: Path, card: str) -> None:
        self._path = folder / FIFO_NAME
        self._card = card
        self._descriptor: int | None = None
        self._partial_line = b""  # a line whose end was not read yet

    def open(self) -> int:
        """Open the FIFO; returns the descriptor that a daemon writes to without blocking. Raises OSError."""
        self.close()
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        self._partial_line = b""
        return self._descriptor

    def copy_lines(self) -> None:
        """Log the new lines. Ignores OSError, because a failing log must not stop a daemon."""
        if self._descriptor is None:
            return
        try:
            content = os.read(self._descriptor, _MAX_BYTES)
        except OSError:
            return  # no new lines
        *complete_lines, self._partial_line = (self._partial_line + content).split(b"\n")
        self._partial_line = self._partial_line[-_MAX_BYTES:]
        lines = [
            line for line in (line_bytes.decode(errors="replace") for line_bytes in complete_lines) if line.strip()
        ]
        for line in lines[:_MAX_LINES]:
            (_log.debug if _OWN_COMMANDS.search(line) else _log.info)(line, card=self._card)
        if len(lines) > _MAX_LINES:
            _log.warning("dropped further lines of a daemon", card=self._card, lines=len(lines) - _MAX_LINES)

    def close(self) -> None:
        self.copy_lines()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
