"""RDMA devices of a test node that has none: a folder laid out as sysfs, and real device nodes of harmless devices.

As with the cards, so that the device cgroup is tested: only whoever was given a device can open its number.
"""

import sys
from pathlib import Path

from tests.cluster import cards
from tests.devices.trees import Tree

FILE = "devices.yaml"


_CARDS = 8  # the numbers that the cards of a node may have come first


def write(folder: Path, node: str, count: int) -> None:
    """The tree and the device plugin's file of one node."""
    tree = Tree(folder)
    numbers = cards.device_numbers(_CARDS + 1 + 2 * count)[_CARDS:]
    tree.node("infiniband/rdma_cm", numbers.pop())
    for index in range(count):
        pci_folder = tree.pci(
            f"0000:3b:00.{index}", "15b3", "1018", "020700", driver="mlx5_core", numa=0, net=[f"ib{index}"]
        )
        guid = cards.card_uuid(node, index).replace("-", "")[-16:]
        spelled = ":".join(guid[start : start + 4] for start in range(0, 16, 4))
        tree.rdma(
            f"mlx5_{index}", pci_folder=pci_folder, guid=spelled, number=index, hca_type="MT4120", fw_ver="16.35.2000"
        )
        tree.node(f"infiniband/uverbs{index}", numbers.pop())
        tree.node(f"infiniband/umad{2 * index}", numbers.pop())
    (folder / FILE).write_text("devices: [{kind: rdma}]\n")


def command(folder: Path) -> list[str]:
    """Starts the device plugin of a node that has such devices, with the option for them; [] if it has none."""
    if not (folder / FILE).exists():
        return []
    return [
        sys.executable,
        str(Path(__file__).with_name("devicesplugin.py")),
        str(folder),
        f"--devices={folder / FILE}",
    ]
