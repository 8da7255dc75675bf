"""Placement policies: the table of all policies, and the look-up by the name that users write.

Input: the free memory of cards. Output: the card to take, with a score; and how the engines treat the policy.

    policy     the interface of a policy. Read this first
    binpack    the fullest card
    spread     the emptiest card
    priced     the card that costs later pods the least; scored by `cardwise.core.placement.scored`

How to add one: a file with a `Policy`, and a row in `POLICIES`.
"""

from collections.abc import Mapping
from typing import Final

from cardwise.core.api.policies.binpack import BINPACK
from cardwise.core.api.policies.policy import CardOrder, Pick, PickCard, Policy
from cardwise.core.api.policies.priced import PRICED
from cardwise.core.api.policies.spread import SPREAD
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text

__all__ = ["DEFAULT", "FALLBACK", "POLICIES", "CardOrder", "Pick", "PickCard", "Policy", "find_policy", "is_valid"]

# The table: one row for each policy.
POLICIES: Final[Mapping[str, Policy]] = {policy.name: policy for policy in (BINPACK, PRICED, SPREAD)}

DEFAULT: Final = PRICED.name
# Decides in place of a scored policy while that has no scores.
FALLBACK: Final = BINPACK.name


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
    if policy is None:
        problem = f"{quote_text(text)} is not a placement policy"
        raise InvalidRequest(field, problem, f"write one of: {', '.join(sorted(POLICIES))}")
    return policy
