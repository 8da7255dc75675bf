"""Decision trees, one for each value: questions from top to bottom, with the answer to the right of each.

`decision: value` begins a tree; then `question | answer if yes`, and last `else | answer`.
"""

import textwrap
from collections.abc import Sequence

from docs.pictures import svg

_QUESTION, _ANSWER, _ARROW, _GAP, _MARGIN = 340, 370, 50, 16, 18
_HEAD = 30
_PAD = 10


def draw(lines: Sequence[str], alternative: str) -> str:
    """The picture."""
    parts: list[str] = []
    y = float(_MARGIN)
    for i, line in enumerate(lines):
        if line.startswith("decision: "):
            parts.append(svg.text(_MARGIN, y + 18, line.removeprefix("decision: "), size=15, bold=True, anchor="start"))
            y += _HEAD
            continue
        question, answer = (cell.strip() for cell in line.split("|"))
        is_last = question == "else"
        question_lines = _wrap(question, _QUESTION)
        answer_lines = _wrap(answer, _ANSWER)
        height = max(len(question_lines), len(answer_lines)) * svg.LINE_HEIGHT + _PAD
        middle = y + height / 2
        right = _MARGIN + _QUESTION + _ARROW
        if is_last:
            corner = _MARGIN + _QUESTION / 2
            path = f"M{corner:.0f} {y - _GAP:.0f}V{middle:.0f}H{right - 2:.0f}"
            parts += [
                f'<path class="arrow" d="{path}" fill="none" stroke-width="1.5" marker-end="url(#tip)"/>',
                svg.text(corner + 8, middle - 6, "no", size=12, anchor="start", fill="faint"),
            ]
        else:
            parts += [
                svg.box(_MARGIN, y, _QUESTION, height, fill="note"),
                *_draw_lines(_MARGIN + _PAD, middle, question_lines),
                svg.arrow((_MARGIN + _QUESTION, middle), (right - 2, middle)),
                svg.text(_MARGIN + _QUESTION + _ARROW / 2 - 4, middle - 5, "yes", size=12, fill="faint"),
            ]
            if not lines[i + 1].startswith("else "):
                x = _MARGIN + _QUESTION / 2
                parts += [
                    svg.arrow((x, y + height), (x, y + height + _GAP - 1)),
                    svg.text(x + 8, y + height + _GAP - 4, "no", size=12, anchor="start", fill="faint"),
                ]
        parts += [svg.box(right, y, _ANSWER, height), *_draw_lines(right + _PAD, middle, answer_lines)]
        y += height + _GAP
    return svg.frame(alternative, 2 * _MARGIN + _QUESTION + _ARROW + _ANSWER, y, parts)


def _wrap(words: str, width: float) -> list[str]:
    return textwrap.wrap(words, int((width - 2 * _PAD) / svg.LETTER), break_on_hyphens=False)


def _draw_lines(x: float, middle: float, lines: Sequence[str]) -> list[str]:
    first = middle + 5 - (len(lines) - 1) / 2 * svg.LINE_HEIGHT
    return [svg.text(x, first + i * svg.LINE_HEIGHT, line, anchor="start") for i, line in enumerate(lines)]
