"""The deadline of a review: the time until which the webhook must have answered.

The API server sends the `timeoutSeconds` of the webhook configuration with each call (`?timeout=5s`), and reads no
answer after this time. A review that lasted longer would only keep a thread from other reviews. The deadline belongs to
the thread that answers the review. So loops and lookups check it without a parameter in each function between.
Without a deadline, as in tests of rules, all functions behave as if much time were left.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from cardwise.clock import Clock

# The part of the API server's timeout in which the answer is computed. The rest is for the network and for encoding.
_USED_PART: Final = 0.8
_DEFAULT_TIMEOUT: Final = 5.0  # seconds; the chart's webhook.timeoutSeconds, for calls without `timeout`
_MAX_TIMEOUT: Final = 10.0  # seconds; a client other than the API server may send any timeout
_TIMEOUT: Final = re.compile(r"(?:^|&)timeout=([1-9]|[12][0-9]|30)s(?:&|$)")  # the values that the API server accepts


class ReviewTimeout(Exception):
    """The deadline of the review has passed, or would pass in a lookup."""


class _Deadline(NamedTuple):
    clock: Clock
    time: float  # as of `clock.now`


_deadline: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


def seconds_of(query: str) -> float:
    """The seconds for a review, by the query of the call."""
    match = _TIMEOUT.search(query)
    return _USED_PART * (min(float(match[1]), _MAX_TIMEOUT) if match is not None else _DEFAULT_TIMEOUT)


@contextmanager
def review_deadline(clock: Clock, time: float) -> Iterator[None]:
    """Set the deadline of the review that the block answers. `time`: as of `clock.now`."""
    token = _deadline.set(_Deadline(clock, time))
    try:
        yield
    finally:
        _deadline.reset(token)


def check() -> None:
    """Raises ReviewTimeout after the deadline."""
    deadline = _deadline.get()
    if deadline is not None and deadline.clock.now() >= deadline.time:
        raise ReviewTimeout


def remaining_seconds() -> float | None:
    """The seconds until the deadline; None without a deadline. Raises ReviewTimeout after it."""
    deadline = _deadline.get()
    if deadline is None:
        return None
    seconds = deadline.time - deadline.clock.now()
    if seconds <= 0:
        raise ReviewTimeout
    return seconds


def limit_seconds(seconds: float) -> float:
    """The timeout of a lookup: `seconds`, or the time until the deadline if it is shorter. Raises ReviewTimeout after
    the deadline.
    """
    remaining = remaining_seconds()
    return seconds if remaining is None else min(seconds, remaining)
