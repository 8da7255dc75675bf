"""The cards of the test nodes: from the `--cards` file to each node's simulated inventory and device nodes.

A simulated card is a real device node, with the numbers of a harmless device that containers may not open by default
(containerd and runc allow null, zero, full, random, urandom, tty and tun), so that the device cgroup is tested too:
a container that was not given the card gets EPERM, also when it makes the node itself with mknod.
"""

import os
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

# Misc devices whose open() has no effect, by /proc/misc; then consoles, of which every kernel with VT has 63.
_HARMLESS_MISC = ("fuse", "loop-control", "hw_random", "btrfs-control", "autofs", "vga_arbiter", "userfaultfd", "vsock")
_CONSOLE_MAJOR = 4
_FIRST_CONSOLE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCard:
    """A card as the cards file has it; memory in MiB."""

    __test__ = False  # not a test class

    model: str = "Tesla-P100"
    memory_mib: int = 16276


DEFAULT = (TestCard(), TestCard())
DRIVER = "550.163.01"  # the version that the cards report


def read(path: Path | None) -> dict[str, tuple[TestCard, ...]]:
    """Cards by node name, and under "default" those of every other node."""
    if path is None:
        return {"default": DEFAULT}
    try:
        data = yaml.safe_load(path.read_text())
        named = {name: _cards(cards) for name, cards in (data.get("nodes") or {}).items()}
        return {"default": _cards(data["default"]) if "default" in data else DEFAULT} | named
    except (AttributeError, TypeError, KeyError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: {error!r}; write `nodes: {{n1: [{{model: Tesla-P100, memoryMiB: 16276}}]}}` and `default: [...]`"
        ) from error


def _cards(entries: Sequence[dict[str, object]]) -> tuple[TestCard, ...]:
    return tuple(
        TestCard(model=str(e.get("model", "Tesla-P100")), memory_mib=int(str(e["memoryMiB"]))) for e in entries
    )


def card_uuid(node: str, index: int, folder: Path | None = None) -> str:
    """The same card has the same UUID in every run.

    folder: of a real node. Clusters of one machine have no card in common: an MPS manager sees the processes of the
    whole machine, and takes the daemon of another cluster's card for one that is not its own.
    """
    cluster = f"{folder.parents[1]}/" if folder is not None else ""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{cluster}{node}.card-{index}.cardwise.test')}"


def write_inventory(folder: Path, node: str, cards: Sequence[TestCard], seen_at: Path | None = None) -> Path:
    """Device nodes and the simulated inventory of one node (`cardwise.gpus.simulated` reads it).

    `seen_at`: where those who read it find `folder`.
    """
    devices = folder / "dev"
    devices.mkdir(parents=True, exist_ok=True)
    entries = []
    for index, (card, number) in enumerate(zip(cards, device_numbers(len(cards)), strict=True)):
        path = devices / f"nvidia{index}"
        if not path.exists():
            os.mknod(path, 0o666 | stat.S_IFCHR, number)
            path.chmod(0o666)
        entries.append(
            {
                "index": index,
                "uuid": card_uuid(node, index, folder),
                "model": card.model,
                "memoryMiB": card.memory_mib,
                "device": str((seen_at or folder) / "dev" / path.name),
                "containerPath": f"/dev/nvidia{index}",
                "healthy": True,
                "properties": {"driver": DRIVER},
            }
        )
    inventory = folder / "cards.yaml"
    scratch = inventory.with_suffix(".new")
    scratch.write_text(yaml.safe_dump({"cards": entries}, sort_keys=False))
    scratch.rename(inventory)
    for gone in sorted(set(devices.glob("nvidia[0-9]*")) - {devices / f"nvidia{index}" for index in range(len(cards))}):
        gone.unlink()
    return inventory


def device_numbers(count: int) -> list[int]:
    """Numbers of harmless character devices, a different one for each card."""
    minors = {
        name: int(minor) for minor, name in (line.split() for line in Path("/proc/misc").read_text().splitlines())
    }
    numbers = [os.makedev(10, minors[name]) for name in _HARMLESS_MISC if name in minors]
    numbers += [os.makedev(_CONSOLE_MAJOR, _FIRST_CONSOLE + i) for i in range(40)]
    return numbers[:count]
