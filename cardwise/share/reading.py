"""Read a container's share from its environment and from the share agent's file.

The environment takes precedence: the node writes it, and the pod cannot change it. The file has fields that the
environment lacks. It is the only source for a program that was started without the container's environment (`env -i`,
sudo, a login shell). This file runs in users' images: Python 3.7, standard library only.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Mapping

from cardwise.share import ENV_SHARE_FILE, SHARE_FILE

LIMIT = "CARDWISE_MEM_LIMIT_MIB"
FRACTION = "CARDWISE_MEM_FRACTION"
TOTAL = "ALIYUN_COM_GPU_MEM_DEV"
CARD = "ALIYUN_COM_GPU_MEM_IDX"
UUIDS = "NVIDIA_VISIBLE_DEVICES"
CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"

# How the memory limit is enforced.
ENFORCEMENTS = {
    "kernel": "by the driver: the container sees a GPU of this size",
    "mps": "by MPS: in each process, an allocation above the limit fails",
    "advisory": "not enforced: programs have to keep to it themselves",
    "": "unknown",
}
MIB = 1024 * 1024


class NoShare(Exception):
    """The container has no share."""


class UnreadableShare(ValueError):
    """The environment or the agent's file is damaged; the message names the field, the problem and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class Share:
    """A container's share. Amounts are per card of the container; None or "" means unknown."""

    limit_mib: int
    total_mib: int | None
    fraction: str  # a card's fraction, as the node has written it: four digits, rounded down
    card: str  # the card's index on its node; "0,2" for several
    uuid: str
    enforced: str

    def as_json(self) -> dict[str, Any]:
        """The share in the format of the share agent's file."""
        return {
            "card": self.card,
            "uuid": self.uuid,
            "limitMiB": self.limit_mib,
            "totalMiB": self.total_mib,
            "fraction": float(self.fraction) if self.fraction else None,
            "enforced": self.enforced,
        }

    def as_env(self) -> dict[str, str]:
        """The share as environment variables of a container."""
        variables = {
            LIMIT: str(self.limit_mib),
            FRACTION: self.fraction,
            CUPY_LIMIT: str(self.limit_mib * MIB),
            TOTAL: str(self.total_mib or ""),
            CARD: self.card,
        }
        return {name: setting for name, setting in variables.items() if setting}


def read(environ: Mapping[str, str]) -> Share:
    """Read the share of the container with this environment. Raises NoShare or UnreadableShare."""
    path = environ.get(ENV_SHARE_FILE) or SHARE_FILE
    document = _read_file(path)
    limit = _parse_mib(LIMIT, environ.get(LIMIT, "")) or _parse_mib(f"{path}: limitMiB", document.get("limitMiB"))
    if limit is None:
        raise NoShare(
            f"this container has no GPU share: {LIMIT} is not set and {path} has none; "
            "request one with a limit of aliyun.com/gpu-mem in the pod"
        )
    total = _parse_mib(TOTAL, environ.get(TOTAL, "")) or _parse_mib(f"{path}: totalMiB", document.get("totalMiB"))
    fraction = _check_fraction(FRACTION, environ.get(FRACTION, "")) or _check_fraction(
        f"{path}: fraction", document.get("fraction")
    )
    enforced = document.get("enforced") or ""
    if enforced not in ENFORCEMENTS:
        expected = ", ".join(sorted(filter(None, ENFORCEMENTS)))
        raise UnreadableShare(f"{path}: enforced", f"{enforced!r} is unknown", f"expected one of {expected}")
    # With CDI the variable is "void"; the file has the UUIDs.
    visible_devices = environ.get(UUIDS, "")
    uuids = _join_entries(document.get("uuid")) or (
        visible_devices if visible_devices.startswith(("GPU-", "MIG-")) else ""
    )
    return Share(
        limit_mib=limit,
        total_mib=total,
        fraction=fraction or _compute_fraction(limit, total) or "",
        card=environ.get(CARD, "") or _join_entries(document.get("card")) or "",
        uuid=uuids,
        enforced=enforced,
    )


def _read_file(path: str) -> dict[str, Any]:
    """The contents of the agent's file; empty without the file. Raises UnreadableShare."""
    remedy = f"it is written by Cardwise's share agent; set {ENV_SHARE_FILE} if it is elsewhere"
    try:
        with Path(path).open(encoding="utf-8") as file:
            document = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnreadableShare(path, f"cannot be read: {error}", remedy) from error
    if not isinstance(document, dict):
        raise UnreadableShare(path, "is not a JSON object", remedy)
    return document


def _parse_mib(field: str, amount: object) -> int | None:
    """Parse an amount of MiB; None if it is missing. Raises UnreadableShare."""
    if amount is None or amount == "":
        return None
    if isinstance(amount, (str, int)) and not isinstance(amount, bool):
        text = str(amount)
        if text.isdigit() and text.isascii() and int(text) > 0:
            return int(text)
    raise UnreadableShare(field, f"{amount!r} is not an amount of MiB", "expected a whole number above 0, such as 8138")


def _check_fraction(field: str, fraction: object) -> str | None:
    """Check that a fraction is above 0 and at most 1. Returns it; None if it is missing. Raises UnreadableShare."""
    if fraction is None or fraction == "":
        return None
    if isinstance(fraction, (str, int, float)) and not isinstance(fraction, bool):
        try:
            if 0 < float(fraction) <= 1:
                return str(fraction)
        except ValueError:
            pass
    raise UnreadableShare(field, f"{fraction!r} is not a fraction", "expected a number between 0 and 1, such as 0.4999")


def _compute_fraction(limit: int, total: int | None) -> str | None:
    """The fraction, rounded down to four digits, so that a framework never takes more than its share."""
    if total is None:
        return None
    digits = min(limit * 10_000 // total, 10_000)
    return f"{digits // 10_000}.{digits % 10_000:04d}"


def _join_entries(entries: object) -> str | None:
    if entries is None:
        return None
    return ",".join(str(part) for part in (entries if isinstance(entries, list) else [entries]))
