"""Cards that are reserved for nominated pods, as holdings. The ledger has these holdings only while a later pod is
placed.

If this extender has answered the preempt call, the cards are known. If another extender has answered the call, only the
node is known, from the pod's status. Then this module computes the cards that the pod would get once the terminating
pods are gone. Not thread-safe: the caller holds the lock of `State`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Final, NamedTuple

from cardwise.core.api import policies
from cardwise.core.api.request import Load
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.placement.searching import CheckLimit
from cardwise.core.preemption import preemption
from cardwise.core.preemption.preemption import FullNode, Preemptor, Resident, Victims
from cardwise.kube.pods.budgets import Budgets
from extender.cache.cache import Cache
from extender.cache.clusterview import ClusterView
from extender.cache.nominations import LOWEST_PRIORITY, NOMINATED_PHASE, NominatedPlace
from extender.cache.reservations import PHASE_NAMES, Phase
from extender.cache.statelock import StateLock
from extender.records.pod import WaitingPod

MAX_RESERVED_NODES: Final = (
    # Maximum number of nodes whose reserved cards are counted: with more, other callers would wait too long for the
    # lock.
    64
)
# Maximum number of reservations that are counted for each pod where other nodes may suffice, for the same reason.
MAX_RESERVATIONS: Final = 64
_CHECKS_PER_RESERVATION: Final = 16  # checks of cards that take as long as counting one reservation
_CHECKS_PER_SEARCH: Final = 300  # checks of cards that take as long as a search for the unknown cards of one pod
_NO_LOAD: Final = Load(0, 0, 0)
_NO_BUDGETS: Final = Budgets()


class NominatedReservation(NamedTuple):
    """The reservation for a nominated pod on a node: its cards, cpu and memory, and the victims that are evicted for
    the pod.
    """

    holding: Holding
    load: Load
    victims: tuple[str, ...]


class SearchedPlace(NamedTuple):
    """A place of a nominated pod before (`unknown`) and after (`searched`) the search for the pod's cards."""

    uid: str
    node: str
    unknown: NominatedPlace
    searched: NominatedPlace


class NominatedPods:
    """The holdings of nominated pods, and the search for victims, in the cluster as it is or in a snapshot.

    policy: the placement policy of pods that name none.
    pace: called before each step of a search for victims. If it raises, the search ends.
    """

    def __init__(
        self,
        cluster: ClusterView,
        policy: str = policies.DEFAULT_POLICY,
        pace: Callable[[], object] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._pace = pace
        self._nominations = cluster.nominations
        self._budgets = cluster.budgets

    def with_snapshot(self, snapshot: ClusterView) -> "NominatedPods":
        """A `NominatedPods` that reads the snapshot instead, for a planner without the lock."""
        return NominatedPods(snapshot, self._policy)

    def with_pace(self, pace: Callable[[], object]) -> "NominatedPods":
        """A `NominatedPods` whose searches for victims have this pace."""
        return NominatedPods(self._cluster, self._policy, pace)

    def reserved_nodes(self, excluded: Collection[str], priority: int) -> set[str]:
        """The nodes with cards that pods of this priority must leave to nominated pods. Ignores the reservations of the
        pods `excluded`.
        """
        return {node for _, node, _ in self._nominations.reserved_places(excluded, priority)}

    def reservation_counts(self, excluded: Collection[str], priority: int) -> Counter[str]:
        """By node, the number of reservations that pods of this priority must leave to nominated pods. Ignores the
        reservations of the pods `excluded`.
        """
        return Counter(node for _, node, _ in self._nominations.reserved_places(excluded, priority))

    def nodes_with_unknown_cards(self) -> list[str]:
        """The nodes with reservations whose cards are not known yet, because another extender has answered preempt."""
        places = self._nominations.reserved_places((), LOWEST_PRIORITY)
        return list(dict.fromkeys(node for _, node, place in places if place.assignment is None))

    def search_unknown_cards(self, nodes: Collection[str], is_over: Callable[[], bool]) -> list[SearchedPlace]:
        """Search the unknown cards on these nodes. Returns the places that were searched, also those without a result.

        is_over: called before each search. Returns whether to stop.
        """
        searched = []
        for claimant, node, place in self._nominations.reserved_places((), LOWEST_PRIORITY):
            if place.assignment is not None or node not in nodes:
                continue
            if self._cluster.ledger.holding(claimant.uid) is not None:
                continue  # nothing is reserved while the pod holds cards
            if is_over():
                break
            searched.append(SearchedPlace(claimant.uid, node, place, self._search_cards(claimant, node, place)))
        return searched

    @contextmanager
    def count_reserved(
        self,
        excluded: Collection[str],
        priority: int,
        nodes: Collection[str] | None = None,
        pace: Callable[[], object] = lambda: None,
        *,
        limit: CheckLimit | None = None,
    ) -> Iterator[None]:
        """Context manager: inside, the ledger also has the reserved cards that pods of this priority must not use.

        excluded: UIDs of nominated pods whose cards are not added.
        nodes: the nodes whose reserved cards are added; None: all nodes. Takes 0.05 ms for each nominated pod.
        pace: see `reservations_on`.
        limit: limits the searches and the reservations; None: no limit. Raises SearchTooLong.
        """
        if not len(self._nominations):
            yield
            return
        reserved = self.reservations_on(nodes, excluded, priority, pace, limit=limit)
        if limit is not None:
            limit.count(_CHECKS_PER_RESERVATION * len(reserved))
        with self._cluster.ledger.what_if(added=[nominated.holding for nominated in reserved]):
            yield

    def reservations_on(
        self,
        nodes: Collection[str] | None,
        excluded: Collection[str],
        priority: int,
        pace: Callable[[], object] = lambda: None,
        *,
        limit: CheckLimit | None = None,
        known_only: bool = False,
    ) -> list[NominatedReservation]:
        """The reservations on these nodes that pods of this priority must not use.

        nodes: the nodes; None: all nodes.
        excluded: UIDs of nominated pods whose reservations are left out.
        pace: called before each search for unknown cards, which takes 1 ms on a node of 100 pods. If it raises, the
            results so far are kept.
        limit: limits these searches; None: no limit. Raises SearchTooLong.
        known_only: whether to leave out reservations whose cards are unknown, instead of searching the cards.
        """
        reserved = []
        for claimant, node, place in list(self._nominations.reserved_places(excluded, priority)):
            if (nodes is not None and node not in nodes) or self._cluster.ledger.holding(claimant.uid) is not None:
                continue  # the ledger has the pod's holding already
            assignment = place.assignment
            if assignment is None and not known_only:
                pace()
                searched = self._search_cards(claimant, node, place, limit)
                self._nominations.set_searched_place(claimant.uid, node, place, searched)
                assignment = searched.assignment
            if assignment is None:
                continue
            # Without a namespace, so that no quota counts the reservation before the pod is bound.
            mps_client = claimant.request.mps_client
            holding = Holding(
                f"{claimant.uid}@{node}", "", claimant.ref.name, node, assignment, NOMINATED_PHASE, mps_client
            )
            reserved.append(NominatedReservation(holding, claimant.load, place.victims))
        return reserved

    def place_after_termination(
        self, claimant: WaitingPod, policy: str, node: str, removed: Collection[str] = ()
    ) -> Victims | None:
        """The cards for the pod on the node once the node's terminating pods and the pods `removed` are gone.

        None if the pod does not fit then. Ignores the reservations for other nominated pods, because they are computed
        by this method, too.
        """
        full_node = self._make_full_node(claimant, node, removed=removed)
        if full_node is None:
            return None
        return preemption.least_harmful_victims(full_node, self._make_preemptor(claimant, policy, LOWEST_PRIORITY))

    def find_victims(
        self,
        claimant: WaitingPod,
        policy: str,
        node: str,
        scheduler_victims: Collection[str] = (),
        *,
        excluded: Collection[str] = (),
        removed: Collection[str] = (),
        refused: Collection[str] | None = None,
    ) -> Victims | None:
        """The victims on the node for the pod; None if no eviction helps.

        scheduler_victims: kube-scheduler's own victims.
        excluded: pods whose reserved cards this pod may use.
        removed: pods that will be evicted in any case.
        refused: pods whose eviction the Eviction API has refused. None: kube-scheduler deletes the victims, without the
            Eviction API.
        """
        priority = claimant.request.priority
        reserved = self.reservations_on((node,), {claimant.uid, *excluded}, priority)
        of_gang = self._cluster.gang_cards.holdings_on(node, claimant.rank, claimant.ref.namespace, claimant.uid)
        reserved += [NominatedReservation(holding, _NO_LOAD, ()) for holding in of_gang]
        full_node = self._make_full_node(
            claimant, node, removed=removed, reserved=reserved, budgets=self._budgets, refused=refused
        )
        if full_node is None:
            return None
        return preemption.least_harmful_victims(
            full_node, self._make_preemptor(claimant, policy, priority), scheduler_victims, self._pace
        )

    def find_unprotected_victims(
        self, claimant: WaitingPod, policy: str, node: str, *, refused: Collection[str], excluded: Collection[str] = ()
    ) -> Victims | None:
        """As `find_victims`, for evictions by the extender itself.

        Also None if a PodDisruptionBudget forbids the evictions, or if the node takes no pods. In its own preemptions,
        kube-scheduler leaves out nodes that take no pods.
        """
        if not self._cluster.loads.is_open(node):
            return None
        victims = self.find_victims(claimant, policy, node, excluded=excluded, refused=refused)
        return victims if victims is not None and not victims.violations else None

    def count_budget_violations(self, nodes: Iterable[str], uids: Collection[str]) -> int:
        """The number of evictions that exceed PodDisruptionBudgets, if all these pods on these nodes are evicted."""
        pods = [pod for node in nodes for _, pod in self._cluster.loads.pods_on(node) if pod.uid in uids]
        counts = Counter(key for pod in pods for key in self._budgets.covering_keys(pod.namespace, pod.labels))
        allowed = self._budgets.allowed_disruptions(counts)
        return sum(max(0, count - allowed[key]) for key, count in counts.items())

    def _search_cards(
        self, claimant: WaitingPod, node: str, place: NominatedPlace, limit: CheckLimit | None = None
    ) -> NominatedPlace:
        """The place, with the cards that the pod would get on its node; without cards if the pod does not fit there.

        Returns the place as it is if nothing has changed since it was searched.

        limit: limits the searches; None: no limit. Raises SearchTooLong.
        """
        state = self._cluster.ledger.node(node)
        reads = (
            state.generation if state is not None else None,
            self._cluster.loads.last_change_of(node),
            self._nominations.victims_on(node, claimant.uid),
            self._cluster.headroom_excluding(claimant.ref.namespace, claimant.uid),
        )
        if place.searched_on == reads:
            return place
        if limit is not None:
            limit.count(_CHECKS_PER_SEARCH)
        policy = policies.card_policy(claimant.request.policy, self._policy)
        victims = self.place_after_termination(claimant, policy, node)
        assignment = victims.assignment if victims is not None else None
        return replace(place, assignment=assignment, searched_on=reads)

    def _make_preemptor(self, claimant: WaitingPod, policy: str, priority: int) -> Preemptor:
        """The input of the victim search: the pod, for which pods below `priority` may be evicted."""
        return Preemptor(
            request=claimant.request,
            load=claimant.load,
            priority=priority,
            policy=policy,
            headroom=self._cluster.headroom_excluding(claimant.ref.namespace, claimant.uid),
        )

    def _make_full_node(
        self,
        claimant: WaitingPod,
        node: str,
        *,
        removed: Collection[str] = (),
        reserved: Sequence[NominatedReservation] = (),
        budgets: Budgets = _NO_BUDGETS,
        refused: Collection[str] | None = None,
    ) -> FullNode | None:
        """The input of the victim search: the node with its pods and reservations. None if there is no such node.

        removed: pods that will be evicted in any case.
        reserved: the reservations for other pods.
        refused: see `find_victims`.
        """
        free = self._cluster.loads.free_load(node)
        if free is None:
            return None
        planned = self._cluster.loads.get(claimant.uid)
        if planned is not None and planned.node == node:
            free = free.add(planned.load, 1)  # the pod is planned there but not bound, so its load counts as free
        # Victims of nominated pods count as gone, and the reservations for these pods count instead, even if
        # kube-scheduler has not chosen this node yet.
        leaving_uids = {
            *removed,
            *self._nominations.victims_on(node, claimant.uid),
            *(uid for nominated in reserved for uid in nominated.victims),
        }
        residents = [
            *self._residents(node, claimant.uid, leaving_uids, budgets, refused),
            *(_unevictable_resident(nominated.holding, leaving_uids) for nominated in reserved),
        ]
        return FullNode(
            kinds=self._cluster.ledger.kinds,
            node=self._node_with_reservations(node, claimant.uid, reserved),
            free=reduce(lambda less, nominated: less.add(nominated.load, -1), reserved, free),
            residents=residents,
            allowed=budgets.allowed_disruptions({budget for resident in residents for budget in resident.budgets}),
        )

    def _node_with_reservations(
        self, node: str, uid: str, reserved: Iterable[NominatedReservation]
    ) -> NodeState | None:
        """A copy of the node with the reservations there, and without the pod's own holding."""
        node_state = self._cluster.ledger.node(node)
        if node_state is None:
            return None
        state = node_state.copy_with(nominated.holding for nominated in reserved)
        own_holding = self._cluster.ledger.holding(uid)
        if own_holding is not None and own_holding.node == node:
            state.apply_assignment(own_holding.assignment, own_holding.mps_client, -1)
        return state

    def _residents(
        self,
        node: str,
        excluded_uid: str,
        leaving_uids: Collection[str],
        budgets: Budgets,
        refused: Collection[str] | None,
    ) -> list[Resident]:
        """All pods on the node, except the pod `excluded_uid`."""
        ledger, loads = self._cluster.ledger, self._cluster.loads
        residents, counted_uids = [], {excluded_uid}
        for key, placed_pod in loads.pods_on(node):
            uid = placed_pod.uid or key
            if uid == excluded_uid:
                continue
            counted_uids.add(uid)
            holding = ledger.holding(uid)
            if holding is not None and holding.node != node:
                holding = None
            if not placed_pod.uid:
                residents.append(Resident(uid, 0, placed_pod.load, holding, fixed=True))
                continue
            protecting = budgets.covering_keys(placed_pod.namespace, placed_pod.labels)
            # The Eviction API never evicts a pod that several PodDisruptionBudgets cover.
            is_kept = refused is not None and (uid in refused or len(protecting) > 1)
            is_leaving, fixed = placed_pod.terminating or uid in leaving_uids, placed_pod.fixed or is_kept
            residents.append(
                Resident(
                    uid,
                    placed_pod.priority,
                    placed_pod.load,
                    holding,
                    protecting,
                    is_leaving,
                    fixed,
                    placed_pod.grouped,
                )
            )
        residents += [
            _unevictable_resident(holding, leaving_uids)
            for holding in ledger.holdings(node)
            if holding.uid not in counted_uids
        ]
        return residents


def find_unknown_cards(
    lock: StateLock,
    cache: Cache,
    nominated_pods: NominatedPods,
    nodes: Collection[str] | None,
    is_over: Callable[[], bool],
) -> None:
    """Find the cards of nominated pods for which another extender has answered preempt. Called without the lock.

    nominated_pods: the nominated pods of `cache`.
    nodes: where the pods are nominated; None: all nodes.
    is_over: returns whether the search must end.

    The search runs on a snapshot, since it takes 1 ms for a pod on a node of 100 pods. The later search for
    victims or for a pod's node uses a different snapshot, but must find the same cards. So the result is kept until the
    node changes, also if no cards were found.
    """
    with lock:
        cache.sync_cards()
        unknown_nodes = set(nominated_pods.nodes_with_unknown_cards())
        if nodes is not None:
            unknown_nodes.intersection_update(nodes)
        if not unknown_nodes:
            return
        snapshot = cache.snapshot()
    searched_places = nominated_pods.with_snapshot(snapshot).search_unknown_cards(unknown_nodes, is_over)
    with lock:
        if not cache.has_leader_changed(snapshot):
            for place in searched_places:
                cache.nominations.set_searched_place(*place)


def _unevictable_resident(holding: Holding, leaving_uids: Collection[str]) -> Resident:
    """A holding that cannot be evicted: a plan, or the share of a vanished pod."""
    is_leaving = holding.phase_name == PHASE_NAMES[Phase.TERMINATING] or holding.uid in leaving_uids
    return Resident(holding.uid, 0, _NO_LOAD, holding, is_leaving=is_leaving, fixed=True)
