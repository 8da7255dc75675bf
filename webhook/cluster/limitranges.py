"""The bounds of cpu and memory that a namespace's LimitRanges set for a container that the webhook adds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from operator import gt, lt

from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json

COUNTED_RESOURCES = ("cpu", "memory")
_CONTAINER, _POD = "Container", "Pod"


@dataclass(frozen=True, slots=True)
class Amount:
    """A quantity as written, and its value."""

    text: str
    number: Fraction

    @classmethod
    def parse_amount(cls, text: object) -> "Amount":
        """Raises InvalidQuantity."""
        return cls(str(text), quantity.parse_amount(str(text)).number)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds by one or several LimitRanges, by resource.

    minimum, maximum: the bounds for a container.
    pod_maximum: the bounds for the sum of a pod's containers.
    default_limits, default_requests: what Kubernetes writes into a container without the amount; the largest amount,
        if several LimitRanges have one.
    """

    minimum: Mapping[str, Amount] = field(default_factory=dict)
    maximum: Mapping[str, Amount] = field(default_factory=dict)
    pod_maximum: Mapping[str, Amount] = field(default_factory=dict)
    default_limits: Mapping[str, Amount] = field(default_factory=dict)
    default_requests: Mapping[str, Amount] = field(default_factory=dict)


def parse(manifest: Json) -> Bounds:
    """Raises InvalidQuantity."""
    entries = (manifest.get("spec") or {}).get("limits") or ()
    container_limits = [entry for entry in entries if entry.get("type") == _CONTAINER]
    pod_limits = [entry for entry in entries if entry.get("type") == _POD]
    return Bounds(
        minimum=_tightest_amounts((_amounts(entry.get("min")) for entry in container_limits), gt),
        maximum=_tightest_amounts((_amounts(entry.get("max")) for entry in container_limits), lt),
        pod_maximum=_tightest_amounts((_amounts(entry.get("max")) for entry in pod_limits), lt),
        default_limits=_tightest_amounts((_amounts(entry.get("default")) for entry in container_limits), gt),
        default_requests=_tightest_amounts((_amounts(entry.get("defaultRequest")) for entry in container_limits), gt),
    )


def combine_bounds(all_bounds: Iterable[Bounds]) -> Bounds:
    """The tightest bound of each resource."""
    bounds_list = list(all_bounds)
    return Bounds(
        minimum=_tightest_amounts((bounds.minimum for bounds in bounds_list), gt),
        maximum=_tightest_amounts((bounds.maximum for bounds in bounds_list), lt),
        pod_maximum=_tightest_amounts((bounds.pod_maximum for bounds in bounds_list), lt),
        default_limits=_tightest_amounts((bounds.default_limits for bounds in bounds_list), gt),
        default_requests=_tightest_amounts((bounds.default_requests for bounds in bounds_list), gt),
    )


def _amounts(quantities: Json | None) -> dict[str, Amount]:
    return {name: Amount.parse_amount(text) for name, text in (quantities or {}).items() if name in COUNTED_RESOURCES}


def _tightest_amounts(
    amounts_list: Iterable[Mapping[str, Amount]], tighter: Callable[[Fraction, Fraction], bool]
) -> dict[str, Amount]:
    """The tightest amount of each resource."""
    tightest: dict[str, Amount] = {}
    for amounts in amounts_list:
        for name, amount in amounts.items():
            if name not in tightest or tighter(amount.number, tightest[name].number):
                tightest[name] = amount
    return tightest
