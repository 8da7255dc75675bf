"""Reads from the kubelet which container has a slot: PodResources names the pod, the device checkpoint has its UID.

Allocate and PreStartContainer pass only device IDs. Sharing systems that guess the pod from these IDs swap the cards of
equal pods (gpushare-scheduler-extender #220, HAMi #404). Neither source is enough alone. PodResources has no UID, and a
new pod may have the same name by now. The checkpoint has no pod name. Both must agree. Each caller gets the response of
a List call that began after the caller's own call; concurrent callers share one List call.
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
from deviceplugin.sources.calls import CallFailed, GrpcCaller

T = TypeVar("T")

_SERVICE = wire.DESCRIPTOR.services_by_name["PodResourcesLister"]
LIST_TIMEOUT = 5.0
# Seconds before a failed List call is repeated: the socket allows 100 calls/s after a burst of 10
# (k:apis/podresources/constants.go).
_RATE_LIMIT_PAUSE_SECONDS = 0.05


class KubeletUnavailable(Exception):
    """PodResources or the checkpoint cannot be read; the call may be repeated."""


@dataclass(frozen=True, slots=True)
class PodResourcesContainer:
    """A container as PodResources lists it."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class CheckpointContainer:
    """A container as the device checkpoint lists it."""

    pod_uid: str
    container: str


@dataclass(frozen=True, slots=True)
class Holders:
    """The containers that hold each slot, from each of the two sources. A slot with several containers was allocated
    twice.
    """

    pod_resources: dict[str, list[PodResourcesContainer]]
    checkpoint: dict[str, list[CheckpointContainer]]


class _Entry(Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs", default=None)


class _CheckpointData(Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None
    registered_devices: dict[str, list[str] | None] | None = None


class Checkpoint(Struct, rename="pascal"):
    """The fields of the kubelet's device checkpoint that Cardwise reads."""

    data: _CheckpointData


decode_checkpoint = msgspec.json.Decoder(Checkpoint).decode


def parse_checkpoint(content: bytes) -> dict[str, list[CheckpointContainer]]:
    """Parse the checkpoint into containers by slot. Raises KubeletUnavailable."""
    try:
        entries = decode_checkpoint(content).data.pod_device_entries or ()
    except msgspec.DecodeError as error:
        raise KubeletUnavailable(f"the kubelet's device checkpoint is unreadable: {error}") from error
    containers_by_slot: dict[str, list[CheckpointContainer]] = defaultdict(list)
    for entry in entries:
        if entry.resource_name == names.SHARE:
            for slots in (entry.device_ids or {}).values():
                for slot in slots or ():
                    containers_by_slot[slot].append(CheckpointContainer(entry.pod_uid, entry.container_name))
    return dict(containers_by_slot)


def parse_pod_resources(listing: wire.ListPodResourcesResponse) -> dict[str, list[PodResourcesContainer]]:
    """Parse a PodResources response into containers by slot."""
    containers_by_slot: dict[str, list[PodResourcesContainer]] = defaultdict(list)
    for pod in listing.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name == names.SHARE:
                    for slot in devices.device_ids:
                        containers_by_slot[slot].append(PodResourcesContainer(pod.namespace, pod.name, container.name))
    return dict(containers_by_slot)


class Kubelet:
    """Reads PodResources and the device checkpoint of a kubelet.

    folder: the kubelet's root folder.
    """

    def __init__(self, folder: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._socket = folder / "pod-resources" / "kubelet.sock"
        self._checkpoint = folder / "device-plugins" / "kubelet_internal_checkpoint"
        self._pod_resources = GrpcCaller(self._socket, _SERVICE)
        self._shared_read = SharedCall(self._read_holders, clock)

    def holders(self) -> Holders:
        """The holders of each slot, read after this call began. Raises KubeletUnavailable."""
        return self._shared_read.get()

    def checkpoint(self) -> dict[str, list[CheckpointContainer]]:
        """The containers by slot, from the device checkpoint. Raises KubeletUnavailable."""
        try:
            content = self._checkpoint.read_bytes()
        except OSError as error:
            raise KubeletUnavailable(f"the kubelet's device checkpoint is unreadable: {error}") from error
        return parse_checkpoint(content)

    def close(self) -> None:
        self._pod_resources.close()

    def _read_holders(self) -> Holders:
        listing = self._list_pod_resources()
        # Read after the List call: the kubelet writes the checkpoint before a container may start, so all containers
        # are in it.
        return Holders(pod_resources=parse_pod_resources(listing), checkpoint=self.checkpoint())

    def _list_pod_resources(self) -> wire.ListPodResourcesResponse:
        deadline = self._clock.now() + LIST_TIMEOUT
        while True:
            try:
                return self._pod_resources.call("List", wire.ListPodResourcesRequest(), LIST_TIMEOUT)
            except CallFailed as error:
                if self._clock.now() >= deadline or error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise KubeletUnavailable(f"PodResources at {self._socket}: {error}") from error
            self._clock.sleep(_RATE_LIMIT_PAUSE_SECONDS)


class SharedCall(Generic[T]):
    """Runs a function once for several threads that call at the same time; all get its return value or exception."""

    def __init__(self, call: Callable[[], T], clock: Clock = SYSTEM) -> None:
        self._call = call
        self._clock = clock
        self._changed = threading.Condition()
        self._running = False
        self._started_runs = 0
        self._finished_runs = 0
        self._return_value: T | None = None
        self._error: BaseException | None = None

    def get(self, seconds: float | None = None, *, joins: bool = False) -> T:
        """Return the value, or raise the exception, of a run that began after this call.

        seconds: how long to wait for a run in another thread. Raises TimeoutError when that time is over.
        joins: whether the value of a run that is already in progress may be returned too.
        """
        with self._changed:
            run = self._started_runs + (0 if joins and self._running else 1)
            self._clock.wait_for(self._changed, lambda: self._finished_runs >= run or not self._running, seconds)
            if self._finished_runs >= run:
                return self._raise_or_return()
            if self._running:
                raise TimeoutError
            self._running = True
            self._started_runs += 1
        return_value, failure = None, None
        try:
            return_value = self._call()
        except BaseException as error:  # noqa: BLE001 - every waiting thread raises it
            failure = error
        with self._changed:
            self._return_value, self._error = return_value, failure
            self._finished_runs = self._started_runs
            self._running = False
            self._changed.notify_all()
            return self._raise_or_return()

    def _raise_or_return(self) -> T:
        if self._error is not None:
            raise self._error
        return self._return_value  # type: ignore[return-value]
