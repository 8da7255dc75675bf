"""The reserve: nodes that are kept for one gang that has waited long, from pods that come after it.

Nodes are kept only if the whole gang fits there once the pods that hold cards there have ended, by everything that
decides at placement: its namespace's quotas as they are used now, SMs, clients, MPS, and the nodes that kube-scheduler
has offered. As few nodes as possible are kept, the emptiest, and no more than have the cards that the gang asks for.

The gangs of one namespace together keep nodes for `GangPatience.keep` seconds at most, and then none for as long. So it
does not help to delete a gang and make it again. For a gang that fits nowhere, whatever ends, nothing is kept, and
its PodGroup says so. A node is kept whole even if one of its cards would do, so a pod that could have another card
there waits as well. Not thread-safe.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.capacity import Capacities, MemberShape, Vacant, shapes
from cardwise.core.gangs.gangplan import Draft, Planned, Terms, TurnOver, Unplanned
from cardwise.core.gangs.gangs import Member, Rank
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement.kinds import CardKinds
from cardwise.core.placement.nodestate import NodeState
from extender.cache.cache import Cache
from extender.cache.nodeload import NodeLoads
from extender.cache.yielding import TURN

_LOOK_AGAIN = 30.0  # seconds between two looks at whether the gang could fit


def no_place(member: Member) -> str:
    """The text that says for which member a plan failed."""
    return f"there is no place for {member.name} beside the others"


class Reserve:
    """Nodes are kept for at most one gang: the first in order of those that have waited too long and could fit."""

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._gang: Gang | None = None
        self._nodes: frozenset[str] = frozenset()  # as the last turn has chosen them
        self._since = 0.0
        self._now = 0.0  # of the last turn
        self._offers: dict[str, dict[str, frozenset[str]]] = {}  # by gang and shape, all nodes that were ever offered
        self._looked: dict[str, _Look] = {}  # by gang
        self._rests: dict[str, float] = {}  # until when, by namespace
        self._kept: dict[str, _Kept] = {}  # by namespace
        self._draft: _Draft | None = None  # of the look that the next turn goes on with

    def offered(self, key: str, shape: str, nodes: frozenset[str]) -> None:
        """kube-scheduler offers these nodes for members of the shape. Equal offers should be one object: they may be
        thousands of nodes, and are kept for each shape.
        """
        offers = self._offers.setdefault(key, {})
        before = offers.get(shape, nodes)
        offers[shape] = before if before is nodes or nodes <= before else before | nodes

    def drop(self, key: str) -> None:
        """The gang is no more, or runs."""
        self._offers.pop(key, None)
        self._looked.pop(key, None)
        if self._gang is not None and self._gang.key == key:
            self._end()

    def forget(self) -> None:
        """A term is over, or begins: what was seen of the cluster may be old."""
        self._looked.clear()
        self._draft = None

    def turn_to(self, due: Sequence[Gang], policy: str, now: float) -> bool:
        """Chooses the gang for which nodes are kept from now on. `due`: the gangs that have waited too long, in order.
        Returns whether some nodes are not kept any more.
        """
        kept = self._nodes
        self._now = now
        self._rests = {namespace: until for namespace, until in self._rests.items() if until > now}
        self._kept = {namespace: each for namespace, each in self._kept.items() if each.until > now}
        if self._gang is not None and now - self._since >= self._gang.patience.keep:
            namespace, rest = self._gang.namespace, now + self._gang.patience.keep
            self._end()
            self._kept.pop(namespace, None)
            self._rests[namespace] = rest
        first, nodes = self._first(due, policy, now)
        if first is None:
            self._end()
        elif self._gang is not first:
            self._end()
            before = self._kept.get(first.namespace)
            self._gang, self._since = first, now - (before.seconds if before is not None else 0.0)
        self._nodes = nodes
        return not kept <= nodes

    def hopeless(self, gang: Gang) -> str:
        """Why the gang, as it is, cannot run whatever else ends; or ""."""
        look = self._looked.get(gang.key)
        return look.problem if look is not None and look.changes == gang.changes else ""

    @property
    def half_planned(self) -> bool:
        """Whether the last turn has ended within the plan of a big gang."""
        return self._draft is not None and self._draft.half_planned

    @property
    def gang(self) -> Gang | None:
        return self._gang

    def closed(self, rank: Rank, request: PodRequest, nodes: Iterable[str]) -> set[str]:
        """Those of the nodes that are kept from a pod of this rank."""
        gang = self._gang
        if gang is None or rank <= gang.rank():
            return set()
        ledger = self._cache.ledger
        wants = [_Want(ledger.kinds, member, self._offered_to(member)) for member in _by_shape(gang)]
        asked = _classes(request)
        by_name = ledger.by_name()
        return {
            name
            for name in self._nodes.intersection(nodes)
            if (state := by_name.get(name)) is not None and any(want.meets(state, asked) for want in wants)
        }

    def against(self, key: str, rank: Rank) -> Callable[[Member, str], bool] | None:
        """A function that says whether a node is kept from a member of another gang; None: none is."""
        gang = self._gang
        if gang is None or gang.key == key or rank <= gang.rank():
            return None

        ledger, of_shape = self._cache.ledger, dict[str, set[str]]()

        def closed(member: Member, node: str) -> bool:
            if member.request is None:
                return False
            if member.shape not in of_shape:
                of_shape[member.shape] = self.closed(rank, member.request, ledger.by_name())
            return node in of_shape[member.shape]

        return closed

    def _offered_to(self, member: Member) -> Collection[str] | None:
        gang = self._gang
        return self._offers.get(gang.key, {}).get(member.shape) if gang is not None else None

    def _end(self) -> None:
        if self._gang is not None:
            # The time counts for the next gang of the namespace as well, unless none keeps nodes for as long.
            self._kept[self._gang.namespace] = _Kept(self._now - self._since, self._now + self._gang.patience.keep)
        self._gang = None

    def _first(self, due: Sequence[Gang], policy: str, now: float) -> tuple[Gang | None, frozenset[str]]:
        """The first gang that could fit, and its nodes. A call looks at one gang; the next call goes on with the same.
        Until that look is done its former result counts, and gangs after it may be chosen. A look that no call goes on
        with ends: the cluster changes.
        """
        looking, first, nodes = False, None, frozenset[str]()
        for gang in due:
            if now < self._rests.get(gang.namespace, now):
                continue
            look = self._looked.get(gang.key)
            if not looking and (look is None or now - look.at >= _LOOK_AGAIN):
                found = self._look(gang, policy, now)
                looking = found is None
                look = found or look
            if look is not None and look.nodes:
                first, nodes = gang, look.nodes
                break
        if not looking:
            self._draft = None
        return first, nodes

    def _look(self, gang: Gang, policy: str, now: float) -> "_Look | None":
        """The nodes that would do if all pods that hold cards there ended; None: the next call goes on with it."""
        if self._draft is None or self._draft.key != gang.key:
            self._draft = _Draft(gang.key, self._cache, self._clock)
        if not self._draft.go_on(gang):
            return None
        headroom = self._cache.headroom(gang.namespace)
        found = self._draft.nodes_for(gang, self._offers.get(gang.key, {}), headroom, policy)
        if found is None:
            return None
        if isinstance(found, Unplanned):
            problem = f"it cannot run whatever else ends: {no_place(found.member)}"
            look = _Look(now, gang.changes, frozenset(), problem)
            gang.reason = problem
        else:
            look = _Look(now, gang.changes, found, "")
        self._looked[gang.key] = look
        return look


class _Kept(NamedTuple):
    """For how many seconds nodes were kept for a namespace, and until when that counts."""

    seconds: float
    until: float


class _Look(NamedTuple):
    """The result of a look at a gang: the nodes that it could have, or why there are none. `changes`: the gang's count
    of its changes then.
    """

    at: float
    changes: int
    nodes: frozenset[str]
    problem: str


class _Draft:
    """A copy of the cluster where only one gang's pods hold cards. Made in parts, since filter waits for the lock."""

    def __init__(self, key: str, cache: Cache, clock: Clock) -> None:
        self.key = key
        self._ledger = cache.ledger
        self._clock = clock
        self._empty = cache.ledger.like()
        self._free = _Freed(cache.loads)
        self._busy: dict[str, int] = {}  # MiB that others hold, by node
        self._left = sorted(cache.ledger.by_name(), reverse=True)
        self._capacities: Capacities | None = None
        self._names: list[str] = []  # the emptiest first
        self._count = 1  # how many of them were tried last
        self._growing: Draft | None = None  # the plan on these, if it takes several turns

    @property
    def half_planned(self) -> bool:
        return self._growing is not None

    def go_on(self, gang: Gang) -> bool:
        """Copies a part of the nodes. Returns whether all are copied."""
        until = self._clock.cpu() + TURN
        while self._left:
            state = self._ledger.node(self._left.pop())
            if state is not None:
                self._add(state, gang)
            if self._clock.cpu() > until:
                return not self._left
        return True

    def _add(self, state: NodeState, gang: Gang) -> None:
        self._empty.set_cards(state.name, state.cards)
        self._empty.set_devices(state.name, state.devices)
        for holding in self._ledger.holdings(state.name):
            if holding.uid in gang.members:
                self._empty.hold(holding)
            else:
                if holding.node == state.name:
                    self._free.give_back(state.name, holding.uid)
                held = sum(share.mem for share in holding.assignment.shares())
                self._busy[state.name] = self._busy.get(state.name, 0) + held
        made = self._empty.node(state.name)
        if made is not None:
            made.empties()  # the result is remembered, so the plan has it at once

    def nodes_for(
        self, gang: Gang, offers: Mapping[str, Collection[str]], headroom: Sequence[Headroom], policy: str
    ) -> frozenset[str] | Unplanned | None:
        """The emptiest nodes on which the gang fits, at most twice as many as needed; or the member without a place on
        all nodes. None: the next call goes on.
        """
        until = self._clock.cpu() + TURN
        if self._capacities is None:
            self._capacities = Capacities(self._empty, self._free)
            self._names = sorted(self._free.names(), key=lambda name: (self._busy.get(name, 0), name))
        for shape, members in shapes(gang.wanted()).items():
            most, complete = self._capacities.most(shape)
            if not complete:
                return None
            if most < len(members):
                return Unplanned(member=members[-1])
        while True:
            draft, self._growing = self._growing or Draft(self._clock.cpu, TURN), None
            draft.begin()
            try:
                found = self._plan(gang, offers, headroom, policy, draft)
            except TurnOver:
                self._growing = draft
                return None
            if isinstance(found, Planned):
                return self._no_more(gang, sorted(set(found.nodes.values()), key=self._names.index))
            if self._count >= len(self._names):
                return found
            self._count *= 2
            if self._clock.cpu() > until:
                return None

    def _no_more(self, gang: Gang, nodes: Sequence[str]) -> frozenset[str]:
        """The first of the nodes, until they have as many cards as the gang asks for. Else a gang that takes one card
        on each of many nodes would keep all cards of these nodes from others.
        """
        asked = sum(c.cards for member in gang.wanted() if member.request for c in member.request.containers)
        kept: set[str] = set()
        for name in nodes:
            if kept and asked <= 0:
                break
            kept.add(name)
            state = self._empty.node(name)
            asked -= len(state.cards) if state is not None else 0
        return frozenset(kept)

    def _plan(
        self,
        gang: Gang,
        offers: Mapping[str, Collection[str]],
        headroom: Sequence[Headroom],
        policy: str,
        draft: Draft,
    ) -> Planned | Unplanned:
        among, wanted = frozenset(self._names[: self._count]), gang.wanted()
        offers = {each.shape: among.intersection(offers.get(each.shape, among)) for each in wanted}
        terms = Terms(policy=policy, headroom=headroom, offers=offers, vacant=self._vacant, draft=draft)
        return gangplan.plan(self._empty, self._free, wanted, terms)

    def _vacant(self, request: PodRequest, load: Load) -> Vacant | None:
        if self._capacities is None:
            return None
        shape = MemberShape(request, load)
        return self._capacities.nodes(shape) if self._capacities.most(shape)[1] else None


class _Freed:
    """What nodes would have left of cpu and memory without some of their pods."""

    def __init__(self, loads: NodeLoads) -> None:
        self._loads = loads
        self._more: dict[str, Load] = {}

    def give_back(self, node: str, uid: str) -> None:
        self._more[node] = self._more.get(node, Load(0, 0, 0)).plus(self._loads.of(uid))

    def left(self, node: str) -> Load | None:
        left, more = self._loads.left(node), self._more.get(node)
        return left if left is None or more is None else left.plus(more)

    def names(self) -> Collection[str]:
        return self._loads.names()

    def watch(self) -> set[str]:
        return set()  # it is made once, and does not change


class _Want:
    """The cards that a member could use: of these kinds, of this size, on these nodes (None: any)."""

    def __init__(self, kinds: CardKinds, member: Member, nodes: Collection[str] | None) -> None:
        request = member.request
        self._nodes = nodes
        self._kinds = kinds
        self._classes = _classes(request) if request is not None else frozenset()
        self._mem = min((c.mem_per_card for c in request.containers), default=0) if request is not None else 0

    def meets(self, state: NodeState, asked: frozenset[str]) -> bool:
        """Whether the node has a card that the member and a pod that asks for these classes could both use."""
        if (self._nodes is not None and state.name not in self._nodes) or state.largest < self._mem:
            return False
        return any(self._among(state, ours) & self._among(state, theirs) for ours in self._classes for theirs in asked)

    def _among(self, state: NodeState, resource_class: str) -> frozenset[int]:
        allowed = self._kinds.allowed(resource_class)
        return state.here if allowed is None else state.here & allowed


def _classes(request: PodRequest) -> frozenset[str]:
    return frozenset(container.resource_class for container in request.containers)


def _by_shape(gang: Gang) -> Collection[Member]:
    """One member of each shape that asks for cards."""
    return {member.shape: member for member in gang.wanted() if member.request is not None}.values()
