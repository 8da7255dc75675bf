"""The faults of a machine's cards, and when each fault ends.

Theory of operation. A *transient* fault ends when the card was free of problems for `QUIET_SECONDS`. Examples are a
card that did not answer for a moment, and an Xid error of unknown meaning. After a *persistent* fault a card may answer
but compute wrong results. So the card takes no pods before a reset. The driver does not report resets, so a reset is
derived from counters: the driver was loaded again, or a number that only grows between resets has become smaller.

Example: Xid 48 at 600,000 mJ with 2 uncorrected ECC errors. A later probe reads 600,500 mJ and 2 errors: not reset. The
next probe reads 3 mJ and 0 errors: reset, and the fault ends. For a card that reports none of these counters, the fault
ends with a reboot, which changes `driver_load`.

Persistent faults are saved on disk: before a reset, all programs that use the driver have to end, this program too.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from cardwise.clock import Clock
from cardwise.gpus import xids

_log = structlog.get_logger(__name__)

QUIET_SECONDS = 30.0  # a transient fault ends when the card had no problem for this time


class ResetIndicators(Struct, frozen=True):
    """Counters of a card that show whether the card was reset. None: the card does not report the counter.

    driver_load: identifies this load of the driver, across reboots too.
    recovery_action: 1 if the driver requests a recovery action, else 0.
    pending_repairs: how many rows or pages wait for a reset to be replaced.
    uncorrected_errors: uncorrected ECC errors since the driver was loaded.
    energy_mj: energy in millijoules since the driver was loaded.
    """

    driver_load: str
    recovery_action: int | None = None
    pending_repairs: int | None = None
    uncorrected_errors: int | None = None
    energy_mj: int | None = None

    def was_reset_since(self, earlier: "ResetIndicators") -> bool:
        values_of_both = [
            (earlier.recovery_action, self.recovery_action),
            (earlier.pending_repairs, self.pending_repairs),
            (earlier.uncorrected_errors, self.uncorrected_errors),
            (earlier.energy_mj, self.energy_mj),
        ]
        any_fell = any(old is not None and new is not None and new < old for old, new in values_of_both)
        return any_fell or self.driver_load != earlier.driver_load


class PersistentFault(Struct, frozen=True):
    """A fault that only a reset ends. `occurred_at` is for people."""

    xid: int
    occurred_at: str
    indicators: ResetIndicators

    @property
    def reason(self) -> str:
        meaning = xids.describe_xid(self.xid)
        remedy = "it takes no pods until it is reset (nvidia-smi --gpu-reset) or its node rebooted"
        return f"{meaning} ({self.occurred_at}); {remedy}"


class Faults:
    """The faults of cards, by UUID. Not thread-safe."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """`path`: the file in which persistent faults are saved. None: the faults end with the process."""
        self._path = path
        self._clock = clock
        self._transient: dict[str, tuple[str, float]] = {}  # reason, time of the last occurrence
        self._persistent: dict[str, PersistentFault] = _load(path) if path is not None else {}
        self._saved = dict(self._persistent)

    def reasons(self) -> Mapping[str, str]:
        """The reason of each card that takes no new shares, by UUID."""
        transient = {uuid: reason for uuid, (reason, _) in self._transient.items()}
        return transient | {uuid: fault.reason for uuid, fault in self._persistent.items()}

    def record(self, uuid: str, problem: str) -> None:
        """Record the problem that a probe of the card reported; "" for none."""
        now = self._clock.now()
        if problem:
            self._transient[uuid] = (problem, now)
        elif uuid in self._transient and now - self._transient[uuid][1] >= QUIET_SECONDS:
            del self._transient[uuid]

    def persistent_fault(self, uuid: str) -> PersistentFault | None:
        """The card's persistent fault, if it has one."""
        return self._persistent.get(uuid)

    def clear_if_reset(self, uuid: str, fault: PersistentFault, indicators: ResetIndicators) -> None:
        """Clear `fault` if the card was reset. `indicators` were read after the fault was recorded."""
        if self._persistent.get(uuid) is not fault:
            return  # the card failed again in the meantime
        if indicators.was_reset_since(fault.indicators):
            _log.info("GPU was reset; its fault is cleared", uuid=uuid, xid=fault.xid, at=fault.occurred_at)
            del self._persistent[uuid]
        else:
            self._persistent[uuid] = msgspec.structs.replace(fault, indicators=indicators)
        self._save()

    def record_needs_reset(self, uuid: str, xid: int, indicators: ResetIndicators) -> None:
        """Record a fault that only a reset ends."""
        self._persistent[uuid] = PersistentFault(xid, self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ"), indicators)
        self._save()

    def _save(self) -> None:
        if self._path is None or (self._persistent == self._saved and (not self._persistent or self._path.exists())):
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(msgspec.json.encode(self._persistent))
            temporary.replace(self._path)
        except OSError as error:  # the fault is kept in memory; the next probe tries again to save it
            _log.error("failed to save which GPUs need a reset", path=str(self._path), error=str(error))
            return
        self._saved = dict(self._persistent)


def _load(path: Path) -> dict[str, PersistentFault]:
    """The saved faults, by UUID.

    If the file has unreadable entries, such as those of another version of Cardwise, a copy of the file is kept.
    """
    faults: dict[str, PersistentFault] = {}
    problem = ""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        _log.error("failed to read which GPUs need a reset", path=str(path), error=str(error))
        return {}
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        entries, problem = {}, str(error)
    for uuid, raw in entries.items():
        try:
            faults[uuid] = msgspec.json.decode(raw, type=PersistentFault)
        except msgspec.DecodeError as error:
            problem = f"{uuid}: {error}"
    if problem:
        copy = path.with_name(f"{path.name}.unreadable")
        with contextlib.suppress(OSError):
            copy.write_bytes(text)
        _log.error(
            "failed to read which GPUs need a reset: the file is damaged or of another version of "
            "Cardwise; look at the copy, and reset these GPUs",
            path=str(path),
            copy=str(copy),
            error=problem,
        )
    return faults
