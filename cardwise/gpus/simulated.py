"""Cards from a YAML file, which is read again whenever it changes.

Provides mixed cards, added cards and unhealthy cards without hardware: in tests, in the demo, and on nodes without a
GPU. If a changed file cannot be read, the last valid cards stay.

    cards:
      - index: 0
        uuid: GPU-11111111-1111-1111-1111-111111111111
        model: Tesla-P100
        memoryMiB: 16276
        device: /path/to/device-node     # optional: the device node that a container gets
        containerPath: /dev/nvidia0      # optional: its path in the container; /dev/nvidia<index>
        healthy: true                    # optional
        reason: ""                       # optional: why it is not healthy
        mig: false                       # optional: whether it is in MIG mode
        properties: {}                   # optional
        processes: []                    # optional: the compute processes on it, such as {pid: 4711, memoryMiB: 300};
                                         # peakMiB, smPercent and bandwidthPercent are unknown if left out

The compute modes of the cards are kept in a second file in the same folder (`<name>.modes`), since real cards keep
their mode when a program ends.
"""

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog
import yaml
from msgspec import Struct

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import (
    IN_MIG_MODE,
    CardAbsent,
    CardError,
    ComputeMode,
    DevicePath,
    GpuCard,
    GpuProcess,
    GpusUnavailable,
    Health,
    ProcessSample,
)

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.2


class InvalidCards(ValueError):
    """A file of cards is not usable; the message names the file, the line or the field, and the remedy."""


class _ProcessEntry(
    Struct,
    rename={
        "memory_mib": "memoryMiB",
        "peak_mib": "peakMiB",
        "sm_percent": "smPercent",
        "bandwidth_percent": "bandwidthPercent",
    },
    forbid_unknown_fields=True,
):
    pid: int
    memory_mib: int | None = None
    peak_mib: int | None = None
    sm_percent: float | None = None
    bandwidth_percent: float | None = None


class _CardEntry(
    Struct,
    rename={"memory_mib": "memoryMiB", "reserved_mib": "reservedMiB", "container_path": "containerPath"},
    forbid_unknown_fields=True,
):
    index: int
    uuid: str
    memory_mib: int
    reserved_mib: int = 0
    model: str = "Simulated"
    device: str = ""
    container_path: str = ""
    healthy: bool = True
    reason: str = ""
    mig: bool = False
    properties: dict[str, str | int | float] = {}
    processes: list[_ProcessEntry] = []


class _CardsFile(Struct, forbid_unknown_fields=True):
    cards: list[_CardEntry]


CardsAndHealth = tuple[list[GpuCard], dict[str, Health]]
_FileStamp = tuple[int, int, int, int]


_OBJECT_NAME_PATTERN = re.compile(
    r"[a-z0-9]([a-z0-9-]{0,251}[a-z0-9])?"
)  # a UUID in lower case: the name of its ExtendedResource


def parse_cards(text: str, source: str) -> CardsAndHealth:
    """Parse the text of a file into cards and their health. Raises InvalidCards."""
    return _inventory(_parse_card_entries(text, source), source)


def _parse_card_entries(text: str, source: str) -> list[_CardEntry]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        raise InvalidCards(f"{place}: not YAML: {getattr(error, 'problem', None) or error}") from error
    try:
        return msgspec.convert(document, _CardsFile).cards
    except msgspec.ValidationError as error:
        raise InvalidCards(f"{source}: {error}; see the format in docs/reference/deviceplugin.md") from error


def _inventory(entries: list[_CardEntry], source: str) -> CardsAndHealth:
    cards, health = [], {}
    indices: set[int] = set()
    for position, entry in enumerate(entries):
        field = f"{source}: cards[{position}]"
        if entry.memory_mib <= 0:
            raise InvalidCards(f"{field}.memoryMiB: {entry.memory_mib} is not above zero; write the GPU's MiB")
        if entry.index < 0 or entry.index in indices:
            raise InvalidCards(f"{field}.index: {entry.index} is negative or used twice; number the GPUs from 0")
        if not entry.uuid or entry.uuid in health:
            raise InvalidCards(f"{field}.uuid: {entry.uuid!r} is empty or used twice; give each GPU its own")
        if not _OBJECT_NAME_PATTERN.fullmatch(entry.uuid.lower()):
            raise InvalidCards(f"{field}.uuid: {entry.uuid!r} cannot name an object; write letters, digits and dashes")
        indices.add(entry.index)
        container_path = entry.container_path or f"/dev/nvidia{entry.index}"
        cards.append(
            GpuCard(
                index=entry.index,
                uuid=entry.uuid,
                model=entry.model,
                memory=MiB(entry.memory_mib),
                reserved=MiB(max(0, entry.reserved_mib)),
                devices=(DevicePath(entry.device, container_path),) if entry.device else (),
                properties={name: str(property_value) for name, property_value in entry.properties.items()},
            )
        )
        problem = "" if entry.healthy else entry.reason or "healthy: false in the file"
        problem = problem or (IN_MIG_MODE if entry.mig else "")
        health[entry.uuid] = Health(healthy=not problem, reason=problem, mig=entry.mig)
    cards.sort(key=lambda card: card.index)
    return cards, health


class SimulatedGpus:
    """`Gpus` and `CardControl` of one file. Notices a change within a fifth of a second while a thread waits."""

    def __init__(self, path: Path, *, clock: Clock = SYSTEM) -> None:
        """Read the cards. Raises GpusUnavailable if the file cannot be read."""
        self._path = path
        self._clock = clock
        self._modes_file = path.with_name(f"{path.name}.modes")
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._stamp = _stamp(path)
        self._unreadable = False
        try:
            self._text = path.read_text()
            self._load(self._text)
        except (OSError, UnicodeDecodeError, InvalidCards) as error:
            raise GpusUnavailable(f"no simulated GPUs: {error}") from error

    def cards(self) -> list[GpuCard]:
        return list(self._reload()[0])

    def unresponsive_indices(self) -> list[int]:
        return []

    def health(self) -> Mapping[str, Health]:
        return dict(self._reload()[1])

    def wait_change(self, timeout: float) -> bool:
        deadline = self._clock.now() + timeout
        before = self._inventory
        while not self._is_closed.is_set():
            if self._reload() is not before:
                return True
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                return False
            self._clock.wait(self._is_closed, min(_POLL_SECONDS, remaining))
        return False

    def close(self) -> None:
        self._is_closed.set()

    def compute_mode(self, uuid: str) -> ComputeMode:
        self._check_present(uuid)
        with self._lock:
            return self._modes().get(uuid, ComputeMode.DEFAULT)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        self._check_present(uuid)
        with self._lock:
            modes = self._modes() | {uuid: mode}
            temporary = self._modes_file.with_name(f"{self._modes_file.name}.{os.getpid()}")
            try:
                temporary.write_bytes(msgspec.json.encode(modes))
                temporary.replace(self._modes_file)
            except OSError as error:
                raise CardError(f"card {uuid}: its compute mode cannot be saved: {error}") from error

    def processes(self, uuid: str) -> list[GpuProcess]:
        self._check_present(uuid)
        return [GpuProcess(sample.pid, sample.memory) for sample in self._samples.get(uuid, ())]

    def sample_processes(self, uuid: str) -> list[ProcessSample]:
        self._check_present(uuid)
        return list(self._samples.get(uuid, ()))

    def _check_present(self, uuid: str) -> None:
        if all(card.uuid != uuid for card in self._reload()[0]):
            raise CardAbsent(f"card {uuid} is not in {self._path}")

    def _modes(self) -> dict[str, ComputeMode]:
        try:
            return msgspec.json.decode(self._modes_file.read_bytes(), type=dict[str, ComputeMode])
        except (OSError, msgspec.DecodeError):
            return {}

    def _load(self, text: str) -> None:
        entries = _parse_card_entries(text, str(self._path))
        self._inventory = _inventory(entries, str(self._path))
        self._samples = {
            entry.uuid: [
                ProcessSample(
                    pid=process.pid,
                    memory=None if process.memory_mib is None else MiB(process.memory_mib),
                    peak_memory=None if process.peak_mib is None else MiB(process.peak_mib),
                    sm_percent=process.sm_percent,
                    bandwidth_percent=process.bandwidth_percent,
                )
                for process in entry.processes
            ]
            for entry in entries
        }

    def _reload(self) -> CardsAndHealth:
        with self._lock:
            stamp = _stamp(self._path)
            # A file that could not be parsed may have been half-written: read it again, even with the same timestamps.
            if stamp == self._stamp and not self._unreadable:
                return self._inventory
            try:
                text = self._path.read_text()
                if text != self._text:
                    self._load(text)
                    _log.info("read the simulated GPUs", path=str(self._path), cards=len(self._inventory[0]))
            except (OSError, UnicodeDecodeError, InvalidCards) as error:
                if stamp != self._stamp or not self._unreadable:
                    _log.error("failed to read the simulated GPUs; the last good ones stay", error=str(error))
                self._unreadable = True
            else:
                self._text = text
                self._unreadable = False
            self._stamp = stamp
            return self._inventory


def _stamp(path: Path) -> _FileStamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size, status.st_ctime_ns
