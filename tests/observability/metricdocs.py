"""Reads the documented metrics from docs/reference/metrics.md and the registered ones from the source code."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
PARTS = {"Extender": "extender", "Webhook": "webhook", "Device plugin": "deviceplugin", "MPS manager": "mps"}
_NAME = re.compile(r"cardwise_[a-z0-9_]+")


class Row(NamedTuple):
    """A metric as documented."""

    kind: str
    labels: str
    meaning: str


def documented() -> dict[str, dict[str, Row]]:
    """The documented metrics, by heading and name."""
    rows_by_heading: dict[str, dict[str, Row]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `cardwise_"):
            name, *row = (cell.strip() for cell in line.strip("|").split("|"))
            assert name.strip("`") not in rows_by_heading.setdefault(heading, {}), f"{name} is there twice"
            rows_by_heading[heading][name.strip("`")] = Row(*row)
    return rows_by_heading


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def registered(folder: Path) -> set[str]:
    """The names of metrics in the Python files below, as they are served."""
    return {name for path in sorted(folder.rglob("*.py")) if "agent" not in path.parts for name in _names(path)}


def _names(path: Path) -> Iterator[str]:
    tree = parsed(path)
    counters = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Counter" and node.args:
            counters.add(node.args[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            # The client library adds the suffixes of the conventions.
            counted = node in counters and not node.value.endswith("_total")
            yield f"{node.value}_total" if counted else node.value
