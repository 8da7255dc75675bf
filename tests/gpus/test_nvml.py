"""NVML where a card or the library itself fails, with the driver's answers put in."""

import threading
import types

import pynvml
import pytest

from cardwise.gpus.chosen import WholeGpus
from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import CardUnwilling, ComputeMode, GpuProcess, GpusUnavailable
from tests.fakes.clock import FakeClock

MIB = 1024 * 1024
WAIT = "nvmlEventSetWait_v2"
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


class Driver:
    """The calls that `NvmlGpus` makes. A handle is the card's index; `broken` are errors to raise by call or card.
    Calls on cards in `hanging` do not return while they are there.

    Who asks for an event waits until there is one, or an error, and not for the half second that it asks for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: int = 2) -> None:
        self.broken: dict[object, Exception] = {}
        self.hanging: set[int] = set()
        self.stuck: set[threading.Thread] = set()  # in a call that does not return
        self.heard: set[int] = set()
        self.events: list[types.SimpleNamespace] = []
        self.news = threading.Condition()
        self.listening = self.over = False
        self.modes: dict[int, int] = {}
        self.asks: dict[int, int] = {}  # recovery actions
        self.unmapped: dict[int, int] = {}
        self.mig: dict[int, int] = {}
        self.energy = [600_000] * cards
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
            "nvmlDeviceGetFieldValues": lambda handle, _: [
                types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=self.asks.get(handle, 0)))
            ],
            "nvmlDeviceGetRemappedRows": lambda handle: (0, 0, 0, self.unmapped.get(handle, 0)),
            "nvmlDeviceGetMigMode": lambda handle: [self.mig.get(handle, 0), 1],
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda _: 0,
            "nvmlDeviceGetTotalEccErrors": lambda handle, *_: 0,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: self.energy[self.card(handle)],
            "nvmlDeviceGetMaxClockInfo": lambda *_: 1328,
            "nvmlDeviceGetArchitecture": lambda _: 4,
            "nvmlDeviceGetCudaComputeCapability": lambda _: (6, 0),
            "nvmlEventSetCreate": object,
            "nvmlEventSetFree": lambda _: None,
            "nvmlDeviceRegisterEvents": lambda handle, *_: self.heard.add(handle),
            WAIT: self.next_event,
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
        with self.news:
            if index in self.hanging:
                self.stuck.add(threading.current_thread())
                self.news.wait_for(lambda: index not in self.hanging or self.over)
                self.stuck.remove(threading.current_thread())
        if index in self.broken:
            raise self.broken[index]
        return index

    def next_event(self, *_):
        with self.news:
            self.listening = True
            self.news.notify_all()
            self.news.wait_for(lambda: self.events or self.over or WAIT in self.broken)
            self.listening = False
            if self.events:
                return self.events.pop()
            raise self.broken.get(WAIT, pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT))

    def breaks(self, what: object, error: Exception) -> None:
        with self.news:
            self.broken[what] = error
            self.news.notify_all()

    def fails(self, xid: int, card: int) -> None:
        """A card reports it. Returns when it has been taken and the next event is waited for."""
        with self.news:
            self.events.append(types.SimpleNamespace(eventData=xid, device=card))
            self.news.notify_all()
            assert self.news.wait_for(lambda: self.listening and not self.events, 60)

    def returns(self, card: int) -> None:
        """Its calls hang no more."""
        with self.news:
            self.hanging.remove(card)
            self.news.notify_all()

    def ends(self) -> None:
        with self.news:
            self.over = True
            self.news.notify_all()


class DriverClock(FakeClock):
    """Waits for no thread that is stuck in the driver: for it the time is over at once."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def join(self, thread: threading.Thread, seconds: float) -> bool:
        while thread.is_alive() and thread not in self._driver.stuck:
            thread.join(0.01)
        return not thread.is_alive()


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


@pytest.fixture
def clock(driver):
    return DriverClock(driver)


@pytest.fixture
def gpus(driver, clock):
    """Makes them, since what is broken at the start matters."""
    made = []

    def make(**settings) -> NvmlGpus:
        made.append(NvmlGpus(clock=clock, **settings))
        return made[-1]

    yield make
    driver.ends()
    for one in made:
        one.close()


def probed(clock: FakeClock) -> None:
    """All cards have been probed once more."""
    clock.step()
    clock.until_waiting()


def indices(gpus: NvmlGpus) -> list[int]:
    return [card.index for card in gpus.cards()]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_card_lost_at_the_start_does_not_take_the_others_down(driver, gpus, clock, lost):
    driver.broken[lost] = LOST
    made = gpus()
    assert indices(made) == [1 - lost]
    assert list(made.health()) == [f"GPU-{1 - lost}"]
    del driver.broken[lost]
    probed(clock)
    assert made.wait_change(0)
    assert indices(made) == [0, 1]
    driver.fails(31, 1 - lost)  # any event: after it the listener asks for those of the new card
    assert driver.heard == {0, 1}


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
def test_a_driver_that_does_not_answer_is_told_as_such(driver, call):
    driver.broken[call] = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(GpusUnavailable, match="Driver Not Loaded"):
        NvmlGpus()


def test_a_lost_card_is_unhealthy_and_comes_back_after_a_quiet_time(driver, gpus, clock):
    made = gpus()
    driver.broken[1] = LOST
    probed(clock)
    assert made.wait_change(0)
    assert "GPU is lost" in made.health()["GPU-1"].reason
    assert made.health()["GPU-0"].healthy
    del driver.broken[1]
    lost = clock.now()
    while not made.wait_change(0):
        assert not made.health()["GPU-1"].healthy
        probed(clock)
    assert made.health()["GPU-1"].healthy
    assert clock.now() - lost == 30


@pytest.mark.parametrize(("call", "thread"), [("nvmlDeviceGetPciInfo", "nvml-probe"), (WAIT, "nvml-xids")])
def test_an_unforeseen_error_ends_no_thread(driver, gpus, clock, call, thread):
    failures: list[str] = []
    made = gpus(on_failure=failures.append)
    driver.breaks(call, TypeError("not what the binding says"))
    if thread == "nvml-probe":
        probed(clock)
    else:
        clock.until_waiting(2)  # the listener too: it takes its time after an error
    assert set(failures) == {thread}
    del driver.broken[call]
    clock.advance(1)
    driver.fails(79, 0)
    driver.broken[1] = LOST
    probed(clock)
    assert [state.reason[:6] for state in made.health().values()] == ["Xid 79", "the ca"]


def sick(gpus: NvmlGpus) -> dict[str, str]:
    return {uuid: state.reason[:8].strip(":;( ") for uuid, state in gpus.health().items() if not state.healthy}


def test_a_card_that_cannot_say_who_it_is_takes_no_other_out(driver, gpus):
    """Off the bus: the event comes with a device of which even the UUID is not known any more."""
    made = gpus()
    driver.broken[1] = LOST
    driver.fails(79, 1)
    assert sick(made) == {"GPU-1": "Xid 79"}


def test_a_card_that_needs_a_reset_is_out_until_it_had_one(driver, gpus, clock, tmp_path):
    made = gpus(faults=tmp_path / "faults.json")
    driver.fails(48, 1)
    for _ in range(20):
        probed(clock)
    assert sick(made) == {"GPU-1": "Xid 48"}
    again = gpus(faults=tmp_path / "faults.json")
    assert sick(again) == {"GPU-1": "Xid 48"}, "also for who starts later, at once"
    driver.energy[1] = 10
    assert sick(gpus(faults=tmp_path / "faults.json")) == {}


def test_an_xid_of_a_card_whose_calls_hang_is_taken_and_those_of_the_others_after_it(driver, gpus):
    made = gpus()
    driver.hanging.add(0)
    driver.fails(119, 0)
    driver.fails(79, 1)
    assert sick(made) == {"GPU-0": "Xid 119", "GPU-1": "Xid 79"}


def test_a_reset_is_seen_also_of_a_card_that_said_nothing_since_it_failed(driver, gpus, tmp_path):
    made = gpus(faults=tmp_path / "faults.json")
    driver.hanging.add(0)
    driver.fails(119, 0)
    assert sick(made) == {"GPU-0": "Xid 119"}
    driver.returns(0)
    assert sick(gpus(faults=tmp_path / "faults.json")) == {"GPU-0": "Xid 119"}, "nobody has reset it"
    driver.energy[0] = 10
    assert sick(gpus(faults=tmp_path / "faults.json")) == {}


def test_a_card_whose_calls_hang_is_unhealthy_and_the_others_are_looked_at_all_the_same(driver, gpus, clock):
    made = gpus()
    driver.hanging.add(0)
    began = clock.now()
    while not made.wait_change(0):
        assert made.health()["GPU-0"].healthy
        assert clock.now() - began < 60, "nobody says that it hangs"
        probed(clock)
    assert made.health()["GPU-0"].reason == (
        "the card does not answer: a call of NVML has not returned for 20 s; see dmesg, and reset the card or reboot "
        "the node if it stays so"
    )
    assert clock.now() - began == 20
    assert made.health()["GPU-1"].healthy
    driver.broken[1] = LOST
    probed(clock)
    assert "GPU is lost" in made.health()["GPU-1"].reason
    assert len(driver.stuck) == 1, "it is not asked again and again"
    (stuck,) = driver.stuck
    driver.returns(0)
    stuck.join()
    del driver.broken[1]
    for _ in range(8):
        probed(clock)
    assert sick(made) == {}


def test_a_card_whose_calls_hang_from_the_beginning_is_left_out_until_they_return(driver, gpus, clock):
    driver.hanging.add(0)
    made = gpus()
    assert indices(made) == [1]
    assert made.silent() == [0]
    driver.broken[1] = LOST
    probed(clock)
    assert list(sick(made)) == ["GPU-1"]
    (stuck,) = driver.stuck
    driver.returns(0)
    stuck.join()
    probed(clock)
    assert indices(made) == [0, 1]
    assert made.silent() == []


def test_who_asks_a_card_whose_calls_hang_is_told_so_in_time(driver, gpus):
    made = gpus()
    driver.hanging.add(0)
    for _ in range(3):
        with pytest.raises(CardUnwilling, match="card GPU-0: a call of NVML has not returned"):
            made.compute_mode("GPU-0")
    (stuck,) = driver.stuck
    assert made.compute_mode("GPU-1") is ComputeMode.DEFAULT
    driver.returns(0)
    stuck.join()
    assert made.compute_mode("GPU-0") is ComputeMode.DEFAULT


def test_an_unknown_error_passes(driver, gpus, clock):
    made = gpus()
    driver.fails(12345, 0)
    driver.fails(13, 1)
    assert sick(made) == {"GPU-0": "Xid 1234"}
    for _ in range(6):
        probed(clock)
    assert sick(made) == {}


def test_what_the_driver_asks_for_and_what_the_card_says_of_itself_takes_it_out(driver, gpus, clock):
    driver.asks[0], driver.unmapped[1] = 1, 1
    made = gpus()
    reasons = [state.reason for state in made.health().values()]
    assert reasons[0] == "the driver asks for recovery action 1 (1: reset, 2: reboot, 3: drain)", "from the beginning"
    assert "could not be remapped" in reasons[1]
    driver.asks[0] = 0
    for _ in range(6):
        probed(clock)
    assert list(sick(made)) == ["GPU-1"]


def test_a_card_in_mig_mode_is_not_shared_until_that_ends(driver, gpus, clock):
    driver.mig[1] = 1
    made = gpus()
    assert made.health()["GPU-0"].healthy, "what is only asked for begins with the next reset"
    assert made.health()["GPU-1"].reason.startswith("the card is in MIG mode")
    assert "nvidia-smi -i N -mig 0" in made.health()["GPU-1"].reason
    assert [card.index for card in WholeGpus(made).cards()] == [0]
    driver.mig[1] = 0
    for _ in range(6):
        probed(clock)
    assert sick(made) == {}
    assert len(WholeGpus(made).cards()) == 2


def test_a_broken_card_is_in_mig_mode_all_the_same(driver, gpus):
    driver.mig[1] = 1
    driver.unmapped[1] = 1
    made = gpus()
    assert "could not be remapped" in made.health()["GPU-1"].reason
    assert made.health()["GPU-1"].mig


def test_a_card_or_library_that_knows_no_mig_is_shared(driver, gpus):
    driver.broken["nvmlDeviceGetMigMode"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert sick(gpus()) == {}


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
