"""The seam between Cardwise and the cards of the machine it runs on.

Everything above it works alike on real cards and on simulated ones; one contract test is held against both
(tests/gpus/test_contract.py).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.quantity import MiB


class GpusUnavailable(Exception):
    """There is no way to ask for cards here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DevicePath:
    """A device node on this machine, and where a container expects it."""

    host: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCard:
    """A card as its driver describes it. `index` is its position in PCI bus order; `memory` its total in MiB."""

    index: int
    uuid: str
    model: str
    memory: MiB
    devices: tuple[DevicePath, ...]
    pci_bus_id: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a card takes new shares; `reason` says why not, "" when it does.

    `mig`: the card is in MIG mode, so somebody else may give its slices to pods.
    """

    healthy: bool
    reason: str = ""
    mig: bool = False


HEALTHY = Health(healthy=True)
IN_MIG_MODE = (
    "the card is in MIG mode, and Cardwise shares whole cards: end it (nvidia-smi -i N -mig 0), or leave the card to "
    "NVIDIA's device plugin by --cards"
)


class ComputeMode(StrEnum):
    """Which processes may open a card. EXCLUSIVE_PROCESS: only one; with MPS that is its server."""

    DEFAULT = "Default"
    PROHIBITED = "Prohibited"
    EXCLUSIVE_PROCESS = "ExclusiveProcess"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a card, by its PID in our own namespace; `memory` is None where the driver does not say."""

    pid: int
    memory: MiB | None


class CardUnwilling(Exception):
    """A card did not answer, or did not do as it was told; the message says why."""


class CardUse(Protocol):
    """The processes on a card, and which may be there: what the MPS manager needs besides `Gpus`. From any thread.

    Cards are named by UUID. All methods raise CardUnwilling.
    """

    def compute_mode(self, uuid: str) -> ComputeMode: ...

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None: ...

    def processes(self, uuid: str) -> list[GpuProcess]:
        """Those that compute on the card, MPS clients and server included."""


class Gpus(Protocol):
    """Cards and their health. Methods may be called from any thread."""

    def cards(self) -> list[GpuCard]:
        """All cards of this machine in the order of their index, sick ones included."""

    def silent(self) -> list[int]:
        """Indices of cards that are counted and not in `cards()`, since they have not answered yet: nobody knows their
        UUIDs. Ask before `cards()`: where it is empty, `cards()` has all.
        """

    def health(self) -> Mapping[str, Health]:
        """Health by card UUID, an entry for each of `cards()`."""

    def wait_change(self, timeout: float) -> bool:
        """Blocks until cards or health may have changed, at most `timeout` seconds; whether they may have.

        For one waiting thread. `close` ends the wait.
        """

    def close(self) -> None: ...


class NoCards:
    """`Gpus` of a node that shares no card (`--cards none`), so that nobody asks for a driver that may not be there."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._closed = threading.Event()
        self._clock = clock

    def cards(self) -> list[GpuCard]:
        return []

    def silent(self) -> list[int]:
        return []

    def health(self) -> Mapping[str, Health]:
        return {}

    def wait_change(self, timeout: float) -> bool:
        self._clock.wait(self._closed, timeout)
        return False

    def close(self) -> None:
        self._closed.set()
