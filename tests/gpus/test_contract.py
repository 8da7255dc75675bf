"""The contract of `Gpus`, checked with the simulated cards and, on a machine with a driver, with NVML."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from cardwise.gpus import selection
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import CardError, ComputeMode, Gpus, GpusUnavailable
from cardwise.gpus.selection import NonMigGpus, SelectedGpus
from cardwise.gpus.simulated import SimulatedGpus


def simulated(tmp_path, clock) -> Gpus:
    path = tmp_path / "cards.yaml"
    card = {"model": "Tesla-P100", "memoryMiB": 16276, "device": "/dev/null"}
    path.write_text(yaml.safe_dump({"cards": [card | {"index": i, "uuid": f"GPU-{i}"} for i in (1, 0)]}))
    return SimulatedGpus(path, clock=clock)


def simulated_subset(tmp_path, clock) -> Gpus:
    return SelectedGpus(simulated(tmp_path, clock), selection.parse_selection("0,GPU-1"))


def simulated_non_mig(tmp_path, clock) -> Gpus:
    return NonMigGpus(simulated(tmp_path, clock))


def nvml(_, clock) -> Gpus:
    try:
        return NvmlGpus(clock=clock)
    except GpusUnavailable as error:
        pytest.skip(f"no NVIDIA driver: {error}")


@pytest.fixture(params=[simulated, simulated_subset, simulated_non_mig, nvml])
def gpus(request, tmp_path, clock):
    gpus = request.param(tmp_path, clock)
    yield gpus
    gpus.close()


def test_cards_come_in_the_order_of_their_index(gpus):
    cards = gpus.cards()
    assert [card.index for card in cards] == list(range(len(cards)))
    assert len({card.uuid for card in cards}) == len(cards) > 0


def test_every_card_is_described(gpus):
    for card in gpus.cards():
        assert card.uuid.startswith("GPU-")
        assert card.model
        assert card.memory > 1000, "MiB, not GiB"
        assert card.devices
        assert all(path.container.startswith("/dev/") for path in card.devices)
        assert all(isinstance(text, str) for text in card.properties.values())


def test_health_has_an_entry_for_each_card(gpus):
    assert set(gpus.health()) == {card.uuid for card in gpus.cards()}
    assert all(state.healthy == (not state.reason) for state in gpus.health().values())


def test_returned_collections_are_copies(gpus):
    gpus.cards().clear()
    assert gpus.cards()


def test_waiting_ends_in_time_and_by_close(gpus, clock):
    before = clock.now()
    assert gpus.wait_change(0.3) is False
    assert clock.now() - before == pytest.approx(0.3)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gpus.wait_change, 30)
        clock.until_waiting()
        gpus.close()
        assert waiting.result(60) is False


@pytest.fixture(params=[simulated, nvml])
def use(request, tmp_path, clock):
    """The implementations that also report processes and set the compute mode."""
    gpus = request.param(tmp_path, clock)
    yield gpus
    gpus.close()


def test_a_compute_mode_is_what_was_set(use):
    uuid = use.cards()[0].uuid
    before = use.compute_mode(uuid)
    try:
        use.set_compute_mode(uuid, before)
    except CardError as error:
        pytest.skip(f"only root may, and not on each card: {error}")
    try:
        for mode in (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT):
            use.set_compute_mode(uuid, mode)
            assert use.compute_mode(uuid) is mode
    finally:
        use.set_compute_mode(uuid, before)


def test_unknown_card_raises_card_absent(use):
    for ask in (
        use.compute_mode,
        use.processes,
        use.sample_processes,
        lambda uuid: use.set_compute_mode(uuid, ComputeMode.DEFAULT),
    ):
        with pytest.raises(CardError, match="GPU-none"):
            ask("GPU-none")


def test_processes_are_listed(use):
    assert all(process.pid > 0 for process in use.processes(use.cards()[0].uuid))


def test_samples_are_of_the_listed_processes(use):
    uuid = use.cards()[0].uuid
    samples = use.sample_processes(uuid)
    assert {sample.pid for sample in samples} <= {process.pid for process in use.processes(uuid)}
    shares = [share for sample in samples for share in (sample.sm_percent, sample.bandwidth_percent)]
    assert all(share is None or 0 <= share <= 100 for share in shares)
