"""Prints: the one way out of the command line, for people and for programs.

Other users write reasons, names of processes, messages of events and annotations, and a terminal obeys an escape
sequence in them. So text for people loses its control characters. JSON and YAML stay as they are, because the encoder
has escaped them.
"""

import shutil
import sys

import click


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """For people, on a terminal or in a file."""
    click.echo(clean(text), err=err, nl=nl)


def data(text: str, *, nl: bool = True) -> None:
    """For programs."""
    click.echo(text, nl=nl)


def columns() -> int | None:
    """The width of the terminal; None if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def clean(text: str) -> str:
    """The text in its lines, without control characters and what else is not seen."""
    return "\n".join(map(line, text.split("\n")))


def line(text: str) -> str:
    """As `clean`, as one line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text)
