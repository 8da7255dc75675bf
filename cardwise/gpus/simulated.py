"""Cards from a YAML file that is read again whenever it changes.

The way to have mixed cards, to add one and to make one sick without hardware: in tests, in the demo, and on a node
without GPU. A file that cannot be read as cards never takes the last good ones away.

    cards:
      - index: 0
        uuid: GPU-11111111-1111-1111-1111-111111111111
        model: Tesla-P100
        memoryMiB: 16276
        device: /path/to/device-node     # optional: what a container is given
        containerPath: /dev/nvidia0      # optional: where it finds it; /dev/nvidia<index>
        healthy: true                    # optional
        reason: ""                       # optional: why it is not healthy
        mig: false                       # optional: whether it is in MIG mode
        properties: {}                   # optional
        processes: []                    # optional: who computes on it, such as {pid: 4711, memoryMiB: 300}

The compute mode of a card is kept in a file beside it (`<name>.modes`), since that of a real card outlives programs.
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
    CardUnwilling,
    ComputeMode,
    DevicePath,
    GpuCard,
    GpuProcess,
    GpusUnavailable,
    Health,
)

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.2


class InvalidCards(ValueError):
    """A file of cards that is not usable; the message names the file, the line or the field, and the remedy."""


class _ProcessEntry(Struct, rename={"memory_mib": "memoryMiB"}, forbid_unknown_fields=True):
    pid: int
    memory_mib: int | None = None


class _CardEntry(
    Struct, rename={"memory_mib": "memoryMiB", "container_path": "containerPath"}, forbid_unknown_fields=True
):
    index: int
    uuid: str
    memory_mib: int
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
_Stamp = tuple[int, int, int, int]


_NAMEABLE = re.compile(r"[a-z0-9]([a-z0-9-]{0,251}[a-z0-9])?")  # in lower case it names the ExtendedResource


def parse(text: str, source: str) -> CardsAndHealth:
    """Cards and health of a file's text. Raises InvalidCards."""
    return _inventory(_entries(text, source), source)


def _entries(text: str, source: str) -> list[_CardEntry]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        raise InvalidCards(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
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
            raise InvalidCards(f"{field}.memoryMiB: {entry.memory_mib} is not above zero; write the card's MiB")
        if entry.index < 0 or entry.index in indices:
            raise InvalidCards(f"{field}.index: {entry.index} is negative or used twice; number the cards from 0")
        if not entry.uuid or entry.uuid in health:
            raise InvalidCards(f"{field}.uuid: {entry.uuid!r} is empty or used twice; give each card one of its own")
        if not _NAMEABLE.fullmatch(entry.uuid.lower()):
            raise InvalidCards(f"{field}.uuid: {entry.uuid!r} names no object; write letters, digits and dashes")
        indices.add(entry.index)
        inside = entry.container_path or f"/dev/nvidia{entry.index}"
        cards.append(
            GpuCard(
                index=entry.index,
                uuid=entry.uuid,
                model=entry.model,
                memory=MiB(entry.memory_mib),
                devices=(DevicePath(entry.device, inside),) if entry.device else (),
                properties={key: str(value) for key, value in entry.properties.items()},
            )
        )
        trouble = "" if entry.healthy else entry.reason or "healthy: false in the file"
        trouble = trouble or (IN_MIG_MODE if entry.mig else "")
        health[entry.uuid] = Health(healthy=not trouble, reason=trouble, mig=entry.mig)
    cards.sort(key=lambda card: card.index)
    return cards, health


class SimulatedGpus:
    """`Gpus` of one file. Notices a change within a fifth of a second while someone waits."""

    def __init__(self, path: Path, *, clock: Clock = SYSTEM) -> None:
        """Raises GpusUnavailable when there are no cards to begin with."""
        self._path = path
        self._clock = clock
        self._modes_file = path.with_name(f"{path.name}.modes")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._stamp = _stamp(path)
        self._unreadable = False
        try:
            self._text = path.read_text()
            self._take(self._text)
        except (OSError, UnicodeDecodeError, InvalidCards) as error:
            raise GpusUnavailable(f"no simulated cards: {error}") from error

    def cards(self) -> list[GpuCard]:
        return list(self._read()[0])

    def silent(self) -> list[int]:
        return []

    def health(self) -> Mapping[str, Health]:
        return dict(self._read()[1])

    def wait_change(self, timeout: float) -> bool:
        deadline = self._clock.now() + timeout
        before = self._inventory
        while not self._closed.is_set():
            if self._read() is not before:
                return True
            left = deadline - self._clock.now()
            if left <= 0:
                return False
            self._clock.wait(self._closed, min(_POLL_SECONDS, left))
        return False

    def close(self) -> None:
        self._closed.set()

    def compute_mode(self, uuid: str) -> ComputeMode:
        self._check(uuid)
        with self._lock:
            return self._modes().get(uuid, ComputeMode.DEFAULT)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        self._check(uuid)
        with self._lock:
            modes = self._modes() | {uuid: mode}
            scratch = self._modes_file.with_name(f"{self._modes_file.name}.{os.getpid()}")
            try:
                scratch.write_bytes(msgspec.json.encode(modes))
                scratch.replace(self._modes_file)
            except OSError as error:
                raise CardUnwilling(f"card {uuid}: its compute mode cannot be kept: {error}") from error

    def processes(self, uuid: str) -> list[GpuProcess]:
        self._check(uuid)
        return list(self._processes.get(uuid, ()))

    def _check(self, uuid: str) -> None:
        if all(card.uuid != uuid for card in self._read()[0]):
            raise CardUnwilling(f"card {uuid} is not in {self._path}")

    def _modes(self) -> dict[str, ComputeMode]:
        try:
            return msgspec.json.decode(self._modes_file.read_bytes(), type=dict[str, ComputeMode])
        except (OSError, msgspec.DecodeError):
            return {}

    def _take(self, text: str) -> None:
        entries = _entries(text, str(self._path))
        self._inventory = _inventory(entries, str(self._path))
        self._processes = {
            entry.uuid: [
                GpuProcess(one.pid, None if one.memory_mib is None else MiB(one.memory_mib)) for one in entry.processes
            ]
            for entry in entries
        }

    def _read(self) -> CardsAndHealth:
        with self._lock:
            stamp = _stamp(self._path)
            # A file that was caught half-written is read again until it is whole, whatever its times say.
            if stamp == self._stamp and not self._unreadable:
                return self._inventory
            try:
                text = self._path.read_text()
                if text != self._text:
                    self._take(text)
                    _log.info("simulated cards read", path=str(self._path), cards=len(self._inventory[0]))
            except (OSError, UnicodeDecodeError, InvalidCards) as error:
                if stamp != self._stamp or not self._unreadable:
                    _log.error("simulated cards unreadable; the last good ones stay", error=str(error))
                self._unreadable = True
            else:
                self._text = text
                self._unreadable = False
            self._stamp = stamp
            return self._inventory


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_ctime_ns
