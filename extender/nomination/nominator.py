"""Nominating ahead: chooses a node and cards for pending pods before kube-scheduler calls filter for them. Part of the
state.

kube-scheduler tries the node in a pod's status first and alone, which in a big cluster is many times as fast as trying
all nodes (docs/design/0010-nominating-ahead.md). A nomination is a reservation in the phase NOMINATED, and ends like a
reservation of filter. kube-scheduler's own filters, our filter and bind still decide. Shares the state's lock.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api import policies
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.placement import fitting
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from cardwise.kube.pods.nodeconstraints import NodeLabels
from extender.cache import yielding
from extender.cache.cache import Cache
from extender.cache.placing import PlacementRequest, Placing
from extender.cache.reservations import Phase, Reservation
from extender.cache.statelock import StateLock
from extender.queue.schedulingqueue import sort_key
from extender.records.feasiblenodes import FeasibleNodes
from extender.records.pod import WaitingPod
from extender.records.podinfo import WaitingRecord
from extender.records.podref import PodRef

AUTO_ABOVE_NODES: Final = 1000  # the number of nodes above which AUTO nominates by default
MAX_NOMINATED: Final = (
    256  # pods with reservations ahead at a time: what a fast kube-scheduler binds in a second or two
)
YOUNGEST: Final = "~"  # a creationTimestamp that sorts after all others
_CANDIDATES: Final = 4  # best nodes tried that lack cpu or memory, before all nodes are filtered by that
_EXPENSIVE_SECONDS: Final = (
    0.01  # seconds; after a longer decision (new constraints, compared with all nodes) there is a pause
)
_MAX_MISSES: Final = 3  # refusals in a row after which kube-scheduler must apply a rule that is not read here
_MISS_SECONDS: Final = 60.0
_MAX_REMEMBERED_MISSES: Final = 1024
_STALE_SECONDS: Final = 2.0  # without a reservation until a nominated node is stale: it may be about to be tried
_NO_LOAD: Final = Load(0, 0, 0)


class NominationMode(StrEnum):
    """When pods are nominated ahead."""

    AUTO = "auto"  # only in a cluster with many nodes
    ALWAYS = "always"
    NEVER = "never"


class NominationOutcome(StrEnum):
    """The outcome of nominating a pod ahead."""

    HIT = "hit"  # kube-scheduler called filter for that node only
    MISS = "miss"  # it called filter for other nodes, too
    STALE = "stale"  # the pod was changed or deleted before the node was written into its status
    OVERTAKEN = "overtaken"  # a pod that comes earlier in the queue needed its reservation
    EXPIRED = "expired"  # kube-scheduler did not call filter in time


@dataclass(frozen=True, slots=True, kw_only=True)
class NominationSettings:
    """Settings of nominating ahead.

    above_nodes: the number of nodes above which AUTO nominates.
    policy: the placement policy of pods that name none.
    one_best_node: whether filter returns one node for pods that do not say so.
    """

    mode: NominationMode = NominationMode.NEVER
    above_nodes: int = AUTO_ABOVE_NODES
    policy: str = policies.DEFAULT
    one_best_node: bool = True


class Nominee(NamedTuple):
    """A pod and the node for its status.

    version: the pod's resourceVersion, at which the node may be written; "" if the status names the node already.
    """

    pod: PodRef
    version: str
    node: str


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
        self._unreserved_since: dict[str, float] = {}  # by node that a status names without a reservation, since when
        self._misses: dict[bytes, tuple[int, float]] = {}  # by constraints: refusals in a row; not tried until then
        self._not_before = float("-inf")

    # Objects of the API server. The caller holds the lock.

    def set_node(self, name: str, labels: NodeLabels | None) -> None:
        """Update the node; None: it is gone, or takes no pods."""
        if labels is None:
            self._feasible_nodes.remove_node(name)
        elif self._settings.mode is not NominationMode.NEVER:
            self._feasible_nodes.set_node(name, labels)

    def set_pod(self, pod: WaitingRecord) -> None:
        """Update a pod without a node."""
        if self._settings.mode is NominationMode.NEVER:
            return
        if pod.status_node:
            self._nominees[pod.uid] = Nominee(pod.ref, "", pod.status_node)
        else:
            self.remove_pod(pod.uid)
        if pod.refused:
            self._release_nominations([pod.uid], NominationOutcome.MISS)

    def remove_pod(self, uid: str) -> None:
        """Forget the pod: it is bound or deleted, or its status no longer names such a node."""
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
        if self._settings.mode is NominationMode.NEVER:
            return
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
        """The best node for a pod; if necessary, with cards that were nominated ahead for later pods.

        created: the pod's creationTimestamp.
        """
        placement = self._placing.place(placement_request)
        later = (
            self.later_nominations(placement_request.request.priority, created)
            if isinstance(placement, Unplaceable)
            else ()
        )
        if later:
            with self.exclude_nominations(later):
                other_placement = self._placing.place(placement_request)
            if isinstance(other_placement, Placement):
                self.release_overtaken(later, (other_placement.node,), placement_request.pod.namespace)
                return self._placing.place(placement_request)
        return placement

    def score_nodes(
        self, placement_request: PlacementRequest, created: str
    ) -> tuple[dict[str, int], dict[str, Refusal]]:
        """Score the nodes for a pod. Returns the scores of all nodes that fit, and the refusals of the other nodes."""
        scores, refusals = self._placing.score_nodes(placement_request)
        later = self.later_nominations(placement_request.request.priority, created) if not scores else ()
        if later:
            with self.exclude_nominations(later):
                other_scores, _ = self._placing.score_nodes(placement_request)
            if other_scores:
                self.release_overtaken(later, other_scores, placement_request.pod.namespace)
                return self._placing.score_nodes(placement_request)
        return scores, refusals

    # For pods and gangs without a place. The caller holds the lock.

    def later_nominations(self, priority: int, created: str) -> Sequence[Reservation]:
        """The reservations ahead of pods that come later in the queue than a pod of this priority and
        creationTimestamp.
        """
        nominated = self._reservations.rows_in_phases(Phase.NOMINATED)
        return [row for row in nominated if row.nominee is not None and sort_key(row.nominee) > (-priority, created)]

    @contextmanager
    def exclude_nominations(self, later: Sequence[Reservation]) -> Iterator[None]:
        """Context manager: inside, these reservations do not count."""
        uids = [row.pod.uid for row in later]
        with self._cache.ledger.what_if(released=uids), self._cache.loads.what_if(unplanned=uids):
            yield

    def release_overtaken(self, later: Sequence[Reservation], nodes: Collection[str], namespace: str) -> None:
        """Release these reservations on the nodes: a pod of this namespace comes before them.

        If the namespace has quotas, its own reservations among them are released on all nodes.
        """
        has_quota = bool(self._cache.headroom(namespace))
        self._release_nominations(
            [row.pod.uid for row in later if row.node in nodes or (has_quota and row.pod.namespace == namespace)],
            NominationOutcome.OVERTAKEN,
        )

    # Timeouts. The caller holds the lock.

    def on_expired(self, uid: str) -> None:
        """Record that the pod's reservation has expired: kube-scheduler did not call filter in time."""
        self.on_outcome(NominationOutcome.EXPIRED)
        self._queue.retry_nomination(uid)

    # For the writer of nominations, from its thread.

    def nominate_next(self, paused: frozenset[str] = frozenset()) -> tuple[bool, Nominee | None]:
        """Nominate the next pod.

        paused: namespaces that are left out for now.

        Returns whether to continue at once, and the pod with its node; None if no node was chosen.
        """
        with self._lock:
            if not self._is_active() or self._reservations.count_rows(Phase.NOMINATED) >= MAX_NOMINATED:
                return False, None
            pod = self._queue.pop_nominatable(self._schedulers, paused)
            if pod is None:
                return False, None
            if not self._queue.may_place(pod.request.priority):
                self._queue.retry_nomination(pod.uid)  # the other pods come after it in the queue
                return False, None
            began = self._clock.cpu()
            nominee = self._nominate(pod)
            seconds = self._clock.cpu() - began
            if nominee is None or seconds > _EXPENSIVE_SECONDS:
                self._not_before = self._clock.now() + yielding.pause_seconds(seconds)
            return True, nominee

    def take_stale_nominees(self) -> list[Nominee]:
        """Pods whose statuses name a node where nothing is reserved for them; each is returned once.

        Another extender may have written the node, or another program; the record does not show which.
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
        """Whether filter was not called for the pod yet, so that writing the node is useful."""
        with self._lock:
            return self._nomination_of(uid) is not None

    def on_write_failed(self, uid: str) -> None:
        """Record that the node could not be written into the pod's status."""
        with self._lock:
            self._release_nominations([uid], NominationOutcome.STALE)

    # Private helpers.

    def _is_active(self) -> bool:
        if self._settings.mode is NominationMode.NEVER or self._clock.now() < self._not_before:
            return False
        return self._settings.mode is NominationMode.ALWAYS or len(self._feasible_nodes) > self._settings.above_nodes

    def _nominate(self, pod: WaitingPod) -> Nominee | None:
        self._cache.sync_cards()
        if (
            not (self._settings.one_best_node or pod.wants_one_node)
            or fitting.has_several_card_requests(pod.request)  # such a pod is searched on a snapshot, as filter does
            or self._cache.ledger.holding(pod.uid) is not None
            or self._misses.get(pod.constraints, (0, 0.0))[1] > self._clock.now()
        ):
            return None
        chosen_placement = self._choose_node(pod)
        if chosen_placement is None:
            return None
        self._placing.reserve_nominated(pod, chosen_placement)
        return Nominee(pod.ref, pod.version, chosen_placement.node)

    def _choose_node(self, pod: WaitingPod) -> Placement | None:
        """The best node that also has the cpu, memory and slots for the pod."""
        policy = pod.request.policy or self._settings.policy
        nodes = self._feasible_nodes.feasible_nodes(pod.constraints)
        full_nodes = set[str]()
        for attempt in range(_CANDIDATES + 1):
            if attempt == _CANDIDATES:
                full_nodes = {name for name in nodes if not self._has_load_for(name, pod.load)}
            chosen_placement = self._placing.place_nominee(pod, nodes - full_nodes if full_nodes else nodes, policy)
            if isinstance(chosen_placement, Unplaceable):
                return None
            if self._has_load_for(chosen_placement.node, pod.load):
                return chosen_placement
            full_nodes.add(chosen_placement.node)
        return None

    def _has_load_for(self, node: str, load: Load) -> bool:
        loads = self._cache.loads
        return loads.is_open(node) and gangplan.has_capacity(loads.free_load(node), _NO_LOAD, load)

    def _count_miss(self, constraints: bytes) -> None:
        times = self._misses.pop(constraints, (0, 0.0))[0] + 1
        if len(self._misses) >= _MAX_REMEMBERED_MISSES:
            del self._misses[next(iter(self._misses))]
        until = self._clock.now() + _MISS_SECONDS if times >= _MAX_MISSES else float("-inf")
        self._misses[constraints] = times, until

    def _release_nominations(self, uids: Iterable[str], outcome: NominationOutcome) -> None:
        """Release the reservations ahead of these pods, unless filter was called for them already."""
        for uid in uids:
            if self._nomination_of(uid) is not None:
                self.on_outcome(outcome)
                self._reservations.release_plan(uid)

    def _nomination_of(self, uid: str) -> Reservation | None:
        """The pod's reservation ahead, until filter is called for the pod."""
        row = self._reservations.get(uid)
        return row if row is not None and row.phase is Phase.NOMINATED else None
