"""Reads a machine's devices from sysfs. Pure: it reads only files below a root folder.

Layouts: Documentation/ABI/stable/sysfs-class-infiniband, ABI/testing/sysfs-bus-pci and ABI/testing/sysfs-dev of the
kernel. A file that is not there, or that a driver in trouble does not answer for, counts as empty: a device that goes
while we look must not hide the others.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cardwise.devices.settings import PciFacts

VFIO = "vfio-pci"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"([0-9.]+) Gb/sec")
_ACTIVE = "ACTIVE"
_NO_GUID = "0000:0000:0000:0000"
# What is below a device and yet not for a container: a network card's clock is the node's as well, and who opens issm
# becomes the subnet manager of the fabric.
_WITHHELD = ("/ptp/", "/infiniband_mad/issm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of an RDMA device: `state` such as ACTIVE or DOWN, `rate` in Gb/s."""

    number: int
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device. `guid` is "" where it has none; `address` where it is no PCI device."""

    name: str
    guid: str
    model: str
    firmware: str
    board: str
    address: str
    netdev: str
    ports: tuple[Port, ...]
    nodes: tuple[str, ...]

    @property
    def port(self) -> Port | None:
        """The port that its properties tell of: the first that is active, else the first."""
        return next((port for port in self.ports if port.state == _ACTIVE), next(iter(self.ports), None))

    @property
    def trouble(self) -> str:
        """Why nothing can go through it, "" while a port is active."""
        if any(port.state == _ACTIVE for port in self.ports):
            return ""
        states = ", ".join(f"port {port.number} is {port.state or 'silent'}" for port in self.ports) or "it has none"
        return f"no port of {self.name} is {_ACTIVE}: {states}; look at `rdma link`, the cable and the switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device. `driver` and `group` (of its IOMMU) are "" where it has none, `numa` where nobody knows it."""

    address: str
    facts: PciFacts
    driver: str
    group: str
    numa: str


class Tree:
    """One look at a sysfs: what several devices need is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def rdma_devices(self) -> list[RdmaDevice]:
        """In the order of their names, mlx5_2 before mlx5_10."""
        folder = self._root / "class" / "infiniband"
        nodes = self._rdma_nodes()
        return [self._rdma_device(folder / name, nodes.get(name, [])) for name in sorted(_names(folder), key=natural)]

    def pci_addresses(self) -> list[str]:
        return sorted(name for name in _names(self._root / "bus" / "pci" / "devices") if _ADDRESS.fullmatch(name))

    def pci_device(self, address: str) -> PciDevice:
        folder = self._root / "bus" / "pci" / "devices" / address
        vendor, device, code = (_text(folder / name).removeprefix("0x") for name in ("vendor", "device", "class"))
        numa = _text(folder / "numa_node")
        return PciDevice(
            address=address,
            facts=PciFacts(vendor, device, code),
            driver=_target(folder / "driver"),
            group=_target(folder / "iommu_group"),
            numa="" if numa.startswith("-") else numa,
        )

    def character_nodes(self) -> Mapping[str, list[str]]:
        """Device nodes, below /dev, of what lies below each PCI device, by its address.

        dev/char has every character device of the machine as a link, which spares the walk through all folders.
        """
        folder = self._root / "dev" / "char"
        found: dict[str, list[str]] = defaultdict(list)
        for name in sorted(_names(folder)):
            path = _link(folder / name)
            owner = _last_address(path)
            if owner and not any(part in path for part in _WITHHELD):
                found[owner].append(_node_name(folder / name, path))
        return {address: sorted(nodes, key=natural) for address, nodes in found.items()}

    def has_misc(self, name: str) -> bool:
        """Whether the kernel has a misc device of this name."""
        return (self._root / "class" / "misc" / name).exists()

    def _rdma_device(self, folder: Path, nodes: list[str]) -> RdmaDevice:
        guid = _text(folder / "node_guid")
        netdevs = sorted(_names(folder / "device" / "net"), key=natural)
        return RdmaDevice(
            name=folder.name,
            guid="" if guid == _NO_GUID else guid,
            model=_text(folder / "hca_type"),
            firmware=_text(folder / "fw_ver"),
            board=_text(folder / "board_id"),
            address=_last_address(os.path.realpath(folder / "device")),
            # A software device has no device of its own; `parent` names the interface that it runs on.
            netdev=",".join(netdevs) or _text(folder / "parent"),
            ports=tuple(_port(folder / "ports" / number) for number in sorted(_names(folder / "ports"), key=natural)),
            nodes=tuple(sorted(nodes, key=natural)),
        )

    def _rdma_nodes(self) -> Mapping[str, list[str]]:
        """Nodes uverbs and umad, below /dev, by RDMA device; see _WITHHELD for issm."""
        found: dict[str, list[str]] = defaultdict(list)
        for folder, prefix in (("infiniband_verbs", "uverbs"), ("infiniband_mad", "umad")):
            for name in _names(self._root / "class" / folder):
                owner = _text(self._root / "class" / folder / name / "ibdev")
                if owner and name.startswith(prefix):
                    found[owner].append(f"infiniband/{name}")
        return found


def _port(folder: Path) -> Port:
    rate = _RATE.match(_text(folder / "rate"))
    return Port(
        number=int(folder.name) if folder.name.isdigit() else 0,
        state=_text(folder / "state").rpartition(": ")[2],
        rate=rate[1] if rate else "",
        link_layer=_text(folder / "link_layer"),
    )


def _node_name(folder: Path, path: str) -> str:
    """Where /dev has the device: its driver may have put it into a folder, which only uevent tells."""
    for line in _text(folder / "uevent").splitlines():
        if line.startswith("DEVNAME="):
            return line.removeprefix("DEVNAME=")
    return path.rpartition("/")[2].replace("!", "/")


def _last_address(path: str) -> str:
    """The PCI device that a path in sysfs belongs to: behind bridges it has several addresses. "" if none."""
    return next((part for part in reversed(path.split("/")) if _ADDRESS.fullmatch(part)), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _names(folder: Path) -> Iterable[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return ()


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _target(path: Path) -> str:
    """The last part of what a link names, "" where there is none."""
    return _link(path).rpartition("/")[2]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
