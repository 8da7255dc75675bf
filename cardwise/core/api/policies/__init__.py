"""Placement policies: the table of all policies, and the look-up by the name that users write.

Input: the free memory of cards, the labels of nodes and the pods on them. Output: the card to take, and the order of
the nodes.

    policy     the interface of a policy. Read this first
    binpack    the fullest card
    spread     the emptiest card
    priced     the card that costs later pods the least; scored by `cardwise.core.placement.scored`
    spreadby   the domain of a node label with the fewest pods of the same gang or controller

Public seam: `Policy`. The engines read only this interface, so no other code compares the name of a policy. How to add
one: docs/howto/add-a-policy.md. Example, a policy that takes the emptiest card; a card is its free MiB and its position
in one integer, and the cards come in ascending order:

    >>> from cardwise.core.api.cards import POSITION_MASK, POSITION_BITS, card_code
    >>> def pick_card(cards, min_free):
    ...     return (cards[-1] >> POSITION_BITS, cards[-1] & POSITION_MASK) if cards and cards[-1] >= min_free else None
    >>> policy = Policy(name="emptiest", pick_card=pick_card, card_order=CardOrder.EMPTIEST_FIRST)
    >>> policy.pick_card([card_code(1024, 1), card_code(4096, 0)], card_code(2048))
    (4096, 0)
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from cardwise.core.api.policies.binpack import BINPACK
from cardwise.core.api.policies.policy import CardOrder, NodeFacts, Pick, PickCard, Policy
from cardwise.core.api.policies.priced import PRICED
from cardwise.core.api.policies.spread import SPREAD
from cardwise.core.api.policies.spreadby import SPREAD_BY
from cardwise.core.values import objectnames
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text

__all__ = [
    "CARD_POLICIES",
    "DEFAULT",
    "FALLBACK",
    "POLICIES",
    "CardOrder",
    "NodeFacts",
    "Pick",
    "PickCard",
    "Policy",
    "card_policy",
    "find_policy",
    "is_valid",
    "peer_key",
    "ranks_nodes",
]

# The table: one row for each policy.
POLICIES: Final[Mapping[str, Policy]] = {policy.name: policy for policy in (BINPACK, PRICED, SPREAD, SPREAD_BY)}

DEFAULT_POLICY: Final = PRICED.name
# Decides instead of a scored policy while the scored policy has no scores.
FALLBACK_POLICY: Final = BINPACK.name
# The policies that choose cards: one of them is the policy of the extender.
CARD_POLICIES: Final = tuple(sorted(name for name, policy in POLICIES.items() if policy.rank_nodes is None))
_EXAMPLE_LABEL: Final = "topology.kubernetes.io/zone"


def is_valid(text: str) -> bool:
    """Whether the text names a policy."""
    try:
        find_policy(text)
    except InvalidRequest:
        return False
    return True


def find_policy(text: str, field: str = "policy") -> Policy:
    """The policy that the text names, as in the annotation `cardwise.dev/policy`. Raises InvalidRequest with this
    field.
    """
    policy = POLICIES.get(text)
    return policy if policy is not None and not policy.takes_label else _with_label(text, field)


def card_policy(policy: str | None, default: str) -> str:
    """The policy that chooses a pod's cards, and that chooses among nodes of equal rank.

    policy: the policy that the pod names; None if it names none.
    default: the policy of the extender, one of `CARD_POLICIES`.
    """
    return default if policy is None or ranks_nodes(policy) else policy


def ranks_nodes(policy: str | None) -> bool:
    """Whether the policy that a pod names ranks nodes (`Policy.rank_nodes`); False if the pod names none."""
    return policy is not None and find_policy(policy).rank_nodes is not None


def peer_key(policy: str | None, *, namespace: str, gang: str | None, controller: str | None) -> str | None:
    """A key that is equal for the peers of a pod (`NodeFacts.peer_counts_by_node`); None if the pod's policy ranks no
    nodes, or if the pod has no peers.

    gang: the name of the pod's gang, or None.
    controller: the UID of the pod's controller, or None.
    """
    if policy is None or not (gang or controller) or not is_valid(policy) or not ranks_nodes(policy):
        return None
    return f"{namespace}/{f'gang {gang}' if gang else controller}/{policy}"


@lru_cache(maxsize=256)
def _with_label(text: str, field: str) -> Policy:
    """Parse a policy `NAME=LABEL`, where LABEL is the key of a node label. Raises InvalidRequest."""
    name, separator, label = text.partition("=")
    policy = POLICIES.get(name)
    if policy is None or (separator and not policy.takes_label):
        spellings = [f"{name}=LABEL" if POLICIES[name].takes_label else name for name in sorted(POLICIES)]
        problem = f"{quote_text(text)} is not a placement policy"
        raise InvalidRequest(field, problem, f"write one of: {', '.join(spellings)}")
    if not objectnames.is_label_key(label):
        problem = f"{quote_text(label)} is not the key of a label" if label else f"{quote_text(text)} names no label"
        raise InvalidRequest(field, problem, f"write the key of a node label, as in {name}={_EXAMPLE_LABEL}")
    return replace(policy, label=label)
