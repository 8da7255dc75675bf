"""The table of reservations: one row for each pod, with its node, its cards, and the phase of its reservation.

The life of a row::

                 filter                    bind                 accepted          the watch shows it
    (none) ──► RESERVED ◄─ NOMINATED ───► BINDING ───────────► ACCEPTED ──────► BOUND
       │          │   nominated │         ▲  │ ▲                                  │ the pod is gone,
       │          ▼             ▼         │  │ │ posted again                     │ its containers may not be
       │        (none): expires, dropped  │  ▼ │                                  ▼
       └──────► WAITING ──────────────────┘ UNCONFIRMED: the answer was lost TERMINATING ──► (none): proved gone
                 a plan of its gang          │ looked up: not bound             │ its time is over
                                             ▼                                  ▼
                                           (none)                            ORPHANED

A pod whose share is allocated by ResourceClaim (docs/design/0038-claims.md) is not bound by the extender. BINDING then
means that a thread writes the claim and opens the pod's gate; in the place of ACCEPTED, ALLOCATED means that
kube-scheduler may bind the pod to this node and no other. It may refuse the node. Then the claim is taken back:
ALLOCATED becomes UNCONFIRMED until the claim is deleted, and the pod is planned again.

Not drawn: BINDING returns to WAITING if nothing was posted and the gang's plan still exists; ACCEPTED and UNCONFIRMED
may end by a read of the pod; ORPHANED ends when the watch shows the pod again. If etcd was restored from a backup, the
watch may show a bound or deleted pod as pending again. Then the row is UNCONFIRMED until a read of the pod, as after a
lost response. Until that read the pod keeps its cards, and no Binding is posted. After the read, the pod keeps a card
only while the node reports the share.

Watch events come at any time and in any order. If the watch shows a pod as bound, the row becomes BOUND from any phase.
A posted Binding may still bind its pod (rule 1 of docs/architecture.md). So a row in BINDING, UNCONFIRMED or ACCEPTED
is ended only by its own thread, by a consistent read, or by a watch event. A row in TERMINATING ends when its node,
which had reported the share, no longer reports it.

A node's report is accepted for pods that were bound to that node. Shares of other pods in the report use capacity of
the node's cards, but no quota (`unknown_holding`). Such a report may be right: pods that were deleted while no extender
ran are unknown to the extender. A report never changes shares on other nodes. If a share of the pod on the card is
known already, also under a former name of the node, the report adds only the excess (docs/design/0031).

In addition to its row a pod may have a nomination: cards that become free because other pods are evicted
(`nominations`). The nomination ends with the pod, too.

Each change of a row also updates the ledger and the nodes' totals (`capacity`). Not thread-safe: the caller holds the
lock of `State`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final

from cardwise.clock import Clock
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON_CLIENT, MpsClient
from cardwise.core.api.request import Load
from cardwise.core.placement.holding import REPORTED_PHASE, Holding
from cardwise.kube.watch.reflector import WatchPace
from extender.cache.capacity import RESERVED_PHASE, Capacity
from extender.cache.inventory import Inventory, ShareReport
from extender.cache.nominations import Nominations
from extender.records.nodeinfo import PlacedPod
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef

# kube-scheduler sends bind milliseconds after filter, unless a plugin's Permit keeps the pod waiting. Until then the
# cards are idle.
RESERVATION_SECONDS: Final = 30.0
# Longer than a node's report of the pod's containers may be late. After that the node is taken to be dead.
TERMINATING_SECONDS: Final = 30.0
_MAX_ORPHANED: Final = 4096
_DEVICE_PLUGIN_WATCH_PACE: Final = WatchPace()  # the pace of the device plugins' watches
NO_EPOCH: Final = -1  # no leader epoch: such a row is never posted
_MAX_DOUBLINGS: Final = 6  # the pause of 1 s between two look-ups of a pod doubles at most this many times


class Phase(StrEnum):
    """The phase of a reservation; the diagram above shows the transitions."""

    NOMINATED = "nominated"  # the pod's status will name the node; filter was not called yet
    RESERVED = "reserved"  # filter has returned the node
    WAITING = "waiting"  # planned with the other members of its gang: ends with the gang's plan, not alone
    BINDING = "binding"  # a thread is posting the Binding
    UNCONFIRMED = "unconfirmed"  # the Binding was posted, and the response was lost
    ACCEPTED = "accepted"  # the API server has accepted the Binding
    ALLOCATED = "allocated"  # the claim is allocated and the gate is open: kube-scheduler may bind the pod
    BOUND = "bound"  # the watch shows the pod bound
    TERMINATING = "terminating"  # the pod object is gone; its containers may still run
    ORPHANED = "orphaned"  # terminating for longer than `Timeouts.terminating`: counts only while its node reports it


UNPOSTED_PHASES: Final = frozenset({Phase.NOMINATED, Phase.RESERVED, Phase.WAITING})  # no Binding was posted yet
POSTED_PHASES: Final = frozenset({Phase.BINDING, Phase.UNCONFIRMED, Phase.ACCEPTED, Phase.ALLOCATED})

# The phases that may follow each phase; None: no reservation. A watch event may show a pod bound or deleted at any
# time.
TRANSITIONS: Final[Mapping[Phase | None, frozenset[Phase | None]]] = {
    None: frozenset(
        {*UNPOSTED_PHASES, Phase.BINDING, Phase.UNCONFIRMED, Phase.ALLOCATED, Phase.BOUND, Phase.TERMINATING}
    ),
    Phase.NOMINATED: frozenset({*UNPOSTED_PHASES, Phase.BINDING, Phase.BOUND, None}),
    Phase.RESERVED: frozenset({*UNPOSTED_PHASES, Phase.BINDING, Phase.ALLOCATED, Phase.BOUND, None}),
    Phase.WAITING: frozenset({*UNPOSTED_PHASES, Phase.BINDING, Phase.ALLOCATED, Phase.BOUND, None}),
    Phase.BINDING: frozenset({*POSTED_PHASES, Phase.WAITING, Phase.BOUND, Phase.TERMINATING, None}),
    Phase.UNCONFIRMED: frozenset({Phase.BINDING, Phase.ALLOCATED, Phase.BOUND, Phase.TERMINATING, None}),
    Phase.ACCEPTED: frozenset({Phase.BOUND, Phase.TERMINATING, None}),
    Phase.ALLOCATED: frozenset({Phase.ALLOCATED, Phase.UNCONFIRMED, Phase.BOUND, Phase.TERMINATING, None}),
    Phase.BOUND: frozenset({Phase.BOUND, Phase.TERMINATING, Phase.UNCONFIRMED, None}),
    Phase.TERMINATING: frozenset({Phase.TERMINATING, Phase.ORPHANED, Phase.BOUND, Phase.UNCONFIRMED, None}),
    Phase.ORPHANED: frozenset({*UNPOSTED_PHASES, Phase.BINDING, Phase.ALLOCATED, Phase.TERMINATING, Phase.BOUND, None}),
}

# The names of the phases in metrics and `cardwise inspect`.
PHASE_NAMES: Final[Mapping[Phase, str]] = {
    Phase.NOMINATED: RESERVED_PHASE,
    Phase.RESERVED: RESERVED_PHASE,
    Phase.WAITING: "waiting",
    Phase.BINDING: "binding",
    Phase.UNCONFIRMED: "unconfirmed",
    Phase.ACCEPTED: "bound",
    Phase.ALLOCATED: "allocated",
    Phase.BOUND: "",
    Phase.TERMINATING: "terminating",
    Phase.ORPHANED: "terminating",
}


class IllegalTransition(AssertionError):
    """A reservation cannot make this transition: a bug in the extender."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A row of the table: the cards of one pod.

    since: when the row entered its phase.
    holding: the cards and devices; None for a pod that requests no cards or devices.
    load: the pod's cpu and memory, if this row adds them to the node's totals until the watch shows the pod bound.
    epoch: the leader epoch in which the Binding was first posted.
    gang: "namespace/name" of the gang whose plan includes the row, also after the Binding is posted; "" for no gang.
    deleted: whether the pod was deleted while a thread was posting.
    failed_lookups: the number of failed look-ups so far.
    next_lookup: the earliest time of the next look-up.
    nominee: the pod, if it was nominated before kube-scheduler called filter.
    peer_key: see `PodRequest.peer_key`; None for none.
    by_claim: whether the share is allocated by ResourceClaim. Such a row is not looked up: the claim decides.
    """

    pod: PodRef
    node: str
    phase: Phase
    since: float
    holding: Holding | None = None
    load: Load | None = None
    epoch: int = 0
    gang: str = ""
    deleted: bool = False
    failed_lookups: int = 0
    next_lookup: float = -math.inf
    nominee: WaitingPod | None = None
    peer_key: str | None = None
    by_claim: bool = False

    @property
    def assignment(self) -> Assignment | None:
        """The cards and devices by container; None for a pod that requests no cards or devices."""
        return self.holding.assignment if self.holding is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """The Binding to post.

    unconfirmed: whether an earlier call may have posted the Binding already, and that Binding may still bind the pod.
    env_access: whether the node gives cards by environment variables only, without CDI.
    """

    assignment: Assignment | None
    unconfirmed: bool
    env_access: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBinding:
    """The node and cards to which the pod is or may be bound: no other node or cards may be chosen for the pod."""

    node: str
    assignment: Assignment | None
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds.

    reservation: how long a plan may wait for its bind call.
    terminating: how long a deleted pod keeps its cards without a report of its node.
    confirmation: within what time after a post the watch must show the pod bound; after that the pod is looked up. It
        is longer than the API server's limit for one request.
    restored: how long a pod keeps its cards after a restore of etcd made it pending again. In this time the node
        notices the restore and reports the pod's containers. That takes at most the sum of three times. They are the
        longest pause of a watch, the time until a silent watch counts as broken, and one pass of the device plugin.
    """

    reservation: float = RESERVATION_SECONDS
    terminating: float = TERMINATING_SECONDS
    confirmation: float = 75.0
    restored: float = _DEVICE_PLUGIN_WATCH_PACE.backoff_cap + _DEVICE_PLUGIN_WATCH_PACE.silence + 20.0


class Reservations:
    """The table, by pod UID.

    reports: the reports of nodes.
    capacity: is updated at each change of the table.
    """

    def __init__(self, reports: Inventory, capacity: Capacity, timeouts: Timeouts, clock: Clock) -> None:
        self.on_ended: Callable[[str], object] = lambda _: None  # called with the UID of a row that ends or is ORPHANED
        self.nominations = Nominations(capacity.loads)
        self._reports = reports
        self._capacity = capacity
        self._timeouts = timeouts
        self._clock = clock
        self._rows: dict[str, Reservation] = {}
        self._by_phase: dict[Phase, dict[str, Reservation]] = {phase: {} for phase in Phase}  # the rows by phase
        self._by_gang: dict[str, dict[str, Reservation]] = {}  # the rows by gang
        self._by_peer_key: dict[str, dict[str, Reservation]] = {}  # the rows with a `peer_key`, by this key
        self._peer_counts: dict[str, Counter[str]] = {}  # by `peer_key`, the number of these rows on each node

    # Queries.

    def get(self, uid: str) -> Reservation | None:
        return self._rows.get(uid)

    def rows_in_phases(self, *phases: Phase) -> Iterator[Reservation]:
        """All rows in these phases."""
        return (row for phase in phases for row in self._by_phase[phase].values())

    def uids_in_phase(self, phase: Phase) -> list[str]:
        """The pods with a row in the phase."""
        return list(self._by_phase[phase])

    def count_rows(self, phase: Phase) -> int:
        """The number of rows in the phase."""
        return len(self._by_phase[phase])

    def gang_plan(self, gang: str) -> Mapping[str, Reservation]:
        """The plan of the gang: its rows, by pod."""
        return self._by_gang.get(gang, {})

    def peer_nodes(self, peer_key: str | None) -> dict[str, str]:
        """The node of each pod with this key (`PodRequest.peer_key`), by UID, without pods that are being deleted."""
        rows = self._by_peer_key.get(peer_key, {}) if peer_key is not None else {}
        return {uid: row.node for uid, row in rows.items()}

    def peer_counts_by_node(self, peer_key: str | None, excluded_uid: str) -> Counter[str]:
        """The number of the pods of `peer_nodes` on each node, without the pod `excluded_uid`."""
        counts = self._peer_counts.get(peer_key) if peer_key is not None else None
        if peer_key is None or counts is None:
            return Counter()
        counts = counts.copy()
        excluded = self._by_peer_key[peer_key].get(excluded_uid)
        if excluded is not None:
            counts[excluded.node] -= 1
        return counts

    def holding(self, uid: str) -> Holding | None:
        """The cards and devices that the pod uses or has reserved, also after the pod was deleted."""
        row = self._rows.get(uid)
        if row is None or row.holding is None:
            return None
        if row.phase in (Phase.TERMINATING, Phase.ORPHANED):
            if self._is_reported(row.holding):
                return replace(row.holding, phase_name=REPORTED_PHASE)
            return row.holding if row.phase is Phase.TERMINATING else None
        return row.holding

    def unknown_holding(self, report: ShareReport) -> Holding | None:
        """The holding that a node's report adds to the node's cards; None if the report adds nothing.

        Leaves out the pod's known shares of these cards, under this or another name of the node. The remaining shares
        belong to a former binding of the pod: etcd was restored from a backup, and the containers of that binding still
        run.
        """
        known_holding = self.holding(report.uid)
        if known_holding is not None and known_holding.node == report.node and known_holding.assignment.is_gpushare:
            return None  # the known assignment has no UUIDs to compare with
        reported = self._reports.reported_holding(*report)
        if reported is None:
            return None
        remaining_shares = (
            reported.assignment.excess_over(known_holding.assignment)
            if known_holding is not None
            else reported.assignment
        )
        return (
            replace(reported, uid=unknown_holder_key(report), assignment=remaining_shares, charged=False)
            if remaining_shares is not None
            else None
        )

    def is_bound(self, uid: str, node: str) -> bool:
        """Whether the watch shows the pod bound to the node and not finished."""
        row = self._rows.get(uid)
        return row is not None and row.phase is Phase.BOUND and row.node == node

    def known_binding(self, uid: str) -> KnownBinding | None:
        """The node and cards to which the pod is or may be bound; None if the pod is certainly unbound."""
        row = self._rows.get(uid)
        if row is None or row.phase in UNPOSTED_PHASES or row.phase is Phase.ORPHANED:
            return None
        return KnownBinding(node=row.node, assignment=row.assignment, phase=row.phase)

    def pending_bindings(self) -> set[str]:
        """The UIDs of the pods that a Binding of this extender may still bind."""
        return {*self._by_phase[Phase.BINDING], *self._by_phase[Phase.UNCONFIRMED]}

    def uids_to_count(self) -> list[str]:
        """The pods for `count_shares`: with a row that is not BOUND, or in the report of a node."""
        rows = (uid for phase, rows in self._by_phase.items() if phase is not Phase.BOUND for uid in rows)
        return list(dict.fromkeys((*rows, *self._reports.reported_nodes_by_uid())))

    def phase_counts(self) -> dict[str, int]:
        """The number of BOUND pods as "bound", and 0 for the other phase names that a metric shows."""
        counts = {PHASE_NAMES[Phase.TERMINATING]: 0, REPORTED_PHASE: 0}
        counts |= {PHASE_NAMES[phase]: 0 for phase, rows in self._by_phase.items() if rows and phase is not Phase.BOUND}
        return counts | {PHASE_NAMES[Phase.ACCEPTED]: len(self._by_phase[Phase.BOUND])}

    def count_shares(self, uids: Iterable[str]) -> Counter[str]:
        """The number of shares of these pods in the ledger by phase name, without shares of BOUND pods. Takes 5 us for
        each pod.
        """
        counts = Counter[str]()
        nodes_by_uid = self._reports.reported_nodes_by_uid()
        for uid in uids:
            row, nodes = self._rows.get(uid), nodes_by_uid.get(uid, ())
            if row is not None and row.phase is not Phase.BOUND and (holding := self.holding(uid)) is not None:
                counts[holding.phase_name] += 1
            # Unknown holders. Counted without `unknown_holding`, which would be slow for tens of thousands of pods.
            if row is None or row.holding is None:
                counts[REPORTED_PHASE] += len(nodes)
            else:
                keys = (unknown_holder_key(ShareReport(uid, node)) for node in nodes)
                counts[REPORTED_PHASE] += sum(self._capacity.ledger.holding(key) is not None for key in keys)
        return counts

    # Decisions of this extender.

    def set_plan(
        self,
        pod: PodRef,
        node: str,
        assignment: Assignment | None,
        phase: Phase,
        *,
        mps_client: MpsClient = COMMON_CLIENT,
        load: Load | None = None,
        nominee: WaitingPod | None = None,
        gang: str = "",
        peer_key: str | None = None,
    ) -> None:
        """Set the pod's plan, in place of an earlier plan. If the node is the same, the earlier `load` is kept."""
        row_before = self._rows.get(pod.uid)
        if load is None and row_before is not None and row_before.node == node:
            load = row_before.load
        holding = _make_holding(pod, node, assignment, mps_client, phase)
        self._set_row(
            Reservation(
                pod, node, phase, self._clock.now(), holding, load, nominee=nominee, gang=gang, peer_key=peer_key
            )
        )

    def promote_nomination(self, uid: str) -> None:
        """Change the pod's row from NOMINATED to RESERVED: kube-scheduler has called filter for the pod."""
        self._set_phase(self._rows[uid], Phase.RESERVED)

    def assume(
        self,
        pod: PodRef,
        node: str,
        assignment: Assignment | None,
        *,
        mps_client: MpsClient,
        epoch: int,
        peer_key: str | None = None,
        by_claim: bool = False,
    ) -> None:
        """Reserve the cards for a Binding or claim that a thread will write now. `epoch`: the current leader epoch."""
        row_before = self._rows.get(pod.uid)
        load, gang = (
            (row_before.load, row_before.gang) if row_before is not None and row_before.node == node else (None, "")
        )
        holding = _make_holding(pod, node, assignment, mps_client, Phase.BINDING)
        self._set_row(
            Reservation(
                pod,
                node,
                Phase.BINDING,
                self._clock.now(),
                holding,
                load,
                epoch=epoch,
                gang=gang,
                peer_key=peer_key,
                by_claim=by_claim,
            )
        )

    def set_allocated(self, waiting: WaitingPod, node: str, assignment: Assignment, phase: Phase) -> None:
        """Set the row of a pod whose claim the watch shows allocated, and that this process has not written.

        phase: ALLOCATED, or UNCONFIRMED if the gate must still be opened.
        """
        pod, request = waiting.ref, waiting.request
        holding = _make_holding(pod, node, assignment, request.mps_client, phase)
        self._set_row(
            Reservation(
                pod,
                node,
                phase,
                self._clock.now(),
                holding,
                waiting.load,
                peer_key=request.peer_key,
                by_claim=True,
            )
        )

    def mark_claim_rejected(self, uid: str) -> None:
        """Record that the pod's claim must be deleted, because kube-scheduler has refused the node."""
        row = self._rows.get(uid)
        if row is not None and row.phase is Phase.ALLOCATED:
            self._set_phase(row, Phase.UNCONFIRMED)

    def settle_claim(self, uid: str, phase: Phase | None) -> None:
        """Record the outcome of reading the pod and its claim: ALLOCATED; None if the claim is gone and the pod has no
        node; TERMINATING if the pod is gone.
        """
        row = self._rows.get(uid)
        if row is None or row.phase is not Phase.UNCONFIRMED or not row.by_claim:
            return  # a watch event has settled the row
        if phase is Phase.TERMINATING:
            self._mark_terminating(row)
        elif phase is None:
            self._drop_row(row)
        else:
            self._set_phase(row, phase)

    def release_plan(self, uid: str) -> None:
        """End the plan of the pod. A posted row stays, but no longer belongs to its gang's plan."""
        row = self._rows.get(uid)
        if row is None:
            return
        self._remove_from_gang(row)
        if row.phase in UNPOSTED_PHASES:
            self._drop_row(row)

    @contextmanager
    def restore_plans_on_error(self, uids: Sequence[str]) -> Iterator[None]:
        """Context manager: after an unexpected error inside, the plans of these pods are restored.

        With only a part of its plan, a gang would hold cards until the plan expires, and could not be bound.
        """
        # Copies, since rows change.
        rows_before = [copy(row) for uid in uids if (row := self._rows.get(uid)) is not None]
        try:
            yield
        except Exception:
            for uid in uids:
                self.release_plan(uid)
            for row in rows_before:
                self._set_row(row)
            raise

    def record_binding_outcome(self, uid: str, phase: Phase | None) -> None:
        """Record how the posting of the Binding ended. After None, a pod in the plan of its gang is WAITING again."""
        row = self._rows.get(uid)
        if row is None or row.phase is not Phase.BINDING:
            return  # the watch has shown the pod bound since, to this node or another one
        if phase is None and row.gang and not row.deleted:
            self._set_phase(row, Phase.WAITING)
        elif phase is None:
            self._drop_row(row)
        elif row.deleted:
            self._mark_terminating(row)
        else:
            self._set_phase(row, phase)

    # Events of watches.

    def mark_bound(self, pod: PodRecord) -> None:
        """Record that the watch shows the pod on its node. No further Binding of ours can bind it.

        A pod without an assignment either requests no card or was bound by another program. If the annotations are
        unreadable, but the pod is on the node that this extender had chosen, the pod keeps the known cards.
        """
        self._drop_nomination(pod.uid, pod.node, pod.assignment)
        row_before = self._rows.get(pod.uid)
        if pod.assignment is None:
            elsewhere = row_before is not None and (row_before.node != pod.node or row_before.holding is None)
            if row_before is not None and (
                row_before.phase in UNPOSTED_PHASES or (row_before.phase in POSTED_PHASES and elsewhere)
            ):
                self._drop_row(row_before)
            return
        holding = Holding(pod.uid, pod.namespace, pod.name, pod.node, pod.assignment, mps_client=pod.mps_client)
        if (
            row_before is None
            or row_before.phase is not Phase.BOUND
            or (row_before.holding, row_before.peer_key) != (holding, pod.peer_key)
        ):
            self._set_row(
                Reservation(pod.ref, pod.node, Phase.BOUND, self._clock.now(), holding, peer_key=pod.peer_key)
            )

    def mark_unbound(self, uid: str) -> None:
        """Record that the watch shows the pod without a node.

        If the pod was bound or deleted before, etcd was restored from a backup. Then a look-up ends the pod's row,
        after `Timeouts.restored`. By that time no Binding is in progress any more, and the node has reported the cards
        that the pod's containers still use. Until then no Binding is posted.
        """
        row = self._rows.get(uid)
        if row is not None and row.phase in (Phase.BOUND, Phase.TERMINATING):
            row.epoch, row.next_lookup, row.failed_lookups = NO_EPOCH, -math.inf, 0
            self._set_phase(row, Phase.UNCONFIRMED)

    def mark_deleted(self, uid: str, *, ended: bool) -> None:
        """Record that the pod object was deleted. The cards become free only when the containers have ended.

        ended: whether the containers have ended already.
        """
        self._drop_nomination(uid)
        row = self._rows.get(uid)
        if row is None:
            return
        if row.phase is Phase.BINDING:
            row.deleted = True
        elif row.phase in UNPOSTED_PHASES or ended:
            self._drop_row(row, seen_by_scheduler=True)
        elif row.phase not in (Phase.TERMINATING, Phase.ORPHANED):
            self._mark_terminating(row)

    def mark_unreported(self, report: ShareReport) -> None:
        """Record that a card no longer reports the pod. Once no card of the node reports the pod, the containers are
        gone, and the row ends.
        """
        row = self._rows.get(report.uid)
        if row is None or row.phase not in (Phase.TERMINATING, Phase.ORPHANED):
            return
        if row.node == report.node and not self._reports.is_reported(*report):
            self._drop_row(row)

    def restore_terminating(self, report: ShareReport) -> None:
        """Restore the recorded shares of a deleted pod. A former leader recorded the shares; this extender never saw
        the pod.
        """
        row = self._rows.get(report.uid)
        recorded = self._reports.recorded_terminating_holding(*report)
        if recorded is not None and (row is None or row.phase in (Phase.TERMINATING, Phase.ORPHANED)):
            ref = PodRef(recorded.uid, recorded.namespace, recorded.name)
            self._mark_terminating(Reservation(ref, recorded.node, Phase.TERMINATING, self._clock.now(), recorded))

    def sync_reports(self, reports: Collection[ShareReport]) -> None:
        """Update the ledger for the pods of these reports. A UID that only a node reports is never treated as a pod."""
        for report in reports:
            is_known = report.uid in self._rows
            if is_known:
                self._sync_capacity(report.uid)  # an orphaned pod counts only while its node reports it
            if not is_known or not self._reports.is_reported(*report):
                self._capacity.set_holding(
                    unknown_holder_key(report), self.unknown_holding(report), seen_by_scheduler=False
                )

    # Look-ups.

    def overdue_pods(self) -> list[PodRef]:
        """The pods to look up, because no event has confirmed their Bindings in time.

        Pods whose look-up failed most recently come last.
        """
        now = self._clock.now()
        due_pods = [
            row
            for row in self.rows_in_phases(Phase.UNCONFIRMED, Phase.ACCEPTED)
            if self._is_overdue(row) and row.next_lookup <= now and not row.by_claim
        ]
        return [row.pod for row in sorted(due_pods, key=lambda row: row.next_lookup)]

    def on_lookup(self, uid: str, *, bound: bool, exists: bool) -> bool:
        """Record the result of a consistent read of a pod from `overdue_pods`.

        Returns whether the pod's row was removed or became TERMINATING.
        """
        row = self._rows.get(uid)
        if row is None or not self._is_overdue(row):
            return False  # a watch event has settled the row, or the pod was posted again
        if bound:
            row.since = self._clock.now()  # the watch is late: look the pod up again later
            return False
        if exists:
            self._drop_row(row)
        else:
            self._mark_terminating(row)  # the pod may have been bound and then deleted between two reads
        return True

    def on_lookup_failed(self, uid: str) -> None:
        """Record that the look-up of a pod from `overdue_pods` failed. It is repeated later, after the other pods."""
        row = self._rows.get(uid)
        if row is not None and row.phase in (Phase.UNCONFIRMED, Phase.ACCEPTED):
            row.next_lookup = self._clock.now() + 2.0 ** min(row.failed_lookups, _MAX_DOUBLINGS)
            row.failed_lookups += 1

    # Timeouts, and changes of the leader.

    def drop_plans(self) -> None:
        """End all plans, and all nominations whose node is not in the pod's status."""
        self.nominations.reset_to_statuses()
        for row in list(self.rows_in_phases(*UNPOSTED_PHASES)):
            self._drop_row(row)

    def due_uids(self) -> list[str]:
        """The pods for `expire`: their rows have been in a phase that ends for its time."""
        now, timeouts = self._clock.now(), self._timeouts
        plans = self.rows_in_phases(Phase.NOMINATED, Phase.RESERVED)
        due = [row.pod.uid for row in plans if now - row.since > timeouts.reservation]
        terminating = self._by_phase[Phase.TERMINATING].values()
        return due + [row.pod.uid for row in terminating if now - row.since > timeouts.terminating]

    def expire(self, uids: Iterable[str]) -> list[Reservation]:
        """End the expired plans and nominations of these single pods, and their unreported shares if they were deleted.
        Returns the former rows. Takes 25 us for each pod.

        Plans of gangs end with their gangs.
        """
        now, expired = self._clock.now(), list[Reservation]()
        for uid in uids:
            row = self._rows.get(uid)
            if row is None:
                continue
            if row.phase in (Phase.NOMINATED, Phase.RESERVED) and now - row.since > self._timeouts.reservation:
                expired.append(replace(row))
                self._drop_row(row)
            elif (
                row.phase is Phase.TERMINATING
                and row.holding is not None
                and now - row.since > self._timeouts.terminating
                and not self._is_reported(row.holding)
            ):
                expired.append(replace(row))
                self._set_phase(row, Phase.ORPHANED)
                self.on_ended(uid)
        return expired

    def drop_surplus_orphans(self, max_count: int) -> bool:
        """Drop up to `max_count` ORPHANED rows if there are too many. Returns whether to call again.

        Shares that a node reports continue to count. There are no more of them than pods that ran on the nodes.
        """
        surplus = len(self._by_phase[Phase.ORPHANED]) - _MAX_ORPHANED
        if surplus <= 0:
            return False
        unreported = (
            row
            for row in self._by_phase[Phase.ORPHANED].values()
            if row.holding is not None and not self._is_reported(row.holding)
        )
        rows = list(islice(unreported, min(surplus, max_count)))
        for row in rows:
            self._drop_row(row)
        return len(rows) == max_count

    # Private methods that maintain the table.

    def _is_overdue(self, row: Reservation) -> bool:
        seconds = self._timeouts.restored if row.epoch == NO_EPOCH else self._timeouts.confirmation
        return row.phase in (Phase.UNCONFIRMED, Phase.ACCEPTED) and self._clock.now() - row.since > seconds

    def _is_reported(self, holding: Holding) -> bool:
        """Whether the node of the holding still reports the pod."""
        return self._reports.is_reported(holding.uid, holding.node)

    def _mark_terminating(self, row: Reservation) -> None:
        """Set the row to TERMINATING. This frees no card: the pod keeps its holding."""
        if row.holding is None:
            self._drop_row(row)  # the pod held no card that its containers could still use
        else:
            self._set_row(Reservation(row.pod, row.node, Phase.TERMINATING, self._clock.now(), row.holding))

    def _set_row(self, row: Reservation) -> None:
        """Set the row, in place of the pod's earlier row."""
        row_before = self._rows.get(row.pod.uid)
        _check_transition(row.pod, row_before.phase if row_before is not None else None, row.phase)
        if row_before is not None:
            self._remove_from_gang(row_before)
            self._remove_from_peers(row_before)
            del self._by_phase[row_before.phase][row.pod.uid]
        if row.gang:
            self._by_gang.setdefault(row.gang, {})[row.pod.uid] = row
        if row.peer_key is not None:
            self._by_peer_key.setdefault(row.peer_key, {})[row.pod.uid] = row
            self._peer_counts.setdefault(row.peer_key, Counter())[row.node] += 1
        if row.holding is not None and row.holding.phase_name != PHASE_NAMES[row.phase]:
            row.holding = replace(row.holding, phase_name=PHASE_NAMES[row.phase])
        self._rows[row.pod.uid] = self._by_phase[row.phase][row.pod.uid] = row
        self._sync_capacity(row.pod.uid)

    def _set_phase(self, row: Reservation, phase: Phase) -> None:
        _check_transition(row.pod, row.phase, phase)
        del self._by_phase[row.phase][row.pod.uid]
        row.phase, row.since = phase, self._clock.now()
        if row.holding is not None and row.holding.phase_name != PHASE_NAMES[phase]:
            row.holding = replace(row.holding, phase_name=PHASE_NAMES[phase])
        self._by_phase[phase][row.pod.uid] = row
        self._sync_capacity(row.pod.uid)

    def _drop_row(self, row: Reservation, *, seen_by_scheduler: bool = False) -> None:
        if self._rows.get(row.pod.uid) is row:
            _check_transition(row.pod, row.phase, None)
            self._remove_from_gang(row)
            self._remove_from_peers(row)
            del self._rows[row.pod.uid], self._by_phase[row.phase][row.pod.uid]
            self._sync_capacity(row.pod.uid, seen_by_scheduler=seen_by_scheduler)
            self.on_ended(row.pod.uid)

    def _sync_capacity(self, uid: str, *, seen_by_scheduler: bool = False) -> None:
        """Update the ledger and totals to the pod's current holding.

        seen_by_scheduler: whether kube-scheduler sees the cause itself.
        """
        self._capacity.set_holding(uid, self.holding(uid), seen_by_scheduler=seen_by_scheduler)
        row = self._rows.get(uid)
        self._capacity.set_planned_pod(
            uid, PlacedPod(row.node, row.load) if row is not None and row.load is not None else None
        )
        for report in (ShareReport(uid, node) for node in self._reports.reported_nodes_by_uid().get(uid, ())):
            self._capacity.set_holding(
                unknown_holder_key(report), self.unknown_holding(report), seen_by_scheduler=seen_by_scheduler
            )

    def _drop_nomination(self, uid: str, node: str = "", assignment: Assignment | None = None) -> None:
        """End the pod's nomination.

        node, assignment: the pod's binding. If the pod got the nominated cards, no capacity is freed.

        kube-scheduler itself sees why a nomination for another node ends: the pod was bound elsewhere, or is gone. But
        kube-scheduler may have tried pods again before the nomination ended here. kube-scheduler sees neither that
        other cards of a node become free, nor that a nomination by the extender ends.
        """
        nomination = self.nominations.remove(uid)
        if nomination is None:
            return
        elsewhere = any(name != node or place.member_reservations for name, place in nomination.places.items())
        if elsewhere or any(place.assignment not in (None, assignment) for place in nomination.places.values()):
            self._capacity.mark_freed(seen_by_scheduler=elsewhere and not nomination.own_eviction)

    def _remove_from_gang(self, row: Reservation) -> None:
        if row.gang:
            plan = self._by_gang[row.gang]
            del plan[row.pod.uid]
            if not plan:
                del self._by_gang[row.gang]
            row.gang = ""

    def _remove_from_peers(self, row: Reservation) -> None:
        if row.peer_key is not None:
            rows, counts = self._by_peer_key[row.peer_key], self._peer_counts[row.peer_key]
            del rows[row.pod.uid]
            counts[row.node] -= 1
            if not counts[row.node]:
                del counts[row.node]
            if not rows:
                del self._by_peer_key[row.peer_key], self._peer_counts[row.peer_key]


def unknown_holder_key(report: ShareReport) -> str:
    """The key in the ledger for a share that a node reports for an unknown pod.

    The key equals no UID of a pod or of a report, because it has a "/": reports with such UIDs are ignored
    (`extendedresources.is_uid`).
    """
    return f"{report.node}/{report.uid}"


def _check_transition(pod: PodRef, phase_before: Phase | None, phase_now: Phase | None) -> None:
    if phase_now not in TRANSITIONS[phase_before]:
        raise IllegalTransition(f"the reservation of pod {pod.pod} cannot change from {phase_before} to {phase_now}")


def _make_holding(
    pod: PodRef, node: str, assignment: Assignment | None, mps_client: MpsClient, phase: Phase
) -> Holding | None:
    return (
        Holding(pod.uid, pod.namespace, pod.name, node, assignment, PHASE_NAMES[phase], mps_client)
        if assignment is not None
        else None
    )
