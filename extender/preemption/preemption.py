"""Preemption: which pods of a node must go for a pod, and the cards that are kept for it meanwhile.

Part of the state, whose lock it shares; the search for victims is in `cardwise.core.preemption`. kube-scheduler asks
only about nodes whose sums want victims. Pods for which there is room in the sums and on no card are remembered in
`fragmented`, for `evictions`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api import policies
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load
from cardwise.core.placement.ledger import Holding, Ledger
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.preemption import preemption
from cardwise.core.preemption.preemption import Full, Newcomer, Resident, Victims
from cardwise.kube.pods.budgets import Budget, Budgets
from extender.cache.nodeload import NodeLoads
from extender.cache.nominations import KEPT, Nominations, Place
from extender.cache.reservations import MARKS, Phase
from extender.cache.statelock import StateLock
from extender.cache.yielding import slices
from extender.gangs.gangs import Gangs
from extender.preemption.gangpreemption import GangPreemption
from extender.queue.fragmented import FragmentedPods
from extender.queue.turns import Turns
from extender.records.pod import Claimant
from extender.records.podref import PodRef

_SECONDS: Final = 0.5  # of looking at nodes for one call; kube-scheduler waits 1 s
_TOGETHER: Final = 8  # nodes looked at under one lock, where nobody waits for the answer
_LOWEST: Final = -(1 << 40)  # below all priorities
_NO_LOAD: Final = Load(0, 0, 0)


class Parts(NamedTuple):
    """The parts of the state. `gangs`: made after this, with what is kept here; `ready`: brings the ledger up to date;
    `headroom`: what quotas leave to a namespace, but for what one pod holds; `freed`: there may be room where there was
    none; `refused`: the pod waits for that; `policy`: of placement, for pods that name none.
    """

    ledger: Ledger
    loads: NodeLoads
    nominations: Nominations
    gangs: Callable[[], Gangs]
    ready: Callable[[], None]
    headroom: Callable[[str, str], Sequence[Headroom]]
    freed: Callable[[], None]
    refused: Callable[[str], None]
    policy: str = policies.DEFAULT


class _Nominated(NamedTuple):
    """What is kept for a nominated pod on a node, and what the pod takes there beside cards."""

    holding: Holding
    load: Load


@dataclass(frozen=True, slots=True)
class Eviction:
    """Who is to go for whom."""

    claimant: Claimant
    node: str
    victims: tuple[PodRef, ...]


class Preemption:
    """Methods may be called from any thread; those that say so want the lock to be held."""

    def __init__(self, lock: StateLock, parts: Parts, clock: Clock) -> None:
        self._lock = lock
        self._parts = parts
        self._clock = clock
        self._budgets = Budgets()
        self._nominations = parts.nominations
        self._fragmented = FragmentedPods()
        self._turns = Turns()
        self._together = GangPreemption(
            parts.ledger, parts.loads, parts.gangs, self._nominations, self.kept, self._look, clock
        )

    # What the API server tells.

    def set_budget(self, key: str, budget: Budget) -> None:
        """The PodDisruptionBudget, "namespace/name", is so now."""
        with self._lock:
            self._budgets.set(key, budget)

    def remove_budget(self, key: str) -> None:
        with self._lock:
            self._budgets.remove(key)

    def heard(self, claimant: Claimant, node: str) -> None:
        """The pod waits, and its status names this node, or "". Under the lock."""
        self._nominations.heard(claimant, node, self._clock.now())

    def turned_away(self, uid: str, priority: int | None) -> None:
        """The pod waits since no extender answered for it, or None: for another reason. Under the lock."""
        self._turns.heard(uid, priority)

    def nominated(self, uid: str) -> str:
        """The node where others go or have gone for the pod, or "". Under the lock."""
        return self._nominations.node(uid)

    def may_plan(self, priority: int) -> bool:
        """Whether a gang of this priority may be planned now. Under the lock."""
        return self._turns.has("", priority, self._clock.now())

    def over(self, uid: str) -> None:
        """The pod is bound, or is no more. Under the lock."""
        self._turns.drop(uid)
        self._fragmented.drop(uid)

    # What is kept.

    @contextmanager
    def kept(self, own: Collection[str], priority: int) -> Iterator[None]:
        """Meanwhile the ledger has what is kept from pods of this priority, but for their own. Under the lock."""
        if not len(self._nominations):
            yield
            return
        with self._parts.ledger.what_if(held=[one.holding for one in self._kept(own, priority)]):
            yield

    def forget(self) -> None:
        """Another extender decides from now on, or has until now. Under the lock."""
        self._fragmented.clear()

    def begin(self) -> None:
        """A term begins."""
        with self._lock:
            self._turns.begin(self._clock.now())

    def step(self) -> bool:
        """What time does; whether pods that had to wait may come again. Under the lock."""
        return self._turns.step(self._clock.now())

    # What kube-scheduler asks.

    def has_turn(self, uid: str, priority: int) -> bool:
        """Whether the pod may be placed now, or comes again once those before it have been here."""
        with self._lock:
            if self._turns.has(uid, priority, self._clock.now()):
                return True
            self._parts.refused(uid)
            return False

    def answer(
        self, claimant: Claimant, policy: str, chosen: Mapping[str, Collection[str]], *, member: bool
    ) -> dict[str, Victims]:
        """By node the victims whose going makes the pod fit; nodes without such are left out. What is answered is kept
        for the pod. `chosen`: kube-scheduler's own victims. `member`: of a gang that does not run yet, perhaps.
        """
        until = self._clock.now() + _SECONDS
        with self._lock:
            self._parts.ready()
            if self._waits(claimant, policy):
                return {}
            own = self._together.unhelped(claimant.uid) if member else []
        found: dict[str, Victims] = {}
        for node in sorted(chosen):
            if self._clock.now() > until:
                break
            with self._lock:  # for one node at a time: filter must not wait for all of them
                victims = self._look(claimant, policy, node, chosen[node], own=own)
                if victims is not None:
                    found[node] = victims
        with self._lock:
            if member and self._together.concerns(claimant.uid):
                return self._for_gang(claimant, policy, found, until)
            return self._answered(claimant, found)

    def are_on(self, node: str, uids: Collection[str]) -> bool:
        """Whether all these pods are on the node: kube-scheduler takes no others in its answer."""
        with self._lock:
            there = {placed.occupant.uid for _, placed in self._parts.loads.on(node) if placed.occupant is not None}
        return there.issuperset(uids)

    # Pods that only cards keep waiting.

    def refused(self, claimant: Claimant, policy: str, nodes: Collection[str]) -> None:
        """The pod may preempt, and no card of these nodes would do, though the sums of the nodes would."""
        with self._lock:
            self._fragmented.refused(claimant, policy, nodes, self._clock.now())

    def next_eviction(self) -> Eviction | None:
        """The next that is due, at most one; its cards are kept from now on. Nobody goes whom a disruption budget
        protects.
        """
        with self._lock:
            due = self._fragmented.due(self._clock.now(), self._is_helped)
        if due is None:
            return None
        found: list[tuple[tuple[object, ...], str]] = []
        for nodes in slices(due.nodes, _TOGETHER, self._clock):
            with self._lock:
                self._parts.ready()
                for node in nodes:
                    victims = self._look(due.claimant, due.policy, node, ())
                    if victims is None or victims.violations:
                        continue
                    if not victims.uids:
                        return None  # it only has to wait
                    found.append((victims.harm, node))
        found.sort()
        with self._lock:
            self._parts.ready()
            # Much may have happened since the first of them was looked at.
            if due.claimant.uid not in self._fragmented or self._is_helped(due.claimant.uid):
                return None
            for _, node in found[:_TOGETHER]:
                victims = self._look(due.claimant, due.policy, node, ())
                if victims is not None and not victims.violations:
                    return self._decided(due.claimant, node, victims) if victims.uids else None
            return None

    def wanted(self, claimant: Claimant, victim: str) -> bool:
        """Whether the victim is still to go for the pod."""
        with self._lock:
            nomination = self._nominations.get(claimant.uid)
            placed = self._parts.loads.get(victim)
            going = placed is not None and placed.occupant is not None and placed.occupant.going
            return nomination is not None and not going

    def given_up(self, claimant: Claimant) -> None:
        """Nobody was evicted for the pod: nothing is kept for it."""
        with self._lock:
            self._nominations.drop(claimant.uid)
            self._parts.freed()

    # Everything below runs under the lock.

    def _decided(self, claimant: Claimant, node: str, victims: Victims) -> Eviction:
        self._nominations.decided(claimant, node, Place(victims.assignment, victims.uids), self._clock.now())
        there = {one.uid: one for _, placed in self._parts.loads.on(node) if (one := placed.occupant) is not None}
        return Eviction(claimant, node, tuple(there[uid].ref for uid in victims.uids))

    def _is_helped(self, uid: str) -> bool:
        return self._nominations.get(uid) is not None or self._parts.ledger.holding(uid) is not None

    def _kept(self, own: Collection[str], priority: int, on: str = "") -> list[_Nominated]:
        """What is kept from pods of this priority, but for their own: everywhere, or on this node."""
        ledger = self._parts.ledger
        found = []
        for claimant, node, place in list(self._nominations.before(own, priority)):
            if on not in ("", node) or ledger.holding(claimant.uid) is not None:
                continue  # what it was given counts by itself
            assignment = place.assignment
            if assignment is None:
                # Somebody else has answered: what it would get when those that are going have gone.
                victims = self._look(claimant, claimant.request.policy or self._parts.policy, node, (), nobody=True)
                assignment = victims.assignment if victims is not None else None
                if assignment is None:
                    continue
                self._nominations.settle(claimant.uid, node, assignment)
            # Of no namespace: no quota counts it before it is bound.
            mps_client = claimant.request.mps_client
            holding = Holding(f"{claimant.uid}@{node}", "", claimant.ref.name, node, assignment, KEPT, mps_client)
            found.append(_Nominated(holding, claimant.load))
        return found

    def _waits(self, claimant: Claimant, policy: str) -> bool:
        """Whether somebody goes for the pod already, and that is enough."""
        nomination = self._nominations.get(claimant.uid)
        if nomination is None or not nomination.told:
            return False
        return any(
            self._look(claimant, policy, node, (), nobody=True, gone=place.victims) is not None
            for node, place in nomination.places.items()
        )

    def _look(
        self,
        claimant: Claimant,
        policy: str,
        node: str,
        chosen: Collection[str],
        *,
        nobody: bool = False,
        gone: Collection[str] = (),
        own: Collection[str] = (),
    ) -> Victims | None:
        """The victims on the node. `nobody`: none may be evicted; `gone`: these go whatever is chosen; `own`: pods of
        which nothing is kept from this one.
        """
        left, request = self._parts.loads.left(node), claimant.request
        if left is None:
            return None
        # Asked for while what is kept is found out, it would go round in a circle.
        kept = [] if nobody else self._kept({claimant.uid, *own}, request.priority, node)
        going = {*gone, *self._nominations.victims(node, claimant.uid)}
        residents = [*self._residents(node, claimant.uid, going), *(_resident(one.holding, going) for one in kept)]
        full = Full(
            node=self._as_it_would_be(node, claimant.uid, kept),
            left=reduce(lambda less, one: less.plus(one.load, -1), kept, left),
            residents=residents,
            allowed=self._budgets.allowed({budget for resident in residents for budget in resident.budgets}),
        )
        newcomer = Newcomer(
            request=request,
            load=claimant.load,
            priority=_LOWEST if nobody else request.priority,
            policy=policy,
            headroom=self._parts.headroom(claimant.ref.namespace, claimant.uid),
        )
        return preemption.best(full, newcomer, chosen)

    def _as_it_would_be(self, node: str, uid: str, kept: Iterable[_Nominated]) -> NodeState | None:
        """The node with what is kept there, and without what the pod holds itself: a copy."""
        known = self._parts.ledger.node(node)
        if known is None:
            return None
        state, own = known.copy(), self._parts.ledger.holding(uid)
        if own is not None and own.node == node:
            state.add(own.assignment, own.mps_client, -1)
        for one in kept:
            state.add(one.holding.assignment, one.holding.mps_client, 1)
        return state

    def _residents(self, node: str, but: str, gone: Collection[str]) -> list[Resident]:
        """Everybody on the node, except for this pod."""
        ledger, loads = self._parts.ledger, self._parts.loads
        residents, seen = [], {but}
        for key, placed in loads.on(node):
            one = placed.occupant
            uid = one.uid if one is not None else key
            holding = ledger.holding(uid) if uid not in seen else None
            seen.add(uid)
            if holding is not None and holding.node != node:
                holding = None
            if one is None:
                residents.append(Resident(uid, 0, placed.load, holding, fixed=True))
                continue
            budgets = self._budgets.matching(one.namespace, one.labels)
            going = one.going or uid in gone
            residents.append(Resident(uid, one.priority, placed.load, holding, budgets, going, one.fixed, one.grouped))
        residents += [_resident(holding, gone) for holding in ledger.holdings(node) if holding.uid not in seen]
        return residents

    def _for_gang(
        self, claimant: Claimant, policy: str, found: Mapping[str, Victims], until: float
    ) -> dict[str, Victims]:
        together = self._together.answer(claimant, policy, found, lambda: self._clock.now() <= until)
        if together is None:
            return {}
        victims = together.victims
        place = Place(victims.assignment, victims.uids, together.rest)
        self._nominations.answered(claimant, {together.node: place}, self._clock.now())
        return {together.node: victims}

    def _answered(self, claimant: Claimant, found: dict[str, Victims]) -> dict[str, Victims]:
        if any(not victims.uids for victims in found.values()):
            # Somewhere it only has to wait, so nobody else goes: the node is named by those that go already.
            found = {
                node: Victims(uids=going, highest=_LOWEST, assignment=victims.assignment)
                for node, victims in found.items()
                if not victims.uids and (going := self._going(node, claimant.request.priority))
            }
        places = {node: Place(victims.assignment, victims.uids) for node, victims in found.items()}
        self._nominations.answered(claimant, places, self._clock.now())
        return found

    def _going(self, node: str, priority: int) -> tuple[str, ...]:
        occupants = (placed.occupant for _, placed in self._parts.loads.on(node))
        return tuple(one.uid for one in occupants if one is not None and one.going and one.priority < priority)


def _resident(holding: Holding, gone: Collection[str]) -> Resident:
    """A plan, or what a vanished pod had: it is no pod that could be evicted."""
    going = holding.mark == MARKS[Phase.TERMINATING] or holding.uid in gone
    return Resident(holding.uid, 0, _NO_LOAD, holding, going=going, fixed=True)
