"""Lines of a terminal, in the colors of `cardwise top`, on light and on dark pages."""

import re
from collections.abc import Sequence
from html import escape

from docs.pictures import svg

WIDTH = 780  # px of the widest line
_LARGEST = 13  # px
_LETTER_BY_SIZE = 0.6  # of a monospaced font: width of a letter, by its size
_PATTERN_BY_FILL = {
    "good": r"(?<=\[)#+(?=[.\]])|^\s+✓|\bReady\b",
    "bad": r"\S+!|\d+ MiB short|\b(?:refused|full)\b",
    "faint": r"^note: .*$",
}
_BOLD = re.compile(r"^\$ .*|^\s*\$ cardwise.*|^NODE .*|^\d+/\d+ .*")


def font_size(columns: int) -> float:
    """Px of the font with which so many columns fit the width."""
    return min(_LARGEST, WIDTH / columns / _LETTER_BY_SIZE)


def draw_line(x: float, y: float, line: str, size: float) -> str:
    """A line of text at x, colored by its words."""
    letter = size * _LETTER_BY_SIZE
    bold = ' font-weight="600"' if _BOLD.match(line) else ""
    fills = _color(line)
    parts = [f'<g class="mono" font-size="{size:.1f}"{bold}>']
    # Each column has a place and a width of its own, so that it is in line whatever font the reader has.
    for column in re.finditer(r"\S+(?: \S+)*", line):
        start, end = column.span()
        parts.append(
            f'<text class="ink" x="{x + start * letter:.1f}" y="{y:.1f}" textLength="{(end - start) * letter:.1f}" '
            f'lengthAdjust="spacingAndGlyphs">{_format_spans(line, fills, start, end)}</text>'
        )
    return "".join([*parts, "</g>"])


def line_end(x: float, line: str, size: float) -> float:
    return x + len(line) * size * _LETTER_BY_SIZE


def wrap(lines: Sequence[str], columns: int) -> list[str]:
    """Long lines continue below, indented as they are."""
    wrapped: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip(" -")))
        rest = line
        while len(rest) > columns:
            cut = rest.rfind(" ", len(indent) + 1, columns + 1)
            cut = cut if cut > 0 else columns
            wrapped.append(rest[:cut])
            rest = indent + rest[cut:].lstrip()
        wrapped.append(rest)
    return wrapped


def _color(line: str) -> list[str]:
    """The class of each letter; "" for plain ones."""
    fills = [""] * len(line)
    for fill, pattern in _PATTERN_BY_FILL.items():
        for match in re.finditer(pattern, line):
            fills[match.start() : match.end()] = [fill] * (match.end() - match.start())
    return fills


def _format_spans(line: str, fills: Sequence[str], start: int, end: int) -> str:
    parts = []
    for i in range(start + 1, end + 1):
        if i == end or fills[i] != fills[start]:
            words = escape(line[start:i], quote=False)
            parts.append(f'<tspan class="{fills[start]}">{words}</tspan>' if fills[start] else words)
            start = i
    return "".join(parts)


def background(width: float, height: float) -> str:
    return svg.box(1, 1, width - 2, height - 2, fill="group")
