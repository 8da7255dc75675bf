"""Draws the sequence diagrams of the documents: an SVG beside each text file of this folder.

The texts are the sources, so that diffs can be read; `tests/docs` checks that the pictures are up to date.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
_LANE, _TOP, _ROW, _MARGIN = 138, 58, 34, 76
_LETTER = 6.1  # width of a letter of 11 px, about
_INK, _LINE, _BLUE, _PAPER, _BOX, _NOTE = "#1f2328", "#afb8c1", "#0969da", "#ffffff", "#ddf4ff", "#fff8c5"
_FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_TIP = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'


@dataclass(frozen=True, slots=True)
class Step:
    """An arrow between two lanes, by index; or a note on one lane, if both are the same."""

    at: int
    to: int
    words: str


def parse(text: str) -> tuple[list[str], list[Step]]:
    """Parse the text into lanes and steps. Raises `ValueError` for an unknown lane."""
    lanes: list[str] = []
    steps = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        head, _, words = line.partition(": ")
        if head == "lanes":
            lanes = [lane.strip() for lane in words.split("|")]
            continue
        at, _, to = head.partition(" -> ")
        steps.append(Step(lanes.index(at), lanes.index(to or at), words))
    return lanes, steps


def draw(text: str, title: str) -> str:
    """The text's picture, as SVG."""
    lanes, steps = parse(text)
    width, height = 2 * _MARGIN + _LANE * (len(lanes) - 1), _TOP + _ROW * (len(steps) + 1)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    tip = f'<path d="M0 0 8 4 0 8z" fill="{_BLUE}"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONTS}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<defs><marker id="tip" {_TIP}>{tip}</marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="{_PAPER}"/>',
    ]
    for i, lane in enumerate(lanes):
        x = _x(i)
        parts += [
            f'<line x1="{x}" y1="44" x2="{x}" y2="{height - 12}" stroke="{_LINE}"/>',
            f'<rect x="{x - 60}" y="14" width="120" height="30" rx="6" fill="{_BOX}" stroke="{_LINE}"/>',
            _text(x, 33, lane, size=13, bold=True),
        ]
    for number, step in enumerate(steps):
        parts += _step(step, _TOP + _ROW * (number + 1), f"{number + 1}. {step.words}", width)
    return "\n".join([*parts, "</svg>", ""])


def _step(step: Step, y: int, words: str, width: int) -> list[str]:
    wide = len(words) * _LETTER + 12
    middle = (_x(step.at) + _x(step.to)) / 2
    middle = min(max(middle, wide / 2 + 4), width - wide / 2 - 4)  # inside the picture
    if step.at == step.to:
        box = f'<rect x="{middle - wide / 2:.0f}" y="{y - 19}" width="{wide:.0f}" height="22" rx="4" '
        return [f'{box}fill="{_NOTE}" stroke="{_LINE}"/>', _text(middle, y - 4, words)]
    side = 3 if step.to > step.at else -3
    line = f'<line x1="{_x(step.at)}" y1="{y}" x2="{_x(step.to) - side}" y2="{y}" '
    return [
        # A background for the words, which lines of lanes would cross.
        f'<rect x="{middle - wide / 2 + 4:.0f}" y="{y - 18}" width="{wide - 8:.0f}" height="15" fill="{_PAPER}"/>',
        f'{line}stroke="{_BLUE}" stroke-width="1.5" marker-end="url(#tip)"/>',
        _text(middle, y - 6, words),
    ]


def _x(lane: int) -> int:
    return _MARGIN + _LANE * lane


def _text(x: float, y: int, words: str, *, size: int = 11, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y}" font-size="{size}" text-anchor="middle" fill="{_INK}"{weight}>'
        f"{escape(words, quote=False)}</text>"
    )


def draw_file(source: Path) -> str:
    """The SVG of a text file of this folder."""
    return draw(source.read_text(), source.stem.replace("-", " "))


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.txt")):
        source.with_suffix(".svg").write_text(draw_file(source))
