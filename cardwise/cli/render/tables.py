"""Prints the tables of all commands, in kubectl's layout."""

from collections.abc import Iterable, Sequence
from typing import Final

from cardwise.core.values import wording

_MAX_CELL_BYTES: Final = 512  # maximum length of a cell


def align_rows(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns with two spaces between them. Rows may have different lengths.

    Each cell is printed on one line, even if its text contains line breaks. The last cell of a row does not make its
    column wider.
    """
    rows = [
        [
            *(wording.sanitize_message(cell, _MAX_CELL_BYTES) for cell in row[:-1]),
            *map(wording.sanitize_message, row[-1:]),
        ]
        for row in rows
    ]
    widths: list[int] = []
    for row in rows:
        for i, cell in enumerate(row):
            widths[i : i + 1] = [max(len(cell), widths[i] if i < len(widths) else 0)]
    lines = ("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def fit_columns(rows: Sequence[Sequence[str]], columns: int | None, optional_heads: Sequence[str]) -> str:
    """Format rows with `align_rows`, and leave out optional columns of a table that is wider than the terminal.

    Each row has a cell below each head.

    columns: the width of the terminal; None without a terminal.
    optional_heads: the heads of the columns that may be left out, in the order in which to leave them out.
    """
    for head in optional_heads:
        if columns is None or max(map(len, align_rows(rows).splitlines())) <= columns:
            break
        removed_index = list(rows[0]).index(head)
        rows = [[cell for i, cell in enumerate(row) if i != removed_index] for row in rows]
    return align_rows(rows)


def format_age(seconds: float) -> str:
    """Format an age in kubectl's form, such as 90s, 5m, 3h or 2d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def stack_tables(tables: Iterable[Sequence[Sequence[str]]]) -> str:
    """Format tables one below the other, with blank lines between them. Tables without rows are left out."""
    return "\n".join(align_rows(rows) for rows in tables if len(rows) > 1)
