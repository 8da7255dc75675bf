"""The capacity of nodes: the ledger of cards, and the totals of cpu and memory. Requeues pods when capacity is freed.

It is updated from the table of reservations and the node reports (`reservations`), from running pods and nodes
(`State`), and from cards (`Cache.sync_cards`). A what-if changes ledger and totals temporarily. Not thread-safe: the
caller holds the lock of `State`.
"""

from collections.abc import Collection
from typing import Final

from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from extender.cache.nodeload import NodeLoads
from extender.queue.schedulingqueue import SchedulingQueue
from extender.records.nodeinfo import PlacedPod

RESERVED_PHASE: Final = "reserved"  # `Holding.phase_name` of cards that filter has reserved for a pod


class Capacity:
    """The capacity of all nodes. `freed_count`: how many times capacity may have been freed so far."""

    def __init__(self, ledger: Ledger, loads: NodeLoads, queue: SchedulingQueue) -> None:
        self.ledger = ledger
        self.loads = loads
        self.queue = queue
        self.freed_count = 0
        self._changed: set[str] = set()
        self._moved: set[str] = set()

    def set_holding(self, uid: str, current: Holding | None, *, seen_by_scheduler: bool) -> None:
        """Set the pod's current holding; None: the pod holds nothing.

        seen_by_scheduler: kube-scheduler sees the cause itself, and requeues pods without the extender.
        """
        holding_before = self.ledger.holding(uid)
        if current is None:
            self.ledger.release(uid)
        elif current != holding_before:
            self.ledger.set_holding(current)
        if current != holding_before:
            for holding in (holding_before, current):
                if holding is not None:
                    self._changed |= self.ledger.nodes_of(holding)
        if holding_before is not None and (current is None or not current.counts_like(holding_before)):
            # kube-scheduler does not offer a node that nominated pods fill, and does not see when the extender ends a
            # nomination. So the gang planner must count the node as changed.
            free = self.mark_freed if holding_before.phase_name == RESERVED_PHASE else self.mark_released
            free(holding_before.node, seen_by_scheduler=seen_by_scheduler)
            for node in self.ledger.nodes_of(holding_before) - {holding_before.node}:
                free(node, seen_by_scheduler=seen_by_scheduler)  # a card of the pod has moved to this node

    def set_planned_pod(self, uid: str, planned: PlacedPod | None) -> None:
        """Add the pod's cpu and memory to its planned node's totals; remove them if `planned` is None."""
        if planned is not None:
            self.loads.plan_pod(uid, planned)
        else:
            self.loads.unplan_pods([uid])

    def mark_freed(self, node: str = "", *, seen_by_scheduler: bool = False) -> None:
        """Requeue pods: capacity may have been freed on this node; "" for any node.

        seen_by_scheduler: kube-scheduler sees the cause itself, and requeues pods without the extender.
        """
        self.queue.requeue_all(node, seen_by_scheduler=seen_by_scheduler)
        self.freed_count += 1

    def mark_released(self, node: str = "", *, seen_by_scheduler: bool = False) -> None:
        """As `mark_freed`, for capacity that a pod or the gang reservation has released.

        The gang planner can use such capacity before kube-scheduler offers the node again.
        """
        self.queue.on_capacity_freed(node, seen_by_scheduler=seen_by_scheduler, can_preempt=self.loads.has_victims)
        self.freed_count += 1

    def mark_cards_changed(self, node: str, other_nodes: Collection[str] = ()) -> None:
        """Record that the node's cards have changed.

        other_nodes: further nodes whose totals change, because a card has moved from or to them.
        """
        self._changed.add(node)
        if other_nodes:
            self._changed.update(other_nodes)
            self._moved |= {node, *other_nodes}
        self.mark_freed(node)

    def take_moved_nodes(self) -> set[str]:
        """The nodes from which or to which cards have moved since the last call."""
        nodes, self._moved = self._moved, set()
        return nodes

    def take_changed_nodes(self) -> set[str]:
        """The nodes whose cards or holdings have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed
