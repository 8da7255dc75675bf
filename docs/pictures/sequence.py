"""Sequence diagrams: lanes, arrows between them and notes on them.

`lanes: a | b`, then `a -> b: words` for an arrow and `a: words` for a note.
"""

from collections.abc import Sequence
from typing import NamedTuple

from docs.pictures import svg

_LANE, _TOP, _ROW, _MARGIN = 128, 58, 36, 72


class Step(NamedTuple):
    """An arrow between two lanes, by index; or a note on one lane, if both are the same."""

    start: int
    end: int
    words: str


def draw(lines: Sequence[str], alternative: str) -> str:
    """The picture. Raises `ValueError` for an unknown lane."""
    lanes, steps = _parse(lines)
    width, height = 2 * _MARGIN + _LANE * (len(lanes) - 1), _TOP + _ROW * (len(steps) + 1)
    parts = []
    for i, lane in enumerate(lanes):
        x = _x(i)
        parts += [
            f'<line x1="{x}" y1="44" x2="{x}" y2="{height - 12}" class="line"/>',
            svg.box(x - 61, 14, 122, 30),
            svg.text(x, 33, lane, bold=True),
        ]
    for number, step in enumerate(steps, 1):
        parts += _draw_step(step, _TOP + _ROW * number, f"{number}. {step.words}", width)
    return svg.frame(alternative, width, height, parts)


def _parse(lines: Sequence[str]) -> tuple[list[str], list[Step]]:
    lanes = [lane.strip() for lane in lines[0].removeprefix("lanes: ").split("|")]
    steps = []
    for line in lines[1:]:
        head, _, words = line.partition(": ")
        start, _, end = head.partition(" -> ")
        steps.append(Step(lanes.index(start), lanes.index(end or start), words))
    return lanes, steps


def _draw_step(step: Step, y: int, words: str, width: int) -> list[str]:
    wide = len(words) * svg.LETTER + 12
    middle = (_x(step.start) + _x(step.end)) / 2
    middle = min(max(middle, wide / 2 + 4), width - wide / 2 - 4)  # inside the picture
    if step.start == step.end:
        return [svg.box(middle - wide / 2, y - 19, wide, 24, fill="note"), svg.text(middle, y - 4, words)]
    side = 3 if step.end > step.start else -3
    return [
        # A background for the words, which lines of lanes would cross.
        f'<rect class="paper" x="{middle - wide / 2 + 4:.0f}" y="{y - 19}" width="{wide - 8:.0f}" height="16"/>',
        svg.arrow((_x(step.start), y), (_x(step.end) - side, y)),
        svg.text(middle, y - 6, words),
    ]


def _x(lane: int) -> int:
    return _MARGIN + _LANE * lane
