"""Which Xid errors mean that a card is sick, and which that an application was wrong.

NVIDIA's driver reports both alike. Taking a card out for an application's page fault would let any tenant take cards
from all others. The list is NVIDIA's own (k8s-device-plugin `internal/rm/health.go`, "Xid Errors" documentation).
"""

from collections.abc import Iterable
from typing import Final

APPLICATION: Final[dict[int, str]] = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup, due to previous errors",
    68: "video processor exception",
    69: "graphics engine class error",
    94: "contained memory error",  # the faulting process ends, the card goes on
    109: "context switch timeout",
}

SICK: Final[dict[int, str]] = {
    46: "GPU stopped processing",
    48: "double bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    95: "uncontained memory error",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
    154: "GPU recovery action changed",
}


def is_sick(xid: int, also_ignored: Iterable[int] = ()) -> bool:
    """Whether this Xid takes its card out. An unknown one does: better a card idle than a share on a broken one."""
    return xid not in APPLICATION and xid not in also_ignored


def describe(xid: int) -> str:
    """For people: number and meaning."""
    meaning = SICK.get(xid) or APPLICATION.get(xid) or "see NVIDIA's Xid catalogue"
    return f"Xid {xid}: {meaning}"
