"""The compute mode of cards: EXCLUSIVE_PROCESS while MPS serves them, then again what it was.

It survives crashes: what a card's mode was before is on disk before the card is closed. A card that stays closed by
mistake serves nobody; one that is open lets a process without MPS past every limit.
"""

from collections.abc import Iterable
from pathlib import Path

import structlog

from cardwise.gpus.protocol import CardUnwilling, CardUse, ComputeMode
from mps.daemon import directories

_log = structlog.get_logger(__name__)


def close(home: Path, use: CardUse, uuids: Iterable[str]) -> None:
    """Idempotent. Raises CardUnwilling or OSError."""
    before = directories.modes(home)
    for uuid in uuids:
        mode = use.compute_mode(uuid)
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            continue
        if before.get(uuid) is not mode:
            before[uuid] = mode
            directories.write_modes(home, before)
        use.set_compute_mode(uuid, ComputeMode.EXCLUSIVE_PROCESS)
        _log.info("card closed to processes without MPS", card=uuid, mode_before=str(mode))


def is_closed(use: CardUse, uuids: Iterable[str]) -> bool:
    """Raises CardUnwilling."""
    return all(use.compute_mode(uuid) is ComputeMode.EXCLUSIVE_PROCESS for uuid in uuids)


def reopen(home: Path, use: CardUse) -> list[str]:
    """Gives cards the modes that they had; why some could not have them, a line each. Raises OSError.

    A card that was closed before we came has no note, and stays so.
    """
    left: dict[str, ComputeMode] = {}
    problems = []
    for uuid, mode in directories.modes(home).items():
        try:
            use.set_compute_mode(uuid, mode)
        except CardUnwilling as error:
            left[uuid] = mode
            problems.append(f"card {uuid} stays closed: {error}")
        else:
            _log.info("card open again", card=uuid, mode=str(mode))
    directories.write_modes(home, left)
    return problems
