"""Devices other than GPUs: which of a node's devices are free, and which of them a pod gets.

A device is allocated as a whole, so the only question is which device a request gets. A device may be in several
classes, and a pod may request several classes, so this is a matching of requests to devices. It is solved exactly: a
node is refused only if no choice of devices fits. The lists and the index of cards do not contain these devices.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cardwise.core.api.assignment import AssignedDevice, Assignment
from cardwise.core.api.request import DeviceRequest
from cardwise.core.values.refusals import Refusal

GrantedDevices = Mapping[str, tuple[AssignedDevice, ...]]  # by container key, as in an assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a node. New pods do not get an unhealthy or cordoned device. `index` counts devices of one kind."""

    uuid: str
    kind: str
    index: int
    model: str = ""
    healthy: bool = True
    cordoned: bool = False
    classes: frozenset[str] = frozenset()

    @property
    def accepts_pods(self) -> bool:
        """Whether a pod may get the device if no pod holds it."""
        return self.healthy and not self.cordoned


def sort_devices(devices: Iterable[Device]) -> list[Device]:
    """The devices by kind, the lowest index first. Nodes list them, and pods get them, in this order."""
    return sorted(devices, key=lambda device: (device.kind, device.index, device.uuid))


def is_valid_grant(granted: Assignment, devices: Sequence[Device], hold_counts: Mapping[str, int]) -> bool:
    """Whether the devices of an assignment may still be used. The node must have them, and they must accept pods, be of
    the requested class, and be free of other pods.

    hold_counts: by UUID, how many pods hold a device, including the pod of this assignment.
    """
    devices_by_uuid = {device.uuid: device for device in devices}
    for share in granted.non_gpu_devices():
        device = devices_by_uuid.get(share.uuid)
        if device is None or not device.accepts_pods or share.resource_class not in device.classes:
            return False
        if hold_counts.get(share.uuid, 0) > 1:
            return False
    return True


def is_free(device: Device, hold_counts: Collection[str]) -> bool:
    """Whether a pod could get the device now.

    hold_counts: the UUIDs of devices that pods hold.
    """
    return device.accepts_pods and device.uuid not in hold_counts


class WantedDevices:
    """The devices that one pod requests, prepared for checking thousands of nodes."""

    def __init__(self, requests: Sequence[DeviceRequest]) -> None:
        self._requests = requests
        self.counts: dict[str, int] = {}  # by class
        for request in requests:
            self.counts[request.resource_class] = self.counts.get(request.resource_class, 0) + request.count

    def available(self, devices: Sequence[Device], hold_counts: Collection[str]) -> int | Refusal:
        """The number of free devices of the requested classes; a refusal if there are too few.

        devices: the node's devices.
        hold_counts: the UUIDs of devices that pods hold.
        """
        free = self._free(devices, hold_counts)
        return len(free) if self._are_enough(free) else self._refusal(devices)

    def grant(self, devices: Sequence[Device], hold_counts: Collection[str]) -> tuple[int, GrantedDevices] | Refusal:
        """As `available`, and the devices for each container."""
        free = self._free(devices, hold_counts)
        matched = self._match(free)
        if matched is None:
            return self._refusal(devices)
        granted: dict[str, tuple[AssignedDevice, ...]] = {}
        for request in self._requests:
            chosen = [free[matched[request.resource_class].popleft()].uuid for _ in range(request.count)]
            shares = tuple(AssignedDevice(request.resource_class, uuid) for uuid in chosen)
            granted[request.key] = granted.get(request.key, ()) + shares
        return len(free), granted

    def _of_classes(self, devices: Sequence[Device]) -> list[Device]:
        return [device for device in devices if not self.counts.keys().isdisjoint(device.classes)]

    def _free(self, devices: Sequence[Device], hold_counts: Collection[str]) -> list[Device]:
        return [device for device in self._of_classes(devices) if is_free(device, hold_counts)]

    def _refusal(self, devices: Sequence[Device]) -> Refusal:
        """Why too few devices are free. `NO_SUCH_DEVICE`: the node has too few devices even if all its pods end."""
        return Refusal.NO_DEVICE if self._are_enough(self._of_classes(devices)) else Refusal.NO_SUCH_DEVICE

    def _are_enough(self, devices: Sequence[Device]) -> bool:
        """Whether these devices, each of a requested class, are enough for all classes."""
        if len(self.counts) == 1:
            return len(devices) >= sum(self.counts.values())
        return self._match(devices) is not None

    def _match(self, devices: Sequence[Device]) -> dict[str, deque[int]] | None:
        """By class, the positions of its devices; each device is used at most once. None if there are too few."""
        if len(devices) < sum(self.counts.values()):
            return None
        assigned: dict[int, str] = {}  # by position of a device, the requested class that gets the device
        for name, count in self.counts.items():
            for _ in range(count):
                if not _assign_device(name, devices, assigned):
                    return None
        matched: dict[str, deque[int]] = {name: deque() for name in self.counts}
        for position in sorted(assigned):
            matched[assigned[position]].append(position)
        return matched


def _assign_device(name: str, devices: Sequence[Device], assigned: dict[int, str]) -> bool:
    """Assign one more device to the class. The class takes a free device, or a device that is assigned to another
    class, which then takes another device in the same way (an augmenting path). The shortest path is found first, so a
    free device of the class is taken if there is one. Returns False if there is no path.
    """
    takers: dict[int, str] = {}  # by position, the class that would take the device
    gives_up: dict[str, int | None] = {name: None}  # by class, the device that it would lose on the path
    waiting = deque([name])
    while waiting:
        taker = waiting.popleft()
        for i, device in enumerate(devices):
            if i in takers or taker not in device.classes:
                continue
            takers[i] = taker
            holder = assigned.get(i)
            if holder is None:
                position: int | None = i
                while position is not None:
                    assigned[position] = takers[position]
                    position = gives_up[takers[position]]
                return True
            if holder not in gives_up:
                gives_up[holder] = i
                waiting.append(holder)
    return False
