"""Where a pod that does not exist would go, by the extender's engine.

Imports numpy, so import this module only when it is needed.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from cardwise.cli.cluster import whatif
from cardwise.cli.cluster.engine import ClusterEngine
from cardwise.core.api import policies
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.placement import Placement
from cardwise.core.preemption import explanation
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube.clusterstate import ClusterState
from cardwise.web.snapshot import Snapshot

_MAX_OTHERS = 5  # nodes that are named after the best
_MAX_COUNTED = 100  # pods of the same kind that are placed to count how many fit


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU that the pod would get. free_after: MiB that are free on it afterwards."""

    index: int
    model: str
    mem: int
    free_after: int


class Trial(NamedTuple):
    """What the engine says.

    node: "" if no node fits.
    others: the nodes that it would choose next.
    fitting: the number of such pods that fit together, at most `_MAX_COUNTED`; their cpu and memory are not counted.
    refusals: why the other nodes refuse the pod, with the number of these nodes, the most frequent first.
    """

    policy: str
    node: str
    targets: tuple[Target, ...]
    others: tuple[str, ...]
    fitting: int
    refusals: tuple[tuple[str, int], ...]

    @property
    def is_limited(self) -> bool:
        """Whether more pods than `fitting` may fit."""
        return self.fitting == _MAX_COUNTED


def parse_amounts(amounts: dict[str, str], cluster: ClusterState) -> whatif.NamedPod:
    """Parse what the person typed, by the keys of `cardwise simulate --pod`. Raises InvalidRequest."""
    for key, amount in amounts.items():
        if "," in amount:
            raise InvalidRequest(key, f"{amount!r} has a comma", "write one amount, such as 8Gi or 8138")
    text = ",".join(f"{key}={amount}" for key, amount in amounts.items())
    pod = whatif.parse_pods(text, cluster.classes, "pod")[0]
    whatif.check_classes(text, pod.shape, cluster.classes, "pod")
    return pod


def try_pod(snapshot: Snapshot, cluster: ClusterState, pod: whatif.NamedPod) -> Trial:
    """Place the pod as the extender would, on the nodes that take new pods.

    cpu, memory, taints and selectors of nodes do not matter: the person typed GPU amounts only.
    """
    request = pod.shape.request
    ledger = cluster.ledger.snapshot()
    policy = policies.card_policy(None, snapshot.policy.policy)
    nodes = [state.name for state in ledger.nodes() if state.cards and state.name not in snapshot.node_reasons]
    if request is None or not nodes:
        return Trial(policy, "", (), (), 0, ())
    engine = ClusterEngine(ledger, {}, snapshot.policy.workload)
    ranked = engine.rank_nodes(request, pod.shape.load, policy, nodes, ())
    views = explanation.explain(ledger, nodes, request, policy, ranked=ranked)
    fitting = [view.name for view in views if view.refusal is None]
    refusals = Counter(view.refusal.text for view in views if view.refusal is not None)
    if not fitting:
        return Trial(policy, "", (), (), 0, tuple(refusals.most_common()))
    state = ledger.node(fitting[0])
    chosen = placement.place_on(ledger.kinds, state, request, policy)
    targets = []
    if isinstance(chosen, Placement) and state is not None:
        for use in chosen.assignment.card_uses():
            card = next(card for card in state.cards if card.uuid == use.uuid)
            free = state.free[state.cards.index(card)]
            targets.append(Target(card.index, card.model, use.mem, free - use.mem))
    return Trial(
        policy,
        fitting[0],
        tuple(targets),
        tuple(fitting[1 : _MAX_OTHERS + 1]),
        _count_fitting(cluster, nodes, request, policy),
        tuple(refusals.most_common()),
    )


def _count_fitting(cluster: ClusterState, nodes: list[str], request: PodRequest, policy: str) -> int:
    """The number of such pods that fit one after another."""
    ledger = cluster.ledger.snapshot()
    for count in range(_MAX_COUNTED):
        placed = placement.place(ledger, nodes, request, policy)
        if not isinstance(placed, Placement):
            return count
        mps_client = request.mps_client
        ledger.set_holding(Holding(f"try-{count}", "", "try", placed.node, placed.assignment, mps_client=mps_client))
    return _MAX_COUNTED
