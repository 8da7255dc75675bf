"""A container's share, read from its environment and from the share agent's file.

The environment goes first: the node writes it past the reach of the pod. The file adds what the environment lacks, and
is all there is for a program that was started without the container's environment (`env -i`, sudo, a login shell).
Runs in users' images: Python 3.7, standard library only.
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

# What makes a process keep to the share.
ENFORCED = {
    "kernel": "by the driver: the container sees a card of this size",
    "mps": "by MPS: an allocation over it fails in each process",
    "advisory": "by nobody: the programs have to keep to it",
    "": "not known here",
}
MIB = 1024 * 1024


class NoShare(Exception):
    """The container was given no share."""


class UnreadableShare(ValueError):
    """What tells the share is damaged: where it stands, what is wrong, what to do."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class Share:
    """A share. Amounts are those of each of the container's cards; what is not known is None or empty."""

    limit_mib: int
    total_mib: int | None
    fraction: str  # as it was written: four digits, rounded down
    card: str  # the card's index on its node; "0,2" for several
    uuid: str
    enforced: str

    def as_json(self) -> dict[str, Any]:
        """In the share agent's format."""
        return {
            "card": self.card,
            "uuid": self.uuid,
            "limitMiB": self.limit_mib,
            "totalMiB": self.total_mib,
            "fraction": float(self.fraction) if self.fraction else None,
            "enforced": self.enforced,
        }

    def as_env(self) -> dict[str, str]:
        """As the environment that containers get."""
        known = {
            LIMIT: str(self.limit_mib),
            FRACTION: self.fraction,
            CUPY_LIMIT: str(self.limit_mib * MIB),
            TOTAL: str(self.total_mib or ""),
            CARD: self.card,
        }
        return {name: value for name, value in known.items() if value}


def read(environ: Mapping[str, str]) -> Share:
    """The share of the container that has this environment. Raises NoShare, UnreadableShare."""
    path = environ.get(ENV_SHARE_FILE) or SHARE_FILE
    told = _file(path)
    limit = _whole(LIMIT, environ.get(LIMIT, "")) or _whole(f"{path}: limitMiB", told.get("limitMiB"))
    if limit is None:
        raise NoShare(
            f"this container has no share of a GPU: {LIMIT} is not set and {path} tells none; "
            "ask for one with a limit of aliyun.com/gpu-mem in the pod"
        )
    total = _whole(TOTAL, environ.get(TOTAL, "")) or _whole(f"{path}: totalMiB", told.get("totalMiB"))
    fraction = _fraction(FRACTION, environ.get(FRACTION, "")) or _fraction(f"{path}: fraction", told.get("fraction"))
    enforced = told.get("enforced") or ""
    if enforced not in ENFORCED:
        expected = ", ".join(sorted(filter(None, ENFORCED)))
        raise UnreadableShare(f"{path}: enforced", f"{enforced!r} is not known", f"expected one of {expected}")
    # With CDI the variable says "void"; the file has the cards' real names.
    visible = environ.get(UUIDS, "")
    uuids = _list(told.get("uuid")) or (visible if visible.startswith(("GPU-", "MIG-")) else "")
    return Share(
        limit_mib=limit,
        total_mib=total,
        fraction=fraction or _part(limit, total),
        card=environ.get(CARD, "") or _list(told.get("card")),
        uuid=uuids,
        enforced=enforced,
    )


def _file(path: str) -> dict[str, Any]:
    """The agent's file; empty where there is none. Raises UnreadableShare."""
    remedy = f"it is written by Cardwise's share agent; set {ENV_SHARE_FILE} if it lies elsewhere"
    try:
        with Path(path).open(encoding="utf-8") as file:
            told = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnreadableShare(path, f"cannot be read: {error}", remedy) from error
    if not isinstance(told, dict):
        raise UnreadableShare(path, "is no JSON object", remedy)
    return told


def _whole(field: str, value: object) -> int | None:
    """MiB; None where nothing is written. Raises UnreadableShare."""
    if value is None or value == "":
        return None
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        text = str(value)
        if text.isdigit() and text.isascii() and int(text) > 0:
            return int(text)
    raise UnreadableShare(field, f"{value!r} is no amount of MiB", "expected a whole number above 0, such as 8138")


def _fraction(field: str, value: object) -> str:
    """Between 0 and 1, as it was written; "" where nothing is. Raises UnreadableShare."""
    if value is None or value == "":
        return ""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            if 0 < float(value) <= 1:
                return str(value)
        except ValueError:
            pass
    raise UnreadableShare(field, f"{value!r} is no part of a card", "expected a number between 0 and 1, such as 0.4999")


def _part(limit: int, total: int | None) -> str:
    """Rounded down to four digits, so that a framework never takes more than its share."""
    if total is None:
        return ""
    digits = min(limit * 10_000 // total, 10_000)
    return f"{digits // 10_000}.{digits % 10_000:04d}"


def _list(value: object) -> str:
    if value is None:
        return ""
    return ",".join(str(part) for part in (value if isinstance(value, list) else [value]))
