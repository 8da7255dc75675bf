"""One table of the differences between NVIDIA's drivers, from 535 to 615, and checks that correct this table.

All code that depends on the driver's version is in this module.
"""

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cardwise.gpus.protocol import GpuCard

_MAJOR_VERSION_PATTERN = re.compile(r"(\d{3,4})(?:\.|$)")
_HELP_SECONDS = 5.0
MIN_MAJOR: Final = 535  # the oldest driver whose MPS the manager can run
_VOLTA_CAPABILITY = (7, 0)
_MAX_CLIENTS_BEFORE_VOLTA = 16
_MAX_CLIENTS_VOLTA = 48
_MAX_CLIENTS_R590 = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsCapabilities:
    """The MPS features of one driver version.

    major: the major version; 0 if unknown.
    multi_user: whether the daemon can serve all users at once (`-multiuser-server`).
    server_status: whether the daemon has the command `get_server_status`.
    """

    major: int
    multi_user: bool = True
    server_status: bool = True

    @property
    def options(self) -> tuple[str, ...]:
        """The daemon's command-line options, besides `-f`."""
        return ("-multiuser-server",) if self.multi_user else ()

    def without_multi_user(self) -> "MpsCapabilities":
        return replace(self, multi_user=False)

    def max_clients(self, card: GpuCard) -> int:
        """The maximum number of clients (CUDA contexts) of the card's server."""
        if _compute_capability(card) < _VOLTA_CAPABILITY:
            return _MAX_CLIENTS_BEFORE_VOLTA
        return _MAX_CLIENTS_R590 if self.major >= 590 else _MAX_CLIENTS_VOLTA


# The missing features by the lowest version of the driver; the last matching row counts. 535, 550 and 555 were tried,
# and 580 on a card.
_MISSING_FEATURES_BY_VERSION: Final[tuple[tuple[int, dict[str, bool]], ...]] = (
    (MIN_MAJOR, {"multi_user": False, "server_status": False}),
    (550, {"multi_user": False}),
    (580, {}),
)


def capabilities_of(version: str) -> MpsCapabilities:
    """The capabilities of a driver version, such as "550.163.01". An unknown version is treated as 535."""
    major = _major(version)
    features = _MISSING_FEATURES_BY_VERSION[0][1]
    for min_major, missing_features in _MISSING_FEATURES_BY_VERSION:
        if major >= min_major:
            features = missing_features
    return MpsCapabilities(major=major, **features)


def is_too_old(version: str) -> bool:
    """Whether the manager cannot run the MPS of this driver version. An unknown version counts as new enough."""
    return 0 < _major(version) < MIN_MAJOR


def _major(version: str) -> int:
    """The major version; 0 if unknown."""
    match = _MAJOR_VERSION_PATTERN.match(version)
    return int(match[1]) if match else 0


def refine_capabilities(capabilities: MpsCapabilities, binary: Path, *, root: bool) -> MpsCapabilities:
    """Correct the capabilities from the control program's help text, which lists `-multiuser-server` if supported.

    root: whether the manager runs as root; only root can use the option.

    The program itself cannot be asked: it ignores an unknown option, or prints its help and ends with code 0.
    """
    if not capabilities.multi_user:
        return capabilities
    if not root:
        return capabilities.without_multi_user()
    try:
        output = subprocess.run(
            [binary, "-h"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_HELP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return capabilities
    return capabilities if b"multiuser" in output.stdout + output.stderr else capabilities.without_multi_user()


def _compute_capability(card: GpuCard) -> tuple[int, int]:
    """The compute capability that NVML reports; Volta's if NVML reports none."""
    major, _, minor = card.properties.get("computeCapability", "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else _VOLTA_CAPABILITY
