"""The scheduling queue: the pods without a node, one row for each: its request, why it is pending, what requeues it.

The queue in which pods are tried is kube-scheduler's own. This one has only what the extender knows of it::

    pending ──► is tried: filter is called ──► filter returns a node ──► (none): the pod is bound, or gone
      ▲               │          ▲                  │ its bind is refused
      │               ▼ refused  └──────────────────┘
      └──────── unschedulable
       requeue_all

kube-scheduler tries an unschedulable pod again when a node, a pod or another object changes. It does not see that a
plan ended, a card recovered, a node released a share, or a quota was raised. So the extender changes an annotation of a
node (`controllers.loops`). One node is enough, because for kube-scheduler every change of a node is a reason to try
pods again. If a node cannot be changed (its annotations may be at the API's limit), another one is, and the failed one
is avoided for `_AVOID_SECONDS`.

Each such change makes kube-scheduler try all refused pods, which for a thousand pods takes it many seconds, and pods
that request no GPU wait meanwhile. So capacity that pods give back requeues pods only if a refused pod does not *await
a plan*. Members of a gang without a plan await one: the planner of gangs sees capacity by itself, and requeues them
once it has places for all. For example, two gangs of 500 members are pending and a pod of 1 MiB comes and goes each
second: no node is changed.

The watch or filter makes a row, whichever sees the pod first. Not thread-safe: `State.queue` locks.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from cardwise.core.gangs.gangs import Rank
from cardwise.kube.fairqueueing import FairQueueing, RecentUse
from extender.queue.searchpauses import SearchPauses
from extender.records.pod import WaitingPod
from extender.records.podinfo import TurnedAway, WaitingRecord
from extender.records.podref import PodRef

_MAX_UNSEEN: Final = 20_000  # pods for which filter was called and that the watch does not show: usually deleted since
_SLACK: Final = 1024  # stale heap entries that are tolerated, of pods that can no longer be nominated
_FORGET_SECONDS: Final = 600.0  # kube-scheduler tries a waiting pod again after five minutes at the latest
_WATCH_LAG_SECONDS: Final = 2.0  # seconds between a change and its watch event
_REQUEUE_SECONDS: Final = 1.0  # seconds between two requeues: each makes the scheduler try all pending pods
_AVOID_SECONDS: Final = 300.0  # seconds for which a node is avoided after its annotation failed
_FIRST_BACKOFF, _MAX_BACKOFF = 1.0, 10.0  # seconds, as kube-scheduler's own
_RETRY_WINDOW_SECONDS: Final = _MAX_BACKOFF + 2.0
_SETTLED_SECONDS: Final = 3.0  # seconds that a pod waits before other pods are evicted for it
_SEARCH_SECONDS: Final = 15.0  # seconds between two searches for victims for one pod
_MAX_PREEMPTING: Final = 1000  # pods for which victims are searched: to find the first takes some milliseconds


@dataclass(slots=True, eq=False)
class PendingPreemption:
    """A pod for which only the extender can preempt.

    By the totals of these nodes nothing is short, so kube-scheduler finds no victims, and yet no card has capacity.

    nodes: sorted.
    gang: the name of the pod's gang, or "".
    refused: when the pod was last refused for this reason.
    not_before: when victims are searched for.
    """

    claimant: WaitingPod
    policy: str
    nodes: tuple[str, ...]
    gang: str
    refused: float
    not_before: float

    @property
    def key(self) -> object:
        """Equal for pods for which the search has the same result."""
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
        """The pod's place in the order of its namespace: the smallest comes first."""
        return -self.priority, self.not_before, self.claimant.uid


@dataclass(slots=True, eq=False)
class QueuedPod:
    """A row of the queue. Times are seconds of the clock.

    pod: the pod as the watch shows it; None before.
    considered: whether filter was called for the pod, or a nomination ahead of filter was tried.
    last_tried: when filter was last called for the pod.
    request: the pod's request and resourceVersion at that call, kept until its bind.
    rank: the pod's place in the order at that call.
    last_refused: when filter last had no node for the pod.
    reason: the most frequent refusal of the nodes at that call.
    backoff: the seconds by which the last refused bind delayed the pod, if it is in a PodGroup of Kubernetes.
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
        """The pod, if it may be nominated before kube-scheduler asks for it."""
        waiting_pod = self.pod.waiting_pod if self.pod is not None and not self.considered else None
        return waiting_pod if waiting_pod is not None and not waiting_pod.nominated_node else None


def sort_key(pod: WaitingPod) -> tuple[int, str]:
    """The order of kube-scheduler's queue: the highest priority first, then the oldest pod."""
    return -pod.request.priority, pod.created


_Share = tuple[int, str]  # priority and namespace
_Entry = tuple[tuple[int, str], int, str]  # of a heap: `sort_key`, the order of coming, and the pod


class SchedulingQueue:
    """The pending pods. Not thread-safe: the state locks. A node of "" is any node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pods: dict[str, QueuedPod] = {}
        self._unseen: dict[str, None] = {}  # rows of pods that the watch does not show
        self._unschedulable: dict[str, QueuedPod] = {}  # rows of refused pods, the longest refused first
        # by UID, the priorities of refused pods that await a plan of their gang
        self._awaiting_plan: dict[str, int] = {}
        self._gang_priorities: Counter[int] = Counter()  # how many of these pods have each priority
        self._preempting: dict[str, PendingPreemption] = {}  # by UID
        self._shares: dict[_Share, dict[str, None]] = {}  # the UIDs of these
        self._searches = FairQueueing()  # by namespace
        self._searched: RecentUse[str] = RecentUse(clock)  # seconds of searches, by namespace
        self._search_pauses = SearchPauses(clock)
        self._by_priority = False  # whether the last search was for a pod of the highest priority
        self._turned_away: dict[str, TurnedAway] = {}  # pods whose calls no extender served
        self._schedulers: set[str] = set()  # the schedulers that call this extender
        self._order = count()
        self._in_order: dict[str, list[_Entry]] = {}  # by scheduler, heaps
        self._pushed = 0  # the entries that were added since stale ones were last removed
        # entries that were removed from these heaps while their namespaces pause
        self._set_aside: list[tuple[str, _Entry]] = []
        self._paused: frozenset[str] = frozenset()
        self._last_refusal = -math.inf
        self._refused_elsewhere = False  # pods may be pending that another process has refused
        self._requeue_node: str | None = None  # the node to be annotated
        self._requeue_times: set[float] = set()
        self._requeued_at = -math.inf
        self._last_node = ""  # the node that was annotated last
        self._avoided_nodes: dict[
            str, float
        ] = {}  # by node that could not be annotated, until when other nodes are preferred
        self._epoch_start = self._retry_window_end = -math.inf
        self._delayed = False  # whether a pod was refused because other pods come first

    # Pending pods.

    def set_pod(self, pod: WaitingRecord) -> None:
        """Record that the watch shows the pod without a node."""
        row = self._ensure_row(pod.uid)
        row.considered |= pod.refused
        pod_before, row.pod = row.nominatable_pod, pod
        if pod_before is None:
            self._push_in_order(row)
        self._unseen.pop(pod.uid, None)
        if pod.turned_away is not None:
            self._turned_away[pod.uid] = pod.turned_away
        else:
            self._turned_away.pop(pod.uid, None)

    def remove_pod(self, uid: str) -> None:
        """Remove the pod: it is bound or gone."""
        self._pods.pop(uid, None)
        self._unseen.pop(uid, None)
        self._take_unschedulable(uid)
        self._turned_away.pop(uid, None)
        self.stop_awaiting_preemption(uid)

    def pods_requesting_class(self, resource_class: str) -> Iterator[PodRef]:
        """The pending pods that request this class."""
        return (pod.ref for pod in self._watched_pods() if resource_class in pod.classes)

    def bindable_pods(self) -> list[PodRef]:
        """The pods for which an extender's bind may have been called."""
        return [pod.ref for pod in self._watched_pods() if pod.bindable]

    # The next pod to nominate.

    def pop_nominatable(self, schedulers: Collection[str], paused: frozenset[str]) -> WaitingPod | None:
        """The first pod of these schedulers to nominate ahead; each pod is returned once. None if there is none.

        paused: namespaces whose pods are left out for now.
        """
        if paused != self._paused:
            for scheduler, entry in self._set_aside:
                heappush(self._in_order.setdefault(scheduler, []), entry)
            self._set_aside, self._paused = [], paused
        heads = []
        for scheduler in schedulers:
            heap = self._in_order.get(scheduler, [])
            while heap and (
                (nominatable := self._nominatable_pod(heap[0][2])) is None or nominatable.ref.namespace in paused
            ):
                entry = heappop(heap)
                if nominatable is not None:
                    self._set_aside.append((scheduler, entry))
            if heap:
                heads.append((heap[0], scheduler))
        if not heads:
            return None
        uid = heappop(self._in_order[min(heads)[1]])[2]
        pod = self._nominatable_pod(uid)
        self._pods[uid].considered = True
        return pod

    def retry_nomination(self, uid: str) -> None:
        """Let the pod be nominated ahead once more: kube-scheduler did not ask for it in time."""
        row = self._pods.get(uid)
        if row is not None:
            row.considered = False
            self._push_in_order(row)

    # One attempt, from filter to bind.

    def begin_attempt(
        self, uid: str, request: tuple[PodRequest, str] | None, *, grouped: bool, rank: Rank | None = None
    ) -> bool:
        """Record that filter is called for the pod. Returns whether the pod may be placed now.

        kube-scheduler tries a member of a PodGroup of Kubernetes again at once when its bind was refused. So the pod
        backs off here, each time twice as long.
        """
        row, now = self._ensure_row(uid), self._clock.now()
        row.last_tried, row.request, row.rank, row.considered = now, request, rank, True
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
        """Record that filter has no node for the pod. It waits for capacity that kube-scheduler may not see.

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
        """Record what most nodes lacked for the pod when it was last refused."""
        row = self._unschedulable.get(uid)
        if row is not None:
            row.reason = reason

    def refusal_counts(self) -> Counter[str]:
        """The number of refused pods, by what most nodes lacked.

        A pod that the watch does not show is counted for a moment only: it is new, or filter was called for it when it
        was gone already.
        """
        now = self._clock.now()
        self._forget_old_refusals(now)
        return Counter(
            row.reason
            for row in self._unschedulable.values()
            if row.reason and (row.pod is not None or now - row.last_refused <= _WATCH_LAG_SECONDS)
        )

    def is_unschedulable(self, uid: str) -> bool:
        """Whether the pod was refused, and not placed since."""
        return uid in self._unschedulable

    def rank(self, uid: str) -> Rank | None:
        """The pod's place in the order when filter was last called for it; None if it was not."""
        row = self._pods.get(uid)
        return row.rank if row is not None else None

    def take_request(self, uid: str) -> tuple[PodRequest, str] | None:
        """The pod's request at filter, and its resourceVersion. It is returned once: after a failed bind there is
        another filter call.
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
        self._forget_old_refusals(now)
        if self._unschedulable and (not seen_by_scheduler or now - self._last_refusal < _WATCH_LAG_SECONDS):
            self._requeue_node = node

    def on_capacity_freed(
        self, node: str = "", *, seen_by_scheduler: bool = False, can_preempt: Callable[[int], bool]
    ) -> None:
        """As `requeue_all`, unless all refused pods await a plan: pods have given back capacity on this node.

        can_preempt: returns whether pods below a priority could be evicted. A gang of that priority may need fewer
            victims now, and kube-scheduler searches for victims only when it tries a member.
        """
        self._forget_old_refusals(self._clock.now())
        if len(self._unschedulable) > len(self._awaiting_plan) or any(map(can_preempt, self._gang_priorities)):
            self.requeue_all(node, seen_by_scheduler=seen_by_scheduler)

    def requeue_all_at(self, when: float) -> None:
        """Requeue the refused pods at this time: a pod was refused until then, and nothing else may requeue it."""
        self._requeue_times.add(when)

    def requeue_all_refused_elsewhere(self) -> None:
        """Requeue all pods: another process may have refused them, and no longer knows what would requeue them."""
        self._refused_elsewhere = True
        if self._requeue_node is None:
            self._requeue_node = ""

    def next_requeue_node(self, nodes: Collection[str]) -> str | None:
        """Return the node to annotate now, one of `nodes`, or None; once each.

        The caller reports back by `on_requeued` or `on_requeue_failed`.
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
        if not self._unschedulable and not refused_elsewhere:
            return None
        self._requeued_at = now
        return self._choose_requeue_node(node, nodes, now)

    def on_requeued(self, node: str) -> None:
        """Record that the node was annotated."""
        self._last_node = node
        self._avoided_nodes.pop(node, None)

    def on_requeue_failed(self, node: str) -> None:
        """Record that the node could not be annotated. Another one is due at once."""
        self._refused_elsewhere = True
        if self._requeue_node is None:
            self._requeue_node = node
        self._requeued_at = -math.inf
        self._avoided_nodes[node] = self._clock.now() + _AVOID_SECONDS

    # The order of pods at the beginning of a leader epoch.

    def begin_retry_window(self) -> None:
        """Begin a leader epoch: pods whose attempt failed while no extender served calls come first.

        If no extender serves its call, a pod loses its nomination, and kube-scheduler lets it wait for up to ten
        seconds more than others. In that time pods of lower priority would take the cards that were just freed for it,
        and it would preempt again. So pods of lower priority wait until it was tried once, but not for long.
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
        """End the retry window if it is over, or if all pods of `_expected_priorities` were tried.

        Returns whether it ended now: delayed pods may be placed from now on.
        """
        if not self._delayed or (
            self._clock.now() < self._retry_window_end and next(self._expected_priorities(), None) is not None
        ):
            return False
        self._delayed = False
        return True

    # Pods for which the extender preempts.

    def await_preemption(self, claimant: WaitingPod, policy: str, nodes: Iterable[str], *, gang: str) -> None:
        """Record that the pod may preempt, and that only cards are short on these nodes.

        At most `_MAX_PREEMPTING` pods are recorded: those of the highest priority, and of one priority as many of each
        namespace, or those of the namespaces with the least search time lately. The others come again with their next
        refusal.
        """
        uid, now = claimant.uid, self._clock.now()
        pending_before = self._preempting.get(uid)
        not_before = pending_before.not_before if pending_before is not None else now + _SETTLED_SECONDS
        self.stop_awaiting_preemption(uid)
        pending = PendingPreemption(claimant, policy, tuple(sorted(nodes)), gang, now, not_before)
        share = pending.priority, pending.namespace
        if len(self._preempting) >= _MAX_PREEMPTING and not self._displace_preemption(share):
            return
        self._preempting[uid] = pending
        self._shares.setdefault(share, {})[uid] = None

    def stop_awaiting_preemption(self, uid: str) -> None:
        """Record that the pod does not wait for a preemption now."""
        pending = self._preempting.pop(uid, None)
        if pending is not None:
            share = pending.priority, pending.namespace
            del self._shares[share][uid]
            if not self._shares[share]:
                del self._shares[share]

    def awaits_preemption_on(self, uid: str, nodes: Iterable[str]) -> bool:
        """Whether the pod's newest refusal names all of these nodes."""
        pending = self._preempting.get(uid)
        return pending is not None and set(nodes) <= set(pending.nodes)

    def preemption_nodes(self, uid: str) -> tuple[str, ...]:
        """The nodes of `await_preemption`; none if the pod does not await a preemption."""
        pending = self._preempting.get(uid)
        return pending.nodes if pending is not None else ()

    def next_preemption(self, is_helped: Callable[[str], bool]) -> PendingPreemption | None:
        """The pod to search victims for now, which is then not due for a while; None if none is due.

        is_helped: returns whether the pod with a UID no longer needs victims.

        Namespaces take turns by the time that their searches take, so that none delays the others: every other search
        is for one of all namespaces, and those between are for one of the namespaces with pods of the highest priority.
        A namespace pauses after a long search (`SearchPauses`); the others go on.
        Within a namespace the pod of the highest priority comes first, and of several the pod that is due for longest.
        """
        now = self._clock.now()
        for uid in [uid for uid, candidate in self._preempting.items() if now - candidate.refused > _FORGET_SECONDS]:
            self.stop_awaiting_preemption(uid)
        first_by_namespace: dict[str, PendingPreemption] = {}  # by namespace
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
        # The other namespaces no longer have a pod that is due, or none of this priority.
        namespace = self._searches.dequeue(due.__contains__)
        due[namespace].not_before = now + _SEARCH_SECONDS
        return due[namespace]

    def on_searched(self, pending: PendingPreemption, seconds: float, *, in_vain: bool) -> None:
        """Charge a search for the pod to its namespace.

        seconds: the CPU time of the search.
        in_vain: no victims were found, so equal pods are not due for a while either. Otherwise the equal pods of a Job
            would delay all others.
        """
        self._searches.charge_write(pending.namespace, seconds)
        self._searched.add_use(pending.namespace, seconds)
        self._search_pauses.charge_search(pending.namespace, seconds)
        if not in_vain:
            return
        key, is_full, now = pending.key, len(self._preempting) >= _MAX_PREEMPTING, self._clock.now()
        for equal in [candidate for candidate in self._preempting.values() if candidate.key == key]:
            if is_full:
                self.stop_awaiting_preemption(equal.claimant.uid)  # others wait to be recorded
            else:
                equal.not_before = now + _SEARCH_SECONDS

    def forget_preemptions(self) -> None:
        """Forget all pods that wait for a preemption, because the leader changes."""
        self._preempting.clear()
        self._shares.clear()
        self._searches.clear()

    # Private helpers.

    def _displace_preemption(self, share: _Share) -> bool:
        """Remove a pod from the full table for one of this share. Returns False if the share must not have more.

        The removed pod has the lowest priority, and of this priority the namespace with most pods, and of several such
        namespaces the one with the most search time lately.
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
        """The node to annotate: `preferred` if it did not fail lately; else the node that was annotated last; else a
        node that has not failed, or failed longest ago.
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

    def _nominatable_pod(self, uid: str) -> WaitingPod | None:
        row = self._pods.get(uid)
        return row.nominatable_pod if row is not None else None

    def _push_in_order(self, row: QueuedPod) -> None:
        pod = row.nominatable_pod
        if pod is None:
            return
        heap = self._in_order.setdefault(pod.scheduler, [])
        heappush(heap, (sort_key(pod), next(self._order), pod.uid))
        self._pushed += 1
        if self._pushed > 2 * len(self._pods) + _SLACK:
            self._pushed = 0
            # Nothing takes pods from the heap of a scheduler that never calls us, and a pod may name any scheduler.
            for name, entries in list(self._in_order.items()):
                entries[:] = [entry for entry in entries if self._nominatable_pod(entry[2]) is not None]
                heapify(entries)
                if not entries:
                    del self._in_order[name]

    def _watched_pods(self) -> Iterator[WaitingRecord]:
        return (row.pod for row in self._pods.values() if row.pod is not None)

    def _expected_priorities(self) -> Iterator[int]:
        """The priorities of pods whose attempt failed while no extender served calls, and that are still to be retried.

        Only pods whose schedulers call this extender count, since owners of pods may forge statuses.
        """
        return (
            pod.priority
            for uid, pod in self._turned_away.items()
            if pod.scheduler in self._schedulers and self._pods[uid].last_tried < self._epoch_start
        )

    def _forget_old_refusals(self, now: float) -> None:
        """Drop rows that were refused long ago: of pods that vanished during their filter calls."""
        while self._unschedulable:
            uid, row = next(iter(self._unschedulable.items()))
            if now - row.last_refused <= _FORGET_SECONDS:
                return
            self._take_unschedulable(uid)
            row.reason = ""

    def _take_unschedulable(self, uid: str) -> QueuedPod | None:
        """Remove the pod from those that are refused; None if it is not one of them."""
        priority = self._awaiting_plan.pop(uid, None)
        if priority is not None:
            self._gang_priorities[priority] -= 1
            if not self._gang_priorities[priority]:
                del self._gang_priorities[priority]
        return self._unschedulable.pop(uid, None)
