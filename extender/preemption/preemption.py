"""Preemption: which pods of a node must be evicted for a pod, and which cards are reserved for the pod meanwhile.

This module belongs to the state and uses its lock. The search for victims is in `cardwise.core.preemption`.

kube-scheduler calls preempt only for nodes where a total is too small. Its dry run removes all pods of lower priority
from the node, and puts them back one by one while its own filters pass. For kube-scheduler, whole cards and shares are
different resources, and memory is one sum for all cards. So if only single cards are too full, the dry run puts every
pod back and has no victim. Then the verb preempt is never called (`SelectVictimsOnNode`, `DryRunPreemption`). For such
nodes the extender itself preempts: filter records the pod in the scheduling queue, `next_evictions` finds the victims,
and `controllers.evictions` evicts them.
"""

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from sys import intern
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.preemption.preemption import Victims
from cardwise.kube.pods.budgets import Budget
from extender.cache.cache import Cache
from extender.cache.clusterview import Changes, ClusterView
from extender.cache.nominated import NominatedPods, find_unknown_cards
from extender.cache.nominations import MemberReservation, NominatedPlace
from extender.cache.pacing import LOCKED_SECONDS, Pace, PlanningStopped, pause, stop_after_cpu
from extender.cache.reservations import Phase
from extender.cache.statelock import StateLock
from extender.gangs.gangplaces import GangPlaces
from extender.gangs.gangs import Gangs
from extender.preemption.gangpreemption import (
    GangPreemption,
    GangSearch,
    GangSnapshot,
    GangVictims,
    GangVictimSearch,
)
from extender.queue.schedulingqueue import PodAwaitingPreemption
from extender.records.pod import Pod, WaitingPod
from extender.records.podref import PodRef

_CALL_SEARCH_SECONDS: Final = 0.5  # seconds for the search of one call; kube-scheduler waits 1 s
_CALL_GANG_PLAN_SECONDS: Final = 0.2  # the part of `_CALL_SEARCH_SECONDS` for the plans of a gang
# The part of `_CALL_SEARCH_SECONDS` for the wait until the nodes chosen from earlier answers are known.
_CHOSEN_NODES_WAIT_SECONDS: Final = 0.25
_CHECK_SECONDS: Final = 0.005  # seconds between two checks of these choices
_BACKGROUND_SEARCH_SECONDS: Final = 5.0  # seconds for a search for which kube-scheduler does not wait
_BACKGROUND_GANG_PLAN_SECONDS: Final = 2.0  # the part of `_BACKGROUND_SEARCH_SECONDS` for the plans of a gang
_MAX_SEARCHES: Final = 8  # searches in one call for a gang, if the cluster changes again and again
# Maximum numbers of nodes, and of members with victims, that are checked under the lock; if there are more, they are
# checked before.
_MAX_CHECKED_NODES: Final = 16
_MAX_CHECKED_MEMBERS: Final = 8
_MAX_LOCKED_SECONDS: Final = 0.012  # seconds of CPU after which a search for victims under the lock ends
_MAX_CHECKS: Final = 8  # maximum number of checks of one search result: the cluster may change during a check
_MAX_FEWER_VICTIMS_CHECKS: Final = 3  # checks of whether fewer victims are enough for a gang, before they are evicted
_STEP_SECONDS: Final = 0.02  # seconds of CPU, after which no further pod is searched for in one step
# Nodes that are searched for one pod; kube-scheduler tries a tenth of all nodes, and at least 100.
_MAX_NODES: Final = 256
_MAX_CANDIDATE_NODES: Final = 32  # nodes with victims to choose from, for a pod or for each member of a gang


@dataclass(frozen=True, slots=True)
class Eviction:
    """The victims that the extender itself evicts for a pod, the pod, and its reservation."""

    claimant: WaitingPod
    node: str
    victims: tuple[PodRef, ...]
    place: NominatedPlace


class _PreemptCall(NamedTuple):
    """A call of the verb preempt.

    scheduler_victims: kube-scheduler's own victims, by node.
    own_eviction_nodes: nodes where the extender itself evicts for other members of the pod's gang.
    excluded: members of the gang whose reserved cards the pod may use.
    refused: pods that the Eviction API has refused.
    """

    claimant: WaitingPod
    policy: str
    scheduler_victims: Mapping[str, Collection[str]]
    own_eviction_nodes: Collection[str]
    excluded: Collection[str]
    refused: Collection[str]

    def find_victims(self, nominated: NominatedPods, node: str) -> Victims | None:
        """The victims on the node; None if no eviction helps."""
        if node in self.own_eviction_nodes:
            return nominated.find_unprotected_victims(
                self.claimant, self.policy, node, refused=self.refused, excluded=self.excluded
            )
        return nominated.find_victims(
            self.claimant, self.policy, node, self.scheduler_victims[node], excluded=self.excluded
        )


class _Commit(Enum):
    """The outcome for a gang's victims: they are committed; they are not needed now; or something on which they depend
    has changed.
    """

    DONE = auto()
    REFUSED = auto()
    CONFLICT = auto()


class _Candidates(NamedTuple):
    """The victims for a pod by node, and the snapshots on which they were found.

    gang: the snapshot of the pod's gang; None if the pod has no gang, or if the gang gets no victims.
    """

    cluster: ClusterView
    gang: GangSnapshot | None
    victims: dict[str, Victims]


class Preemption:
    """Chooses victims. Any thread may call the methods, except under headings that say that the caller holds
    the lock.
    """

    def __init__(
        self,
        lock: StateLock,
        *,
        cache: Cache,
        nominated: NominatedPods,
        gangs: Gangs,
        places: GangPlaces,
        clock: Clock,
    ) -> None:
        self._lock = lock
        self._cache = cache
        self._loads = cache.loads
        self._nominated = nominated
        self._nominations = cache.reservations.nominations
        self._queue = cache.queue
        self._places = places
        self._gang_preemption = GangPreemption(gangs, places, cache=cache, clock=clock)
        self._clock = clock
        # The pod for which the extender searches victims now, and the nodes of its refusal before.
        self._searched_uid, self._searched_nodes = "", tuple[str, ...]()
        self._refused: dict[str, float] = {}  # until when, by UID: pods that the Eviction API has refused

    # Objects of the API server.

    def set_budget(self, key: str, budget: Budget) -> None:
        """Update the PodDisruptionBudget `key`, "namespace/name"."""
        with self._lock:
            self._cache.budgets.set_budget(key, budget)

    def remove_budget(self, key: str) -> None:
        """Remove the PodDisruptionBudget `key`, "namespace/name"."""
        with self._lock:
            self._cache.budgets.remove_budget(key)

    def find_unknown_cards(self, nodes: Collection[str] | None, is_over: Callable[[], bool]) -> None:
        """As `nominated.find_unknown_cards`."""
        find_unknown_cards(self._lock, self._cache, self._nominated, nodes, is_over)

    # Calls of kube-scheduler.

    def answer_preempt(
        self, claimant: WaitingPod, policy: str, scheduler_victims: Mapping[str, Collection[str]], *, member: bool
    ) -> dict[str, Victims]:
        """The victims whose eviction makes the pod fit, by node. Reserves the freed cards for the pod.

        Leaves out nodes where no eviction helps.

        scheduler_victims: kube-scheduler's own victims, by node.
        member: whether the pod may be in a gang that does not run.
        """
        until = self._clock.now() + _CALL_SEARCH_SECONDS
        search_until = until - _CALL_GANG_PLAN_SECONDS if member else until
        self._await_chosen_nodes()
        with self._lock:
            # Nodes where the extender itself evicts for other members.
            ours = set(self._queue.preemption_nodes(claimant.uid)) - scheduler_victims.keys() if member else set[str]()
        self.find_unknown_cards({*scheduler_victims, *ours}, lambda: self._clock.now() > search_until)
        with self._lock:
            self._cache.sync_cards()
            if self._is_answered(claimant, policy, scheduler_victims):
                return {}
            if member and self._gang_preemption.is_over_quota(claimant.uid):
                return {}
            excluded = self._gang_preemption.unplaced_uids(claimant.uid)
            call = _PreemptCall(claimant, policy, scheduler_victims, ours, excluded, self._refused)
            snapshot = self._cache.snapshot()
            gang_snapshot = self._gang_preemption.take_snapshot(claimant.uid, snapshot) if member else None
        nominated, answers = self._nominated.with_snapshot(snapshot), dict[str, Victims]()
        for node in (*sorted(scheduler_victims), *sorted(ours)):
            if self._clock.now() > search_until:
                break
            victims = call.find_victims(nominated, node)
            if victims is not None:
                answers[node] = victims
        with self._lock:
            self._cache.sync_cards()
            if not (member and self._gang_preemption.is_in_pending_gang(claimant.uid)):
                return self._commit_answers(call, snapshot, answers)
        search = GangSearch(
            claimant,
            policy,
            scheduler_victims,
            own_eviction_nodes=ours,
            refused=call.refused,
            for_scheduler=True,
            is_over=lambda: self._clock.now() > until,
            find_victims=call.find_victims,
            commit=self._commit_gang_answer,
        )
        gang_victims = self._search_gang(search, gang_snapshot, answers)
        if gang_victims is None:
            return {}
        first = gang_victims.member_victims[0]
        return {first.node: first.victims}

    def are_pods_on(self, node: str, uids: Collection[str]) -> bool:
        """Whether all these pods are on the node. kube-scheduler accepts only such pods in the answer."""
        with self._lock:
            uids_on_node = {placed.uid for _, placed in self._loads.pods_on(node)}
        return uids_on_node.issuperset(uids)

    # Pods for which only the extender can preempt.

    def on_refused(self, pod: Pod, policy: str, nodes: Iterable[str]) -> None:
        """Record that filter has refused the pod. If a preemption may help, the extender will search for victims.

        nodes: the nodes whose totals suffice, and where an eviction could help. Empty: the pod waits for something
            else.

        Pods are not evicted for a pod that waits for its quota.
        """
        if not pod.uid:
            return
        with self._lock:
            # kube-scheduler preempts for a PodGroup of Kubernetes as a whole, and asks no extender about that.
            may = pod.may_preempt and not pod.grouped and not self._is_over_quota(pod)
            # Usually all pods have the same priority, and then thousands of nodes need not be searched.
            offered = set(nodes) if may and self._loads.has_victims(pod.priority) else set[str]()
            lower = self._loads.nodes_with_victims(offered, pod.priority)
            if not lower:
                self._queue.stop_awaiting_preemption(pod.uid)
                return
            searched_nodes = offered.intersection(self._searched_nodes) if pod.uid == self._searched_uid else set[str]()
            if len(offered) > _MAX_NODES and searched_nodes:
                offered = searched_nodes  # the search that runs now may evict only on nodes of the last refusal
            elif len(offered) > _MAX_NODES:
                # Other nodes each time, so that every node is searched in the end; and the nodes where the pod may only
                # have to wait.
                freeing_nodes = _sample_nodes(self._nodes_freeing_cards(offered), _MAX_NODES // 2)
                offered = {*freeing_nodes, *_sample_nodes(lower, _MAX_NODES - len(freeing_nodes))}
            names = map(intern, offered)  # a thousand pods may wait
            self._queue.await_preemption(pod.waiting(), policy, names, gang=pod.gang)

    def next_evictions(self) -> list[Eviction]:
        """The evictions for the next pod that has victims. That pod's cards are reserved from now on.

        Empty if no pod is due, or if the search has taken `_STEP_SECONDS` seconds. A pod cannot be a victim in three
        cases: a PodDisruptionBudget protects the pod, several budgets cover the pod, or the eviction of the pod was
        refused lately.
        """
        began = self._clock.cpu()
        while self._clock.cpu() - began < _STEP_SECONDS:
            with self._lock:
                now = self._clock.now()
                pending = self._queue.next_preemption(self._needs_no_victims)
                self._refused = {uid: until for uid, until in self._refused.items() if until > now}
                if pending is None:
                    return []
                self._searched_uid, self._searched_nodes = pending.claimant.uid, pending.nodes
            since, evictions = self._clock.cpu(), list[Eviction]()
            try:
                evictions = self._search_for_gang(pending) if pending.gang else self._search_for_pod(pending)
            finally:
                with self._lock:
                    self._searched_uid = ""
                    # Also after an error: the search is paid for, and not repeated at once.
                    self._queue.on_searched(pending, self._clock.cpu() - since, in_vain=not evictions)
            if evictions:
                return evictions
            pause(self._clock)
        return []

    def is_eviction_needed(self, eviction: Eviction, victim: str) -> bool:
        """Whether the victim must still be evicted for the pod."""
        with self._lock:
            nomination = self._nominations.get(eviction.claimant.uid)
            place = nomination.places.get(eviction.node) if nomination is not None else None
            placed = self._loads.get(victim)
            is_terminating = placed is not None and placed.terminating
            return place is not None and victim in place.victims and not is_terminating

    def on_eviction_failed(self, eviction: Eviction, refused: Iterable[str], seconds: float) -> None:
        """Release the pod's reservation, because victims could not be evicted.

        refused: UIDs of these victims.
        seconds: for how long these victims are not chosen again. Otherwise the same victims would be tried again and
            again, and other pods would be evicted without effect.
        """
        with self._lock:
            self._refused = self._refused | dict.fromkeys(refused, self._clock.now() + seconds)
            nomination = self._nominations.get(eviction.claimant.uid)
            if nomination is not None and nomination.places.get(eviction.node) is eviction.place:
                self._nominations.remove(eviction.claimant.uid)
                self._cache.capacity.mark_freed()

    def _search_for_pod(self, pending: PodAwaitingPreemption) -> list[Eviction]:
        candidates = self._find_candidates(pending, self._clock.now() + _BACKGROUND_SEARCH_SECONDS)
        with self._lock:
            self._cache.sync_cards()
            try:
                return self._commit_eviction(pending, candidates.cluster, candidates.victims)
            except PlanningStopped:
                return []  # searched again, on a later snapshot

    def _search_for_gang(self, pending: PodAwaitingPreemption) -> list[Eviction]:
        """The evictions for all members that lack cards. If one victim may not be evicted, no victim is evicted."""
        uid = pending.claimant.uid
        with self._lock:
            if not self._gang_preemption.is_in_pending_gang(uid):
                return []  # it is placed alone by now, and is refused again as a single pod
            if self._gang_preemption.is_over_quota(uid):
                return []
            unhelped = self._gang_preemption.unplaced_uids(uid)
        until, refused, evictions = self._clock.now() + _BACKGROUND_SEARCH_SECONDS, self._refused, list[Eviction]()
        candidates = self._find_candidates(pending, until - _BACKGROUND_GANG_PLAN_SECONDS, unhelped)

        def find_victims(nominated: NominatedPods, node: str) -> Victims | None:
            return nominated.find_unprotected_victims(
                pending.claimant, pending.policy, node, refused=refused, excluded=unhelped
            )

        def commit(gang_victims: GangVictims) -> bool:
            evictions.extend(self._make_gang_evictions(pending, gang_victims))
            return bool(evictions)

        search = GangSearch(
            pending.claimant,
            pending.policy,
            {},
            own_eviction_nodes=set(pending.nodes),
            refused=refused,
            for_scheduler=False,
            is_over=Pace(self._clock, lambda: self._clock.now() > until).pause,
            find_victims=find_victims,
            commit=commit,
        )
        if candidates.victims:
            self._search_gang(search, candidates.gang, candidates.victims)
        return evictions

    def _search_gang(
        self, search: GangSearch, snapshot: GangSnapshot | None, victims_by_node: Mapping[str, Victims]
    ) -> GangVictims | None:
        """Search victims for the gang until they can be committed; None if the gang gets none now.

        snapshot: the gang and the cluster; None if the pod's gang gets no victims.
        victims_by_node: the victims for the requested pod alone, found on the snapshot.
        """
        for _ in range(_MAX_SEARCHES):
            if snapshot is None:
                break
            gang_victims = self._make_gang_search(search, snapshot, victims_by_node).find_victims()
            if gang_victims is None:
                break
            match self._commit_gang(search, snapshot, victims_by_node, gang_victims):
                case _Commit.DONE:
                    return gang_victims
                case _Commit.REFUSED:
                    break
                case _Commit.CONFLICT if search.is_over():
                    break
            former, snapshot = snapshot, self._take_gang_snapshot(search, snapshot)
            if snapshot is not None:
                changes = Changes(snapshot.cluster, former.cluster, search.claimant)
                changed_nodes = filter(changes.may_concern, search.nodes)
                victims_by_node = self._search_nodes_again(search, snapshot, victims_by_node, changed_nodes)
        return None

    def _commit_gang(
        self,
        search: GangSearch,
        snapshot: GangSnapshot,
        victims_by_node: Mapping[str, Victims],
        gang_victims: GangVictims,
    ) -> _Commit:
        """Commit the victims, if they are still valid, and if fewer victims are not enough now.

        Fewer victims may be enough if capacity was freed, or if something has changed on the nodes where the pod's
        victims were searched. This is checked on a later snapshot, at most `_MAX_FEWER_VICTIMS_CHECKS` times.
        """
        claimant, latest, checked, checks = search.claimant, snapshot, snapshot, 0
        for _ in range(_MAX_CHECKS):
            with self._lock:
                self._cache.sync_cards()
                if self._cache.has_leader_changed(snapshot.cluster):
                    return _Commit.REFUSED
                if self._gang_preemption.has_members_changed(snapshot, claimant):
                    return _Commit.CONFLICT
                nodes = self._gang_preemption.nodes_to_check(checked, gang_victims)
                checked = replace(snapshot, cluster=self._cache.snapshot())
                is_small = (
                    len(nodes) <= _MAX_CHECKED_NODES
                    and gang_victims.count_members_with_victims(nodes) <= _MAX_CHECKED_MEMBERS
                )
                if is_small:
                    pace = stop_after_cpu(self._clock, _MAX_LOCKED_SECONDS)
                    try:
                        gang_search = self._make_gang_search(search, checked, victims_by_node, pace)
                        if not gang_search.still_holds(gang_victims, nodes):
                            return _Commit.CONFLICT
                    except PlanningStopped:  # some members have many requests
                        is_small = False
                        checked = replace(snapshot, cluster=self._cache.snapshot())
                if is_small:
                    changed_nodes = self._gang_preemption.changed_nodes(latest, claimant, search.nodes)
                    may_need_fewer = bool(changed_nodes) or self._gang_preemption.is_capacity_freed(latest)
                    if not may_need_fewer or checks == _MAX_FEWER_VICTIMS_CHECKS or search.is_over():
                        return _Commit.DONE if search.commit(gang_victims) else _Commit.REFUSED
                    later = self._gang_preemption.take_snapshot(claimant.uid, self._cache.snapshot())
            if not is_small:
                if not self._make_gang_search(search, checked, victims_by_node).still_holds(gang_victims, nodes):
                    return _Commit.CONFLICT
                continue
            if later is None:
                return _Commit.REFUSED
            victims_by_node = self._search_nodes_again(search, later, victims_by_node, changed_nodes)
            if self._make_gang_search(search, later, victims_by_node).suffices_without_last(gang_victims):
                return _Commit.CONFLICT
            latest, checks = later, checks + 1
        return _Commit.CONFLICT

    def _search_nodes_again(
        self, search: GangSearch, snapshot: GangSnapshot, victims_by_node: Mapping[str, Victims], nodes: Iterable[str]
    ) -> dict[str, Victims]:
        """The victims by node, after searching `nodes` again on the snapshot, as far as the search's time allows."""
        nominated, searched_again = self._nominated.with_snapshot(snapshot.cluster), dict[str, Victims | None]()
        for node in nodes:
            if search.is_over():
                break
            searched_again[node] = search.find_victims(nominated, node)
        return {node: victims for node, victims in {**victims_by_node, **searched_again}.items() if victims is not None}

    def _take_gang_snapshot(self, search: GangSearch, former: GangSnapshot) -> GangSnapshot | None:
        """A later snapshot for the search; None if the pod's gang gets no victims now."""
        self.find_unknown_cards(search.nodes, search.is_over)
        with self._lock:
            self._cache.sync_cards()
            if self._cache.has_leader_changed(former.cluster) or self._is_gang_answered(search):
                return None
            return self._gang_preemption.take_snapshot(search.claimant.uid, self._cache.snapshot())

    def _make_gang_search(
        self,
        search: GangSearch,
        snapshot: GangSnapshot,
        victims_by_node: Mapping[str, Victims],
        pace: Callable[[], object] = lambda: None,
    ) -> GangVictimSearch:
        nominated = self._nominated.with_snapshot(snapshot.cluster)
        planner = self._places.make_planner(snapshot.cluster, nominated)
        return GangVictimSearch(
            search,
            snapshot,
            victims_by_node,
            nominated=nominated.with_pace(pace),
            planner=planner,
            clock=self._clock,
        )

    def _find_candidates(
        self, pending: PodAwaitingPreemption, until: float, excluded: Collection[str] = ()
    ) -> _Candidates:
        """The victims on each node where an eviction helps, until there are enough to choose from.

        until: when to stop, in seconds of the clock.
        excluded: the unplaced members of the pod's gang.

        The nodes where the pod may only have to wait come first.
        """
        pace = Pace(self._clock, lambda: self._clock.now() > until)
        self.find_unknown_cards(set(pending.nodes), pace.pause)
        with self._lock:
            self._cache.sync_cards()
            freeing_nodes, refused = self._nodes_freeing_cards(set(pending.nodes)), self._refused
            snapshot = self._cache.snapshot()
            gang = self._gang_preemption.take_snapshot(pending.claimant.uid, snapshot) if pending.gang else None
        nominated, other_nodes = self._nominated.with_snapshot(snapshot), set(pending.nodes) - freeing_nodes
        candidates, enough = dict[str, Victims](), _MAX_CANDIDATE_NODES * max(1, len(excluded))
        for node in (*freeing_nodes, *_sample_nodes(other_nodes, len(other_nodes))):
            victims = nominated.find_unprotected_victims(
                pending.claimant, pending.policy, node, refused=refused, excluded=excluded
            )
            if victims is not None:
                candidates[node] = victims
            if len(candidates) == enough or pace.pause():
                break
        return _Candidates(snapshot, gang, candidates)

    def _await_chosen_nodes(self) -> None:
        """Wait, for at most `_CHOSEN_NODES_WAIT_SECONDS`, until it is known which nodes kube-scheduler has chosen from
        the last answers.

        kube-scheduler writes its choice before it calls for another pod, but our watch may be late. Until the choice is
        known, the cards on all nodes of the last answers are reserved. These may be all nodes of the cluster, and no
        event would requeue a pod that gets no card for this reason.
        """
        until = self._clock.now() + _CHOSEN_NODES_WAIT_SECONDS
        while self._clock.now() < until:
            with self._lock:
                if not self._nominations.is_node_unknown(self._clock.now()):
                    return
            self._clock.sleep(_CHECK_SECONDS)

    # Everything below runs under the lock.

    def _nodes_freeing_cards(self, nodes: set[str]) -> set[str]:
        """The given nodes where cards become free without an eviction."""
        vanished = (row.node for row in self._cache.reservations.rows_in_phases(Phase.TERMINATING))
        return self._loads.nodes_with_terminating_pods(nodes) | nodes.intersection(vanished)

    def _nodes_with_freed_cards(self, nodes: set[str], changes: Changes) -> list[str]:
        """The given nodes where cards may have become free, or begun to become free, since the snapshot."""
        freeing_nodes = self._nodes_freeing_cards(nodes)
        return [
            node
            for node in nodes
            if changes.have_cards_changed(node) or (node in freeing_nodes and changes.has_node_changed(node))
        ]

    def _is_gang_answered(self, search: GangSearch) -> bool:
        """Whether no new victims may be chosen for the requested pod, as in `_is_answered`."""
        if search.for_scheduler:
            return self._is_answered(search.claimant, search.policy, search.scheduler_victims)
        return self._needs_no_victims(search.claimant.uid)

    def _commit_gang_answer(self, gang_victims: GangVictims) -> bool:
        """Reserve the cards that an answer to kube-scheduler promises to the gang."""
        first = gang_victims.member_victims[0]
        place = NominatedPlace(first.victims.assignment, first.victims.uids, gang_victims.reservations)
        self._nominations.set_places(first.claimant, {first.node: place}, self._clock.now())
        return True

    def _make_gang_evictions(self, pending: PodAwaitingPreemption, gang_victims: GangVictims) -> list[Eviction]:
        nodes = {member_victims.node for member_victims in gang_victims.member_victims}
        victims = gang_victims.victim_uids
        if not (
            self._refused.keys().isdisjoint(victims)
            and self._queue.awaits_preemption_on(pending.claimant.uid, nodes)
            and all(map(self._loads.is_open, nodes))
            and not self._nominated.count_budget_violations(nodes, victims)
        ):
            return []
        first, *other_members = gang_victims.member_victims
        evictions = [
            self._make_eviction(first.claimant, first.node, first.victims, gang_victims.reservations),
            *(
                self._make_eviction(member_victims.claimant, member_victims.node, member_victims.victims)
                for member_victims in other_members
                if member_victims.victims.uids
            ),
        ]
        return self._reserve_evictions(evictions)

    def _make_eviction(
        self, claimant: WaitingPod, node: str, victims: Victims, member_reservations: tuple[MemberReservation, ...] = ()
    ) -> Eviction:
        place = NominatedPlace(victims.assignment, victims.uids, member_reservations)
        pods_by_uid = {placed.uid: placed for _, placed in self._loads.pods_on(node)}
        return Eviction(claimant, node, tuple(pods_by_uid[uid].ref for uid in victims.uids), place)

    def _reserve_evictions(self, evictions: list[Eviction]) -> list[Eviction]:
        """Reserve the cards that these evictions free. All of them exist already, so an error reserves nothing."""
        now = self._clock.now()
        for eviction in evictions:
            self._nominations.set_own_place(eviction.claimant, eviction.node, eviction.place, now)
        return evictions

    def _is_over_quota(self, pod: Pod) -> bool:
        """Whether the pod exceeds the quotas of its namespace, whichever pods are evicted."""
        namespace, request = pod.ref.namespace, pod.request
        return request is not None and self._cache.limits.is_exceeded_by(self._cache.ledger, namespace, request)

    def _needs_no_victims(self, uid: str) -> bool:
        """Whether victims are evicted for the pod already, or the pod holds cards."""
        return self._nominations.get(uid) is not None or self._cache.ledger.holding(uid) is not None

    def _is_answered(self, claimant: WaitingPod, policy: str, offered: Collection[str]) -> bool:
        """Whether no new victims may be chosen: victims end for the pod already, or kube-scheduler may still act on the
        last answer.
        """
        return self._nominations.on_preempt_repeated(claimant, self._clock.now()) or self._must_only_wait(
            claimant, policy, offered
        )

    def _must_only_wait(self, claimant: WaitingPod, policy: str, offered: Collection[str]) -> bool:
        """Whether victims terminate for the pod already, and suffice.

        If so, the pod is requeued when these victims may no longer suffice although none of them has ended.
        """
        nomination, uid = self._nominations.get(claimant.uid), claimant.uid
        for node in nomination.places if nomination is not None and nomination.named_node else ():
            awaited = self._nominations.record_offer(uid, node, self._clock.now(), offered=node in offered)
            if (
                awaited is not None
                and self._nominated.place_after_termination(claimant, policy, node, awaited.uids) is not None
            ):
                self._queue.mark_refused(uid)
                if math.isfinite(awaited.check_at):
                    self._queue.requeue_all_at(awaited.check_at)
                return True
        return False

    def _commit_eviction(
        self, pending: PodAwaitingPreemption, snapshot: ClusterView, candidates: Mapping[str, Victims]
    ) -> list[Eviction]:
        """The eviction of the least harmful victims, checked in the cluster as it is now.

        candidates: the victims on the snapshot, by node.

        On nodes that have changed since the snapshot, the victims are searched again before they are chosen. If that
        takes more than `LOCKED_SECONDS` seconds of CPU, no pod is evicted now. Nodes where cards may have become free
        come first, since the pod may only have to wait there; they get half of this time.
        """
        claimant, changes = pending.claimant, Changes(self._cache, snapshot, pending.claimant)
        if self._cache.has_leader_changed(snapshot):
            return []
        if self._needs_no_victims(claimant.uid) or any(not victims.uids for victims in candidates.values()):
            return []  # the pod only has to wait
        began, current = self._clock.cpu(), dict[str, Victims]()
        nominated = self._nominated.with_pace(stop_after_cpu(self._clock, _MAX_LOCKED_SECONDS))
        queue = [(victims.harm, node) for node, victims in candidates.items()]
        for node in self._nodes_with_freed_cards(set(pending.nodes), changes):
            if self._clock.cpu() > began + LOCKED_SECONDS / 2:
                break
            victims = nominated.find_unprotected_victims(claimant, pending.policy, node, refused=self._refused)
            if victims is not None and not victims.uids:
                return []
        heapq.heapify(queue)
        while queue and self._queue.awaits_preemption_on(claimant.uid, (queue[0][1],)):
            _, node = heapq.heappop(queue)
            victims = current.get(node)
            if victims is None and not self._is_outdated(changes, node, candidates[node]):
                victims = candidates[node]
            if victims is not None:
                return self._reserve_evictions([self._make_eviction(claimant, node, victims)])
            if self._clock.cpu() > began + LOCKED_SECONDS:
                return []
            victims = nominated.find_unprotected_victims(claimant, pending.policy, node, refused=self._refused)
            if victims is not None and not victims.uids:
                return []
            if victims is not None:
                current[node] = victims
                heapq.heappush(queue, (victims.harm, node))
        return []

    def _is_outdated(self, changes: Changes, node: str, victims: Victims) -> bool:
        """Whether these victims, found on a snapshot, must be searched again."""
        return changes.may_concern(node) or not self._refused.keys().isdisjoint(victims.uids)

    def _commit_answers(
        self, call: _PreemptCall, snapshot: ClusterView, answers: dict[str, Victims]
    ) -> dict[str, Victims]:
        """The answers that are valid in the cluster as it is now. Reserves the freed cards.

        answers: the victims on the snapshot, by node.

        On nodes that have changed since the snapshot, the victims are searched again, for `LOCKED_SECONDS` of CPU time.
        Changed nodes that are not searched in this time are left out, and kube-scheduler chooses among the others.
        """
        if self._cache.has_leader_changed(snapshot):
            return {}
        claimant = call.claimant
        nomination_then = snapshot.moment.nominations.get(claimant.uid)
        if self._nominations.get(claimant.uid) is not nomination_then and self._is_answered(
            claimant, call.policy, call.scheduler_victims
        ):
            return {}
        changes, until = Changes(self._cache, snapshot, claimant), self._clock.cpu() + LOCKED_SECONDS
        nominated = self._nominated.with_pace(stop_after_cpu(self._clock, _MAX_LOCKED_SECONDS))
        for node in filter(changes.may_concern, list(answers)):
            del answers[node]
            if self._clock.cpu() < until:
                with suppress(PlanningStopped):
                    victims = call.find_victims(nominated, node)
                    if victims is not None:
                        answers[node] = victims
        if any(not victims.uids for victims in answers.values()):
            # On some node the pod only has to wait for pods that terminate already. No other pods are evicted: the
            # answer has these pods.
            answers = {
                node: Victims(uids=terminating, assignment=victims.assignment)
                for node, victims in answers.items()
                if not victims.uids and (terminating := self._terminating_pods(node, claimant.request.priority))
            }
        places = {node: NominatedPlace(victims.assignment, victims.uids) for node, victims in answers.items()}
        self._nominations.set_places(claimant, places, self._clock.now())
        return answers

    def _terminating_pods(self, node: str, priority: int) -> tuple[str, ...]:
        return tuple(
            placed.uid for _, placed in self._loads.pods_on(node) if placed.terminating and placed.priority < priority
        )


def _sample_nodes(nodes: Iterable[str], limit: int) -> list[str]:
    """At most `limit` of the nodes, in random order."""
    candidates = list(nodes)
    return random.sample(candidates, min(limit, len(candidates)))
