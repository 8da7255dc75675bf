"""Counts work where a test must not measure time: the steps of the interpreter in this thread."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Work:
    steps: int = 0


@contextmanager
def work() -> Iterator[Work]:
    """What is done meanwhile, loops of C left out.

    Calls, returns and each time that a line is come to: of opcodes, 3.12 and 3.13 leave out those of code that is
    traced for the first time.
    """
    done, before = Work(), sys.gettrace()

    def trace(frame, event, _):
        done.steps += 1
        return trace

    gc.disable()  # or the finalizers of what others have left would count
    sys.settrace(trace)
    try:
        yield done
    finally:
        sys.settrace(before)
        gc.enable()
