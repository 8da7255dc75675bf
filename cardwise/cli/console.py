"""Printing: all output of the command line, for people and for programs.

Other users write reasons, process names, event messages and annotations, and a terminal obeys escape sequences in them.
So in text for people control characters are escaped, lines have a maximum length, and only the program ends a line.
JSON and YAML stay as they are, because their encoders escape control characters.
"""

import shutil
import sys
from typing import Final

import click

from cardwise.core.values import wording

_MAX_LINE_BYTES: Final = 16 * 1024  # bytes: more than the longest command that doctor proposes


def print_text(text: str, *, err: bool = False) -> None:
    """A sentence for people, as one line."""
    click.echo(clean_line(text), err=err)


def print_lines(text: str) -> None:
    """Lines for people, on a terminal or in a file: a table, or sentences of which each is one line already."""
    click.echo(clean_text(text), nl=False)


def print_data(text: str, *, nl: bool = True) -> None:
    """Print output that programs read: unchanged, without cleaning or cutting."""
    click.echo(text, nl=nl)


def terminal_columns() -> int | None:
    """The width of the terminal; None if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def clean_text(text: str) -> str:
    """The text in its lines, each as `clean_line` has it."""
    return "\n".join(map(clean_line, text.split("\n")))


def clean_line(text: str) -> str:
    """The text as one line of limited length, in which each character is seen."""
    return wording.sanitize_line(text, _MAX_LINE_BYTES)
