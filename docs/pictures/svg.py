"""What the pictures share: colors, fonts, texts, arrows and the frame of an SVG."""

from collections.abc import Iterable
from html import escape

INK, LINE, BLUE, PAPER, BOX, NOTE = "#1f2328", "#afb8c1", "#0969da", "#ffffff", "#ddf4ff", "#fff8c5"
LETTER = 6.1  # width of a letter of 11 px, about
_FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_TIP = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse"'


def frame(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """The SVG with its title for screen readers, the tip of the arrows, and the parts on white."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONTS}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<defs><marker id="tip" {_TIP}><path d="M0 0 8 4 0 8z" fill="{BLUE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, *, size: int = 11, bold: bool = False, anchor: str = "middle") -> str:
    """A line of text at x: its middle, or with the anchor `start` its beginning."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"{weight}>'
        f"{escape(words, quote=False)}</text>"
    )


def box(x: float, y: float, width: float, height: float, *, fill: str = BOX) -> str:
    """A rectangle with round corners."""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{LINE}"/>'
    )


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """An arrow between two points."""
    (x1, y1), (x2, y2) = start, end
    return (
        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" '
        f'stroke="{BLUE}" stroke-width="1.5" marker-end="url(#tip)"/>'
    )
