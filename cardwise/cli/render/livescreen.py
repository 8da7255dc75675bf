"""The live screen of `cardwise top`: coloured plain text on the terminal's alternate screen, redrawn on each refresh.

rich draws the screen. Only this module imports rich, and this module is imported only for a live screen
(docs/design/0014-libraries.md). While the screen is open, the terminal delivers each key at once and does not echo it
(cbreak mode). When the screen closes, also after SIGTERM, the terminal's mode is restored.
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

# Colours follow the words of the text, so that the live screen shows the same text as `--once`.
_PATTERN_BY_STYLE: Final = {
    "bold": r"\A[^\n]*|^NODE .*$",
    "green": r"(?<=\[)#+(?=[.\]])",
    "yellow": r"\bcordoned\b|^note: .*$",
    "red": r"\bunhealthy\b|\bMPS-\w+|\S+!|not of now: .*$",
}
_POLL_SECONDS: Final = (
    1.0  # maximum time until a signal is noticed: a signal just before the call of `select` does not interrupt it
)
_MAX_KEY_BYTES: Final = 64  # maximum number of bytes that are read at once


@contextmanager
def open_screen() -> Iterator[Callable[[str], None]]:
    """Yield a function that draws a string, cut to the terminal's size. Restores the terminal's content at the end."""
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
        """Wait until the key is typed, in upper or lower case, but at most `seconds`. Returns whether it was typed."""
        deadline = self._clock.now() + seconds
        while self._terminal is not None and (remaining := deadline - self._clock.now()) > 0:
            if not select.select([self._terminal], [], [], min(remaining, _POLL_SECONDS))[0]:
                continue
            key_bytes = os.read(self._terminal, _MAX_KEY_BYTES)
            if key.encode() in key_bytes.lower():
                return True
            if not key_bytes:  # the terminal was closed
                self._terminal = None
        if self._terminal is None:
            self._clock.sleep(max(0.0, deadline - self._clock.now()))
        return False


@contextmanager
def open_keyboard(clock: Clock) -> Iterator[Keyboard]:
    """Yield the keyboard of the terminal on standard input; without a terminal it has no keys."""
    terminal = _open_own_terminal()
    if terminal is None:
        yield Keyboard(None, clock)
        return
    former_mode = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield Keyboard(terminal, clock)
    finally:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, former_mode)  # unread keys must not become input of the shell


def _open_own_terminal() -> int | None:
    """Open standard input if it is a terminal and this program is in the foreground; None otherwise.

    The kernel stops a program in the background that changes the terminal's mode.
    """
    try:
        terminal = sys.stdin.fileno()
        return terminal if os.tcgetpgrp(terminal) == os.getpgrp() else None
    except (AttributeError, ValueError, OSError):  # standard input is closed, or is not a file, or not a terminal
        return None


def color_text(text: str) -> Text:
    """Return the text with colours; its lines are not wrapped."""
    colored = Text(text, no_wrap=True, overflow="crop")
    for style, pattern in _PATTERN_BY_STYLE.items():
        colored.highlight_regex(rf"(?m){pattern}", style)
    return colored
