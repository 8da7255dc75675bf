"""A real card: what no double can prove. Run by hand where a GPU is lent: `make test-gpu`, as root.

Needs NVIDIA's driver with its library, `nvidia-cuda-mps-control` in PATH (packages nvidia-compute-utils-<driver> or
nvidia-cuda-mps; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility) and the machine's own PIDs. Nobody else may
use the first card meanwhile: its compute mode is changed, and given back at the end. Where it is not ours to change,
CARDWISE_GPU_SETTINGS=keep leaves it and skips the tests that are about it. test_cluster starts a real Kubernetes and
needs its programs (`make binaries`). The others need nothing else: their API server is that of the unit tests, their
tenants are processes. All tenants call the driver by ctypes (tenant.py).

test_frameworks runs the frameworks of the Python that CARDWISE_GPU_PYTHON names, by default of the one that runs the
tests; a framework that is not there, or has no CUDA build, is skipped.

Numbers are printed at the end as a table of Markdown, for docs/measured.md, with driver and card. Without a card, or
without what else is needed, every test is skipped and says why.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import GpusUnavailable
from mps.host.processes import CONTROL_PROGRAM
from tests.integration.conftest import pytest_runtest_makereport  # noqa: F401 - a hook
from tests.realcard.machine import Machine

_MEASURED: list[tuple[str, str]] = []


@pytest.fixture(scope="session")
def gpus() -> Iterator[NvmlGpus]:
    try:
        nvml = NvmlGpus()
    except GpusUnavailable as error:
        pytest.skip(f"no GPU: {error}")
    try:
        if not nvml.cards():
            pytest.skip("no GPU: the driver has no card")
        if os.geteuid() != 0:
            pytest.skip("needs root: MPS daemons, compute modes")
        if shutil.which(CONTROL_PROGRAM) is None:
            pytest.skip(f"{CONTROL_PROGRAM} is not in PATH")
        card = nvml.cards()[0]
        _MEASURED.append(("card and driver", f"{card.model}, {card.memory} MiB, {card.properties.get('driver')}"))
        _MEASURED.append(("reserved by the driver, as NVML says", f"{card.reserved} MiB"))
        yield nvml
    finally:
        nvml.close()


@pytest.fixture
def machine(gpus: NvmlGpus) -> Iterator[Machine]:
    """Not started yet."""
    folder = Path(tempfile.mkdtemp(prefix="cwgpu-", dir="/tmp"))  # short: paths of pipes end at 87 bytes
    folder.chmod(0o755)
    new_machine = Machine(folder, gpus)
    try:
        yield new_machine
    finally:
        new_machine.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def measured():
    """`measured(what, value)`: a row of the table at the end."""
    return lambda label, amount: _MEASURED.append((label, str(amount)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _MEASURED:
        terminalreporter.section("measured on a real card")
        terminalreporter.write_line("| what | |\n|---|---|")
        for label, amount in _MEASURED:
            terminalreporter.write_line(f"| {label} | {amount} |")
