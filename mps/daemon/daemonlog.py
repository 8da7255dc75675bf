"""Copies the log lines of a daemon and its servers into our own log, with the card on each line.

The lines come by a FIFO that the daemon itself keeps open. So the daemon can go on writing when its manager has ended,
and the next manager reads the last lines. What nobody reads is lost, so no tenant can fill the node's memory by making
the daemon write much.
"""

import contextlib
import os
import re
from pathlib import Path

import structlog

_log = structlog.get_logger("mps.daemon.output")

NAME = "output"
_MOST = 64 * 1024  # bytes at a time: what a FIFO holds
_LINES = 200  # at a time
# What the daemon says of each of our own questions.
_CHATTER = re.compile(r"\] (Accepting connection|NEW UI|UI closed|Cmd:get_|INITIALIZING$|ACTIVE$|[\d.]+[KMG]?$)")


class Output:
    """The output of a daemon in one log folder. For one thread."""

    def __init__(self, folder: Path, card: str) -> None:
        self._path = folder / NAME
        self._card = card
        self._descriptor: int | None = None
        self._rest = b""  # a line whose end has not come

    def open(self) -> int:
        """For a daemon to write to, whose writes never wait; from now on it is heard. Raises OSError."""
        self.close()
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self._path, 0o600)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        return self._descriptor

    def pump(self) -> None:
        """Tells what is new. Never raises OSError: a log is not worth a daemon."""
        if self._descriptor is None:
            return
        try:
            content = os.read(self._descriptor, _MOST)
        except OSError:
            return  # nothing
        *whole, self._rest = (self._rest + content).split(b"\n")
        self._rest = self._rest[-_MOST:]
        lines = [line for line in (each.decode(errors="replace") for each in whole) if line.strip()]
        for line in lines[:_LINES]:
            (_log.debug if _CHATTER.search(line) else _log.info)(line, card=self._card)
        if len(lines) > _LINES:
            _log.warning("more than is repeated", card=self._card, lines=len(lines) - _LINES)

    def close(self) -> None:
        self.pump()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
