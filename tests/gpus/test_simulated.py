import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cardwise.gpus import simulated
from cardwise.gpus.protocol import CardError, ComputeMode, GpuProcess, GpusUnavailable, ProcessSample
from cardwise.gpus.simulated import InvalidCards, SimulatedGpus

ONE = "cards: [{index: 0, uuid: GPU-0, memoryMiB: 16276, properties: {clock: 1328}}]\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cards.yaml"
    path.write_text(ONE)
    return path


def replace(path, text):
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.rename(path)


def test_defaults(file):
    (card,) = SimulatedGpus(file).cards()
    assert (card.index, card.uuid, card.memory, card.devices) == (0, "GPU-0", 16276, ())
    assert card.properties == {"clock": "1328"}


def test_health_changes_end_the_wait(file, clock):
    gpus = SimulatedGpus(file, clock=clock)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gpus.wait_change, 5)
        clock.until_waiting()
        replace(file, ONE.replace("}]", ", healthy: false, reason: hot}]"))
        clock.step()
        assert waiting.result(60)
    assert gpus.health()["GPU-0"].reason == "hot"
    replace(file, ONE)
    assert gpus.wait_change(5)
    assert gpus.health()["GPU-0"].healthy


def test_file_change_without_a_new_mtime_is_detected(file):
    gpus = SimulatedGpus(file)
    before = file.stat()
    file.write_text(ONE.replace("16276", "32552"))
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of timestamps has steps of 4 ms before Linux 6.13
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert gpus.cards()[0].memory == 32552


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cards:\n  - index: 0\n  uuid: [", "cards.yaml:3: not YAML"),
        ("cards: [{index: 0, uuid: GPU-0}]", "memoryMiB"),
        ("cards: [{index: 0, uuid: GPU-0, memoryMiB: 16276, helthy: true}]", "helthy"),
        ("cards: [{index: 0, uuid: GPU-0, memoryMiB: lots}]", "$.cards[0].memoryMiB"),
        ("cards: [{index: 0, uuid: GPU-0, memoryMiB: 0}]", "cards[0].memoryMiB: 0"),
        (
            "cards: [{index: 0, uuid: GPU-0, memoryMiB: 1}, {index: 0, uuid: GPU-1, memoryMiB: 1}]",
            "cards[1].index: 0",
        ),
        ("cards: [{index: 0, uuid: GPU-0, memoryMiB: 1}, {index: 1, uuid: GPU-0, memoryMiB: 1}]", "cards[1].uuid"),
        ("cards: [{index: -1, uuid: GPU-0, memoryMiB: 1}]", "cards[0].index: -1"),
        ("cards: [{index: 0, uuid: GPU-NEW_card, memoryMiB: 1}]", "cannot name an object; write letters"),
        ("- 1", "Expected `object`"),
        ("", "Expected `object`"),
    ],
)
def test_invalid_file_keeps_the_last_good_cards_and_names_the_line(file, text, says):
    gpus = SimulatedGpus(file)
    replace(file, text)
    with pytest.raises(InvalidCards) as caught:
        simulated.parse_cards(text, str(file))
    assert says in str(caught.value)
    assert gpus.cards()[0].memory == 16276
    file.unlink()
    assert gpus.cards()[0].memory == 16276
    replace(file, ONE.replace("16276", "32552"))
    assert gpus.cards()[0].memory == 32552


def test_without_cards_to_begin_with_there_is_no_start(tmp_path):
    with pytest.raises(GpusUnavailable, match=r"cards\.yaml"):
        SimulatedGpus(tmp_path / "cards.yaml")


def test_a_compute_mode_outlives_the_program_and_the_card_file(file):
    SimulatedGpus(file).set_compute_mode("GPU-0", ComputeMode.EXCLUSIVE_PROCESS)
    replace(file, ONE.replace("16276", "32552"))
    assert SimulatedGpus(file).compute_mode("GPU-0") is ComputeMode.EXCLUSIVE_PROCESS


def test_a_mode_that_cannot_be_kept_is_not_claimed(file):
    gpus = SimulatedGpus(file)
    (file.parent / "cards.yaml.modes").mkdir()
    with pytest.raises(CardError, match="cannot be saved"):
        gpus.set_compute_mode("GPU-0", ComputeMode.EXCLUSIVE_PROCESS)
    assert gpus.compute_mode("GPU-0") is ComputeMode.DEFAULT


def test_processes_come_and_go_with_the_file(file):
    gpus = SimulatedGpus(file)
    assert gpus.processes("GPU-0") == []
    replace(file, ONE.replace("}]", ", processes: [{pid: 7, memoryMiB: 300}, {pid: 8}]}]"))
    assert gpus.processes("GPU-0") == [GpuProcess(7, 300), GpuProcess(8, None)]
    replace(file, ONE.replace("}]", ", processes: [{pid: 7, smPercent: 40, bandwidthPercent: 5.5, peakMiB: 900}]}]"))
    (sample,) = gpus.sample_processes("GPU-0")
    assert sample == ProcessSample(pid=7, peak_memory=900, sm_percent=40, bandwidth_percent=5.5)
