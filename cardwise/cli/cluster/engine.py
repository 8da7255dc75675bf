"""The extender's placement engine on a cluster that was read once, for commands that predict the placement of a pod.

Imports numpy, so import this module only when it is needed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from cardwise.cli.cluster.liveworkload import LiveWorkload
from cardwise.core.api import names, policies
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.workload import InvalidWorkload, learn_workload
from cardwise.simulation.cluster import SimulatedCluster
from cardwise.simulation.workload import UNLIMITED_LOAD, PodShape


def simulate_present(
    live: LiveWorkload, policy: str, holdings: Iterable[Holding], shapes: Sequence[PodShape]
) -> tuple[SimulatedCluster, str | None]:
    """The cluster with these holdings, under a policy. Returns it with a note; None if there is nothing to say.

    shapes: the pods that the policy expects if neither the extender has learned a workload nor pods are there.
    """
    cluster = SimulatedCluster(live.nodes, policy)
    for holding in holdings:
        cluster.add_assigned_pod(holding)
    note = None
    if live.learned_workload:
        try:
            cluster.load_workload(live.learned_workload)
        except InvalidWorkload as error:
            note = f"the ConfigMap {names.WORKLOAD} is not used: {error}"
        else:
            return cluster, note
    cluster.set_workload([pod.shape for pod in live.pods] or shapes)
    return cluster, note


class ClusterEngine(Engine):
    """The engine for the nodes and cards of a `ClusterState`.

    free_loads: the free cpu and memory of nodes; other nodes have no limit.
    workload: the learned workload, as the extender saved it.
    note: why the saved workload cannot be used; "" if it can be used.
    """

    def __init__(self, ledger: Ledger, free_loads: Mapping[str, Load], workload: str) -> None:
        super().__init__(ledger, self)
        self.note = ""
        self._free_loads = dict(free_loads)
        for node in ledger.nodes():
            self.mark_changed(node.name)
        try:
            if workload:
                self.workload.load(workload)
        except InvalidWorkload as error:
            self.note = f"the extender's saved data cannot be read ({error})"
        sample = self.learning_input()
        if sample.counts and sample.sizes:
            self.use_workload(learn_workload(sample))

    def free_load(self, node: str) -> Load | None:
        """The free cpu and memory of a node. The engine calls this method."""
        return self._free_loads.get(node, UNLIMITED_LOAD)

    def add_load(self, node: str, load: Load, sign: int = 1) -> None:
        """Add (1) or remove (-1) a pod's load on a node."""
        free_load = self._free_loads.get(node)
        if free_load is not None:
            self._free_loads[node] = free_load.add(load, -sign)
            self.mark_changed(node)

    def rank_nodes(
        self, request: PodRequest, load: Load, policy: str, nodes: Collection[str], headroom: Sequence[Headroom]
    ) -> dict[str, int] | None:
        """The scores of the nodes that the pod fits on; None if the policy has no scores, such as `binpack`."""
        return self.scores(request, load, policy, nodes, headroom) if policies.find_policy(policy).is_scored else None
