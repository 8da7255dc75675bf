"""A simulated cluster: a ledger of cards, the free CPU, memory and pod slots of the nodes, and the extender's engine.

As in the extender, the engine decides where a pod fits and where it is placed. Of kube-scheduler's checks, only CPU,
memory and the number of pods are simulated.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.workload import learn_workload
from cardwise.simulation.baselines import BASELINES
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedPod

_NAMESPACE: Final = "simulated"
NO_CARD: Final = PodRequest(containers=())


class SimulatedCluster:
    """A cluster under one policy.

    max_scored_nodes: the maximum number of nodes that one decision scores, as in the extender; None for all.
    """

    def __init__(self, nodes: Iterable[SimulatedNode], policy: str, *, max_scored_nodes: int | None = None) -> None:
        self.ledger = Ledger()
        self.allocated = 0  # of all cards, in units of card memory
        self.policy = policy
        self._free_loads: dict[str, Load] = {}
        self._pod_loads: dict[str, Load] = {}  # by the pod's UID
        self.engine = Engine(self.ledger, self, max_scored_nodes=max_scored_nodes, scorings=BASELINES)
        self.engine.prepare_policy(policy)
        self.add_nodes(nodes)

    def add_nodes(self, nodes: Iterable[SimulatedNode]) -> None:
        """Add nodes, without pods on them."""
        for node in nodes:
            self.ledger.set_cards(node.name, node.cards)
            self.ledger.set_other_devices(node.name, node.devices)
            self._free_loads[node.name] = node.free_load
            self.engine.mark_changed(node.name)

    def free_load(self, node: str) -> Load | None:
        """The node's free CPU, memory and pod slots; None if there is no such node."""
        return self._free_loads.get(node)

    def observe_arrival(self, shape: PodShape) -> None:
        """Record the arrival of a pod of this shape; the policies learn from it."""
        self.engine.count_arrival(shape.request or NO_CARD, shape.load)
        sample = self.engine.learning_input_if_due()
        if sample is not None:
            self.engine.use_workload(learn_workload(sample))

    def refresh_scores(self) -> None:
        """Recompute stale scores before a decision needs them, as the extender does between calls."""
        while self.engine.run_background_step():
            pass

    def set_workload(self, shapes: Iterable[PodShape]) -> None:
        """Teach the policies in advance the shapes of the pods that will arrive. A repeated shape counts repeatedly."""
        for shape in shapes:
            self.engine.count_arrival(shape.request or NO_CARD, shape.load)
        self.engine.use_workload(learn_workload(self.engine.learning_input()))

    def load_workload(self, text: str) -> None:
        """Teach the policies the workload that an engine has saved as text. Raises InvalidWorkload."""
        self.engine.workload.load(text)
        self.engine.use_workload(learn_workload(self.engine.learning_input()))

    def add_assigned_pod(self, holding: Holding) -> None:
        """Add a running pod with its cards. The node's free load already excludes its CPU and memory."""
        self.ledger.set_holding(holding)
        self.allocated += holding.assignment.mem

    def place_pod(self, uid: str, pod: SimulatedPod) -> str | None:
        """Place an arriving pod. Returns its node; None if it fits on no node."""
        request, load = pod.shape.request or NO_CARD, pod.shape.load
        placement = self.engine.place(request, load, self.policy)
        if placement is None:
            return None
        self.add_assigned_pod(
            Holding(uid, _NAMESPACE, pod.name, placement.node, placement.assignment, mps_client=request.mps_client)
        )
        self._change_free_load(placement.node, load, 1)
        self._pod_loads[uid] = load
        return placement.node

    def remove_pod(self, uid: str) -> str | None:
        """Remove a pod that ends. Returns its node; None if the pod was never placed."""
        holding = self.ledger.holding(uid)
        if holding is None:
            return None
        self.ledger.release(uid)
        self.allocated -= holding.assignment.mem
        self._change_free_load(holding.node, self._pod_loads.pop(uid, Load(0, 0, 0)), -1)
        return holding.node

    def count_fitting(
        self, shapes: Sequence[PodShape], added_nodes: Sequence[SimulatedNode] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """Count, for each shape, how many of its pods fit if no other pods arrive.

        Returns a tuple for each shape: the count now and, if there are `added_nodes`, the count with these nodes, which
        remain in the cluster.
        """
        counts = [tuple(map(self._count_fitting, shapes))]
        if added_nodes:
            self.add_nodes(added_nodes)
            counts.append(tuple(map(self._count_fitting, shapes)))
        return tuple(zip(*counts, strict=True))

    def _count_fitting(self, shape: PodShape) -> int:
        uids: list[str] = []
        while self.place_pod(f"extra-{len(uids)}", SimulatedPod("extra", shape)) is not None:
            uids.append(f"extra-{len(uids)}")
        for uid in uids:
            self.remove_pod(uid)
        return len(uids)

    def _change_free_load(self, node: str, load: Load, sign: int) -> None:
        self._free_loads[node] = self._free_loads[node].add(load, -sign)
        self.engine.mark_changed(node)
