"""The ledger, fed by what the API server tells and by what this process has decided but not yet seen confirmed.

Exists apart from the ledger because it holds the rules of *who counts when*: a share is held while its pod exists and
is not finished, then while its node reports it or until a grace time is over (docs/design/0001-contracts.md). For
every pod UID there is one answer, `_effective`, computed from all that is known; so the order in which pods, cards and
reports arrive does not matter. One lock; nothing here waits or does I/O.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cardwise.core import placement
from cardwise.core.classes import DeviceClass
from cardwise.core.kinds import UNKNOWN
from cardwise.core.ledger import MAX_CLIENTS, Holding, Ledger
from cardwise.core.placement import Placement, Unplaceable
from cardwise.core.quantity import MiB
from cardwise.core.quotas import GPUQuota
from cardwise.core.request import PodRequest
from cardwise.core.verdict import Refusal
from extender.decisions import Begun, Decided, Ghost, Patience, Stage, Tentative, Waiter
from extender.inventory import Inventory
from extender.limits import Brake, Limits
from extender.projection import CardRecord, PodRecord
from extender.wakeups import Waiting

Clock = Callable[[], float]
Who = tuple[str, str]  # namespace and name of a pod


class State:
    """All methods may be called from any thread."""

    def __init__(
        self,
        *,
        headroom: MiB = MiB(0),
        max_clients: int = MAX_CLIENTS,
        patience: Patience | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.patience = patience or Patience()
        self.waiting = Waiting()
        self._clock = clock
        self._lock = threading.Lock()
        self._ledger = Ledger(headroom=headroom, max_clients=max_clients)
        self._pods: dict[str, PodRecord] = {}  # bound and not finished
        self._pending: dict[str, PodRecord] = {}  # without a node, and they name a class
        self._tentative: dict[str, Tentative] = {}
        self._ghosts: dict[str, Ghost] = {}
        self._inventory = Inventory()
        self._limits = Limits()
        self._changed: set[str] = set()  # nodes, since `changed_nodes`

    @contextmanager
    def view(self) -> Iterator[Ledger]:
        """The ledger as of now, locked: read it and let go."""
        with self._lock:
            self._count_cards()
            yield self._ledger

    # What the API server tells.

    def set_pod(self, pod: PodRecord) -> None:
        """The pod is so now."""
        with self._lock:
            self._pending.pop(pod.uid, None)
            if not pod.node:
                if pod.classes:
                    self._pending[pod.uid] = pod
                return
            self.waiting.satisfied(pod.uid)
            if pod.finished:
                self._leave(pod.uid, ended=pod.ended)
            elif pod.assignment is not None:
                self._pods[pod.uid] = pod
                self._ghosts.pop(pod.uid, None)
                self._drop_tentative(pod.uid)
                self._refresh(pod.uid)

    def remove_pod(self, pod: PodRecord) -> None:
        """The pod, last seen so, is no more."""
        with self._lock:
            self._pending.pop(pod.uid, None)
            self.waiting.satisfied(pod.uid)
            self._leave(pod.uid, ended=pod.ended)

    def set_card(self, name: str, card: CardRecord) -> None:
        """The ExtendedResource is so now."""
        with self._lock:
            reported, silent = self._inventory.set_card(name, card)
            for uid in silent:
                if uid not in self._inventory.held():
                    self._ghosts.pop(uid, None)  # the node had it and let it go: that is the proof
            for uid in (*reported, *silent):
                self._refresh(uid)

    def remove_card(self, name: str) -> None:
        with self._lock:
            for uid in self._inventory.remove_card(name):
                self._refresh(uid)

    def set_node(self, name: str) -> None:
        with self._lock:
            self._inventory.set_node(name)

    def remove_node(self, name: str) -> None:
        with self._lock:
            self._inventory.remove_node(name)

    def set_class(self, device_class: DeviceClass) -> None:
        """The ResourceClass is so now."""
        with self._lock:
            if self._inventory.set_class(device_class):
                self.waiting.freed("", self._clock(), seen=False)

    def remove_class(self, name: str) -> None:
        with self._lock:
            if self._inventory.remove_class(name):
                self.waiting.freed("", self._clock(), seen=False)

    def set_quota(self, key: str, quota: GPUQuota) -> None:
        """The GPUQuota `key`, "namespace/name", is so now."""
        with self._lock:
            self._limits.set(key, quota)
            self.waiting.freed("", self._clock(), seen=False)

    def remove_quota(self, key: str) -> None:
        with self._lock:
            if self._limits.remove(key):
                self.waiting.freed("", self._clock(), seen=False)

    # What filter and bind decide.

    def decided(self, uid: str) -> Decided | None:
        """Where the pod is or may be bound already."""
        with self._lock:
            return self._decided(uid)

    def plan(
        self, uid: str, who: Who, request: PodRequest, nodes: Collection[str], policy: str
    ) -> Placement | Unplaceable | Decided:
        """The best node, held for the pod until its bind comes; in place of an earlier plan."""
        with self._lock:
            decided = self._decided(uid)
            if decided is not None:
                return decided
            self._count_cards()
            before = self._ledger.holding(uid)
            if self._tentative.pop(uid, None) is not None:
                self._ledger.release(uid)  # the pod's own plan is no obstacle, on a card or in a quota
            rooms = self._limits.rooms(self._ledger, who[0])
            placed = placement.place(self._ledger, nodes, request, policy, rooms)
            if isinstance(placed, Unplaceable):
                self._refused(uid)
            else:
                holding = _holding(uid, who, placed, Stage.PLANNED)
                self._tentative[uid] = Tentative(holding, Stage.PLANNED, self._clock())
                self.waiting.satisfied(uid)
            self._settle(uid, before, seen=False)
            return placed

    def fitting(
        self, uid: str, who: Who, request: PodRequest, nodes: Collection[str], policy: str
    ) -> dict[str, int] | Unplaceable | Decided:
        """As `plan`, but all nodes that fit with their scores, and nothing is held."""
        with self._lock:
            decided = self._decided(uid)
            if decided is not None:
                return decided
            scores, refusals = self._score(uid, who, request, nodes, policy)
            if scores:
                return scores
            self._refused(uid)
            return Unplaceable(refusals=refusals)

    def scores(self, uid: str, who: Who, request: PodRequest, nodes: Collection[str], policy: str) -> dict[str, int]:
        """The policy's score of each node that fits. What the pod holds itself is no obstacle."""
        with self._lock:
            return self._score(uid, who, request, nodes, policy)[0]

    def begin_bind(
        self, uid: str, who: Who, request: PodRequest, node: str, policy: str, *, term: int = 0
    ) -> Begun | Decided | Refusal:
        """The cards to write, held until `finish_bind`: those of the plan where they still hold, else chosen now.

        `term`: in which this process may post (leadership.py). What is unsure since an earlier one is not posted again:
        another extender may have given the cards away meanwhile.
        """
        with self._lock:
            decided = self._decided(uid)
            tentative = self._tentative.get(uid)
            kept = tentative if tentative is not None and tentative.holding.node == node else None
            unsure = kept is not None and kept.stage is Stage.UNSURE and kept.term == term
            if decided is not None and not unsure:
                return decided
            self._count_cards()
            if kept is not None and (unsure or self._good(kept.holding, request)):
                # Unsure: it may be written already, so no other cards will do.
                holding = replace(kept.holding, mark=Stage.BINDING.value)
            else:
                self._tentative.pop(uid, None)
                self._refresh(uid)
                rooms = self._limits.rooms(self._ledger, who[0])
                placed = placement.place_on(self._ledger.node(node), request, policy, rooms)
                if isinstance(placed, Refusal):
                    return placed
                holding = _holding(uid, who, placed, Stage.BINDING)
            self._tentative[uid] = Tentative(holding, Stage.BINDING, self._clock(), term)
            self._refresh(uid)
            return Begun(assignment=holding.assignment, unsure=unsure)

    def finish_bind(self, uid: str, stage: Stage | None) -> None:
        """How the posting ended: BOUND, UNSURE, or None for surely not, neither by this call nor by one before."""
        with self._lock:
            tentative = self._tentative.get(uid)
            if tentative is None or tentative.stage is not Stage.BINDING:
                return
            del self._tentative[uid]
            if stage is not None and tentative.gone:
                self._haunt(tentative.holding)
            elif stage is not None and uid not in self._pods:
                holding = replace(tentative.holding, mark=stage.value)
                self._tentative[uid] = Tentative(holding, stage, self._clock(), tentative.term)
            self._refresh(uid)

    def forget_plans(self) -> None:
        """Another extender decides from now on, or has until now: what is planned here and not posted ends."""
        with self._lock:
            plans = [uid for uid, t in self._tentative.items() if t.stage is Stage.PLANNED]
            for uid in plans:
                del self._tentative[uid]
                self._refresh(uid)

    # What time does.

    def tick(self) -> list[Holding]:
        """Ends what is over; returns decisions that should have been confirmed by now, for someone to look up."""
        with self._lock:
            now = self._clock()
            plans = [
                uid
                for uid, t in self._tentative.items()
                if t.stage is Stage.PLANNED and now - t.since > self.patience.hold
            ]
            for uid in plans:
                del self._tentative[uid]
            ghosts = [
                uid for uid, ghost in self._ghosts.items() if now > ghost.until and uid not in self._inventory.held()
            ]
            for uid in ghosts:
                del self._ghosts[uid]
            for uid in (*plans, *ghosts):
                self._refresh(uid)
            return [t.holding for t in self._tentative.values() if self._overdue(t)]

    def looked_up(self, uid: str, *, bound: bool, exists: bool) -> None:
        """What a consistent read said of a decision from `tick`."""
        with self._lock:
            tentative = self._tentative.get(uid)
            if tentative is None or not self._overdue(tentative):
                return  # settled, or posted once more since
            if bound:
                tentative.since = self._clock()  # the watch is behind; ask again later
                return
            del self._tentative[uid]
            if not exists:
                # It may have been bound and deleted between two looks.
                self._haunt(tentative.holding)
            self._refresh(uid)

    def wake_all(self) -> None:
        """Touch a node soon, whoever waits: another extender that has refused pods cannot wake them any more."""
        with self._lock:
            self.waiting.of_others()

    def waiting_for(self, device_class: str) -> list[Waiter]:
        """The pods without a node that ask for this class, also those that the scheduler refused without asking us."""
        with self._lock:
            return [Waiter(p.uid, p.namespace, p.name) for p in self._pending.values() if device_class in p.classes]

    def brake(self, namespace: str, request: PodRequest) -> Brake | None:
        """The entry of a quota that a pod waits for."""
        with self._lock:
            return self._limits.brake(self._ledger, namespace, request)

    def class_in_use(self, name: str) -> bool:
        """Whether a pod waits for the class or holds a card that is of it or, gone from its node, may have been."""
        with self._lock:
            self._count_cards()
            if any(name in pod.classes for pod in self._pending.values()):
                return True
            kinds = self._ledger.kinds
            used = {kind for namespace in self._ledger.namespaces() for kind in self._ledger.usage(namespace)}
            return any(kind == UNKNOWN or name in kinds.get(kind).classes for kind in used)

    def changed_nodes(self) -> set[str]:
        """The nodes whose cards or holdings have changed since the last call."""
        with self._lock:
            self._count_cards()
            changed, self._changed = self._changed, set()
            return changed

    def touch_due(self) -> str | None:
        """A node to touch so that waiting pods are tried again, at most one a second; see `wakeups`."""
        with self._lock:
            self._count_cards()
            node = self.waiting.due(self._clock())
            if node is None or node in self._inventory.nodes:
                return node
            return next(iter(self._inventory.nodes), None)  # any will do; the one with room may be gone

    def touch_failed(self, node: str) -> None:
        """The node from `touch_due` could not be touched: it is due again."""
        with self._lock:
            self.waiting.failed(node)

    def marks(self) -> dict[str, int]:
        """Holdings by mark, for metrics."""
        with self._lock:
            counts = {"bound": len(self._pods)}
            for t in self._tentative.values():
                counts[t.stage.value] = counts.get(t.stage.value, 0) + 1
            counts["ghost"] = len(self._ghosts)
            held = self._inventory.held()
            counts["held"] = sum(uid not in self._pods and uid not in self._ghosts for uid in held)
            return counts

    # Everything below runs under the lock.

    def _decided(self, uid: str) -> Decided | None:
        pod = self._pods.get(uid)
        if pod is not None and pod.assignment is not None:
            return Decided(node=pod.node, assignment=pod.assignment, stage=Stage.BOUND)
        tentative = self._tentative.get(uid)
        ghost = self._ghosts.get(uid)
        if tentative is not None and tentative.stage is not Stage.PLANNED:
            holding, stage = tentative.holding, tentative.stage
        elif ghost is not None:
            holding, stage = ghost.holding, Stage.UNSURE  # a call from before the pod vanished
        else:
            return None
        return Decided(node=holding.node, assignment=holding.assignment, stage=stage)

    def _score(
        self, uid: str, who: Who, request: PodRequest, nodes: Collection[str], policy: str
    ) -> tuple[dict[str, int], dict[str, Refusal]]:
        self._count_cards()
        with self._aside(uid):
            rooms = self._limits.rooms(self._ledger, who[0])
            return placement.Scorer(request, policy, rooms).score_all(self._ledger, nodes)

    @contextmanager
    def _aside(self, uid: str) -> Iterator[None]:
        """Meanwhile the pod holds nothing: it is no obstacle to itself."""
        back = self._ledger.release(uid)
        try:
            yield
        finally:
            back()

    def _refused(self, uid: str) -> None:
        """No card has enough room for this pod: it waits for what only we may see."""
        if uid:
            self.waiting.refused(uid, self._clock())

    def _overdue(self, tentative: Tentative) -> bool:
        posted = tentative.stage in (Stage.UNSURE, Stage.BOUND)
        return posted and self._clock() - tentative.since > self.patience.confirm

    def _leave(self, uid: str, *, ended: bool) -> None:
        """The pod is over. What it held ends with its containers, not with its object."""
        pod = self._pods.pop(uid, None)
        tentative = self._tentative.get(uid)
        if tentative is not None and tentative.stage is Stage.BINDING:
            tentative.gone = True
        else:
            self._tentative.pop(uid, None)
        last = _of_pod(pod) if pod is not None else None
        if last is None and tentative is not None and tentative.stage in (Stage.UNSURE, Stage.BOUND):
            last = tentative.holding
        if ended:
            self._ghosts.pop(uid, None)
        elif last is not None:
            self._haunt(last)
        self._refresh(uid, seen=True)

    def _haunt(self, last: Holding) -> None:
        self._ghosts[last.uid] = Ghost(replace(last, mark="ghost"), self._clock() + self.patience.ghost)

    def _drop_tentative(self, uid: str) -> None:
        tentative = self._tentative.get(uid)
        if tentative is not None and tentative.stage is not Stage.BINDING:
            del self._tentative[uid]

    def _effective(self, uid: str) -> Holding | None:
        """What the pod holds, all told."""
        pod = self._pods.get(uid)
        if pod is not None:
            return _of_pod(pod)
        tentative = self._tentative.get(uid)
        if tentative is not None:
            return tentative.holding
        ghost = self._ghosts.get(uid)
        if uid in self._inventory.held():
            return self._inventory.reported(uid) if ghost is None else replace(ghost.holding, mark="held")
        return ghost.holding if ghost is not None else None

    def _refresh(self, uid: str, *, seen: bool = False) -> None:
        """Bring the ledger to what holds. `seen`: the scheduler sees the cause itself."""
        self._settle(uid, self._ledger.holding(uid), seen=seen)

    def _settle(self, uid: str, before: Holding | None, *, seen: bool) -> None:
        """As `_refresh`. `before`: what the pod has held so far, though the ledger may not have it any more."""
        now = self._effective(uid)
        if now is None:
            self._ledger.release(uid)
        elif now != self._ledger.holding(uid):
            self._ledger.hold(now)
        if now != before:
            self._changed.update(holding.node for holding in (before, now) if holding is not None)
        if before is not None and (now is None or (now.node, now.assignment) != (before.node, before.assignment)):
            self.waiting.freed(before.node, self._clock(), seen=seen)

    def _good(self, holding: Holding, request: PodRequest) -> bool:
        """Whether a plan still holds: its cards are there, take shares, are not over-full with it and of the class that
        was asked for; and no quota forbids it.
        """
        state = self._ledger.node(holding.node)
        if state is None:
            return False
        asked = {container.key: container.device_class for container in request.containers}
        for key, shares in holding.assignment.containers.items():
            for share in shares:
                p = state.position(share)
                if p is None or not state.cards[p].healthy or state.free[p] < 0:
                    return False
                if asked.get(key) and asked[key] not in state.cards[p].classes:
                    return False
        with self._aside(holding.uid):
            rooms = self._limits.rooms(self._ledger, holding.namespace)
            planned = Placement(node=holding.node, assignment=holding.assignment, score=0)
            return not placement.exceeded(self._ledger, planned, rooms)

    def _count_cards(self) -> None:
        """Tell the ledger of changed cards; late, because at the start they come one by one and by thousands."""
        for node, cards in self._inventory.changes():
            self._ledger.set_cards(node, cards)
            self._changed.add(node)
            self.waiting.freed(node, self._clock(), seen=False)


def _of_pod(pod: PodRecord) -> Holding:
    if pod.assignment is None:  # only pods with one are kept
        raise AssertionError(pod)
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, pod.assignment)


def _holding(uid: str, who: tuple[str, str], placed: Placement, stage: Stage) -> Holding:
    return Holding(uid, who[0], who[1], placed.node, placed.assignment, stage.value)
