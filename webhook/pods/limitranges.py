"""Bounds of cpu and memory that the LimitRanges of a namespace set for a container that we add."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from operator import gt, lt

from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json

COUNTED = ("cpu", "memory")
_CONTAINER, _POD = "Container", "Pod"


@dataclass(frozen=True, slots=True)
class Amount:
    """A quantity as it is written, and what it is worth."""

    text: str
    value: Fraction

    @classmethod
    def of(cls, text: object) -> "Amount":
        """Raises InvalidQuantity."""
        return cls(str(text), quantity.parse(str(text))[0])


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one LimitRange, or of several together, by resource. `least`, `most`: of a container."""

    least: Mapping[str, Amount] = field(default_factory=dict)
    most: Mapping[str, Amount] = field(default_factory=dict)
    most_of_pod: Mapping[str, Amount] = field(default_factory=dict)


def parse(obj: Json) -> Bounds:
    """Raises InvalidQuantity."""
    items = (obj.get("spec") or {}).get("limits") or ()
    of_containers = [item for item in items if item.get("type") == _CONTAINER]
    of_pods = [item for item in items if item.get("type") == _POD]
    return Bounds(
        least=_tightest((_amounts(item.get("min")) for item in of_containers), gt),
        most=_tightest((_amounts(item.get("max")) for item in of_containers), lt),
        most_of_pod=_tightest((_amounts(item.get("max")) for item in of_pods), lt),
    )


def together(all_bounds: Iterable[Bounds]) -> Bounds:
    """The tightest of each."""
    several = list(all_bounds)
    return Bounds(
        least=_tightest((bounds.least for bounds in several), gt),
        most=_tightest((bounds.most for bounds in several), lt),
        most_of_pod=_tightest((bounds.most_of_pod for bounds in several), lt),
    )


def _amounts(listed: Json | None) -> dict[str, Amount]:
    return {name: Amount.of(text) for name, text in (listed or {}).items() if name in COUNTED}


def _tightest(
    several: Iterable[Mapping[str, Amount]], tighter: Callable[[Fraction, Fraction], bool]
) -> dict[str, Amount]:
    """Of each resource the amount that is tighter than the others."""
    found: dict[str, Amount] = {}
    for amounts in several:
        for name, amount in amounts.items():
            if name not in found or tighter(amount.value, found[name].value):
                found[name] = amount
    return found
