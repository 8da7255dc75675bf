"""The seam between Cardwise and the devices of the machine it runs on that are not GPUs.

The device plugin does not know where they come from. A device is given whole, to one container at a time; so there is
no memory here, and no share.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cardwise.clock import SYSTEM, Clock

RDMA = "rdma"  # the kind of RDMA devices; the others are named by who offers them


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node on this machine, and where a container expects it."""

    host: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevice:
    """A device that is no GPU. `index` counts the node's devices of its kind.

    `nodes` are its own, `common` those that it shares with others. `pci_address` and `name` (of an RDMA device, such
    as mlx5_0) are "" where it has none. `trouble`: why it takes no new container, "" while it is healthy.
    """

    kind: str
    index: int
    uuid: str
    model: str
    nodes: tuple[DeviceNode, ...]
    common: tuple[DeviceNode, ...] = ()
    pci_address: str = ""
    name: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    trouble: str = ""


class Devices(Protocol):
    """Devices and their health. Methods may be called from any thread."""

    def devices(self) -> list[OtherDevice]:
        """All that are offered, as they are now, sick ones included; in the order of kind and index."""

    def wait_change(self, timeout: float) -> bool:
        """Blocks until they may have changed, at most `timeout` seconds; whether they may have.

        For one waiting thread. `close` ends the wait.
        """

    def close(self) -> None: ...


class NoDevices:
    """`Devices` of a node that offers none."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._closed = threading.Event()
        self._clock = clock

    def devices(self) -> list[OtherDevice]:
        return []

    def wait_change(self, timeout: float) -> bool:
        self._clock.wait(self._closed, timeout)
        return False

    def close(self) -> None:
        self._closed.set()
