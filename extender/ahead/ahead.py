"""Nominating ahead, part of the state: waiting pods are given a node and cards before kube-scheduler comes to them.

The scheduler tries the node that a pod's status names first and alone, which in a big cluster is many times as fast as
trying all (docs/design/0010-nominating-ahead.md). What is decided here is a reservation in the phase NOMINATED and ends
as filter's do: the scheduler's own filters and filter and bind stand as ever. Shares the state's lock.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeVar

from cardwise.clock import Clock
from cardwise.core.api import policies
from cardwise.core.api.request import Load
from cardwise.core.gangs import gangplan
from cardwise.core.placement import fitting
from cardwise.core.placement.placement import Placement, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.ahead.reserve import Reserve
from extender.cache import yielding
from extender.cache.cache import Cache
from extender.cache.placing import Ask, Placing
from extender.cache.reservations import Phase, Reservation
from extender.cache.statelock import StateLock
from extender.queue.schedulingqueue import sort_key
from extender.records.aheadnodes import Ground, Grounds
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef

_T = TypeVar("_T")

NODES: Final = 1000  # above so many AUTO begins, unless a setting says otherwise
WINDOW: Final = 256  # pods that hold something ahead at a time: a second or two of a fast scheduler
YOUNGEST: Final = "~"  # as the time of creation: after all others
_LOOKS: Final = 4  # best nodes that turn out to be full beside the cards, before all nodes are looked at for that
_DEAR: Final = 0.01  # seconds: a pod may ask of its node what nobody asked before, which is asked of all nodes then
_DOUBTS: Final = 3  # refusals one after the other, by which the scheduler knows something that is not looked at here
_DOUBT_SECONDS: Final = 60.0
_MOST_DOUBTS: Final = 1024
_STALE_SECONDS: Final = 2.0  # of a name: about to be tried, or heard of before what is held for it
_NO_LOAD: Final = Load(0, 0, 0)


class When(StrEnum):
    """When pods are nominated ahead."""

    AUTO = "auto"  # in a cluster of many nodes
    ALWAYS = "always"
    NEVER = "never"


class Outcome(StrEnum):
    """What became of a pod that was decided about ahead."""

    MET = "met"  # kube-scheduler asked for that node alone
    ELSEWHERE = "elsewhere"  # it asked for others too
    LATE = "late"  # the pod had changed, or was gone, before its status could say it
    OVERTAKEN = "overtaken"  # one that comes before it needed what it held
    EXPIRED = "expired"  # kube-scheduler did not come in time


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadSettings:
    """`above`: in how many nodes AUTO begins. `policy` and `one_best_node`: of pods that say nothing."""

    when: When = When.NEVER
    above: int = NODES
    policy: str = policies.DEFAULT
    one_best_node: bool = True


class Nominee(NamedTuple):
    """A pod and the node that its status is to name, if it is still of this version, or names, of any version ("")."""

    pod: PodRef
    version: str
    node: str


class Ahead:
    """Methods that say so may be called from any thread; the others want the lock to be held."""

    def __init__(
        self,
        lock: StateLock,
        *,
        cache: Cache,
        placing: Placing,
        reserve: Reserve,
        settings: AheadSettings,
        clock: Clock,
    ) -> None:
        self.observe: Callable[[Outcome], None] = lambda _: None  # told how it went with each pod
        self._lock = lock
        self._cache, self._queue = cache, cache.queue
        self._reservations = cache.reservations
        self._placing = placing
        self._reserve = reserve
        self._settings = settings
        self._clock = clock
        self._grounds = Grounds()
        self._served: frozenset[str] = frozenset()  # the schedulers that ask this extender
        self._named: dict[str, Nominee] = {}  # as statuses say
        self._unheld: dict[str, float] = {}  # since when nothing is held for a name
        self._doubts: dict[bytes, tuple[int, float]] = {}  # how often refused, and until when none is tried
        self._not_before = float("-inf")

    # What the API server tells.

    def set_node(self, name: str, ground: Ground | None) -> None:
        """The node is so now; None: it is no more, or takes no pods."""
        if ground is None:
            self._grounds.remove(name)
        elif self._settings.when is not When.NEVER:
            self._grounds.put(name, ground)

    def waits(self, pod: PodRecord) -> None:
        """The pod has no node."""
        if self._settings.when is When.NEVER:
            return
        if pod.named:
            self._named[pod.uid] = Nominee(pod.ref, "", pod.named)
        else:
            self.over(pod.uid)
        if pod.refused:
            self._end([pod.uid], Outcome.ELSEWHERE)

    def over(self, uid: str) -> None:
        """The pod is bound, or is no more; or its status names no node where nobody makes room."""
        self._named.pop(uid, None)
        self._unheld.pop(uid, None)

    # What filter asks and tells.

    def serves(self, scheduler: str) -> None:
        """kube-scheduler of this name asks this extender. From any thread."""
        if scheduler not in self._served:
            self._served |= {scheduler}

    def comes(self, uid: str, nodes: Collection[str]) -> None:
        """kube-scheduler is at the pod and offers these nodes."""
        if self._settings.when is When.NEVER:
            return
        one = self._nominated(uid)
        if one is None or one.ahead is None:
            return
        doubt = one.ahead.constraints
        if list(nodes) == [one.node]:
            self._reservations.meet(uid)
            self._doubts.pop(doubt, None)
            self.observe(Outcome.MET)
        else:
            if one.node not in nodes:
                self._doubt(doubt)
            self._end([uid], Outcome.ELSEWHERE)

    def place(self, ask: Ask, created: str) -> Placement | Unplaceable:
        """The best node for a pod of that time of creation, if need be with what pods after it hold ahead."""
        return self.overtaking(
            ask.request.priority,
            created,
            ask.pod.namespace,
            lambda: self._placing.place(ask),
            lambda found: (found.node,) if isinstance(found, Placement) else (),
        )

    def score(self, ask: Ask, created: str) -> tuple[dict[str, int], dict[str, Refusal]]:
        """As `place`, for all nodes that fit; and why the others do not."""
        return self.overtaking(
            ask.request.priority,
            created,
            ask.pod.namespace,
            lambda: self._placing.score(ask),
            lambda found: found[0],
        )

    def overtaking(
        self,
        priority: int,
        created: str,
        namespace: str,
        search: Callable[[], _T],
        nodes_of: Callable[[_T], Collection[str]],
    ) -> _T:
        """What the search finds, if need be with what is held ahead for pods that come later in the queue than one of
        this priority and time of creation. That is over on the nodes that were found, `nodes_of`; where the namespace
        has quotas, so is all that its own pods hold ahead.
        """
        found = search()
        if nodes_of(found):
            return found
        ahead = self._reservations.among(Phase.NOMINATED)
        later = [one for one in ahead if one.ahead is not None and sort_key(one.ahead) > (-priority, created)]
        if not later:
            return found
        with self._cache.ledger.what_if(released=[one.pod.uid for one in later]):
            nodes = nodes_of(search())
        if not nodes:
            return found
        limited = bool(self._cache.headroom(namespace))
        self._end(
            [one.pod.uid for one in later if one.node in nodes or (limited and one.pod.namespace == namespace)],
            Outcome.OVERTAKEN,
        )
        return search()

    # What time does.

    def expired(self, uid: str) -> None:
        """kube-scheduler did not come to the pod in time; it holds nothing any more."""
        self.observe(Outcome.EXPIRED)
        self._queue.put_back(uid)

    # What the nominator asks, from its thread.

    def decide(self, resting: frozenset[str] = frozenset()) -> tuple[bool, Nominee | None]:
        """The next pod, if any, and whether to ask again at once. `resting`: namespaces whose pods wait meanwhile."""
        with self._lock:
            if not self._active() or self._reservations.count(Phase.NOMINATED) >= WINDOW:
                return False, None
            pod = self._queue.take_first(self._served, resting)
            if pod is None:
                return False, None
            if not self._queue.has_turn(pod.request.priority):
                self._queue.put_back(pod.uid)  # and all others come after it
                return False, None
            began = self._clock.cpu()
            nominee = self._decide(pod)
            spent = self._clock.cpu() - began
            if nominee is None or spent > _DEAR:
                self._not_before = self._clock.now() + yielding.rest(spent)
            return True, nominee

    def stale(self) -> list[Nominee]:
        """Pods whose statuses name a node that nothing is held on for them any more; each once.

        Whose doing the name is, they do not say: another extender's of ours, or somebody else's.
        """
        with self._lock:
            now = self._clock.now()
            found = []
            for uid, nominee in list(self._named.items()):
                one = self._reservations.get(uid)
                if one is not None and one.node == nominee.node:
                    self._unheld.pop(uid, None)
                elif now - self._unheld.setdefault(uid, now) >= _STALE_SECONDS:
                    self.over(uid)
                    found.append(nominee)
            return found

    def still_named(self, nominee: Nominee) -> None:
        """What `stale` has told could not be taken back."""
        with self._lock:
            self._named.setdefault(nominee.pod.uid, nominee)

    def wanted(self, uid: str) -> bool:
        """Whether kube-scheduler has still to come to the pod, so that it is worth writing."""
        with self._lock:
            return self._nominated(uid) is not None

    def unwritten(self, uid: str) -> None:
        """The pod's status could not say it."""
        with self._lock:
            self._end([uid], Outcome.LATE)

    # Everything below is what they are made of.

    def _active(self) -> bool:
        if self._settings.when is When.NEVER or self._clock.now() < self._not_before:
            return False
        return self._settings.when is When.ALWAYS or len(self._grounds) > self._settings.above

    def _decide(self, pod: WaitingPod) -> Nominee | None:
        self._cache.count_cards()
        if (
            not (self._settings.one_best_node or pod.insists)
            or fitting.several(pod.request)  # that is searched in turns, as filter does
            or self._cache.ledger.holding(pod.uid) is not None
            or self._doubts.get(pod.constraints, (0, 0.0))[1] > self._clock.now()
        ):
            return None
        placed = self._place(pod)
        if placed is None:
            return None
        self._placing.hold_ahead(pod, placed)
        return Nominee(pod.ref, pod.version, placed.node)

    def _place(self, pod: WaitingPod) -> Placement | None:
        """The best node with room for the pod beside cards, too."""
        policy = pod.request.policy or self._settings.policy
        nodes = self._grounds.allowed(pod.constraints)
        closed = self._reserve.closed(pod.rank, pod.request, nodes)
        full = set(closed)
        for look in range(_LOOKS + 1):
            if look == _LOOKS:
                full = {name for name in nodes if name in closed or not self._takes(name, pod.load)}
            placed = self._placing.place_ahead(pod, nodes - full if full else nodes, policy)
            if isinstance(placed, Unplaceable):
                return None
            if self._takes(placed.node, pod.load):
                return placed
            full.add(placed.node)
        return None

    def _takes(self, node: str, load: Load) -> bool:
        return gangplan.takes(self._cache.loads.left(node), _NO_LOAD, load)

    def _doubt(self, doubt: bytes) -> None:
        times = self._doubts.pop(doubt, (0, 0.0))[0] + 1
        if len(self._doubts) >= _MOST_DOUBTS:
            del self._doubts[next(iter(self._doubts))]
        until = self._clock.now() + _DOUBT_SECONDS if times >= _DOUBTS else float("-inf")
        self._doubts[doubt] = times, until

    def _end(self, uids: Iterable[str], outcome: Outcome) -> None:
        """What these pods hold ahead is free, unless kube-scheduler is at them."""
        for uid in uids:
            if self._nominated(uid) is not None:
                self.observe(outcome)
                self._reservations.give_up(uid)

    def _nominated(self, uid: str) -> Reservation | None:
        """What the pod holds ahead, until kube-scheduler comes to it."""
        one = self._reservations.get(uid)
        return one if one is not None and one.phase is Phase.NOMINATED else None
