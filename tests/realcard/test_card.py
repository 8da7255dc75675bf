"""What a real card says of itself by NVML, which the device plugin and the audit live on."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cardwise.gpus.nvml import NvmlGpus

of_nvml = pytest.mark.skipif(bool(os.environ.get("CARDWISE_GPU_DOUBLE")), reason="the double has no NVML")


@of_nvml
def test_the_card_is_described(gpus, measured):
    card = gpus.cards()[0]
    assert set(card.properties) >= {"driver", "clock", "memoryClockMHz", "architecture", "computeCapability"}
    assert card.pci_bus_id
    assert all(Path(path.host).exists() for path in card.devices)
    measured("properties", ", ".join(f"{name} {amount}" for name, amount in sorted(card.properties.items())))


@of_nvml
@pytest.mark.usefixtures("gpus")
def test_it_is_well_and_tells_of_its_faults():
    with capture_logs() as logs:
        gpus = NvmlGpus()
        try:
            assert all(state.healthy for state in gpus.health().values())
            gpus.wait_change(2.0)  # until its threads have asked for events
        finally:
            gpus.close()
    assert [line["event"] for line in logs if line["log_level"] in ("warning", "error")] == []


def test_a_process_without_mps_is_listed_with_its_memory(machine, measured):
    tenant = machine.tenant("hold", 1024, through=False)
    assert tenant.heard() == {"held": 1024, "error": 0}
    listed = {process.pid: process.memory for process in machine.gpus.processes(machine.card.uuid)}
    assert listed[tenant.pid] >= 1024
    measured("NVML on a process without MPS that holds 1024 MiB", f"{listed[tenant.pid]} MiB")
