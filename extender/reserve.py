"""The one gang that keeps cards from those who come after it, because it has waited long.

Apart from the gangs, who only ask which nodes are closed to whom. Nodes are kept as a whole where one of their cards
would do for a member; so a pod that could have another card of such a node waits as well. Not thread-safe.
"""

import time
from collections.abc import Callable, Collection, Iterable

from cardwise.core import gangplan
from cardwise.core.gangplan import Planned, Terms
from cardwise.core.gangs import Load, Member, Rank
from cardwise.core.gangstate import Gang
from cardwise.core.kinds import Kinds
from cardwise.core.ledger import Ledger
from cardwise.core.nodestate import NodeState
from cardwise.core.request import PodRequest
from extender.nodeload import NodeLoads

_LOOK_AGAIN = 30.0  # seconds between two looks at whether the gang could ever fit
_AT_ONCE = 0.01  # seconds of one part of such a look


class Reserve:
    """`offered`: what kube-scheduler has ever offered to the members of waiting gangs."""

    def __init__(self) -> None:
        self._gang: Gang | None = None
        self._offers: dict[str, dict[str, set[str]]] = {}  # by gang and shape
        self._last: dict[tuple[str, str], frozenset[str]] = {}
        self._looked: tuple[str, float, bool] = "", float("-inf"), False
        self._draft: _Draft | None = None

    def offered(self, key: str, shape: str, nodes: frozenset[str]) -> None:
        """The scheduler allows these nodes to members of the shape, at this moment."""
        if self._last.get((key, shape)) is not nodes:
            self._last[key, shape] = nodes
            self._offers.setdefault(key, {}).setdefault(shape, set()).update(nodes)

    def drop(self, key: str) -> None:
        """The gang is no more."""
        for shape in self._offers.pop(key, {}):
            del self._last[key, shape]
        if self._gang is not None and self._gang.key == key:
            self._gang = None

    def turn_to(self, gang: Gang | None, ledger: Ledger, loads: NodeLoads, policy: str, now: float) -> bool:
        """The first in order of those that have waited too long. Whether others may have what was kept from them."""
        if gang is not None and not self._could_fit(gang, ledger, loads, policy, now):
            gang = None
        before, self._gang = self._gang, gang
        return before is not None and before is not gang

    @property
    def gang(self) -> Gang | None:
        return self._gang

    def closed(self, ledger: Ledger, rank: Rank, request: PodRequest, nodes: Iterable[str]) -> set[str]:
        """The nodes among these that a pod with this place in the order must leave alone."""
        gang = self._gang
        if gang is None or rank <= gang.rank():
            return set()
        wants = [_Want(ledger.kinds, member, self._nodes(member)) for member in _by_shape(gang)]
        asked = _classes(request)
        by_name = ledger.by_name()
        return {
            name
            for name in nodes
            if (state := by_name.get(name)) is not None and any(want.meets(state, asked) for want in wants)
        }

    def against(self, ledger: Ledger, key: str, rank: Rank) -> Callable[[Member, str], bool] | None:
        """The same for the members of another gang, node by node; None where it is kept from nothing."""
        gang = self._gang
        if gang is None or gang.key == key or rank <= gang.rank():
            return None

        of_shape: dict[str, set[str]] = {}

        def closed(member: Member, node: str) -> bool:
            if member.request is None:
                return False
            if member.shape not in of_shape:
                of_shape[member.shape] = self.closed(ledger, rank, member.request, ledger.by_name())
            return node in of_shape[member.shape]

        return closed

    def _nodes(self, member: Member) -> Collection[str] | None:
        gang = self._gang
        return self._offers.get(gang.key, {}).get(member.shape) if gang is not None else None

    def _could_fit(self, gang: Gang, ledger: Ledger, loads: NodeLoads, policy: str, now: float) -> bool:
        """Whether it would if all that holds cards ended. What was known of it before holds until that is found out."""
        key, at, could = self._looked
        if key == gang.key and now - at < _LOOK_AGAIN:
            return could
        if self._draft is None or self._draft.key != gang.key:
            self._draft = _Draft(gang.key, ledger, loads)
        if not self._draft.go_on(gang, ledger):
            return could and key == gang.key
        offers = dict(self._offers.get(gang.key, {}))
        terms = Terms(namespace=gang.namespace, policy=policy, mark="reserve", offers=offers)
        could = isinstance(gangplan.plan(self._draft.empty, self._draft.free, gang.wanted(), terms), Planned)
        self._looked, self._draft = (gang.key, now, could), None
        return could


class _Draft:
    """The cluster without what holds cards but for one gang's, made a part at a time: filter waits for the lock."""

    def __init__(self, key: str, ledger: Ledger, loads: NodeLoads) -> None:
        self.key = key
        self.empty = Ledger(headroom=ledger.headroom, max_clients=ledger.max_clients)
        self.free = _Freed(loads)
        self._left = sorted(ledger.by_name(), reverse=True)

    def go_on(self, gang: Gang, ledger: Ledger) -> bool:
        """Whether it is done."""
        until = time.thread_time() + _AT_ONCE
        while self._left:
            state = ledger.node(self._left.pop())
            if state is not None:
                self._add(state, gang, ledger)
            if time.thread_time() > until:
                return not self._left
        return True

    def _add(self, state: NodeState, gang: Gang, ledger: Ledger) -> None:
        self.empty.set_cards(state.name, state.cards)
        self.empty.set_devices(state.name, state.devices)
        for holding in ledger.holdings(state.name):
            if holding.uid in gang.members:
                self.empty.hold(holding)
            else:
                self.free.give_back(state.name, holding.uid)
        made = self.empty.node(state.name)
        if made is not None:
            made.empties()  # remembered, so that the plan has it at once


class _Freed:
    """What nodes would have left without some of their pods."""

    def __init__(self, loads: NodeLoads) -> None:
        self._loads = loads
        self._more: dict[str, Load] = {}

    def give_back(self, node: str, uid: str) -> None:
        load = self._loads.of(uid)
        more = self._more.get(node, Load(0, 0, 0))
        self._more[node] = Load(more.cpu + load.cpu, more.memory + load.memory, more.pods + load.pods)

    def left(self, node: str) -> Load | None:
        left, more = self._loads.left(node), self._more.get(node)
        if left is None or more is None:
            return left
        return Load(left.cpu + more.cpu, left.memory + more.memory, left.pods + more.pods)

    def names(self) -> Collection[str]:
        return self._loads.names()


class _Want:
    """Which cards a member could use: of these kinds, of this size, on these nodes; None: any."""

    def __init__(self, kinds: Kinds, member: Member, nodes: Collection[str] | None) -> None:
        request = member.request
        self._nodes = nodes
        self._kinds = kinds
        self._classes = _classes(request) if request is not None else frozenset()
        self._mem = min((c.mem_per_card for c in request.containers), default=0) if request is not None else 0

    def meets(self, state: NodeState, asked: frozenset[str]) -> bool:
        """Whether the node has a card that could be wanted here and there."""
        if (self._nodes is not None and state.name not in self._nodes) or state.largest < self._mem:
            return False
        return any(self._among(state, ours) & self._among(state, theirs) for ours in self._classes for theirs in asked)

    def _among(self, state: NodeState, device_class: str) -> frozenset[int]:
        allowed = self._kinds.allowed(device_class)
        return state.here if allowed is None else state.here & allowed


def _classes(request: PodRequest) -> frozenset[str]:
    return frozenset(container.device_class for container in request.containers)


def _by_shape(gang: Gang) -> Collection[Member]:
    """One member of each shape that asks for cards."""
    return {member.shape: member for member in gang.wanted() if member.request is not None}.values()
