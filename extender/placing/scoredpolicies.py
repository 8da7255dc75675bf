"""Keeps the engine of the scored policies. It is created when the setting or a pod first requests such a policy.

This module imports the engine only when a scored policy needs it, so a cluster that only uses `binpack` never imports
numpy.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from cardwise.core.api import policies
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement.placement import Placement
from cardwise.core.placement.searching import CheckLimit
from extender.cache.cache import Cache
from extender.cache.statelock import StateLock

if TYPE_CHECKING:
    from cardwise.core.placement.scored.engine import Engine
    from cardwise.core.placement.scored.shapes import RequestSize
    from cardwise.core.placement.scored.workload import LearnedWorkload, LearningInput

MAX_SCORED_NODES = 256  # maximum number of nodes that a decision scores: takes less than 1 ms
_MAX_COUNTED_PODS = (
    65_536  # pods that are remembered as counted, so that a pod that is tried again is not counted again
)


class ScoredPolicies:
    """Chooses nodes and cards by a scored policy.

    The caller of `place` and `score_nodes` holds the state's lock. The other methods, which `WorkloadController` calls,
    acquire the lock themselves.

    `binpack` decides until `WorkloadController` has created the engine, and while the engine has too little data about
    the nodes.
    """

    def __init__(self, lock: StateLock, cache: Cache) -> None:
        self.is_requested = False  # whether a pod has requested such a policy
        self._lock = lock
        self._cache = cache
        self._engine: Engine | None = None
        self._watched: set[str] = set()
        self._recent_policies: OrderedDict[str, None] = OrderedDict()

    def place(
        self,
        uid: str,
        request: PodRequest,
        load: Load,
        nodes: Collection[str],
        policy: str,
        *,
        headroom: Sequence[Headroom],
        limit: CheckLimit | None,
    ) -> Placement | None:
        """A node and cards, chosen by a scored policy; None if `binpack` has to decide. Raises SearchTooLong."""
        engine = self._engine_for(uid, request, load, policy)
        return engine.place(request, load, policy, nodes, headroom, limit=limit) if engine is not None else None

    def score_nodes(
        self,
        uid: str,
        request: PodRequest,
        load: Load,
        nodes: Collection[str],
        policy: str,
        *,
        headroom: Sequence[Headroom],
    ) -> dict[str, int] | None:
        """The score of each node that fits the pod, the highest for the best node; None if `binpack` has to decide."""
        engine = self._engine_for(uid, request, load, policy)
        return (engine.scores(request, load, policy, nodes, headroom) or None) if engine is not None else None

    @property
    def is_active(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    def start_engine(self, make: "Callable[..., Engine]", policy: str = policies.DEFAULT_POLICY) -> None:
        """Create the engine. From now on it chooses nodes and cards for pods with scored policies.

        make: the engine's class.
        policy: the policy that most pods use.
        """
        with self._lock:
            self._engine = make(self._cache.ledger, self._cache.loads, max_scored_nodes=MAX_SCORED_NODES)
            self._engine.prepare_policy(policy)
            self._watched = self._cache.loads.watch()

    def learning_input(self) -> "LearningInput | None":
        """The input from which the engine should learn now; None if there is nothing to learn."""
        with self._lock:
            self._cache.sync_cards()
            engine = self._updated_engine()
            return engine.learning_input_if_due() if engine is not None else None

    def adopt_model(self, learned_workload: "LearnedWorkload") -> None:
        """Use the learned model of the workload from now on."""
        with self._lock:
            if self._engine is not None:
                self._engine.use_workload(learned_workload)

    def precompute_scores(self, max_nodes: int) -> bool:
        """Compute the scores of at most `max_nodes` nodes in advance. Returns whether more nodes may be left."""
        with self._lock:
            engine = self._updated_engine()
            return engine.run_background_step(max_nodes) if engine is not None else False

    def arrival_counts(self) -> "dict[RequestSize, float]":
        """How often each request size arrived; empty if there is no engine to count arriving pods."""
        with self._lock:
            return dict(self._engine.workload.counts) if self._engine is not None else {}

    def dump_workload(self) -> str | None:
        """The workload as text, for saving; None if there is no workload."""
        with self._lock:
            return self._engine.workload.dump() if self._engine is not None else None

    def load_workload(self, text: str) -> None:
        """Restore a saved workload into the engine. Raises InvalidWorkload."""
        with self._lock:
            if self._engine is not None:
                self._engine.workload.load(text)

    def _engine_for(self, uid: str, request: PodRequest, load: Load, policy: str) -> "Engine | None":
        """The engine if it can decide by this policy now, else None. Adds the pod to the observed workload."""
        self.is_requested = self.is_requested or policies.find_policy(policy).is_scored
        engine = self._updated_engine()
        if engine is None:
            return None
        if uid and uid not in self._recent_policies:
            self._recent_policies[uid] = None
            if len(self._recent_policies) > _MAX_COUNTED_PODS:
                self._recent_policies.popitem(last=False)
            engine.count_arrival(request, load)
        return engine if policies.find_policy(policy).is_scored and engine.can_decide(policy) else None

    def _updated_engine(self) -> "Engine | None":
        engine = self._engine
        if engine is not None and self._watched:
            for node in self._watched:
                engine.mark_changed(node)
            self._watched.clear()
        return engine
