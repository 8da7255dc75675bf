"""The watches: the reflectors that feed the state and the listers, and log objects that cannot be read.

The watch of each kind of object feeds both the state and the lister of this kind. If an event only shows a status that
the extender wrote, the lister stores the status, and the state does not change.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.kube import paths
from cardwise.kube.cardspernode import CardsPerNodeLimiter
from cardwise.kube.client import KubeClient
from cardwise.kube.events import EventRecorder, ObjectRef
from cardwise.kube.objects import gpuquotas, resourceclasses
from cardwise.kube.objects.gpuquotas import QuotaRecord
from cardwise.kube.objects.resourceclasses import ClassRecord
from cardwise.kube.pods import budgets
from cardwise.kube.watch.reflector import CENTRAL_PACE, Reflector
from extender.cardreports import CardReports
from extender.gangs import podgroups
from extender.gangs.podgroups import GroupRecord
from extender.records import nodeinfo, podinfo
from extender.records.cards import CardRecord, decode_card
from extender.records.claim import decode_claim
from extender.records.nodeinfo import PlacedPod
from extender.records.podinfo import PodRecord, WaitingRecord
from extender.reporting.listers import CardLister, ClassLister, Lister, Listers
from extender.state import State

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_CHECK_SECONDS = 0.2  # seconds between two checks of whether the caller of `catch_up` still needs the lists

# Seconds without a watch after which no pod is placed: a cordon, a quota or a class may have changed. After the API
# server has ended a watch, a new watch begins much sooner.
OUTDATED_SECONDS = 5.0

# Seconds without such a watch after which a leader releases the Lease. The longest pause between two attempts is 5 s
# (CENTRAL_PACE). So at least three attempts have failed while other calls succeeded: this is not a short outage or
# restart of the API server.
_BLIND_SECONDS = 15.0
# The same, while a list that placement needs is in progress: the list of a large cluster takes a while.
_LISTING_SECONDS = 120.0


class Informers:
    """The reflectors. Start them in the process that serves.

    listed: called after each list of all pods.
    claims: whether ResourceClaims are watched, too.

    Calls are served once all lists are complete: with a missing quota, for example, pods could exceed it.
    """

    def __init__(
        self,
        client: KubeClient,
        state: State,
        listers: Listers,
        events: EventRecorder,
        clock: Clock = SYSTEM,
        *,
        listed: Callable[[], None] = lambda: None,
        claims: bool = False,
    ) -> None:
        self._clock = clock
        pace: dict[str, Any] = {"pace": CENTRAL_PACE, "clock": clock}
        groups = Reflector(
            client, paths.podgroups(), podgroups.decode_group, _group_feed(state, listers.groups), **pace
        )
        quotas = Reflector(client, paths.gpuquotas(), project_quota, _quota_feed(state, listers.quotas), **pace)
        pods = Reflector(
            client,
            paths.pods(),
            podinfo.decode_pod,
            _Pods(state, events, listed),
            identity_of=podinfo.reflector_key,
            **pace,
        )
        nodes = Reflector(
            client,
            paths.nodes(),
            nodeinfo.decode_node,
            _FeedHandler(state.set_node, state.remove_node),
            identity_of=_key_as_identity,
            **pace,
        )
        classes = Reflector(client, paths.resourceclasses(), project_class, _class_feed(state, listers.classes), **pace)
        self._reports = CardReports(_card_feed(state, listers.cards), clock)
        card_handler = CardsPerNodeLimiter(decode_card, self._reports)
        cards = Reflector(
            client,
            paths.extendedresources(),
            card_handler.project,
            card_handler,
            identity_of=_key_as_identity,
            on_list_failed=card_handler.on_list_failed,
            **pace,
        )
        disruption_budgets = Reflector(
            client,
            paths.poddisruptionbudgets(),
            budgets.decode_budget,
            _FeedHandler(state.preemption.set_budget, state.preemption.remove_budget),
            **pace,
        )
        resourceclaims = Reflector(
            client,
            paths.resourceclaims(),
            decode_claim,
            _FeedHandler(state.set_claim, state.remove_claim),
            identity_of=_key_as_identity,
            **pace,
        )
        self._pods, self._groups = pods, groups
        # The objects that show the decisions of another extender: the progress of gangs, quotas, pods, claims.
        self._decisive: tuple[Reflector[Any], ...] = (groups, quotas, pods, *((resourceclaims,) if claims else ()))
        # The objects by which an admin restricts placement: cordons of nodes and cards, classes, quotas.
        self._restricting: tuple[Reflector[Any], ...] = (nodes, classes, cards, quotas)
        self._reflectors: tuple[Reflector[Any], ...] = (nodes, classes, cards, disruption_budgets, *self._decisive)

    def start(self) -> None:
        for reflector in self._reflectors:
            reflector.start()

    def stop(self) -> None:
        for reflector in self._reflectors:
            reflector.stop()

    def hand_over_waiting(self) -> None:
        """Hand over the waiting reports of nodes that write too many reports (`CardReports`). Call this several times a
        second.
        """
        self._reports.hand_over_waiting()

    def catch_up(self, is_wanted: Callable[[], bool]) -> bool:
        """List PodGroups, quotas and pods again, and end the pauses of the other watches. Gives up when `is_wanted`
        returns False.

        Returns whether the state contains all changes of these objects from before the call.
        """
        for reflector in self._reflectors:
            reflector.retry()
        for relisted in [reflector.relist() for reflector in self._decisive]:
            while not self._clock.wait(relisted, _CHECK_SECONDS):
                if not is_wanted():
                    return False
        return True

    def unsynced_lists(self) -> list[str]:
        """The lists that are not complete yet, one line for each."""
        return [
            f"the list of {reflector.name} is not complete yet"
            for reflector in self._reflectors
            if not reflector.synced.is_set()
        ]

    def outdated_watches(self) -> list[str]:
        """The watches that have been interrupted for longer than `OUTDATED_SECONDS`, one line for each.

        No pod is placed while there are any: a card that was free when the watch was interrupted may be cordoned now.
        """
        return [
            _interruption_text(reflector)
            for reflector in self._restricting
            if OUTDATED_SECONDS < reflector.disconnected_seconds() < math.inf
        ]

    def lease_blockers(self, *, holds: bool, leads: bool) -> list[str]:
        """Why this process should leave the Lease to other extenders, one line for each reason.

        holds: whether this process has the Lease now. During an epoch, longer interruptions are tolerated: a short
            outage must not end the epoch.
        leads: whether its leader epoch has begun. An epoch cannot begin without the list of PodGroups; after that, pods
            without a gang are placed even if the watch of PodGroups is interrupted.

        Another extender may have watches when this process has none: the cause can be the node, the network or the
        rights of this process. A process without watches does not acquire the Lease. So if all processes lack watches,
        there is no leader. This costs nothing, because no pod is placed from outdated data anyway, and it keeps the
        Lease from moving between such processes.
        """
        if not holds:
            needed = dict.fromkeys((*self._restricting, *self._decisive), OUTDATED_SECONDS)
        else:
            needed = dict.fromkeys((self._pods,) if leads else (self._pods, self._groups), _LISTING_SECONDS)
            needed |= dict.fromkeys(self._restricting, _BLIND_SECONDS)
        return [
            *self.unsynced_lists(),
            *(
                _interruption_text(reflector)
                for reflector in needed
                if reflector.disconnected_seconds() > needed[reflector]
            ),
        ]

    def disconnected_seconds(self) -> dict[str, float]:
        """The seconds without a watch, in which events may be missed, by kind of object; 0 while the watch is open."""
        return {reflector.name: reflector.disconnected_seconds() for reflector in self._reflectors}

    def staleness_seconds(self) -> dict[str, float]:
        """The seconds since each reflector last heard from the API server, by kind of object."""
        return {reflector.name: reflector.staleness_seconds() for reflector in self._reflectors}


def _interruption_text(reflector: Reflector[Any]) -> str:
    return f"the watch of {reflector.name} is interrupted; the latest changes are unknown"


def _key_as_identity(key: str, record: object) -> str:
    """The reflector's key, for objects that are identified by their name."""
    del record
    return key


class _Pods:
    def __init__(self, state: State, events: EventRecorder, listed: Callable[[], None]) -> None:
        self._state = state
        self._events = events
        self._listed = listed

    def on_change(self, key: str, old: PlacedPod | None, new: PlacedPod) -> None:
        if not isinstance(new, PodRecord):
            self._state.set_pod_without_request(key, new)
            return
        if new.problem and (not isinstance(old, PodRecord) or old.problem != new.problem):
            _log.warning(
                "ignored an invalid assignment", pod=f"{new.namespace}/{new.name}", uid=new.uid, problem=new.problem
            )
            pod_object = ObjectRef.pod(new.namespace, new.name, new.uid)
            text = f"{new.problem}; the pod's GPU share is not counted, delete the pod"
            self._events.record(pod_object, "UnreadableAssignment", text, "Warning")
        if isinstance(new, WaitingRecord) and new.claim_problem:
            is_known = isinstance(old, WaitingRecord) and old.claim_problem == new.claim_problem
            if not is_known:
                self._events.record(new.ref.about, "FailedScheduling", new.claim_problem, "Warning")
        self._state.set_pod(new)

    def on_delete(self, key: str, old: PlacedPod) -> None:
        if isinstance(old, PodRecord):
            self._state.remove_pod(old)
        else:
            self._state.remove_pod_without_request(key)

    def on_synced(self) -> None:
        self._listed()


class _FeedHandler(Generic[_T]):
    """Passes each object of one kind to the state, and to its lister.

    set_object: passes the object to the state. Returns the ignored part of the object, with the reason; None if the
        whole object is used.
    unreadable: the log message about an ignored part, logged once.
    log_fields: the fields that name the object in this log line.
    """

    def __init__(
        self,
        set_object: Callable[[str, _T], str | None],
        remove: Callable[[str], object],
        lister: Lister[_T] | None = None,
        unreadable: str = "",
        log_fields: Callable[[str, _T], dict[str, str]] = lambda key, _: {"name": key},
    ) -> None:
        self._set_object = set_object
        self._remove = remove
        self._lister = lister
        self._unreadable = unreadable
        self._log_fields = log_fields
        self._logged: dict[str, str] = {}  # by key of the object, the problem that was logged last

    def on_change(self, key: str, old: _T | None, new: _T) -> None:
        del old
        problem = self._set_object(key, new)
        if problem is None:
            self._logged.pop(key, None)
        elif problem != self._logged.get(key):
            _log.warning(self._unreadable, **self._log_fields(key, new), problem=problem)
            self._logged[key] = problem
        if self._lister is not None:
            self._lister.set_object(key, new)

    def on_delete(self, key: str, old: _T) -> None:
        del old
        self._logged.pop(key, None)
        self._remove(key)
        if self._lister is not None:
            self._lister.remove_object(key)

    def on_synced(self) -> None:
        pass


def _card_feed(state: State, lister: CardLister) -> _FeedHandler[CardRecord]:
    return _FeedHandler(
        lambda key, new: state.set_card(key, new) or new.problem,
        state.remove_card,
        lister,
        "ignored a part of a node's report",
        lambda key, card: {"card": key, "node": card.node},
    )


def _class_feed(state: State, lister: ClassLister) -> _FeedHandler[ClassRecord]:
    def set_class(key: str, new: ClassRecord) -> str | None:
        if new.resource_class is None:
            state.remove_class(key)
        else:
            state.set_class(new.resource_class)
        return new.problem

    return _FeedHandler(set_class, state.remove_class, lister, "ignored an invalid ResourceClass: it selects no GPU")


def _quota_feed(state: State, lister: Lister[QuotaRecord]) -> _FeedHandler[QuotaRecord]:
    def set_quota(key: str, new: QuotaRecord) -> str | None:
        if new.quota is None:
            state.remove_quota(key)
        else:
            state.set_quota(key, new.quota)
        return new.problem

    return _FeedHandler(set_quota, state.remove_quota, lister, "ignored an invalid GPUQuota: it limits nothing")


def _group_feed(state: State, lister: Lister[GroupRecord]) -> _FeedHandler[GroupRecord]:
    return _FeedHandler(
        lambda key, new: state.gangs.set_group(key, new.group), lambda key: state.gangs.set_group(key, None), lister
    )


def project_class(raw: bytes) -> tuple[str, ClassRecord]:
    """The name of a ResourceClass, and its record."""
    record = resourceclasses.decode(raw)
    return record.name, record


def project_quota(raw: bytes) -> tuple[str, QuotaRecord]:
    """The key "namespace/name" of a GPUQuota, and its record."""
    record = gpuquotas.decode(raw)
    return record.key, record
