"""What nodes have room for: the ledger of cards and the sums of cpu and memory, and who is woken when room comes.

What pods hold or are to hold comes from the table of reservations and from what nodes report (`reservations`); pods
that run and the nodes themselves are counted as `State` hears of them, cards by `Cache.count_cards`. A what-if changes
ledger and sums for a moment and takes that back. Not thread-safe: the state locks.
"""

from collections.abc import Collection
from typing import Final

from cardwise.core.placement.ledger import Holding, Ledger
from extender.cache.nodeload import NodeLoads
from extender.queue.schedulingqueue import SchedulingQueue
from extender.records.nodeinfo import Placed

RESERVED: Final = "reserved"  # mark of what is reserved for a pod that kube-scheduler may have nominated there


class Capacity:
    """`freed_count` counts how often room may have come."""

    def __init__(self, ledger: Ledger, loads: NodeLoads, queue: SchedulingQueue) -> None:
        self.ledger = ledger
        self.loads = loads
        self.queue = queue
        self.freed_count = 0
        self._changed: set[str] = set()
        self._moved: set[str] = set()

    def set_holding(self, uid: str, current: Holding | None, *, seen: bool) -> None:
        """The pod holds this now. `seen`: kube-scheduler sees the cause itself."""
        before = self.ledger.holding(uid)
        if current is None:
            self.ledger.release(uid)
        elif current != before:
            self.ledger.set_holding(current)
        if current != before:
            for holding in (before, current):
                if holding is not None:
                    self._changed |= self.ledger.nodes_of(holding)
        if before is not None and (current is None or not current.counts_like(before)):
            # kube-scheduler offers no nodes that nominated pods fill, and does not see that a nomination is over. So
            # the planner of gangs has to know what it offers now.
            free = self.mark_freed if before.mark == RESERVED else self.mark_capacity_freed
            free(before.node, seen=seen)
            for node in self.ledger.nodes_of(before) - {before.node}:
                free(node, seen=seen)  # the pod's card is on another node than the pod

    def set_planned(self, uid: str, planned: Placed | None) -> None:
        """What the pod will take of cpu and memory counts there; None: no more, where it was planned."""
        if planned is not None:
            self.loads.plan(uid, planned)
        else:
            self.loads.unplan([uid])

    def mark_freed(self, node: str = "", *, seen: bool = False) -> None:
        """There may be room on this node; "": on any node. `seen`: kube-scheduler sees the cause itself."""
        self.queue.requeue_all(node, seen=seen)
        self.freed_count += 1

    def mark_capacity_freed(self, node: str = "", *, seen: bool = False) -> None:
        """As `mark_freed`, where the planner of gangs needs no new offers of kube-scheduler: a pod has given back
        what it had, or the gang reservation has.
        """
        self.queue.on_capacity_freed(node, seen=seen, can_preempt=self.loads.has_victims)
        self.freed_count += 1

    def mark_cards_changed(self, node: str, others: Collection[str] = ()) -> None:
        """The node's cards have changed. `others`: nodes on which pods count otherwise by that: a card has moved."""
        self._changed.add(node)
        if others:
            self._changed.update(others)
            self._moved |= {node, *others}
        self.mark_freed(node)

    def take_moved(self) -> set[str]:
        """The nodes between which cards have moved since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    def take_changed(self) -> set[str]:
        """The nodes whose cards or holdings have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed
