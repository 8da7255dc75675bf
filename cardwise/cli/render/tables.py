"""Tables as kubectl prints them: the one printer of all commands."""

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns with two spaces between them; rows may be of different length."""
    widths: list[int] = []
    for row in rows:
        for i, cell in enumerate(row):
            widths[i : i + 1] = [max(len(cell), widths[i] if i < len(widths) else 0)]
    lines = ("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def together(tables: Iterable[Sequence[Sequence[str]]]) -> str:
    """Tables under each other, a blank line between them; those with nothing below their heads are left out."""
    return "\n".join(aligned(rows) for rows in tables if len(rows) > 1)
