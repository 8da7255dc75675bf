"""Supervision: the loop of a daemon thread never ends by an exception.

A thread that ends by an exception ends alone: the process goes on, its probes answer, and what the thread did is not
done any more. Each loop handles the exceptions of its work by itself, with its own log line and pause. Here is what is
left: exceptions of that handling (a logger that fails, a message that cannot be made), and of the code in between.
"""

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable

import structlog

from cardwise.clock import Clock

_log = structlog.get_logger("cardwise.supervision")

_INITIAL_PAUSE = 1.0  # seconds
_MAX_PAUSE = 30.0  # seconds; 5,000 nodes must not list again every second


def supervised_thread(loop: Callable[[], None], name: str, clock: Clock) -> threading.Thread:
    """A daemon thread that runs `loop` until it returns; not started yet. If it raises, it runs again after a pause.

    loop: returns when its owner stops it, also if it is called again afterwards.
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
    except Exception:  # noqa: BLE001 - it may be what has failed
        with contextlib.suppress(Exception):
            traceback.print_exc(file=sys.stderr)
