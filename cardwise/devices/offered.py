"""The devices of this machine, by polling: a port that goes down, a function that appears, a file that was edited.

A file that cannot be read never takes the last good entries away, as with simulated cards.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.invalid import InvalidRequest
from cardwise.devices import settings
from cardwise.devices.discovery import discover
from cardwise.devices.protocol import OtherDevice
from cardwise.devices.settings import DeviceRule

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 1.0


class OfferedDevices:
    """`Devices` of a node by the entries of one file."""

    def __init__(
        self,
        path: Path,
        *,
        sysfs: Path,
        dev: Path,
        node: str,
        clock: Clock = SYSTEM,
    ) -> None:
        """Raises InvalidRequest or OSError when there are no entries to begin with."""
        self._path = path
        self._sysfs = sysfs
        self._dev = dev
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._problem = ""
        self._text = path.read_text()
        self._offers: Sequence[DeviceRule] = settings.parse(self._text, str(path))
        self._last: list[OtherDevice] = []
        self._seen: list[OtherDevice] | None = None  # by who waits for a change

    def devices(self) -> list[OtherDevice]:
        with self._lock:
            self._read()
            found = discover(self._offers, self._sysfs, self._dev, self._node)
            if [device.uuid for device in found] != [device.uuid for device in self._last]:
                _log.info("devices found", devices=[f"{device.kind} {device.uuid}" for device in found])
            self._last = found
            return list(found)

    def wait_change(self, timeout: float) -> bool:
        deadline = self._clock.now() + timeout
        while not self._closed.is_set():
            found = self.devices()
            if found != self._seen:
                self._seen = found
                return True
            left = deadline - self._clock.now()
            if left <= 0:
                return False
            self._clock.wait(self._closed, min(_POLL_SECONDS, left))
        return False

    def close(self) -> None:
        self._closed.set()

    def _read(self) -> None:
        try:
            text = self._path.read_text()
            if text != self._text:
                self._offers = settings.parse(text, str(self._path))
                _log.info("the devices to offer were read", path=str(self._path), entries=len(self._offers))
        except (OSError, UnicodeDecodeError, InvalidRequest) as error:
            if str(error) != self._problem:
                _log.error("the devices to offer are unreadable; the last good entries stay", error=str(error))
            self._problem = str(error)
        else:
            self._text, self._problem = text, ""
