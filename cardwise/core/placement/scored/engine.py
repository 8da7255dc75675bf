"""The placement engine for all policies: chooses a node and cards for a pod, by scores of all nodes or by cards alone.

The extender uses this engine for scored policies and `placement` for the others; the simulator and the tests use this
engine for all policies. The engine sees changes of the ledger itself. Callers report all other changes of nodes. Not
thread-safe: the owner must lock it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import NO_USER
from cardwise.core.api.policies import FALLBACK_POLICY
from cardwise.core.api.policies.priced import PRICED
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement import fitting
from cardwise.core.placement.cardtenants import EXCLUSIVE_TAINT
from cardwise.core.placement.fitting import CardRequest
from cardwise.core.placement.kinds import ANY_CARD
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.mpstaints import CLOSABLE, LAST_EMPTY
from cardwise.core.placement.placement import Placement, Scorer
from cardwise.core.placement.scored.candidates import fit_shape
from cardwise.core.placement.scored.nodefeatures import FeatureViews
from cardwise.core.placement.scored.nodetable import Bools, Floats, Ints, NodeTable
from cardwise.core.placement.scored.pricing import Pricing
from cardwise.core.placement.scored.rows import NO_POINTS, ShapeScores
from cardwise.core.placement.scored.scoring import Scoring, WeightedShape, WorkloadModel
from cardwise.core.placement.scored.shapes import RequestShape, RequestSize, make_request_size
from cardwise.core.placement.scored.workload import LearnedWorkload, LearningInput, Workload
from cardwise.core.placement.searching import NODE_CHECKS, CheckLimit
from cardwise.core.values.refusals import Refusal

_MAX_ROWS: Final = 256  # shapes whose scores are cached: the most recently used
_MIN_CHANGES_BETWEEN_SCANS: Final = 400  # the minimum number of node changes between two scans of all nodes
_UNLIMITED_NODES: Final = 1 << 62  # more nodes than any cluster has
_SCORES_PER_LOOKUP: Final = 8  # reading one changed node from the ledger takes as long as computing this many scores
_MAX_LOOKUPS: Final = 32  # changed nodes that one decision reads from the ledger; other changed nodes are skipped
_MAX_CHANGED_NODES: Final = 1024  # changed nodes that are not read yet; with more, the table is too old for decisions
_MAX_TRIES: Final = 32  # the best nodes of all that are tried; after these, only the candidates' scores are searched

MakeScoring = Callable[[WorkloadModel], Scoring]
SCORINGS: Final[Mapping[str, MakeScoring]] = {PRICED.name: Pricing}


class FreeLoads(Protocol):
    """The free cpu, memory and pods of nodes."""

    def free_load(self, node: str) -> Load | None:
        """The node's free amounts for further pods; None if there is no such node."""


class Engine:
    """The engine of one ledger. Call `mark_changed` for nodes whose free cpu, memory or pods have changed.

    max_scored_nodes: the maximum number of nodes that a decision scores; None for no limit. If more nodes have no
        current score, the decision scores a sample of them, and `run_background_step` scores the others later.
    scorings: the scored policies; the simulator adds further ones.
    """

    def __init__(
        self,
        ledger: Ledger,
        loads: FreeLoads,
        *,
        max_scored_nodes: int | None = None,
        scorings: Mapping[str, MakeScoring] = SCORINGS,
    ) -> None:
        self.workload = Workload()
        self._ledger = ledger
        self._loads = loads
        self._scorings = scorings
        self._table = NodeTable()
        self._changed = ledger.watch()
        self._max_scored_nodes = max_scored_nodes
        self._generator = np.random.default_rng(0)
        self._learned_workload: LearnedWorkload | None = None
        self._kinds_version = -1
        self._learned_at_change = -1
        self._scanned_change_count = 0
        self._views = FeatureViews(self._table, self._scoring)
        self._rows: dict[tuple[str, RequestShape], ShapeScores] = {}

    # Changes.

    def mark_changed(self, node: str) -> None:
        """Record that the free amounts of the node have changed, or that it was added or deleted."""
        self._changed.add(node)

    def prepare_policy(self, policy: str) -> None:
        """Let `run_background_step` compute the features of this policy in advance, if it is a scored policy."""
        if policy in self._scorings:
            self._views.prepare_policy(policy)

    def count_arrival(self, request: PodRequest, load: Load) -> None:
        """Count a newly created pod for the workload. Call this once for each pod."""
        request_size = make_request_size(request, fitting.card_requests(request), load)
        if request_size is not None:
            self.workload.count_arrival(request_size)

    def learning_input_if_due(self) -> LearningInput | None:
        """The input of learning; None if learning is not due. It is due after many arrivals or a change of cards."""
        changes = self._ledger.kinds.changes
        if not self.workload.is_learning_due and (self._learned_workload is None or self._learned_at_change == changes):
            return None
        if self._max_scored_nodes is not None and len(self._changed) > self._max_scored_nodes:
            return None  # the cards of many nodes are not read yet
        sample = self.learning_input()
        if not sample.sizes or not sample.counts:
            return None
        self.workload.mark_learned()
        self._learned_at_change = changes
        return sample

    def learning_input(self) -> LearningInput:
        """The input of learning: the counts of requests, and the cards by size."""
        self._refresh()
        sizes, counts = np.unique(self._table.lines.size[self._table.lines.cpu >= 0], return_counts=True)
        cards = {int(size): int(count) for size, count in zip(sizes, counts, strict=True) if size}
        return LearningInput(dict(self.workload.counts), cards)

    def use_workload(self, learned_workload: LearnedWorkload) -> None:
        """Use the learned workload from now on."""
        self._learned_workload = learned_workload
        self._views.recompute_features()

    def can_decide(self, policy: str) -> bool:
        """Whether enough nodes are up to date for decisions by this policy. If not, call `run_background_step`."""
        self.prepare_policy(policy)
        if self._max_scored_nodes is None or max(len(self._table), len(self._changed)) <= self._max_scored_nodes:
            return True
        return policy in self._views and len(self._changed) <= _MAX_CHANGED_NODES

    def run_background_step(self, max_nodes: int = 256) -> bool:
        """Do one piece of background work, for up to `max_nodes` nodes. It is the first of these that is due: read
        changed nodes, continue a scan of all nodes, or score nodes for a shape. Shapes are due if several decisions
        have used them and many of their scores are stale; the most recently used shape comes first.

        Returns whether there may be more work.
        """
        if self._catch_up(1 + max_nodes // _SCORES_PER_LOOKUP):
            return True
        self._recompute_after_kind_change()
        self._start_scan()
        if self._views.is_scanning:
            self._discard_scores(self._views.scan_nodes(max_nodes))
            return True
        for row in reversed(self._rows.values()):
            # If thousands of pods arrive, each of a different size, no shape is used again.
            if row.decisions > 1 and row.max_stale() > (self._max_scored_nodes or 0) // 2:
                stale = row.stale_slots()
                row.refresh(stale[:max_nodes])
                max_nodes -= len(stale)
                if max_nodes <= 0:
                    return True
        return False

    # Decisions.

    def place(
        self,
        request: PodRequest,
        load: Load,
        policy: str,
        nodes: Collection[str] | None = None,
        headroom: Sequence[Headroom] = (),
        *,
        limit: CheckLimit | None = None,
    ) -> Placement | None:
        """The placement of the pod on the best node; None if the pod fits nowhere. Raises SearchTooLong.

        load: cpu, memory and pods of the request.
        nodes: the allowed nodes; None for all.
        headroom: the amounts that quotas leave to the namespace.
        limit: limits the cards and nodes that are checked after they were scored; None: no limit.
        """
        has_features = self._refresh(policy)
        card_requests = fitting.card_requests(request)
        scorer = Scorer(
            self._ledger.kinds, request, FALLBACK_POLICY if policy in self._scorings else policy, headroom, limit=limit
        )
        request_size = make_request_size(request, card_requests, load)
        if request_size is None or not has_features or self._depends_on_tenants(request):
            return self._by_cards(scorer, card_requests, load, nodes)
        plan = fitting.make_search_plan(card_requests, self._ledger.kinds, headroom)
        if plan.headroom:
            return self._by_cards(scorer, card_requests, load, nodes)
        levels = plan.typed_requests[0].levels if card_requests else ANY_CARD
        shapes = [shape for _, kinds in levels for shape in self._shapes_for(request_size, card_requests, kinds)]
        new_decisions = 1
        while True:
            for shape in shapes:
                row = self._row(policy, shape)
                row.decisions += new_decisions
                placement = self._best(row, scorer, card_requests, nodes)
                if placement is not None:
                    return placement
                if self._changed:
                    break  # the pod may fit on changed nodes; only if not, the next level of card kinds is used
            else:
                return None
            self._catch_up(_UNLIMITED_NODES)
            new_decisions = 0

    def scores(
        self, request: PodRequest, load: Load, policy: str, nodes: Collection[str], headroom: Sequence[Headroom] = ()
    ) -> dict[str, int] | None:
        """The nodes where the pod fits, each with a different score; None if the policy cannot score the request."""
        has_features = self._refresh(policy)
        self._catch_up(_UNLIMITED_NODES)
        card_requests = fitting.card_requests(request)
        request_size = make_request_size(request, card_requests, load)
        if request_size is None or not has_features or self._depends_on_tenants(request):
            return None
        plan = fitting.make_search_plan(card_requests, self._ledger.kinds, headroom)
        if plan.headroom:
            return None
        candidate_slots, node_names = self._slots(nodes), list[str]()
        levels = plan.typed_requests[0].levels if card_requests else ANY_CARD
        shapes = [shape for _, kinds in levels for shape in self._shapes_for(request_size, card_requests, kinds)]
        for shape in reversed(shapes):
            row = self._row(policy, shape)
            row.refresh(row.stale_slots())
            slots = candidate_slots[row.points[candidate_slots] > NO_POINTS]
            best_last = slots[np.lexsort((-self._table.order[slots], row.points[slots]))]
            node_names += map(self._table.names.__getitem__, best_last.tolist())  # Python integers: twice as fast
        # a node that is listed twice keeps its better score
        return {name: place for place, name in enumerate(node_names)}

    # The methods below require a call of `_refresh`.

    def _refresh(self, policy: str = "") -> bool:
        """Read changed nodes. Returns whether the policy's features of all nodes are computed; False for a policy
        without scores.
        """
        max_nodes = (
            _UNLIMITED_NODES
            if self._max_scored_nodes is None or len(self._table) <= self._max_scored_nodes
            else self._max_scored_nodes
        )
        self._catch_up(1 + max_nodes // _SCORES_PER_LOOKUP if policy in self._views else _UNLIMITED_NODES)
        self._recompute_after_kind_change()
        self.prepare_policy(policy)
        if max_nodes == _UNLIMITED_NODES:
            self._start_scan()
            self._discard_scores(self._views.scan_nodes(_UNLIMITED_NODES))
        return policy in self._views

    def _catch_up(self, max_nodes: int) -> bool:
        """Read at most `max_nodes` changed nodes from the ledger. Returns whether there are more."""
        if not self._changed:
            return False
        self._look_up(sorted(self._changed)[:max_nodes])  # sorted, so that the same events have the same outcome
        return bool(self._changed)

    def _look_up(self, names: Sequence[str]) -> None:
        for name in names:
            self._table.set_node(name, self._ledger.node(name), self._loads.free_load(name))
        self._changed.difference_update(names)

    def _recompute_after_kind_change(self) -> None:
        if self._kinds_version != self._ledger.kinds.changes:
            self._kinds_version = self._ledger.kinds.changes
            self._views.recompute_features()

    def _start_scan(self) -> None:
        """Start a scan of all nodes if one is due."""
        if self._table.change_count >= self._scanned_change_count + max(
            _MIN_CHANGES_BETWEEN_SCANS, len(self._table.slots) // 3
        ):
            self._scanned_change_count = self._table.change_count
            self._views.start_scans(self._table.departure_rate())

    def _discard_scores(self, policies: Sequence[str]) -> None:
        """Discard the scores of these policies; `run_background_step` or the next decision computes them again."""
        for (policy, _), row in self._rows.items():
            if policy in policies:
                row.discard_scores(self._views[policy])

    def _row(self, policy: str, shape: RequestShape) -> ShapeScores:
        key = policy, shape
        row = self._rows.pop(key, None)
        if row is None:
            row = ShapeScores(self._table, self._views[policy], shape)
            if len(self._rows) >= _MAX_ROWS:
                del self._rows[next(iter(self._rows))]
        self._rows[key] = row  # the most recently used row is the last
        return row

    def _scoring(self, policy: str) -> Scoring | None:
        return (
            self._scorings[policy](self._workload_model(self._learned_workload))
            if self._learned_workload is not None
            else None
        )

    def _workload_model(self, learned_workload: LearnedWorkload) -> WorkloadModel:
        workload = [
            WeightedShape(self._shape(request_size), share) for request_size, share in learned_workload.shares.items()
        ]
        return WorkloadModel(workload, learned_workload.typical_card_mib, learned_workload.prices)

    def _best(
        self, row: ShapeScores, scorer: Scorer, card_requests: Sequence[CardRequest], nodes: Collection[str] | None
    ) -> Placement | None:
        """The placement on the best node with a current score; None if the pod fits on no such node."""
        retries = _MAX_LOOKUPS
        candidate_slots = self._slots(nodes) if nodes is not None and 2 * len(nodes) < len(self._table.slots) else None
        while True:
            row.score_for_decision(self._max_scored_nodes, self._generator, candidate_slots)
            changed_names: list[str] = []
            for slot in self._best_first(row.points, nodes, candidate_slots):
                name = self._table.names[slot]
                if name in self._changed:  # its score may be outdated
                    if retries:
                        retries -= 1
                        changed_names.append(name)
                    continue
                if changed_names:
                    break  # the changed nodes may be better: read and score them first
                placement = self._place_on_slot(scorer, card_requests, slot, row)
                if placement is not None:
                    return placement
                scorer.count_checks(NODE_CHECKS)
            if changed_names:
                self._look_up(changed_names)
            elif candidate_slots is None and nodes is not None and row.max_stale():
                candidate_slots = self._slots(nodes)  # no candidate was in the sample: score candidates only
            else:
                return None

    def _depends_on_tenants(self, request: PodRequest) -> bool:
        """Whether the tenants of a card decide if the request may use it. The table knows only whether a pod that
        shares cards within its namespace only holds a card: such a card is closed to all other requests.
        """
        return request.tenant.exclusive or request.tenant.namespace in self._ledger.exclusive_pods

    def _shapes_for(
        self, request_size: RequestSize, card_requests: Sequence[CardRequest], kinds: frozenset[int] | None
    ) -> list[RequestShape]:
        """The shapes to try one after another: for a share without MPS first one that closes no card to MPS."""
        request_size = request_size._replace(resource_class="")
        if not card_requests:
            return [RequestShape(request_size)]
        card_request = card_requests[0]
        user = card_request.user if self._table.single else NO_USER
        avoided = card_request.avoided if self._ledger.managed else 0
        untolerated = card_request.untolerated | (EXCLUSIVE_TAINT if self._ledger.exclusive_pods else 0)
        shape = RequestShape(request_size, kinds, untolerated, user, avoided & LAST_EMPTY)
        if not avoided & CLOSABLE:
            return [shape]
        return [shape._replace(untolerated=shape.untolerated | CLOSABLE), shape]

    def _shape(self, request_size: RequestSize) -> RequestShape:
        return RequestShape(
            request_size._replace(resource_class=""), self._ledger.kinds.allowed(request_size.resource_class)
        )

    def _best_first(self, points: Floats, nodes: Collection[str] | None, candidate_slots: Ints | None) -> Iterator[int]:
        """Yield the slots of the candidate nodes, the best first; nodes of equal score in the fixed order of the table.

        points: the score of each slot.
        nodes: the candidates; None for all nodes.
        candidate_slots: the slots of the candidates if they are few, else None.
        """
        tries = 0
        names = self._table.names
        copied = candidate_slots is not None
        if candidate_slots is not None:
            points, nodes = _keep_only_slots(points, candidate_slots), None
        while True:
            highest = points.max(initial=NO_POINTS)
            if highest == NO_POINTS:
                return
            ties = np.flatnonzero(points == highest)
            slot = int(ties[self._table.order[ties].argmin()])
            if nodes is None or names[slot] in nodes:
                yield slot
            if not copied:
                points, copied = points.copy(), True
            points[slot] = NO_POINTS
            tries += 1
            if nodes is not None and tries >= _MAX_TRIES:
                points, nodes = _keep_only_slots(points, self._slots(nodes)), None

    def _slots(self, nodes: Collection[str]) -> Ints:
        """The slots of the nodes in ascending order, without duplicates, so that samples are reproducible."""
        selected = np.zeros(len(self._table.names), bool)
        selected[[slot for slot in map(self._table.slots.get, nodes) if slot is not None]] = True
        return np.flatnonzero(selected)

    def _place_on_slot(
        self, scorer: Scorer, card_requests: Sequence[CardRequest], slot: int, row: ShapeScores
    ) -> Placement | None:
        name, score = self._table.names[slot], int(row.points[slot] * 1000)
        if not card_requests:
            return _place_without_cards(name, score)
        node, card = self._ledger.node(name), int(row.card[slot])
        if node is None:
            return None
        if card < 0:
            placement = scorer.place_on(node)
            return placement if not isinstance(placement, Refusal) else None
        return scorer.place_at(node, card, score) if fitting.has_capacity(node, card, card_requests[0]) else None

    def _by_cards(
        self, scorer: Scorer, card_requests: Sequence[CardRequest], load: Load, nodes: Collection[str] | None
    ) -> Placement | None:
        """The choice of an unscored policy, or of `binpack` in place of a scored one, node by node."""
        lines = self._table.lines
        fits = fit_shape(lines, RequestShape(RequestSize(0, 0, 0, "", load.cpu, load.memory))).fitting_nodes
        nodes_with_load = _NodesWithFreeLoad(self._table, fits, nodes)
        if not card_requests and not scorer.devices:
            # The first node by name, the same rule as for equal nodes of pods with cards. Another rule would leave more
            # nodes half full.
            first_name = min(nodes_with_load, default=None)
            return _place_without_cards(first_name, 0) if first_name is not None else None
        if scorer.indexed:
            node = scorer.best_node(self._ledger, nodes_with_load)
        else:
            scores, _ = scorer.score_all(self._ledger, nodes_with_load)
            highest = max(scores.values(), default=0)
            best = min((name for name, score in scores.items() if score == highest), default=None)
            node = self._ledger.node(best) if best is not None else None
        placement = scorer.place_on(node) if node is not None else None
        return placement if not isinstance(placement, Refusal) else None


def _keep_only_slots(points: Floats, slots: Ints) -> Floats:
    """A copy of `points` with the scores of these slots only; the other slots have no score."""
    only = np.full(len(points), NO_POINTS)
    only[slots] = points[slots]
    return only


def _place_without_cards(node: str, score: int) -> Placement:
    """The placement of a pod that requests no card."""
    return Placement(node=node, assignment=Assignment({}), score=score)


class _NodesWithFreeLoad:
    """The allowed nodes that have enough cpu and memory."""

    def __init__(self, table: NodeTable, fits: Bools, nodes: Collection[str] | None) -> None:
        self._slots = table.slots
        self._fits = fits
        self._nodes = table.slots if nodes is None else nodes

    def __contains__(self, name: object) -> bool:
        slot = self._slots.get(name) if isinstance(name, str) else None
        return slot is not None and bool(self._fits[slot]) and name in self._nodes

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._nodes if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
