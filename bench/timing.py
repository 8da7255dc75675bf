"""Turns samples into rows of a table, with percentiles, and names the machine."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A row of a table: its label, and the cells by column name, in the order of the columns."""

    label: str
    cells: dict[str, str]


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample below which `percent` percent of the samples are."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def latency(label: str, seconds: Sequence[float]) -> Row:
    """A row with the percentiles of durations, in milliseconds."""
    cells = {f"p{p}": f"{percentile(seconds, p) * 1000:.2f} ms" for p in (50, 90, 99)}
    return Row(label, cells | {"max": f"{max(seconds) * 1000:.2f} ms", "calls": str(len(seconds))})


def machine() -> str:
    """The date, processor, memory and Python version, on one line."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory_gib = int(Path("/proc/meminfo").read_text().split()[1]) // 1024 // 1024
    today = datetime.now(UTC).date()
    return f"{today}, {os.cpu_count()} cores of {model}, {memory_gib} GiB, Python {platform.python_version()}"


def markdown(rows: Sequence[Row]) -> str:
    """The rows as markdown, with a new table where the columns change."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row.cells) != columns:
            columns = list(row.cells)
            lines += ["", "| what | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        lines.append(f"| {row.label} | " + " | ".join(row.cells.values()) + " |")
    return "\n".join(lines)
