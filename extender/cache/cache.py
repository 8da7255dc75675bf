"""Creates the parts of the cache, and has the queries that need several parts.

A share counts while its pod exists and has not finished. Afterwards the share counts while its node reports it, or
until a grace period is over (docs/design/0001-contracts.md). Not thread-safe: the state locks.
"""

from cardwise.clock import Clock
from cardwise.core.api.request import PodRequest
from cardwise.core.placement import placement
from cardwise.core.placement.devices import is_valid_grant
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.mpstaints import untolerated_by
from cardwise.core.placement.placement import Placement
from cardwise.kube.pods.budgets import Budgets
from extender.cache.capacity import Capacity
from extender.cache.clusterview import ClusterView, PlaceAhead
from extender.cache.gangcards import GangCards
from extender.cache.inventory import Inventory
from extender.cache.nodeload import NodeLoads
from extender.cache.quotas import Quotas
from extender.cache.reservations import Phase, Reservations, Timeouts
from extender.queue.schedulingqueue import SchedulingQueue


class Cache(ClusterView):
    """The parts of the cache.

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

    def mark_refused(self, uid: str, since: int | None = None) -> None:
        """Record that no card fits the pod, so that the pod is requeued when capacity is freed: kube-scheduler may not
        notice that.

        since: the value of `Capacity.freed_count` when the search began; if capacity was freed since, the pod is
            requeued.
        """
        self.queue.mark_refused(uid)
        if uid and since is not None and since != self.capacity.freed_count:
            self.queue.requeue_all()

    def is_plan_valid(self, holding: Holding, request: PodRequest) -> bool:
        """Whether the plan can still be bound.

        Its cards must exist, accept shares, have the capacity and the requested class, and their MPS must admit the
        pod; its devices must exist and be free; and no quota may be exceeded.
        """
        state = self.ledger.node(holding.node)
        if state is None or self.ledger.holding(holding.uid) != holding:
            return False  # the plan was not counted, so other pods may have got the capacity
        if not is_valid_grant(holding.assignment, state.devices, state.device_holds):
            return False
        requested_classes = {container.key: container.resource_class for container in request.containers}
        mps_client = request.mps_client
        for key, shares in holding.assignment.containers.items():
            for share in shares:
                position = state.position(share)
                if position is None or not state.cards[position].accepts_shares or state.free[position] < 0:
                    return False
                if requested_classes.get(key) and requested_classes[key] not in state.cards[position].classes:
                    return False
                if not state.mps.admits(
                    position, untolerated_by(request.mps, several_cards=len(shares) > 1), mps_client.user
                ):
                    return False
        if not self.limits.has_quota(holding.namespace):
            return True
        with self.exclude_pod(holding.uid):
            headroom = self.headroom(holding.namespace)
            planned = Placement(node=holding.node, assignment=holding.assignment, score=0)
            return not placement.exceeded_entries(self.ledger, planned, headroom)

    def sync_cards(self) -> None:
        """Update the ledger with all cards that have changed since the last call.

        The ledger is not updated for each card alone, because at startup thousands of cards arrive one by one.
        """
        for node, cards, devices in self.inventory.take_changes():
            other_nodes = self.ledger.set_cards(node, cards) | self.ledger.set_devices(node, devices)
            self.capacity.mark_cards_changed(node, other_nodes)

    def _places_ahead(self) -> list[PlaceAhead]:
        rows = self.reservations.rows_in_phases(Phase.NOMINATED)
        return [PlaceAhead(row.node, row.assignment, row.load) for row in rows]
