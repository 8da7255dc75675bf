"""The cards of the gang reservation, as holdings. The ledger has these holdings only while a later pod is placed.

`gangs.reservation` chooses the gang and the cards. A reserved card may still be in use. Then the reservation and the
other holdings together exceed the card. So when capacity is freed on the card, the gang gets it first. Not thread-safe:
the caller holds the lock of `State`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from cardwise.core.gangs.gangs import Rank
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.nodestate import NodeState

_NO_HOLDINGS: Mapping[str, list[Holding]] = {}


def comes_after(rank: Rank, namespace: str, first_rank: Rank, first_namespace: str) -> bool:
    """Whether a pod or gang of this rank and namespace must not use the cards that are reserved for a gang.

    rank, namespace: those of the pod or gang.
    first_rank, first_namespace: those of the gang for which cards are reserved.

    Every user may set `cardwise.dev/queue-priority`, so this annotation orders only pods of the same namespace. Between
    namespaces the pods' priority and age decide.
    """
    if namespace == first_namespace:
        return rank > first_rank
    return (rank[0], *rank[2:]) > (first_rank[0], *first_rank[2:])


class _Owner(NamedTuple):
    """The gang for which cards are reserved.

    uids: the UIDs of its members.
    """

    namespace: str
    rank: Rank
    uids: Collection[str]


class GangCards:
    """The holdings that are reserved for one gang, by node."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._gang: Gang | None = None
        self._owner_then: _Owner | None = None  # of a snapshot
        self._by_node: Mapping[str, list[Holding]] = _NO_HOLDINGS

    def snapshot(self, ledger: Ledger) -> "GangCards":
        """A copy of the reservation, independent of the original. `ledger`: the ledger of the same snapshot."""
        duplicate = GangCards(ledger)
        duplicate._by_node = self._by_node
        owner = self._reserving_gang()
        duplicate._owner_then = owner._replace(uids=frozenset(owner.uids)) if owner is not None else None
        return duplicate

    def reserve(self, gang: Gang | None, holdings: Iterable[Holding] = ()) -> bool:
        """Replace the reservation by these holdings for the gang. Returns whether any former holding was released."""
        by_node_before, by_node, by_uid = self._by_node, dict[str, list[Holding]](), dict[str, Holding]()
        for holding in holdings if gang is not None else ():
            by_node.setdefault(holding.node, []).append(holding)
            by_uid[holding.uid] = holding
        self._gang, self._by_node = gang, by_node
        return any(
            by_uid.get(before.uid) is not before and by_uid.get(before.uid) != before
            for holdings_before in by_node_before.values()
            for before in holdings_before
        )

    def reserved_nodes(self, rank: Rank, namespace: str, uid: str = "") -> Collection[str]:
        """The nodes with reserved cards that a pod or gang of this rank and namespace must not use."""
        return self.reserved_holdings(rank, namespace, uid).keys()

    def reserved_holdings(self, rank: Rank, namespace: str, uid: str = "") -> Mapping[str, list[Holding]]:
        """By node, the reserved holdings that a pod or gang of this rank and namespace must not use. The mapping is
        replaced, never changed.
        """
        owner = self._reserving_gang()
        if owner is None or uid in owner.uids or not comes_after(rank, namespace, owner.rank, owner.namespace):
            return _NO_HOLDINGS
        return self._by_node

    def holdings_on(self, node: str, rank: Rank, namespace: str, uid: str) -> list[Holding]:
        """The reserved holdings on the node that the pod must not use."""
        return self.reserved_holdings(rank, namespace, uid).get(node, [])

    def node_with_reservation(self, name: str) -> NodeState | None:
        """A copy of the node with the reserved holdings; None if there is no such node."""
        state = self._ledger.node(name)
        return state.copy_with(self._by_node.get(name, ())) if state is not None else None

    @contextmanager
    def count_reserved(self, nodes: Collection[str]) -> Iterator[None]:
        """Context manager: inside, the ledger also has the reserved cards of these nodes. Costs 0.05 ms per holding."""
        holdings = [holding for node in nodes for holding in self._by_node.get(node, ())]
        if not holdings:
            yield
            return
        with self._ledger.what_if(added=holdings):
            yield

    def _reserving_gang(self) -> _Owner | None:
        """The gang with the reservation, while its members have no places yet; else None."""
        gang = self._gang
        if gang is None:
            return self._owner_then
        return None if gang.plan or gang.ran else _Owner(gang.namespace, gang.rank(), gang.members.keys())
