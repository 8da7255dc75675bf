"""Turns signals that end the program into exceptions, for commands that must restore something before they end."""

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

_ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)  # the program gets SIGHUP when the terminal is closed


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise SystemExit, so that `with` and `finally` run."""
    with ExitStack() as former_handlers:
        for signal_number in _ENDING_SIGNALS:
            if signal.getsignal(signal_number) is signal.SIG_DFL:  # a signal that nohup ignores stays ignored
                former_handlers.callback(signal.signal, signal_number, signal.signal(signal_number, _exit))
        yield


def _exit(signal_number: int, _frame: object) -> None:
    sys.exit(128 + signal_number)
