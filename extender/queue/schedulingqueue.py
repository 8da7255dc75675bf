"""The scheduling queue: one row for each pod without a node. A row has the pod's request, and why the pod is pending.

kube-scheduler tries pods in the order of its own queue. This queue has only the extender's knowledge of that queue::

    pending ──► is tried: filter is called ──► filter returns a node ──► (none): the pod is bound, or gone
      ▲               │          ▲                  │ its bind is refused
      │               ▼ refused  └──────────────────┘
      └──────── unschedulable
       requeue_all

kube-scheduler tries an unschedulable pod again when a node, a pod or another object changes. It does not see that a
plan ended, a card recovered, a node released a share, or a quota was raised. So the extender changes an annotation of a
node (`controllers.loops`). One node is enough, because for kube-scheduler every change of a node is a reason to try
pods again. If the change fails (the node's annotations may be at the API's limit), another node is annotated, and the
failed node is avoided for `_AVOID_SECONDS`.

After each such change kube-scheduler tries all refused pods. For a thousand pods this takes many seconds, in which pods
that request no GPU wait, too. So if all refused pods *await a plan*, released capacity requeues no pod. Members of a
gang without a plan await a plan. The gang planner sees freed capacity itself, and requeues the members once it has
places for all of them. For example, two gangs of 500 members are pending, and each second a pod of 1 MiB starts and
ends: no node is changed.

A row is created when the watch shows the pod or when filter is called for it. Not thread-safe: the caller holds the
lock of `State`, as in `State.queue`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import Rank
from cardwise.kube.fairqueueing import FairQueueing, RecentUse
from extender.queue.nominationorder import NominationOrder
from extender.queue.searchpauses import SearchPauses
from extender.records.pod import WaitingPod
from extender.records.podinfo import UnservedPod, WaitingRecord
from extender.records.podref import PodRef

# Maximum number of rows of pods that the watch does not show; most of these pods were deleted.
_MAX_UNSEEN: Final = 20_000
# Seconds after which a refusal is forgotten. kube-scheduler tries a pending pod again after five minutes at the latest.
_FORGET_SECONDS: Final = 600.0
_WATCH_LAG_SECONDS: Final = 2.0  # seconds between a change and its watch event
_REQUEUE_SECONDS: Final = 1.0  # seconds between two requeues: each makes the scheduler try all pending pods
_AVOID_SECONDS: Final = 300.0  # seconds for which a node is avoided after its annotation failed
_FIRST_BACKOFF, _MAX_BACKOFF = 1.0, 10.0  # seconds, the same as kube-scheduler's own back-off
_RETRY_WINDOW_SECONDS: Final = _MAX_BACKOFF + 2.0
_SETTLED_SECONDS: Final = 3.0  # seconds that a pod waits before other pods are evicted for it
_SEARCH_SECONDS: Final = 15.0  # seconds between two searches for victims for one pod
# Maximum number of pods that await a preemption: choosing the next takes some milliseconds.
_MAX_PREEMPTING: Final = 1000


@dataclass(slots=True, eq=False)
class PodAwaitingPreemption:
    """A pod that needs a preemption by the extender, because kube-scheduler would not preempt for it.

    The totals of the nodes suffice for the pod, so kube-scheduler finds no victims. But no card has enough capacity.

    nodes: the names of the nodes, sorted.
    gang: the name of the pod's gang; None without a gang.
    refused: when the pod was last refused for this reason.
    not_before: the earliest time of the next search for victims.
    equal_pods: by UID, the recorded pods with an equal `key`, also this pod.
    """

    claimant: WaitingPod
    policy: str
    nodes: tuple[str, ...]
    gang: str | None
    refused: float
    not_before: float
    equal_pods: dict[str, "PodAwaitingPreemption"] = field(default_factory=dict)

    @property
    def key(self) -> object:
        """A key that is equal for pods whose searches have the same result."""
        claimant = self.claimant
        return claimant.ref.namespace, self.gang, claimant.request, claimant.load, self.policy, self.nodes

    @property
    def priority(self) -> int:
        """The pod's priority."""
        return self.claimant.request.priority

    @property
    def namespace(self) -> str:
        """The pod's namespace."""
        return self.claimant.ref.namespace

    @property
    def order(self) -> tuple[int, float, str]:
        """The pod's sort key within its namespace: the smallest comes first."""
        return -self.priority, self.not_before, self.claimant.uid


@dataclass(slots=True, eq=False)
class QueuedPod:
    """A row of the queue. Times are seconds of the clock.

    pod: the pod as the watch shows it; None before the watch shows it.
    considered: whether filter was called for the pod, or its nomination was tried.
    last_tried: when filter was last called for the pod.
    request: the pod's request and resourceVersion at the last filter call, stored until its bind.
    rank: the pod's position in the order at the last filter call.
    last_refused: when filter last had no node for the pod.
    reason: the most frequent refusal among the nodes at that time.
    backoff: only for a pod in a PodGroup of Kubernetes: the seconds by which the last refused bind delayed the pod.
    backoff_until: when that delay ends.
    """

    uid: str
    pod: WaitingRecord | None = None
    considered: bool = False
    last_tried: float = -math.inf
    request: tuple[PodRequest, str] | None = None
    rank: Rank | None = None
    last_refused: float = -math.inf
    reason: str = ""
    backoff: float = 0.0
    backoff_until: float = -math.inf

    @property
    def nominatable_pod(self) -> WaitingPod | None:
        """The pod, if it may be nominated before kube-scheduler calls filter for it; else None."""
        waiting_pod = self.pod.waiting_pod if self.pod is not None and not self.considered else None
        return waiting_pod if waiting_pod is not None and not waiting_pod.nominated_node else None


_PriorityAndNamespace = tuple[int, str]  # priority and namespace


class SchedulingQueue:
    """The pending pods. Not thread-safe: the caller holds the lock of `State`. In all methods "" as a node means any
    node.
    """

    def __init__(self, clock: Clock) -> None:
        self.requeue_count = 0  # how many times refused pods were requeued
        self._clock = clock
        self._pods: dict[str, QueuedPod] = {}
        self._unseen: dict[str, None] = {}  # the UIDs of rows whose pods the watch does not show
        self._unschedulable: dict[str, QueuedPod] = {}  # by UID, the rows of refused pods, the oldest refusal first
        # By UID of each refused pod that awaits a plan: the priority of its gang.
        self._awaiting_plan: dict[str, int] = {}
        self._gang_priorities: Counter[int] = Counter()  # by priority in `_awaiting_plan`, the number of pods
        self._preempting: dict[str, PodAwaitingPreemption] = {}  # by UID
        self._shares: dict[_PriorityAndNamespace, dict[str, None]] = {}  # by share, the UIDs in `_preempting`
        # The rows of `_preempting` by `PodAwaitingPreemption.key`, and then by UID. Comparing the keys of 1,000 pods of
        # 48 containers would take 17 ms.
        self._equal_pods: dict[object, dict[str, PodAwaitingPreemption]] = {}
        self._searches = FairQueueing()  # by namespace
        self._searched: RecentUse[str] = RecentUse(clock)  # seconds of searches, by namespace
        self._search_pauses = SearchPauses(clock)
        self._by_priority = False  # whether the last search was for a pod of the highest priority
        self._turned_away: dict[str, UnservedPod] = {}  # pods whose calls no extender served
        self._schedulers: set[str] = set()  # the schedulers that call this extender
        self._nomination_order = NominationOrder()  # the pods with a `QueuedPod.nominatable_pod`
        self._last_refusal = -math.inf
        self._refused_elsewhere = False  # whether another process may have refused pending pods
        self._requeue_node: str | None = None  # the node to be annotated
        self._requeue_times: set[float] = set()
        self._requeued_at = -math.inf
        self._last_node = ""  # the node that was annotated last
        self._avoided_nodes: dict[
            str, float
        ] = {}  # by node that could not be annotated: until when other nodes are preferred
        self._epoch_start = self._retry_window_end = -math.inf
        self._delayed = False  # whether a pod was refused because other pods come first

    # Pending pods.

    def set_pod(self, pod: WaitingRecord) -> None:
        """Record that the watch shows the pod without a node."""
        row = self._ensure_row(pod.uid)
        row.considered |= pod.refused
        row.pod = pod
        self._update_nomination_order(row)
        self._unseen.pop(pod.uid, None)
        if pod.turned_away is not None:
            self._turned_away[pod.uid] = pod.turned_away
        else:
            self._turned_away.pop(pod.uid, None)

    def remove_pod(self, uid: str) -> None:
        """Remove the pod: it is bound or gone."""
        self._pods.pop(uid, None)
        self._nomination_order.remove(uid)
        self._unseen.pop(uid, None)
        self._take_unschedulable(uid)
        self._turned_away.pop(uid, None)
        self.stop_awaiting_preemption(uid)

    def pods_requesting_class(self, resource_class: str) -> Iterator[PodRef]:
        """The pending pods that request this class."""
        return (pod.ref for pod in self._watched_pods() if resource_class in pod.classes)

    def bindable_pods(self) -> list[PodRef]:
        """The pods that may have reached an extender's bind."""
        return [pod.ref for pod in self._watched_pods() if pod.is_bound_by_extender]

    # The next pod to nominate.

    def pop_nominatable(self, schedulers: Collection[str], paused: frozenset[str]) -> tuple[bool, WaitingPod | None]:
        """Take the first pod of these schedulers that may be nominated. Each pod is taken once.

        paused: namespaces whose pods are not taken now.

        Returns whether to call again at once, and the pod; None if there is none, or if the next one was not found yet.
        """
        has_more, uid = self._nomination_order.pop(schedulers, paused)
        if uid is None:
            return has_more, None
        row = self._pods[uid]
        pod = row.nominatable_pod
        row.considered = True
        return has_more, pod

    def is_untried(self, pod: WaitingPod) -> bool:
        """Whether the pod from `pop_nominatable` is still pending, unchanged, and without a filter call."""
        row = self._pods.get(pod.uid)
        return row is not None and row.pod is not None and row.pod.waiting_pod is pod and row.last_tried == -math.inf

    def retry_nomination(self, uid: str) -> None:
        """Let the pod be nominated once more, since its nomination was not used."""
        row = self._pods.get(uid)
        if row is not None:
            row.considered = False
            self._update_nomination_order(row)

    # One attempt, from filter to bind.

    def begin_attempt(
        self, uid: str, request: tuple[PodRequest, str] | None, *, grouped: bool, rank: Rank | None = None
    ) -> bool:
        """Record that filter is called for the pod. Returns whether the pod may be placed now.

        After a refused bind, kube-scheduler tries a member of a PodGroup of Kubernetes again at once. So for such a pod
        the queue has a back-off, which doubles with each refused bind.
        """
        row, now = self._ensure_row(uid), self._clock.now()
        row.last_tried, row.request, row.rank, row.considered = now, request, rank, True
        self._nomination_order.remove(uid)
        if grouped:
            row.backoff = row.backoff or _FIRST_BACKOFF / 2
            if row.backoff_until > now:
                self.mark_refused(uid)
                self.requeue_all_at(row.backoff_until)
                return False
        return True

    def mark_placed(self, uid: str) -> None:
        """Record that filter has returned nodes for the pod."""
        row = self._take_unschedulable(uid)
        if row is not None:
            row.reason = ""
        self.stop_awaiting_preemption(uid)

    def mark_refused(self, uid: str, *, awaits_plan: int | None = None) -> None:
        """Record that filter has no node for the pod. The pod waits for capacity that kube-scheduler may not see.

        awaits_plan: the priority of the pod's gang if the gang planner will requeue the pod once the gang fits; None if
            the planner does not requeue it.
        """
        if not uid:
            return
        row, now = self._ensure_row(uid), self._clock.now()
        row.last_refused = now
        row.request = None
        self._take_unschedulable(uid)
        self._forget_old_refusals(now)
        self._unschedulable[uid] = row
        if awaits_plan is not None:
            self._awaiting_plan[uid] = awaits_plan
            self._gang_priorities[awaits_plan] += 1
        else:
            self._last_refusal = now

    def set_refusal_reason(self, uid: str, reason: str) -> None:
        """Record the most frequent reason of the nodes in the pod's last refusal."""
        row = self._unschedulable.get(uid)
        if row is not None:
            row.reason = reason

    def refusal_counts(self) -> Counter[str]:
        """The number of refused pods, by the most frequent reason of the nodes.

        A pod that the watch does not show is included for `_WATCH_LAG_SECONDS` only: the pod is new, or it was deleted
        before filter was called.
        """
        now = self._clock.now()
        self._forget_old_refusals(now)
        return Counter(
            row.reason
            for row in self._unschedulable.values()
            if row.reason and (row.pod is not None or now - row.last_refused <= _WATCH_LAG_SECONDS)
        )

    def is_unschedulable(self, uid: str) -> bool:
        """Whether filter has refused the pod, and has not placed it since."""
        return uid in self._unschedulable

    def rank(self, uid: str) -> Rank | None:
        """The pod's position in the order at the last filter call; None if filter was not called for the pod."""
        row = self._pods.get(uid)
        return row.rank if row is not None else None

    def take_request(self, uid: str) -> tuple[PodRequest, str] | None:
        """Remove and return the request and resourceVersion from the pod's last filter call; None if there are none.

        A second bind call does not need them, because kube-scheduler calls filter again before the second bind.
        """
        row = self._pods.get(uid)
        if row is None:
            return None
        request, row.request = row.request, None
        return request

    def on_bind_failed(self, uid: str) -> None:
        """Record that a bind of the pod was refused."""
        row = self._pods.get(uid)
        if row is not None and row.backoff:
            row.backoff = min(2 * row.backoff, _MAX_BACKOFF)
            row.backoff_until = self._clock.now() + row.backoff

    # Requeueing.

    def requeue_all(self, node: str = "", *, seen_by_scheduler: bool = False) -> None:
        """Requeue the refused pods: capacity may have been freed on this node.

        seen_by_scheduler: kube-scheduler sees the cause and tries pods again by itself.
        """
        now = self._clock.now()
        self.requeue_count += 1
        self._forget_old_refusals(now)
        if self._unschedulable and (not seen_by_scheduler or now - self._last_refusal < _WATCH_LAG_SECONDS):
            self._requeue_node = node

    def on_capacity_freed(
        self, node: str = "", *, seen_by_scheduler: bool = False, can_preempt: Callable[[int], bool]
    ) -> None:
        """As `requeue_all`, for capacity that pods have released. Does nothing if all refused pods await a plan.

        can_preempt: returns whether any pod below a priority could be evicted. If so, members of gangs with that
            priority are requeued even while they await a plan. The gang may need fewer victims now, and kube-scheduler
            searches for victims only when it tries a member.
        """
        self._forget_old_refusals(self._clock.now())
        if len(self._unschedulable) > len(self._awaiting_plan) or any(map(can_preempt, self._gang_priorities)):
            self.requeue_all(node, seen_by_scheduler=seen_by_scheduler)

    def requeue_all_at(self, when: float) -> None:
        """Requeue the refused pods at this time.

        Call this for a pod that was refused only until this time, if perhaps no other event requeues the pod.
        """
        self._requeue_times.add(when)

    def requeue_all_after_takeover(self) -> None:
        """Requeue all pods, since another process may have refused some of the pods and can no longer requeue them."""
        self._refused_elsewhere = True
        if self._requeue_node is None:
            self._requeue_node = ""

    def next_requeue_node(self, nodes: Collection[str]) -> str | None:
        """Take the node to annotate now, one of `nodes`; None if no node is due.

        The caller must report the outcome by `on_requeued` or `on_requeue_failed`.
        """
        now = self._clock.now()
        passed = {when for when in self._requeue_times if when <= now}
        if passed:
            self._requeue_times -= passed
            self.requeue_all()
        if self._requeue_node is None or now - self._requeued_at < _REQUEUE_SECONDS:
            return None
        node, self._requeue_node = self._requeue_node, None
        self._forget_old_refusals(now)
        refused_elsewhere, self._refused_elsewhere = self._refused_elsewhere, False
        if not refused_elsewhere and all(map(self._is_by_claim, self._unschedulable)):
            return None  # kube-scheduler has refused no pod: the extender itself plans those that wait for a claim
        self._requeued_at = now
        return self._choose_requeue_node(node, nodes, now)

    def on_requeued(self, node: str) -> None:
        """Record that the node was annotated."""
        self._last_node = node
        self._avoided_nodes.pop(node, None)

    def on_requeue_failed(self, node: str) -> None:
        """Record that the node could not be annotated. Another node is due at once."""
        self._refused_elsewhere = True
        if self._requeue_node is None:
            self._requeue_node = node
        self._requeued_at = -math.inf
        self._avoided_nodes[node] = self._clock.now() + _AVOID_SECONDS

    # The order of pods at the beginning of a leader epoch.

    def begin_retry_window(self) -> None:
        """Begin a leader epoch, in which pods whose attempt failed while no extender served calls come first.

        If no extender serves the call for a pod, the pod loses its nomination. kube-scheduler then tries the pod again
        up to ten seconds later than other pods. In that time pods of lower priority would take the cards that were just
        freed, and further pods would be evicted. So pods of lower priority wait until the pod was tried once, or until
        the retry window is over.
        """
        self._epoch_start = self._clock.now()
        self._retry_window_end = self._epoch_start + _RETRY_WINDOW_SECONDS

    def add_scheduler(self, scheduler: str) -> None:
        """Record that a kube-scheduler of this name calls this extender."""
        self._schedulers.add(scheduler)

    def may_place(self, priority: int) -> bool:
        """Whether a pod of this priority may be placed now. If not, `end_retry_window` requeues all pending pods."""
        if (
            self._clock.now() >= self._retry_window_end
            or max(self._expected_priorities(), default=priority) <= priority
        ):
            return True
        self._delayed = True
        return False

    def end_retry_window(self) -> bool:
        """End the retry window if its time is over, or if all pods of `_expected_priorities` were tried.

        Returns whether delayed pods may be placed from now on.
        """
        if not self._delayed or (
            self._clock.now() < self._retry_window_end and next(self._expected_priorities(), None) is not None
        ):
            return False
        self._delayed = False
        return True

    # Pods for which the extender preempts.

    def await_preemption(self, claimant: WaitingPod, policy: str, nodes: Iterable[str], *, gang: str | None) -> None:
        """Record that the pod may preempt, and that only cards are short on these nodes.

        At most `_MAX_PREEMPTING` pods are recorded. Pods of higher priority come first. Within a priority each
        namespace gets the same number of pods, and the namespaces with the smallest recent search time come first. A
        pod that is not recorded may be recorded at its next refusal.
        """
        uid, now = claimant.uid, self._clock.now()
        pending_before = self._preempting.get(uid)
        not_before = pending_before.not_before if pending_before is not None else now + _SETTLED_SECONDS
        self.stop_awaiting_preemption(uid)
        pending = PodAwaitingPreemption(claimant, policy, tuple(sorted(nodes)), gang, now, not_before)
        share = pending.priority, pending.namespace
        if len(self._preempting) >= _MAX_PREEMPTING and not self._free_row_for(share):
            return
        self._preempting[uid] = pending
        pending.equal_pods = self._equal_pods.setdefault(pending.key, pending.equal_pods)
        pending.equal_pods[uid] = pending
        self._shares.setdefault(share, {})[uid] = None

    def stop_awaiting_preemption(self, uid: str) -> None:
        """Record that the pod does not wait for a preemption now."""
        pending = self._preempting.pop(uid, None)
        if pending is not None:
            share = pending.priority, pending.namespace
            del self._shares[share][uid], pending.equal_pods[uid]
            if not self._shares[share]:
                del self._shares[share]
            if not pending.equal_pods:
                del self._equal_pods[pending.key]

    def awaits_preemption_on(self, uid: str, nodes: Iterable[str]) -> bool:
        """Whether the pod awaits a preemption on all of these nodes, according to its newest refusal."""
        pending = self._preempting.get(uid)
        return pending is not None and set(nodes) <= set(pending.nodes)

    def preemption_nodes(self, uid: str) -> tuple[str, ...]:
        """The pod's nodes from `await_preemption`; none if the pod does not await a preemption."""
        pending = self._preempting.get(uid)
        return pending.nodes if pending is not None else ()

    def next_preemption(self, is_helped: Callable[[str], bool]) -> PodAwaitingPreemption | None:
        """The pod for which to search victims now; None if no pod is due. The pod is due again `_SEARCH_SECONDS` later.

        is_helped: returns whether the pod with a UID no longer needs victims.

        Namespaces share the search time fairly. Every second search is for a pod of any priority; the other searches
        are for a pod of the highest priority. After a long search its namespace pauses (`SearchPauses`). Within a
        namespace the pod of the highest priority comes first; of equal pods, the pod that has been due for longest.
        """
        now = self._clock.now()
        for uid in [uid for uid, candidate in self._preempting.items() if now - candidate.refused > _FORGET_SECONDS]:
            self.stop_awaiting_preemption(uid)
        first_by_namespace: dict[str, PodAwaitingPreemption] = {}  # by namespace, its first pod that is due
        for uid, pending in self._preempting.items():
            # A pod that the watch does not show may have been deleted.
            if pending.not_before > now or uid not in self._unschedulable or self._pods[uid].pod is None:
                continue
            if self._search_pauses.is_paused(pending.namespace):
                continue
            earlier = first_by_namespace.get(pending.namespace)
            if (earlier is None or pending.order < earlier.order) and not is_helped(uid):
                first_by_namespace[pending.namespace] = pending
        if not first_by_namespace:
            self._searches.clear()
            return None
        self._by_priority = not self._by_priority
        highest = max(pending.priority for pending in first_by_namespace.values())
        due = {
            namespace: pending
            for namespace, pending in first_by_namespace.items()
            if pending.priority == highest or not self._by_priority
        }
        for namespace in due:
            self._searches.enqueue(namespace)
        # Namespaces in `_searches` that are not in `due` are skipped.
        namespace = self._searches.dequeue(due.__contains__)
        due[namespace].not_before = now + _SEARCH_SECONDS
        return due[namespace]

    def on_searched(self, pending: PodAwaitingPreemption, seconds: float, *, in_vain: bool) -> None:
        """Charge a search for the pod to its namespace.

        seconds: the CPU time of the search.
        in_vain: whether no victims were found. If so, pods with an equal `key` are not due for a while either.
            Otherwise the equal pods of a Job would delay all other pods.
        """
        self._searches.charge_write(pending.namespace, seconds)
        self._searched.add_use(pending.namespace, seconds)
        self._search_pauses.charge_search(pending.namespace, seconds)
        if not in_vain:
            return
        is_full, now = len(self._preempting) >= _MAX_PREEMPTING, self._clock.now()
        for equal in list(self._equal_pods.get(pending.key, {}).values()):
            if is_full:
                self.stop_awaiting_preemption(equal.claimant.uid)  # frees rows for pods that are not recorded yet
            else:
                equal.not_before = now + _SEARCH_SECONDS

    def forget_preemptions(self) -> None:
        """Forget all pods that wait for a preemption, because the leader changes."""
        self._preempting.clear()
        self._shares.clear()
        self._equal_pods.clear()
        self._searches.clear()

    # Private helpers.

    def _free_row_for(self, share: _PriorityAndNamespace) -> bool:
        """Remove a pod from the full table, to free a row for a pod of this share.

        Returns False if no pod may be removed for this share. The removed pod has the lowest priority in the table.
        Within this priority its namespace has the most pods; of several such namespaces, its namespace has the largest
        recent search time.
        """
        (priority, namespace), lowest = share, min(priority for priority, _ in self._shares)
        places = {name: uids for (entry_priority, name), uids in self._shares.items() if entry_priority == lowest}
        if lowest < priority:
            largest = self._searched.owners_by_size(places)
        else:
            largest = self._searched.larger_owners(namespace, places) if lowest == priority else []
        for name in largest[:1]:
            self.stop_awaiting_preemption(next(reversed(places[name])))
        return bool(largest)

    def _choose_requeue_node(self, preferred: str, nodes: Collection[str], now: float) -> str | None:
        """The node to annotate: `preferred`, else the last annotated node, else any node.

        A node whose annotation failed recently is chosen only if there is no other node.
        """
        self._avoided_nodes = {
            node: until for node, until in self._avoided_nodes.items() if until > now and node in nodes
        }
        for node in (preferred, self._last_node):
            if node in nodes and node not in self._avoided_nodes:
                return node
        return min(nodes, key=lambda node: self._avoided_nodes.get(node, -math.inf), default=None)

    def _ensure_row(self, uid: str) -> QueuedPod:
        row = self._pods.get(uid)
        if row is None:
            row = self._pods[uid] = QueuedPod(uid)
            self._unseen[uid] = None
            if len(self._unseen) > _MAX_UNSEEN:
                self.remove_pod(next(iter(self._unseen)))
        return row

    def _update_nomination_order(self, row: QueuedPod) -> None:
        pod = row.nominatable_pod
        if pod is None:
            self._nomination_order.remove(row.uid)
        else:
            self._nomination_order.add(pod)

    def _is_by_claim(self, uid: str) -> bool:
        pod = self._pods[uid].pod
        return pod is not None and pod.by_claim is not None

    def _watched_pods(self) -> Iterator[WaitingRecord]:
        return (row.pod for row in self._pods.values() if row.pod is not None)

    def _expected_priorities(self) -> Iterator[int]:
        """The priorities of pods whose attempt failed while no extender served calls, and that were not tried since.

        Leaves out pods whose schedulers do not call this extender, since users may forge the statuses of their pods.
        """
        return (
            pod.priority
            for uid, pod in self._turned_away.items()
            if pod.scheduler in self._schedulers and self._pods[uid].last_tried < self._epoch_start
        )

    def _forget_old_refusals(self, now: float) -> None:
        """Forget refusals that are older than `_FORGET_SECONDS`. Their pods were deleted during their filter calls."""
        while self._unschedulable:
            uid, row = next(iter(self._unschedulable.items()))
            if now - row.last_refused <= _FORGET_SECONDS:
                return
            self._take_unschedulable(uid)
            row.reason = ""

    def _take_unschedulable(self, uid: str) -> QueuedPod | None:
        """Remove the pod from the refused pods, and return its row; None if the pod was not refused."""
        priority = self._awaiting_plan.pop(uid, None)
        if priority is not None:
            self._gang_priorities[priority] -= 1
            if not self._gang_priorities[priority]:
                del self._gang_priorities[priority]
        return self._unschedulable.pop(uid, None)
