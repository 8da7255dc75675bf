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
without what else is needed, every test is skipped and says why. `python -m tests.realcard` runs them on a machine that
is there for some minutes.

CARDWISE_GPU_DOUBLE=1 has doubles of card, MPS and CUDA (doublecard, tests/mps/double, doublecuda) in place of NVIDIA's:
it shows that a test works, and nothing about cards.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import GpusUnavailable
from cardwise.gpus.simulated import SimulatedGpus
from mps.host.processes import CONTROL_PROGRAM
from tests.integration.conftest import pytest_runtest_makereport  # noqa: F401 - a hook
from tests.mps.mpsnode import DOUBLE
from tests.realcard.doublecard import DRIVER, DoubleCard
from tests.realcard.machine import Machine
from tests.realcard.results import RESULTS_ENV, ScenarioResults
from tests.realcard.tenant import DOUBLE_ENV

_MEASURED: list[tuple[str, str]] = []


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(RESULTS_ENV):
        config.pluginmanager.register(ScenarioResults(Path(path), _MEASURED))


@pytest.fixture(scope="session")
def double() -> Iterator[DoubleCard | None]:
    """The double of the card, where it is asked for."""
    if not os.environ.get("CARDWISE_GPU_DOUBLE"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="cwcard-") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        card = DoubleCard(Path(folder))
        patch.setenv(DOUBLE_ENV, str(card.address))
        patch.setenv("CARDWISE_DOUBLE_DRIVER", DRIVER.partition(".")[0])
        patch.setenv("PATH", f"{DOUBLE.parent}{os.pathsep}{os.environ['PATH']}")
        yield card
        card.close()


@pytest.fixture(scope="session")
def gpus(double: DoubleCard | None) -> Iterator[NvmlGpus | SimulatedGpus]:
    if double is not None:
        yield double.gpus
        return
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
def machine(gpus: NvmlGpus, double: DoubleCard | None) -> Iterator[Machine]:
    """Not started yet."""
    folder = Path(tempfile.mkdtemp(prefix="cwgpu-", dir="/tmp"))  # short: paths of pipes end at 87 bytes
    folder.chmod(0o755)
    new_machine = Machine(folder, gpus)
    if double is not None:
        double.mps_root = new_machine.root
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
