"""The compute mode of cards: EXCLUSIVE_PROCESS while MPS serves them, then again what it was.

It survives crashes: what a card's mode was before is on disk before the card is closed. A card that stays closed by
mistake serves nobody; one that is open lets a process without MPS past every limit.

A card that does not answer must not keep the others of its daemon from being served. So it is passed over, unless no
card answers. It is closed or opened when it answers again: the callers come back to it.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from cardwise.core.api import mps
from cardwise.gpus.protocol import CardError, CardUse, ComputeMode
from cardwise.runtime import replacing

_log = structlog.get_logger(__name__)


def close(home: Path, use: CardUse, uuids: Iterable[str]) -> None:
    """Idempotent. Raises CardError where no card answers, or one that does cannot be closed; OSError."""
    before = _noted(home)
    for uuid, mode in _modes(use, uuids).items():
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            continue
        if before.get(uuid) is not mode:
            before[uuid] = mode
            _note(home, before)
        use.set_compute_mode(uuid, ComputeMode.EXCLUSIVE_PROCESS)
        _log.info("card closed to processes without MPS", card=uuid, mode_before=str(mode))


def is_closed(use: CardUse, uuids: Iterable[str]) -> bool:
    """Whether all are that answer. Raises CardError where none does."""
    return all(mode is ComputeMode.EXCLUSIVE_PROCESS for mode in _modes(use, uuids).values())


def reopen(home: Path, use: CardUse) -> list[str]:
    """Gives cards the modes that they had; why some could not have them, a line each. Raises OSError.

    A card that was closed before we came has no note, and stays so. One that does not answer keeps its note for the
    next call.
    """
    noted = _noted(home)
    try:
        answering = _modes(use, noted)
    except CardError as error:
        return [f"cards stay closed: {error}"]
    left = {uuid: mode for uuid, mode in noted.items() if uuid not in answering}
    problems = []
    for uuid in answering:
        mode = noted[uuid]
        try:
            use.set_compute_mode(uuid, mode)
        except CardError as error:
            left[uuid] = mode
            problems.append(f"card {uuid} stays closed: {error}")
        else:
            _log.info("card open again", card=uuid, mode=str(mode))
    _note(home, left)
    return problems


def _modes(use: CardUse, uuids: Iterable[str]) -> dict[str, ComputeMode]:
    """Compute modes by UUID, of the cards that answer. Raises CardError where none does."""
    found: dict[str, ComputeMode] = {}
    silent = []
    for uuid in uuids:
        try:
            found[uuid] = use.compute_mode(uuid)
        except CardError as error:
            silent.append(str(error))
    if silent and not found:
        raise CardError("; ".join(silent))
    return found


def _noted(home: Path) -> dict[str, ComputeMode]:
    """Compute modes of before, by UUID, of cards that were closed and not opened again."""
    try:
        raw = json.loads((home / mps.MODES).read_text())
        return {str(uuid): ComputeMode(mode) for uuid, mode in raw.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _note(home: Path, found: Mapping[str, ComputeMode]) -> None:
    """Raises OSError."""
    if found:
        replacing.replace(home / mps.MODES, json.dumps(dict(found)).encode())
    else:
        (home / mps.MODES).unlink(missing_ok=True)
