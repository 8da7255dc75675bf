"""Nominations: the cards that are reserved for a pod after a preemption. No later pod may take them.

Nominations are the second part of the table of reservations (`reservations`). The table ends a nomination when the
nominated pod ends. A pod can have a nomination and a reservation at the same time: the plan may change several times
while the victims terminate::

              preempt is answered              the pod's status names one of them
    (none) ──────────────────────► several nodes ──────────────────────► one node ──► (none): bound, gone, its time
       │                                │                                 ▲   │       is over, the eviction failed
       │                                ▼                                 │   └─► the Lease is lost: the cards are
       │                   (none): not named in time, the Lease is lost   │       searched again
       └──────────────────────────────────────────────────────────────────┘
          the extender evicts, or a status names a node that another extender has answered

The cards of nominations are not in the ledger, because pods that come before the nominated pod may use them.
kube-scheduler has a nominator beside its cache for the same reason.

kube-scheduler writes the node into the pod's status, and counts the pod in its own totals of that node. Only the
extender knows which card becomes free, from its own answer to preempt. The extender reads the node from the watch of
pods, or from kube-scheduler's next call if the watch is late. If another extender has answered preempt, the cards are
searched again. Not thread-safe: the caller holds the lock of `State`.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cardwise.core.api.assignment import Assignment
from extender.cache.nodeload import NodeLoads
from extender.records.pod import WaitingPod

_NAMING_SECONDS = 5.0  # seconds after the answer in which kube-scheduler writes the chosen node
_SHOWN_SECONDS = 1.0  # seconds after the answer in which the watch usually shows the chosen node
_GOING_SECONDS = 5.0  # seconds after the answer in which the watch shows that kube-scheduler has deleted the victims
_KEEP_SECONDS = 60.0  # seconds for which cards stay reserved after the victims have ended

LOWEST_PRIORITY = -(1 << 40)  # a priority below the priorities of all pods
NOMINATED_PHASE = "nominated"  # `Holding.phase_name` of cards that are reserved for a nominated pod


@dataclass(frozen=True, slots=True)
class MemberReservation:
    """Cards that are reserved on a node for another member of the nominated pod's gang."""

    claimant: WaitingPod
    node: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class NominatedPlace:
    """The cards that a nominated pod gets on a node once its victims there are gone.

    assignment: the cards; None while the cards are not known.
    victims: the UIDs of the pods that are evicted for the nominated pod.
    member_reservations: the cards that stay reserved for other members of the pod's gang meanwhile. Without these cards
        the evictions might not suffice for the gang.
    searched_on: the data that the last search for the cards read, while the cards are not known. As long as these data
        are the same, another search would find no cards either.
    """

    assignment: Assignment | None = None
    victims: tuple[str, ...] = ()
    member_reservations: tuple[MemberReservation, ...] = ()
    searched_on: tuple[object, ...] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Nomination:
    """The nodes where pods are evicted for a pod. Immutable: a change replaces it, so that snapshots stay as they are.

    claimant: the pod for which pods are evicted, as kube-scheduler sent it.
    since: when preempt was answered, or the watch showed the node.
    until: when the nomination expires.
    places: the reservation on each node; several nodes until it is known which node kube-scheduler has chosen.
    named_node: the node in the pod's status.
    own_eviction: whether the extender itself evicts; kube-scheduler does not know of these evictions.
    from_status: whether the node is known only from the pod's status, because another extender has answered preempt.
    unoffered_since: since when kube-scheduler has not offered the node.
    """

    claimant: WaitingPod
    since: float
    until: float
    places: Mapping[str, NominatedPlace] = field(default_factory=dict)
    named_node: str = ""
    own_eviction: bool = False
    from_status: bool = False
    unoffered_since: float = math.inf

    def reserves_as(self, other: "Nomination") -> bool:
        """Whether both nominations reserve the same cards. Times are not compared: they change each second."""
        return self.places is other.places or self.places == other.places


class AwaitedVictims(NamedTuple):
    """The victims on a node that a nominated pod waits for.

    uids: the UIDs of the victims; empty if the pod waits for none.
    check_at: the time to check again, in seconds of the clock.
    """

    uids: frozenset[str]
    check_at: float


class Nominations:
    """All nominations, by pod. `loads`: the pods on each node."""

    def __init__(self, loads: NodeLoads) -> None:
        self._loads = loads
        self._by_pod: dict[str, Nomination] = {}
        self._expired: dict[str, str] = {}  # the node whose reservation has timed out, by pod
        # Of all nominations whose node is certain: by node and pod, the victims. None: to be computed again.
        self._victims: dict[str, dict[str, tuple[str, ...]]] | None = None

    def snapshot(self, loads: NodeLoads) -> "Nominations":
        """A copy of the nominations, independent of the original. `loads`: the loads of the same snapshot."""
        duplicate = Nominations(loads)
        duplicate._by_pod, duplicate._expired = self._by_pod.copy(), self._expired.copy()
        return duplicate

    def __len__(self) -> int:
        return len(self._by_pod)

    def get(self, uid: str) -> Nomination | None:
        """The nomination of the pod with this UID."""
        return self._by_pod.get(uid)

    def by_pod(self) -> Mapping[str, Nomination]:
        """All nominations, by the UID of the pod. Use the mapping at once: it changes with the nominations."""
        return self._by_pod

    def nominated_node(self, uid: str) -> str | None:
        """The node where victims are evicted for the pod; None while several nodes are possible."""
        nomination = self._by_pod.get(uid)
        return next(iter(nomination.places)) if nomination is not None and len(nomination.places) == 1 else None

    def nodes_changed_since(self, by_pod_then: Mapping[str, Nomination]) -> set[str]:
        """The nodes on which reservations for nominated pods may have changed.

        by_pod_then: an earlier copy of `by_pod`, with which to compare.
        """
        by_pod_now = self._by_pod
        uids = by_pod_now.keys() ^ by_pod_then.keys()
        uids |= {
            uid
            for uid, nomination in by_pod_now.items()
            if uid in by_pod_then and not nomination.reserves_as(by_pod_then[uid])
        }
        nodes = set[str]()
        for uid, nomination in (*by_pod_now.items(), *by_pod_then.items()) if uids else ():
            if uid in uids:
                nodes.update(nomination.places)
            nodes.update(
                reservation.node
                for place in nomination.places.values()
                for reservation in place.member_reservations
                if uids.intersection((uid, reservation.claimant.uid))
            )
        return nodes

    def is_node_unknown(self, now: float) -> bool:
        """Whether it is unknown which node kube-scheduler has chosen after a recent answer with several nodes."""
        return any(
            not nomination.named_node
            and len(nomination.places) > 1
            and nomination.until - now > _NAMING_SECONDS - _SHOWN_SECONDS
            for nomination in self._by_pod.values()
        )

    def on_preempt_repeated(self, claimant: WaitingPod, now: float) -> bool:
        """Record that kube-scheduler calls preempt for the pod again.

        Returns True if kube-scheduler may have chosen a node of the last answer, and it is unknown which node. Then no
        pod may be evicted on other nodes.

        kube-scheduler writes its choice into the pod's status before it calls again. But kube-scheduler's own watch may
        be late: then the pod in the call still has the resourceVersion of the last call, or victims terminate already.
        """
        nomination = self._by_pod.get(claimant.uid)
        if nomination is None or nomination.named_node:
            return False
        if claimant.version and claimant.version == nomination.claimant.version:
            return True
        if claimant.nominated_node:
            self.set_node_from_status(claimant, now)
            return False
        return any(not self._are_staying(node, place.victims) for node, place in nomination.places.items())

    def set_places(self, claimant: WaitingPod, places: Mapping[str, NominatedPlace], now: float) -> None:
        """Record the nodes that preempt returned for the pod; kube-scheduler will choose one of them.

        Replaces an earlier nomination.
        """
        self._victims = None
        if not places:
            self._by_pod.pop(claimant.uid, None)
            return
        nomination_before = self._by_pod.get(claimant.uid)
        named_node = (
            nomination_before.named_node
            if nomination_before is not None and nomination_before.named_node in places
            else ""
        )
        self._expired.pop(claimant.uid, None)
        until = now + (_KEEP_SECONDS if named_node else _NAMING_SECONDS)
        self._by_pod[claimant.uid] = Nomination(claimant, now, until, dict(places), named_node)

    def set_own_place(self, claimant: WaitingPod, node: str, place: NominatedPlace, now: float) -> None:
        """Record the node that the extender itself has chosen."""
        self._victims = None
        self._by_pod[claimant.uid] = Nomination(
            claimant, now, now + _KEEP_SECONDS, {node: place}, node, own_eviction=True
        )

    def set_node_from_status(self, claimant: WaitingPod, now: float) -> None:
        """Record the node in the status of the pending pod, if the status names a node.

        If the node was removed from the status, kube-scheduler has found no pod to preempt. Perhaps the victims are
        deleted already, but their cards are still in use. So the cards stay reserved until the nomination expires.
        """
        nomination, node = self._by_pod.get(claimant.uid), claimant.nominated_node
        if not node or self._expired.get(claimant.uid) == node:
            return
        if nomination is None:
            until = now + _KEEP_SECONDS
            nomination = Nomination(claimant, now, until, {node: NominatedPlace()}, from_status=True)
        elif nomination.named_node == node:
            return
        self._victims = None
        self._by_pod[claimant.uid] = replace(
            nomination,
            named_node=node,
            places={node: nomination.places.get(node, NominatedPlace())},
            since=now,
            until=now + _KEEP_SECONDS,
            unoffered_since=math.inf,
        )

    def remove(self, uid: str) -> Nomination | None:
        """Remove the nomination: the pod is bound or gone, or its cards are released. Returns the former nomination."""
        self._victims = None
        self._expired.pop(uid, None)
        return self._by_pod.pop(uid, None)

    def reset_to_statuses(self) -> None:
        """Keep only the nominations that are in pod statuses, because the leader changes."""
        self._victims = None
        for uid, nomination in list(self._by_pod.items()):
            if nomination.named_node:
                place = nomination.places.get(nomination.named_node, NominatedPlace())
                terminating = {
                    placed_pod.uid
                    for _, placed_pod in self._loads.pods_on(nomination.named_node)
                    if placed_pod.terminating
                }
                victims = tuple(uid for uid in place.victims if uid in terminating)
                places = {nomination.named_node: NominatedPlace(victims=victims)}
                self._by_pod[uid] = replace(nomination, places=places)
            else:
                del self._by_pod[uid]

    def end_expired(self, now: float) -> bool:
        """End expired nominations. Returns whether any have expired.

        A nomination does not expire while victims are still on the node.
        """
        has_ended, self._victims = False, None
        for uid, nomination_before in list(self._by_pod.items()):
            nomination = self._by_pod[uid] = self._updated_from_status(nomination_before, now)
            if nomination.named_node and any(self._awaits_victims(nomination, node, now) for node in nomination.places):
                self._by_pod[uid] = replace(nomination, until=now + _KEEP_SECONDS)
            elif now >= nomination.until:
                del self._by_pod[uid]
                if nomination.named_node:
                    self._expired[uid] = nomination.named_node
                has_ended = True
        return has_ended

    def record_offer(self, uid: str, node: str, now: float, *, offered: bool) -> AwaitedVictims | None:
        """Record whether kube-scheduler has offered the nominated node to the pod in this call.

        Returns the victims that the pod waits for; None if the pod can no longer use the node.

        kube-scheduler deletes the victims immediately after the response. A victim that still runs normally after
        `_GOING_SECONDS` will not be deleted. A single call may lack the node for many reasons. But if all calls lack
        the node for `_KEEP_SECONDS`, the pod can no longer use the node.
        """
        nomination = self._by_pod[uid]
        # kube-scheduler need not offer a node on which the extender itself evicts.
        unoffered_since = math.inf if offered or nomination.own_eviction else min(nomination.unoffered_since, now)
        if unoffered_since != nomination.unoffered_since:
            self._by_pod[uid] = replace(nomination, unoffered_since=unoffered_since)
        offer_deadline = unoffered_since + _KEEP_SECONDS
        if now >= offer_deadline or self._loads.is_unavailable(node):
            return None
        victims, deletion_deadline = frozenset(nomination.places[node].victims), nomination.since + _GOING_SECONDS
        return (
            AwaitedVictims(victims, min(deletion_deadline, offer_deadline))
            if now < deletion_deadline
            else AwaitedVictims(victims - self._staying_pods(node), offer_deadline)
        )

    def reserved_places(
        self, excluded: Collection[str], priority: int
    ) -> Iterator[tuple[WaitingPod, str, NominatedPlace]]:
        """The reserved places that pods of this priority must not use, each with the nominated pod and the node.

        These are the places of nominated pods of the same or a higher priority, without the pods `excluded`.
        kube-scheduler also respects nominated pods of equal priority.
        """
        for nomination in self._by_pod.values():
            if nomination.claimant.request.priority < priority:
                continue
            for node, place in nomination.places.items():
                if nomination.claimant.uid not in excluded:
                    yield nomination.claimant, node, place
                for reservation in place.member_reservations:
                    if reservation.claimant.uid not in excluded and reservation.claimant.uid not in self._by_pod:
                        yield reservation.claimant, reservation.node, NominatedPlace(reservation.assignment)

    def victims_on(self, node: str, excluded_uid: str) -> set[str]:
        """The victims on the node for pods that are certainly nominated to this node, except the pod `excluded_uid`."""
        if self._victims is None:
            self._victims = {}
            for uid, nomination in self._by_pod.items():
                if len(nomination.places) == 1:
                    ((place_node, place),) = nomination.places.items()
                    self._victims.setdefault(place_node, {})[uid] = place.victims
        victims_by_pod = self._victims.get(node, {})
        return {victim for uid, victims in victims_by_pod.items() if uid != excluded_uid for victim in victims}

    def victim_nodes_by_uid(self) -> dict[str, str]:
        """The node of each victim, by the victim's UID, of all nominations whose node is certain."""
        return {
            victim: node
            for nomination in self._by_pod.values()
            if len(nomination.places) == 1
            for node, place in nomination.places.items()
            for victim in place.victims
        }

    def set_searched_place(self, uid: str, node: str, unknown: NominatedPlace, searched: NominatedPlace) -> None:
        """Record which cards a search has chosen for the nominated pod on this node.

        unknown: the place before the search. If the pod has another place by now, the result is ignored.
        """
        nomination = self._by_pod.get(uid)
        if nomination is not None and nomination.places.get(node) == unknown:
            self._by_pod[uid] = replace(nomination, places={**nomination.places, node: searched})

    # What-if changes.

    def _updated_from_status(self, nomination: Nomination, now: float) -> Nomination:
        """The nomination, updated from the node in the pod's status; unchanged if the status names no node.

        If another extender has answered preempt, the victims are unknown. Then the terminating pods of lower priority
        on the node are taken as the victims.
        """
        if not nomination.named_node:
            return nomination
        node, early = nomination.named_node, now < nomination.since + _NAMING_SECONDS
        place = nomination.places.get(node, NominatedPlace())
        if early and nomination.from_status:
            priority = nomination.claimant.request.priority
            terminating = (
                placed_pod.uid
                for _, placed_pod in self._loads.pods_on(node)
                if placed_pod.terminating and placed_pod.priority < priority
            )
            victims = dict.fromkeys((*place.victims, *terminating))
            return replace(nomination, places={**nomination.places, node: replace(place, victims=tuple(victims))})
        if not early and len(nomination.places) > 1:
            # Preempt was answered again, and kube-scheduler has chosen the same node again.
            return replace(nomination, places={node: place})
        return nomination

    def _are_staying(self, node: str, uids: Collection[str]) -> bool:
        """Whether all these pods are on the node, and none of them is being deleted."""
        return self._staying_pods(node).issuperset(uids)

    def _staying_pods(self, node: str) -> set[str]:
        """The pods on the node that are not being deleted."""
        return {placed_pod.uid for _, placed_pod in self._loads.pods_on(node) if not placed_pod.terminating}

    def _awaits_victims(self, nomination: Nomination, node: str, now: float) -> bool:
        """Whether victims are still on the node, and are or will soon be terminating."""
        victims, soon = nomination.places[node].victims, now < nomination.since + _GOING_SECONDS
        return bool(victims) and any(
            placed_pod.uid in victims and (soon or placed_pod.terminating)
            for _, placed_pod in self._loads.pods_on(node)
        )
