"""The node of the rig with all its threads and sockets: the agent as in production, on a kubelet and a container
runtime that listen. Its time passes while the test waits for something.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from deviceplugin.sources.containers import RuntimeContainers
from deviceplugin.sources.kubelet import Kubelet
from tests.deviceplugin.conftest import Rig
from tests.deviceplugin.fakenode import PATIENCE, ServedKubelet, ServedRuntime

T = TypeVar("T")

LOOPS = {"registration", "inventory", "release", "start-blocks", "marking", "cards", "devices"}
_THREADS = len(LOOPS) + 4  # the watches of pods, node, cards and classes


class ServedRig(Rig):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kubelet = ServedKubelet(folder / "served")
        self.runtime = ServedRuntime(folder / "cri.sock")

    def start(self) -> "ServedRig":
        agent = self.make(Kubelet(self.kubelet.folder, self.clock), RuntimeContainers(self.folder / "cri.sock"))
        before = len(self.kubelet.registered)
        agent.start()
        self.until_registered(before + 1)
        return self

    def see(self) -> None:
        """The watches of the agent run by themselves."""

    def until(self, ready: Callable[[], object], description: str = "") -> None:
        """Lets time pass, whenever all threads of the agent have nothing to do, until `ready` holds."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < deadline, description or "it did not come true"
            self.clock.step(_THREADS)

    def until_registered(self, count: int) -> None:
        self.until(lambda: len(self.kubelet.registered) >= count, f"{count} registrations")

    def results(self, futures: list[Future[T]]) -> list[T]:
        self.until(lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]

    def close(self) -> None:
        self.stop()
        self.kubelet.stop()
        self.runtime.stop()
        self.api.close()
