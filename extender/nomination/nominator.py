"""Nominates ahead: chooses a node and cards for pending pods before kube-scheduler calls filter for them.

This module belongs to the state and uses its lock.

kube-scheduler first tries only the node in a pod's status. In a big cluster this is much faster than trying all nodes
(docs/design/0010-nominating-ahead.md). A nomination is a reservation in the phase NOMINATED, and ends like a
reservation by filter. kube-scheduler's own filters, and the extender's filter and bind, still decide.

Like filter, a nomination chooses the node in one short hold of the lock, from the live index of cards. Sometimes all
nodes must be compared first: for new constraints, or because the best nodes have no cpu or memory left. They are
compared on a snapshot without the lock, and the node is chosen in a second hold.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api import policies
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.placement import fitting
from cardwise.core.placement.placement import Placement, ScoredNodes, Unplaceable
from cardwise.core.placement.searching import SearchTooLong
from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints, NodePreferences
from extender.cache.cache import Cache, update_index
from extender.cache.nodeload import NodeLoads
from extender.cache.pacing import Pace, pause_seconds
from extender.cache.reservations import Phase, Reservation
from extender.cache.statelock import StateLock
from extender.placing.placing import PlacementRequest, Placing
from extender.queue.nominationorder import sort_key
from extender.records import feasiblenodes
from extender.records.feasiblenodes import FeasibleNodes
from extender.records.pod import WaitingPod
from extender.records.podinfo import WaitingRecord
from extender.records.podref import PodRef

# The number of nodes above which pods are nominated: in smaller clusters kube-scheduler is fast enough by itself, and
# each nomination is a write (docs/design/0010-nominating-ahead.md).
MIN_NODES = 1000
MAX_NOMINATED: Final = (
    # Maximum number of pods with such reservations at a time: as many as a fast kube-scheduler binds in a second or
    # two.
    256
)
LATEST_CREATION_TIME: Final = "~"  # a creationTimestamp that sorts after all others
_MAX_CANDIDATES: Final = (
    4  # best nodes that are tried one by one for free cpu and memory, before all nodes are compared
)
_EXPENSIVE_SECONDS: Final = 0.01  # seconds of CPU of a decision after which there is a pause: all nodes were compared
# After so many refusals in a row, kube-scheduler probably applies a rule that the extender does not know.
_MAX_MISSES: Final = 3
_MISS_SECONDS: Final = 60.0
_MAX_REMEMBERED_MISSES: Final = 1024
# Seconds without a reservation after which a nominated node is stale. Until then kube-scheduler may be about to try it.
_STALE_SECONDS: Final = 2.0
_NO_LOAD: Final = Load(0, 0, 0)


class NominationOutcome(StrEnum):
    """The outcome of nominating a pod ahead."""

    HIT = "hit"  # kube-scheduler called filter for that node only
    MISS = "miss"  # kube-scheduler called filter for other nodes, too
    STALE = "stale"  # the pod was changed or deleted before the node was written into its status
    OVERTAKEN = "overtaken"  # a pod that comes earlier in the queue needed the reserved cards
    EXPIRED = "expired"  # kube-scheduler did not call filter before the reservation expired


@dataclass(frozen=True, slots=True, kw_only=True)
class NominationSettings:
    """Settings of nominating ahead.

    above_nodes: the number of nodes above which pods are nominated.
    policy: the placement policy of pods without a policy annotation.
    one_best_node: whether filter returns one node for pods without the annotation for this.
    """

    above_nodes: int = MIN_NODES
    policy: str = policies.DEFAULT_POLICY
    one_best_node: bool = True


class Nominee(NamedTuple):
    """A pod and the node to write into its status.

    version: the resourceVersion that the pod must have at the write; "" if the status names the node already.
    """

    pod: PodRef
    version: str
    node: str


class NominationAttempt(NamedTuple):
    """The result of `nominate_next_pod`.

    has_more: whether to call it again at once, since more pods may be nominated.
    nominee: the nominated pod with its node; None if no pod was nominated.
    """

    has_more: bool
    nominee: Nominee | None


class _NodeSearch(NamedTuple):
    """A search for nodes that admit the pod and have the cpu, memory and slots for it. It runs without the lock.

    open_nodes: all open nodes.
    feasible: the open nodes that admit the pod; None if they are unknown.
    loads: a snapshot of the nodes' loads.
    """

    pod: WaitingPod
    open_nodes: Mapping[str, NodeLabelsAndTaints]
    feasible: Collection[str] | None
    loads: NodeLoads
    leader_changes: int

    def run(self, pause: Callable[[], object]) -> tuple[Collection[str], set[str]]:
        """Returns the nodes that admit the pod, and the nodes that also have the cpu, memory and slots.

        pause: called before each node.
        """
        feasible = self.feasible
        if feasible is None:
            feasible = feasiblenodes.search(self.pod.constraints, self.open_nodes, pause)
        with_load = set[str]()
        for name in feasible:
            pause()
            if _has_free_load_for(self.loads, name, self.pod.load):
                with_load.add(name)
        return feasible, with_load


class Nominator:
    """Nominates pods ahead. Any thread may call the methods, except under headings that say that the caller holds the
    lock.
    """

    def __init__(
        self,
        lock: StateLock,
        *,
        cache: Cache,
        placing: Placing,
        settings: NominationSettings,
        clock: Clock,
    ) -> None:
        self.on_outcome: Callable[[NominationOutcome], None] = lambda _: None  # called with the outcome for each pod
        self._lock = lock
        self._cache, self._queue = cache, cache.queue
        self._reservations = cache.reservations
        self._placing = placing
        self._settings = settings
        self._clock = clock
        self._feasible_nodes = FeasibleNodes()
        self._schedulers: frozenset[str] = frozenset()  # the schedulers that call this extender
        self._nominees: dict[str, Nominee] = {}  # by pod, the node that its status names
        self._unreserved_since: dict[str, float] = {}  # by pod whose nominated node has no reservation
        # By constraints: the number of refusals in a row, and until when such pods are not nominated.
        self._misses: dict[bytes, tuple[int, float]] = {}
        self._not_before = float("-inf")

    # Objects of the API server. The caller holds the lock.

    def set_node(self, name: str, labels: NodeLabelsAndTaints | None) -> None:
        """Update the node; None: the node is gone, or takes no pods."""
        if labels is None:
            self._feasible_nodes.remove_node(name)
        else:
            self._feasible_nodes.set_node(name, labels)

    def set_pod(self, pod: WaitingRecord) -> None:
        """Update a pod without a node."""
        if pod.status_node:
            self._nominees[pod.uid] = Nominee(pod.ref, "", pod.status_node)
        else:
            self.remove_pod(pod.uid)
        if pod.refused:
            self._release_nominations([pod.uid], NominationOutcome.MISS)

    def remove_pod(self, uid: str) -> None:
        """Forget the pod: the pod is bound or deleted, or the node was removed from its status."""
        self._nominees.pop(uid, None)
        self._unreserved_since.pop(uid, None)

    # Calls of filter. Except for `add_scheduler`, the caller holds the lock.

    def add_scheduler(self, scheduler: str) -> None:
        """Record that a kube-scheduler of this name calls this extender."""
        if scheduler not in self._schedulers:
            with self._lock:
                self._schedulers |= {scheduler}
                self._queue.add_scheduler(scheduler)

    def on_filter(self, uid: str, nodes: Collection[str]) -> None:
        """Record that kube-scheduler calls filter for the pod with these nodes."""
        row = self._nomination_of(uid)
        if row is None or row.nominee is None:
            return
        constraints = row.nominee.constraints
        if list(nodes) == [row.node]:
            self._reservations.promote_nomination(uid)
            self._misses.pop(constraints, None)
            self.on_outcome(NominationOutcome.HIT)
        else:
            if row.node not in nodes:
                self._count_miss(constraints)
            self._release_nominations([uid], NominationOutcome.MISS)

    def place_pod(self, placement_request: PlacementRequest, created: str) -> Placement | Unplaceable:
        """The best node for a pod. If necessary, it gets cards that were reserved for nominated pods later in the
        queue.

        created: the pod's creationTimestamp.
        """
        placement = self._placing.place(placement_request)
        later = (
            self.later_nominations(placement_request.request.priority, created)
            if isinstance(placement, Unplaceable)
            else ()
        )
        if later:
            with self._exclude_nominations(later):
                other_placement = self._placing.place(placement_request)
            if isinstance(other_placement, Placement):
                self._release_overtaken_on(later, (other_placement.node,), placement_request.pod.namespace)
                return self._placing.place(placement_request)
        return placement

    def score_nodes(self, placement_request: PlacementRequest, created: str) -> ScoredNodes:
        """Score the nodes for a pod. Returns the scores of all nodes that fit, and the refusals of the other nodes."""
        scores, refusals = self._placing.score_nodes(placement_request)
        later = self.later_nominations(placement_request.request.priority, created) if not scores else ()
        if later:
            with self._exclude_nominations(later):
                other_scores, _ = self._placing.score_nodes(placement_request)
            if other_scores:
                self._release_overtaken_on(later, other_scores, placement_request.pod.namespace)
                return self._placing.score_nodes(placement_request)
        return ScoredNodes(scores, refusals)

    # For pods and gangs without a place. The caller holds the lock.

    def later_nominations(self, priority: int, created: str) -> Sequence[Reservation]:
        """The reservations of nominated pods that come later in the queue than a pod with this priority and creation
        time.
        """
        nominated = self._reservations.rows_in_phases(Phase.NOMINATED)
        return [row for row in nominated if row.nominee is not None and sort_key(row.nominee) > (-priority, created)]

    @contextmanager
    def _exclude_nominations(self, later: Sequence[Reservation]) -> Iterator[None]:
        """Context manager: inside, these reservations are not in the ledger."""
        uids = [row.pod.uid for row in later]
        with self._cache.ledger.what_if(released=uids), self._cache.loads.what_if(unplanned=uids):
            yield

    def release_overtaken(self, uids: Iterable[str]) -> None:
        """Release the reservations of these nominated pods for a pod that comes earlier in the queue."""
        self._release_nominations(uids, NominationOutcome.OVERTAKEN)

    def _release_overtaken_on(self, later: Sequence[Reservation], nodes: Collection[str], namespace: str) -> None:
        """Release the given reservations that are on these nodes.

        namespace: the namespace of the pod that needs the cards. If the namespace has quotas, its own reservations are
            released on all nodes.
        """
        has_quota = bool(self._cache.headroom(namespace))
        self.release_overtaken(
            row.pod.uid for row in later if row.node in nodes or (has_quota and row.pod.namespace == namespace)
        )

    # Timeouts. The caller holds the lock.

    def on_expired(self, uid: str) -> None:
        """Record that the pod's reservation has expired: kube-scheduler did not call filter in time."""
        self.on_outcome(NominationOutcome.EXPIRED)
        self._queue.retry_nomination(uid)

    # For the writer of nominations, from its thread.

    def nominate_next_pod(self, paused: frozenset[str] = frozenset()) -> NominationAttempt:
        """Nominate the next pod.

        paused: namespaces whose pods are not nominated now.
        """
        update_index(self._lock, self._cache, self._clock)
        with self._lock:
            if not self._is_active() or self._reservations.count_rows(Phase.NOMINATED) >= MAX_NOMINATED:
                return NominationAttempt(False, None)
            has_more, pod = self._queue.pop_nominatable(self._schedulers, paused)
            if pod is None:
                return NominationAttempt(has_more, None)
            if not self._queue.may_place(pod.request.priority):
                self._queue.retry_nomination(pod.uid)  # all other pods come later in the queue, so end here
                return NominationAttempt(False, None)
            began = self._clock.cpu()
            outcome = self._nominate(pod)
        if isinstance(outcome, _NodeSearch):
            outcome = self._nominate_on_searched(outcome)
        seconds = self._clock.cpu() - began
        if outcome is None or seconds > _EXPENSIVE_SECONDS:
            self._not_before = self._clock.now() + pause_seconds(seconds)
        return NominationAttempt(True, outcome)

    def take_stale_nominees(self) -> list[Nominee]:
        """The pods with a node in their statuses, but without a reservation on that node. Each pod is returned once.

        It is unknown whether an extender or another program wrote the node.
        """
        with self._lock:
            now = self._clock.now()
            nominees = []
            for uid, nominee in list(self._nominees.items()):
                row = self._reservations.get(uid)
                if row is not None and row.node == nominee.node:
                    self._unreserved_since.pop(uid, None)
                elif now - self._unreserved_since.setdefault(uid, now) >= _STALE_SECONDS:
                    self.remove_pod(uid)
                    nominees.append(nominee)
            return nominees

    def restore_stale(self, nominee: Nominee) -> None:
        """Record that the node of a pod from `take_stale_nominees` could not be removed from its status."""
        with self._lock:
            self._nominees.setdefault(nominee.pod.uid, nominee)

    def is_awaited(self, uid: str) -> bool:
        """Whether the pod still awaits its first filter call, so that writing the node is useful."""
        with self._lock:
            return self._nomination_of(uid) is not None

    def on_write_failed(self, uid: str) -> None:
        """Record that the node could not be written into the pod's status."""
        with self._lock:
            self._release_nominations([uid], NominationOutcome.STALE)

    # For pods that are allocated by claim.

    def search_nodes(self, pod: WaitingPod, preferences: NodePreferences) -> dict[str, int]:
        """The open nodes that admit the pod and have the cpu, memory and slots for it, as kube-scheduler finds them,
        with the weight of each by the pod's preferred node affinity.

        Call it without the lock.
        """
        with self._lock:
            feasible = self._feasible_nodes.feasible_nodes(pod.constraints)
            search = _NodeSearch(
                pod,
                self._feasible_nodes.open_nodes(),
                feasible.copy() if feasible is not None else None,
                self._cache.loads.snapshot(),
                self._cache.leader_changes,
            )
        searched, with_load = search.run(Pace(self._clock).pause)
        with self._lock:
            nodes = with_load & self._feasible_nodes.record_search(pod.constraints, search.open_nodes, searched)
        return {name: preferences.weight_of(name, search.open_nodes[name]) for name in nodes}

    def has_free_load(self, pod: WaitingPod, node: str) -> bool:
        """Whether the node still has the cpu, memory and slots for the pod."""
        with self._lock:
            return _has_free_load_for(self._cache.loads, node, pod.load)

    # Private helpers.

    def _is_active(self) -> bool:
        return self._clock.now() >= self._not_before and len(self._feasible_nodes) > self._settings.above_nodes

    def _nominate(self, pod: WaitingPod) -> Nominee | _NodeSearch | None:
        """Nominate the pod. Returns a search if all nodes must be compared first; None if the pod is not nominated."""
        self._cache.sync_cards()
        if (
            not (self._settings.one_best_node or pod.wants_one_node)
            or fitting.has_several_card_requests(pod.request)  # filter searches nodes for such a pod on a snapshot
            or policies.ranks_nodes(pod.request.policy)  # ranking the nodes would hold the lock too long
            or self._cache.ledger.holding(pod.uid) is not None
            or self._misses.get(pod.constraints, (0, 0.0))[1] > self._clock.now()
        ):
            return None
        feasible = self._feasible_nodes.feasible_nodes(pod.constraints)
        chosen_placement = self._choose_node(pod, feasible) if feasible is not None else None
        if isinstance(chosen_placement, Placement):
            return self._reserve(pod, chosen_placement)
        if isinstance(chosen_placement, Unplaceable):
            return None
        return _NodeSearch(
            pod,
            self._feasible_nodes.open_nodes(),
            feasible.copy() if feasible is not None else None,
            self._cache.loads.snapshot(),
            self._cache.leader_changes,
        )

    def _nominate_on_searched(self, search: _NodeSearch) -> Nominee | None:
        """Search nodes without the lock, and nominate the pod on one of them. The cluster may have changed."""
        pod = search.pod
        feasible, with_load = search.run(Pace(self._clock).pause)
        with self._lock:
            feasible = self._feasible_nodes.record_search(pod.constraints, search.open_nodes, feasible)
            if search.leader_changes != self._cache.leader_changes or not self._queue.is_untried(pod):
                return None
            self._cache.sync_cards()
            chosen_placement = self._choose_node(pod, with_load & feasible)
            return self._reserve(pod, chosen_placement) if isinstance(chosen_placement, Placement) else None

    def _reserve(self, pod: WaitingPod, chosen_placement: Placement) -> Nominee:
        self._placing.reserve_nominated(pod, chosen_placement)
        return Nominee(pod.ref, pod.version, chosen_placement.node)

    def _choose_node(self, pod: WaitingPod, nodes: AbstractSet[str]) -> Placement | Unplaceable | None:
        """The best node that also has the cpu, memory and slots for the pod.

        Unplaceable also if the search takes too long. None if the best nodes do not have the cpu, memory and slots, and
        no other nodes were tried.
        """
        policy = policies.card_policy(pod.request.policy, self._settings.policy)
        full_nodes = set[str]()
        for _ in range(_MAX_CANDIDATES):
            try:
                chosen_placement = self._placing.place_nominee(pod, nodes - full_nodes if full_nodes else nodes, policy)
            except SearchTooLong:
                return Unplaceable(refusals={})  # filter searches nodes for such a pod on a snapshot
            if isinstance(chosen_placement, Unplaceable) or _has_free_load_for(
                self._cache.loads, chosen_placement.node, pod.load
            ):
                return chosen_placement
            full_nodes.add(chosen_placement.node)
        return None

    def _count_miss(self, constraints: bytes) -> None:
        times = self._misses.pop(constraints, (0, 0.0))[0] + 1
        if len(self._misses) >= _MAX_REMEMBERED_MISSES:
            del self._misses[next(iter(self._misses))]
        until = self._clock.now() + _MISS_SECONDS if times >= _MAX_MISSES else float("-inf")
        self._misses[constraints] = times, until

    def _release_nominations(self, uids: Iterable[str], outcome: NominationOutcome) -> None:
        """Release the reservations of these nominated pods, except pods for which filter was called already."""
        for uid in uids:
            if self._nomination_of(uid) is not None:
                self.on_outcome(outcome)
                self._reservations.release_plan(uid)

    def _nomination_of(self, uid: str) -> Reservation | None:
        """The reservation of the nominated pod; None once filter was called for the pod."""
        row = self._reservations.get(uid)
        return row if row is not None and row.phase is Phase.NOMINATED else None


def _has_free_load_for(loads: NodeLoads, node: str, load: Load) -> bool:
    return loads.is_open(node) and gangplan.has_capacity(loads.free_load(node), _NO_LOAD, load)
