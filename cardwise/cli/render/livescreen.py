"""The live screen of `cardwise top`: plain text on the terminal's other screen, coloured, and drawn anew at each look.

rich draws it. Only this module imports rich, and only a live screen imports this module: docs/design/0014-libraries.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

# By what stands in the text, so that a live screen and what `--once` prints have the same words.
_COLOURS: Final = {
    "bold": r"\A[^\n]*|^NODE .*$",
    "green": r"(?<=\[)#+(?=[.\]])",
    "yellow": r"\bcordoned\b|^note: .*$",
    "red": r"\bunhealthy\b|\bMPS-\w+|\S+!|not of now: .*$",
}


@contextmanager
def opened() -> Iterator[Callable[[str], None]]:
    """Yields what draws a text, cut to the terminal. Afterwards the terminal shows what it showed before."""
    console = Console(highlight=False, force_terminal=True)
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield lambda text: live.update(coloured(text), refresh=True)


def coloured(text: str) -> Text:
    """The text with colours, no line of which wraps."""
    made = Text(text, no_wrap=True, overflow="crop")
    for style, pattern in _COLOURS.items():
        made.highlight_regex(rf"(?m){pattern}", style)
    return made
