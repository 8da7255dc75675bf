"""Counts of pods that came and that were refused, by size: they show a policy that gains by refusing big pods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# How many cards a pod asks at most to be of a size.
_SIZES: Final[Sequence[tuple[float, str]]] = (
    (0.0, "no card"),
    (0.25, "to 1/4"),
    (0.5, "to 1/2"),
    (0.999, "below 1"),
    (1.0, "1"),
    (2.0, "to 2"),
    (4.0, "to 4"),
    (float("inf"), "over 4"),
)
SIZES: Final = tuple(name for _, name in _SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPods:
    """The refused pods of one of `SIZES`. `demand`, `lost`: how many cards arriving pods, and refused pods, ask for."""

    size: str
    came: int
    refused: int
    demand: float
    lost: float

    @property
    def percent(self) -> float:
        """How many of those that came were refused."""
        return 100 * self.refused / self.came if self.came else 0.0


class Tally:
    """The pods that came and were refused in one run."""

    def __init__(self) -> None:
        self._came: dict[str, list[float]] = {name: [0.0, 0.0] for name in SIZES}
        self._refused: dict[str, list[float]] = {name: [0.0, 0.0] for name in SIZES}

    def add(self, cards: float, *, refused: bool) -> None:
        """A pod that asks for so many cards has come."""
        size = next(name for most, name in _SIZES if cards <= most)
        for counts in (self._came, self._refused)[: 1 + refused]:
            counts[size][0] += 1
            counts[size][1] += cards

    def rows(self) -> tuple[RefusedPods, ...]:
        """The sizes of which pods came."""
        return tuple(
            RefusedPods(size=size, came=int(came), refused=int(refused), demand=round(demand, 3), lost=round(lost, 3))
            for (size, (came, demand)), (refused, lost) in zip(self._came.items(), self._refused.values(), strict=True)
            if came
        )

    def lost(self) -> float:
        """How much of what was asked for was refused, in percent."""
        demand = sum(demand for _, demand in self._came.values())
        return 100 * sum(lost for _, lost in self._refused.values()) / demand if demand else 0.0
