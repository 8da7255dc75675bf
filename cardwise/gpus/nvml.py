"""Cards of NVIDIA's driver, by NVML.

Health has two sources. Xid events say at once that a card failed. Probing says that it does not answer, and it is the
only thing that can say that it is well again, which other plugins never notice (peers.md C13): a card comes back when
it has answered for a quiet time and the driver asks for no reset.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pynvml
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.quantity import MiB
from cardwise.gpus import xids
from cardwise.gpus.protocol import (
    HEALTHY,
    CardUnwilling,
    ComputeMode,
    DevicePath,
    GpuCard,
    GpuProcess,
    GpusUnavailable,
    Health,
)

_log = structlog.get_logger(__name__)

_MIB = 1024 * 1024
_EVENT_WAIT_MS = 500
_PROBE_SECONDS = 5.0
_QUIET_SECONDS = 30.0  # without a fault until a card is well again
_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: ComputeMode.DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED: ComputeMode.PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: ComputeMode.EXCLUSIVE_PROCESS,
}
_FIELD_RECOVERY_ACTION = getattr(pynvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)


class NvmlGpus:
    """`Gpus` of this machine."""

    def __init__(
        self,
        *,
        ignored_xids: frozenset[int] = frozenset(),
        on_failure: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
    ) -> None:
        """`on_failure` hears which thread met an unforeseen error. Raises GpusUnavailable where there is no driver."""
        try:
            pynvml.nvmlInit()
            self._driver = str(pynvml.nvmlSystemGetDriverVersion())
            self._missing = dict.fromkeys(range(pynvml.nvmlDeviceGetCount()), "")  # index -> why it is not in `cards`
        except pynvml.NVMLError as error:
            raise GpusUnavailable(
                f"NVML does not start ({error}); is the NVIDIA driver installed, and its library mounted into this "
                "container? For simulated cards give --simulated-cards FILE"
            ) from error
        self._ignored = ignored_xids
        self._on_failure = on_failure
        self._clock = clock
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._cards: list[GpuCard] = []
        self._faults: dict[str, tuple[str, float]] = {}  # uuid -> reason, when it was last seen
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._find_missing()
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

    def health(self) -> Mapping[str, Health]:
        with self._lock:
            return {
                card.uuid: Health(healthy=False, reason=self._faults[card.uuid][0])
                if card.uuid in self._faults
                else HEALTHY
                for card in self._cards
            }

    def wait_change(self, timeout: float) -> bool:
        changed = self._clock.wait(self._changed, timeout)
        self._changed.clear()
        return changed and not self._closing.is_set()

    def compute_mode(self, uuid: str) -> ComputeMode:
        with self._asking(uuid) as handle:
            # EXCLUSIVE_THREAD, which drivers have not taken for years, is as closed as a card can be.
            return _MODES.get(pynvml.nvmlDeviceGetComputeMode(handle), ComputeMode.PROHIBITED)

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        number = next(number for number, named in _MODES.items() if named is mode)
        with self._asking(uuid) as handle:
            pynvml.nvmlDeviceSetComputeMode(handle, number)

    def processes(self, uuid: str) -> list[GpuProcess]:
        with self._asking(uuid) as handle:
            found = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            # Which of the two lists has the clients of MPS is not said; a driver without the second has them in the
            # first.
            with contextlib.suppress(pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
                found += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        used: dict[int, list[int]] = {}
        for one in found:
            told = [] if one.usedGpuMemory is None else [one.usedGpuMemory // _MIB]
            used.setdefault(one.pid, []).extend(told)
        return [GpuProcess(pid, MiB(max(mib)) if mib else None) for pid, mib in used.items()]

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        for thread in self._threads:
            self._clock.join(thread, 5.0)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    @contextlib.contextmanager
    def _asking(self, uuid: str) -> Iterator[Any]:
        handle = self._known().get(uuid)
        if handle is None:
            raise CardUnwilling(f"card {uuid} is not on this machine")
        try:
            yield handle
        except pynvml.NVMLError as error:
            raise CardUnwilling(f"card {uuid}: {error}") from error

    def _find_missing(self) -> None:
        """Enters the cards that answer. One that has fallen off the bus must not take the others down with it."""
        for index, before in list(self._missing.items()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                card = _describe(index, handle, self._driver)
            except pynvml.NVMLError as error:
                if str(error) != before:
                    _log.error("a card does not answer and is left out until it does", index=index, error=str(error))
                self._missing[index] = str(error)
                continue
            del self._missing[index]
            with self._lock:
                self._handles[card.uuid] = handle
                self._cards = sorted([*self._cards, card], key=lambda card: card.index)
            self._changed.set()

    def _probe(self) -> None:
        while not self._clock.wait(self._closing, _PROBE_SECONDS):
            try:
                self._find_missing()
                for uuid, handle in self._known().items():
                    self._judge(uuid, _trouble(handle), self._clock.now())
            except Exception:  # noqa: BLE001 - the thread's outermost loop: logged, and it goes on
                self._failed("nvml-probe")

    def _failed(self, thread: str) -> None:
        _log.exception("the cards' health is not looked at", thread=thread)
        self._on_failure(thread)
        self._clock.wait(self._closing, 1.0)

    def _known(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._handles)

    def _judge(self, uuid: str, trouble: str, now: float) -> None:
        with self._lock:
            before = self._faults.get(uuid)
            if trouble:
                self._faults[uuid] = (trouble, now)
            elif before is not None and now - before[1] >= _QUIET_SECONDS:
                del self._faults[uuid]
            after = self._faults.get(uuid)
        if (before and before[0]) != (after and after[0]):
            if after:
                _log.error("card is unhealthy", uuid=uuid, reason=after[0])
            else:
                _log.info("card is well again", uuid=uuid)
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
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _ask_for_events(self, events: Any, asked: set[str]) -> None:
        for uuid, handle in self._known().items():
            if uuid in asked:
                continue
            asked.add(uuid)
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
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
        xid = int(event.eventData)
        try:
            named = [str(pynvml.nvmlDeviceGetUUID(event.device))]
        except pynvml.NVMLError:
            named = list(self._known())  # a card that cannot say who it is: until the probe knows better, any
        if not xids.is_sick(xid, self._ignored):
            _log.info("an application failed on a card", uuid=named[0], xid=xid, meaning=xids.describe(xid))
            return
        for uuid in named:
            self._judge(uuid, xids.describe(xid), self._clock.now())


def _trouble(handle: Any) -> str:
    """Why the card does not answer as it should; "" when it does."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        pynvml.nvmlDeviceGetPciInfo(handle)
    except pynvml.NVMLError as error:
        return f"the card does not answer: {error}"
    if _FIELD_RECOVERY_ACTION is not None:
        with contextlib.suppress(pynvml.NVMLError):
            (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [_FIELD_RECOVERY_ACTION])
            if value.nvmlReturn == pynvml.NVML_SUCCESS and value.value.uiVal != 0:
                return f"the driver asks for recovery action {value.value.uiVal} (1: reset, 2: reboot, 3: drain)"
    return ""


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
