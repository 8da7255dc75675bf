"""What the pictures share: colors for light and dark pages, fonts, texts, boxes, arrows and the frame of an SVG."""

from collections.abc import Iterable
from html import escape

TEXT = 13  # size of plain text in px; pages show pictures of about 800 px
LETTER = 7.2  # width of a letter of that size, about
LINE_HEIGHT = 16
# Colors by class, on light and on dark pages. A page that includes the picture as an image decides by its reader's
# setting; the picture has a background of its own, so that it can be read on any page.
_FILLS = {
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#57606a", "#9da7b3"),
    "box": ("#ddf4ff", "#0c2d4d"),
    "note": ("#fff8c5", "#3d3200"),
    "group": ("#f6f8fa", "#161b22"),
    "pod0": ("#ddf4ff", "#0c2d4d"),
    "pod1": ("#dafbe1", "#0f3d1f"),
    "pod2": ("#fbefff", "#3b1f57"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#cf222e", "#ff7b72"),
}
_LINE, _ARROW = ("#8c959f", "#6e7681"), ("#0969da", "#58a6ff")
_FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, Liberation Mono, DejaVu Sans Mono, monospace"
_TIP = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse"'


def _rules(theme: int) -> str:
    fills = "".join(f".{name}{{fill:{colors[theme]}}}" for name, colors in _FILLS.items())
    return f"{fills}.line{{stroke:{_LINE[theme]}}}.arrow{{stroke:{_ARROW[theme]}}}.tip{{fill:{_ARROW[theme]}}}"


def frame(alternative: str, width: float, height: float, parts: Iterable[str]) -> str:
    """The SVG with its alternative text, the tip of the arrows, and the parts on the background."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONTS}" role="img">',
            f"<title>{escape(alternative)}</title>",
            f"<style>.mono{{font-family:{_MONO}}}{_rules(0)}@media (prefers-color-scheme: dark){{{_rules(1)}}}</style>",
            f'<defs><marker id="tip" {_TIP}><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(
    x: float, y: float, words: str, *, size: int = TEXT, bold: bool = False, anchor: str = "middle", fill: str = "ink"
) -> str:
    """A line of text at x: its middle, or with the anchor `start` its beginning."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text class="{fill}" x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}"{weight}>'
        f"{escape(words, quote=False)}</text>"
    )


def box(x: float, y: float, width: float, height: float, *, fill: str = "box", radius: int = 6) -> str:
    """A rectangle with round corners."""
    return (
        f'<rect class="{fill} line" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="{radius}"/>'
    )


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """An arrow between two points."""
    (x1, y1), (x2, y2) = start, end
    return (
        f'<line class="arrow" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" '
        f'stroke-width="1.5" marker-end="url(#tip)"/>'
    )
