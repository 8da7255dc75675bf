"""Moves of pods: a pod is evicted, recreated by its controller, and placed by the engine.

The new pod may be placed while the old one still holds its cards, or later. A move counts only if both cases lead to
the same cards, different from the old ones. The old cards may be cordoned during the moves, because a policy that
prefers empty cards would use them again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement

# with a number: UIDs of the goal's pods, which are placed to see whether they fit
_GOAL_UID_PREFIX: Final = "defrag-goal-"

Undo = Callable[[], None]


class Placer(Protocol):
    """The placement engine, and the free amounts of nodes besides cards."""

    def place(
        self,
        request: PodRequest,
        load: Load,
        policy: str,
        nodes: Collection[str] | None = None,
        headroom: Sequence[Headroom] = (),
    ) -> Placement | None:
        """The placement that the pod would get now; None if it does not fit."""

    def add_load(self, node: str, load: Load, sign: int = 1) -> None:
        """Add (1) or remove (-1) a pod's load on a node."""

    def free_load(self, node: str) -> Load | None:
        """The node's free amounts for further pods; None if there is no such node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovablePod:
    """A pod that would be recreated.

    nodes: the nodes that the pod may use; None for all.
    mem: the MiB that the pod holds.
    age: the pod's age in seconds.
    owner: the UID of the controller that recreates the pod.
    at_most: how many pods of this owner may move in one plan; None for any number. A Job fails if it loses too many
        pods.
    """

    uid: str
    request: PodRequest
    load: Load
    policy: str
    nodes: frozenset[str] | None = None
    priority: int = 0
    mem: int = 0
    age: float = 0.0
    owner: str = ""
    at_most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DefragGoal:
    """The number of pods with this request that must fit at once.

    headroom: the amounts that quotas leave to the pods' namespace.
    nodes: the nodes that the pods may use; None for all.
    """

    request: PodRequest
    load: Load
    count: int
    policy: str
    headroom: Sequence[Headroom] = ()
    nodes: frozenset[str] | None = None


class Move(NamedTuple):
    """The move of one pod: its holdings before and after."""

    before: Holding
    after: Holding


class WhatIfCluster:
    """A simulated cluster, in which pods can be moved.

    headroom: returns the amounts that quotas now leave to a namespace.
    """

    def __init__(self, ledger: Ledger, placer: Placer, headroom: Callable[[str], Sequence[Headroom]]) -> None:
        self.ledger = ledger
        self._placer = placer
        self._headroom = headroom
        self._cordoned_for_moves: dict[str, set[str]] = {}  # by node, UUIDs of the cards that are cordoned for moves
        self._moves_by_owner: Counter[str] = Counter()  # by owner, pods that have moved

    def count_fitting(self, goal: DefragGoal) -> int:
        """How many of the goal's pods fit now, at most `goal.count`."""
        with self.fill_with(goal) as placements:
            return len(placements)

    @contextmanager
    def fill_with(self, goal: DefragGoal) -> Iterator[list[Placement]]:
        """Context manager in which the goal's pods that fit are placed, and no card is cordoned for moves."""
        placements: list[Placement] = []
        try:
            self._set_cordoned(self._cordoned_for_moves, cordoned=False)
            for i in range(goal.count):
                placement = self._placer.place(goal.request, goal.load, goal.policy, goal.nodes, goal.headroom)
                if placement is None:
                    break
                mps_client = goal.request.mps_client
                self.ledger.set_holding(
                    Holding(
                        f"{_GOAL_UID_PREFIX}{i}", "", "", placement.node, placement.assignment, mps_client=mps_client
                    )
                )
                self._placer.add_load(placement.node, goal.load)
                placements.append(placement)
            yield placements
        finally:
            for i, placement in enumerate(placements):
                self.ledger.release(f"{_GOAL_UID_PREFIX}{i}")
                self._placer.add_load(placement.node, goal.load, -1)
            self._set_cordoned(self._cordoned_for_moves, cordoned=True)

    def move(self, pod: MovablePod, *, cordon: bool) -> tuple[Move, Undo] | None:
        """Simulate that the pod is evicted and that its successor is placed. Returns the move and a function that
        undoes it; None if the successor might get one of the old cards, or if the owner would lose too many pods.

        cordon: whether to cordon the pod's old cards.
        """
        before = self.ledger.holding(pod.uid)
        if before is None or (pod.at_most is not None and self._moves_by_owner[pod.owner] >= pod.at_most):
            return None
        newly_cordoned = self._cordon_cards(before) if cordon else set[str]()
        alternative = self._place(pod, before.namespace)  # the new pod, while the old pod still holds its cards
        self.ledger.release(pod.uid)
        self._placer.add_load(before.node, pod.load, -1)
        placement = self._place(pod, before.namespace)
        if (
            placement is None
            or _is_same_card(placement, before)
            or (alternative is not None and alternative.assignment != placement.assignment)
        ):
            self.ledger.set_holding(before)
            self._placer.add_load(before.node, pod.load)
            self._uncordon_cards(before.node, newly_cordoned)
            return None
        mps_client = pod.request.mps_client
        after = Holding(
            pod.uid, before.namespace, before.name, placement.node, placement.assignment, mps_client=mps_client
        )
        self.ledger.set_holding(after)
        self._placer.add_load(after.node, pod.load)
        self._moves_by_owner[pod.owner] += 1

        def undo() -> None:
            self._moves_by_owner[pod.owner] -= 1
            self.ledger.set_holding(before)
            self._placer.add_load(after.node, pod.load, -1)
            self._placer.add_load(before.node, pod.load)
            self._uncordon_cards(before.node, newly_cordoned)

        return Move(before, after), undo

    def _cordon_cards(self, holding: Holding) -> set[str]:
        """Cordon the cards of the holding. Returns the UUIDs of cards that were not cordoned before."""
        node = self.ledger.node(holding.node)
        places = {node.position(share) for share in holding.assignment.shares()} if node is not None else set()
        cards = [card for i, card in enumerate(node.cards) if i in places] if node is not None else []
        newly_cordoned = {card.uuid for card in cards if not card.cordoned}
        self._cordoned_for_moves.setdefault(holding.node, set()).update(newly_cordoned)
        self._set_cordoned({holding.node: newly_cordoned}, cordoned=True)
        return newly_cordoned

    def _uncordon_cards(self, node: str, uuids: set[str]) -> None:
        """Uncordon the cards that `_cordon_cards` returned."""
        if uuids:
            self._cordoned_for_moves[node] -= uuids
            self._set_cordoned({node: uuids}, cordoned=False)

    def _set_cordoned(self, cards: Mapping[str, Collection[str]], *, cordoned: bool) -> None:
        """Cordon or uncordon cards.

        cards: by node, the UUIDs.
        """
        for name, uuids in cards.items():
            node = self.ledger.node(name)
            if node is not None and uuids:
                cards_after = (replace(card, cordoned=cordoned) if card.uuid in uuids else card for card in node.cards)
                self.ledger.set_cards(name, cards_after)

    def free_load(self, node: str) -> Load:
        """The node's free amounts for further pods besides cards."""
        return self._placer.free_load(node) or Load(0, 0, 0)

    def _place(self, pod: MovablePod, namespace: str) -> Placement | None:
        return self._placer.place(pod.request, pod.load, pod.policy, pod.nodes, self._headroom(namespace))


def _is_same_card(placement: Placement, before: Holding) -> bool:
    """Whether the placement uses a card of the holding."""
    former_uuids = {share.uuid for share in before.assignment.shares()}
    return placement.node == before.node and any(share.uuid in former_uuids for share in placement.assignment.shares())
