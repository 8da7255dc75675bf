"""The metrics as the generated page has them, and their names in the source code."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from docs import metricrows
from docs.metricrows import PARTS, MetricRow

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"cardwise_[a-z0-9_]+")

__all__ = ["PARTS", "ROOT", "documented", "label_values", "registered"]


@functools.cache
def documented() -> dict[str, dict[str, MetricRow]]:
    """The documented metrics, by heading and name."""
    rows_by_heading: dict[str, dict[str, MetricRow]] = {}
    for heading, rows in metricrows.rows_by_part(ROOT).items():
        rows_by_heading[heading] = {row.name: row for row in rows}
        assert len(rows_by_heading[heading]) == len(rows), "a metric is there twice"
    return rows_by_heading


def label_values(row: MetricRow, label: str) -> set[str] | None:
    """The values of a label that the metric's text lists ("by outcome: bound, released"); None if it lists none."""
    listed = re.search(rf"\b{label}(?: that [^:;.]*)?: ([\w/]+(?:, [\w/]+)*)", row.text)
    return set(listed[1].split(", ")) if listed else None


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def registered(folder: Path) -> set[str]:
    """The names of metrics in the Python files below, as they are served."""
    return {name for path in sorted(folder.rglob("*.py")) for name in _names(path)}


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
