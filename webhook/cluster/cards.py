"""Sizes of cards, and how many a node has: of all cards, or of a class. Remembered until cards change.

Devices that are not GPUs are counted in the same way, by their classes only: they have no memory, and are no cards.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.quantity import MiB
from webhook.pods.validate import CardSizes


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A card: `labels` are what selectors of classes see. `other`: it is a device that is no GPU. `mps`: how many cards
    its MPS daemon serves, "" where no manager has said so.
    """

    node: str
    memory: MiB
    labels: Mapping[str, str]
    other: bool = False
    mps: str = ""

    def of(self, resource_class: ResourceClass | None) -> bool:
        """Whether it is of the class; or, without one, a card."""
        if resource_class is None:
            return not self.other
        return resource_class.other == self.other and resource_class.selector.matches(self.labels)


class CardSums:
    """Methods may be called from any thread."""

    def __init__(self, kept_back: MiB) -> None:
        """`kept_back`: what the extender keeps back on each card."""
        self._kept_back = kept_back
        self._known: dict[str, tuple[ResourceClass | None, CardSizes]] = {}

    def forget(self) -> None:
        """Cards have changed."""
        self._known = {}

    def of(self, resource_class: ResourceClass | None, cards: Callable[[], Mapping[str, CardFacts]]) -> CardSizes:
        """The class as it is now: one that was edited is counted anew."""
        known, key = self._known, resource_class.name if resource_class else ""
        found = known.get(key)
        if found is None or found[0] != resource_class:
            # Into the table from before the look at the cards: if they change meanwhile, it is thrown away.
            found = known[key] = (resource_class, _sum(resource_class, cards(), self._kept_back))
        return found[1]

    def of_unknown(self, resource_class: ResourceClass, cards: Mapping[str, CardFacts]) -> CardSizes:
        """The same of a class that is only asked about; not remembered, for anybody may ask about any."""
        return _sum(resource_class, cards, self._kept_back)

    def on(
        self, nodes: Collection[str], resource_class: ResourceClass | None, cards: Mapping[str, CardFacts]
    ) -> CardSizes:
        """The sizes of cards of these nodes only; not remembered."""
        there = {name: card for name, card in cards.items() if card.node in nodes}
        return _sum(resource_class, there, self._kept_back)


def _sum(resource_class: ResourceClass | None, cards: Mapping[str, CardFacts], kept_back: MiB) -> CardSizes:
    of_it = [card for card in cards.values() if card.of(resource_class)]
    per_node: dict[str, list[MiB]] = {}
    for card in of_it:
        per_node.setdefault(card.node, []).append(MiB(max(0, card.memory - kept_back)))
    descending = [sorted(sizes, reverse=True) for sizes in per_node.values()]
    each = tuple(max(rank) for rank in zip_longest(*descending, fillvalue=MiB(0)))
    smallest = min((sizes[-1] for sizes in descending), default=MiB(0))
    return CardSizes(max(each, default=MiB(0)), len(each), smallest, each if any(each) else ())
