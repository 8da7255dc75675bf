"""The meaning of Xid errors of NVIDIA's driver: harmless for the card, in need of a reset, or unknown.

The driver reports all Xids alike, but they need different reactions. If an application's page fault took a card out of
use, each tenant could take cards from all other tenants. If a card with broken memory stayed in use, its next pod would
get wrong results. The effects follow NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, immediate actions) for
Ampere and newer.
"""

from enum import Enum
from typing import Final


class XidEffect(Enum):
    """The effect of an Xid on its card."""

    HARMLESS = "the GPU stays; at most the process that caused it ends"
    NEEDS_RESET = "no pods until the GPU is reset or its node rebooted"
    UNKNOWN = "transient fault, since the meaning is unknown"


# Xids with the action RESTART_APP or IGNORE in the catalogue: errors of applications, and reports about repairs and
# about the driver. For 109 the catalogue has a reset, but NVIDIA's own device plugin treats it as an application error;
# if an error 109 is more serious, the driver requests a recovery action.
_HARMLESS_XIDS: Final = frozenset(
    (
        *(8, 11, 13, 14, 25, 31, 32, *range(37, 42), 43, 44, 45, 60, 63, *range(66, 73), 75, 76, 77, 80),
        *(*range(82, 87), 88, 89, 92, 93, 94, *range(96, 110), 121, *range(126, 136), 137, 139, 141),
        *(152, 153, 157, 160, 161),
    )
)
# Xids with the action RESET_GPU, RESTART_BM or RESTART_VM in the catalogue, and 48 and 74, whose workflows begin with a
# reset. 144 to 150 are left out: their workflows depend on details that an event does not have, and if recovery is
# needed, the driver requests a recovery action.
_XIDS_THAT_NEED_RESET: Final = frozenset((46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158))

_MEANING_BY_XID: Final[dict[int, str]] = {
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
    """The effect of an Xid. An unknown Xid is a transient fault: better an idle card than a share of a broken card."""
    if xid in _HARMLESS_XIDS:
        return XidEffect.HARMLESS
    return XidEffect.NEEDS_RESET if xid in _XIDS_THAT_NEED_RESET else XidEffect.UNKNOWN


def describe_xid(xid: int) -> str:
    """The number and meaning of an Xid, for people."""
    meaning = _MEANING_BY_XID.get(xid, "see NVIDIA's Xid catalogue")
    return f"Xid {xid}: {meaning}"
