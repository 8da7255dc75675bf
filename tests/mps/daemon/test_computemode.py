"""The compute mode of cards: what it was before is on disk before a card is closed."""

import pytest

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
    assert computemode.reopen(home, use) == []
    assert use.compute_mode(uuid_of(0)) is ComputeMode.DEFAULT
