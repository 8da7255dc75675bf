"""Supervision: the loop of a daemon thread never ends by an exception.

When a thread ends by an exception, the process continues and its probes succeed, but the thread's work is not done any
more. Each loop handles the exceptions of its work itself, with a log line and a pause. This module handles all other
exceptions: those raised while the loop handles an exception (a failing logger, a message that cannot be formatted), and
those of the code around the work.
"""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable

import structlog

from cardwise.clock import Clock

_log = structlog.get_logger("cardwise.supervision")

_INITIAL_PAUSE = 1.0  # seconds before the first new start of a loop
_MAX_PAUSE = 30.0  # seconds; the threads of 5,000 nodes must not repeat their lists every second


def supervised_thread(loop: Callable[[], None], name: str, clock: Clock) -> threading.Thread:
    """Create a daemon thread that runs `loop`. If `loop` raises, it is run again after a pause. Does not start the
    thread.

    loop: returns when its owner stops it. If it is called after that, it returns at once.
    """
    return threading.Thread(target=_supervise, args=(loop, name, clock), name=name, daemon=True)


def _supervise(loop: Callable[[], None], name: str, clock: Clock) -> None:
    pause = _INITIAL_PAUSE
    while True:
        began = clock.now()
        try:
            loop()
        except Exception:  # noqa: BLE001 - the thread's outermost frame: logged, and the loop starts again
            if clock.now() - began > _MAX_PAUSE:
                pause = _INITIAL_PAUSE
            _report(name, pause)
            clock.sleep(pause)
            pause = min(_MAX_PAUSE, 2 * pause)
        else:
            return


def _report(name: str, pause: float) -> None:
    """Log the exception; print it if the logger fails."""
    try:
        _log.exception("a thread failed; starting its loop again", thread=name, retry_in=pause)
    except Exception:  # noqa: BLE001 - the logger itself may have failed
        with contextlib.suppress(Exception):
            traceback.print_exc(file=sys.stderr)
