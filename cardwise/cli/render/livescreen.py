"""The live screen of `cardwise top`: coloured plain text on the terminal's alternate screen, redrawn on each refresh.

rich draws it. Only this module imports rich, and only a live screen imports this module: docs/design/0014-libraries.md.
While it is open, the terminal delivers each key at once and does not echo it (cbreak mode). At the end, also by
SIGTERM, the terminal's mode is restored.
"""

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cardwise.cli import signals
from cardwise.clock import Clock

# By what stands in the text, so that a live screen and what `--once` prints have the same words.
_PATTERN_BY_STYLE: Final = {
    "bold": r"\A[^\n]*|^NODE .*$",
    "green": r"(?<=\[)#+(?=[.\]])",
    "yellow": r"\bcordoned\b|^note: .*$",
    "red": r"\bunhealthy\b|\bMPS-\w+|\S+!|not of now: .*$",
}
_POLL_SECONDS: Final = 1.0  # a signal that comes just before `select` is called does not end it: it ends the next one
_MAX_KEY_BYTES: Final = 64  # bytes read at once: more than a hand types in a moment


@contextmanager
def open_screen() -> Iterator[Callable[[str], None]]:
    """Yields a function that draws a text, cut to the terminal. Restores the terminal's content afterwards."""
    console = Console(highlight=False, force_terminal=True)
    with (
        signals.raise_on_signals(),
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        yield lambda text: live.update(color_text(text), refresh=True)


class Keyboard:
    """The keys typed while a live screen is open. `terminal`: a file descriptor; None without a keyboard."""

    def __init__(self, terminal: int | None, clock: Clock) -> None:
        self._terminal = terminal
        self._clock = clock

    @property
    def has_terminal(self) -> bool:
        return self._terminal is not None

    def wait_for_key(self, key: str, seconds: float) -> bool:
        """Waits so long, or until the key is typed, in either case; returns whether it was."""
        deadline = self._clock.now() + seconds
        while self._terminal is not None and (remaining := deadline - self._clock.now()) > 0:
            if not select.select([self._terminal], [], [], min(remaining, _POLL_SECONDS))[0]:
                continue
            key_bytes = os.read(self._terminal, _MAX_KEY_BYTES)
            if key.encode() in key_bytes.lower():
                return True
            if not key_bytes:  # the terminal has hung up
                self._terminal = None
        if self._terminal is None:
            self._clock.sleep(max(0.0, deadline - self._clock.now()))
        return False


@contextmanager
def open_keyboard(clock: Clock) -> Iterator[Keyboard]:
    """The keys of the terminal on standard input; none if it is not a terminal, or another program reads it."""
    terminal = _open_own_terminal()
    if terminal is None:
        yield Keyboard(None, clock)
        return
    former_mode = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield Keyboard(terminal, clock)
    finally:
        termios.tcsetattr(
            terminal, termios.TCSAFLUSH, former_mode
        )  # keys that nobody has read are no command of the shell


def _open_own_terminal() -> int | None:
    """Standard input, if it is a terminal with this program in the foreground: others are stopped if they set it."""
    try:
        terminal = sys.stdin.fileno()
        return terminal if os.tcgetpgrp(terminal) == os.getpgrp() else None
    except (AttributeError, ValueError, OSError):  # closed, or no file, or no terminal
        return None


def color_text(text: str) -> Text:
    """The text with colours, no line of which wraps."""
    colored = Text(text, no_wrap=True, overflow="crop")
    for style, pattern in _PATTERN_BY_STYLE.items():
        colored.highlight_regex(rf"(?m){pattern}", style)
    return colored
