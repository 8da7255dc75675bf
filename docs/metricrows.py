"""Reads each metric from the code that declares it: name, type, labels, and the text that `/metrics` serves as HELP."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PARTS = {"Extender": "extender", "Webhook": "webhook", "Device plugin": "deviceplugin", "MPS manager": "mps"}
SHARED = Path("cardwise") / "runtime"  # metrics of the components that serve more than metrics
_SERVERS = ("Extender", "Webhook")
# What declares a metric, by the function's name. `_gauge(name, text, label, …)` is the extender's own.
_KINDS = {
    "Counter": "counter",
    "Gauge": "gauge",
    "Histogram": "histogram",
    "GaugeMetricFamily": "gauge",
    "CounterMetricFamily": "counter",
    "_gauge": "gauge",
}


class MetricRow(NamedTuple):
    """A metric as it is declared."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def rows_by_part(root: Path) -> dict[str, list[MetricRow]]:
    """The metrics of each part, by the part's heading. root: the folder of the repository."""
    shared = _rows_below(root / SHARED)
    return {
        heading: sorted(_rows_below(root / folder) + (shared if heading in _SERVERS else []))
        for heading, folder in PARTS.items()
    }


def _rows_below(folder: Path) -> list[MetricRow]:
    return [row for path in sorted(folder.rglob("*.py")) for row in _rows_in(path)]


def _rows_in(path: Path) -> Iterator[MetricRow]:
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (kind := _KINDS.get(_called(node))) and len(node.args) > 1:
            name, text = (_text(argument, constants) for argument in node.args[:2])
            if name.startswith("cardwise_"):
                yield _row(name, kind, _labels(node, constants), text)
        elif isinstance(node, ast.Tuple) and len(node.elts) > 2:  # a row of a table of gauges
            name, text = (_text(element, constants) for element in node.elts[:2])
            if name.startswith("cardwise_"):
                yield _row(name, "gauge", tuple(ast.literal_eval(constants["_LABELS"])), text)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _row(name: str, kind: str, labels: tuple[str, ...], text: str) -> MetricRow:
    # The client library adds the suffix of the conventions.
    is_named = kind != "counter" or name.endswith("_total")
    return MetricRow(name if is_named else f"{name}_total", kind, labels, f"{text.removesuffix('.')}.")


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    if isinstance(node, ast.Name):
        node = constants.get(node.id, node)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _labels(call: ast.Call, constants: Mapping[str, ast.expr]) -> tuple[str, ...]:
    named = next((keyword.value for keyword in call.keywords if keyword.arg in ("labels", "labelnames")), None)
    node = named or (call.args[2] if len(call.args) > 2 else None)
    if isinstance(node, ast.List):
        return tuple(label for element in node.elts for label in _expanded(element, constants))
    if isinstance(node, ast.Name) and node.id in constants:
        return tuple(ast.literal_eval(constants[node.id]))
    return (_text(node, constants),) if isinstance(node, ast.Constant) else ()


def _expanded(element: ast.expr, constants: Mapping[str, ast.expr]) -> tuple[str, ...]:
    if isinstance(element, ast.Starred) and isinstance(element.value, ast.Name):
        return tuple(ast.literal_eval(constants[element.value.id]))
    return (_text(element, constants),)
