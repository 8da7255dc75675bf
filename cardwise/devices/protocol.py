"""`Devices`: the interface between Cardwise and those devices of its machine that are not GPUs.

A device is always allocated as a whole, to one container at a time. So it has no memory amount and no shares.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cardwise.clock import SYSTEM, Clock

RDMA_KIND = "rdma"  # the kind of RDMA devices; administrators name the other kinds


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node on this machine, and its path in a container."""

    host: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevice:
    """A device other than a GPU.

    index: the device's position in the list of the node's devices of this kind.
    nodes: the device nodes of this device alone.
    common: the device nodes that this device shares with other devices.
    pci_address: "" without a PCI address.
    name: the name of an RDMA device, such as mlx5_0; "" for other devices.
    problem: why new containers cannot use the device; None while the device is healthy.
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
    problem: str | None = None


class Devices(Protocol):
    """The offered devices of a node and their health. Thread-safe."""

    def devices(self) -> list[OtherDevice]:
        """All offered devices, unhealthy ones included, in the order of kind and index."""

    def wait_change(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until devices may have changed; returns whether they may have.

        Only one thread may wait. `close` ends the wait.
        """

    def close(self) -> None: ...


class NoDevices:
    """`Devices` of a node that offers no devices."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._is_closed = threading.Event()
        self._clock = clock

    def devices(self) -> list[OtherDevice]:
        return []

    def wait_change(self, timeout: float) -> bool:
        self._clock.wait(self._is_closed, timeout)
        return False

    def close(self) -> None:
        self._is_closed.set()
