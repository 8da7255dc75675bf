"""Creates the components of the cache, and has the queries that need several of them.

A share uses its card while its pod exists and has not finished. Afterwards it uses the card while the node reports it,
or until a grace period is over (docs/design/0001-contracts.md). Not thread-safe: the caller holds the lock of `State`.
"""

from typing import Final

from cardwise.clock import Clock
from cardwise.core.placement.ledger import Ledger
from cardwise.kube.pods.budgets import Budgets
from extender.cache.capacity import Capacity
from extender.cache.clusterview import ClusterView, PlaceAhead
from extender.cache.gangcards import GangCards
from extender.cache.inventory import Inventory
from extender.cache.nodeload import NodeLoads
from extender.cache.pacing import pause
from extender.cache.quotas import Quotas
from extender.cache.reservations import Phase, Reservations, Timeouts
from extender.cache.statelock import StateLock
from extender.queue.schedulingqueue import SchedulingQueue

_NODES_INDEXED_PER_LOCK: Final = 32  # nodes whose cards are indexed in one hold of the lock: up to 5 ms
_MAX_UNINDEXED_NODES: Final = 48  # maximum number of changed nodes that a decision by the index may have to index
_MAX_NODES_INDEXED: Final = 1024  # maximum number of nodes that one call of `update_index` indexes: up to 0.2 s


class Cache(ClusterView):
    """The components of the cache.

    Each change of `reservations` updates `capacity`. `reservations` reads the reports of nodes from `inventory`.
    """

    def __init__(self, ledger: Ledger, patience: Timeouts, clock: Clock) -> None:
        self.inventory = Inventory()
        self.queue = SchedulingQueue(clock)
        loads = NodeLoads()
        self.capacity = Capacity(ledger, loads, self.queue)
        self.reservations = Reservations(self.inventory, self.capacity, patience, clock)
        super().__init__(
            ledger,
            loads,
            quotas=Quotas(),
            budgets=Budgets(),
            nominations=self.reservations.nominations,
            gang_cards=GangCards(ledger),
            places_ahead=self._places_ahead,
        )

    @property
    def is_index_outdated(self) -> bool:
        """Whether so many nodes have changed since the index of cards was updated that a decision by the index would
        hold the lock for long.
        """
        return self.ledger.unindexed_count > _MAX_UNINDEXED_NODES

    def has_leader_changed(self, snapshot: ClusterView) -> bool:
        """Whether the leader has changed since the snapshot. If so, the results of a search on the snapshot must not be
        reserved.
        """
        return self.leader_changes != snapshot.leader_changes

    def mark_refused(self, uid: str, since: int | None = None) -> None:
        """Record that no card fits the pod. The pod is then requeued when capacity is freed, since kube-scheduler may
        not notice freed capacity.

        since: the value of `Capacity.freed_count` when the search began; if capacity was freed since, the pod is
            requeued.
        """
        self.queue.mark_refused(uid)
        if uid and since is not None and since != self.capacity.freed_count:
            self.queue.requeue_all()

    def sync_cards(self) -> None:
        """Update the ledger with all cards that have changed since the last call.

        The ledger is not updated at each card's event, because at startup thousands of cards arrive one by one.
        """
        for node, cards, devices in self.inventory.take_changes():
            other_nodes = self.ledger.set_cards(node, cards) | self.ledger.set_other_devices(node, devices)
            self.capacity.mark_cards_changed(node, other_nodes)

    def _places_ahead(self) -> list[PlaceAhead]:
        rows = self.reservations.rows_in_phases(Phase.NOMINATED)
        return [PlaceAhead(row.node, row.assignment, row.load) for row in rows]


def update_index(lock: StateLock, cache: Cache, clock: Clock, max_nodes: int = _MAX_NODES_INDEXED) -> None:
    """Update the index of cards until only few changed nodes are left, in short holds of the lock.

    Call it without the lock, before a decision by the index. Otherwise the decision has to index all nodes that have
    changed, under the lock: ten gangs of 500 pods change 600 nodes, and without calls of filter any number may change.

    max_nodes: the maximum number of nodes to index. Nodes may change faster than they are indexed, for example while a
        namespace of 10,000 pods is deleted. Then the index is still outdated afterwards (`Cache.is_index_outdated`).
    """
    for _ in range(0, max_nodes, _NODES_INDEXED_PER_LOCK):
        if cache.ledger.unindexed_count <= _NODES_INDEXED_PER_LOCK:
            return
        with lock:
            cache.ledger.index_some(_NODES_INDEXED_PER_LOCK)
        pause(clock)
