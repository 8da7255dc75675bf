"""Printing: all output of the command line, for people and for programs.

Reasons, process names, event messages and annotations come from other users. They may contain escape sequences, which a
terminal would obey. So in text for people, control characters are escaped and the length of a line is limited. Only the
program starts a new line. JSON and YAML are printed unchanged, since their encoders escape control characters.
"""

import shutil
import sys
from typing import Final

import click

from cardwise.core.values import wording

_MAX_LINE_BYTES: Final = 16 * 1024  # maximum length of a line; doctor proposes no longer command


def print_text(text: str, *, err: bool = False) -> None:
    """Print a sentence for people, as one line."""
    click.echo(clean_line(text), err=err)


def print_lines(text: str) -> None:
    """Print lines for people: a table, or sentences that are one line each."""
    click.echo(clean_text(text), nl=False)


def print_data(text: str, *, nl: bool = True) -> None:
    """Print output for programs, without any change."""
    click.echo(text, nl=nl)


def terminal_columns() -> int | None:
    """The width of the terminal in columns; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def clean_text(text: str) -> str:
    """Clean each line of a string with `clean_line`."""
    return "\n".join(map(clean_line, text.split("\n")))


def clean_line(text: str) -> str:
    """Make a string one line of limited length, with its control characters escaped."""
    return wording.sanitize_line(text, _MAX_LINE_BYTES)
