"""Chooses a node and cards for a pod: asks the placement engine, and respects quotas and reservations for other pods.

Not thread-safe: the caller holds the lock of `State`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final, NamedTuple

from cardwise.core.api import policies
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Rank
from cardwise.core.placement import placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement, ScoredNodes, Scorer, Unplaceable
from cardwise.core.placement.searching import NODE_CHECKS, CheckLimit, SearchEffort, SearchTooLong
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache
from extender.cache.nominated import MAX_RESERVATIONS, NominatedPods
from extender.cache.reservations import Phase
from extender.placing.nodefacts import NodeFacts
from extender.placing.scoredpolicies import ScoredPolicies
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef

# Maximum number of cards that are checked under the lock for a pod whose nodes were not searched before: 2 to 4 ms.
_MAX_CHECKS_UNDER_LOCK: Final = 1000
_MAX_STEPS_UNDER_LOCK: Final = (
    512  # maximum number of steps (`SearchEffort`) of the decision that follows a search without the lock
)


class PodSearchInput(NamedTuple):
    """The input of a search for one pod: the cluster when the snapshot was taken.

    ledger: the ledger with the pod's own holding, and without reservations for other pods.
    nominated: the reservations for nominated pods that this pod must not use.
    gang_reserved: by node, the cards that are reserved for a gang and that this pod must not use.
    headroom: the remaining quotas of the pod's namespace, computed without the pod itself.
    nominated_ahead: nodes with cards that are reserved for pods before their first filter call. This pod may use these
        cards if it comes earlier in the queue.
    """

    ledger: Ledger
    nominated: Sequence[Holding]
    gang_reserved: Mapping[str, Sequence[Holding]]
    headroom: Sequence[Headroom]
    nominated_ahead: AbstractSet[str]


class SearchedNodes(NamedTuple):
    """The result of a search without the lock, see `nodesearch`.

    best: some nodes that fit the pod, in the order of their scores. Last come some nodes with cards that are reserved
        for later pods; this pod may take such cards.
    scores, refusals: the scores and the refusals of all searched nodes.
    freed: `Capacity.freed_count` when the search began.
    unsearched: the number of nodes that were not searched before the call's time was over.
    """

    best: Sequence[str]
    scores: dict[str, int]
    refusals: dict[str, Refusal]
    freed: int
    unsearched: int = 0

    @property
    def has_other_scores(self) -> bool:
        """Whether the pod also fits nodes outside `best`, which will not be tried."""
        return not self.scores.keys() <= set(self.best)


class SearchUnfinished(Exception):
    """No tried node fits the pod, but another node may fit. The call had no time to search this node, or the node was
    not among the best.
    """


class LeaderChanged(Exception):
    """The Lease was lost during the search, so another extender may use the cards."""


class Call(NamedTuple):
    """The call of kube-scheduler for which nodes are searched.

    arrived: when the first bytes of the call arrived, in seconds of the clock; None: now.
    is_abandoned: returns, without waiting, whether kube-scheduler has closed the connection.
    """

    arrived: float | None = None
    is_abandoned: Callable[[], bool] = lambda: False


class PlacementRequest(NamedTuple):
    """A pod's request and the nodes to choose from.

    policy: the policy that chooses the cards, and chooses among nodes of equal rank (`policies.card_policy`).
    load: the pod's cpu and memory; None if no policy needs them.
    rank: the pod's position in the order; it decides whether the pod may use the gang reservation. None: the pod may
        use it.
    searched: the result of a search without the lock; None if no such search was needed.
    call: the call of kube-scheduler that asks for this placement.
    limit: limits the cards and nodes that are checked under the lock if no search came before; None: no limit.
    reserved_load: the cpu and memory that the reservation counts, too; None if kube-scheduler counts them.
    ranks: by node, the rank under the pod's policy (`Placing.with_ranks`); empty if the policy ranks no nodes.
    """

    pod: PodRef
    request: PodRequest
    nodes: Collection[str]
    policy: str
    load: Load | None = None
    rank: Rank | None = None
    searched: SearchedNodes | None = None
    call: Call = Call()
    limit: CheckLimit | None = None
    reserved_load: Load | None = None
    ranks: Mapping[str, int] = {}

    def limit_checks(self) -> "PlacementRequest":
        """Limit the checks under the lock. Returns the request with the limit."""
        return self._replace(limit=CheckLimit(_MAX_CHECKS_UNDER_LOCK))

    @property
    def freed_count_at_search(self) -> int | None:
        """The value of `Capacity.freed_count` when the search without the lock began; None without such a search."""
        return self.searched.freed if self.searched is not None else None

    def check_all_searched(self) -> None:
        """Check that all nodes were searched; only then may the pod be refused. Raises SearchUnfinished."""
        if self.searched is not None and (self.searched.unsearched or self.searched.has_other_scores):
            raise SearchUnfinished


class Placing:
    """Chooses nodes and cards for single pods. Only `reserve` and `reserve_nominated` reserve something."""

    def __init__(self, cache: Cache, scored: ScoredPolicies, nominated: NominatedPods) -> None:
        self._ledger = cache.ledger
        self._cache = cache
        self._scored = scored
        self._nominated = nominated

    def place(self, placement_request: PlacementRequest) -> Placement | Unplaceable:
        """The best node for the pod, with its cards. Reserves nothing. Raises SearchTooLong."""
        if placement_request.searched is not None:
            return self._place_on_searched(placement_request, placement_request.searched)
        if placement_request.limit is not None and self._cache.is_index_outdated:
            raise SearchTooLong  # nodes change faster than they are indexed
        nodes_by_rank = self._nodes_by_rank(placement_request)
        counts = self._nominated_counts(placement_request)
        lowest = self._place_in_rank(placement_request._replace(nodes=nodes_by_rank[0]), counts)
        if isinstance(lowest, Placement) or len(nodes_by_rank) == 1:
            return lowest
        # There can be many ranks, and each search counts the reservations again. Whether a node fits does not depend on
        # the other nodes. So search many ranks at once, and halve their number until the lowest that fits is left.
        others = self._place_across_ranks(placement_request, nodes_by_rank[1:], counts)
        if isinstance(others, Unplaceable):
            return Unplaceable(refusals=lowest.refusals | others.refusals)
        first, end = 1, len(nodes_by_rank)
        while end - first > 1:
            middle = (first + end) // 2
            if isinstance(self._place_across_ranks(placement_request, nodes_by_rank[first:middle], counts), Placement):
                end = middle
            else:
                first = middle
        return self._place_in_rank(placement_request._replace(nodes=nodes_by_rank[first]), counts)

    def _place_across_ranks(
        self,
        placement_request: PlacementRequest,
        nodes_by_rank: Sequence[Collection[str]],
        counts: Mapping[str, int],
    ) -> Placement | Unplaceable:
        """As `_place_in_rank`, for the nodes of several ranks together."""
        return self._place_in_rank(
            placement_request._replace(nodes=[node for nodes in nodes_by_rank for node in nodes]), counts
        )

    def _place_in_rank(self, placement_request: PlacementRequest, counts: Mapping[str, int]) -> Placement | Unplaceable:
        """The best of nodes of equal rank.

        counts: the result of `_nominated_counts` for all nodes.
        """
        reserved = self._gang_reserved_nodes(placement_request)
        if not reserved:
            return self._place_unreserved(placement_request, counts)
        # Nodes without a gang reservation come first. The free part of cards with a reservation is used last, and is
        # computed only if it is needed.
        placement = self._place_unreserved(
            placement_request._replace(nodes=[node for node in placement_request.nodes if node not in reserved]), counts
        )
        if isinstance(placement, Placement):
            return placement
        with self._nominated.count_reserved(
            (placement_request.pod.uid,),
            placement_request.request.priority,
            reserved,
            limit=placement_request.limit,
        ):
            scores, refusals = self._score_reserved_nodes(placement_request, reserved)
            if scores:
                best = min(scores, key=lambda node: (-scores[node], node))
                chosen_placement = self._make_scorer(placement_request).place_on(
                    self._cache.gang_cards.node_with_reservation(best)
                )
                if isinstance(chosen_placement, Placement):
                    return chosen_placement
        reasons = {**placement.refusals, **refusals}
        return Unplaceable(refusals={node: reasons[node] for node in placement_request.nodes})

    def _score_reserved_nodes(self, placement_request: PlacementRequest, reserved: Collection[str]) -> ScoredNodes:
        """Score the nodes in `reserved`, without the cards of the gang reservation; returns scores and refusals.

        Takes 0.02 ms for each node.
        """
        scorer = self._make_scorer(placement_request)
        reserved_scores, refusals = scorer.score_all(self._ledger, reserved)
        scores: dict[str, int] = {}
        for name in reserved_scores:
            if placement_request.limit is not None:
                placement_request.limit.count(NODE_CHECKS)
            score = scorer.score(self._cache.gang_cards.node_with_reservation(name))
            if isinstance(score, Refusal):
                refusals[name] = Refusal.GANG_RESERVED
            else:
                scores[name] = score
        return ScoredNodes(scores, refusals)

    def _place_unreserved(
        self, placement_request: PlacementRequest, counts: Mapping[str, int]
    ) -> Placement | Unplaceable:
        own_uids, priority = (placement_request.pod.uid,), placement_request.request.priority
        nominated_nodes = {node for node in placement_request.nodes if node in counts} if counts else set[str]()
        if sum(counts[node] for node in nominated_nodes) > MAX_RESERVATIONS:
            # Counting so many reservations would take longer than other callers may wait. So try the other nodes first,
            # and then count only the reservations on nodes that fit the pod without reservations.
            placement = self._place_on_best(
                placement_request, [node for node in placement_request.nodes if node not in nominated_nodes]
            )
            if isinstance(placement, Placement):
                return placement
            nominated_nodes = set(self._make_scorer(placement_request).score_all(self._ledger, nominated_nodes)[0])
        with self._nominated.count_reserved(own_uids, priority, nominated_nodes, limit=placement_request.limit):
            return self._place_on_best(placement_request, placement_request.nodes)

    def _place_on_best(self, placement_request: PlacementRequest, nodes: Collection[str]) -> Placement | Unplaceable:
        headroom = self._cache.headroom(placement_request.pod.namespace)
        if placement_request.load is not None:
            best = self._scored.place(
                placement_request.pod.uid,
                placement_request.request,
                placement_request.load,
                nodes,
                placement_request.policy,
                headroom=headroom,
                limit=placement_request.limit,
            )
            if best is not None:
                return best
        return placement.place(
            self._ledger,
            nodes,
            placement_request.request,
            placement_request.policy,
            headroom,
            limit=placement_request.limit,
        )

    def _nominated_nodes(self, placement_request: PlacementRequest) -> set[str]:
        """The offered nodes where cards are reserved for nominated pods, which this pod must not use."""
        return set(self._nominated_counts(placement_request))

    def _nominated_counts(self, placement_request: PlacementRequest) -> dict[str, int]:
        """The nodes of `_nominated_nodes`, each with the number of reservations."""
        counts = self._nominated.reservation_counts((placement_request.pod.uid,), placement_request.request.priority)
        return {node: counts[node] for node in counts.keys() & placement_request.nodes} if counts else counts

    def _gang_reserved_nodes(self, placement_request: PlacementRequest) -> set[str]:
        """The offered nodes where cards are reserved for a gang, which this pod must not use."""
        if placement_request.rank is None:
            return set()
        reserved = self._cache.gang_cards.reserved_nodes(
            placement_request.rank, placement_request.pod.namespace, placement_request.pod.uid
        )
        return set(reserved).intersection(placement_request.nodes) if reserved else set()

    def with_ranks(self, placement_request: PlacementRequest) -> PlacementRequest:
        """The request with the ranks of its nodes (`Policy.rank_nodes`). Takes up to 6 ms for 5,000 nodes."""
        request = placement_request.request
        policy = policies.find_policy(request.policy) if request.policy is not None else None
        if policy is None or policy.rank_nodes is None:
            return placement_request
        peer_counts = self._cache.reservations.peer_counts_by_node(request.peer_key, placement_request.pod.uid)
        rank = policy.rank_nodes(policy.label, NodeFacts(self._cache.loads, peer_counts))
        return placement_request._replace(ranks={node: rank(node) for node in placement_request.nodes})

    def _nodes_by_rank(self, placement_request: PlacementRequest) -> Sequence[Collection[str]]:
        """Groups of nodes of equal rank, the lowest rank first; one group if the pod's policy ranks no nodes."""
        if not placement_request.ranks:
            return (placement_request.nodes,)
        nodes_by_rank: dict[int, list[str]] = {}
        for node, rank in placement_request.ranks.items():
            nodes_by_rank.setdefault(rank, []).append(node)
        return [nodes for _, nodes in sorted(nodes_by_rank.items())]

    def take_snapshot(self, placement_request: PlacementRequest) -> PodSearchInput:
        """Take the snapshot of cards, reservations and quotas for a search.

        Leaves out reservations whose cards are unknown (`nominated.find_unknown_cards`). The decision after the search
        counts them.
        """
        self._cache.sync_cards()
        uid, namespace = placement_request.pod.uid, placement_request.pod.namespace
        gang_cards = self._cache.gang_cards
        return PodSearchInput(
            ledger=self._ledger.snapshot(),
            nominated=[
                nominated.holding
                for nominated in self._nominated.reservations_on(
                    self._nominated_nodes(placement_request),
                    (uid,),
                    placement_request.request.priority,
                    known_only=True,
                )
            ],
            gang_reserved=gang_cards.reserved_holdings(placement_request.rank, namespace, uid)
            if placement_request.rank is not None
            else {},
            headroom=self._cache.headroom_excluding(namespace, uid),
            nominated_ahead={row.node for row in self._cache.reservations.rows_in_phases(Phase.NOMINATED)},
        )

    def _make_scorer(self, placement_request: PlacementRequest, effort: SearchEffort | None = None) -> Scorer:
        return Scorer(
            self._ledger.kinds,
            placement_request.request,
            placement_request.policy,
            self._cache.headroom(placement_request.pod.namespace),
            effort,
            limit=placement_request.limit,
        )

    def _reserved_on(self, placement_request: PlacementRequest, nodes: Collection[str]) -> dict[str, list[Holding]]:
        """By node, the reservations on these nodes for nominated pods, which this pod must not use.

        Raises SearchUnfinished if too many cards of nominated pods are unknown. The next call searches them first.
        """
        uid, priority = placement_request.pod.uid, placement_request.request.priority
        reserved_by_node: dict[str, list[Holding]] = {}
        try:
            reservations = self._nominated.reservations_on(
                nodes, (uid,), priority, limit=CheckLimit(_MAX_CHECKS_UNDER_LOCK)
            )
        except SearchTooLong:
            raise SearchUnfinished from None
        for nominated in reservations:
            reserved_by_node.setdefault(nominated.holding.node, []).append(nominated.holding)
        return reserved_by_node

    @contextmanager
    def _count_nominated(self, placement_request: PlacementRequest) -> Iterator[None]:
        """Context manager: inside, the cards that are reserved for nominated pods are used, and the pod's own cards are
        free.
        """
        uid, priority = placement_request.pod.uid, placement_request.request.priority
        nominated_nodes = self._nominated_nodes(placement_request)
        with (
            self._cache.exclude_pod(uid),
            self._nominated.count_reserved((uid,), priority, nominated_nodes, limit=placement_request.limit),
        ):
            yield

    @contextmanager
    def _node_scorer(self, placement_request: PlacementRequest, effort: SearchEffort) -> Iterator[Scorer]:
        """Context manager: a scorer for single nodes. Inside, the pod's own holding is free.

        effort: the limit for all searches of the scorer together.
        """
        self._cache.sync_cards()
        with (
            self._count_nominated(placement_request),
            self._cache.gang_cards.count_reserved(self._gang_reserved_nodes(placement_request)),
        ):
            yield self._make_scorer(placement_request, effort)

    def place_on(self, placement_request: PlacementRequest, node: str) -> Placement | Refusal:
        """The cards of one node for the pod, which may be cards that the pod holds already."""
        with self._node_scorer(placement_request, SearchEffort()) as scorer:
            return scorer.place_on(self._ledger.node(node))

    def score_nodes(self, placement_request: PlacementRequest) -> ScoredNodes:
        """The scores of the nodes that fit, and the refusals of the other nodes. The pod's own reservation is ignored.

        Raises SearchTooLong.
        """
        if placement_request.searched is not None and placement_request.searched.scores:
            return ScoredNodes(placement_request.searched.scores, placement_request.searched.refusals)
        if placement_request.searched is not None:
            chosen_placement = self._place_on_searched(placement_request, placement_request.searched)
            return (
                ScoredNodes({}, chosen_placement.refusals)
                if isinstance(chosen_placement, Unplaceable)
                else ScoredNodes({chosen_placement.node: chosen_placement.score}, {})
            )
        self._cache.sync_cards()
        scores, refusals = self._score_unranked(placement_request)
        return ScoredNodes(order_by_rank(scores, placement_request.ranks), refusals)

    def _score_unranked(self, placement_request: PlacementRequest) -> ScoredNodes:
        """As `score_nodes`, as if all nodes had the same rank."""
        reserved = self._gang_reserved_nodes(placement_request)
        if not reserved:
            return self._score_unreserved(placement_request)
        scores, refusals = self._score_unreserved(
            placement_request._replace(nodes=[node for node in placement_request.nodes if node not in reserved])
        )
        uid, priority = placement_request.pod.uid, placement_request.request.priority
        with (
            self._cache.exclude_pod(uid),
            self._nominated.count_reserved((uid,), priority, reserved, limit=placement_request.limit),
        ):
            reserved_scores, reasons = self._score_reserved_nodes(placement_request, reserved)
        return ScoredNodes(scores | reserved_scores, refusals | reasons)

    def _score_unreserved(self, placement_request: PlacementRequest) -> ScoredNodes:
        with self._count_nominated(placement_request):
            headroom = self._cache.headroom(placement_request.pod.namespace)
            if placement_request.load is not None:
                scores = self._scored.score_nodes(
                    placement_request.pod.uid,
                    placement_request.request,
                    placement_request.load,
                    placement_request.nodes,
                    placement_request.policy,
                    headroom=headroom,
                )
                if scores is not None:
                    return ScoredNodes(scores, {})
            return self._make_scorer(placement_request).score_all(self._ledger, placement_request.nodes)

    def place_nominee(self, pod: WaitingPod, nodes: Collection[str], policy: str) -> Placement | Unplaceable:
        """The best node for a pod before its first filter call. Raises SearchTooLong."""
        return self.place(PlacementRequest(pod.ref, pod.request, nodes, policy, pod.load, pod.rank).limit_checks())

    def reserve(self, placement_request: PlacementRequest, chosen_placement: Placement, phase: Phase) -> None:
        """Reserve the placement for the pod."""
        self._cache.reservations.set_plan(
            placement_request.pod,
            chosen_placement.node,
            chosen_placement.assignment,
            phase,
            mps_client=placement_request.request.mps_client,
            load=placement_request.reserved_load,
            peer_key=placement_request.request.peer_key,
        )

    def reserve_nominated(self, pod: WaitingPod, chosen_placement: Placement) -> None:
        """Reserve the placement before kube-scheduler calls filter for the pod."""
        self._cache.reservations.set_plan(
            pod.ref,
            chosen_placement.node,
            chosen_placement.assignment,
            Phase.NOMINATED,
            mps_client=pod.request.mps_client,
            load=pod.load,
            nominee=pod,
            peer_key=pod.request.peer_key,
        )

    def _place_on_searched(
        self, placement_request: PlacementRequest, searched: SearchedNodes
    ) -> Placement | Unplaceable:
        """The first of the best nodes that still fits the pod, since the cluster may have changed after the search."""
        effort, refusals = SearchEffort(_MAX_STEPS_UNDER_LOCK), dict(searched.refusals)
        ranks = placement_request.ranks
        best = sorted(searched.best, key=ranks.__getitem__) if ranks else searched.best
        self._cache.sync_cards()
        with (
            self._cache.exclude_pod(placement_request.pod.uid),
            self._cache.gang_cards.count_reserved(self._gang_reserved_nodes(placement_request._replace(nodes=best))),
        ):
            scorer, reserved_by_node = (
                self._make_scorer(placement_request, effort),
                self._reserved_on(placement_request, best),
            )
            for name in best:
                # Only the reservations on this node: of a big gang, cards of hundreds of nodes may be reserved, and
                # mostly the first node fits.
                with self._ledger.what_if(added=reserved_by_node.get(name, ())):
                    chosen_placement = scorer.place_on(self._ledger.node(name), effort)
                if not isinstance(chosen_placement, Refusal):
                    return chosen_placement
                refusals[name] = chosen_placement
        return Unplaceable(refusals=refusals)


def order_by_rank(scores: dict[str, int], ranks: Mapping[str, int]) -> dict[str, int]:
    """The scores, changed so that every node of a rank scores higher than all nodes of the following ranks.

    ranks: the rank of each node; empty if the pod's policy ranks no nodes.
    """
    scores_by_rank: dict[int, dict[str, int]] = {}
    for node, score in scores.items() if ranks else ():
        scores_by_rank.setdefault(ranks[node], {})[node] = score
    if len(scores_by_rank) < 2:
        return scores
    ordered: dict[str, int] = {}
    lowest = min(scores.values())  # the lowest score of the next rank
    for _, scores_in_rank in sorted(scores_by_rank.items(), reverse=True):
        shift = lowest - min(scores_in_rank.values())
        ordered |= {node: score + shift for node, score in scores_in_rank.items()}
        lowest = max(scores_in_rank.values()) + shift + 1
    return ordered
