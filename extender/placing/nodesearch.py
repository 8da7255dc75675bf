"""Finds nodes for single pods, on a snapshot and without the lock (docs/design/0032-snapshots.md).

For most pods the ledger's card index finds the best node at once, under the lock. For pods with several card requests
each node is searched separately. Other pods need such a search if the index does not help (`SearchTooLong`). For
example, many cards with enough memory lack something else, or nodes refuse for reasons that are found only node by
node. Example: 48 containers, each a client of one card, fit only on cards without a share; 40,000 cards with shares
come first.

With thousands of nodes this takes longer than other callers may wait for the lock, so the search works on a snapshot.
When the search ends, the cluster may have changed. So `Placing` tries the best nodes again under the lock, and chooses
the first node that still fits the pod.

A search can also take longer than kube-scheduler waits. So a search ends `_SEARCH_SECONDS` after its call arrived, or
when kube-scheduler has closed the connection. The refusals are remembered: a later search for an equal pod skips the
nodes that have refused such a pod and have not changed since. Example: of 5,000 nodes, 3,000 are searched in time and
refuse the pod. Filter returns an error, kube-scheduler tries the pod again some seconds later, and the second search
begins with the other 2,000 nodes. If these nodes refuse the pod as well, filter refuses the pod with the reasons of all
5,000.

kube-scheduler places no other pod while it waits for filter. So after a long search without a result, the namespace
must pause before its next long search, however many such pods it has (`SearchPauses`). During the pause each call
searches only `SMALL_SEARCH_NODES` nodes, and the next call continues after these nodes. So a pod that fits on many
nodes is still placed at once. The call takes no longer than a call for a pod with one card request.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from cardwise.clock import Clock
from cardwise.core.api import policies
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import fitting
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.placement import ScoredNodes, Scorer
from cardwise.core.placement.searching import SearchEffort, SearchTooLong
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache
from extender.cache.nominated import NominatedPods, find_unknown_cards
from extender.cache.pacing import Pace
from extender.cache.statelock import StateLock
from extender.placing.placing import Call, PlacementRequest, Placing, PodSearchInput, SearchedNodes, order_by_rank
from extender.queue.searchpauses import SearchPauses

# Maximum number of nodes that are searched under the lock, and the maximum that a search passes on to the decision.
SMALL_SEARCH_NODES: Final = 16
# Seconds from the arrival of the call to the end of its search. kube-scheduler waits for one second (`httpTimeout` of
# our stanza); the rest is for the decision and the response.
_SEARCH_SECONDS: Final = 0.7
_MAX_REMEMBERED_SEARCHES: Final = (
    8  # maximum number of searches that are remembered; each takes about 1 MB with 5,000 nodes
)

_Decision = TypeVar("_Decision")
_Key = tuple[str, PodRequest]  # namespace and request


class _RememberedRefusals(NamedTuple):
    """The nodes that refused a request, each with its generation (`Ledger`), which increases when the node changes.

    headroom, nominated, gang_reserved: the values of the snapshot. If they have changed, the refusals are outdated.
    """

    headroom: Sequence[Headroom]
    nominated: Sequence[Holding]
    gang_reserved: Mapping[str, Sequence[Holding]]
    refusals: dict[str, tuple[int, Refusal]]


def is_needed(request: PodRequest, node_count: int) -> bool:
    """Whether to search without the lock, because there are many nodes and the pod has several card requests."""
    return node_count > SMALL_SEARCH_NODES and fitting.has_several_card_requests(request)


class NodeSearch:
    """Searches nodes on snapshots. Any thread may call the methods, without the lock."""

    def __init__(
        self, lock: StateLock, *, cache: Cache, placing: Placing, nominated: NominatedPods, clock: Clock
    ) -> None:
        self._lock = lock
        self._cache = cache
        self._placing = placing
        self._nominated = nominated
        self._clock = clock
        self._remembered: dict[_Key, _RememberedRefusals] = {}  # the remembered searches, the latest last
        self._pauses = SearchPauses(clock)
        self._start = 0  # the position of the node with which the next search begins

    def decide_after_search(
        self, placement_request: PlacementRequest, decide: Callable[[PlacementRequest], _Decision]
    ) -> _Decision:
        """Return what `decide` returns; if the search under the lock would take too long, first search without the
        lock.

        It would take too long for pods with several card requests, and if `decide` raises SearchTooLong.

        decide: acquires the lock and decides.

        If the pod's policy ranks the nodes, they are ranked first, in a separate hold of the lock. A pod that is bound
        in between does not count; it could as well have been bound just after the decision.
        """
        if policies.ranks_nodes(placement_request.request.policy):
            with self._lock:
                placement_request = self._placing.with_ranks(placement_request)
        if not is_needed(placement_request.request, len(placement_request.nodes)):
            try:
                return decide(placement_request.limit_checks())
            except SearchTooLong:
                pass
        return decide(self._search(placement_request))

    def _search(self, placement_request: PlacementRequest) -> PlacementRequest:
        """Search all nodes for the pod. Returns the request with the result."""
        key = placement_request.pod.namespace, placement_request.request
        self._find_unknown_cards(set(placement_request.nodes), placement_request.call)
        with self._lock:
            snapshot = self._placing.take_snapshot(placement_request)
            freed = self._cache.capacity.freed_count
            remembered = self._remembered.pop(key, None)
            start = self._start
            is_paused = self._pauses.is_paused(key[0])
        remembered_refusals = _RememberedRefusals(snapshot.headroom, snapshot.nominated, snapshot.gang_reserved, {})
        if remembered is not None and remembered_refusals == remembered._replace(refusals={}):
            remembered_refusals = remembered
        start_cpu, call = self._clock.cpu(), placement_request.call
        pace = self._make_pace(call)
        max_nodes = SMALL_SEARCH_NODES if is_paused else None
        scores, refusals = score_nodes(
            snapshot, placement_request, pace, remembered_refusals.refusals, start, max_nodes=max_nodes
        )
        scores = order_by_rank(scores, placement_request.ranks)
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

    def _make_pace(self, call: Call) -> Pace:
        """A pace that ends with the time of the call."""
        deadline = (call.arrived if call.arrived is not None else self._clock.now()) + _SEARCH_SECONDS
        return Pace(self._clock, lambda: self._clock.now() >= deadline or call.is_abandoned())

    def _find_unknown_cards(self, nodes: Collection[str], call: Call) -> None:
        """Find the unknown cards of pods that are nominated on these nodes, if there are any: the search counts only
        known cards.
        """
        with self._lock:
            has_unknown = any(node in nodes for node in self._nominated.nodes_with_unknown_cards())
        if has_unknown:
            find_unknown_cards(self._lock, self._cache, self._nominated, nodes, self._make_pace(call).pause)

    def _remember(self, key: _Key, refusals: _RememberedRefusals) -> None:
        """Remember the refusals. A full table drops the oldest entry of the namespace with the most entries."""
        self._remembered.pop(key, None)
        if len(self._remembered) >= _MAX_REMEMBERED_SEARCHES:
            counts = Counter(namespace for namespace, _ in self._remembered)
            counts[key[0]] += 1
            largest_count = max(counts.values())
            del self._remembered[
                next(other_key for other_key in self._remembered if counts[other_key[0]] == largest_count)
            ]
        self._remembered[key] = refusals


def score_nodes(
    snapshot: PodSearchInput,
    placement_request: PlacementRequest,
    pace: Pace,
    remembered_refusals: dict[str, tuple[int, Refusal]],
    start: int = 0,
    *,
    max_nodes: int | None = None,
) -> ScoredNodes:
    """The score of each node that fits, and the refusal of each other node. Changes the snapshot.

    pace: when its time is over, the remaining nodes are left out.
    remembered_refusals: earlier refusals, each with the generation of its node; new refusals are added.
    start: the position of the first node to search.
    max_nodes: maximum number of nodes to search. Nodes with a valid remembered refusal are skipped and do not count.
    """
    ledger = snapshot.ledger
    generations = {name: node.generation for name, node in ledger.nodes_by_name().items()}
    for name in remembered_refusals.keys() - generations.keys():
        del remembered_refusals[name]
    own_plan = ledger.holding(placement_request.pod.uid)
    if own_plan is not None:
        ledger.release(placement_request.pod.uid)  # the pod's own plan does not count
        remembered_refusals.pop(own_plan.node, None)  # the pod's own plan counted when the equal pod was refused there
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
    if placement_request.ranks:
        unknown.sort(key=placement_request.ranks.__getitem__)  # the time may be over before all nodes are searched
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
    return ScoredNodes(scores, refusals)
