"""Finds nodes for pods with several card requests, on a snapshot and without the lock (docs/design/0032-snapshots.md).

For such pods each node is searched separately, which for thousands of nodes takes longer than other callers may wait
for the lock. When the search ends, the cluster may have changed. So `Placing` takes, under the lock, the first of the
best nodes that still takes the pod.
"""

from typing import Final

from cardwise.clock import Clock
from cardwise.core.placement import fitting
from cardwise.core.placement.placement import Scorer
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache
from extender.cache.pacing import Pace
from extender.cache.placing import PlacementRequest, Placing, PodSnapshot, SearchedNodes
from extender.cache.statelock import StateLock

FEW: Final = 16  # nodes that are searched under the lock; and the best ones that the decision may choose from


class NodeSearch:
    """Any thread may call it, without the lock."""

    def __init__(self, lock: StateLock, cache: Cache, placing: Placing, clock: Clock) -> None:
        self._lock = lock
        self._cache = cache
        self._placing = placing
        self._clock = clock

    def search(self, placement_request: PlacementRequest) -> PlacementRequest:
        """Search all nodes for the pod, if it has several card requests. Returns the request with the results, else as
        it was.
        """
        if len(placement_request.nodes) <= FEW or not fitting.has_several_claims(placement_request.request):
            return placement_request
        with self._lock:
            snapshot = self._placing.take_snapshot(placement_request)
            freed = self._cache.capacity.freed_count
        scores, refusals = score_nodes(snapshot, placement_request, Pace(self._clock))
        best = sorted(scores, key=lambda name: (-scores[name], name))[:FEW]
        overtakable = sorted(snapshot.nominated_ahead & refusals.keys())[:FEW]
        return placement_request._replace(searched=SearchedNodes([*best, *overtakable], scores, refusals, freed))


def score_nodes(
    snapshot: PodSnapshot, placement_request: PlacementRequest, pace: Pace
) -> tuple[dict[str, int], dict[str, Refusal]]:
    """The score of each node that fits, and the refusal of each that does not. Changes the snapshot."""
    ledger = snapshot.ledger
    if ledger.holding(placement_request.pod.uid) is not None:
        ledger.release(placement_request.pod.uid)  # a plan of its own does not count
    for holding in snapshot.nominated:
        ledger.set_holding(holding)
    scorer = Scorer(
        ledger.kinds, placement_request.request, placement_request.policy, snapshot.headroom, SearchEffort()
    )
    scores: dict[str, int] = {}
    refusals: dict[str, Refusal] = {}
    for name in dict.fromkeys(placement_request.nodes):
        pace.pause()
        state, reserved = ledger.node(name), snapshot.gang_reserved.get(name, ())
        outcome = scorer.score(state)
        if reserved and state is not None and not isinstance(outcome, Refusal):
            outcome = scorer.score(state.copy_with(reserved))
            if isinstance(outcome, Refusal):
                outcome = Refusal.GANG_RESERVED
        if isinstance(outcome, Refusal):
            refusals[name] = outcome
        else:
            scores[name] = outcome
    return scores, refusals
