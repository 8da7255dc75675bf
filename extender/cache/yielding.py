"""Long work under the state's lock: in short slices, with pauses for other threads between them and afterwards."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from cardwise.clock import Clock
from extender.queue.searchpauses import PAUSE_FACTOR

TURN_SECONDS: Final = 0.004  # seconds of CPU after which a turn starts no further plan or search of a node

_T = TypeVar("_T")
# A thread that releases a lock and takes it again at once usually gets it: a waiting thread takes 50 us to wake.
_PAUSE: Final = 0.002  # seconds
_MAX_PAUSE: Final = 0.5  # seconds


def slices(sequence: Sequence[_T], size: int, clock: Clock) -> Iterator[Sequence[_T]]:
    """The elements in slices of `size`, with a pause between them; the caller releases the lock before the
    next slice.
    """
    for start in range(0, len(sequence), size):
        if start:
            give_way(clock)
        yield sequence[start : start + size]


def pause_seconds(cost: float) -> float:
    """The seconds to pause after work that took `cost` seconds and found nothing, so that it takes at most a tenth of
    the time.
    """
    return min(_MAX_PAUSE, PAUSE_FACTOR * cost)


def give_way(clock: Clock) -> None:
    """Pause, so that a call of kube-scheduler that waits for the lock gets it."""
    clock.sleep(_PAUSE)
