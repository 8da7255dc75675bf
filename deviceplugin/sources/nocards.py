"""`--cards none`: a node that shares no card, so that nobody asks for a driver that may not be there."""

import threading
from collections.abc import Mapping

from cardwise.clock import SYSTEM, Clock
from cardwise.gpus.protocol import GpuCard, Health


class NoCards:
    """`Gpus` of such a node."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._closed = threading.Event()

    def cards(self) -> list[GpuCard]:
        return []

    def health(self) -> Mapping[str, Health]:
        return {}

    def wait_change(self, timeout: float) -> bool:
        self._clock.wait(self._closed, timeout)
        return False

    def close(self) -> None:
        self._closed.set()
