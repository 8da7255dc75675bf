"""Folders laid out as sysfs and /dev are, for tests that have no such hardware.

Layouts as read on machines with the hardware: a device's folder is deep below devices/, everything else links there.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT_PORT = "pci0000:3a/0000:3a:00.0"


class Tree:
    """A machine: `sysfs` and `dev` below a folder."""

    def __init__(self, folder: Path) -> None:
        self.sysfs = folder / "sys"
        self.dev = folder / "dev"
        for name in ("class/infiniband", "class/misc", "bus/pci/devices", "dev/char"):
            (self.sysfs / name).mkdir(parents=True, exist_ok=True)
        self.dev.mkdir(parents=True, exist_ok=True)

    def pci(
        self,
        address: str,
        vendor: str,
        device: str,
        code: str,
        *,
        driver: str = "",
        group: str = "",
        numa: int = -1,
        net: Sequence[str] = (),
        behind: Path | None = None,
    ) -> Path:
        """A PCI device, behind another one or a root port; the ids are hexadecimal digits. Returns its folder."""
        folder = (behind or self.sysfs / "devices" / _ROOT_PORT) / address
        texts = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{code}", "numa_node": str(numa)}
        self.write(folder, texts)
        for name in net:
            self.write(folder / "net" / name, {"operstate": "up"})
        if driver:
            self.link(folder / "driver", self.sysfs / "bus" / "pci" / "drivers" / driver)
        if group:
            self.link(folder / "iommu_group", self.sysfs / "kernel" / "iommu_groups" / group)
        self.link(self.sysfs / "bus" / "pci" / "devices" / address, folder)
        return folder

    def character(self, parent: Path, inside: str, number: str, node: str = "") -> Path:
        """A character device below `parent`, at `inside` (xdma/xdma0_user); `node` is its name below /dev."""
        folder = parent / inside
        major, minor = number.split(":")
        uevent_line = f"DEVNAME={node}\n" if node else ""
        self.write(folder, {"dev": number, "uevent": f"MAJOR={major}\nMINOR={minor}\n{uevent_line}"})
        self.link(self.sysfs / "dev" / "char" / number, folder)
        return folder

    def rdma(
        self,
        name: str,
        *,
        pci_folder: Path | None = None,
        guid: str = "0000:0000:0000:0000",
        ports: Mapping[int, str] | None = None,
        number: int = 0,
        link_layer: str = "InfiniBand",
        rate: str = "100 Gb/sec (4X EDR)",
        **texts: str,
    ) -> Path:
        """An RDMA device on a PCI device, or a software one; `ports` are their states, `number` counts its nodes."""
        parent = self.sysfs / "devices" / "virtual" if pci_folder is None else pci_folder
        folder = parent / "infiniband" / name
        self.write(folder, {"node_guid": guid, **texts})
        for port, state in ({1: "4: ACTIVE"} if ports is None else ports).items():
            self.port(folder, port, state, link_layer, rate)
        if pci_folder is not None:
            self.link(folder / "device", pci_folder)
        self.link(self.sysfs / "class" / "infiniband" / name, folder)
        self._node_of(parent, name, "infiniband_verbs", f"uverbs{number}", f"231:{192 + number}")
        for place, port in enumerate({1: ""} if ports is None else ports):
            self._node_of(parent, name, "infiniband_mad", f"umad{number * 2 + place}", f"231:{number * 2 + place}")
            self._node_of(parent, name, "infiniband_mad", f"issm{number * 2 + place}", f"231:{64 + number * 2 + place}")
            self.write(self.sysfs / "class" / "infiniband_mad" / f"umad{number * 2 + place}", {"port": str(port)})
        self.misc("rdma_cm", "10:58")
        return folder

    def port(
        self, device: Path, number: int, state: str, link_layer: str = "InfiniBand", rate: str = "10 Gb/sec"
    ) -> None:
        self.write(device / "ports" / str(number), {"state": state, "rate": rate, "link_layer": link_layer})

    def misc(self, name: str, number: str) -> None:
        folder = self.character(self.sysfs / "devices" / "virtual" / "misc", name, number)
        self.link(self.sysfs / "class" / "misc" / name, folder)

    def node(self, path: str, number: int = os.makedev(4, 20)) -> Path:
        """Create a device node below /dev; without root privileges, a link to an existing one."""
        path = self.dev / path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, number)
            path.chmod(0o666)
        except PermissionError:
            path.symlink_to("/dev/null")
        return path

    def remove(self, address: str) -> None:
        """Remove the PCI device from the machine."""
        (self.sysfs / "bus" / "pci" / "devices" / address).unlink()

    def _node_of(self, parent: Path, device: str, folder: str, name: str, number: str) -> None:
        path = self.character(parent, f"{folder}/{name}", number, f"infiniband/{name}")
        self.write(path, {"ibdev": device})
        self.link(self.sysfs / "class" / folder / name, path)

    @staticmethod
    def write(folder: Path, texts: Mapping[str, str]) -> None:
        """Write attributes, each with a newline at its end, as the kernel does."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")

    @staticmethod
    def link(path: Path, target: Path) -> None:
        """Create a relative link, as in sysfs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(target, path.parent))


def connectx5(tree: Tree) -> list[Path]:
    """A ConnectX-5 of two ports: two functions, each with an RDMA device; the second has no cable."""
    folders = []
    for port, state in enumerate(("4: ACTIVE", "1: DOWN")):
        parent = tree.pci(
            f"0000:3b:00.{port}", "15b3", "1017", "020700", driver="mlx5_core", group=f"{20 + port}", numa=1,
            net=[f"ib{port}"],
        )  # fmt: skip
        tree.character(parent, f"ptp/ptp{port}", f"248:{port}", f"ptp{port}")
        path = tree.rdma(
            f"mlx5_{port}", pci_folder=parent, guid=f"0c42:a103:0016:054{2 + port}", ports={1: state}, number=port,
            hca_type="MT4119", fw_ver="16.35.2000", board_id="MT_0000000008",
        )  # fmt: skip
        folders.append(path)
    return folders
