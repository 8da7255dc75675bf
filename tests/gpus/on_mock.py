"""Faults that NVIDIA's mock of NVML injects. A process can load NVML once, so test_mock.py runs this module in its own
process.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
import yaml

from cardwise.gpus.nvml import NvmlGpus
from tests.fakes.clock import FakeClock

PATIENCE = 60.0
OVERRIDES = Path(os.environ["MOCK_NVML_OVERRIDES"])


class Cards:
    """The mock's cards, as the device plugin watches them."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.file = folder / "faults.json"
        self.watchers: list[NvmlGpus] = []
        self.gpus = self.watch()
        self.uuids = [card.uuid for card in self.gpus.cards()]

    def watch(self) -> NvmlGpus:
        self.watchers.append(NvmlGpus(faults=self.file, clock=self.clock))
        return self.watchers[-1]

    def set_cards(self, **cards: dict) -> None:
        """Set the state that the mock reports for its cards. The mock reads its file once a second."""
        scratch = OVERRIDES.with_suffix(".new")
        devices = {name.removeprefix("card"): settings for name, settings in cards.items()}
        scratch.write_text(yaml.safe_dump({"version": 1, "devices": devices}))
        scratch.rename(OVERRIDES)

    def wait_until(self, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < deadline, self.unhealthy()
            self.gpus._changed.wait(0.05)

    def errors(self, index: int) -> int | None:
        """The uncorrected ECC errors by GPU; None for a GPU that does not answer."""
        handle = self.gpus._handles[self.uuids[index]]
        counted = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        try:
            return pynvml.nvmlDeviceGetTotalEccErrors(handle, *counted)
        except pynvml.NVMLError:
            return None

    def probe_after(self, seconds: float) -> dict[int, str]:
        self.clock.advance(seconds)
        self.clock.until_waiting(len(self.watchers))
        return self.unhealthy()

    def unhealthy(self, gpus: NvmlGpus | None = None) -> dict[int, str]:
        """The reason of each unhealthy card, shortened to its first words."""
        health = (gpus or self.gpus).health().items()
        return {
            self.uuids.index(uuid): " ".join(state.reason.split()[:2]) for uuid, state in health if not state.healthy
        }


@pytest.fixture
def cards(tmp_path):
    cards = Cards(tmp_path)
    yield cards
    for gpus in cards.watchers:
        gpus.close()


def failure(mode: str, xid: int = 0) -> dict:
    return {"failure": {"mode": mode} | ({"xid": {"code": xid}} if xid else {})}


def test_each_fault_affects_one_card_until_it_ends(cards):
    assert cards.unhealthy() == {}
    cards.set_cards(
        card0=failure("fallen_off_bus", 79),
        card1=failure("lost"),
        card2=failure("ecc_uncorrectable", 48),
        card3=failure("ecc_uncorrectable", 31),
        card4=failure("ecc_uncorrectable", 61),
        card5=failure("ecc_uncorrectable", 119),
    )
    cards.wait_until(lambda: [cards.errors(index) for index in (0, 1)] == [None, None])
    cards.wait_until(lambda: all(cards.errors(index) for index in (2, 3, 4, 5)))
    # Because of the Xids alone, before the first probe.
    cards.wait_until(lambda: cards.unhealthy() == {0: "Xid 79:", 2: "Xid 48:", 4: "Xid 61:", 5: "Xid 119:"})
    # The mock reports ECC errors together with rows that cannot be remapped.
    unhealthy = {0: "Xid 79:", 1: "the GPU", 2: "Xid 48:", 3: "a row", 4: "a row", 5: "Xid 119:"}
    assert cards.probe_after(5) == unhealthy
    assert cards.probe_after(3600) == unhealthy, "nothing heals by itself"
    # A plugin that starts now does not see unresponsive cards.
    assert cards.unhealthy(cards.watch()) == {index: reason for index, reason in unhealthy.items() if index > 1}

    cards.set_cards()
    cards.wait_until(lambda: [cards.errors(index) for index in range(6)] == [0] * 6)
    # The counters of 2 and 5 restarted, so these cards were reset. A transient fault lasts for a while.
    rows = dict.fromkeys(range(2, 6), "a row")
    assert cards.probe_after(5) == {0: "Xid 79:", 1: "the GPU", **rows}
    cards.probe_after(30)
    assert cards.probe_after(5) == {0: "Xid 79:"}
    assert cards.probe_after(3600) == {0: "Xid 79:"}, "it answers again, and nobody has reset it"
    assert cards.unhealthy(cards.watch()) == {0: "Xid 79:"}

    cards.set_cards(card0={"power": {"total_energy_consumption_mj": 5}})
    handle = cards.gpus._handles[cards.uuids[0]]
    cards.wait_until(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 5)
    assert cards.probe_after(5) == {}
    assert cards.unhealthy(cards.watch()) == {}


def test_a_card_in_mig_mode_is_not_shared_until_that_ends(cards):
    def mode() -> int:
        return pynvml.nvmlDeviceGetMigMode(cards.gpus._handles[cards.uuids[2]])[0]

    cards.set_cards(card2={"mig": {"mode_current": "enabled", "mode_pending": "enabled"}})
    cards.wait_until(mode)
    assert cards.probe_after(5) == {2: "the GPU"}
    assert "is in MIG mode" in cards.gpus.health()[cards.uuids[2]].reason
    cards.set_cards()
    cards.wait_until(lambda: not mode())
    cards.probe_after(30)
    assert cards.probe_after(5) == {}
