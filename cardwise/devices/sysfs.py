"""Reads a machine's PCI and RDMA devices from sysfs. Reads only files below a root folder.

Layouts: Documentation/ABI/stable/sysfs-class-infiniband, ABI/testing/sysfs-bus-pci and ABI/testing/sysfs-dev of the
kernel. A file that is missing or unreadable counts as empty: a device that disappears during the read must not hide
other devices.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cardwise.devices.settings import PciFacts

VFIO_DRIVER = "vfio-pci"
_PCI_ADDRESS_PATTERN = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PORT_RATE_PATTERN = re.compile(r"([0-9.]+) Gb/sec")
_ACTIVE_PORT_STATE = "ACTIVE"
_NO_GUID = "0000:0000:0000:0000"
# Device nodes that no container gets. The machine itself uses the clock of a network card (ptp). A process that opens
# issm becomes the subnet manager of the fabric.
_EXCLUDED_PATH_PARTS = ("/ptp/", "/infiniband_mad/issm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of an RDMA device: `state` such as ACTIVE or DOWN, `rate` in Gb/s."""

    number: int
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device. `guid` is "" without a GUID; `address` is "" if the device is not a PCI device."""

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
        """The port that the device's properties describe: the first active one, else the first."""
        return next((port for port in self.ports if port.state == _ACTIVE_PORT_STATE), next(iter(self.ports), None))

    @property
    def problem(self) -> str | None:
        """Why the device cannot transfer data; None while at least one port is active."""
        if any(port.state == _ACTIVE_PORT_STATE for port in self.ports):
            return None
        states = ", ".join(f"port {port.number} is {port.state or 'silent'}" for port in self.ports) or "it has none"
        return (
            f"no port of {self.name} is {_ACTIVE_PORT_STATE}: {states}; look at `rdma link`, the cable and the switch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device. Unknown fields are "" for `driver` and `numa_node`, and None for `iommu_group`."""

    address: str
    facts: PciFacts
    driver: str
    iommu_group: str | None
    numa_node: str


class Sysfs:
    """One pass over a sysfs. Folders that several devices need are read once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def rdma_devices(self) -> list[RdmaDevice]:
        """All RDMA devices in natural order: mlx5_2 before mlx5_10."""
        folder = self._root / "class" / "infiniband"
        nodes = self._rdma_nodes()
        return [
            self._read_rdma_device(folder / name, nodes.get(name, []))
            for name in sorted(_list_names(folder), key=natural_sort_key)
        ]

    def pci_addresses(self) -> list[str]:
        return sorted(
            name for name in _list_names(self._root / "bus" / "pci" / "devices") if _PCI_ADDRESS_PATTERN.fullmatch(name)
        )

    def pci_device(self, address: str) -> PciDevice:
        folder = self._root / "bus" / "pci" / "devices" / address
        vendor, device, code = (_read_text(folder / name).removeprefix("0x") for name in ("vendor", "device", "class"))
        numa_node = _read_text(folder / "numa_node")
        return PciDevice(
            address=address,
            facts=PciFacts(vendor, device, code),
            driver=_link_target(folder / "driver") or "",
            iommu_group=_link_target(folder / "iommu_group"),
            numa_node="" if numa_node.startswith("-") else numa_node,
        )

    def character_nodes(self) -> Mapping[str, list[str]]:
        """The character device nodes, relative to /dev, that belong to each PCI device, by PCI address.

        The folder dev/char has a link to each character device of the machine, so no other folder has to be searched.
        """
        folder = self._root / "dev" / "char"
        nodes_by_address: dict[str, list[str]] = defaultdict(list)
        for name in sorted(_list_names(folder)):
            path = _read_link(folder / name)
            owner = _last_address(path)
            if owner and not any(part in path for part in _EXCLUDED_PATH_PARTS):
                nodes_by_address[owner].append(_node_name(folder / name, path))
        return {address: sorted(nodes, key=natural_sort_key) for address, nodes in nodes_by_address.items()}

    def has_misc(self, name: str) -> bool:
        """Whether the kernel has a misc device of this name."""
        return (self._root / "class" / "misc" / name).exists()

    def _read_rdma_device(self, folder: Path, nodes: list[str]) -> RdmaDevice:
        guid = _read_text(folder / "node_guid")
        netdevs = sorted(_list_names(folder / "device" / "net"), key=natural_sort_key)
        return RdmaDevice(
            name=folder.name,
            guid="" if guid == _NO_GUID else guid,
            model=_read_text(folder / "hca_type"),
            firmware=_read_text(folder / "fw_ver"),
            board=_read_text(folder / "board_id"),
            address=_last_address(os.path.realpath(folder / "device")) or "",
            # A software device has no PCI device; the file `parent` names the network interface on which it runs.
            netdev=",".join(netdevs) or _read_text(folder / "parent"),
            ports=tuple(
                _read_port(folder / "ports" / number)
                for number in sorted(_list_names(folder / "ports"), key=natural_sort_key)
            ),
            nodes=tuple(sorted(nodes, key=natural_sort_key)),
        )

    def _rdma_nodes(self) -> Mapping[str, list[str]]:
        """Nodes uverbs and umad, relative to /dev, by RDMA device; see _EXCLUDED for issm."""
        nodes_by_device: dict[str, list[str]] = defaultdict(list)
        for folder, prefix in (("infiniband_verbs", "uverbs"), ("infiniband_mad", "umad")):
            for name in _list_names(self._root / "class" / folder):
                owner = _read_text(self._root / "class" / folder / name / "ibdev")
                if owner and name.startswith(prefix):
                    nodes_by_device[owner].append(f"infiniband/{name}")
        return nodes_by_device


def _read_port(folder: Path) -> Port:
    rate = _PORT_RATE_PATTERN.match(_read_text(folder / "rate"))
    return Port(
        number=int(folder.name) if folder.name.isdigit() else 0,
        state=_read_text(folder / "state").rpartition(": ")[2],
        rate=rate[1] if rate else "",
        link_layer=_read_text(folder / "link_layer"),
    )


def _node_name(folder: Path, path: str) -> str:
    """The path of a device relative to /dev. The driver may use a subfolder, which only the file `uevent` names."""
    for line in _read_text(folder / "uevent").splitlines():
        if line.startswith("DEVNAME="):
            return line.removeprefix("DEVNAME=")
    return path.rpartition("/")[2].replace("!", "/")


def _last_address(path: str) -> str | None:
    """The last PCI address in a sysfs path, or None. The path of a device behind bridges has several."""
    return next((part for part in reversed(path.split("/")) if _PCI_ADDRESS_PATTERN.fullmatch(part)), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _list_names(folder: Path) -> Iterable[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return ()


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _link_target(path: Path) -> str | None:
    """The last part of a link's target; None if there is no link."""
    return _read_link(path).rpartition("/")[2] or None


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
