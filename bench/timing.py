"""Samples to a row of a table: percentiles, and which machine it was."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """`values` by column name, in the order of the columns."""

    what: str
    values: dict[str, str]


def percentile(samples: Sequence[float], percent: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def latency(what: str, seconds: Sequence[float]) -> Row:
    """A row of milliseconds."""
    values = {f"p{p}": f"{percentile(seconds, p) * 1000:.2f} ms" for p in (50, 90, 99)}
    return Row(what, values | {"max": f"{max(seconds) * 1000:.2f} ms", "calls": str(len(seconds))})


def machine() -> str:
    """One line on where and when."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    total = int(Path("/proc/meminfo").read_text().split()[1]) // 1024 // 1024
    today = datetime.now(UTC).date()
    return f"{today}, {os.cpu_count()} cores of {model}, {total} GiB, Python {platform.python_version()}"


def markdown(rows: Sequence[Row]) -> str:
    """Tables, one for each set of columns."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row.values) != columns:
            columns = list(row.values)
            lines += ["", "| what | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        lines.append(f"| {row.what} | " + " | ".join(row.values.values()) + " |")
    return "\n".join(lines)
