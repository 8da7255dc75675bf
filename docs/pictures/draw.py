"""Draws the pictures of the documents: an SVG for each text file of this folder, screen and recording.

The texts are the sources, so that diffs can be read; `tests/docs` checks that the pictures are up to date. Lines that
begin with # are comments. The first other line, `alternative: words`, is for readers who do not see the picture; the
second one says the kind: `lanes:` (`sequence`), `boxes:` (`boxes`), `gpus:` (`gpus`) or `decision:` (`decisions`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.pictures import boxes, cast, decisions, gpus, screens, sequence

FOLDER = Path(__file__).parent
_KINDS = {"lanes": sequence.draw, "boxes": boxes.draw, "gpus": gpus.draw, "decision": decisions.draw}


def _draw_file(source: Path) -> str:
    """The SVG of a text file of this folder. Raises `KeyError` for an unknown kind."""
    lines = [line for line in source.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return _KINDS[lines[1].partition(":")[0]](lines[1:], lines[0].removeprefix("alternative: "))


PICTURES: dict[str, Callable[[], str]] = {
    **{source.stem: partial(_draw_file, source) for source in sorted(FOLDER.glob("*.txt"))},
    "top": partial(screens.draw, screens.TOP),
    "explain": partial(screens.draw, screens.EXPLAIN),
    "demo": cast.draw,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
