"""Who holds what on which card: a cache of the pods' annotations, never a second truth.

Kept in flat lists per node so that placement answers from it in microseconds. Not thread-safe: its owner locks.
Holdings survive what happens to cards: when the cards of a node become known, change or go, the node's lists are
counted anew from its holdings, so the order of events does not matter. The same holds for what a namespace holds on
each kind of card, which quotas are compared with: a card that goes keeps its kind there while something is held on it,
because its node or its ExtendedResource may be away for a moment while what runs on it runs on.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cardwise.core import quotas
from cardwise.core.assignment import Assignment, CardShare
from cardwise.core.cardindex import CardIndex, Entry
from cardwise.core.cards import FULL_CORE, POSITION, Card, card_code
from cardwise.core.kinds import UNKNOWN, Kind, Kinds
from cardwise.core.quantity import MiB
from cardwise.core.quotas import NOTHING, Charge

Undo = Callable[[], None]
Gone = Mapping[tuple[str, str | int], Kind]  # by node and `_card_of`: what cards were that the node has no more

_CODE = "q"  # the type code of `card_code`s in arrays
MAX_CLIENTS = 48  # MPS clients per card before driver 590, see mps.md 1.1


@dataclass(frozen=True, slots=True)
class Holding:
    """What one pod holds. `mark` says why when no bound pod stands behind it (a plan, a dying pod)."""

    uid: str
    namespace: str
    name: str
    node: str
    assignment: Assignment
    mark: str = ""


class NodeState:
    """Cards of one node and what is left on each; index i of every list is the same card."""

    __slots__ = (
        "_ascending",
        "_empties",
        "cards",
        "clients",
        "free",
        "free_core",
        "gone",
        "headroom",
        "healthy",
        "here",
        "kinds",
        "largest",
        "max_clients",
        "name",
        "registry",
        "uids",
        "used",
    )

    def __init__(self, name: str, registry: Kinds, *, headroom: MiB, max_clients: int) -> None:
        self.name = name
        self.registry = registry
        self.headroom = headroom
        self.max_clients = max_clients
        self.cards: list[Card] = []
        self.kinds: list[int] = []  # as `registry` knows them
        self.here: frozenset[int] = frozenset()  # the same, each once
        self.gone: dict[str | int, int] = {}  # by `_card_of`, the kinds of held cards that the node has no more
        self.largest = 0  # MiB of the biggest card, without the headroom
        self.healthy = 0  # cards
        self.free: list[int] = []  # MiB; below zero where a card has shrunk under its shares
        self.free_core: list[int] = []  # percent
        self.clients: list[int] = []
        self.used: list[int] = []  # MiB
        self.uids: set[str] = set()
        # Packed: filter reads those of thousands of nodes, and lists of integers would miss the CPU cache each time.
        self._ascending: array[int] | None = None
        self._empties: array[int] | None = None

    def open(self, i: int, shares: int = 1) -> bool:
        """Whether the card takes so many more shares at all."""
        return self.cards[i].healthy and self.clients[i] + shares <= self.max_clients

    def empty(self, i: int) -> bool:
        """Whether the card can be given away whole."""
        return self.cards[i].healthy and self.clients[i] == 0

    def ascending(self) -> Sequence[int]:
        """Open cards as `card_code`s, the fullest first."""
        codes = self._ascending
        if codes is None:
            free = self.free
            codes = array(_CODE, sorted(card_code(free[i], i) for i in range(len(free)) if self.open(i)))
            self._ascending = codes
        return codes

    def empties(self) -> Sequence[int]:
        """As `ascending`, of the cards that can be given away whole."""
        codes = self._empties
        if codes is None:
            clients = self.clients
            one = card_code(1)
            ascending = self.ascending()
            codes = array(_CODE, [c for c in ascending if c >= one and not clients[c & ~(-1 << POSITION)]])
            self._empties = codes
        return codes

    def position(self, share: CardShare) -> int | None:
        """Where the share's card is in the lists; None where the node has it no more."""
        for i, card in enumerate(self.cards):
            if card.uuid == share.uuid or (not share.uuid and card.index == share.index):
                return i
        return None

    def kind(self, share: CardShare) -> int:
        """The kind of the share's card, or what it was when the node had it."""
        i = self.position(share)
        return self.kinds[i] if i is not None else self.gone.get(_card_of(share), UNKNOWN)

    def count(self, share: CardShare, sign: int) -> int:
        """Add (sign 1) or take away (sign -1) a share. Returns `kind`."""
        i = self.position(share)
        if i is not None:
            self.free[i] -= sign * share.mem
            self.used[i] += sign * share.mem
            self.free_core[i] -= sign * share.core
            self.clients[i] += sign
        self._ascending = self._empties = None
        return self.kinds[i] if i is not None else self.gone.get(_card_of(share), UNKNOWN)

    def copy(self) -> "NodeState":
        """With counts of its own."""
        twin = NodeState(self.name, self.registry, headroom=self.headroom, max_clients=self.max_clients)
        twin.cards, twin.largest, twin.healthy = self.cards, self.largest, self.healthy
        twin.kinds, twin.here, twin.gone = self.kinds, self.here, self.gone
        twin.free, twin.used = self.free.copy(), self.used.copy()
        twin.free_core, twin.clients = self.free_core.copy(), self.clients.copy()
        twin.uids = self.uids.copy()
        return twin

    def reset(self, cards: Sequence[Card], held: Iterable[CardShare]) -> None:
        """Begin anew with these cards and no shares. Of cards that went, those of `held` keep their kinds."""
        before = [*self.kinds, *self.gone.values()]
        kinds = [(share, self.kind(share)) for share in held]
        self.cards = sorted(cards, key=lambda card: card.index)
        self.kinds = [self.registry.enter(card) for card in self.cards]
        self.here = frozenset(self.kinds)
        self.gone = {}
        for share, kind in kinds:
            if kind != UNKNOWN:
                self.remember(share, self.registry.get(kind))
        for kind in before:  # after the others have come, so that a kind that stays is not forgotten
            self.registry.leave(kind)
        self.largest = max((card.mem for card in cards), default=0) - self.headroom
        self.healthy = sum(card.healthy for card in cards)
        self.free = [card.mem - self.headroom for card in self.cards]
        self.used = [0] * len(self.cards)
        self.free_core = [int(FULL_CORE)] * len(self.cards)
        self.clients = [0] * len(self.cards)
        self._ascending = self._empties = None

    def remember(self, share: CardShare, kind: Kind) -> None:
        """The share's card is of this kind, if the node does not have it and nothing is known of it."""
        card = _card_of(share)
        if card not in self.gone and self.position(share) is None:
            self.gone[card] = self.registry.enter(kind)

    def forget(self, card: str | int) -> None:
        """Nothing is held any more on a card that is gone."""
        self.registry.leave(self.gone.pop(card))


class Ledger:
    """All nodes and all holdings.

    `headroom` is MiB kept back on each card for driver, contexts and MPS server; `max_clients` bounds the shares on
    one card.
    """

    def __init__(self, *, headroom: MiB = MiB(0), max_clients: int = MAX_CLIENTS) -> None:
        self.kinds = Kinds()
        self._index = CardIndex()
        self._touched: set[str] = set()  # nodes that the index does not know as they are now
        self.headroom = headroom
        self._max_clients = max_clients
        self._nodes: dict[str, NodeState] = {}
        self._holdings: dict[str, Holding] = {}
        self._usage: dict[str, dict[int, Charge]] = {}  # by namespace and kind

    def node(self, name: str) -> NodeState | None:
        """A node that has cards, or holdings on cards yet unknown."""
        return self._nodes.get(name)

    def by_name(self) -> Mapping[str, NodeState]:
        """As `node`, for those who ask for thousands. Not to be kept."""
        return self._nodes

    def nodes(self) -> Iterator[NodeState]:
        """All nodes in the order of their names."""
        return iter(sorted(self._nodes.values(), key=lambda node: node.name))

    def holding(self, uid: str) -> Holding | None:
        """What the pod with this UID holds."""
        return self._holdings.get(uid)

    def index(self) -> CardIndex:
        """All open cards in the order of their free memory, as of now."""
        if self._touched:
            self._index.refresh((name, self._open_cards(name)) for name in self._touched)
            self._touched.clear()
        return self._index

    def holdings(self, node: str | None = None) -> list[Holding]:
        """All holdings, or those on one node."""
        if node is None:
            return list(self._holdings.values())
        state = self._nodes.get(node)
        return [self._holdings[uid] for uid in sorted(state.uids)] if state else []

    def namespaces(self) -> Iterable[str]:
        """Those that hold something. Not to be kept."""
        return self._usage

    def usage(self, namespace: str) -> Mapping[int, Charge]:
        """What the namespace holds on cards of each kind, see `kind`. Not to be kept."""
        return self._usage.get(namespace, {})

    def kind(self, node: str, share: CardShare) -> int:
        """The kind that quotas count a share on the node by: its card's, or what that was before the card went.

        `UNKNOWN` where the card was never seen since something is held on it.
        """
        state = self._nodes.get(node)
        return state.kind(share) if state is not None else UNKNOWN

    def used(self, namespace: str, entry: quotas.Entry) -> Charge:
        """What the namespace holds on the cards that the entry of a quota covers."""
        of_kinds = self.usage(namespace).items()
        return quotas.total(charge for kind, charge in of_kinds if self.kinds.covered(kind, entry))

    def __len__(self) -> int:
        return len(self._holdings)

    def set_cards(self, node: str, cards: Iterable[Card]) -> None:
        """The node has these cards now, and no others. An empty node without holdings is forgotten."""
        cards = list(cards)
        state = self._state(node)
        if state.cards == sorted(cards, key=lambda card: card.index):
            self._forget_if_empty(state)
            return
        self._touched.add(node)
        for uid in state.uids:
            self._count(state, self._holdings[uid], -1)
        state.reset(cards, [share for uid in state.uids for share in self._holdings[uid].assignment.shares()])
        for uid in state.uids:
            self._count(state, self._holdings[uid], 1)
        self._forget_if_empty(state)

    def hold(self, holding: Holding) -> Undo:
        """Put the holding in place of whatever its pod held. Returns the way back."""
        before = self._holdings.get(holding.uid)
        gone: Gone = {}
        if before is not None and _counts_alike(before, holding):
            self._holdings[holding.uid] = holding  # only the mark or the name is new: nothing to count
        else:
            if before is not None:
                gone = self._take_out(before)
            self._put_in(holding, gone)
        return self._undo_to(holding.uid, before, gone)

    def release(self, uid: str) -> Undo:
        """The pod holds nothing any more. Returns the way back."""
        before = self._holdings.get(uid)
        gone = self._take_out(before) if before is not None else {}
        return self._undo_to(uid, before, gone)

    def violations(self) -> list[str]:
        """What rule 1 forbids, for tests and the audit: cards that hold more than they have."""
        found = []
        for state in self.nodes():
            for i, card in enumerate(state.cards):
                if state.used[i] > card.mem:
                    found.append(f"{state.name} card {card.index}: {state.used[i]} of {card.mem} MiB are held")
        return found

    def _undo_to(self, uid: str, before: Holding | None, gone: Gone) -> Undo:
        def undo() -> None:
            now = self._holdings.get(uid)
            since = self._take_out(now) if now is not None else {}
            if before is not None:
                self._put_in(before, {**gone, **since})

        return undo

    def _open_cards(self, name: str) -> list[Entry]:
        state = self._nodes.get(name)
        codes = state.ascending() if state is not None else ()
        kinds = state.kinds if state is not None else ()
        return [(code >> POSITION, name, i := code & ~(-1 << POSITION), kinds[i]) for code in codes]

    def _state(self, name: str) -> NodeState:
        state = self._nodes.get(name)
        if state is None:
            state = NodeState(name, self.kinds, headroom=self.headroom, max_clients=self._max_clients)
            self._nodes[name] = state
        return state

    def _put_in(self, holding: Holding, gone: Gone) -> None:
        """`gone`: what is known of cards that are gone from what the pod held before."""
        state = self._state(holding.node)
        self._holdings[holding.uid] = holding
        state.uids.add(holding.uid)
        self._touched.add(holding.node)
        for share in holding.assignment.shares() if gone else ():
            kind = gone.get((holding.node, _card_of(share)))
            if kind is not None:
                state.remember(share, kind)
        self._count(state, holding, 1)

    def _take_out(self, holding: Holding) -> Gone:
        """Returns what was known of the holding's cards that are gone: with the last holding on one it is forgotten."""
        state = self._nodes[holding.node]
        del self._holdings[holding.uid]
        state.uids.discard(holding.uid)
        self._touched.add(holding.node)
        self._count(state, holding, -1)
        gone = self._forget_gone(state, holding) if state.gone else {}
        self._forget_if_empty(state)
        return gone

    def _forget_gone(self, state: NodeState, holding: Holding) -> Gone:
        cards = {_card_of(share) for share in holding.assignment.shares()} & state.gone.keys()
        known = {(state.name, card): self.kinds.get(state.gone[card]) for card in cards}
        others = (self._holdings[uid].assignment for uid in state.uids)
        for card in cards - {_card_of(share) for other in others for share in other.shares()}:
            state.forget(card)
        return known

    def _count(self, state: NodeState, holding: Holding, sign: int) -> None:
        usage = self._usage.setdefault(holding.namespace, {})
        for share in holding.assignment.shares():
            kind = state.count(share, sign)
            charge = quotas.charge(share)
            before = usage.get(kind, NOTHING)
            usage[kind] = before.plus(charge) if sign > 0 else before.minus(charge)
            if usage[kind] == NOTHING:
                del usage[kind]
        if not usage:
            del self._usage[holding.namespace]

    def _forget_if_empty(self, state: NodeState) -> None:
        if not state.cards and not state.uids:
            self._nodes.pop(state.name, None)


def _card_of(share: CardShare) -> str | int:
    """What names the share's card on its node: the UUID, or in gpushare's assignments the index."""
    return share.uuid or share.index


def _counts_alike(one: Holding, other: Holding) -> bool:
    return (one.node, one.namespace, one.assignment) == (other.node, other.namespace, other.assignment)
