"""The meaning of Xid errors of NVIDIA's driver: harmless for the card, in need of a reset, or unknown.

The driver reports all Xids alike. Taking a card out for an application's page fault would let any tenant take cards
from all others; keeping a card whose memory is broken gives its next pod wrong results. The classes are those of
NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, immediate actions) for Ampere and newer.
"""

from enum import Enum
from typing import Final


class XidEffect(Enum):
    """The effect of an Xid on its card."""

    HARMLESS = "the GPU stays; at most the process that caused it ends"
    NEEDS_RESET = "no pods until the GPU is reset or its node rebooted"
    UNKNOWN = "transient fault, since the meaning is unknown"


# RESTART_APP in the catalogue, or IGNORE: reports about repairs and about the driver. The catalogue answers 109 by a
# reset, NVIDIA's own device plugin treats it as an application error; if it is more, the driver requests recovery.
_HARMLESS: Final = frozenset(
    (
        *(8, 11, 13, 14, 25, 31, 32, *range(37, 42), 43, 44, 45, 60, 63, *range(66, 73), 75, 76, 77, 80),
        *(*range(82, 87), 88, 89, 92, 93, 94, *range(96, 110), 121, *range(126, 136), 137, 139, 141),
        *(152, 153, 157, 160, 161),
    )
)
# RESET_GPU, RESTART_BM and RESTART_VM in the catalogue, and the workflows of 48 and 74, which begin with a reset. Those
# of 144 to 150 depend on details that an event does not have: there, too, the driver requests recovery.
_NEEDS_RESET: Final = frozenset((46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158))

_MEANINGS: Final[dict[int, str]] = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup, due to previous errors",
    46: "GPU stopped processing",
    48: "double bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    154: "GPU recovery action changed",
    156: "resource retirement",
    158: "GPU fatal timeout",
}


def classify_xid(xid: int) -> XidEffect:
    """The effect of an Xid. An unknown one is a transient fault: better an idle card than a share on a broken one."""
    if xid in _HARMLESS:
        return XidEffect.HARMLESS
    return XidEffect.NEEDS_RESET if xid in _NEEDS_RESET else XidEffect.UNKNOWN


def describe_xid(xid: int) -> str:
    """The number and meaning of an Xid, for people."""
    meaning = _MEANINGS.get(xid, "see NVIDIA's Xid catalogue")
    return f"Xid {xid}: {meaning}"
