"""`priced`: the card whose use leaves the most capacity for later pods.

The scores of all nodes are computed by `cardwise.core.placement.scored.pricing`, which needs numpy. Where there are no
scores (on one given node, under tight quotas, before a workload is learned), the choice is that of `binpack`.
"""

from typing import Final

from cardwise.core.api.policies import binpack
from cardwise.core.api.policies.policy import Policy

PRICED: Final = Policy(name="priced", pick_card=binpack.pick_card, is_scored=True)
