"""The compute mode of cards: what it was before is on disk before a card is closed."""

import pytest
from structlog.testing import capture_logs

from cardwise.core.api import mps
from cardwise.gpus.protocol import ComputeMode
from cardwise.gpus.simulated import SimulatedGpus
from mps.daemon import computemode
from tests.mps.worlds import uuid_of


def test_a_card_whose_mode_cannot_be_noted_is_not_closed(node, tmp_path):
    """It would stay closed for ever: nobody would know that it was open before."""
    use, home = SimulatedGpus(node.cards_file), tmp_path / "home"
    in_the_way = home / mps.MODES
    in_the_way.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        computemode.close(home, use, [uuid_of(0)])
    assert use.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT
    in_the_way.rmdir()
    computemode.close(home, use, [uuid_of(0)])
    assert use.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
    assert computemode.reopen(home, use, [uuid_of(0)]) == []
    assert use.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT


@pytest.mark.parametrize("content", [b"", b'{"GPU', b"[]", b"\xff\x00", b'{"GPU-x": "other"}'])
@pytest.mark.parametrize("closed_again", [False, True])
def test_a_card_whose_former_mode_cannot_be_read_is_opened(node, tmp_path, content, closed_again):
    use, home = SimulatedGpus(node.cards_file), tmp_path
    computemode.close(home, use, [uuid_of(0)])
    (home / mps.MODES).write_bytes(content)
    with capture_logs() as logs:
        if closed_again:  # by the next process, for which it is closed already
            computemode.close(home, use, [uuid_of(0)])
            assert use.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
        assert computemode.reopen(home, use, [uuid_of(0)]) == []
    assert use.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT
    assert "cannot read the former compute modes" in [entry["event"] for entry in logs]
    assert not (home / mps.MODES).exists()


def test_a_card_that_was_closed_before_us_stays_so(node, tmp_path):
    use = SimulatedGpus(node.cards_file)
    use.set_compute_mode(uuid_of(0), ComputeMode.EXCLUSIVE_PROCESS)
    computemode.close(tmp_path, use, [uuid_of(0)])
    assert computemode.reopen(tmp_path, use, [uuid_of(0)]) == []
    assert use.compute_mode(uuid_of(0)) is ComputeMode.EXCLUSIVE_PROCESS
