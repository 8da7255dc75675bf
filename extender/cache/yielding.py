"""Does long work under the state's lock in short slices, lets calls that wait in between them, and rests afterwards."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from cardwise.clock import Clock

_T = TypeVar("_T")
# Who lets a lock go and takes it again at once mostly gets it: whoever waits for it must be woken first, some 50 us.
_PAUSE: Final = 0.002  # seconds
_REST, _LONGEST_REST = 10, 0.5  # times as long as the work took; seconds


def slices(items: Sequence[_T], size: int, clock: Clock) -> Iterator[Sequence[_T]]:
    """So many at a time; give the lock up before the next is asked for."""
    for at in range(0, len(items), size):
        if at:
            give_way(clock)
        yield items[at : at + size]


def rest(cost: float) -> float:
    """Seconds before work is tried again that took so long and found nothing: nine tenths of the time are others'."""
    return min(_LONGEST_REST, _REST * cost)


def give_way(clock: Clock) -> None:
    """To a call of kube-scheduler that waits for the state."""
    clock.sleep(_PAUSE)
