"""Faults of the cards of a machine, and when each of them ends.

Some faults pass: the card did not answer for a moment, or the meaning of an error is not known. Such a card is healthy
again when nothing was wrong for a while. After other faults a card may answer and still give wrong results, so it takes
no pods until it was reset. No event tells of a reset. It is seen from counters that a reset sets back. These faults
are kept on disk: for a reset all programs that use the driver must end, this one too.
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

QUIET_SECONDS = 30.0  # without a fault until a card is well again


class Marks(Struct, frozen=True):
    """What of a card tells a reset: its driver is loaded anew, or a number that only grows has become smaller.

    `load` names the driver's life, over reboots too. None: the card does not say. `asked`: whether the driver asks for
    a recovery action; `pending`: whether rows or pages wait for a reset to be replaced; `uncorrected`: ECC errors, and
    `energy`: millijoules, since the driver has begun with the card.
    """

    load: str
    asked: int | None = None
    pending: int | None = None
    uncorrected: int | None = None
    energy: int | None = None

    def reset_since(self, before: "Marks") -> bool:
        pairs = [
            (before.asked, self.asked),
            (before.pending, self.pending),
            (before.uncorrected, self.uncorrected),
            (before.energy, self.energy),
        ]
        fell = any(then is not None and now is not None and now < then for then, now in pairs)
        return fell or self.load != before.load


class Lasting(Struct, frozen=True):
    """A fault that only a reset ends; `at` is when it happened, for people."""

    xid: int
    at: str
    marks: Marks

    @property
    def reason(self) -> str:
        what = xids.describe(self.xid)
        return f"{what} ({self.at}); it stays out until it was reset (nvidia-smi --gpu-reset) or its node rebooted"


class Faults:
    """The faults of cards, by UUID. For one thread at a time."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """`path`: where those that last are kept; None: they end with the process."""
        self._path = path
        self._clock = clock
        self._passing: dict[str, tuple[str, float]] = {}  # reason, when it was last seen
        self._lasting: dict[str, Lasting] = _read(path) if path is not None else {}
        self._kept = dict(self._lasting)

    def reasons(self) -> Mapping[str, str]:
        """Why each card that has a fault takes no new shares."""
        passing = {uuid: reason for uuid, (reason, _) in self._passing.items()}
        return passing | {uuid: fault.reason for uuid, fault in self._lasting.items()}

    def note(self, uuid: str, trouble: str) -> None:
        """What a look at the card has found, "" for nothing."""
        now = self._clock.now()
        if trouble:
            self._passing[uuid] = (trouble, now)
        elif uuid in self._passing and now - self._passing[uuid][1] >= QUIET_SECONDS:
            del self._passing[uuid]

    def lasting(self, uuid: str) -> Lasting | None:
        """The card's fault that only a reset ends."""
        return self._lasting.get(uuid)

    def note_marks(self, uuid: str, fault: Lasting, marks: Marks) -> None:
        """Ends the `fault` if the card was reset; `marks` were asked for since it was known."""
        if self._lasting.get(uuid) is not fault:
            return  # it has failed anew meanwhile
        if marks.reset_since(fault.marks):
            _log.info("the card was reset since it failed", uuid=uuid, xid=fault.xid, at=fault.at)
            del self._lasting[uuid]
        else:
            self._lasting[uuid] = msgspec.structs.replace(fault, marks=marks)
        self._keep()

    def break_down(self, uuid: str, xid: int, marks: Marks) -> None:
        """The card needs a reset."""
        self._lasting[uuid] = Lasting(xid, self._clock.wall().strftime("%Y-%m-%dT%H:%M:%SZ"), marks)
        self._keep()

    def _keep(self) -> None:
        if self._path is None or (self._lasting == self._kept and (not self._lasting or self._path.exists())):
            return
        scratch = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch.write_bytes(msgspec.json.encode(self._lasting))
            scratch.replace(self._path)
        except OSError as error:  # they last as long as the process, and the next look tries again
            _log.error("which cards need a reset could not be written", path=str(self._path), error=str(error))
            return
        self._kept = dict(self._lasting)


def _read(path: Path) -> dict[str, Lasting]:
    """The faults by UUID. What cannot be read, such as what another version of Cardwise wrote, is kept beside the file:
    the next fault replaces that.
    """
    faults: dict[str, Lasting] = {}
    problem = ""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        _log.error("which cards need a reset is not known", path=str(path), error=str(error))
        return {}
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        entries, problem = {}, str(error)
    for uuid, raw in entries.items():
        try:
            faults[uuid] = msgspec.json.decode(raw, type=Lasting)
        except msgspec.DecodeError as error:
            problem = f"{uuid}: {error}"
    if problem:
        kept = path.with_name(f"{path.name}.unreadable")
        with contextlib.suppress(OSError):
            kept.write_bytes(text)
        _log.error(
            "which cards need a reset is not known for all cards: the file is damaged or of another version of "
            "Cardwise; look at the copy, and reset these cards",
            path=str(path),
            copy=str(kept),
            error=problem,
        )
    return faults
