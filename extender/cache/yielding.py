"""Splits long work under the state's lock into short slices, with pauses in which other threads get the lock."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from cardwise.clock import Clock
from extender.queue.searchpauses import PAUSE_FACTOR

TURN_SECONDS: Final = 0.004  # seconds of CPU after which a turn under the lock starts no further plan or node search

_T = TypeVar("_T")
# Seconds between two slices. Without a pause, a thread that releases the lock and takes it again at once usually gets
# it before a waiting thread, which takes 50 us to wake.
_PAUSE: Final = 0.002
_MAX_PAUSE: Final = 0.5  # maximum seconds that `pause_seconds` returns


def slices(sequence: Sequence[_T], size: int, clock: Clock) -> Iterator[Sequence[_T]]:
    """The elements in slices of `size`, with a pause between two slices. The caller must release the lock before it
    takes the next slice.
    """
    for start in range(0, len(sequence), size):
        if start:
            give_way(clock)
        yield sequence[start : start + size]


def pause_seconds(cost: float) -> float:
    """The seconds to pause after work in vain that took `cost` seconds, so that such work takes a tenth of the time."""
    return min(_MAX_PAUSE, PAUSE_FACTOR * cost)


def give_way(clock: Clock) -> None:
    """Pause, so that a call of kube-scheduler that waits for the lock gets it."""
    clock.sleep(_PAUSE)
