"""The cards of NVIDIA's driver, read by NVML.

Health has two sources. Xid events report at once that a card failed. Probes report that a card does not answer, and
only a probe can show that the card has recovered (`faults`).

A call on a failed card may never return. So each call on a card runs in its own thread (`calls`). The threads that
serve all cards never make such a call, because a hanging card must not hide the health of other cards.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pynvml
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.quantity import MiB
from cardwise.gpus import xids
from cardwise.gpus.calls import BackgroundCall
from cardwise.gpus.faults import Faults, ResetIndicators
from cardwise.gpus.protocol import (
    IN_MIG_MODE,
    CardAbsent,
    CardError,
    ComputeMode,
    DevicePath,
    GpuCard,
    GpuProcess,
    GpusUnavailable,
    Health,
    ProcessSample,
)
from cardwise.supervision import supervised_thread

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_BYTES_PER_MIB = 1024 * 1024
_MICROSECONDS = 1_000_000
_FULL = 100  # percent; drivers have been seen to report larger numbers, which mean nothing
_UTILIZATION_SECONDS = 2.0  # over which use is averaged; drivers take a sample at least once a second
_EVENT_WAIT_MS = 500
_PROBE_SECONDS = 5.0
# Maximum wait for the cards at the start: without nvidia-persistenced, the first call on each card takes seconds.
_START_SECONDS = 30.0
_ANSWER_SECONDS = 5.0
_SILENT_SECONDS = 20.0  # a card without an answer for this time is unhealthy
_HANG_ERRORS = (
    f"the GPU does not answer: a call of NVML has not returned for {_SILENT_SECONDS:.0f} s; see dmesg, and reset the "
    "GPU or reboot the node if this persists"
)
_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: ComputeMode.DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: ComputeMode.PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeMode.EXCLUSIVE_PROCESS,
}


class NvmlGpus:
    """`Gpus` and `CardControl` of this machine, read by NVML."""

    def __init__(
        self,
        *,
        faults: Path | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
    ) -> None:
        """Start watching the cards. A card that does not answer within `_START_SECONDS` is added later.

        faults: the file in which the cards that need a reset are saved.
        on_failure: called with the name of a thread after an unexpected error in this thread.

        Raises GpusUnavailable if there is no driver.
        """
        try:
            pynvml.nvmlInit()
            self._driver = str(pynvml.nvmlSystemGetDriverVersion())
            self._missing = dict.fromkeys(range(pynvml.nvmlDeviceGetCount()), "")  # index -> why it is not in `cards`
        except pynvml.NVMLError as error:
            raise GpusUnavailable(
                f"NVML does not start ({error}); is the NVIDIA driver installed, and its library mounted into this "
                "container? For simulated GPUs give --simulated-gpus FILE"
            ) from error
        self._on_failure = on_failure
        self._clock = clock
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._cards: list[GpuCard] = []
        self._faults = Faults(faults, clock)
        self._indicators: dict[str, ResetIndicators] = {}  # of the last probe
        self._last_probed = dict.fromkeys(self._missing, clock.now())  # index -> when its last probe ended
        self._probes: dict[int, BackgroundCall[None]] = {}  # the last probe of each index
        self._hung_calls: dict[str, BackgroundCall[Any]] = {}  # UUID -> a call that did not return in time
        self._reasons: Mapping[str, str] = {}  # why cards take no new shares
        self._mig_uuids: set[str] = set()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._probe_cards(_START_SECONDS)
        self._changed.clear()
        self._threads = [
            supervised_thread(loop, name, clock)
            for loop, name in ((self._probe_loop, "nvml-probe"), (self._xid_loop, "nvml-xids"))
        ]
        for thread in self._threads:
            thread.start()

    def cards(self) -> list[GpuCard]:
        with self._lock:
            return list(self._cards)

    def unresponsive_indices(self) -> list[int]:
        with self._lock:
            return sorted(self._missing)

    def health(self) -> Mapping[str, Health]:
        with self._lock:
            reasons = self._reasons
            return {
                card.uuid: Health(
                    healthy=card.uuid not in reasons,
                    reason=reasons.get(card.uuid, ""),
                    mig=card.uuid in self._mig_uuids,
                )
                for card in self._cards
            }

    def wait_change(self, timeout: float) -> bool:
        changed = self._clock.wait(self._changed, timeout)
        self._changed.clear()
        return changed and not self._closing.is_set()

    def compute_mode(self, uuid: str) -> ComputeMode:
        # EXCLUSIVE_THREAD, which drivers have not accepted for years, counts as prohibited.
        return _COMPUTE_MODES.get(self._call_card(uuid, pynvml.nvmlDeviceGetComputeMode), ComputeMode.PROHIBITED)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        number = next(number for number, named in _COMPUTE_MODES.items() if named is mode)
        self._call_card(uuid, lambda handle: pynvml.nvmlDeviceSetComputeMode(handle, number))

    def processes(self, uuid: str) -> list[GpuProcess]:
        return [GpuProcess(pid, memory) for pid, memory in self._call_card(uuid, _memory_by_pid).items()]

    def sample_processes(self, uuid: str) -> list[ProcessSample]:
        since = self._clock.wall().timestamp() - _UTILIZATION_SECONDS
        return self._call_card(uuid, partial(_sample_processes, since_us=round(since * _MICROSECONDS)))

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        for thread in self._threads:
            self._clock.join(thread, 5.0)
        # nvmlShutdown may wait for a call that hangs.
        BackgroundCall(pynvml.nvmlShutdown, "nvml-shutdown", self._clock).has_returned(5.0)

    def _call_card(self, uuid: str, function: Callable[[Any], T]) -> T:
        """Call `function` with the handle of the card. Raises CardError, also if the call does not return in time.

        While a call on the card hangs, no further call is made: each further call could leave a hanging thread behind.
        """
        handle = self._handles_by_uuid().get(uuid)
        if handle is None:
            raise CardAbsent(f"card {uuid} is not on this machine")
        with self._lock:
            previous = self._hung_calls.get(uuid)
        call = (
            BackgroundCall(lambda: function(handle), "nvml-call", self._clock)
            if previous is None or previous.has_returned()
            else previous
        )
        if call is previous or not call.has_returned(_ANSWER_SECONDS):
            with self._lock:
                self._hung_calls[uuid] = call
            raise CardError(f"card {uuid}: a call of NVML has not returned")
        try:
            return call.result()
        except pynvml.NVMLError as error:
            raise CardError(f"card {uuid}: {error}") from error

    def _add_card(self, index: int) -> None:
        """Add the card if it answers. A card that has fallen off the bus must not affect other cards."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            card = _read_card(index, handle, self._driver)
        except pynvml.NVMLError as error:
            self._mark_missing(index, str(error))
            return
        with self._lock:
            del self._missing[index]
            self._handles[card.uuid] = handle
            self._cards = sorted([*self._cards, card], key=lambda card: card.index)
        self._changed.set()

    def _mark_missing(self, index: int, reason: str) -> None:
        with self._lock:
            previous, self._missing[index] = self._missing[index], reason
        if reason != previous:
            _log.error("GPU does not answer; left out until it does", index=index, error=reason)

    def _probe_loop(self) -> None:
        while not self._clock.wait(self._closing, _PROBE_SECONDS):
            try:
                self._probe_cards()
            except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and the loop continues
                self._report_failure("nvml-probe")

    def _probe_cards(self, timeout: float = _PROBE_SECONDS) -> None:
        """Probe each card whose last probe has ended. Waits up to `timeout` seconds for the probes that it starts."""
        started = []
        for index in self._last_probed:
            # No new probe is started while the last one hangs: otherwise each pass would leave a thread behind.
            if index not in self._probes or self._probes[index].has_returned():
                self._probes[index] = BackgroundCall(
                    partial(self._probe_index, index), f"nvml-probe-{index}", self._clock
                )
                started.append(self._probes[index])
        deadline = self._clock.now() + timeout
        for probe in started:
            probe.has_returned(deadline - self._clock.now())
        for index, probe in self._probes.items():
            if not probe.has_returned() and self._clock.now() - self._last_probed[index] >= _SILENT_SECONDS:
                self._mark_unresponsive(index)

    def _probe_index(self, index: int) -> None:
        """Probe one card. Runs in its own thread, since each call may hang; no call is made under the lock."""
        try:
            if index in self._missing:
                self._add_card(index)
            with self._lock:
                uuids = [card.uuid for card in self._cards if card.index == index]
            for uuid in uuids:
                self._probe_card(uuid)
        except Exception:  # noqa: BLE001 - the thread's outermost function: logged; the next probe tries again
            self._report_failure("nvml-probe")
        self._last_probed[index] = self._clock.now()

    def _probe_card(self, uuid: str) -> None:
        with self._lock:
            handle, fault = self._handles[uuid], self._faults.persistent_fault(uuid)
        mig = _in_mig_mode(handle)
        problem = _card_problem(handle) or (IN_MIG_MODE if mig else "")
        indicators = _reset_indicators(handle)
        with self._lock:
            self._faults.record(uuid, problem)
            if mig != (uuid in self._mig_uuids):
                self._mig_uuids ^= {uuid}
                self._changed.set()
            if fault is not None:
                self._faults.clear_if_reset(uuid, fault, indicators)
            self._indicators[uuid] = indicators
            self._update_reasons()

    def _mark_unresponsive(self, index: int) -> None:
        if index in self._missing:
            self._mark_missing(index, _HANG_ERRORS)
        with self._lock:
            for card in self._cards:
                if card.index == index:
                    self._faults.record(card.uuid, _HANG_ERRORS)
            self._update_reasons()

    def _report_failure(self, thread: str) -> None:
        _log.exception("failed to check the health of the GPUs", thread=thread)
        self._on_failure(thread)

    def _handles_by_uuid(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._handles)

    def _update_reasons(self) -> None:
        """Publish the reasons of the faults. Call with the lock held."""
        old_reasons, new_reasons = self._reasons, self._faults.reasons()
        for uuid in old_reasons.keys() | new_reasons.keys():
            if uuid not in new_reasons:
                _log.info("GPU is healthy again", uuid=uuid)
            elif old_reasons.get(uuid) != new_reasons[uuid]:
                _log.error("GPU is unhealthy", uuid=uuid, reason=new_reasons[uuid])
        if old_reasons != new_reasons:
            self._reasons = new_reasons
            self._changed.set()

    def _xid_loop(self) -> None:
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.warning("no Xid events; health is checked by probing only", error=str(error))
            return
        registered: set[str] = set()
        try:
            while not self._closing.is_set():
                try:
                    self._register_events(events, registered)
                    self._wait_event(events)
                except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and the loop continues
                    self._report_failure("nvml-xids")
                    self._clock.wait(self._closing, 1.0)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _register_events(self, events: Any, registered: set[str]) -> None:
        for uuid, handle in self._handles_by_uuid().items():
            if uuid in registered:
                continue
            registered.add(uuid)
            register = partial(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            call = BackgroundCall(register, "nvml-call", self._clock)
            try:
                if call.has_returned(_ANSWER_SECONDS):
                    call.result()
            except pynvml.NVMLError as error:
                # Some cards (vGPU guests) have no events. That is not a fault.
                _log.warning("GPU reports no Xid events", uuid=uuid, error=str(error))

    def _wait_event(self, events: Any) -> None:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, _EVENT_WAIT_MS)
        except pynvml.NVMLError_Timeout:
            return
        except pynvml.NVMLError as error:
            _log.warning("waiting for Xid events failed", error=str(error))
            self._clock.wait(self._closing, 1.0)
            return
        # Identified by the handle that registered the event: a card off the bus cannot report its UUID.
        known = {_handle_address(handle): uuid for uuid, handle in self._handles_by_uuid().items()}
        self._handle_xid(int(event.eventData), known[_handle_address(event.device)])

    def _handle_xid(self, xid: int, uuid: str) -> None:
        effect, meaning = xids.classify_xid(xid), xids.describe_xid(xid)
        if effect is xids.XidEffect.HARMLESS:
            _log.info("ignored an Xid that does not affect its GPU", uuid=uuid, xid=xid, meaning=meaning)
            return
        with self._lock:
            if effect is xids.XidEffect.NEEDS_RESET:
                # The indicators of the last probe: after such an Xid a call on the card may never return.
                self._faults.record_needs_reset(
                    uuid, xid, self._indicators.get(uuid) or ResetIndicators(driver_load=_driver_load())
                )
            else:
                self._faults.record(uuid, meaning)
            self._update_reasons()


def _handle_address(handle: Any) -> int | None:
    """The address behind a handle, which identifies the card as long as the process lives."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _card_problem(handle: Any) -> str | None:
    """Why the card is not healthy; None if it is."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        pynvml.nvmlDeviceGetPciInfo(handle)
    except pynvml.NVMLError as error:
        return f"the GPU does not answer: {error}"
    action = _optional_number(lambda: _recovery_action(handle))
    if action:
        return f"the driver requests recovery action {action} (1: reset, 2: reboot, 3: drain)"
    if _optional_number(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)[3]):
        return "a row of its memory could not be remapped (nvidia-smi -q -d ROW_REMAPPER); replace the GPU"
    return None


def _processes(handle: Any) -> list[Any]:
    processes = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    # MPS clients may be in either of two lists. An older driver has no list of MPS processes, and puts all processes
    # into the list of compute processes.
    with contextlib.suppress(pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        processes += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    return processes


def _memory_by_pid(handle: Any) -> dict[int, MiB | None]:
    """The memory of each process; None if the driver does not report it."""
    used: dict[int, list[int]] = {}
    for process in _processes(handle):
        reported = [] if process.usedGpuMemory is None else [process.usedGpuMemory // _BYTES_PER_MIB]
        used.setdefault(process.pid, []).extend(reported)
    return {pid: MiB(max(mib)) if mib else None for pid, mib in used.items()}


def _sample_processes(handle: Any, since_us: int) -> list[ProcessSample]:
    """The memory of each process now, and its use since a time (microseconds since 1970).

    The driver has utilization samples only of processes that were busy. A process without a sample was idle, unless the
    card was busy and no process of it has a sample: then the driver does not say which one was.
    """
    memory = _memory_by_pid(handle)
    if not memory:
        return []
    utilization = _utilization_by_pid(handle, since_us)
    idle: float | None = 0.0
    if utilization is None or (
        not utilization.keys() & memory.keys()
        and _optional_number(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) != 0
    ):
        idle = None
    accounting = _optional_number(lambda: pynvml.nvmlDeviceGetAccountingMode(handle)) == pynvml.NVML_FEATURE_ENABLED
    samples = []
    for pid, mib in memory.items():
        sm_percent, bandwidth_percent = (utilization or {}).get(pid, (idle, idle))
        peak = _accounted_peak(handle, pid) if accounting else None
        samples.append(
            ProcessSample(
                pid=pid,
                memory=mib,
                peak_memory=peak,
                sm_percent=sm_percent,
                bandwidth_percent=bandwidth_percent,
            )
        )
    return samples


def _utilization_by_pid(handle: Any, since_us: int) -> dict[int, tuple[float, float]] | None:
    """Mean percent of SMs and of memory bandwidth by PID; None if the driver does not report them."""
    try:
        reported = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except pynvml.NVMLError as error:
        # The binding raises an error without a code of failure if there are no samples.
        return {} if error.value in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND) else None
    except (pynvml.NVMLLibraryMismatchError, AttributeError):
        return None
    samples_by_pid: dict[int, list[Any]] = {}
    for sample in reported:
        # Drivers fill unused entries of the buffer with zeros.
        if sample.pid and sample.timeStamp > since_us and sample.smUtil <= _FULL and sample.memUtil <= _FULL:
            samples_by_pid.setdefault(sample.pid, []).append(sample)
    return {
        pid: (
            sum(sample.smUtil for sample in samples) / len(samples),
            sum(sample.memUtil for sample in samples) / len(samples),
        )
        for pid, samples in samples_by_pid.items()
    }


def _accounted_peak(handle: Any, pid: int) -> MiB | None:
    peak = _optional_number(lambda: pynvml.nvmlDeviceGetAccountingStats(handle, pid).maxMemoryUsage)
    return None if peak is None else MiB(peak // _BYTES_PER_MIB)


def _in_mig_mode(handle: Any) -> bool:
    return bool(_optional_number(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]))


def _reset_indicators(handle: Any) -> ResetIndicators:
    rows = _optional_number(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)[2])
    pages = _optional_number(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    counted = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    action = _optional_number(lambda: _recovery_action(handle))
    return ResetIndicators(
        driver_load=_driver_load(),
        recovery_action=None if action is None else int(action != 0),
        pending_repairs=None if rows is None and pages is None else (rows or 0) + (pages or 0),
        uncorrected_errors=_optional_number(lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, *counted)),
        energy_mj=_optional_number(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
    )


def _optional_number(function: Callable[[], Any]) -> int | None:
    """The number that `function` reads; None if the card, the driver or the binding does not have it."""
    try:
        number = function()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, AttributeError):
        return None
    return None if number is None else int(number)


def _recovery_action(handle: Any) -> int | None:
    """The recovery action that the driver requests; 0: none, None: the driver does not report it."""
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return field.value.uiVal if field.nvmlReturn == pynvml.NVML_SUCCESS else None


def _driver_load() -> str:
    """The identity of this load of the driver: the boot ID, and the inode of the kernel module's folder in sysfs."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/sys/module/nvidia").stat().st_ino))
    return "/".join(parts)


def _read_card(index: int, handle: Any, driver: str) -> GpuCard:
    properties = {"driver": driver}

    def add_property(name: str, question: Callable[[], object]) -> None:
        # Properties that the card or driver does not have are left out; they are not needed for sharing.
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            properties[name] = str(question())

    # Selectors of ResourceClasses use these properties: driver, clock (the highest SM clock in MHz), architecture and
    # computeCapability.
    add_property("clock", lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    add_property("memoryClockMHz", lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM))
    add_property("architecture", lambda: _ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle), "unknown"))
    add_property("computeCapability", lambda: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))))
    minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    path = f"/dev/nvidia{minor}"
    return GpuCard(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        model=str(pynvml.nvmlDeviceGetName(handle)),
        memory=MiB(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // _BYTES_PER_MIB),
        reserved=_reserved_memory(handle),
        devices=(DevicePath(path, path),),
        pci_bus_id=str(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        properties=properties,
    )


def _reserved_memory(handle: Any) -> MiB:
    """The MiB that the driver keeps for itself, rounded up; 0 if the driver does not say."""
    reserved = _optional_number(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved)
    return MiB(-(-(reserved or 0) // _BYTES_PER_MIB))


_ARCHITECTURES = {
    number: name.removeprefix("NVML_DEVICE_ARCH_").capitalize()
    for name, number in vars(pynvml).items()
    if name.startswith("NVML_DEVICE_ARCH_")
}
