"""Counts work where a test must not measure time: the steps of the interpreter in this thread."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Work:
    steps: int = 0


@contextmanager
def work() -> Iterator[Work]:
    """What is done meanwhile, loops of C left out."""
    done, before = Work(), sys.gettrace()

    def trace(frame, event, _):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        done.steps += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        yield done
    finally:
        sys.settrace(before)
