"""The root of the components that share one lock: cache, queue, gangs and preemption. Start reading here.

No code here does I/O or waits for anything but the lock. Most methods acquire the lock once. `warm_caches`,
`classify_cards`, `expire_reservations` and `reservation_counts` acquire it several times, for a short time each. If the
nodes must be searched without the lock (`nodesearch`), `plan_pod`, `score_fitting_nodes` and `score_nodes` acquire it
again: for a snapshot, and for the decision. Callers use `gangs`, `preemption`, `nominator` and `policies` directly; the
methods of these acquire the lock themselves.
`cache.reservations` has the table that says which pod has which cards.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.cards import FULL_CORE
from cardwise.core.api.classes import ResourceClass
from cardwise.core.api.mpsprofile import COMMON_CLIENT
from cardwise.core.api.quotas import GPUQuota
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.placement.kinds import UNKNOWN_KIND
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.quantity import MiB
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache, update_index
from extender.cache.claimed import ClaimedPods, in_parts
from extender.cache.clusterview import ClusterView
from extender.cache.inventory import ShareReport
from extender.cache.nominated import NominatedPods
from extender.cache.pacing import Pace, pause
from extender.cache.quotas import FullEntry
from extender.cache.reservations import UNPOSTED_PHASES, Assumed, KnownBinding, Phase, Timeouts
from extender.cache.statelock import StateLock
from extender.gangs import gangtypes
from extender.gangs.gangplaces import GangPlaces
from extender.gangs.gangs import Gangs
from extender.nomination import nominator
from extender.nomination.nominator import Nominator
from extender.placing.nodesearch import NodeSearch
from extender.placing.placing import LeaderChanged, PlacementRequest, Placing
from extender.placing.scoredpolicies import ScoredPolicies
from extender.preemption.preemption import Preemption
from extender.queue.schedulingqueue import SchedulingQueue
from extender.records.cards import CardRecord
from extender.records.claim import ClaimRecord
from extender.records.nodeinfo import NodeRecord, PlacedPod
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord, WaitingRecord
from extender.records.podref import PodRef

_SCORED_SECONDS: Final = 1.0
_ROWS_PER_HOLD: Final = 100  # rows of reservations that end, or are counted, in one hold of the lock: 3 ms
_NO_SCORES: Final[tuple[str, float, dict[str, int]]] = "", -math.inf, {}


class ChangedNodes(NamedTuple):
    """The names of changed nodes. The state adds names to both sets; the reader clears the sets under the lock.

    cards: nodes with changed cards.
    loads: nodes with changed cpu, memory or pods.
    """

    cards: set[str]
    loads: set[str]


class OvercommittedNode(NamedTuple):
    """The overcommitted cards of a node, and the pods on its cards.

    capacity_by_uuid: the capacity of each overcommitted card (MiB) or device (1).
    uuid_by_index: the UUIDs of all cards of the node.
    pods: the bound pods with a share there, each with the name of the node to which it is bound. The node may have had
        another name at that time.
    """

    capacity_by_uuid: dict[str, int]
    uuid_by_index: dict[int, str]
    pods: list[tuple[PodRef, str]]


class State:
    """The state of the extender. Any thread may call the methods.

    headroom: MiB that are kept free on each card; None for the headroom that each card has.
    max_clients: the maximum number of clients of each card; None: no limit.
    core: percent of the SMs of each card that pods may request in total.
    """

    def __init__(
        self,
        *,
        headroom: MiB | None = MiB(0),
        max_clients: int | None = None,
        core: int = FULL_CORE,
        timeouts: Timeouts | None = None,
        clock: Clock = SYSTEM,
        gang_settings: gangtypes.GangSettings | None = None,
        nomination_settings: nominator.NominationSettings | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self._clock = clock
        self._lock = StateLock(clock)
        self._last_scores = _NO_SCORES  # the result of `score_fitting_nodes`: pod, time and scores
        self._ledger = Ledger(kept_back=headroom, max_clients=max_clients, core=core)
        self._cache = cache = Cache(self._ledger, self.timeouts, clock)
        self._inventory, self._reservations, self._limits = cache.inventory, cache.reservations, cache.limits
        self._loads, self._queue = cache.loads, cache.queue
        self.policies = ScoredPolicies(self._lock, cache)
        settings = gang_settings or gangtypes.GangSettings()
        self._nominated = nominated = NominatedPods(cache, settings.policy)
        self._placing = Placing(cache, self.policies, nominated)
        self._node_search = NodeSearch(self._lock, cache=cache, placing=self._placing, nominated=nominated, clock=clock)
        self.nominator = Nominator(
            self._lock,
            cache=cache,
            placing=self._placing,
            settings=nomination_settings or nominator.NominationSettings(),
            clock=clock,
        )
        places = GangPlaces(
            self._lock, cache=cache, nominated=nominated, nominator=self.nominator, policy=settings.policy, clock=clock
        )
        self.gangs = Gangs(self._lock, cache=cache, places=places, settings=settings, clock=clock)
        self.preemption = Preemption(
            self._lock, cache=cache, nominated=nominated, gangs=self.gangs, places=places, clock=clock
        )
        self._claimed = ClaimedPods(self._reservations, self._loads, self._gang_members, clock)
        # Nodes on which pods were bound since the last call of `take_overcommitted_nodes`.
        self._newly_bound_nodes: set[str] = set()
        # By UID: pods that were bound without the extender, with their nodes.
        self._direct_binds: dict[str, tuple[PodRef, str]] = {}

    @contextmanager
    def view(self) -> Iterator[Ledger]:
        """Context manager: the ledger, with the lock held. Use it to read a few nodes; use `snapshot` for many
        nodes.
        """
        with self._lock:
            self._cache.sync_cards()
            yield self._ledger

    def snapshot(self) -> ClusterView:
        """The cluster as it is now, to be read without the lock."""
        with self._lock:
            self._cache.sync_cards()
            return self._cache.snapshot()

    def watch_nodes(self) -> ChangedNodes:
        """Begin to record changed nodes. Initially, all nodes are recorded as changed."""
        with self._lock:
            return ChangedNodes(self._ledger.watch(), self._loads.watch())

    @contextmanager
    def queue(self) -> Iterator[SchedulingQueue]:
        """Context manager: the scheduling queue, with the lock held."""
        with self._lock:
            yield self._queue

    @contextmanager
    def claimed_pods(self) -> Iterator[ClaimedPods]:
        """Context manager: the pods whose shares are allocated by ResourceClaim, with the lock held."""
        with self._lock:
            yield self._claimed

    def reserve_allocated_pods(self) -> None:
        """Reserve the GPUs of pods that were allocated by claim before scheduler.mode was changed."""
        with self._lock:
            queue = self._claimed.queue()
        for part in in_parts([uid for _, _, uid in queue]):
            with self._lock:
                self._cache.sync_cards()
                self._claimed.reserve_by_annotations(part, self._ledger.nodes_with)

    def lowest_priority(self) -> int:
        """The lowest priority of the pods on nodes; 0 without pods."""
        with self._lock:
            return self._loads.lowest_priority()

    def may_fit_generation(self) -> tuple[int, int, int, int]:
        """A value that changes whenever a pod of `claimed_pods` that was refused may fit now."""
        with self._lock:
            capacity = self._cache.capacity
            return self._claimed.changes, capacity.freed_count, self._loads.freed_count, self._queue.requeue_count

    def warm_caches(self) -> None:
        """Compute the caches now; otherwise the first filter call would compute them, and be late.

        In a big cluster the ledger's card index takes 0.4 s, and the search for the cards of 500 nominated pods takes
        another 0.4 s.
        """
        self.preemption.find_unknown_cards(None, Pace(self._clock).pause)
        self.classify_cards()
        update_index(self._lock, self._cache, self._clock, self._ledger.unindexed_count)

    def classify_cards(self) -> None:
        """Compute the classes of all cards again after classes have changed, in short holds of the lock.

        Meanwhile a part of the cards has the former classes, as if the watch showed the change later.
        """
        while True:
            with self._lock:
                self._cache.sync_cards()
                has_more = self._inventory.has_unclassified_cards
            if not has_more:
                return
            pause(self._clock)

    def lock_held_seconds(self) -> float:
        """For how many seconds a thread has held the lock; 0 while it is free (`statelock`). Never waits."""
        return self._lock.held_seconds()

    # Objects of the API server.

    def set_pod(self, pod: PodRecord) -> None:
        """Update a pod that requests or holds cards, or is in a gang."""
        with self._lock:
            if pod.member is not None:
                self.gangs.set_member(f"{pod.namespace}/{pod.gang}", pod.member)
            else:
                self.gangs.remove_pod(pod.uid)
            self.gangs.set_cardless_member(pod.uid, pod.group)
            if isinstance(pod, WaitingRecord):
                self._reservations.mark_unbound(pod.uid)
                self._loads.mark_unbound(pod.uid)
                self._direct_binds.pop(pod.uid, None)
                self._queue.set_pod(pod)
                if pod.by_claim is not None:
                    self._claimed.set_pod(pod.by_claim)
                else:
                    self._claimed.remove_pod(pod.uid)
                if pod.waiting_pod is not None and not self._is_node_of_plan(pod.waiting_pod):
                    self._reservations.nominations.set_node_from_status(pod.waiting_pod, self._clock.now())
                self.nominator.set_pod(pod)
            else:
                self._set_placed_pod(pod)

    def remove_pod(self, pod: PodRecord) -> None:
        """Remove a pod that was deleted. `pod`: its last record."""
        with self._lock:
            self.gangs.remove_pod(pod.uid)
            self.gangs.set_cardless_member(pod.uid, None)
            self._direct_binds.pop(pod.uid, None)
            self._queue.remove_pod(pod.uid)
            self._claimed.remove_pod(pod.uid)
            self._reservations.mark_deleted(pod.uid, ended=pod.ended)
            self._loads.remove_pod(pod.uid)
            self.nominator.remove_pod(pod.uid)

    def set_claim(self, key: str, claim: ClaimRecord) -> None:
        """Update a ResourceClaim of Cardwise's class. `key`: "namespace/name"."""
        del key
        with self._lock:
            self._claimed.set_claim(claim)

    def remove_claim(self, key: str) -> None:
        """Remove the ResourceClaim `key`, "namespace/name", which was deleted."""
        with self._lock:
            self._claimed.remove_claim(key)

    def set_pod_without_request(self, key: str, placed_pod: PlacedPod) -> None:
        """Update a pod that requests no card or device. It has a node, or is pending in a PodGroup.

        key: a unique key of the pod.
        """
        with self._lock:
            if placed_pod.node:
                self._loads.set_pod(key, placed_pod)
            else:
                self._loads.mark_unbound(key)
            self.gangs.set_cardless_member(key, placed_pod.group)

    def remove_pod_without_request(self, key: str) -> None:
        """Remove a pod of `set_pod_without_request`."""
        with self._lock:
            self._loads.remove_pod(key)
            self.gangs.set_cardless_member(key, None)

    def set_card(self, name: str, card: CardRecord) -> str | None:
        """Update the card from its ExtendedResource. Returns the ignored part of the report, with the reason; None if
        the whole report is used.
        """
        with self._lock:
            is_first_report = not self._inventory.has_card(name)
            update = self._inventory.set_card(name, card)
            recorded = (
                {ShareReport(record.uid, card.node) for record in card.status.terminating} if is_first_report else set()
            )
            for report in recorded:
                self._reservations.restore_terminating(report)
            for report in update.withdrawn:
                self._reservations.mark_unreported(report)
            self._reservations.sync_reports({*update.reported, *update.withdrawn, *recorded})
            return update.problem

    def remove_card(self, name: str) -> None:
        """Remove the card, whose ExtendedResource was deleted."""
        with self._lock:
            self._reservations.sync_reports(self._inventory.remove_card(name))

    def set_node(self, name: str, record: NodeRecord = NodeRecord()) -> None:
        """Update a node."""
        with self._lock:
            if name not in self._inventory.nodes:
                self._inventory.set_node(name)
            self._loads.set_node(name, record, self._clock.now())
            self.nominator.set_node(name, record.node_labels if record.schedulable else None)

    def remove_node(self, name: str) -> None:
        """Remove a node that was deleted."""
        with self._lock:
            self._inventory.remove_node(name)
            self._loads.remove_node(name)
            self.nominator.set_node(name, None)

    def set_class(self, resource_class: ResourceClass) -> None:
        """Update a ResourceClass."""
        with self._lock:
            if self._inventory.set_class(resource_class):
                self._cache.capacity.mark_freed()

    def remove_class(self, name: str) -> None:
        """Remove a ResourceClass that was deleted."""
        with self._lock:
            if self._inventory.remove_class(name):
                self._cache.capacity.mark_freed()

    def set_quota(self, key: str, quota: GPUQuota) -> None:
        """Update the GPUQuota `key`, "namespace/name"."""
        with self._lock:
            if self._limits.set_quota(key, quota):
                self._cache.capacity.mark_freed()

    def remove_quota(self, key: str) -> None:
        """Remove the GPUQuota `key`, "namespace/name"."""
        with self._lock:
            if self._limits.remove_quota(key):
                self._cache.capacity.mark_freed()

    # Decisions of filter and bind.

    def known_binding(self, uid: str) -> KnownBinding | None:
        """The node and cards to which the pod is or may be bound; None if no Binding can have bound it."""
        with self._lock:
            return self._reservations.known_binding(uid)

    def plan_pod(
        self, placement_request: PlacementRequest, *, created: str = nominator.LATEST_CREATION_TIME
    ) -> Placement | Unplaceable | KnownBinding:
        """Choose the best node, and reserve cards there for the pod until its bind. Replaces an earlier plan.

        created: the pod's creationTimestamp.

        Returns the KnownBinding instead if the pod is or may be bound already. Raises SearchUnfinished, LeaderChanged.
        """
        leader_changes = self._cache.leader_changes
        update_index(self._lock, self._cache, self._clock)
        return self._node_search.decide_after_search(
            placement_request, lambda searched: self._plan_pod(searched, created, leader_changes)
        )

    def begin_attempt(
        self, uid: str, request: tuple[PodRequest, str] | None, *, grouped: bool, rank: Rank | None = None
    ) -> bool:
        """Record that filter is called for the pod. Returns whether the pod may be placed.

        See `SchedulingQueue.begin_attempt`.
        """
        with self._lock:
            return self._queue.begin_attempt(uid, request, grouped=grouped, rank=rank)

    def may_place(self, uid: str, priority: int) -> bool:
        """Whether the pod may be placed now. If not, it is requeued once the pods that come earlier were tried."""
        with self._lock:
            if self._queue.may_place(priority):
                return True
            self._queue.mark_refused(uid)
            return False

    def score_fitting_nodes(
        self, placement_request: PlacementRequest, *, created: str = nominator.LATEST_CREATION_TIME
    ) -> dict[str, int] | Unplaceable | KnownBinding:
        """As `plan_pod`, but returns all nodes that fit, with their scores, and reserves nothing.

        Raises SearchUnfinished.
        """
        update_index(self._lock, self._cache, self._clock)
        return self._node_search.decide_after_search(
            placement_request, lambda searched: self._score_fitting_nodes(searched, created)
        )

    def score_nodes(self, placement_request: PlacementRequest) -> dict[str, int]:
        """The policy's score of each node that fits. The pod's own reservation is ignored.

        Reuses the result of `score_fitting_nodes` once, if it is less than `_SCORED_SECONDS` old. This is safe, because
        bind checks the cards again.
        """
        with self._lock:
            uid, scored_at, scores = self._last_scores
            if uid and uid == placement_request.pod.uid:
                self._last_scores = _NO_SCORES
                if self._clock.now() - scored_at < _SCORED_SECONDS:
                    return scores
        return self._node_search.decide_after_search(placement_request, self._score_nodes)

    def assume(
        self, pod: PodRef, request: PodRequest | None, node: str, policy: str, *, epoch: int, by_claim: bool = False
    ) -> Assumed | KnownBinding | Refusal:
        """Reserve the cards for the pod's Binding or claim until its outcome is recorded. Returns the cards.

        request: None for a pod that requests no card.
        epoch: the leader epoch in which this process may post.
        by_claim: whether a ResourceClaim is written, and no Binding.

        Returns the cards of the pod's plan if the plan is still valid (`Cache.is_plan_valid`, with the namespace's
        quotas), else other cards. A Binding that is unconfirmed since an earlier epoch is not posted again, because
        another extender may have assigned the cards to another pod.
        """
        uid = pod.uid
        with self._lock:
            row = self._reservations.get(uid)
            if row is not None and row.node != node:
                row = None
            unconfirmed = row is not None and row.phase is Phase.UNCONFIRMED and row.epoch == epoch and not row.by_claim
            known_binding = self._reservations.known_binding(uid)
            if known_binding is not None and not unconfirmed:
                return known_binding
            if not self.gangs.may_bind(uid, node):
                return Refusal.GANG_BACKS_OFF
            chosen_cards: Assignment | Refusal | None = None
            if row is not None and unconfirmed:
                chosen_cards = row.assignment  # an earlier Binding may have written these cards already
            elif request is not None and not self._cache.loads.offers_shares(node):
                chosen_cards = Refusal.NO_SLOTS  # withdrawn since filter; the kubelet would fail the pod permanently
            elif request is not None:
                rank = self._queue.rank(uid)
                chosen_cards = self._choose_cards(PlacementRequest(pod, request, (node,), policy, rank=rank), node)
            if isinstance(chosen_cards, Refusal):
                self._reservations.release_plan(uid)
                self.gangs.mark_unposted(uid)
            else:
                mps_client = request.mps_client if request is not None else COMMON_CLIENT
                peer_key = request.peer_key if request is not None else None
                self._reservations.assume(
                    pod, node, chosen_cards, mps_client=mps_client, epoch=epoch, peer_key=peer_key, by_claim=by_claim
                )
            if isinstance(chosen_cards, Refusal):
                return chosen_cards
            env_access = chosen_cards is not None and self._inventory.has_env_access(node, chosen_cards)
            return Assumed(assignment=chosen_cards, unconfirmed=unconfirmed, env_access=env_access)

    def record_binding_outcome(self, uid: str, phase: Phase | None) -> None:
        """Record how the posting of the Binding ended: ACCEPTED (of a claim: ALLOCATED), UNCONFIRMED, or None if
        certainly no call bound the pod.
        """
        with self._lock:
            self._reservations.record_binding_outcome(uid, phase)
            if phase is Phase.ALLOCATED:
                self._claimed.mark_allocated(uid)
            if phase is None:
                self._claimed.forget_refusal(uid)
                self.gangs.mark_unposted(uid)
            else:
                self.gangs.mark_posted(uid)

    def is_given_twice(self, node: str, assignment: Assignment) -> bool:
        """Whether a card or device of the assignment is overcommitted."""
        with self._lock:
            uuids = {share.uuid for share in assignment.shares()} | {
                other.uuid for other in assignment.non_gpu_devices()
            }
            return not uuids.isdisjoint(self._overcommitted_capacity_by_uuid(node))

    def end_take_back(self, uid: str, phase: Phase | None, *, seconds: float = 0.0) -> None:
        """Record the outcome of reading a pod of `ClaimedPods.take_backs`: its claim is whole (ALLOCATED), or deleted
        (None), or the pod is gone (TERMINATING).

        seconds: the minimum back-off of the pod.
        """
        with self._lock:
            self._claimed.end_take_back(uid, phase, seconds=seconds)
            if phase is Phase.ALLOCATED:
                self.gangs.mark_posted(uid)
            else:
                self.gangs.mark_unposted(uid)

    def pending_bindings(self) -> set[str]:
        """The UIDs of pods that a Binding of this process may still bind. These pods keep their cards until the outcome
        is known.
        """
        with self._lock:
            return self._reservations.pending_bindings()

    def forget_plans(self) -> None:
        """End all plans without a posted Binding, because the leader changes.

        Searches that have begun will reserve nothing.
        """
        with self._lock:
            self._cache.leader_changes += 1
            self.gangs.reset()
            self._queue.forget_preemptions()
            self._reservations.drop_plans()

    # Timeouts.

    def expire_reservations(self) -> None:
        """End expired reservations and nominations."""
        with self._lock:
            due = self._reservations.due_uids()
        pace, has_surplus = Pace(self._clock), True
        for first in range(0, len(due), _ROWS_PER_HOLD):
            pace.pause()
            with self._lock:
                for row in self._reservations.expire(due[first : first + _ROWS_PER_HOLD]):
                    if row.phase is Phase.NOMINATED:
                        self.nominator.on_expired(row.pod.uid)
        while has_surplus:
            pace.pause()
            with self._lock:
                has_surplus = self._reservations.drop_surplus_orphans(_ROWS_PER_HOLD)
        with self._lock:
            has_nomination_ended = self._reservations.nominations.end_expired(self._clock.now())
            steady = self._loads.reopen_steady_nodes(self._clock.now())
            if self._queue.end_retry_window() or has_nomination_ended or steady:
                self._cache.capacity.mark_freed()

    def overdue_bindings(self) -> list[PodRef]:
        """The pods to look up, because no watch event has confirmed their Bindings in time."""
        with self._lock:
            return self._reservations.overdue_pods()

    def on_lookup(self, uid: str, *, bound: bool, exists: bool) -> None:
        """Record the result of a consistent read of a pod from `overdue_bindings`."""
        with self._lock:
            if self._reservations.on_lookup(uid, bound=bound, exists=exists):
                self.gangs.mark_unposted(uid)

    def on_lookup_failed(self, uid: str) -> None:
        """Record that a pod from `overdue_bindings` could not be read or fenced. It is looked up again later."""
        with self._lock:
            self._reservations.on_lookup_failed(uid)

    def next_requeue_node(self) -> str | None:
        """The node whose annotation is to change, so that pending pods are tried again. At most one node a second
        (`schedulingqueue`).
        """
        with self._lock:
            self._cache.sync_cards()
            return self._queue.next_requeue_node(self._inventory.nodes)

    def full_quota_entry(self, namespace: str, request: PodRequest) -> FullEntry | None:
        """The quota entry that keeps the pod pending, if there is one."""
        with self._lock:
            return self._limits.full_entry(self._ledger, namespace, request)

    def is_class_in_use(self, name: str) -> bool:
        """Whether a pending pod requests the class or a pod holds a card of it.

        Also True if a pod holds a card that is no longer on its node, since that card may be of the class.
        """
        with self._lock:
            self._cache.sync_cards()
            if next(self._queue.pods_requesting_class(name), None) is not None:
                return True
            kinds = self._ledger.kinds
            used_kinds = {
                kind for namespace in self._ledger.namespaces() for kind in self._ledger.usage_by_kind(namespace)
            }
            return any(kind == UNKNOWN_KIND or name in kinds.get(kind).classes for kind in used_kinds)

    def take_changed_nodes(self) -> set[str]:
        """The nodes whose cards or holdings have changed since the last call."""
        with self._lock:
            self._cache.sync_cards()
            return self._cache.capacity.take_changed_nodes()

    def take_overcommitted_nodes(self) -> set[str]:
        """The nodes with overcommitted cards or devices (`overcommit_details`).

        Checks only nodes with newly bound pods or moved cards since the last call.
        """
        with self._lock:
            self._cache.sync_cards()
            nodes, self._newly_bound_nodes = self._newly_bound_nodes | self._cache.capacity.take_moved_nodes(), set()
            return {node for node in nodes if self._overcommitted_capacity_by_uuid(node)}

    def overcommit_details(self, node: str) -> OvercommittedNode:
        """The overcommitted cards and devices of the node, and the pods on the node's cards."""
        with self._lock:
            self._cache.sync_cards()
            state = self._ledger.node(node)
            return OvercommittedNode(
                self._overcommitted_capacity_by_uuid(node),
                {card.index: card.uuid for card in state.cards} if state is not None else {},
                [
                    (PodRef(holding.uid, holding.namespace, holding.name), holding.node)
                    for holding in self._ledger.holdings(node)
                    if self._reservations.is_bound(holding.uid, holding.node)
                ],
            )

    def direct_binds(self) -> list[tuple[PodRef, str]]:
        """The pods that request cards or devices and were bound without the extender, on nodes with shared cards."""
        with self._lock:
            self._cache.sync_cards()
            return [
                direct_bind
                for direct_bind in self._direct_binds.values()
                if self._ledger.node(direct_bind[1]) is not None
            ]

    def reservation_counts(self) -> dict[str, int]:
        """The number of shares in the ledger by the phase of their reservation, for metrics."""
        with self._lock:
            uids, counts = self._reservations.uids_to_count(), Counter(self._reservations.phase_counts())
        pace = Pace(self._clock)
        for first in range(0, len(uids), _ROWS_PER_HOLD):
            pace.pause()
            with self._lock:
                counts.update(self._reservations.count_shares(uids[first : first + _ROWS_PER_HOLD]))
        return counts

    def refusal_counts(self) -> dict[str, int]:
        """The number of refused pods by the most frequent reason among the nodes, for metrics."""
        with self._lock:
            return self._queue.refusal_counts()

    def pods_requesting_class(self, resource_class: str) -> list[PodRef]:
        """The pending pods that request this class, also pods that kube-scheduler refused without a call to the
        extender.
        """
        with self._lock:
            return list(self._queue.pods_requesting_class(resource_class))

    # Decisions with the result of a search. They acquire the lock once.

    def _plan_pod(
        self, placement_request: PlacementRequest, created: str, leader_changes: int
    ) -> Placement | Unplaceable | KnownBinding:
        uid = placement_request.pod.uid
        with self._lock:
            if leader_changes != self._cache.leader_changes:
                raise LeaderChanged
            known_binding = self._reservations.known_binding(uid)
            if known_binding is not None:
                return known_binding
            self._cache.sync_cards()
            self.nominator.on_filter(uid, placement_request.nodes)
            with self._cache.exclude_pod(uid):  # the pod's own plan does not count, neither on cards nor in quotas
                placement = self.nominator.place_pod(placement_request, created)
            if isinstance(placement, Unplaceable):
                self._reservations.release_plan(uid)
                placement_request.check_all_searched()
                self._cache.mark_refused(uid, placement_request.freed_count_at_search)
            else:
                self._placing.reserve(placement_request, placement, Phase.RESERVED)
                self._queue.mark_placed(uid)
            return placement

    def _score_fitting_nodes(
        self, placement_request: PlacementRequest, created: str
    ) -> dict[str, int] | Unplaceable | KnownBinding:
        uid = placement_request.pod.uid
        with self._lock:
            known_binding = self._reservations.known_binding(uid)
            if known_binding is not None:
                return known_binding
            self.nominator.on_filter(uid, placement_request.nodes)
            scores, refusals = self.nominator.score_nodes(placement_request, created)
            if scores:
                self._queue.mark_placed(uid)
                self._last_scores = uid, self._clock.now(), scores
                return scores
            placement_request.check_all_searched()
            self._cache.mark_refused(uid, placement_request.freed_count_at_search)
            return Unplaceable(refusals=refusals)

    def _score_nodes(self, placement_request: PlacementRequest) -> dict[str, int]:
        with self._lock:
            return self._placing.score_nodes(placement_request)[0]

    # The methods below are called under the lock.

    def _gang_members(self, uid: str) -> Sequence[Member]:
        """The members of the pod's gang; empty if it is in none."""
        gang = self.gangs.gang_of(uid)
        return gang.counted_members if gang is not None else ()

    def _overcommitted_capacity_by_uuid(self, node: str) -> dict[str, int]:
        state = self._ledger.node(node)
        return state.overcommitted() if state is not None else {}

    def _is_node_of_plan(self, pod: WaitingPod) -> bool:
        """Whether the node in the pod's status is the node that filter has returned.

        kube-scheduler writes this node into the status when a binding takes long. Then no victims are evicted there.
        """
        row = self._reservations.get(pod.uid)
        return row is not None and row.node == pod.nominated_node

    def _set_placed_pod(self, pod: PodRecord) -> None:
        """Update a pod that is bound or finished. A pod may finish without ever being bound."""
        self._queue.remove_pod(pod.uid)
        if pod.finished:
            self._claimed.remove_pod(pod.uid)
        else:
            self._claimed.mark_bound(pod.uid, has_claim=pod.has_claim)
        if pod.finished:
            self._loads.remove_pod(pod.uid)
        else:
            self._loads.set_pod(pod.uid, pod)
        if pod.bound_directly:
            self._direct_binds[pod.uid] = pod.ref, pod.node
        else:
            self._direct_binds.pop(pod.uid, None)
        if pod.finished:
            self._reservations.mark_deleted(pod.uid, ended=pod.ended)
        else:
            self._reservations.mark_bound(pod)
            holding = self._ledger.holding(pod.uid)
            if pod.assignment is not None and holding is not None:
                self._newly_bound_nodes |= self._ledger.nodes_of(holding)
        self.nominator.remove_pod(pod.uid)

    def _choose_cards(self, placement_request: PlacementRequest, node: str) -> Assignment | Refusal:
        """The cards of the pod's plan for the node if the plan is still valid, else other cards on the node."""
        self._cache.sync_cards()
        row = self._reservations.get(placement_request.pod.uid)
        plan = row.holding if row is not None and row.phase in UNPOSTED_PHASES and row.node == node else None
        if plan is not None and self._cache.is_plan_valid(plan, placement_request.request):
            return plan.assignment
        placement = self._placing.place_on(placement_request, node)
        return placement if isinstance(placement, Refusal) else placement.assignment
