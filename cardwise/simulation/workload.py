"""The input of a simulation: nodes, cards and pods, from a trace or from a live cluster."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from cardwise.core.api.cards import Card
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.devices import Device

UNLIMITED: Final = Load(1 << 60, 1 << 60, 1 << 30)  # of who does not say what he has


class PodShape(NamedTuple):
    """What a pod asks: of cards, if any, and of its node. Pods of one shape are alike to every policy."""

    request: PodRequest | None
    load: Load


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """One that comes, by its name in the trace or as namespace/name."""

    name: str
    shape: PodShape


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """Its cards and other devices, and what it has for pods beside them."""

    name: str
    cards: tuple[Card, ...]
    left: Load = UNLIMITED
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """`nodes` are empty, `pods` in no order. `unit` is what the size of a card is counted in: MiB, or a 1/1000."""

    name: str
    nodes: tuple[SimulatedNode, ...]
    pods: tuple[SimulatedPod, ...]
    unit: str = "MiB"
    capacity: int = field(init=False)
    card: float = field(init=False)

    def __post_init__(self) -> None:
        capacity = total(self.nodes)
        cards = sum(len(node.cards) for node in self.nodes)
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "card", capacity / cards if cards else 0.0)

    def demand(self, shape: PodShape) -> float:
        """How much of the cards a pod asks; whole ones as if they were of average size."""
        request = shape.request
        if request is None:
            return 0.0
        return sum(c.cards * self.card if c.whole else c.mem for c in request.containers)

    def cards_of(self, shape: PodShape) -> float:
        """The size of the shape in cards: a half, or eight."""
        return self.demand(shape) / self.card if self.card else 0.0


def total(nodes: Iterable[SimulatedNode]) -> int:
    """The size of all their cards."""
    return sum(card.mem for node in nodes for card in node.cards)


def in_order(pods: Iterable[SimulatedPod]) -> list[SimulatedPod]:
    """The pods by name, so that what a seed shuffles does not depend on the order of a file."""
    return sorted(pods, key=lambda pod: pod.name)


def shuffled(workload: SimulatedWorkload, seed: int) -> list[SimulatedNode]:
    """The nodes with names in random order: where a policy finds nodes equal, the name decides."""
    chance = Random(seed)
    return [dataclasses.replace(node, name=f"{chance.getrandbits(32):08x}-{node.name}") for node in workload.nodes]
