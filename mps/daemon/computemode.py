"""The compute mode of cards: EXCLUSIVE_PROCESS ("closed") while MPS serves them, then the former mode again.

The former mode is saved on disk before a card is closed, so it survives crashes. A card that stays closed by mistake is
lost for pods. A card that is open by mistake lets a process without MPS exceed every limit.

If the file with the saved modes is missing or unreadable, the former mode of a closed card is assumed to be DEFAULT,
the driver's own mode. The log reports the loss, since an administrator may want another mode. The state file
in the same folder shows whether the file of saved modes should exist: `enforced` is set in the state file while the
daemon's cards are closed. During this time the file of saved modes has the former mode of each card. This includes
cards that were closed before MPS served them.

A card that does not answer is skipped, so the daemon still serves its other cards. If all cards are silent, the call
fails. The callers repeat the call, which closes or reopens the card once it answers again.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from cardwise.core.api import mps
from cardwise.core.values.wording import sanitize_message
from cardwise.gpus import mpsfiles
from cardwise.gpus.protocol import CardAbsent, CardControl, CardError, ComputeMode
from cardwise.runtime import replacing

_log = structlog.get_logger(__name__)


def close_cards(home: Path, card_control: CardControl, uuids: Iterable[str]) -> None:
    """Close the cards that answer. Idempotent.

    Raises CardError if all cards are silent, or if closing a card fails although the card answers. Raises OSError.
    """
    modes = _read_modes_by_uuid(card_control, uuids)
    saved_modes = _load_saved_modes_by_uuid(home)
    if saved_modes is None:
        saved_modes = _default_former_modes_by_uuid(home, modes)
        _save_modes(home, saved_modes)
    for uuid, mode in modes.items():
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            if uuid not in saved_modes:  # another program or a person has closed the card
                saved_modes[uuid] = mode
                _save_modes(home, saved_modes)
            continue
        if saved_modes.get(uuid) is not mode:
            saved_modes[uuid] = mode
            _save_modes(home, saved_modes)
        card_control.set_compute_mode(uuid, ComputeMode.EXCLUSIVE_PROCESS)
        _log.info("closed a GPU to processes without MPS", card=uuid, mode_before=str(mode))


def are_closed(card_control: CardControl, uuids: Iterable[str]) -> bool:
    """Whether all cards that answer are closed. Raises CardError if no card answers."""
    return all(mode is ComputeMode.EXCLUSIVE_PROCESS for mode in _read_modes_by_uuid(card_control, uuids).values())


def reopen_cards(home: Path, card_control: CardControl, uuids: Iterable[str]) -> list[str]:
    """Restore the former modes of cards. Returns why some modes could not be restored, one line each. Raises OSError.

    uuids: the cards of the daemon; if the saved modes cannot be read, these cards are opened.

    A card that was closed before MPS served it stays closed. If a card does not answer, its saved mode is kept for the
    next call. The saved mode of a card that was removed from the node is kept, too, but no reason is returned for such
    a card.
    """
    saved_modes = _load_saved_modes_by_uuid(home)
    try:
        if saved_modes is None:
            saved_modes = _default_former_modes_by_uuid(
                home, _read_modes_by_uuid(card_control, uuids, ignore_absent=True)
            )
        present_modes = _read_modes_by_uuid(card_control, saved_modes, ignore_absent=True)
    except CardError as error:
        return [f"GPUs stay closed: {error}"]
    remaining_modes = {uuid: mode for uuid, mode in saved_modes.items() if uuid not in present_modes}
    problems = []
    for uuid in present_modes:
        mode = saved_modes[uuid]
        if mode is present_modes[uuid]:
            continue
        try:
            card_control.set_compute_mode(uuid, mode)
        except CardError as error:
            remaining_modes[uuid] = mode
            problems.append(f"card {uuid} stays closed: {error}")
        else:
            _log.info("reopened a GPU", card=uuid, mode=str(mode))
    _save_modes(home, remaining_modes)
    return problems


def _read_modes_by_uuid(
    card_control: CardControl, uuids: Iterable[str], *, ignore_absent: bool = False
) -> dict[str, ComputeMode]:
    """Read the compute modes of the cards that answer, by UUID. Raises CardError if no card answers.

    ignore_absent: whether absent cards are skipped. Then nothing is raised if all cards are absent.
    """
    modes: dict[str, ComputeMode] = {}
    failures = []
    for uuid in uuids:
        try:
            modes[uuid] = card_control.compute_mode(uuid)
        except CardError as error:
            if not (ignore_absent and isinstance(error, CardAbsent)):
                failures.append(str(error))
    if failures and not modes:
        raise CardError("; ".join(failures))
    return modes


def _load_saved_modes_by_uuid(home: Path) -> dict[str, ComputeMode] | None:
    """Load the saved former modes of closed cards, by UUID; None if the file cannot be read, or was deleted."""
    try:
        raw = json.loads((home / mps.MODES_FILE).read_bytes())
        return {str(uuid): ComputeMode(mode) for uuid, mode in raw.items()}
    except FileNotFoundError:
        state = mpsfiles.read_state(home)
        if state is None or not state.enforced:
            return {}
        _log.error("the former compute modes have been deleted", path=str(home / mps.MODES_FILE))
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        _log.error(
            "cannot read the former compute modes", path=str(home / mps.MODES_FILE), error=sanitize_message(str(error))
        )
        return None


def _default_former_modes_by_uuid(home: Path, modes: Mapping[str, ComputeMode]) -> dict[str, ComputeMode]:
    """The assumed former modes by UUID, if the saved modes are lost: DEFAULT for each closed card. Logs the assumption.

    home: the daemon's folder, for the log.
    modes: the present modes, by UUID.
    """
    former_modes = {uuid: ComputeMode.DEFAULT for uuid, mode in modes.items() if mode is ComputeMode.EXCLUSIVE_PROCESS}
    if former_modes:
        _log.warning("assuming that closed GPUs were DEFAULT before", cards=sorted(former_modes), home=str(home))
    return former_modes


def _save_modes(home: Path, modes: Mapping[str, ComputeMode]) -> None:
    """Save the former modes atomically, or remove the file if no card has a former mode. Raises OSError."""
    if modes:
        replacing.replace_file(home / mps.MODES_FILE, json.dumps(dict(modes)).encode())
    else:
        (home / mps.MODES_FILE).unlink(missing_ok=True)
