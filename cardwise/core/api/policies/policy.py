"""The interface of a placement policy: which node and card a pod gets.

A policy is one file beside this one: a `Policy` and the functions that it names. Its row is in `POLICIES`. There is an
example in the docstring of the package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

Pick = tuple[int, int]  # the score of taking a card, and its position in the node's lists
# Picks one of a node's usable cards, and scores the pick; None if no card fits. The scores of one policy are comparable
# across nodes, so the best node is the one with the highest score. The arguments are the cards as `cards.card_code`s in
# ascending order, the fullest card first; and the lowest code of a card with the requested free memory. Codes are plain
# integers, because a filter call picks cards of thousands of nodes.
PickCard = Callable[[Sequence[int], int], Pick | None]


class NodeFacts(Protocol):
    """The facts about nodes that a policy may use to rank them for a pod."""

    def labels(self, node: str) -> Mapping[str, str]:
        """The labels of the node; empty if there is no such node."""

    def peer_counts_by_node(self) -> Mapping[str, int]:
        """The number of the pod's peers on each node: pods that hold cards there, or will get them. May lack nodes
        without peers.

        The peers are the other members of the pod's gang. For a pod without a gang, they are the other pods of the same
        controller that name the same policy.
        """


# Makes the function that returns the rank of a node for a pod. Arguments: `Policy.label`, and the facts.
NodeRanker = Callable[[str, NodeFacts], Callable[[str], int]]


class CardOrder(Enum):
    """The order in which a policy takes cards from the ledger's card index, for a request of one card."""

    FULLEST_FIRST = auto()
    EMPTIEST_FIRST = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A placement policy.

    name: as users write it.
    pick_card: picks a card of one node.
    card_order: the order of all cards. It must agree with the scores of `pick_card`.
    prefers_empty_nodes: whether the policy probably takes the emptiest nodes first. With thousands of nodes, the
        planner of gangs scores only the nodes that the policy probably prefers.
    is_scored: whether `scored.engine` chooses the node and the card, by scores of all nodes for the workload. Where it
        has no scores, `pick_card` decides.
    rank_nodes: ranks the nodes for a pod by their labels and by the pods on them. The pod gets a node of the lowest
        rank that has a node for it. Among the nodes of this rank, and for the cards, the policy of the extender
        decides (`--policy`). None: the policy does not rank nodes.
    takes_label: whether users write the key of a node label after the name, as in `spread-by=KEY`.
    label: this key.
    """

    name: str
    pick_card: PickCard
    card_order: CardOrder = CardOrder.FULLEST_FIRST
    prefers_empty_nodes: bool = False
    is_scored: bool = False
    rank_nodes: NodeRanker | None = None
    takes_label: bool = False
    label: str = ""
