"""`--gpus`: what it may say, and which cards are indices of a machine's."""

import pytest
import yaml
from click.testing import CliRunner

from cardwise.core.values.invalid import InvalidRequest
from cardwise.gpus import selection
from cardwise.gpus.selection import SelectedGpus
from cardwise.gpus.simulated import SimulatedGpus
from deviceplugin.__main__ import main
from tests.fakes.clock import FakeClock


@pytest.fixture
def machine(tmp_path):
    """Four cards."""
    path = tmp_path / "cards.yaml"
    cards = [{"index": i, "uuid": f"GPU-{i}ab", "memoryMiB": 16276, "healthy": i != 2} for i in range(4)]
    path.write_text(yaml.safe_dump({"cards": cards}))
    return SimulatedGpus(path, clock=FakeClock())


@pytest.mark.parametrize(
    ("text", "indices"),
    [("0", [0]), ("3,1", [1, 3]), (" gpu-2AB , 0", [0, 2]), ("7", []), ("GPU-9", []), ("00,1,2,3", [0, 1, 2, 3])],
)
def test_only_the_chosen_cards_are_there(machine, text, indices):
    gpus = SelectedGpus(machine, selection.parse_selection(text))
    assert [card.index for card in gpus.cards()] == indices
    assert list(gpus.health()) == [f"GPU-{index}ab" for index in indices]
    assert all(state.healthy == (uuid != "GPU-2ab") for uuid, state in gpus.health().items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' has an empty entry; write indices such as 0,2"),
        ("0,,1", "'0,,1' has an empty entry"),
        ("0,1,0", "'0' is listed twice; list each GPU once"),
        ("0,00", "'00' is listed twice"),
        ("GPU-a,gpu-A", "'gpu-A' is listed twice"),
        ("0-3", "'0-3' is neither the index nor the UUID of a GPU; write indices such as 0,2"),
        ("-1", "'-1' is neither"),
        ("0;1", "'0;1' is neither"),
        ("GPU_1", "'GPU_1' is neither"),
    ],
)
def test_selection_that_is_always_wrong_is_refused_at_the_start(text, says):
    with pytest.raises(InvalidRequest) as caught:
        selection.parse_selection(text)
    assert caught.value.field == "--gpus"
    assert says in str(caught.value)
    started = CliRunner().invoke(main, ["--node-name=n1", f"--gpus={text}"])
    assert started.exit_code == 2
    assert "Invalid value for '--gpus'" in started.output
    assert says in started.output


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("0,GPU-3ab", []),
        (
            "0,4,GPU-9",
            [
                f"--gpus: {entry} is not a GPU of this node; use one of: 0 (GPU-0ab), 1 (GPU-1ab), "
                "2 (GPU-2ab), 3 (GPU-3ab)"
                for entry in ("4", "gpu-9")
            ],
        ),
        ("1,GPU-1ab", ["--gpus: 1 and GPU-1ab are the same GPU; list it once"]),
    ],
)
def test_selection_problems_of_this_machine_are_reported(machine, text, problems):
    assert SelectedGpus(machine, selection.parse_selection(text)).problems() == problems


@pytest.mark.parametrize(
    ("text", "silent"), [("0,1", []), ("0,5", [5]), ("GPU-1ab", []), ("GPU-1ab,5", [5]), ("GPU-9ab", [4, 5])]
)
def test_unresponsive_card_may_be_selected(machine, monkeypatch, text, silent):
    monkeypatch.setattr(machine, "unresponsive_indices", lambda: [4, 5])
    assert SelectedGpus(machine, selection.parse_selection(text)).unresponsive_indices() == silent


def test_changes_and_the_end_are_those_of_the_machine(machine):
    gpus = SelectedGpus(machine, selection.parse_selection("0"))
    assert gpus.wait_change(0.1) is False
    gpus.close()
    assert gpus.wait_change(30) is False
