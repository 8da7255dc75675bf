"""`spread-by=KEY`: the peers of a pod are spread over the domains of a node label, such as zones or racks.

A domain is the set of the nodes with the same value of the label KEY. The rank of a node is the number of the pod's
peers in its domain: the domains with the fewest peers come first. Example: zone `a` has two peers, `b` and `c` have one
each. The nodes of `b` and `c` come first, and the extender's policy chooses among all of them. If none of them has
capacity, the nodes of `a` are next. Nodes without the label come last. So no pod stays pending because of this policy,
as with `whenUnsatisfiable: ScheduleAnyway` of Kubernetes.
"""

from collections.abc import Callable
from typing import Final

from cardwise.core.api.policies import binpack
from cardwise.core.api.policies.policy import NodeFacts, Policy

_RANK_WITHOUT_LABEL: Final = 1 << 62  # the rank of nodes without the label: more than the peers of any pod


def rank_nodes(label: str, facts: NodeFacts) -> Callable[[str], int]:
    """The function that returns the rank of a node."""
    # A dict and no Counter, which takes twice as long for a new key: each of 5,000 nodes may be a domain.
    peers_by_domain: dict[str, int] = {}
    domains: dict[str, str | None] = {}  # by node with peers
    labels = facts.labels
    for node, peers in facts.peer_counts_by_node().items():
        domain = domains[node] = labels(node).get(label)
        if domain is not None:
            peers_by_domain[domain] = peers_by_domain.get(domain, 0) + peers

    def rank(node: str) -> int:
        domain = domains[node] if node in domains else labels(node).get(label)
        return _RANK_WITHOUT_LABEL if domain is None else peers_by_domain.get(domain, 0)

    return rank


SPREAD_BY: Final = Policy(name="spread-by", pick_card=binpack.pick_card, rank_nodes=rank_nodes, takes_label=True)
