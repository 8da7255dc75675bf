"""Cards of NVIDIA's driver, by NVML.

Health has two sources. Xid events say at once that a card failed. Probing says that it does not answer, and it is the
only thing that can say that it is well again: `faults` knows when that is.

A call on a card that has failed may never return. So each call on a card has a thread of its own (`calls`), and the
threads that serve all cards never call one: a card that hangs must not hide what happens to the others.
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
from cardwise.gpus.calls import Call
from cardwise.gpus.faults import Faults, Marks
from cardwise.gpus.protocol import (
    IN_MIG_MODE,
    CardUnwilling,
    ComputeMode,
    DevicePath,
    GpuCard,
    GpuProcess,
    GpusUnavailable,
    Health,
)

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_MIB = 1024 * 1024
_EVENT_WAIT_MS = 500
_PROBE_SECONDS = 5.0
_START_SECONDS = 30.0  # without nvidia-persistenced a driver takes seconds for the first call on each card
_ANSWER_SECONDS = 5.0
_SILENT_SECONDS = 20.0  # without an answer until a card is unhealthy
_HANGS = (
    f"the card does not answer: a call of NVML has not returned for {_SILENT_SECONDS:.0f} s; see dmesg, and reset the "
    "card or reboot the node if it stays so"
)
_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: ComputeMode.DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: ComputeMode.PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeMode.EXCLUSIVE_PROCESS,
}


class NvmlGpus:
    """`Gpus` of this machine."""

    def __init__(
        self,
        *,
        faults: Path | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
    ) -> None:
        """`faults`: the file in which it is kept which cards need a reset. `on_failure` hears which thread met an
        unforeseen error. A card that does not answer within `_START_SECONDS` comes later. Raises GpusUnavailable where
        there is no driver.
        """
        try:
            pynvml.nvmlInit()
            self._driver = str(pynvml.nvmlSystemGetDriverVersion())
            self._missing = dict.fromkeys(range(pynvml.nvmlDeviceGetCount()), "")  # index -> why it is not in `cards`
        except pynvml.NVMLError as error:
            raise GpusUnavailable(
                f"NVML does not start ({error}); is the NVIDIA driver installed, and its library mounted into this "
                "container? For simulated cards give --simulated-cards FILE"
            ) from error
        self._on_failure = on_failure
        self._clock = clock
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._cards: list[GpuCard] = []
        self._faults = Faults(faults, clock)
        self._marks: dict[str, Marks] = {}  # at the last look
        self._answered = dict.fromkeys(self._missing, clock.now())  # index -> when a look at it ended last
        self._looks: dict[int, Call[None]] = {}  # the last of each index
        self._given_up: dict[str, Call[Any]] = {}  # UUID -> a question that was not answered in time
        self._reasons: Mapping[str, str] = {}  # why cards take no new shares
        self._mig: set[str] = set()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._look(_START_SECONDS)
        self._changed.clear()
        self._threads = [
            threading.Thread(target=self._probe, name="nvml-probe", daemon=True),
            threading.Thread(target=self._listen, name="nvml-xids", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def cards(self) -> list[GpuCard]:
        with self._lock:
            return list(self._cards)

    def silent(self) -> list[int]:
        with self._lock:
            return sorted(self._missing)

    def health(self) -> Mapping[str, Health]:
        with self._lock:
            reasons = self._reasons
            return {
                card.uuid: Health(
                    healthy=card.uuid not in reasons, reason=reasons.get(card.uuid, ""), mig=card.uuid in self._mig
                )
                for card in self._cards
            }

    def wait_change(self, timeout: float) -> bool:
        changed = self._clock.wait(self._changed, timeout)
        self._changed.clear()
        return changed and not self._closing.is_set()

    def compute_mode(self, uuid: str) -> ComputeMode:
        # EXCLUSIVE_THREAD, which drivers have not taken for years, is as closed as a card can be.
        return _MODES.get(self._ask(uuid, pynvml.nvmlDeviceGetComputeMode), ComputeMode.PROHIBITED)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        number = next(number for number, named in _MODES.items() if named is mode)
        self._ask(uuid, lambda handle: pynvml.nvmlDeviceSetComputeMode(handle, number))

    def processes(self, uuid: str) -> list[GpuProcess]:
        used: dict[int, list[int]] = {}
        for one in self._ask(uuid, _processes):
            told = [] if one.usedGpuMemory is None else [one.usedGpuMemory // _MIB]
            used.setdefault(one.pid, []).extend(told)
        return [GpuProcess(pid, MiB(max(mib)) if mib else None) for pid, mib in used.items()]

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        for thread in self._threads:
            self._clock.join(thread, 5.0)
        # It may wait for a call that hangs.
        Call(pynvml.nvmlShutdown, "nvml-shutdown", self._clock).over(5.0)

    def _ask(self, uuid: str, question: Callable[[Any], T]) -> T:
        """The answer of the card with this UUID. Raises CardUnwilling, also when it does not answer in time.

        While a question to the card hangs, no other is asked: each would take a thread that does not end.
        """
        handle = self._known().get(uuid)
        if handle is None:
            raise CardUnwilling(f"card {uuid} is not on this machine")
        with self._lock:
            before = self._given_up.get(uuid)
        call = Call(lambda: question(handle), "nvml-call", self._clock) if before is None or before.over() else before
        if call is before or not call.over(_ANSWER_SECONDS):
            with self._lock:
                self._given_up[uuid] = call
            raise CardUnwilling(f"card {uuid}: a call of NVML has not returned")
        try:
            return call.answer()
        except pynvml.NVMLError as error:
            raise CardUnwilling(f"card {uuid}: {error}") from error

    def _find(self, index: int) -> None:
        """Enters the card if it answers. One that has fallen off the bus must not take the others down with it."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            card = _describe(index, handle, self._driver)
        except pynvml.NVMLError as error:
            self._leave_out(index, str(error))
            return
        with self._lock:
            del self._missing[index]
            self._handles[card.uuid] = handle
            self._cards = sorted([*self._cards, card], key=lambda card: card.index)
        self._changed.set()

    def _leave_out(self, index: int, why: str) -> None:
        with self._lock:
            before, self._missing[index] = self._missing[index], why
        if why != before:
            _log.error("a card does not answer and is left out until it does", index=index, error=why)

    def _probe(self) -> None:
        while not self._clock.wait(self._closing, _PROBE_SECONDS):
            try:
                self._look()
            except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
                self._failed("nvml-probe")

    def _look(self, patience: float = _PROBE_SECONDS) -> None:
        """Looks at each card, but not at one where the last look has not ended. Waits for the looks that it began,
        `patience` seconds at most.
        """
        began = []
        for index in self._answered:
            if index not in self._looks or self._looks[index].over():  # else each round would leave a thread behind
                self._looks[index] = Call(partial(self._look_at, index), f"nvml-probe-{index}", self._clock)
                began.append(self._looks[index])
        until = self._clock.now() + patience
        for look in began:
            look.over(until - self._clock.now())
        for index, look in self._looks.items():
            if not look.over() and self._clock.now() - self._answered[index] >= _SILENT_SECONDS:
                self._note_silent(index)

    def _look_at(self, index: int) -> None:
        """In a thread of its own, since each call may hang; none is made with the lock."""
        try:
            if index in self._missing:
                self._find(index)
            with self._lock:
                uuids = [card.uuid for card in self._cards if card.index == index]
            for uuid in uuids:
                self._look_into(uuid)
        except Exception:  # noqa: BLE001 - the thread's outermost function: logged, and the next look goes on
            self._failed("nvml-probe")
        self._answered[index] = self._clock.now()

    def _look_into(self, uuid: str) -> None:
        with self._lock:
            handle, lasting = self._handles[uuid], self._faults.lasting(uuid)
        mig = _in_mig_mode(handle)
        trouble = _trouble(handle) or (IN_MIG_MODE if mig else "")
        marks = _marks(handle)
        with self._lock:
            self._faults.note(uuid, trouble)
            if mig != (uuid in self._mig):
                self._mig ^= {uuid}
                self._changed.set()
            if lasting is not None:
                self._faults.note_marks(uuid, lasting, marks)
            self._marks[uuid] = marks
            self._tell()

    def _note_silent(self, index: int) -> None:
        if index in self._missing:
            self._leave_out(index, _HANGS)
        with self._lock:
            for card in self._cards:
                if card.index == index:
                    self._faults.note(card.uuid, _HANGS)
            self._tell()

    def _failed(self, thread: str) -> None:
        _log.exception("the cards' health is not looked at", thread=thread)
        self._on_failure(thread)

    def _known(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._handles)

    def _tell(self) -> None:
        """With the lock."""
        before, after = self._reasons, self._faults.reasons()
        for uuid in before.keys() | after.keys():
            if uuid not in after:
                _log.info("card is well again", uuid=uuid)
            elif before.get(uuid) != after[uuid]:
                _log.error("card is unhealthy", uuid=uuid, reason=after[uuid])
        if before != after:
            self._reasons = after
            self._changed.set()

    def _listen(self) -> None:
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.warning("no Xid events; health comes from probing alone", error=str(error))
            return
        asked: set[str] = set()
        try:
            while not self._closing.is_set():
                try:
                    self._ask_for_events(events, asked)
                    self._take_event(events)
                except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
                    self._failed("nvml-xids")
                    self._clock.wait(self._closing, 1.0)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _ask_for_events(self, events: Any, asked: set[str]) -> None:
        for uuid, handle in self._known().items():
            if uuid in asked:
                continue
            asked.add(uuid)
            ask = partial(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            call = Call(ask, "nvml-call", self._clock)
            try:
                if call.over(_ANSWER_SECONDS):
                    call.answer()
            except pynvml.NVMLError as error:
                # Some cards (vGPU guests) know no events. That is no fault of theirs.
                _log.warning("the card reports no Xid events", uuid=uuid, error=str(error))

    def _take_event(self, events: Any) -> None:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, _EVENT_WAIT_MS)
        except pynvml.NVMLError_Timeout:
            return
        except pynvml.NVMLError as error:
            _log.warning("waiting for Xid events failed", error=str(error))
            self._clock.wait(self._closing, 1.0)
            return
        # Known by the handle that the event was asked for with: a card off the bus cannot say who it is.
        known = {_address(handle): uuid for uuid, handle in self._known().items()}
        self._take_xid(int(event.eventData), known[_address(event.device)])

    def _take_xid(self, xid: int, uuid: str) -> None:
        answer, meaning = xids.answer(xid), xids.describe(xid)
        if answer is xids.XidEffect.GOES_ON:
            _log.info("an Xid that leaves its card as it is", uuid=uuid, xid=xid, meaning=meaning)
            return
        with self._lock:
            if answer is xids.XidEffect.NEEDS_RESET:
                # The marks of the last look: after such an Xid a call on the card may never return.
                self._faults.break_down(uuid, xid, self._marks.get(uuid) or Marks(load=_driver_load()))
            else:
                self._faults.note(uuid, meaning)
            self._tell()


def _address(handle: Any) -> int | None:
    """What a handle is for NVML: one for each card, as long as the process lives."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _trouble(handle: Any) -> str:
    """In what way the card does not answer as it should; "" when it does."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        pynvml.nvmlDeviceGetPciInfo(handle)
    except pynvml.NVMLError as error:
        return f"the card does not answer: {error}"
    action = _answer(lambda: _recovery_action(handle))
    if action:
        return f"the driver asks for recovery action {action} (1: reset, 2: reboot, 3: drain)"
    if _answer(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)[3]):
        return "a row of its memory could not be remapped (nvidia-smi -q -d ROW_REMAPPER); the card is to be replaced"
    return ""


def _processes(handle: Any) -> list[Any]:
    found = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    # Which of the two lists has the clients of MPS is not said; a driver without the second has them in the first.
    with contextlib.suppress(pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        found += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    return found


def _in_mig_mode(handle: Any) -> bool:
    return bool(_answer(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]))


def _marks(handle: Any) -> Marks:
    rows = _answer(lambda: pynvml.nvmlDeviceGetRemappedRows(handle)[2])
    pages = _answer(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    counted = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    action = _answer(lambda: _recovery_action(handle))
    return Marks(
        load=_driver_load(),
        asked=None if action is None else int(action != 0),
        pending=None if rows is None and pages is None else (rows or 0) + (pages or 0),
        uncorrected=_answer(lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, *counted)),
        energy=_answer(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
    )


def _answer(question: Callable[[], Any]) -> int | None:
    """None where the card, the driver or the binding has none."""
    try:
        value = question()
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, AttributeError):
        return None
    return None if value is None else int(value)


def _recovery_action(handle: Any) -> int | None:
    """None where the driver does not say; 0: none is due."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return value.value.uiVal if value.nvmlReturn == pynvml.NVML_SUCCESS else None


def _driver_load() -> str:
    """Names the life of the driver that runs: the machine's, and the kernel module's, whose folder is made anew."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        found.append(str(Path("/sys/module/nvidia").stat().st_ino))
    return "/".join(found)


def _describe(index: int, handle: Any, driver: str) -> GpuCard:
    properties = {"driver": driver}

    def ask(name: str, question: Callable[[], object]) -> None:
        # What a card or driver does not know is left out; no property is needed for sharing.
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            properties[name] = str(question())

    # Selectors of ResourceClasses name these: driver, clock (MHz, the highest of the SMs), architecture and
    # computeCapability. `clockMHz` is `clock` under its older name.
    for name in ("clock", "clockMHz"):
        ask(name, lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    ask("memoryClockMHz", lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM))
    ask("architecture", lambda: _ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle), "unknown"))
    ask("computeCapability", lambda: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))))
    minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    path = f"/dev/nvidia{minor}"
    return GpuCard(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        model=str(pynvml.nvmlDeviceGetName(handle)),
        memory=MiB(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // _MIB),
        devices=(DevicePath(path, path),),
        pci_bus_id=str(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        properties=properties,
    )


_ARCHITECTURES = {
    value: name.removeprefix("NVML_DEVICE_ARCH_").capitalize()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_DEVICE_ARCH_")
}
