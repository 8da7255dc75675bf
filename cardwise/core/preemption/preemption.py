"""Preemption on one node: the fewest and least important pods that must be evicted before a pod fits there.

kube-scheduler counts only the totals of a node, so evicting its victims may not free enough on any card. This search
checks each card as well as the node's totals. The placement engine checks the outcome, and every victim is necessary:
if any victim stayed, the pod would not fit. A search must end soon, so two efforts are limited: `CoverEffort` limits
how many sets of cards and pods are compared, and `SearchEffort` how many placements are tried.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import add, sub
from typing import Final, NamedTuple

from cardwise.core.api import policies
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.quotas import Headroom
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.placement import fitting, placement
from cardwise.core.placement.holding import Holding
from cardwise.core.placement.kinds import CardKinds
from cardwise.core.placement.nodestate import NodeState
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.preemption import cardvictims, setcover
from cardwise.core.preemption.setcover import EXCESS_COST, Cover, CoverEffort, Victim
from cardwise.core.values.refusals import Refusal

_PLACEMENT_STEPS: Final = 1024  # the effort of all placements that one search tries, see `SearchEffort`
_MAX_CANDIDATES: Final = 512  # possible victims on a node: the least important pods; by default a kubelet runs 110
_MAX_CLASSES: Final = 6  # classes of devices in a request up to which all their sets are checked, see `_class_sets`


class Resident(NamedTuple):
    """A pod on the node.

    holding: the cards and devices that the pod holds; None if it holds none.
    budgets: the disruption budgets that select the pod.
    is_leaving: whether the pod is being deleted.
    fixed: whether the pod must not be evicted.
    grouped: whether the pod is in a PodGroup of Kubernetes, whose pods may have to be evicted together.
    """

    uid: str
    priority: int
    load: Load = Load()
    holding: Holding | None = None
    budgets: tuple[str, ...] = ()
    is_leaving: bool = False
    fixed: bool = False
    grouped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FullNode:
    """A full node.

    kinds: the kinds of cards of the node's ledger.
    node: the state of the cards; None if the node has none.
    free: the free cpu, memory and pod slots; negative if the node is overcommitted.
    residents: the pods on the node.
    allowed: how many evictions each disruption budget allows.
    """

    kinds: CardKinds
    node: NodeState | None
    free: Load
    residents: Sequence[Resident]
    allowed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemptor:
    """The pod that other pods may be evicted for.

    request: its cards and devices; None if it requests none.
    headroom: the amounts that quotas leave to its namespace. Evictions are assumed not to change them.
    """

    request: PodRequest | None
    load: Load
    priority: int
    policy: str = policies.DEFAULT_POLICY
    headroom: Sequence[Headroom] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """The pods to evict.

    uids: the UIDs of the pods to evict; empty if the pods that are being deleted already free enough.
    violations: how many evictions exceed disruption budgets.
    highest_priority: the highest priority of the victims; None without victims.
    assignment: the cards that the newcomer gets; None if it requests none.
    """

    uids: tuple[str, ...]
    violations: int = 0
    highest_priority: int | None = None
    assignment: Assignment | None = None

    @property
    def harm(self) -> tuple[int, bool, int, int]:
        """A sort key for sets of victims: the set with the smallest key is the least harmful."""
        return self.violations, self.highest_priority is not None, self.highest_priority or 0, len(self.uids)


def least_harmful_victims(
    full_node: FullNode, newcomer: Preemptor, chosen: Collection[str] = (), pace: Callable[[], object] = lambda: None
) -> Victims | None:
    """Find the least harmful set of victims that lets the newcomer fit; None if there is none.

    For a pod with several card requests or cards, also returns None if the effort is spent before a set is found.

    chosen: the UIDs of kube-scheduler's own victims. kube-scheduler may have a reason outside the node's totals (ports,
        affinity, a group that is evicted together). Then the victim stays in the set. If one of these victims is on
        another node, returns None. The response may name only pods of this node, so only a part of the group would be
        evicted.
    pace: called before each step, which may take some milliseconds. If it raises, the search ends.
    """
    if not {resident.uid for resident in full_node.residents}.issuperset(chosen):
        return None
    return _VictimSearch(full_node, newcomer, chosen, pace).find_victims()


class _Sums(NamedTuple):
    """Amounts that kube-scheduler counts for a node, as far as the extender knows them.

    gpu_mem: MiB of GPU memory.
    gpu_core: percent of SMs, where 100 is one card.
    whole: whole cards.
    """

    cpu: int
    memory: int
    pods: int
    gpu_mem: int
    gpu_core: int
    whole: int

    def add(self, other: "_Sums") -> "_Sums":
        return _Sums._make(map(add, self, other))

    def subtract(self, other: "_Sums") -> "_Sums":
        return _Sums._make(map(sub, self, other))

    def shortfall(self, requested: "_Sums") -> dict[object, int]:
        """The missing amounts, by name, if `self` is free. As in kube-scheduler, only the requested amounts matter."""
        amounts = zip(_Sums._fields, self, requested, strict=True)
        return {name: need - free for name, free, need in amounts if need > max(0, free)}


class _Node:
    """The node without some of its pods.

    free: the free totals.
    sums: by UID, the totals that each pod uses.
    """

    def __init__(self, state: NodeState | None, free: _Sums, sums: Mapping[str, _Sums]) -> None:
        self.state = state
        self.free = free
        self._sums = sums

    def without_pods(self, residents: Iterable[Resident]) -> "_Node":
        return self._copy_with_change(residents, -1)

    def with_resident_restored(self, resident: Resident) -> "_Node":
        """The node with one of these pods added again."""
        return self._copy_with_change((resident,), 1)

    def _copy_with_change(self, residents: Iterable[Resident], sign: int) -> "_Node":
        """A copy of the node on which these pods are added (sign 1) or removed (sign -1)."""
        state, free = self.state.copy() if self.state is not None else None, self.free
        for resident in residents:
            sums = self._sums[resident.uid]
            free = free.add(sums) if sign < 0 else free.subtract(sums)
            if state is not None and resident.holding is not None:
                state.apply_assignment(resident.holding.assignment, resident.holding.mps_client, sign)
        return _Node(state, free, self._sums)


class _VictimSearch:
    """Searches for the victims on one node for one pod, the newcomer.

    `_node` is the node without the pods that are being deleted and without the unexplained victims.
    """

    def __init__(
        self, full_node: FullNode, newcomer: Preemptor, chosen: Collection[str], pace: Callable[[], object]
    ) -> None:
        self._pace = pace
        self._newcomer = newcomer
        self._kinds = full_node.kinds
        self._allowed_evictions = full_node.allowed
        self._residents = {resident.uid: resident for resident in full_node.residents}
        self._scorer = (
            placement.Scorer(full_node.kinds, newcomer.request, newcomer.policy, newcomer.headroom)
            if newcomer.request is not None
            else None
        )
        self._placement_effort = SearchEffort(_PLACEMENT_STEPS, reasons=False)
        self._victims: dict[str, Victim] = {}  # by UID, cached for all searches
        self._requested = _requested_sums(newcomer)
        self._sums = {resident.uid: _sums(resident.load, resident.holding) for resident in full_node.residents}
        initial_node = _Node(full_node.node, _free_sums(full_node), self._sums)
        self._forced_uids = self._unexplained_victims(initial_node, chosen)
        forced_residents = [self._residents[uid] for uid in self._forced_uids]
        self._node = initial_node.without_pods(
            [*forced_residents, *(r for r in full_node.residents if r.is_leaving and r.uid not in self._forced_uids)]
        )
        self._forced_victims = [Victim(resident.uid, {}, resident.budgets) for resident in forced_residents]
        self._plan = self._make_search_plan(self._node.state)

    def find_victims(self) -> Victims | None:
        candidates = [
            resident
            for resident in self._residents.values()
            if resident.priority < self._newcomer.priority
            and not (resident.is_leaving or resident.fixed or resident.grouped)
            and resident.uid not in self._forced_uids
        ]
        candidates.sort(key=lambda resident: (resident.priority, resident.uid))
        del candidates[_MAX_CANDIDATES:]
        cover = self._cheapest_cover(candidates)
        if cover is None:
            return None
        # Of the sets with the fewest violations, choose one whose highest priority is the lowest.
        priorities = sorted({resident.priority for resident in candidates})
        low, high = 0, len(priorities) - 1
        while low < high:
            middle = (low + high) // 2
            lower = self._cheapest_cover([r for r in candidates if r.priority <= priorities[middle]])
            if lower is not None and lower.cost // EXCESS_COST <= cover.cost // EXCESS_COST:
                cover, high = lower, middle
            else:
                low = middle + 1
        return self._minimal_victims([self._residents[victim.name] for victim in cover.victims])

    def _unexplained_victims(self, node: _Node, chosen: Collection[str]) -> tuple[str, ...]:
        """The chosen victims that the node's totals do not explain: kube-scheduler has another reason to evict them.

        As in kube-scheduler, pods that are being deleted count, and pods whose objects are deleted do not.
        """
        vanished = {resident.uid for resident in self._residents.values() if resident.is_leaving and resident.fixed}
        without_chosen = node.without_pods(self._residents[uid] for uid in vanished.union(chosen))
        forced = []
        for uid in sorted(chosen):
            resident = self._residents[uid]
            if resident.is_leaving:
                continue
            if resident.fixed or resident.grouped or resident.priority >= self._newcomer.priority:
                forced.append(uid)
                continue
            if not self._shortfall(without_chosen.with_resident_restored(resident)):
                forced.append(uid)
        return tuple(forced)

    def _shortfall(self, node: _Node) -> dict[object, int]:
        """The missing amounts besides cards."""
        request = self._newcomer.request
        shortfall = node.free.shortfall(self._requested)
        if request is not None and request.devices and node.state is not None:
            shortfall |= _device_shortfall(node.state, request)
        return shortfall

    def _make_search_plan(self, state: NodeState | None) -> fitting.SearchPlan | None:
        if self._newcomer.request is None or state is None:
            return None
        return fitting.make_search_plan(
            fitting.card_requests(self._newcomer.request), self._kinds, self._newcomer.headroom
        )

    def _cheapest_cover(self, candidates: Sequence[Resident]) -> Cover | None:
        """The cheapest set of these candidates that lets the newcomer fit. Priorities are not compared."""
        self._pace()
        if not candidates:
            cover = Cover(0, ())
            return cover if self._is_valid(cover) else None
        possible_victims = [self._victim_of(resident) for resident in candidates]
        shortfall, allowed = self._shortfall(self._node), self._remaining_budgets()
        if self._newcomer.request is None:
            return setcover.cheapest_cover(possible_victims, shortfall, allowed, CoverEffort())
        if self._node.state is None or self._plan is None:
            return None
        state, plan = self._node.state, self._plan
        return cardvictims.find_cheapest_victims(
            state,
            plan,
            possible_victims,
            needs=shortfall,
            allowed=allowed,
            is_valid=self._is_valid,
            effort=CoverEffort(),
        )

    def _victim_of(self, resident: Resident) -> Victim:
        if resident.uid not in self._victims:
            self._victims[resident.uid] = Victim(resident.uid, self._freed_amounts(resident), resident.budgets)
        return self._victims[resident.uid]

    def _freed_amounts(self, resident: Resident) -> dict[object, int]:
        amounts: dict[object, int] = dict(zip(_Sums._fields, self._sums[resident.uid], strict=True))
        state, request = self._node.state, self._newcomer.request
        if state is not None and resident.holding is not None:
            amounts |= cardvictims.freed_amounts(state, resident.holding)
            if request is not None and request.devices:
                amounts |= _freed_devices(state, request, resident.holding.assignment)
        return amounts

    def _remaining_budgets(self) -> dict[str, int]:
        remaining_budgets = dict(self._allowed_evictions)
        for victim in self._forced_victims:
            for budget in victim.budgets:
                remaining_budgets[budget] = remaining_budgets.get(budget, 0) - 1
        return remaining_budgets

    def _is_valid(self, cover: Cover) -> bool:
        node = self._node.without_pods([self._residents[victim.name] for victim in cover.victims])
        return self._can_fit(node)

    def _can_fit(self, node: _Node) -> bool:
        """Whether the newcomer fits on this node. False also if the effort is spent."""
        self._pace()
        effort = self._placement_effort
        if effort.remaining <= 0:
            return False
        if self._plan is not None:  # each card request after the first takes a copy of the node
            effort.remaining -= max(0, len(self._plan.typed_requests) - 1)
        return self._place_newcomer(node, effort) is not None

    def _place_newcomer(self, node: _Node, effort: SearchEffort | None = None) -> Assignment | bool | None:
        """The newcomer's assignment on this node; True if it requests no cards and devices; None if it does not fit.

        effort: the effort that all placements share; None for an effort of this placement only.
        """
        if node.free.shortfall(self._requested):
            return None
        if self._scorer is None:
            return True
        placed = self._scorer.place_on(node.state, effort)
        return None if isinstance(placed, Refusal) else placed.assignment

    def _minimal_victims(self, removed: list[Resident]) -> Victims | None:
        """The victims without those that are not necessary. There may be such victims, because the search may end
        before it finds the cheapest set. When the effort is spent, the remaining victims count as necessary.
        """
        node = self._node.without_pods(removed)
        for victim in sorted(removed, key=lambda resident: (-resident.priority, resident.uid)):
            fuller = node.with_resident_restored(victim)
            if self._can_fit(fuller):
                removed = [resident for resident in removed if resident is not victim]
                node = fuller
        fit = self._place_newcomer(node)  # with an effort of its own, which is enough for the same placement
        if fit is None:
            return None
        all_victims = [*removed, *(self._residents[uid] for uid in self._forced_uids)]
        charged = [Victim(resident.uid, {}, resident.budgets) for resident in all_victims]
        return Victims(
            uids=tuple(sorted({resident.uid for resident in removed} | set(self._forced_uids))),
            violations=setcover.budget_excess(charged, self._allowed_evictions),
            highest_priority=max((resident.priority for resident in all_victims), default=None),
            assignment=fit if isinstance(fit, Assignment) else None,
        )


def _requested_sums(newcomer: Preemptor) -> _Sums:
    request, load = newcomer.request, newcomer.load
    shares = [container for container in request.containers if not container.whole] if request is not None else []
    whole_cards = (
        sum(container.cards for container in request.containers if container.whole) if request is not None else 0
    )
    return _Sums(
        load.cpu,
        load.memory,
        load.pods,
        sum(container.mem for container in shares),
        sum(container.core for container in shares),
        whole_cards,
    )


def _sums(load: Load, holding: Holding | None) -> _Sums:
    shares = holding.assignment.shares() if holding is not None else []
    partial_shares = [share for share in shares if not share.whole]
    mem, core = sum(share.mem for share in partial_shares), sum(share.core for share in partial_shares)
    return _Sums(load.cpu, load.memory, load.pods, mem, core, len(shares) - len(partial_shares))


def _free_sums(full_node: FullNode) -> _Sums:
    """The free amounts as kube-scheduler counts them: the totals of all cards, minus the requests of pods."""
    cards = full_node.node.cards if full_node.node is not None else []
    used_sums = _Sums(0, 0, 0, 0, 0, 0)
    for resident in full_node.residents:
        used_sums = used_sums.add(_sums(Load(0, 0, 0), resident.holding))
    load = full_node.free
    core_per_card = full_node.node.core if full_node.node is not None else 0
    mem, core = sum(card.mem for card in cards) - used_sums.gpu_mem, core_per_card * len(cards) - used_sums.gpu_core
    return _Sums(load.cpu, load.memory, load.pods, mem, core, len(cards) - used_sums.whole)


# Devices other than GPUs. By Hall's theorem, there are enough devices if each set of the requested classes has enough
# devices that are in one of these classes.


def _class_sets(request: PodRequest) -> list[tuple[frozenset[str], int]]:
    """The sets of requested classes, each with the number of requested devices of these classes. For more than
    `_MAX_CLASSES` classes, only the sets of one class and the set of all classes.
    """
    counts: dict[str, int] = {}
    for device_request in request.devices:
        counts[device_request.resource_class] = counts.get(device_request.resource_class, 0) + device_request.count
    names = sorted(counts)
    sizes = range(1, len(names) + 1) if len(names) <= _MAX_CLASSES else (1, len(names))
    sets = [frozenset(class_set) for size in sizes for class_set in combinations(names, size)]
    return [(class_set, sum(counts[name] for name in class_set)) for class_set in sets]


def _device_shortfall(node: NodeState, request: PodRequest) -> dict[object, int]:
    free_devices = list(filter(node.is_free, node.devices))
    shortfall: dict[object, int] = {}
    for class_set, need in _class_sets(request):
        available = sum(not class_set.isdisjoint(device.classes) for device in free_devices)
        if available < need:
            shortfall[class_set] = need - available
    return shortfall


def _freed_devices(node: NodeState, request: PodRequest, assignment: Assignment) -> dict[object, int]:
    uuids = {share.uuid for share in assignment.non_gpu_devices()}
    freed = [d for d in node.devices if d.uuid in uuids and d.accepts_pods and node.device_holds.get(d.uuid) == 1]
    return {
        class_set: sum(not class_set.isdisjoint(device.classes) for device in freed)
        for class_set, _ in _class_sets(request)
    }
