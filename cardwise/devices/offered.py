"""The offered devices of this machine. Polling notices ports that go down, new PCI functions, and an edited file.

If the edited file cannot be read, the last valid rules stay in force, as for simulated cards.
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
    """`Devices` of a node, by the rules of one file."""

    def __init__(
        self,
        path: Path,
        *,
        sysfs: Path,
        dev: Path,
        node: str,
        clock: Clock = SYSTEM,
    ) -> None:
        """Read the rules. Raises InvalidRequest or OSError if the file cannot be read."""
        self._path = path
        self._sysfs = sysfs
        self._dev = dev
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._problem = ""
        self._text = path.read_text()
        self._rules: Sequence[DeviceRule] = settings.parse_rules(self._text, str(path))
        self._last_devices: list[OtherDevice] = []
        self._last_waited: list[OtherDevice] | None = None  # the devices at the last return of `wait_change`

    def devices(self) -> list[OtherDevice]:
        with self._lock:
            self._reload_rules()
            devices = discover(self._rules, self._sysfs, self._dev, self._node)
            if [device.uuid for device in devices] != [device.uuid for device in self._last_devices]:
                _log.info("offered devices changed", devices=[f"{device.kind} {device.uuid}" for device in devices])
            self._last_devices = devices
            return list(devices)

    def wait_change(self, timeout: float) -> bool:
        deadline = self._clock.now() + timeout
        while not self._is_closed.is_set():
            devices = self.devices()
            if devices != self._last_waited:
                self._last_waited = devices
                return True
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                return False
            self._clock.wait(self._is_closed, min(_POLL_SECONDS, remaining))
        return False

    def close(self) -> None:
        self._is_closed.set()

    def _reload_rules(self) -> None:
        try:
            text = self._path.read_text()
            if text != self._text:
                self._rules = settings.parse_rules(text, str(self._path))
                _log.info("read the rules of offered devices", path=str(self._path), rules=len(self._rules))
        except (OSError, UnicodeDecodeError, InvalidRequest) as error:
            if str(error) != self._problem:
                _log.error("failed to read the rules of offered devices; the last good ones stay", error=str(error))
            self._problem = str(error)
        else:
            self._text, self._problem = text, ""
