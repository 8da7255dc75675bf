"""A cluster that is not there: a ledger, what its nodes have left, and the engine that the extender asks.

Nothing here says where a pod fits or goes. What kube-scheduler would check of a node beside its cards is cpu, memory
and the number of pods, and the engine is told of these.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.ledger import Holding, Ledger
from cardwise.core.placement.scored.engine import Engine
from cardwise.core.placement.scored.workload import learn
from cardwise.simulation.baselines import BASELINES
from cardwise.simulation.workload import PodShape, SimulatedNode, SimulatedPod

_NAMESPACE: Final = "simulated"
NO_CARD: Final = PodRequest(containers=())


class Cluster:
    """Under one policy. `at_once`: so many nodes a decision scores at most, as in the extender; None for all."""

    def __init__(self, nodes: Iterable[SimulatedNode], policy: str, *, at_once: int | None = None) -> None:
        self.ledger = Ledger()
        self.used = 0  # of all cards
        self.policy = policy
        self._left: dict[str, Load] = {}
        self._loads: dict[str, Load] = {}  # of the pods
        self.engine = Engine(self.ledger, self, at_once=at_once, scorings=BASELINES)
        self.engine.want(policy)
        self.add(nodes)

    def add(self, nodes: Iterable[SimulatedNode]) -> None:
        """Further ones."""
        for node in nodes:
            self.ledger.set_cards(node.name, node.cards)
            self.ledger.set_devices(node.name, node.devices)
            self._left[node.name] = node.left
            self.engine.touch(node.name)

    def left(self, node: str) -> Load | None:
        """What the node has left beside cards."""
        return self._left.get(node)

    def saw(self, shape: PodShape) -> None:
        """A pod of this shape has come: the policies learn from it."""
        self.engine.saw(shape.request or NO_CARD, shape.load)
        study = self.engine.due()
        if study is not None:
            self.engine.adopt(learn(study))

    def warm(self) -> None:
        """Scores beforehand what decisions would find stale in great number, as the extender does meanwhile."""
        while self.engine.warm():
            pass

    def know(self, shapes: Iterable[PodShape]) -> None:
        """The policies know beforehand that pods of these shapes come, so often as they are named here."""
        for shape in shapes:
            self.engine.saw(shape.request or NO_CARD, shape.load)
        self.engine.adopt(learn(self.engine.study()))

    def recall(self, text: str) -> None:
        """As `know`, from what an engine has written of its workload. Raises InvalidWorkload."""
        self.engine.workload.load(text)
        self.engine.adopt(learn(self.engine.study()))

    def hold(self, holding: Holding) -> None:
        """What is there already. What it takes beside cards is not in what its node has left."""
        self.ledger.hold(holding)
        self.used += holding.assignment.mem

    def place(self, uid: str, pod: SimulatedPod) -> str | None:
        """The pod comes. The node that it is on now; None where none has room for it."""
        load = pod.shape.load
        placed = self.engine.place(pod.shape.request or NO_CARD, load, self.policy)
        if placed is None:
            return None
        self.hold(Holding(uid, _NAMESPACE, pod.name, placed.node, placed.assignment))
        self._take(placed.node, load, 1)
        self._loads[uid] = load
        return placed.node

    def remove(self, uid: str) -> str | None:
        """The pod ends. The node that it was on; None where it was never placed."""
        holding = self.ledger.holding(uid)
        if holding is None:
            return None
        self.ledger.release(uid)
        self.used -= holding.assignment.mem
        self._take(holding.node, self._loads.pop(uid, Load(0, 0, 0)), -1)
        return holding.node

    def fits(self, shapes: Sequence[PodShape], added: Sequence[SimulatedNode] = ()) -> tuple[tuple[int, ...], ...]:
        """How many pods of each shape have room, were it the only one to come; then the same with the added nodes,
        which stay.
        """
        counts = [tuple(map(self._count, shapes))]
        if added:
            self.add(added)
            counts.append(tuple(map(self._count, shapes)))
        return tuple(zip(*counts, strict=True))

    def _count(self, shape: PodShape) -> int:
        uids: list[str] = []
        while self.place(f"more-{len(uids)}", SimulatedPod("more", shape)) is not None:
            uids.append(f"more-{len(uids)}")
        for uid in uids:
            self.remove(uid)
        return len(uids)

    def _take(self, node: str, load: Load, sign: int) -> None:
        self._left[node] = self._left[node].plus(load, -sign)
        self.engine.touch(node)
