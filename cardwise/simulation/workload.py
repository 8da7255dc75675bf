"""The input of a simulation: nodes, cards and pods, from a trace or from a live cluster."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from cardwise.core.api.cards import Card
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.devices import Device

UNLIMITED_LOAD: Final = Load(1 << 60, 1 << 60, 1 << 30)  # for nodes whose size is unknown


class PodShape(NamedTuple):
    """The request of a pod: cards (None if it requests only CPU and memory), CPU and memory. Policies treat equal
    shapes alike.
    """

    request: PodRequest | None
    load: Load


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """A pod that arrives. `name`: the name in the trace, or namespace/name in a live cluster."""

    name: str
    shape: PodShape


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A node with its cards, other devices, and the CPU, memory and pod slots that are free."""

    name: str
    cards: tuple[Card, ...]
    free_load: Load = UNLIMITED_LOAD
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Nodes, and the pods that arrive on them.

    nodes: the nodes, without pods.
    pods: the pods, in no order.
    unit: the unit of card sizes: MiB, or thousandths of a card.
    capacity: the total size of all cards, in this unit.
    mean_card_size: the mean size of a card, in this unit; 0 without cards.
    """

    name: str
    nodes: tuple[SimulatedNode, ...]
    pods: tuple[SimulatedPod, ...]
    unit: str = "MiB"
    capacity: int = field(init=False)
    mean_card_size: float = field(init=False)

    def __post_init__(self) -> None:
        capacity = total_card_size(self.nodes)
        cards = sum(len(node.cards) for node in self.nodes)
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "mean_card_size", capacity / cards if cards else 0.0)

    def demand(self, shape: PodShape) -> float:
        """The requested card memory of a pod, in the workload's unit. A whole card counts as a card of average size."""
        request = shape.request
        if request is None:
            return 0.0
        return sum(c.cards * self.mean_card_size if c.whole else c.mem for c in request.containers)

    def size_in_cards(self, shape: PodShape) -> float:
        """The requested card memory of a pod in cards, for example 0.5 or 8."""
        return self.demand(shape) / self.mean_card_size if self.mean_card_size else 0.0


def total_card_size(nodes: Iterable[SimulatedNode]) -> int:
    """The memory of all cards of the nodes, in the workload's unit."""
    return sum(card.mem for node in nodes for card in node.cards)


def sorted_by_name(pods: Iterable[SimulatedPod]) -> list[SimulatedPod]:
    """The pods sorted by name. So a shuffle by a seed is independent of the order in a file."""
    return sorted(pods, key=lambda pod: pod.name)


def shuffled_nodes(workload: SimulatedWorkload, seed: int) -> list[SimulatedNode]:
    """The nodes with new names in random order. The names matter, since they break ties between equal nodes."""
    random = Random(seed)
    return [dataclasses.replace(node, name=f"{random.getrandbits(32):08x}-{node.name}") for node in workload.nodes]
