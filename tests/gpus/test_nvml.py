"""NVML when a card or the library fails; the answers of the driver are simulated."""

import threading
import types

import pynvml
import pytest

from cardwise.gpus.nvml import NvmlGpus
from cardwise.gpus.protocol import CardError, ComputeMode, GpuProcess, GpusUnavailable, ProcessSample
from cardwise.gpus.selection import NonMigGpus
from tests.fakes.clock import FakeClock

MIB = 1024 * 1024
WAIT = "nvmlEventSetWait_v2"
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


class Driver:
    """The calls that `NvmlGpus` makes. A handle is the card's index; `broken` are errors to raise by call or card.
    Calls on cards in `hanging` do not return while they are there.

    A wait for an event ends with an event or an error, never by its timeout.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: int = 2) -> None:
        self.broken: dict[object, Exception] = {}
        self.hanging: set[int] = set()
        self.hanging_threads: set[threading.Thread] = set()  # in a call that does not return
        self.registered: set[int] = set()
        self.events: list[types.SimpleNamespace] = []
        self.condition = threading.Condition()
        self.listening = self.over = False
        self.modes: dict[int, int] = {}
        self.reserved: int | None = None  # bytes; None: an old driver, which does not say
        self.recovery_actions: dict[int, int] = {}  # recovery actions
        self.unmapped: dict[int, int] = {}
        self.mig: dict[int, int] = {}
        self.energy = [600_000] * cards
        self.processes: list[types.SimpleNamespace] = []
        self.clients: list[types.SimpleNamespace] = []
        self.utilization: list[types.SimpleNamespace] = []  # as the driver's buffer has it
        self.busy_percent = 0  # of the whole card
        self.accounting: dict[int, int] | None = None  # bytes by PID; None: accounting is off
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "575.1",
            "nvmlDeviceGetCount": lambda: cards,
            "nvmlDeviceGetHandleByIndex": self.card,
            "nvmlDeviceGetMinorNumber": self.card,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{self.card(handle)}",
            "nvmlDeviceGetName": lambda handle: f"Tesla {self.card(handle)}",
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetPciInfo": lambda handle: types.SimpleNamespace(busId=f"0:{self.card(handle)}"),
            "nvmlDeviceGetFieldValues": lambda handle, _: [
                types.SimpleNamespace(
                    nvmlReturn=0, value=types.SimpleNamespace(uiVal=self.recovery_actions.get(handle, 0))
                )
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
            "nvmlDeviceRegisterEvents": lambda handle, *_: self.registered.add(handle),
            WAIT: self.next_event,
            "nvmlDeviceGetComputeMode": lambda handle: self.modes.get(self.card(handle), 0),
            "nvmlDeviceSetComputeMode": self.modes.__setitem__,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: self.processes,
            "nvmlDeviceGetMPSComputeRunningProcesses": lambda handle: self.clients,
            "nvmlDeviceGetProcessUtilization": self.process_utilization,
            "nvmlDeviceGetUtilizationRates": lambda _: types.SimpleNamespace(gpu=self.busy_percent, memory=0),
            "nvmlDeviceGetAccountingMode": lambda _: int(self.accounting is not None),
            "nvmlDeviceGetAccountingStats": self.accounting_stats,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, self.wrap_call(name, answer))

    def wrap_call(self, name, answer):
        def call(*arguments, **named):
            if name in self.broken:
                raise self.broken[name]
            return answer(*arguments, **named)

        return call

    def memory(self, handle, version=None):
        total = 16276 * MIB + self.card(handle)
        if version is None:
            return types.SimpleNamespace(total=total)
        if self.reserved is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        assert version == pynvml.nvmlMemory_v2
        return types.SimpleNamespace(total=total, reserved=self.reserved)

    def process_utilization(self, _, since_us):
        samples = [sample for sample in self.utilization if sample.timeStamp > since_us]
        if not samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [*samples, types.SimpleNamespace(pid=0, timeStamp=0, smUtil=0, memUtil=0)]

    def accounting_stats(self, _, pid):
        if pid not in self.accounting:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return types.SimpleNamespace(maxMemoryUsage=self.accounting[pid])

    def card(self, index):
        with self.condition:
            if index in self.hanging:
                self.hanging_threads.add(threading.current_thread())
                self.condition.wait_for(lambda: index not in self.hanging or self.over)
                self.hanging_threads.remove(threading.current_thread())
        if index in self.broken:
            raise self.broken[index]
        return index

    def next_event(self, *_):
        with self.condition:
            self.listening = True
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.events or self.over or WAIT in self.broken)
            self.listening = False
            if self.events:
                return self.events.pop()
            raise self.broken.get(WAIT, pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT))

    def break_call(self, call: object, error: Exception) -> None:
        with self.condition:
            self.broken[call] = error
            self.condition.notify_all()

    def report_xid(self, xid: int, card: int) -> None:
        """A card reports it. Returns when it has been taken and the next event is waited for."""
        with self.condition:
            self.events.append(types.SimpleNamespace(eventData=xid, device=card))
            self.condition.notify_all()
            assert self.condition.wait_for(lambda: self.listening and not self.events, 60)

    def stop_hanging(self, card: int) -> None:
        """The calls of the card return again."""
        with self.condition:
            self.hanging.remove(card)
            self.condition.notify_all()

    def close(self) -> None:
        with self.condition:
            self.over = True
            self.condition.notify_all()


class DriverClock(FakeClock):
    """A clock on which a wait for a thread that hangs in the driver times out at once."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def join(self, thread: threading.Thread, seconds: float) -> bool:
        while thread.is_alive() and thread not in self._driver.hanging_threads:
            thread.join(0.01)
        return not thread.is_alive()


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


@pytest.fixture
def clock(driver):
    return DriverClock(driver)


@pytest.fixture
def make_gpus(driver, clock):
    """Create the `NvmlGpus` in the test, because faults at the start matter."""
    created = []

    def make(**settings) -> NvmlGpus:
        created.append(NvmlGpus(clock=clock, **settings))
        return created[-1]

    yield make
    driver.close()
    for gpus in created:
        gpus.close()


def probe_again(clock: FakeClock) -> None:
    """Wait until all cards have been probed once more."""
    clock.step()
    clock.until_waiting()


def indices(gpus: NvmlGpus) -> list[int]:
    return [card.index for card in gpus.cards()]


@pytest.mark.parametrize("lost", [0, 1])
def test_card_lost_at_the_start_does_not_affect_others(driver, make_gpus, clock, lost):
    driver.broken[lost] = LOST
    gpus = make_gpus()
    assert indices(gpus) == [1 - lost]
    assert list(gpus.health()) == [f"GPU-{1 - lost}"]
    del driver.broken[lost]
    probe_again(clock)
    assert gpus.wait_change(0)
    assert indices(gpus) == [0, 1]
    driver.report_xid(31, 1 - lost)  # any event, after which the listener registers the new card
    assert driver.registered == {0, 1}


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
def test_unresponsive_driver_is_reported(driver, call):
    driver.broken[call] = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(GpusUnavailable, match="Driver Not Loaded"):
        NvmlGpus()


def test_a_lost_card_is_unhealthy_and_comes_back_after_a_quiet_time(driver, make_gpus, clock):
    gpus = make_gpus()
    driver.broken[1] = LOST
    probe_again(clock)
    assert gpus.wait_change(0)
    assert "GPU is lost" in gpus.health()["GPU-1"].reason
    assert gpus.health()["GPU-0"].healthy
    del driver.broken[1]
    lost = clock.now()
    while not gpus.wait_change(0):
        assert not gpus.health()["GPU-1"].healthy
        probe_again(clock)
    assert gpus.health()["GPU-1"].healthy
    assert clock.now() - lost == 30


@pytest.mark.parametrize(("call", "thread"), [("nvmlDeviceGetPciInfo", "nvml-probe"), (WAIT, "nvml-xids")])
def test_unexpected_error_ends_no_thread(driver, make_gpus, clock, call, thread):
    failures: list[str] = []
    gpus = make_gpus(on_failure=failures.append)
    driver.break_call(call, TypeError("not what the binding says"))
    if thread == "nvml-probe":
        probe_again(clock)
    else:
        clock.until_waiting(2)  # also wait for the listener, which pauses after an error
    assert set(failures) == {thread}
    del driver.broken[call]
    clock.advance(1)
    driver.report_xid(79, 0)
    driver.broken[1] = LOST
    probe_again(clock)
    assert [state.reason[:6] for state in gpus.health().values()] == ["Xid 79", "the GP"]


def sick(gpus: NvmlGpus) -> dict[str, str]:
    return {uuid: state.reason[:8].strip(":;( ") for uuid, state in gpus.health().items() if not state.healthy}


def test_card_without_a_readable_uuid_affects_no_other(driver, make_gpus):
    """Off the bus: the event names a device whose UUID can no longer be read."""
    gpus = make_gpus()
    driver.broken[1] = LOST
    driver.report_xid(79, 1)
    assert sick(gpus) == {"GPU-1": "Xid 79"}


def test_card_that_needs_a_reset_is_unhealthy_until_it(driver, make_gpus, clock, tmp_path):
    gpus = make_gpus(faults=tmp_path / "faults.json")
    driver.report_xid(48, 1)
    for _ in range(20):
        probe_again(clock)
    assert sick(gpus) == {"GPU-1": "Xid 48"}
    restarted = make_gpus(faults=tmp_path / "faults.json")
    assert sick(restarted) == {"GPU-1": "Xid 48"}, "also for who starts later, at once"
    driver.energy[1] = 10
    assert sick(make_gpus(faults=tmp_path / "faults.json")) == {}


def test_xids_of_hanging_cards_and_later_xids_of_others_are_processed(driver, make_gpus):
    gpus = make_gpus()
    driver.hanging.add(0)
    driver.report_xid(119, 0)
    driver.report_xid(79, 1)
    assert sick(gpus) == {"GPU-0": "Xid 119", "GPU-1": "Xid 79"}


def test_reset_is_detected_for_a_card_that_was_silent_since_its_fault(driver, make_gpus, tmp_path):
    gpus = make_gpus(faults=tmp_path / "faults.json")
    driver.hanging.add(0)
    driver.report_xid(119, 0)
    assert sick(gpus) == {"GPU-0": "Xid 119"}
    driver.stop_hanging(0)
    assert sick(make_gpus(faults=tmp_path / "faults.json")) == {"GPU-0": "Xid 119"}, "nobody has reset it"
    driver.energy[0] = 10
    assert sick(make_gpus(faults=tmp_path / "faults.json")) == {}


def test_hanging_card_is_unhealthy_and_others_are_still_probed(driver, make_gpus, clock):
    gpus = make_gpus()
    driver.hanging.add(0)
    began = clock.now()
    while not gpus.wait_change(0):
        assert gpus.health()["GPU-0"].healthy
        assert clock.now() - began < 60, "nobody says that it hangs"
        probe_again(clock)
    assert gpus.health()["GPU-0"].reason == (
        "the GPU does not answer: a call of NVML has not returned for 20 s; see dmesg, and reset the GPU or reboot "
        "the node if this persists"
    )
    assert clock.now() - began == 20
    assert gpus.health()["GPU-1"].healthy
    driver.broken[1] = LOST
    probe_again(clock)
    assert "GPU is lost" in gpus.health()["GPU-1"].reason
    assert len(driver.hanging_threads) == 1, "it is not asked again and again"
    (hanging_threads,) = driver.hanging_threads
    driver.stop_hanging(0)
    hanging_threads.join()
    del driver.broken[1]
    for _ in range(8):
        probe_again(clock)
    assert sick(gpus) == {}


def test_card_that_hangs_at_the_start_is_left_out_until_it_answers(driver, make_gpus, clock):
    driver.hanging.add(0)
    gpus = make_gpus()
    assert indices(gpus) == [1]
    assert gpus.unresponsive_indices() == [0]
    driver.broken[1] = LOST
    probe_again(clock)
    assert list(sick(gpus)) == ["GPU-1"]
    (hanging_threads,) = driver.hanging_threads
    driver.stop_hanging(0)
    hanging_threads.join()
    probe_again(clock)
    assert indices(gpus) == [0, 1]
    assert gpus.unresponsive_indices() == []


def test_call_on_a_hanging_card_fails_in_time(driver, make_gpus):
    gpus = make_gpus()
    driver.hanging.add(0)
    for _ in range(3):
        with pytest.raises(CardError, match="card GPU-0: a call of NVML has not returned"):
            gpus.compute_mode("GPU-0")
    (hanging_threads,) = driver.hanging_threads
    assert gpus.compute_mode("GPU-1") is ComputeMode.DEFAULT
    driver.stop_hanging(0)
    hanging_threads.join()
    assert gpus.compute_mode("GPU-0") is ComputeMode.DEFAULT


def test_an_unknown_error_passes(driver, make_gpus, clock):
    gpus = make_gpus()
    driver.report_xid(12345, 0)
    driver.report_xid(13, 1)
    assert sick(gpus) == {"GPU-0": "Xid 1234"}
    for _ in range(6):
        probe_again(clock)
    assert sick(gpus) == {}


def test_recovery_action_or_remapping_failure_makes_a_card_unhealthy(driver, make_gpus, clock):
    driver.recovery_actions[0], driver.unmapped[1] = 1, 1
    gpus = make_gpus()
    reasons = [state.reason for state in gpus.health().values()]
    assert reasons[0] == "the driver requests recovery action 1 (1: reset, 2: reboot, 3: drain)", "from the beginning"
    assert "could not be remapped" in reasons[1]
    driver.recovery_actions[0] = 0
    for _ in range(6):
        probe_again(clock)
    assert list(sick(gpus)) == ["GPU-1"]


def test_a_card_in_mig_mode_is_not_shared_until_that_ends(driver, make_gpus, clock):
    driver.mig[1] = 1
    gpus = make_gpus()
    assert gpus.health()["GPU-0"].healthy, "what is only asked for begins with the next reset"
    assert gpus.health()["GPU-1"].reason.startswith("the GPU is in MIG mode")
    assert "nvidia-smi -i N -mig 0" in gpus.health()["GPU-1"].reason
    assert [card.index for card in NonMigGpus(gpus).cards()] == [0]
    driver.mig[1] = 0
    for _ in range(6):
        probe_again(clock)
    assert sick(gpus) == {}
    assert len(NonMigGpus(gpus).cards()) == 2


def test_unhealthy_card_is_still_reported_in_mig_mode(driver, make_gpus):
    driver.mig[1] = 1
    driver.unmapped[1] = 1
    gpus = make_gpus()
    assert "could not be remapped" in gpus.health()["GPU-1"].reason
    assert gpus.health()["GPU-1"].mig


def test_card_or_library_without_mig_is_shared(driver, make_gpus):
    driver.broken["nvmlDeviceGetMigMode"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert sick(make_gpus()) == {}


def test_the_properties_that_selectors_name(make_gpus):
    for card in make_gpus().cards():
        assert card.properties == {
            "driver": "575.1",
            "clock": "1328",
            "memoryClockMHz": "1328",
            "architecture": "Pascal",
            "computeCapability": "6.0",
        }


def test_unsupported_properties_are_left_out(driver, make_gpus):
    driver.broken["nvmlDeviceGetMaxClockInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver.broken["nvmlDeviceGetArchitecture"] = AttributeError("an older library")
    assert make_gpus().cards()[0].properties == {"driver": "575.1", "computeCapability": "6.0"}


def test_compute_mode_and_processes_of_a_card(driver, make_gpus):
    gpus = make_gpus()
    assert gpus.compute_mode("GPU-1") is ComputeMode.DEFAULT
    gpus.set_compute_mode("GPU-1", ComputeMode.EXCLUSIVE_PROCESS)
    assert driver.modes == {1: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS}
    assert gpus.compute_mode("GPU-1") is ComputeMode.EXCLUSIVE_PROCESS
    driver.processes = [types.SimpleNamespace(pid=7, usedGpuMemory=300 * MIB + 1)]
    driver.processes += [types.SimpleNamespace(pid=8, usedGpuMemory=None)]
    assert gpus.processes("GPU-0") == [GpuProcess(7, 300), GpuProcess(8, None)]


def test_mps_clients_are_listed_from_either_list_of_the_driver(driver, make_gpus):
    gpus = make_gpus()
    driver.processes = [types.SimpleNamespace(pid=7, usedGpuMemory=300 * MIB)]
    driver.clients = [types.SimpleNamespace(pid=7, usedGpuMemory=None)]
    driver.clients += [types.SimpleNamespace(pid=9, usedGpuMemory=500 * MIB)]
    assert gpus.processes("GPU-0") == [GpuProcess(7, 300), GpuProcess(9, 500)]
    driver.broken["nvmlDeviceGetMPSComputeRunningProcesses"] = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert gpus.processes("GPU-0") == [GpuProcess(7, 300)]


@pytest.fixture
def sampled(driver, make_gpus):
    """A card with two processes, of which the driver reports utilization samples at these seconds before now."""
    gpus = make_gpus()
    driver.processes = [types.SimpleNamespace(pid=pid, usedGpuMemory=300 * MIB) for pid in (7, 8)]

    def report(*samples: tuple[int, float, int, int]) -> None:
        now = gpus._clock.wall().timestamp()
        driver.utilization = [
            types.SimpleNamespace(pid=pid, timeStamp=int((now - age) * 1e6), smUtil=sm, memUtil=bandwidth)
            for pid, age, sm, bandwidth in samples
        ]

    return gpus, report


def test_use_of_a_process_is_the_mean_of_its_recent_samples(driver, sampled):
    gpus, report = sampled
    driver.busy_percent = 90
    report((7, 0.2, 80, 20), (7, 1.2, 40, 10), (7, 3.0, 100, 100), (7, 0.4, 4_000_000, 0), (99, 0.1, 5, 5))
    busy, idle = gpus.sample_processes("GPU-0")
    assert busy == ProcessSample(pid=7, memory=300, sm_percent=60.0, bandwidth_percent=15.0)
    assert idle == ProcessSample(pid=8, memory=300, sm_percent=0.0, bandwidth_percent=0.0)


def test_processes_of_an_idle_card_are_idle_and_of_a_busy_card_without_samples_unknown(driver, sampled):
    gpus, report = sampled
    report()
    assert [sample.sm_percent for sample in gpus.sample_processes("GPU-0")] == [0.0, 0.0]
    driver.busy_percent = 50
    assert [sample.sm_percent for sample in gpus.sample_processes("GPU-0")] == [None, None]
    report((99, 0.1, 50, 5))
    assert [sample.sm_percent for sample in gpus.sample_processes("GPU-0")] == [None, None]
    report((8, 0.1, 50, 5))
    assert [sample.sm_percent for sample in gpus.sample_processes("GPU-0")] == [0.0, 50.0]


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_use_that_the_driver_does_not_report_is_unknown_and_memory_stays(driver, sampled, error):
    gpus, _ = sampled
    driver.broken["nvmlDeviceGetProcessUtilization"] = pynvml.NVMLError(error)
    assert gpus.sample_processes("GPU-0")[0] == ProcessSample(pid=7, memory=300)


def test_the_binding_reports_no_samples_as_an_error_without_a_code(driver, sampled):
    gpus, _ = sampled
    driver.broken["nvmlDeviceGetProcessUtilization"] = pynvml.NVMLError(pynvml.NVML_SUCCESS)
    assert gpus.sample_processes("GPU-0")[0].sm_percent == 0.0


def test_peaks_come_from_the_accounting_of_the_driver_where_it_is_on(driver, sampled):
    gpus, _ = sampled
    driver.accounting = {7: 900 * MIB}
    assert [sample.peak_memory for sample in gpus.sample_processes("GPU-0")] == [900, None]
    driver.broken["nvmlDeviceGetAccountingMode"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert [sample.peak_memory for sample in gpus.sample_processes("GPU-0")] == [None, None]


def test_failed_mode_change_reports_the_reason(driver, make_gpus):
    gpus = make_gpus()
    driver.broken["nvmlDeviceSetComputeMode"] = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    with pytest.raises(CardError, match="GPU-1: Insufficient Permissions"):
        gpus.set_compute_mode("GPU-1", ComputeMode.EXCLUSIVE_PROCESS)


@pytest.mark.parametrize(("reserved", "mib"), [(None, 0), (616 * MIB, 616), (616 * MIB + 1, 617)])
def test_the_memory_that_the_driver_keeps_is_read_with_the_card(driver, reserved, mib):
    driver.reserved = reserved
    gpus = NvmlGpus()
    assert [card.reserved for card in gpus.cards()] == [mib, mib]
    gpus.close()
