"""`Gpus`: the interface between Cardwise and the GPUs of its machine.

The callers behave alike on real and on simulated cards; tests/gpus/test_contract.py checks both implementations.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.quantity import MiB


class GpusUnavailable(Exception):
    """The cards of this machine cannot be read; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class DevicePath:
    """A device node on this machine, and its path in a container."""

    host: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCard:
    """A card as its driver describes it.

    index: the card's position in PCI bus order.
    memory: the card's total memory in MiB.
    reserved: the MiB that the driver keeps for itself; 0 if unknown.
    """

    index: int
    uuid: str
    model: str
    memory: MiB
    devices: tuple[DevicePath, ...]
    reserved: MiB = MiB(0)
    pci_bus_id: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a card takes new shares.

    reason: why the card takes no new shares; "" if it does.
    mig: whether the card is in MIG mode. Then another component may give slices of the card to pods.
    """

    healthy: bool
    reason: str = ""
    mig: bool = False


HEALTHY = Health(healthy=True)
IN_MIG_MODE = (
    "the GPU is in MIG mode, and Cardwise shares whole GPUs: disable MIG (nvidia-smi -i N -mig 0), or leave the GPU "
    "to NVIDIA's device plugin by --gpus"
)


class ComputeMode(StrEnum):
    """The processes that may use a card. EXCLUSIVE_PROCESS: only one process; with MPS this is the MPS server."""

    DEFAULT = "Default"
    PROHIBITED = "Prohibited"
    EXCLUSIVE_PROCESS = "ExclusiveProcess"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a card.

    pid: in our own PID namespace.
    memory: in MiB; None if the driver does not report it.
    """

    pid: int
    memory: MiB | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """The recent use of a card by a process. A field is None if the driver does not report it.

    pid: in our own PID namespace.
    memory: present memory in MiB.
    peak_memory: the largest memory of the process so far in MiB, where the driver's accounting mode is on.
    sm_percent: percent of the last seconds in which a kernel of the process ran.
    bandwidth_percent: percent of the last seconds in which memory was read or written for the process.
    """

    pid: int
    memory: MiB | None = None
    peak_memory: MiB | None = None
    sm_percent: float | None = None
    bandwidth_percent: float | None = None


class CardError(Exception):
    """A call on a card failed or did not return in time; the message says why."""


class CardAbsent(CardError):
    """The card is not on this machine (any more)."""


class CardControl(Protocol):
    """The processes on cards and the cards' compute modes, which the MPS manager needs besides `Gpus`. Thread-safe.

    Cards are named by UUID. All methods raise CardError.
    """

    def compute_mode(self, uuid: str) -> ComputeMode: ...

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None: ...

    def processes(self, uuid: str) -> list[GpuProcess]:
        """The compute processes on the card, MPS clients and server included."""

    def sample_processes(self, uuid: str) -> list[ProcessSample]:
        """The recent use of the card by each of its compute processes."""


class Gpus(Protocol):
    """The cards of a machine and their health. Thread-safe."""

    def cards(self) -> list[GpuCard]:
        """All cards of this machine in the order of their index, unhealthy ones included."""

    def unresponsive_indices(self) -> list[int]:
        """The indices of cards that have not answered yet. The driver counts these cards, but their UUIDs are unknown.

        Call this before `cards()`. If the result is empty, `cards()` is complete.
        """

    def health(self) -> Mapping[str, Health]:
        """The health of each card in `cards()`, by UUID."""

    def wait_change(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until cards or health may have changed; returns whether they may have.

        Only one thread may wait. `close` ends the wait.
        """

    def close(self) -> None: ...


class NoCards:
    """`Gpus` of a node without shared cards (`--gpus none`). Needs no driver."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._is_closed = threading.Event()
        self._clock = clock

    def cards(self) -> list[GpuCard]:
        return []

    def unresponsive_indices(self) -> list[int]:
        return []

    def health(self) -> Mapping[str, Health]:
        return {}

    def wait_change(self, timeout: float) -> bool:
        self._clock.wait(self._is_closed, timeout)
        return False

    def close(self) -> None:
        self._is_closed.set()
