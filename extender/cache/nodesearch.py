"""Finds nodes for pods with several card requests, on a snapshot and without the lock (docs/design/0032-snapshots.md).

For such pods each node is searched separately, which for thousands of nodes takes longer than other callers may wait
for the lock. When the search ends, the cluster may have changed. So `Placing` takes, under the lock, the first of the
best nodes that still takes the pod.

It can take longer than kube-scheduler waits, too. So a search ends `_SEARCH_SECONDS` after its call arrived, or when
kube-scheduler has closed the connection, and what it has learned is remembered: a later search for an equal pod skips
the nodes that refused it and have not changed since. Example: 5,000 nodes, of which 3,000 are searched in time and
refuse the pod. Filter returns an error, kube-scheduler tries the pod again some seconds later, and this search begins
with the other 2,000 nodes. If they refuse the pod as well, filter refuses it with the reasons of all 5,000.

kube-scheduler places no other pod while it waits for filter. So after a long search without a node, the namespace must
pause before its next one, however many such pods it has (`SearchPauses`). During the pause a call searches
`SMALL_SEARCH_NODES` nodes besides the remembered refusals, each call other ones: a pod that fits on many nodes gets one
at once, and for kube-scheduler the call takes no longer than one for another pod.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.placement import Scorer
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache
from extender.cache.pacing import Pace
from extender.cache.placing import PlacementRequest, Placing, PodSnapshot, SearchedNodes
from extender.cache.statelock import StateLock
from extender.queue.searchpauses import SearchPauses

# The most nodes that are searched under the lock, and the most that a search passes on to the decision.
SMALL_SEARCH_NODES: Final = 16
# Seconds after the arrival of the call. kube-scheduler waits for one second (`httpTimeout` of our stanza); the rest is
# for the decision and the response.
_SEARCH_SECONDS: Final = 0.7
_REMEMBERED: Final = 8  # searches; each takes some 1 MB at 5,000 nodes

_Key = tuple[str, PodRequest]  # namespace and request


class _RememberedRefusals(NamedTuple):
    """The nodes that refused a request, with the generation of each (`Ledger`): it is the same while the node is.

    headroom, nominated, gang_reserved: as in the snapshot. If they differ, the refusals are outdated.
    """

    headroom: Sequence[Headroom]
    nominated: Sequence[Holding]
    gang_reserved: Mapping[str, Sequence[Holding]]
    refusals: dict[str, tuple[int, Refusal]]


def is_needed(request: PodRequest, node_count: int) -> bool:
    """Whether the nodes are searched without the lock: they are many, and the request has several card requests."""
    return node_count > SMALL_SEARCH_NODES and fitting.has_several_card_requests(request)


class NodeSearch:
    """Any thread may call it, without the lock."""

    def __init__(self, lock: StateLock, cache: Cache, placing: Placing, clock: Clock) -> None:
        self._lock = lock
        self._cache = cache
        self._placing = placing
        self._clock = clock
        self._remembered: dict[_Key, _RememberedRefusals] = {}  # the remembered searches, the latest last
        self._pauses = SearchPauses(clock)
        self._start = 0  # the position of the node with which the next search begins

    def search(self, placement_request: PlacementRequest) -> PlacementRequest:
        """Search all nodes for the pod, if it has several card requests. Returns the request with the results, else as
        it was.
        """
        if not is_needed(placement_request.request, len(placement_request.nodes)):
            return placement_request
        key = placement_request.pod.namespace, placement_request.request
        with self._lock:
            snapshot = self._placing.take_snapshot(placement_request)
            freed = self._cache.capacity.freed_count
            remembered = self._remembered.pop(key, None)
            start = self._start
            is_paused = self._pauses.is_paused(key[0])
        remembered_refusals = _RememberedRefusals(snapshot.headroom, snapshot.nominated, snapshot.gang_reserved, {})
        if remembered is not None and remembered_refusals == remembered._replace(refusals={}):
            remembered_refusals = remembered
        start_cpu, now, call = self._clock.cpu(), self._clock.now(), placement_request.call
        deadline = (call.arrived if call.arrived is not None else now) + _SEARCH_SECONDS
        pace = Pace(self._clock, lambda: self._clock.now() >= deadline or call.is_abandoned())
        max_nodes = SMALL_SEARCH_NODES if is_paused else None
        scores, refusals = score_nodes(
            snapshot, placement_request, pace, remembered_refusals.refusals, start, max_nodes=max_nodes
        )
        unsearched = len(set(placement_request.nodes)) - len(scores) - len(refusals)
        best = sorted(scores, key=lambda name: (-scores[name], name))[:SMALL_SEARCH_NODES]
        overtakable = sorted(snapshot.nominated_ahead & refusals.keys())[:SMALL_SEARCH_NODES]
        with self._lock:
            self._remember(key, remembered_refusals)
            if not scores and not is_paused:
                self._pauses.charge_search(key[0], self._clock.cpu() - start_cpu)
            if unsearched:
                self._start = (start + len(scores) + len(refusals)) % len(placement_request.nodes)
        searched_nodes = SearchedNodes([*best, *overtakable], scores, refusals, freed, unsearched)
        if unsearched and call.is_abandoned():
            searched_nodes = searched_nodes._replace(
                best=(), scores={}
            )  # nothing is reserved for a call that has ended
        return placement_request._replace(searched=searched_nodes)

    def _remember(self, key: _Key, refusals: _RememberedRefusals) -> None:
        """Remember a search in place of the oldest one of the namespace with the most."""
        self._remembered.pop(key, None)
        if len(self._remembered) >= _REMEMBERED:
            counts = Counter(namespace for namespace, _ in self._remembered)
            counts[key[0]] += 1
            largest_count = max(counts.values())
            del self._remembered[
                next(other_key for other_key in self._remembered if counts[other_key[0]] == largest_count)
            ]
        self._remembered[key] = refusals


def score_nodes(
    snapshot: PodSnapshot,
    placement_request: PlacementRequest,
    pace: Pace,
    remembered_refusals: dict[str, tuple[int, Refusal]],
    start: int = 0,
    *,
    max_nodes: int | None = None,
) -> tuple[dict[str, int], dict[str, Refusal]]:
    """The score of each node that fits, and the refusal of each that does not. Changes the snapshot.

    pace: when its time is over, the remaining nodes are left out.
    remembered_refusals: earlier refusals, with the generation of the node; new ones are added.
    start: the position of the node to begin with.
    max_nodes: how many nodes are searched at most, besides those that are known to refuse the request.
    """
    ledger = snapshot.ledger
    generations = {name: node.generation for name, node in ledger.nodes_by_name().items()}
    for name in remembered_refusals.keys() - generations.keys():
        del remembered_refusals[name]
    own_plan = ledger.holding(placement_request.pod.uid)
    if own_plan is not None:
        ledger.release(placement_request.pod.uid)  # the pod's own plan does not count
        remembered_refusals.pop(own_plan.node, None)  # it counted for the equal pod that was refused
    for holding in snapshot.nominated:
        ledger.set_holding(holding)
    effort = SearchEffort()
    scorer = Scorer(ledger.kinds, placement_request.request, placement_request.policy, snapshot.headroom, effort)
    names = dict.fromkeys(placement_request.nodes)
    refusals = {
        name: refusal
        for name, (generation, refusal) in remembered_refusals.items()
        if name in names and generations.get(name) == generation
    }
    scores: dict[str, int] = {}
    unknown = [name for name in (*islice(names, start, None), *islice(names, start)) if name not in refusals]
    if own_plan is not None:
        unknown.sort(key=lambda name: name != own_plan.node)  # its own node is tried first
    for name in unknown[:max_nodes]:
        if pace.pause():
            break
        state, reserved = ledger.node(name), snapshot.gang_reserved.get(name, ())
        outcome = scorer.score(state)
        if reserved and state is not None and not isinstance(outcome, Refusal):
            outcome = scorer.score(state.copy_with(reserved))
            if isinstance(outcome, Refusal):
                outcome = Refusal.GANG_RESERVED
        if isinstance(outcome, Refusal):
            refusals[name] = outcome
            if state is not None and effort.remaining > 0:
                remembered_refusals[name] = generations[name], outcome
        else:
            scores[name] = outcome
            remembered_refusals.pop(name, None)
    return scores, refusals
