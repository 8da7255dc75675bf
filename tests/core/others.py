"""Devices that are no GPUs, pods that ask for them and pods that hold them."""

from cardwise.core.api import names, request
from cardwise.core.api.assignment import AssignedDevice, Assignment
from cardwise.core.placement.devices import Device
from cardwise.core.placement.holding import Holding
from tests.build import container, pod


def device(index, *classes, node="n1", kind="rdma", healthy=True):
    """A device in the class of its kind, unless other classes are given."""
    of = frozenset(classes or {kind})
    return Device(uuid=uuid(index, node=node, kind=kind), kind=kind, index=index, healthy=healthy, classes=of)


def uuid(index, *, node="n1", kind="rdma"):
    return f"{kind}-{node}-{index}"


def devices(count, *classes, **fields):
    return [device(i, *classes, **fields) for i in range(count)]


def wanting(container_manifest=None, **counts):
    """A container that asks for so many of these classes, as the webhook leaves it."""
    container_manifest = container_manifest or container()
    limits = {f"{names.CLASS_PREFIX}{name}": str(count) for name, count in counts.items()}
    return container_manifest | {
        "resources": {"limits": container_manifest["resources"]["limits"] | limits | {names.SHARE: "1"}}
    }


def asking(*containers, of_devices=("rdma", "nic", "fast"), **fields):
    """A pod of such containers, as the webhook leaves it."""
    annotations = {names.DEVICE_CLASSES: request.write_device_classes(of_devices)}
    return pod(containers=list(containers), annotations=annotations, **fields)


def parse_request(*containers, **fields):
    return request.parse_mutated(asking(*containers, **fields))


def holding(uid, *indices, node="n1", kind="rdma", containers=None):
    """A pod that holds these devices, and perhaps shares of cards."""
    shares = tuple(AssignedDevice(kind, uuid(i, node=node, kind=kind)) for i in indices)
    return Holding(uid, "default", uid, node, Assignment(containers or {}, {"0": shares}))
