"""The differences between NVIDIA's drivers, from 535 to 615, as one table, and the probes that correct it.

Everything that depends on the driver is here, so that nothing else compares versions.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cardwise.gpus.protocol import GpuCard

_MAJOR = re.compile(r"(\d{3,4})(?:\.|$)")
_HELP_SECONDS = 5.0
_VOLTA = (7, 0)
_OLD_CLIENTS = 16
_VOLTA_CLIENTS = 48
_R590_CLIENTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the MPS of one driver can do.

    `major`: 0 where the version is not known. `multi_user`: the daemon can serve all users at once
    (`-multiuser-server`). `server_status`: it knows `get_server_status`. `visible_uuids`: CUDA_VISIBLE_DEVICES of the
    daemon takes UUIDs.
    """

    major: int
    multi_user: bool = True
    server_status: bool = True
    visible_uuids: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the daemon, besides `-f`."""
        return ("-multiuser-server",) if self.multi_user else ()

    def without_multi_user(self) -> "Capabilities":
        return replace(self, multi_user=False)

    def most_clients(self, card: GpuCard) -> int:
        """CUDA contexts that the card's server takes."""
        if _compute_capability(card) < _VOLTA:
            return _OLD_CLIENTS
        return _R590_CLIENTS if self.major >= 590 else _VOLTA_CLIENTS

    def visible(self, cards: list[GpuCard]) -> dict[str, str]:
        """Environment by which a daemon sees these cards only, with ordinals in this order."""
        names = [card.uuid if self.visible_uuids else str(card.index) for card in cards]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


# What a generation lacks; a version takes the last row that is not above it. Tried: 535, 550, 555, and 580 on a card.
_TABLE: Final[tuple[tuple[int, dict[str, bool]], ...]] = (
    (0, {"multi_user": False, "server_status": False, "visible_uuids": False}),
    (535, {"multi_user": False, "server_status": False}),
    (550, {"multi_user": False}),
    (580, {}),
)


def of_version(version: str) -> Capabilities:
    """The capabilities of a driver version, such as "550.163.01". An unknown one counts as 535, the least able."""
    found = _MAJOR.match(version)
    major = int(found[1]) if found else 0
    facts: Mapping[str, bool] = {}
    for least, row in _TABLE:
        if (major or 535) >= least:
            facts = row
    return Capabilities(major=major, **facts)


def probed(capabilities: Capabilities, binary: Path, *, root: bool) -> Capabilities:
    """Put right by what the program itself says: its help names `-multiuser-server` where it has it, root can use it.

    Options are never tried by starting with them: one that is not known ends with help and rc 0, or is passed over.
    """
    if not capabilities.multi_user:
        return capabilities
    if not root:
        return capabilities.without_multi_user()
    try:
        said = subprocess.run(
            [binary, "-h"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_HELP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return capabilities
    return capabilities if b"multiuser" in said.stdout + said.stderr else capabilities.without_multi_user()


def _compute_capability(card: GpuCard) -> tuple[int, int]:
    """As NVML says it; a card that does not say is taken for Volta or newer, as all that are sold."""
    major, _, minor = card.properties.get("computeCapability", "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else _VOLTA
