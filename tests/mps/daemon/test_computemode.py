"""The compute mode of cards: what it was before is on disk before a card is closed."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import mps
from cardwise.core.api.mps import DaemonScope
from cardwise.gpus import mpsfiles
from cardwise.gpus.protocol import ComputeMode
from cardwise.gpus.simulated import SimulatedGpus
from mps.daemon import computemode, directories
from tests.mps.mpsnode import uuid_of

UNREADABLE = "cannot read the former compute modes"
DELETED = "the former compute modes have been deleted"


def publish(home: Path, *, enforced: bool) -> None:
    """As the daemon does after it has closed its cards, and after it has reopened them."""
    state = mps.MpsState.READY if enforced else mps.MpsState.OFF
    directories.write_status(
        home, mps.Status(uuids=(uuid_of(0),), scope=DaemonScope.CARD, state=state, enforced=enforced)
    )


def test_a_card_whose_mode_cannot_be_noted_is_not_closed(node, tmp_path):
    """It would stay closed for ever: nobody would know that it was open before."""
    card_control, home = SimulatedGpus(node.cards_file), tmp_path / "home"
    in_the_way = home / mps.MODES_FILE
    in_the_way.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        computemode.close_cards(home, card_control, [uuid_of(0)])
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT
    in_the_way.rmdir()
    computemode.close_cards(home, card_control, [uuid_of(0)])
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
    assert computemode.reopen_cards(home, card_control, [uuid_of(0)]) == []
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT


@pytest.mark.parametrize("content", [b"", b'{"GPU', b"[]", b"\xff\x00", b'{"GPU-x": "other"}', b"[" * 100_000, None])
@pytest.mark.parametrize("closed_again", [False, True])
def test_a_card_whose_former_mode_is_lost_or_cannot_be_read_is_opened(node, tmp_path, content, closed_again):
    card_control, home = SimulatedGpus(node.cards_file), tmp_path
    computemode.close_cards(home, card_control, [uuid_of(0)])
    publish(home, enforced=True)
    if content is None:
        (home / mps.MODES_FILE).unlink()
    else:
        (home / mps.MODES_FILE).write_bytes(content)
    with capture_logs() as logs:
        if closed_again:  # by the next process, for which it is closed already
            computemode.close_cards(home, card_control, [uuid_of(0)])
            assert card_control.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
        assert computemode.reopen_cards(home, card_control, [uuid_of(0)]) == []
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT
    assert logs[0]["event"] == (DELETED if content is None else UNREADABLE)
    assert not (home / mps.MODES_FILE).exists()


@pytest.mark.parametrize("enforced", [None, False, True])
def test_a_card_that_was_closed_before_us_stays_so(node, tmp_path, enforced):
    card_control = SimulatedGpus(node.cards_file)
    home = Path(mps.card_daemon_folder(str(tmp_path), uuid_of(0)))
    home.mkdir()
    card_control.set_compute_mode(uuid_of(0), ComputeMode.EXCLUSIVE_PROCESS)
    if enforced is False:  # our last word is that of a daemon that had ended
        publish(home, enforced=False)
    computemode.close_cards(home, card_control, [uuid_of(0)])
    if enforced:
        publish(home, enforced=True)
    computemode.close_cards(home, card_control, [uuid_of(0)])
    assert not mpsfiles.is_left_exclusive_by_former_manager(tmp_path, uuid_of(0)), "not by us"
    assert computemode.reopen_cards(home, card_control, [uuid_of(0)]) == []
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
    assert not (home / mps.MODES_FILE).exists()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_card_that_has_left_the_machine_is_nothing_to_reopen(node, tmp_path, deleted):
    """The release of its daemon failed for ever."""
    card_control = SimulatedGpus(node.cards_file)
    home = Path(mps.card_daemon_folder(str(tmp_path), uuid_of(0)))
    home.mkdir()
    computemode.close_cards(home, card_control, [uuid_of(0)])
    publish(home, enforced=True)
    if deleted:
        (home / mps.MODES_FILE).unlink()
    kept = node.cards_file.read_text()
    node.cards_file.write_text("cards: []")
    card_control = SimulatedGpus(node.cards_file)
    assert computemode.reopen_cards(home, card_control, [uuid_of(0)]) == []
    node.cards_file.write_text(kept)
    card_control = SimulatedGpus(node.cards_file)
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
    assert computemode.reopen_cards(home, card_control, [uuid_of(0)]) == []
    assert card_control.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT, "its former mode was kept"


def test_a_card_whose_mode_was_deleted_counts_as_left_closed(node, tmp_path):
    """So nothing starts on it without MPS, and `doctor` says why."""
    card_control, home = SimulatedGpus(node.cards_file), Path(mps.card_daemon_folder(str(tmp_path), uuid_of(0)))
    home.mkdir()
    computemode.close_cards(home, card_control, [uuid_of(0)])
    publish(home, enforced=True)
    (home / mps.MODES_FILE).unlink()
    assert mpsfiles.is_left_exclusive_by_former_manager(tmp_path, uuid_of(0))
    assert computemode.reopen_cards(home, card_control, [uuid_of(0)]) == []
    publish(home, enforced=False)
    assert not mpsfiles.is_left_exclusive_by_former_manager(tmp_path, uuid_of(0))


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{"])
def test_former_modes_that_cannot_be_read_do_not_stop_the_check_of_a_card(tmp_path, content):
    home = Path(mps.card_daemon_folder(str(tmp_path), uuid_of(0)))
    home.mkdir()
    (home / mps.MODES_FILE).write_text(content)
    assert not mpsfiles.is_left_exclusive_by_former_manager(tmp_path, uuid_of(0))
