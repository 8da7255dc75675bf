"""Asks the kubelet whose container a slot is: PodResources for the name, the device checkpoint for the UID.

Allocate and PreStartContainer name devices and nothing else. Sharing systems that guess the pod from them give equal
pods each other's cards (gpushare-scheduler-extender #220, HAMi #404). Neither source is enough alone: PodResources has
no UID, and a name can belong to a new pod by now; the checkpoint has no pod name. Both must agree. The answer always
comes from a List that began after the question was asked; questions that come together share one.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import msgspec
from msgspec import Struct

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from deviceplugin.api import podresources_v1_pb2 as wire
from deviceplugin.sources.calls import Caller, CallFailed

T = TypeVar("T")

_SERVICE = wire.DESCRIPTOR.services_by_name["PodResourcesLister"]
LIST_TIMEOUT = 5.0
_RATE_LIMIT_PAUSE = 0.05  # the socket allows 100 calls/s after a burst of 10 (k:apis/podresources/constants.go)


class KubeletSilent(Exception):
    """The kubelet's sources did not answer; the call may be repeated."""


@dataclass(frozen=True, slots=True)
class NamedContainer:
    """As PodResources knows it."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class KnownContainer:
    """As the checkpoint knows it."""

    pod_uid: str
    container: str


@dataclass(frozen=True, slots=True)
class Holders:
    """The holders of each slot, by both sources. More than one: the kubelet has given a slot away twice."""

    named: dict[str, list[NamedContainer]]
    known: dict[str, list[KnownContainer]]


class _Entry(Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs", default=None)


class _Data(Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None
    registered_devices: dict[str, list[str] | None] | None = None


class Checkpoint(Struct, rename="pascal"):
    """The kubelet's file of who has which devices, as much of it as is read."""

    data: _Data


decode_checkpoint = msgspec.json.Decoder(Checkpoint).decode


def parse_checkpoint(content: bytes) -> dict[str, list[KnownContainer]]:
    """Containers by slot. Raises KubeletSilent."""
    try:
        entries = decode_checkpoint(content).data.pod_device_entries or ()
    except msgspec.DecodeError as error:
        raise KubeletSilent(f"the kubelet's device checkpoint is unreadable: {error}") from error
    known: dict[str, list[KnownContainer]] = defaultdict(list)
    for entry in entries:
        if entry.resource_name == names.SHARE:
            for slots in (entry.device_ids or {}).values():
                for slot in slots or ():
                    known[slot].append(KnownContainer(entry.pod_uid, entry.container_name))
    return dict(known)


def parse_listing(listing: wire.ListPodResourcesResponse) -> dict[str, list[NamedContainer]]:
    """Containers by slot."""
    named: dict[str, list[NamedContainer]] = defaultdict(list)
    for pod in listing.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name == names.SHARE:
                    for slot in devices.device_ids:
                        named[slot].append(NamedContainer(pod.namespace, pod.name, container.name))
    return dict(named)


class Kubelet:
    """The sources of one kubelet below its root folder."""

    def __init__(self, folder: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._socket = folder / "pod-resources" / "kubelet.sock"
        self._checkpoint = folder / "device-plugins" / "kubelet_internal_checkpoint"
        self._pod_resources = Caller(self._socket, _SERVICE)
        self._fresh = Shared(self._read, clock)

    def holders(self) -> Holders:
        """The holders of slots, from a look that began after this call. Raises KubeletSilent."""
        return self._fresh.get()

    def checkpoint(self) -> dict[str, list[KnownContainer]]:
        """Containers by slot. Raises KubeletSilent."""
        try:
            content = self._checkpoint.read_bytes()
        except OSError as error:
            raise KubeletSilent(f"the kubelet's device checkpoint is unreadable: {error}") from error
        return parse_checkpoint(content)

    def close(self) -> None:
        self._pod_resources.close()

    def _read(self) -> Holders:
        listing = self._list()
        # After the List: the kubelet writes the checkpoint before a container may start, so it has all of them.
        return Holders(named=parse_listing(listing), known=self.checkpoint())

    def _list(self) -> wire.ListPodResourcesResponse:
        deadline = self._clock.now() + LIST_TIMEOUT
        while True:
            try:
                return self._pod_resources.call("List", wire.ListPodResourcesRequest(), LIST_TIMEOUT)
            except CallFailed as error:
                if self._clock.now() >= deadline or error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise KubeletSilent(f"PodResources at {self._socket}: {error}") from error
            self._clock.sleep(_RATE_LIMIT_PAUSE)


class Shared(Generic[T]):
    """Runs `call` for many threads at once: each gets a result, or the exception, of a run begun after it asked."""

    def __init__(self, call: Callable[[], T], clock: Clock = SYSTEM) -> None:
        self._call = call
        self._clock = clock
        self._changed = threading.Condition()
        self._running = False
        self._begun = 0
        self._done = 0
        self._result: T | None = None
        self._error: BaseException | None = None

    def get(self) -> T:
        with self._changed:
            wanted = self._begun + 1
            self._clock.wait_for(self._changed, lambda: self._done >= wanted or not self._running, None)
            if self._done >= wanted:
                return self._outcome()
            self._running = True
            self._begun += 1
        result, failure = None, None
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to every thread that waits for it
            failure = error
        with self._changed:
            self._result, self._error = result, failure
            self._done = self._begun
            self._running = False
            self._changed.notify_all()
            return self._outcome()

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
