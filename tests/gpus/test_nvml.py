"""NVML where a card or the library itself fails, with the driver's answers put in."""

import time
import types

import pynvml
import pytest

from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import CardUnwilling, ComputeMode, GpuProcess, GpusUnavailable
from tests.deviceplugin.conftest import eventually

MIB = 1024 * 1024
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


class Driver:
    """The calls that `NvmlGpus` makes. A handle is the card's index; `broken` are errors to raise by call or card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: int = 2) -> None:
        self.broken: dict[object, Exception] = {}
        self.heard: set[int] = set()
        self.events: list[types.SimpleNamespace] = []
        self.modes: dict[int, int] = {}
        self.processes: list[types.SimpleNamespace] = []
        self.clients: list[types.SimpleNamespace] = []
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "575.1",
            "nvmlDeviceGetCount": lambda: cards,
            "nvmlDeviceGetHandleByIndex": self.card,
            "nvmlDeviceGetMinorNumber": self.card,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{self.card(handle)}",
            "nvmlDeviceGetName": lambda handle: f"Tesla {self.card(handle)}",
            "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=16276 * MIB + self.card(handle)),
            "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"0:{self.card(handle)}"),
            "nvmlDeviceGetFieldValues": lambda *_: [types.SimpleNamespace(nvmlReturn=1)],
            "nvmlDeviceGetMaxClockInfo": lambda *_: 1328,
            "nvmlDeviceGetArchitecture": lambda _: 4,
            "nvmlDeviceGetCudaComputeCapability": lambda _: (6, 0),
            "nvmlEventSetCreate": object,
            "nvmlEventSetFree": lambda _: None,
            "nvmlDeviceRegisterEvents": lambda handle, *_: self.heard.add(handle),
            "nvmlEventSetWait_v2": self.next_event,
            "nvmlDeviceGetComputeMode": lambda handle: self.modes.get(self.card(handle), 0),
            "nvmlDeviceSetComputeMode": self.modes.__setitem__,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: self.processes,
            "nvmlDeviceGetMPSComputeRunningProcesses": lambda handle: self.clients,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self.maybe(name, answer))

    def maybe(self, name, answer):
        def call(*arguments):
            if name in self.broken:
                raise self.broken[name]
            return answer(*arguments)

        return call

    def card(self, index):
        if index in self.broken:
            raise self.broken[index]
        return index

    def next_event(self, *_):
        if self.events:
            return self.events.pop()
        time.sleep(0.02)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


@pytest.fixture
def gpus(driver):
    """Makes them, since what is broken at the start matters."""
    made = []

    def make(**settings) -> NvmlGpus:
        made.append(NvmlGpus(**{"probe_seconds": 0.02} | settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def indices(gpus: NvmlGpus) -> list[int]:
    return [card.index for card in gpus.cards()]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_card_lost_at_the_start_does_not_take_the_others_down(driver, gpus, lost):
    driver.broken[lost] = LOST
    made = gpus()
    assert indices(made) == [1 - lost]
    assert list(made.health()) == [f"GPU-{1 - lost}"]
    del driver.broken[lost]
    assert made.wait_change(5)
    assert indices(made) == [0, 1]
    eventually(lambda: driver.heard == {0, 1}, what="its Xids are heard as well")


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_answer_is_told_as_such(driver, call):
    driver.broken[call] = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(GpusUnavailable, match="Driver Not Loaded"):
        NvmlGpus()


def test_a_lost_card_is_unhealthy_and_comes_back(driver, gpus):
    made = gpus(quiet_seconds=0.0)
    driver.broken[1] = LOST
    assert made.wait_change(5)
    assert "GPU is lost" in made.health()["GPU-1"].reason
    assert made.health()["GPU-0"].healthy
    del driver.broken[1]
    assert made.wait_change(5)
    assert made.health()["GPU-1"].healthy


@pytest.mark.parametrize(
    ("call", "thread"), [("nvmlDeviceGetPciInfo", "nvml-probe"), ("nvmlEventSetWait_v2", "nvml-xids")]
)
def test_an_unforeseen_error_ends_no_thread(driver, gpus, call, thread):
    failures: list[str] = []
    made = gpus(on_failure=failures.append)
    driver.broken[call] = TypeError("not what the binding says")
    eventually(lambda: failures)
    assert set(failures) == {thread}
    del driver.broken[call]
    driver.events.append(types.SimpleNamespace(eventData=79, device=0))
    driver.broken[1] = LOST
    eventually(lambda: [state.reason[:6] for state in made.health().values()] == ["Xid 79", "the ca"])


def test_the_properties_that_selectors_name(gpus):
    for card in gpus().cards():
        assert card.properties == {
            "driver": "575.1",
            "clock": "1328",
            "clockMHz": "1328",
            "memoryClockMHz": "1328",
            "architecture": "Pascal",
            "computeCapability": "6.0",
        }


def test_what_a_card_does_not_know_of_itself_is_left_out(driver, gpus):
    driver.broken["nvmlDeviceGetMaxClockInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver.broken["nvmlDeviceGetArchitecture"] = AttributeError("an older library")
    assert gpus().cards()[0].properties == {"driver": "575.1", "computeCapability": "6.0"}


def test_who_may_be_on_a_card_and_who_is(driver, gpus):
    made = gpus()
    assert made.compute_mode("GPU-1") is ComputeMode.DEFAULT
    made.set_compute_mode("GPU-1", ComputeMode.EXCLUSIVE_PROCESS)
    assert driver.modes == {1: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS}
    assert made.compute_mode("GPU-1") is ComputeMode.EXCLUSIVE_PROCESS
    driver.processes = [types.SimpleNamespace(pid=7, usedGpuMemory=300 * MIB + 1)]
    driver.processes += [types.SimpleNamespace(pid=8, usedGpuMemory=None)]
    assert made.processes("GPU-0") == [GpuProcess(7, 300), GpuProcess(8, None)]


def test_clients_of_mps_are_on_the_card_in_whichever_list_the_driver_has_them(driver, gpus):
    made = gpus()
    driver.processes = [types.SimpleNamespace(pid=7, usedGpuMemory=300 * MIB)]
    driver.clients = [types.SimpleNamespace(pid=7, usedGpuMemory=None)]
    driver.clients += [types.SimpleNamespace(pid=9, usedGpuMemory=500 * MIB)]
    assert made.processes("GPU-0") == [GpuProcess(7, 300), GpuProcess(9, 500)]
    driver.broken["nvmlDeviceGetMPSComputeRunningProcesses"] = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert made.processes("GPU-0") == [GpuProcess(7, 300)]


def test_a_card_that_does_not_do_as_told_says_why(driver, gpus):
    made = gpus()
    driver.broken["nvmlDeviceSetComputeMode"] = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    with pytest.raises(CardUnwilling, match="GPU-1: Insufficient Permissions"):
        made.set_compute_mode("GPU-1", ComputeMode.EXCLUSIVE_PROCESS)
