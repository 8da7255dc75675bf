"""The first versions of container runtimes that support CDI devices, for the device plugin and for messages."""

import re
from typing import Final

# By container runtime: the first version in which CDI can be switched on, and the first with CDI on by default. CRI-O
# has no switch. Before 1.28 CRI-O accepts CDI devices only by annotations, which newer kubelets do not write.
CDI_SUPPORTED_SINCE: Final = {"containerd": (1, 7), "cri-o": (1, 28)}
CDI_DEFAULT_SINCE: Final = {"containerd": (2, 0), "cri-o": (1, 28)}


def parse_version(text: str) -> tuple[int, ...]:
    """Parse a version such as "v1.34.4-eks-1" into numbers: (1, 34, 4)."""
    return tuple(map(int, re.findall(r"\d+", text.split("-", maxsplit=1)[0])))


def format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def has_cdi(name: str, version: str) -> bool:
    """Whether this version of the runtime supports CDI devices by default."""
    return name in CDI_DEFAULT_SINCE and parse_version(version) >= CDI_DEFAULT_SINCE[name]


CDI_SINCE: Final = (
    f"containerd has it since {format_version(CDI_DEFAULT_SINCE['containerd'])}, "
    f"{format_version(CDI_SUPPORTED_SINCE['containerd'])} with enable_cdi; CRI-O since "
    f"{format_version(CDI_DEFAULT_SINCE['cri-o'])}"
)
