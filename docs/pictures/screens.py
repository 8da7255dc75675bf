"""Screens of the command line, printed anew from the objects of a recorded cluster (cluster.yaml, by `record`).

So a picture is out of date as soon as the program prints something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from click.testing import CliRunner

from cardwise.cli import main
from cardwise.kube.client import KubeClient
from docs.pictures import svg, terminal
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock

RECORDED = Path(__file__).with_name("cluster.yaml")
_MARGIN, _LINE = 14, 1.45  # px; height of a line by the size of its font


@dataclass(frozen=True, slots=True)
class Screen:
    """A command and its picture.

    columns: at which longer lines are wrapped.
    notes: by words of a line, what that line says.
    """

    arguments: Sequence[str]
    alternative: str
    columns: int
    notes: Sequence[tuple[str, str]] = ()


TOP = Screen(
    ("top", "--once"),
    "cardwise top: for each GPU what is granted and used, its state, its isolation by MPS, and its pods.",
    140,
)
EXPLAIN = Screen(
    ("explain", "pod", "large"),
    "cardwise explain of a pending pod, with notes: its request, what each GPU lacks, who holds it, what would help.",
    96,
    (
        ("requests", "What the pod requests, in MiB, as it counts."),
        ("kube-scheduler says", "The event that kubectl describe shows."),
        ("  n1: ", "The reason, for each node."),
        ("MiB short", "For each GPU: free, missing, and which pods hold it."),
        ("would run if", "What would help, the cheapest first."),
    ),
)


def draw(screen: Screen) -> str:
    """The SVG. Raises `ValueError` for a note about words that the screen does not have."""
    lines = [f"$ cardwise {' '.join(screen.arguments)}", *_run(screen.arguments)]
    lines = terminal.wrap(lines, screen.columns)
    size = terminal.font_size(max(map(len, lines)))
    step = size * _LINE
    parts = [terminal.draw_line(_MARGIN, _MARGIN + step * (i + 0.8), line, size) for i, line in enumerate(lines)]
    y = 2 * _MARGIN + step * len(lines)
    width = 2 * _MARGIN + terminal.WIDTH
    for number, (words, note) in enumerate(screen.notes, 1):
        row = next((i for i, line in enumerate(lines) if words in line), None)
        if row is None:
            raise ValueError(f"the screen has no line with {words!r}: {lines}")
        end = terminal.line_end(_MARGIN, lines[row], size)
        parts += [
            *_draw_number(min(end + 14, width - 12), _MARGIN + step * (row + 0.8) - size * 0.35, number),
            *_draw_number(_MARGIN + 10, y + 6, number),
            svg.text(_MARGIN + 28, y + 11, note, anchor="start"),
        ]
        y += 24
    return svg.frame(screen.alternative, width, y, [terminal.background(width, y), *parts])


def _draw_number(x: float, y: float, number: int) -> list[str]:
    circle = f'<circle class="note line" cx="{x:.0f}" cy="{y:.0f}" r="9"/>'
    return [circle, svg.text(x, y + 4, str(number), size=12, bold=True)]


def _run(arguments: Sequence[str]) -> list[str]:
    recorded: dict[str, Any] = yaml.safe_load(RECORDED.read_text())
    api = ApiServer(FakeClock())
    for collection, objects in recorded["objects"].items():
        for manifest in objects:
            api.write_object(collection, manifest)
    for path, text in recorded["answers"].items():
        api.answers[path] = text.encode()
    with mock.patch.object(KubeClient, "load", return_value=api.client()):
        completed = CliRunner().invoke(main.cli, list(arguments), catch_exceptions=False)
    if completed.exit_code:
        raise RuntimeError(completed.output)
    return [line.rstrip() for line in completed.stdout.rstrip().splitlines()]
