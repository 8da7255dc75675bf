"""Boxes on a grid, with arrows between neighbours.

`boxes: columns`, then `group first-last: words` for rows with a common background, `box column,row: name | words`
(a name that is wider: `box first-last,row`), and `name -> name: words | words` for an arrow between boxes of one row
or one column. A double arrow is `name <-> name`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from docs.pictures import svg

_CELL, _WIDE, _HIGH, _ROW, _MARGIN, _TOP = 284, 184, 48, 110, 12, 42
_SMALL = 12
_PAD = 24  # px between the border of a group and its boxes


class _Box(NamedTuple):
    x: float
    top: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def draw(lines: Sequence[str], alternative: str) -> str:
    """The picture. Raises `KeyError` for an arrow from or to an unknown box."""
    columns = int(lines[0].removeprefix("boxes: "))
    boxes: dict[str, _Box] = {}
    parts: list[str] = []
    rows = 0
    for line in lines[1:]:
        head, _, words = line.partition(": ")
        if head.startswith("group "):
            parts += _draw_group(head.removeprefix("group "), words, columns)
        elif head.startswith("box "):
            across, _, row = head.removeprefix("box ").partition(",")
            first, _, last = across.partition("-")
            rows = max(rows, int(row) + 1)
            name, _, note = (cell.strip() for cell in words.partition("|"))
            width = _WIDE + _CELL * (int(last or first) - int(first))
            placed = boxes[name] = _Box(_MARGIN + _PAD + _CELL * int(first), _TOP + _ROW * int(row), width)
            parts += [
                svg.box(placed.x, placed.top, width, _HIGH),
                svg.text(placed.middle, placed.top + (20 if note else 28), name, bold=True),
                *([svg.text(placed.middle, placed.top + 37, note, size=_SMALL)] if note else []),
            ]
        else:
            is_double = " <-> " in head
            start, end = head.split(" <-> " if is_double else " -> ")
            parts += _draw_arrow(boxes[start], boxes[end], [cell.strip() for cell in words.split("|")], is_double)
    width = 2 * (_MARGIN + _PAD) + _CELL * (columns - 1) + _WIDE
    return svg.frame(alternative, width, _TOP + _ROW * (rows - 1) + _HIGH + _MARGIN + 8, parts)


def _draw_group(rows: str, words: str, columns: int) -> list[str]:
    first, _, last = rows.partition("-")
    top = _TOP + _ROW * int(first) - 26
    width = 2 * _PAD + _CELL * (columns - 1) + _WIDE
    height = _ROW * (int(last) - int(first)) + _HIGH + 38
    label = svg.text(_MARGIN + 8, top + 16, words, size=_SMALL, anchor="start", fill="faint")
    return [svg.box(_MARGIN, top, width, height, fill="group"), label]


def _draw_arrow(start: _Box, end: _Box, words: Sequence[str], is_double: bool) -> list[str]:
    if start.top == end.top:
        to_right = end.x > start.x
        x1, x2 = (start.x + start.width, end.x) if to_right else (start.x, end.x + end.width)
        y = start.top + _HIGH / 2
        line, labels = svg.arrow((x1, y), (x2, y)), []
        for i, text in enumerate(words):
            labels.append(svg.text((x1 + x2) / 2, y - 6 if i == 0 else y + 14, text, size=_SMALL))
    else:
        x = start.middle if start.width <= end.width else end.middle
        down = end.top > start.top
        y1, y2 = (start.top + _HIGH, end.top) if down else (start.top, end.top + _HIGH)
        line = svg.arrow((x, y1), (x, y2))
        labels = []
        for i, text in enumerate(words):
            y = (y1 + y2) / 2 + 4 + (i - (len(words) - 1) / 2) * 14
            labels.append(svg.text(x + 8, y, text, size=_SMALL, anchor="start"))
    if is_double:
        line = line.replace("marker-end", 'marker-start="url(#tip)" marker-end')
    return [line, *labels]
