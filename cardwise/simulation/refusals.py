"""Counts arrived and refused pods by size, to show policies that allocate more by refusing big pods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Sizes of pods: the maximum number of cards that a pod of the size requests, and the name of the size.
_POD_SIZES: Final[Sequence[tuple[float, str]]] = (
    (0.0, "no GPU"),
    (0.25, "to 1/4"),
    (0.5, "to 1/2"),
    (0.999, "below 1"),
    (1.0, "1"),
    (2.0, "to 2"),
    (4.0, "to 4"),
    (float("inf"), "over 4"),
)
SIZE_NAMES: Final = tuple(name for _, name in _POD_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPods:
    """The arrived and refused pods of one size.

    size: one of `SIZE_NAMES`.
    arrived, refused: numbers of pods.
    demand, refused_demand: numbers of cards that the arrived pods request, and that the refused pods request.
    """

    size: str
    arrived: int
    refused: int
    demand: float
    refused_demand: float

    @property
    def refused_pods_percent(self) -> float:
        """The share of the arrived pods that were refused, in percent."""
        return 100 * self.refused / self.arrived if self.arrived else 0.0


class RefusalCounter:
    """Counts the arrived and the refused pods of one run."""

    def __init__(self) -> None:
        self._arrived: dict[str, list[float]] = {name: [0.0, 0.0] for name in SIZE_NAMES}
        self._refused: dict[str, list[float]] = {name: [0.0, 0.0] for name in SIZE_NAMES}

    def add(self, cards: float, *, refused: bool) -> None:
        """Count an arrived pod that requests `cards` cards."""
        size = next(name for limit, name in _POD_SIZES if cards <= limit)
        for counts in (self._arrived, self._refused)[: 1 + refused]:
            counts[size][0] += 1
            counts[size][1] += cards

    def rows(self) -> tuple[RefusedPods, ...]:
        """One row per request size of the pods that arrived."""
        return tuple(
            RefusedPods(
                size=size,
                arrived=int(arrived),
                refused=int(refused),
                demand=round(demand, 3),
                refused_demand=round(refused_demand, 3),
            )
            for (size, (arrived, demand)), (refused, refused_demand) in zip(
                self._arrived.items(), self._refused.values(), strict=True
            )
            if arrived
        )

    def refused_cards_percent(self) -> float:
        """The share of the requested cards that was refused, in percent."""
        demand = sum(demand for _, demand in self._arrived.values())
        return 100 * sum(cards for _, cards in self._refused.values()) / demand if demand else 0.0
