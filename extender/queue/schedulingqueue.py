"""The scheduling queue: the pods without a node, one row for each: what it asks, why it waits, what would wake it.

The queue in which pods are tried is kube-scheduler's own. Here is what only the extender knows of it::

    waits ──► is tried: filter is asked ──► a node is answered ──► (none): the pod is bound, or gone
      ▲               │          ▲                  │ its bind is refused
      │               ▼ refused  └──────────────────┘
      └──────── unschedulable
       move_all

kube-scheduler tries an unschedulable pod again when a node, a pod or the like changes. A plan that ended, a card that
healed, a share that its node gave up or a quota that was raised is none of those, so a change of one node annotation
makes it one; one node is enough, because the scheduler takes every node change as a reason. The thread that touches is
`controllers.loops`.

A row comes with the watch or with filter, whichever knows the pod first. It knows no lock: `State.queue` does.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef

_MOST_UNSEEN: Final = 20_000  # pods that filter has asked about and the watch does not show: gone meanwhile, mostly
_SLACK: Final = 1024  # of what is in order, for pods that are not to be decided about any more
_FORGET: Final = 600.0  # seconds; kube-scheduler tries a pod that still waits again after five minutes at the latest
_RACE: Final = 2.0  # seconds in which the scheduler may have asked before we knew what it knows
_EVERY: Final = 1.0  # seconds between two touches: each makes the scheduler try all waiting pods
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 10.0  # seconds, as kube-scheduler's own
_TURNS: Final = 12.0  # seconds: kube-scheduler's longest back-off, and a moment
_SETTLED: Final = 3.0  # seconds that a pod waits before somebody is evicted for it
_LOOK_AGAIN: Final = 15.0  # seconds between two looks for victims


@dataclass(slots=True, eq=False)
class Fragmented:
    """A pod that waits because cards are fragmented: the sums of these nodes have room for it, and no card of them has.

    kube-scheduler's preemption does not begin for it: with its sums it would evict nobody. `heard`: when it was refused
    so last.
    """

    claimant: WaitingPod
    policy: str
    nodes: tuple[str, ...]
    heard: float
    not_before: float


@dataclass(slots=True, eq=False)
class QueuedPod:
    """`pod`: as the watch shows it, None until it does. `tried`: when filter was asked about it last; `asked`: what it
    asked then, and in which version of the object, until its bind. `refused`: when filter had no node last; `reason`:
    what most nodes lacked then.

    `considered`: kube-scheduler has come to it, or it was decided about ahead of that once.

    `backoff`: of a member of a PodGroup of Kubernetes, the seconds for which a refused bind last put it off.
    """

    uid: str
    pod: PodRecord | None = None
    considered: bool = False
    tried: float = -math.inf
    asked: tuple[PodRequest, str] | None = None
    refused: float = -math.inf
    reason: str = ""
    backoff: float = 0.0
    backoff_until: float = -math.inf
    fragmented: Fragmented | None = None

    @property
    def ahead(self) -> WaitingPod | None:
        """The pod, where it may be decided about before kube-scheduler comes to it."""
        asks = self.pod.asks if self.pod is not None and not self.considered else None
        return asks if asks is not None and not asks.nominated else None


def sort_key(pod: WaitingPod) -> tuple[int, str]:
    """By it kube-scheduler sorts its queue: the highest priority first, of equal ones the first created."""
    return -pod.request.priority, pod.created


_Entry = tuple[tuple[int, str], int, str]  # of a heap: `sort_key`, the order of coming, and the pod


class SchedulingQueue:
    """Not thread-safe: the state locks. A node of "" is any node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pods: dict[str, QueuedPod] = {}
        self._unseen: dict[str, None] = {}  # of those, the watch shows no such pod
        self._unschedulable: dict[str, QueuedPod] = {}  # of those, the longest ago first
        self._turned_away: dict[str, int] = {}  # of those no extender answered for, the priorities
        self._order = count()
        self._in_order: dict[str, list[_Entry]] = {}  # by scheduler, heaps
        self._aside: list[tuple[str, _Entry]] = []  # of them, with their schedulers, while namespaces rest
        self._resting: frozenset[str] = frozenset()
        self._last_refusal = -math.inf
        self._others = False  # somebody may wait of whom we do not know
        self._move: str | None = None  # to be touched
        self._moves_at: set[float] = set()
        self._touched = -math.inf
        self._term = self._turns_until = -math.inf
        self._put_off = False  # somebody waits for others to come

    # Who waits.

    def waits(self, pod: PodRecord) -> None:
        """The pod has no node, as the watch shows."""
        row = self._row(pod.uid)
        row.considered |= pod.refused
        before, row.pod = row.ahead, pod
        if before is None:
            self._put_in_order(row)
        self._unseen.pop(pod.uid, None)
        if pod.turned_away is not None:
            self._turned_away[pod.uid] = pod.turned_away
        else:
            self._turned_away.pop(pod.uid, None)

    def over(self, uid: str) -> None:
        """The pod is bound, or is no more."""
        self._pods.pop(uid, None)
        self._unseen.pop(uid, None)
        self._unschedulable.pop(uid, None)
        self._turned_away.pop(uid, None)

    def asking_for(self, device_class: str) -> Iterator[PodRef]:
        """The pods that wait for this class."""
        return (pod.ref for pod in self._shown() if device_class in pod.classes)

    def bindable(self) -> list[PodRef]:
        """The pods that an extender may have been asked to bind."""
        return [pod.ref for pod in self._shown() if pod.bindable]

    # Who is next.

    def take_first(self, schedulers: Collection[str], resting: frozenset[str]) -> WaitingPod | None:
        """The first pod that is to be decided about before kube-scheduler comes to it, of these schedulers, once.
        `resting`: namespaces whose pods wait meanwhile.
        """
        if resting != self._resting:
            for scheduler, entry in self._aside:
                heappush(self._in_order.setdefault(scheduler, []), entry)
            self._aside, self._resting = [], resting
        heads = []
        for scheduler in schedulers:
            heap = self._in_order.get(scheduler, [])
            while heap and ((one := self._ahead(heap[0][2])) is None or one.ref.namespace in resting):
                entry = heappop(heap)
                if one is not None:
                    self._aside.append((scheduler, entry))
            if heap:
                heads.append((heap[0], scheduler))
        if not heads:
            return None
        uid = heappop(self._in_order[min(heads)[1]])[2]
        pod = self._ahead(uid)
        self._pods[uid].considered = True
        return pod

    def put_back(self, uid: str) -> None:
        """It was decided about, and kube-scheduler did not come in time: its turn is still to come."""
        row = self._pods.get(uid)
        if row is not None:
            row.considered = False
            self._put_in_order(row)

    # One try, from filter to bind.

    def tries(self, uid: str, asked: tuple[PodRequest, str] | None, *, grouped: bool) -> bool:
        """Filter is asked about the pod. Whether it may be placed.

        kube-scheduler brings a member of a PodGroup of Kubernetes again at once when its bind was refused. So it backs
        off here, each time twice as long.
        """
        row, now = self._row(uid), self._clock.now()
        row.tried, row.asked, row.considered = now, asked, True
        if grouped:
            row.backoff = row.backoff or _FIRST_BACKOFF / 2
            if row.backoff_until > now:
                self.refused(uid)
                self.move_all_at(row.backoff_until)
                return False
        return True

    def placed(self, uid: str) -> None:
        """Filter has answered a node."""
        row = self._unschedulable.pop(uid, None)
        if row is not None:
            row.reason = ""

    def refused(self, uid: str) -> None:
        """Filter has no node for the pod. It waits for what only we may see."""
        if not uid:
            return
        row, now = self._row(uid), self._clock.now()
        self._last_refusal = row.refused = now
        row.asked = None
        self._unschedulable.pop(uid, None)
        self._forget(now)
        self._unschedulable[uid] = row

    def because(self, uid: str, reason: str) -> None:
        """What most nodes lacked for the pod, when it was refused last."""
        row = self._unschedulable.get(uid)
        if row is not None:
            row.reason = reason

    def reasons(self) -> Counter[str]:
        """How many pods filter had no node for, by what most nodes lacked."""
        self._forget(self._clock.now())
        return Counter(row.reason for row in self._unschedulable.values() if row.reason)

    def is_unschedulable(self, uid: str) -> bool:
        """Whether it was refused, and not placed since."""
        return uid in self._unschedulable

    def take_asked(self, uid: str) -> tuple[PodRequest, str] | None:
        """What filter was asked for, and the pod's version, once: a bind that fails is followed by another filter."""
        row = self._pods.get(uid)
        if row is None:
            return None
        asked, row.asked = row.asked, None
        return asked

    def bind_failed(self, uid: str) -> None:
        """A bind of the pod was refused."""
        row = self._pods.get(uid)
        if row is not None and row.backoff:
            row.backoff = min(2 * row.backoff, _LONGEST_BACKOFF)
            row.backoff_until = self._clock.now() + row.backoff

    # What wakes them.

    def move_all(self, node: str = "", *, seen: bool = False) -> None:
        """There may be room on this node. `seen`: the scheduler sees the cause and retries by itself."""
        now = self._clock.now()
        self._forget(now)
        if self._unschedulable and (not seen or now - self._last_refusal < _RACE):
            self._move = node

    def move_all_at(self, when: float) -> None:
        """Somebody was refused until then, and nothing else may wake it."""
        self._moves_at.add(when)

    def move_all_of_others(self) -> None:
        """Another process may have refused pods, and what it was about to wake them for is lost."""
        self._others = True
        if self._move is None:
            self._move = ""

    def due(self, nodes: Collection[str]) -> str | None:
        """The node to touch now, if any, of all that there are; says so once."""
        now = self._clock.now()
        passed = {when for when in self._moves_at if when <= now}
        if passed:
            self._moves_at -= passed
            self.move_all()
        if self._move is None or now - self._touched < _EVERY:
            return None
        node, self._move = self._move, None
        self._forget(now)
        others, self._others = self._others, False
        if not self._unschedulable and not others:
            return None
        self._touched = now
        return node if node in nodes else next(iter(nodes), None)  # any will do; the one with room may be gone

    @property
    def moving(self) -> bool:
        """Whether a node is to be touched, now or later."""
        return self._move is not None

    def failed(self, node: str) -> None:
        """The node that was due could not be touched."""
        self._others = True
        if self._move is None:
            self._move = node

    # Whose turn it is at the beginning of a term.

    def begin_turns(self) -> None:
        """A term begins: first come those that were turned away while no extender answered.

        kube-scheduler takes the nomination from a pod that it cannot ask an extender about, and lets it wait for up to
        ten seconds more than others. In that time pods of lower priority would take what has just been freed for it,
        and it would preempt once more. So they wait until it has been here once, but not for long.
        """
        self._term = self._clock.now()
        self._turns_until = self._term + _TURNS

    def has_turn(self, priority: int) -> bool:
        """Whether a pod of this priority that has come may be placed now; if not, it is woken later (`end_turns`)."""
        if self._clock.now() >= self._turns_until or max(self._to_come(), default=priority) <= priority:
            return True
        self._put_off = True
        return False

    def end_turns(self) -> bool:
        """Whether those who were put off may come again: all that are turned away have come, or it took too long."""
        if not self._put_off or (self._clock.now() < self._turns_until and next(self._to_come(), None) is not None):
            return False
        self._put_off = False
        return True

    # Who waits because cards are fragmented.

    def fragmented(self, claimant: WaitingPod, policy: str, nodes: Collection[str]) -> None:
        """The pod may preempt, and no card of these nodes would do, though the sums of the nodes would; none: it waits
        for something else now.
        """
        row, now = self._row(claimant.uid), self._clock.now()
        if not nodes:
            row.fragmented = None
            return
        not_before = row.fragmented.not_before if row.fragmented is not None else now + _SETTLED
        row.fragmented = Fragmented(claimant, policy, tuple(sorted(nodes)), now, not_before)

    def is_fragmented(self, uid: str) -> bool:
        row = self._pods.get(uid)
        return row is not None and row.fragmented is not None

    def next_fragmented(self, helped: Callable[[str], bool]) -> Fragmented | None:
        """The next to find victims for, of the highest priority first; not again for a while. `helped`: whether
        somebody goes for the pod already.
        """
        now, due = self._clock.now(), list[Fragmented]()
        for row in self._unschedulable.values():
            one = row.fragmented
            if one is None or one.not_before > now:
                continue
            if now - one.heard > _FORGET:
                row.fragmented = None
            elif not helped(row.uid):
                due.append(one)
        if not due:
            return None
        first = min(due, key=lambda one: (-one.claimant.request.priority, one.not_before, one.claimant.uid))
        first.not_before = now + _LOOK_AGAIN
        return first

    def forget_fragmented(self) -> None:
        """Another extender is asked."""
        for row in self._pods.values():
            row.fragmented = None

    # Everything below is what they are made of.

    def _row(self, uid: str) -> QueuedPod:
        row = self._pods.get(uid)
        if row is None:
            row = self._pods[uid] = QueuedPod(uid)
            self._unseen[uid] = None
            if len(self._unseen) > _MOST_UNSEEN:
                self.over(next(iter(self._unseen)))
        return row

    def _ahead(self, uid: str) -> WaitingPod | None:
        row = self._pods.get(uid)
        return row.ahead if row is not None else None

    def _put_in_order(self, row: QueuedPod) -> None:
        pod = row.ahead
        if pod is None:
            return
        heap = self._in_order.setdefault(pod.scheduler, [])
        heappush(heap, (sort_key(pod), next(self._order), pod.uid))
        if len(heap) > 2 * len(self._pods) + _SLACK:
            # Nobody takes from the heap of a scheduler that never asks.
            heap[:] = [one for one in heap if self._ahead(one[2]) is not None]
            heapify(heap)

    def _shown(self) -> Iterator[PodRecord]:
        return (row.pod for row in self._pods.values() if row.pod is not None)

    def _to_come(self) -> Iterator[int]:
        """The priorities of those who were turned away and have not been here in this term."""
        return (priority for uid, priority in self._turned_away.items() if self._pods[uid].tried < self._term)

    def _forget(self, now: float) -> None:
        """Those that were refused long ago: pods that vanished while filter was at them."""
        while self._unschedulable:
            uid, row = next(iter(self._unschedulable.items()))
            if now - row.refused <= _FORGET:
                return
            del self._unschedulable[uid]
            row.reason = ""
