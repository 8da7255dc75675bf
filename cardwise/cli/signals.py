"""Signals that end the program: commands that must restore something end by an exception, as on Ctrl-C."""

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)  # the second when a terminal goes


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise SystemExit, so that `with` and `finally` run."""
    with ExitStack() as former:
        for sign in _ENDING:
            if signal.getsignal(sign) is signal.SIG_DFL:  # nohup ignores one
                former.callback(signal.signal, sign, signal.signal(sign, _exit))
        yield


def _exit(sign: int, _frame: object) -> None:
    sys.exit(128 + sign)
