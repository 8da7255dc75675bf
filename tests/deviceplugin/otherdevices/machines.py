"""A machine with devices that are not GPUs, from its sysfs on, and pods that were given some."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from cardwise.core.api import names
from cardwise.core.api.assignment import AssignedDevice, Assignment, CardShare
from cardwise.devices.offered import OfferedDevices
from tests.deviceplugin.conftest import NODE, P100, RESOURCES, Rig, card_uuid
from tests.devices.trees import Tree, connectx5

FIRST, SECOND, FPGA = "rdma-0c42-a103-0016-0542", "rdma-0c42-a103-0016-0543", "pci-n1-0000-d8-00.0"
FILE = """
devices:
  - {kind: rdma}
  - {kind: fpga, pci: {class: "1200"}}
"""


class Machine:
    """A rig with a ConnectX-5, both ports up, and an FPGA bound to vfio-pci."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.tree = Tree(rig.folder)
        self.ports = connectx5(self.tree)
        self.tree.port(self.ports[1], 1, "4: ACTIVE")
        self.tree.pci("0000:d8:00.0", "10ee", "9038", "120000", driver="vfio-pci", group="42")
        self.tree.misc("vfio", "10:196")
        paths = ("uverbs0", "uverbs1", "umad0", "umad2", "rdma_cm")
        for position, path in enumerate([*(f"infiniband/{name}" for name in paths), "vfio/42", "vfio/vfio"]):
            self.tree.node(path, os.makedev(4, 30 + position))
        self.file = rig.folder / "devices.yaml"
        self.file.write_text(FILE)

    def start(self) -> Rig:
        self.rig.devices = OfferedDevices(
            self.file, sysfs=self.tree.sysfs, dev=self.tree.dev, node=NODE, clock=self.rig.clock
        )
        self.rig.start()
        return self.rig

    def resource(self, name: str) -> dict:
        return self.rig.api.get(f"{RESOURCES}/{name}") or {}

    def status(self, name: str) -> dict:
        return self.resource(name).get("status") or {}

    def healthy(self, name: str, *, is_healthy: bool = True) -> dict:
        self.rig.settle()
        status = self.status(name)
        assert status.get("health") == ("Healthy" if is_healthy else "Unhealthy")
        return status


def bind(
    rig: Rig,
    name: str,
    devices: Mapping[str, Sequence[tuple[str, str]]],
    shares: Mapping[str, tuple[int, int]] | None = None,
) -> dict:
    """A bound pod: by container key, its devices as (class, UUID) and its share as (card index, MiB)."""
    cards = {key: (CardShare(index, card_uuid(index), mib, 0, P100),) for key, (index, mib) in (shares or {}).items()}
    others = {
        key: tuple(AssignedDevice(*device) for device in devices_of_key) for key, devices_of_key in devices.items()
    }
    limits = {}
    for key in sorted({*cards, *others}):
        classes = Counter(names.CLASS_PREFIX + resource_class for resource_class, _ in devices.get(key, ()))
        limits[f"c{key}"] = {names.SHARE: "1"} | {name: str(count) for name, count in classes.items()}
    return rig.put_pod(name, Assignment(cards, others), limits)


def given_devices(rig: Rig, slot: str) -> list[str]:
    return [node["path"] for node in rig.edits(slot).get("deviceNodes", ())]


def grants_on_disk(rig: Rig) -> list[dict]:
    return [json.loads(path.read_text()) for path in (rig.folder / "state" / "grants").glob("*/*.json")]
