"""Draws the pictures of the documents: an SVG beside each text file of this folder.

The texts are the sources, so that diffs can be read; `tests/docs` checks that the pictures are up to date. The first
line that is no comment says the kind: `lanes:` (`sequence`), `gpu:` (`shares`) or `boxes:` (`boxes`).
"""

from pathlib import Path

from docs.pictures import boxes, sequence, shares

FOLDER = Path(__file__).parent
_KINDS = {"lanes": sequence.draw, "gpu": shares.draw, "boxes": boxes.draw}


def draw_file(source: Path) -> str:
    """The SVG of a text file of this folder. Raises `KeyError` for an unknown kind."""
    lines = [line for line in source.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return _KINDS[lines[0].partition(":")[0]](lines, source.stem.replace("-", " "))


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.txt")):
        source.with_suffix(".svg").write_text(draw_file(source))
