"""The view of the cluster that planners read: live, as part of `Cache`, or as a snapshot
(docs/design/0032-snapshots.md).

A planner may read and change its snapshot without the lock. The live view is not thread-safe: the caller holds the lock
of `State`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

from cardwise.core.api.assignment import Assignment
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs import gangplan
from cardwise.core.gangs.gangs import Rank
from cardwise.core.placement import placement
from cardwise.core.placement.devices import is_valid_grant
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.mpstaints import untolerated_by
from cardwise.core.placement.nodestate import NodeState, card_of
from cardwise.kube.pods.budgets import Budgets
from extender.cache.gangcards import GangCards
from extender.cache.nodeload import NodeLoads
from extender.cache.nominations import LOWEST_PRIORITY, Nomination, Nominations
from extender.cache.quotas import Quotas
from extender.records.nodeinfo import PlacedPod
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef

_NO_LOAD: Final = Load(0, 0, 0)
_MAX_COMPARED_LABELS: Final = 2000  # of pods, compared with changed budgets under the lock: up to 4 ms


class PlaceAhead(NamedTuple):
    """A place that is reserved for a pod before kube-scheduler calls filter for this pod.

    Pods that come earlier in the queue may take the place.

    load: the pod's cpu and memory; None if other totals include them already.
    """

    node: str
    assignment: Assignment | None
    load: Load | None


class PodPlace(NamedTuple):
    """A pod, and the place that a planner has found for it.

    request, assignment: None if the pod requests no cards and devices.
    """

    pod: PodRef
    request: PodRequest | None
    load: Load
    node: str
    assignment: Assignment | None


class _Moment(NamedTuple):
    """The generations of the data when the snapshot was taken. They stay the same when a planner changes the snapshot.

    ledger, loads: the generations of the ledger and of the loads.
    nominations: all nominations, by the UID of the pod.
    """

    ledger: int
    loads: int
    nominations: Mapping[str, Nomination]


class ClusterView:
    """The cluster as planners see it. It has cards with their holdings, the nodes' cpu and memory, quotas, and
    PodDisruptionBudgets. It also has the reservations for nominated pods and for a gang.

    places_ahead: returns the places that are reserved before kube-scheduler calls filter.
    leader_changes: how often all plans were discarded because the leader changed.
    """

    def __init__(
        self,
        ledger: Ledger,
        loads: NodeLoads,
        *,
        quotas: Quotas,
        budgets: Budgets,
        nominations: Nominations,
        gang_cards: GangCards,
        places_ahead: Callable[[], Sequence[PlaceAhead]],
        leader_changes: int = 0,
    ) -> None:
        self.ledger = ledger
        self.loads = loads
        self.limits = quotas
        self.budgets = budgets
        self.nominations = nominations
        self.gang_cards = gang_cards
        self.places_ahead = places_ahead
        self.leader_changes = leader_changes
        self.moment = _Moment(ledger.generation, loads.generation, dict(nominations.by_pod()))

    def snapshot(self) -> "ClusterView":
        """A copy of the cluster as it is now. Later changes of the copy or of the original do not affect the other."""
        ledger, loads, places_ahead = self.ledger.snapshot(), self.loads.snapshot(), self.places_ahead()
        return ClusterView(
            ledger,
            loads,
            quotas=self.limits.snapshot(),
            budgets=self.budgets.snapshot(),
            nominations=self.nominations.snapshot(loads),
            gang_cards=self.gang_cards.snapshot(ledger),
            places_ahead=lambda: places_ahead,
            leader_changes=self.leader_changes,
        )

    def headroom(self, namespace: str) -> list[Headroom]:
        """The amounts that the namespace's quotas still allow."""
        return self.limits.headroom(self.ledger, namespace)

    def headroom_excluding(self, namespace: str, uid: str) -> list[Headroom]:
        """As `headroom`, without the pod's own holding."""
        if not self.limits.has_quota(namespace):
            return []
        with self.exclude_pod(uid):
            return self.headroom(namespace)

    def exclude_pod(self, uid: str) -> AbstractContextManager[None]:
        """Context manager: inside, the cluster is as if the pod had no reservation."""
        return self.ledger.what_if(released=(uid,)) if self.ledger.holding(uid) is not None else nullcontext()

    def is_plan_valid(self, holding: Holding, request: PodRequest) -> bool:
        """Whether the plan can still be bound: its cards and devices are valid (`are_planned_cards_valid`), and it
        exceeds no quota.
        """
        return self.are_planned_cards_valid(holding, request) and self.first_beyond_quotas([holding]) is None

    def are_planned_cards_valid(self, holding: Holding, request: PodRequest) -> bool:
        """Whether the cards and devices of the plan can still be used for the request (`_are_cards_valid`)."""
        state = self.ledger.node(holding.node)
        if state is None or self.ledger.holding(holding.uid) != holding:
            return False  # the plan was not counted, so other pods may have got the capacity
        return _are_cards_valid(state, holding.assignment, request)

    def first_beyond_quotas(self, holdings: Sequence[Holding]) -> Holding | None:
        """The first holding that counts towards an exceeded quota entry; None if no entry is exceeded. If several
        entries are exceeded, the first entry is used.

        holdings: of pods of one namespace. The ledger counts them.
        """
        headroom = self.headroom(holdings[0].namespace) if holdings else []
        exceeded = placement.entries_exceeded_by_holdings(self.ledger, holdings, headroom)
        if not exceeded:
            return None
        first = [entry_headroom for entry_headroom in headroom if entry_headroom.entry is exceeded[0]]
        return next(
            holding for holding in holdings if placement.entries_exceeded_by_holdings(self.ledger, [holding], first)
        )

    def has_cards_for(self, places: Sequence[PodPlace]) -> bool:
        """Whether all these pods fit on the cards and devices of their places, in addition to all present pods.

        Ignores quotas.
        """
        # The counts of nodes are copied, because changing and restoring the ledger would take longer.
        added: dict[str, list[Holding]] = {}  # by node where the holding counts
        granted: dict[str, list[tuple[Assignment, PodRequest]]] = {}  # by node of the pod
        for place in places:
            if place.assignment is None or place.request is None:
                continue
            pod, mps_client = place.pod, place.request.mps_client
            holding = Holding(pod.uid, pod.namespace, pod.name, place.node, place.assignment, mps_client=mps_client)
            for node in self.ledger.nodes_of(holding):
                added.setdefault(node, []).append(holding)
            granted.setdefault(place.node, []).append((place.assignment, place.request))
        for node, assignments in granted.items():
            state = self.ledger.node(node)
            if state is None:
                return False
            with_places = state.copy_with(added[node])
            if not all(_are_cards_valid(with_places, assignment, request) for assignment, request in assignments):
                return False
        return True

    def has_free_load_for(self, places: Sequence[PodPlace]) -> bool:
        """Whether the nodes have cpu, memory and slots for all these pods, in addition to all present pods."""
        loads: dict[str, Load] = {}
        for place in places:
            loads[place.node] = loads.get(place.node, _NO_LOAD).add(place.load)
        return all(gangplan.has_capacity(self.loads.free_load(node), _NO_LOAD, load) for node, load in loads.items())


class NodeChanges:
    """The nodes that have changed since a snapshot, as far as they matter to the planner of one pod or gang.

    Valid while the lock is held.

    rank, namespace, uid: those of the pod; for a gang, its rank and namespace.
    """

    def __init__(
        self, current_view: ClusterView, snapshot: ClusterView, rank: Rank, namespace: str, uid: str = ""
    ) -> None:
        self._current_view = current_view
        self._snapshot = snapshot
        self._pod = rank, namespace, uid
        self._nominated_nodes = current_view.nominations.nodes_changed_since(snapshot.moment.nominations)
        # The reservation of a nominated pod does not count while the pod holds cards, on any node.
        self._nominated_nodes |= {
            node
            for claimant, node, _ in current_view.nominations.reserved_places((), LOWEST_PRIORITY)
            if (current_view.ledger.holding(claimant.uid) is None) != (snapshot.ledger.holding(claimant.uid) is None)
        }

    def have_cards_changed(self, node: str) -> bool:
        """Whether the node's cards, their classes or holdings have changed."""
        state = self._current_view.ledger.node(node)
        return state is None or state.generation > self._snapshot.moment.ledger

    def has_node_changed(self, node: str) -> bool:
        """Whether anything that planners read has changed on the node.

        This is: the cards with their classes and holdings, the pods, cpu and memory, and the reservations for nominated
        pods and for a gang.
        """
        return (
            self.have_cards_changed(node)
            or self._current_view.loads.last_change_of(node) > self._snapshot.moment.loads
            or node in self._nominated_nodes
            or self._current_view.gang_cards.holdings_on(node, *self._pod)
            != self._snapshot.gang_cards.holdings_on(node, *self._pod)
        )


class Changes(NodeChanges):
    """The changes since a snapshot was taken, for a search for victims. Valid while the lock is held."""

    def __init__(self, current_view: ClusterView, snapshot: ClusterView, pod: WaitingPod) -> None:
        namespace, uid = pod.ref.namespace, pod.ref.uid
        super().__init__(current_view, snapshot, pod.rank, namespace, uid)
        self._budgets = current_view.budgets.budgets_changed_since(snapshot.budgets)
        # By namespace and the id of a pod's labels; pods with equal labels share them. The snapshot keeps them alive.
        self._covered: dict[tuple[str, int], bool] = {}
        self._everywhere = current_view.headroom_excluding(namespace, uid) != snapshot.headroom_excluding(
            namespace, uid
        )

    def may_concern(self, node: str) -> bool:
        """Whether a search for victims on this node may now have a different result than in the snapshot.

        The result depends on the remaining quotas of the pod's namespace, and on the data that `has_node_changed`
        compares.
        """
        return self._everywhere or self.has_node_changed(node)

    def has_node_changed(self, node: str) -> bool:
        """As in `NodeChanges`; also True if a PodDisruptionBudget of a pod on the node has changed."""
        return super().has_node_changed(node) or any(
            self._is_covered(placed_pod)
            for _, placed_pod in (self._current_view.loads.pods_on(node) if self._budgets else ())
            if placed_pod.namespace in self._budgets
        )

    def _is_covered(self, placed_pod: PlacedPod) -> bool:
        """Whether a changed budget covers or covered the pod. After `_MAX_COMPARED_LABELS` different labels, returns
        True for every pod.
        """
        key = placed_pod.namespace, id(placed_pod.labels)
        if key not in self._covered:
            if len(self._covered) >= _MAX_COMPARED_LABELS:
                return True
            budgets = self._budgets[placed_pod.namespace]
            self._covered[key] = any(budget.covers(placed_pod.labels) for budget in budgets)
        return self._covered[key]


def _are_cards_valid(node: NodeState, assignment: Assignment, request: PodRequest) -> bool:
    """Whether the cards and devices of this assignment, which the node counts, can still be used for the request.

    Each card must exist, accept shares, be of the requested class, and have the capacity; MPS and the tenants of the
    card must admit the pod. Each device must exist and be free.
    """
    if not is_valid_grant(assignment, node.devices, node.device_holds):
        return False
    positions: dict[str | int, int] = {}
    for use in assignment.card_uses():
        position = node.position(use)
        if position is None or not node.cards[position].accepts_shares or node.free[position] < 0:
            return False
        if node.clients[position] > node.max_card_clients[position]:
            return False
        if use.core and node.free_core[position] < 0:
            return False
        positions[card_of(use)] = position
    isolation, user, whole_only = request.isolation, request.mps_client.user, request.has_whole_cards_only
    untolerated: dict[tuple[bool, bool], int] = {}
    for demand in assignment.card_demands(request.containers):
        position = positions[demand.card]
        if demand.resource_class and demand.resource_class not in node.cards[position].classes:
            return False
        several, whole = demand.several_cards, demand.whole
        if (several, whole) not in untolerated:
            untolerated[several, whole] = untolerated_by(
                isolation, user=user, several_cards=several, whole=whole, whole_only=whole_only
            )
        if not node.mps.admits(position, untolerated[several, whole], user):
            return False
        if not node.tenants.admits(position, request.tenant):
            return False
    return True
