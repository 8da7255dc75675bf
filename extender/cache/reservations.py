"""The table of reservations: who has room on a node's cards, for which reason, until when. One row for each pod.

The life of a row::

                 filter                    bind                 accepted          the watch shows it
    (none) ──► RESERVED ◄──── AHEAD ────► BINDING ───────────► ASSUMED ───────► BOUND
       │          │   decided │ ahead     ▲  │ ▲                                  │ the pod is gone,
       │          ▼           ▼           │  │ │ posted again                     │ its containers may not be
       │        (none): expires, dropped  │  ▼ │                                  ▼
       └──────► WAITING ──────────────────┘ UNCONFIRMED: the answer was lost TERMINATING ──► (none): proved gone
                 a plan of its gang          │ looked up: not bound             │ its time is over
                                             ▼                                  ▼
                                           (none)                             LAPSED

Not drawn: BINDING goes back to WAITING where nothing was posted and the gang's plan stands; ASSUMED and UNCONFIRMED end
when a look at the pod says so; LAPSED is followed by whatever is known of the pod again. A pod that was bound, or gone,
and that the watch shows waiting again (etcd was restored from a backup) is UNCONFIRMED: a look-up settles it as after a
lost answer. Until then its cards count, and nothing is posted for it; after that what its node reports of it counts.

The API server's word comes at any time: a pod that the watch shows bound is BOUND whatever it was before, and the order
in which things are heard does not matter. What is posted (BINDING, UNCONFIRMED, ASSUMED) is given up only by its own
thread, by a consistent read, or by a watch event; nothing else may end it, for its Binding may land (rule 1 of
docs/architecture.md). A row in TERMINATING ends when its node, which had reported the share, reports it no more.

A node's report is believed for pods that were bound to that node. What it reports of other pods fills its own cards
and nobody's quota (`stray`): it may be right, since nobody remembers pods that vanished while no extender ran. A report
says nothing about shares on other nodes. It adds nothing to a card that the pod holds already under the node's former
name (docs/design/0031).

Beside its row a pod may have a nomination: cards that become free because other pods are evicted (`nominations`). It
ends with the pod, too.

The ledger and the sums of nodes follow each change of a row: `room`. Not thread-safe: the state locks.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple

from cardwise.clock import Clock
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON, MpsClient
from cardwise.core.api.request import Load
from cardwise.core.placement.ledger import Holding
from extender.cache.inventory import REPORTED, Inventory, Report
from extender.cache.nominations import Nominations
from extender.cache.room import PLANNED, Room
from extender.records.nodeinfo import Placed
from extender.records.pod import WaitingPod
from extender.records.podinfo import PodRecord
from extender.records.podref import PodRef

_MOST_LAPSED: Final = 4096
NO_TERM: Final = -1  # no term of leadership, in which nobody posts
_MOST_BACK_OFF: Final = 6  # doublings of a second between two look-ups of one pod


class Phase(StrEnum):
    """How far a reservation is; the picture above says what follows what."""

    AHEAD = "ahead"  # decided ahead: the pod's status will name the node, kube-scheduler has not asked yet
    RESERVED = "reserved"  # filter has answered the node
    WAITING = "waiting"  # planned with the others of its gang: it ends with the gang's plan, not by itself
    BINDING = "binding"  # a thread is posting it
    UNCONFIRMED = "unconfirmed"  # posted, and the answer was lost
    ASSUMED = "assumed"  # posted and accepted
    BOUND = "bound"  # the API server shows it
    TERMINATING = "terminating"  # the pod object is gone; its containers may still run
    LAPSED = "lapsed"  # the same, and the time for it is over: it counts only while its node reports it


PLANS: Final = frozenset({Phase.AHEAD, Phase.RESERVED, Phase.WAITING})  # nothing is posted
POSTED: Final = frozenset({Phase.BINDING, Phase.UNCONFIRMED, Phase.ASSUMED})

# What may follow what; None: no reservation. A pod may be seen bound, or be gone, at any time.
FOLLOWS: Final[Mapping[Phase | None, frozenset[Phase | None]]] = {
    None: frozenset({*PLANS, Phase.BINDING, Phase.BOUND, Phase.TERMINATING}),
    Phase.AHEAD: frozenset({*PLANS, Phase.BINDING, Phase.BOUND, None}),
    Phase.RESERVED: frozenset({*PLANS, Phase.BINDING, Phase.BOUND, None}),
    Phase.WAITING: frozenset({*PLANS, Phase.BINDING, Phase.BOUND, None}),
    Phase.BINDING: frozenset({*POSTED, Phase.WAITING, Phase.BOUND, Phase.TERMINATING, None}),
    Phase.UNCONFIRMED: frozenset({Phase.BINDING, Phase.BOUND, Phase.TERMINATING, None}),
    Phase.ASSUMED: frozenset({Phase.BOUND, Phase.TERMINATING, None}),
    Phase.BOUND: frozenset({Phase.BOUND, Phase.TERMINATING, Phase.UNCONFIRMED, None}),
    Phase.TERMINATING: frozenset({Phase.TERMINATING, Phase.LAPSED, Phase.BOUND, Phase.UNCONFIRMED, None}),
    Phase.LAPSED: frozenset({*PLANS, Phase.BINDING, Phase.TERMINATING, Phase.BOUND, None}),
}

# What a phase is called in metrics and in `inspect`; these names are from the first release ("ghost": TERMINATING).
MARKS: Final[Mapping[Phase, str]] = {
    Phase.AHEAD: PLANNED,
    Phase.RESERVED: PLANNED,
    Phase.WAITING: "gang",
    Phase.BINDING: "binding",
    Phase.UNCONFIRMED: "unsure",
    Phase.ASSUMED: "bound",
    Phase.BOUND: "",
    Phase.TERMINATING: "ghost",
    Phase.LAPSED: "ghost",
}


class IllegalTransition(AssertionError):
    """A reservation cannot go this way: a fault of the extender's."""


@dataclass(slots=True, eq=False)
class Reservation:
    """`holding`: cards and devices, None for a pod that asks for none. `load`: the pod's cpu and memory, where this row
    has to count them until the watch shows the pod bound.

    `since`: when it came to its phase. `term`: the term of leadership in which it was
    first posted. `gang`: "namespace/name" of the gang in whose plan it is, before and after it is posted, "" for none.
    `gone`: the pod vanished while a thread was posting. `again`: the earliest time of the next look-up; `tries`: failed
    look-ups so far. `ahead`: the pod, where this was decided ahead.
    """

    pod: PodRef
    node: str
    phase: Phase
    since: float
    holding: Holding | None = None
    load: Load | None = None
    term: int = 0
    gang: str = ""
    gone: bool = False
    tries: int = 0
    again: float = -math.inf
    ahead: WaitingPod | None = None

    @property
    def assignment(self) -> Assignment | None:
        return self.holding.assignment if self.holding is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What to post. `unsure`: an earlier call may have posted it already, and its Binding may still land. `env_access`:
    the node gives cards by environment only, without CDI.
    """

    assignment: Assignment | None
    unsure: bool
    env_access: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The pod has a node already, or may have: no other node is right."""

    node: str
    assignment: Assignment | None
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds. `hold`: how long a plan waits for its bind. `terminating`: how long the share of a vanished pod counts
    without a report of its node.

    `confirm`: a posted Binding that no event has confirmed for so long is looked up. Longer than the API server may
    work on one request.
    """

    hold: float = 30.0
    terminating: float = 30.0
    confirm: float = 75.0


class Over(NamedTuple):
    """What `expire` has ended: the rows, as they were, and whether a nomination ended too."""

    rows: list[Reservation]
    nomination: bool


class Reservations:
    """The table, by pod UID. `reports`: what nodes report; `room`: what follows from the table."""

    def __init__(self, reports: Inventory, room: Room, patience: Patience, clock: Clock) -> None:
        self.nominations = Nominations(room.loads)
        self._reports = reports
        self._room = room
        self._patience = patience
        self._clock = clock
        self._of: dict[str, Reservation] = {}
        self._in: dict[Phase, dict[str, Reservation]] = {phase: {} for phase in Phase}  # the same, by phase
        self._plans: dict[str, dict[str, Reservation]] = {}  # and by gang

    # What is asked.

    def get(self, uid: str) -> Reservation | None:
        return self._of.get(uid)

    def among(self, *phases: Phase) -> Iterator[Reservation]:
        """All rows in these phases."""
        return (one for phase in phases for one in self._in[phase].values())

    def count(self, phase: Phase) -> int:
        return len(self._in[phase])

    def planned(self, gang: str) -> Mapping[str, Reservation]:
        """The plan of the gang: its rows, by pod."""
        return self._plans.get(gang, {})

    def holding(self, uid: str) -> Holding | None:
        """The cards and devices that count for the pod; of a pod that is gone, as long as they count."""
        one = self._of.get(uid)
        if one is None or one.holding is None:
            return None
        if one.phase in (Phase.TERMINATING, Phase.LAPSED):
            if self._is_reported(one.holding):
                return replace(one.holding, mark=REPORTED)
            return one.holding if one.phase is Phase.TERMINATING else None
        return one.holding

    def stray(self, report: Report) -> Holding | None:
        """What a node's report adds to its cards: nothing if the pod is known to be, or to have been, on the node; and
        nothing of cards that the pod holds under another name of the node.
        """
        known = self.holding(report.uid)
        if known is not None and known.node == report.node:
            return None
        found = self._reports.reported(*report)
        if found is None:
            return None
        rest = found.assignment.without(known.assignment.uuids()) if known is not None else found.assignment
        return replace(found, uid=stray_uid(report), assignment=rest, charged=False) if rest is not None else None

    def is_bound(self, uid: str, node: str) -> bool:
        """Whether the watch shows the pod bound to the node and not finished."""
        one = self._of.get(uid)
        return one is not None and one.phase is Phase.BOUND and one.node == node

    def decided(self, uid: str) -> Decided | None:
        """Where the pod is or may be bound already."""
        one = self._of.get(uid)
        if one is None or one.phase in PLANS or one.phase is Phase.LAPSED:
            return None
        return Decided(node=one.node, assignment=one.assignment, phase=one.phase)

    def unheard(self) -> set[str]:
        """The pods of which a Binding of ours may be under way."""
        return {*self._in[Phase.BINDING], *self._in[Phase.UNCONFIRMED]}

    def marks(self) -> dict[str, int]:
        """The shares in the ledger by their marks, those of bound pods by the mark of ASSUMED."""
        counts = Counter({MARKS[Phase.ASSUMED]: len(self._in[Phase.BOUND]), MARKS[Phase.TERMINATING]: 0, REPORTED: 0})
        for phase, there in self._in.items():
            if there and phase not in (Phase.BOUND, Phase.LAPSED):
                counts.setdefault(MARKS[phase], 0)
            if phase is not Phase.BOUND:
                counts.update(held.mark for uid in there if (held := self.holding(uid)) is not None)
        strays = 0  # as `stray` says, without a call for each of tens of thousands of pods
        for uid, nodes in self._reports.held().items():
            one = self._of.get(uid)
            if one is None or one.holding is None:
                strays += len(nodes)
            elif nodes.keys() != {one.node}:
                strays += sum(self.stray(Report(uid, node)) is not None for node in nodes)
        counts[REPORTED] += strays
        return counts

    # What this extender decides.

    def plan(
        self,
        pod: PodRef,
        node: str,
        assignment: Assignment | None,
        phase: Phase,
        *,
        mps_client: MpsClient = COMMON,
        load: Load | None = None,
        ahead: WaitingPod | None = None,
        gang: str = "",
    ) -> None:
        """Plans this for the pod, in place of an earlier plan. On the same node the earlier `load` goes on counting."""
        before = self._of.get(pod.uid)
        if load is None and before is not None and before.node == node:
            load = before.load
        held = _holding(pod, node, assignment, mps_client)
        self._put(Reservation(pod, node, phase, self._clock.now(), held, load, ahead=ahead, gang=gang))

    def meet(self, uid: str) -> None:
        """kube-scheduler has come to a pod that was decided about ahead: what it holds is a plan of filter's now."""
        self._move(self._of[uid], Phase.RESERVED)

    def begin(self, pod: PodRef, node: str, assignment: Assignment | None, *, mps_client: MpsClient, term: int) -> None:
        """A thread posts this from now on, in the term."""
        before = self._of.get(pod.uid)
        load, gang = (before.load, before.gang) if before is not None and before.node == node else (None, "")
        held = _holding(pod, node, assignment, mps_client)
        self._put(Reservation(pod, node, Phase.BINDING, self._clock.now(), held, load, term=term, gang=gang))

    def give_up(self, uid: str) -> None:
        """Ends the plan of the pod. A row that is posted stays, and is no longer part of its gang's plan."""
        one = self._of.get(uid)
        if one is None:
            return
        self._leave_gang(one)
        if one.phase in PLANS:
            self._drop(one)

    def posted(self, uid: str, phase: Phase | None) -> None:
        """How the posting ended: ASSUMED, UNCONFIRMED, or None: surely not bound, by this call or an earlier one. After
        None a pod in the plan of its gang is WAITING again.
        """
        one = self._of.get(uid)
        if one is None or one.phase is not Phase.BINDING:
            return  # it was seen bound meanwhile, here or elsewhere
        if phase is None and one.gang and not one.gone:
            self._move(one, Phase.WAITING)
        elif phase is None:
            self._drop(one)
        elif one.gone:
            self._terminate(one)
        else:
            self._move(one, phase)

    # What is heard.

    def bound(self, pod: PodRecord) -> None:
        """The watch shows the pod on its node. No further Binding of ours can land.

        A pod without an assignment asks for no card, or somebody else has bound it. If it is on the node that we had
        chosen, it may be our Binding with annotations that cannot be read: then what we know of it goes on counting.
        """
        self._drop_nomination(pod.uid, pod.node, pod.assignment)
        before = self._of.get(pod.uid)
        if pod.assignment is None:
            elsewhere = before is not None and (before.node != pod.node or before.holding is None)
            if before is not None and (before.phase in PLANS or (before.phase in POSTED and elsewhere)):
                self._drop(before)
            return
        held = Holding(pod.uid, pod.namespace, pod.name, pod.node, pod.assignment, mps_client=pod.mps_client)
        if before is None or before.phase is not Phase.BOUND or before.holding != held:
            self._put(Reservation(pod.ref, pod.node, Phase.BOUND, self._clock.now(), held))

    def mark_unbound(self, uid: str) -> None:
        """The watch shows the pod without a node. If it was bound or gone before, etcd was restored from a backup.

        Its row ends by a look-up, after `Patience.confirm`: by then no Binding is under way, and the node has reported
        what its containers still use. No term posts it meanwhile.
        """
        one = self._of.get(uid)
        if one is not None and one.phase in (Phase.BOUND, Phase.TERMINATING):
            one.term, one.again, one.tries = NO_TERM, -math.inf, 0
            self._move(one, Phase.UNCONFIRMED)

    def left(self, uid: str, *, ended: bool) -> None:
        """The pod object is gone. What it held ends with its containers, not with the object; `ended`: they have."""
        self._drop_nomination(uid)
        one = self._of.get(uid)
        if one is None:
            return
        if one.phase is Phase.BINDING:
            one.gone = True
        elif one.phase in PLANS or ended:
            self._drop(one, seen=True)
        elif one.phase not in (Phase.TERMINATING, Phase.LAPSED):
            self._terminate(one)

    def unreported(self, report: Report) -> None:
        """A card does not report the pod any more. If no card of the node does, the pod's containers are gone."""
        one = self._of.get(report.uid)
        if one is None or one.phase not in (Phase.TERMINATING, Phase.LAPSED):
            return
        if one.node == report.node and not self._reports.reports(*report):
            self._drop(one)

    def noted(self, report: Report) -> None:
        """A former leader has seen the pod vanish from the node; this extender has never seen it."""
        one = self._of.get(report.uid)
        last = self._reports.terminating(*report)
        if last is not None and (one is None or one.phase in (Phase.TERMINATING, Phase.LAPSED)):
            ref = PodRef(last.uid, last.namespace, last.name)
            self._terminate(Reservation(ref, last.node, Phase.TERMINATING, self._clock.now(), last))

    def settle(self, reports: Collection[Report]) -> None:
        """What nodes report of these pods has changed. A UID that only a node names is never taken for a pod's."""
        for report in reports:
            known = report.uid in self._of
            if known:
                self._follow(report.uid)  # with what nodes say of it
            if not known or not self._reports.reports(*report):
                self._room.hold(stray_uid(report), self.stray(report), seen=False)

    # What is looked up.

    def unconfirmed(self) -> list[PodRef]:
        """The pods whose Binding should have been confirmed by now, to be looked up; those tried last come last."""
        now = self._clock.now()
        due = [one for one in self.among(Phase.UNCONFIRMED, Phase.ASSUMED) if self._overdue(one) and one.again <= now]
        return [one.pod for one in sorted(due, key=lambda one: one.again)]

    def looked_up(self, uid: str, *, bound: bool, exists: bool) -> bool:
        """A consistent read of a pod from `unconfirmed` says so. Returns whether its row ends."""
        one = self._of.get(uid)
        if one is None or not self._overdue(one):
            return False  # settled, or posted once more since
        if bound:
            one.since = self._clock.now()  # the watch is behind; ask again later
            return False
        if exists:
            self._drop(one)
        else:
            self._terminate(one)  # it may have been bound and deleted between two looks
        return True

    def look_up_failed(self, uid: str) -> None:
        """The look-up of a pod from `unconfirmed` failed: it is looked up again later, after the others."""
        one = self._of.get(uid)
        if one is not None and one.phase in (Phase.UNCONFIRMED, Phase.ASSUMED):
            one.again = self._clock.now() + 2.0 ** min(one.tries, _MOST_BACK_OFF)
            one.tries += 1

    # What time and leaders do.

    def drop_plans(self) -> None:
        """Ends all plans, and all nominations that do not follow from the status of a pod."""
        self.nominations.forget()
        for one in list(self.among(*PLANS)):
            self._drop(one)

    def expire(self) -> Over:
        """Ends what is over by time: plans of single pods, unreported shares of vanished pods, and nominations. Plans
        of gangs end with their gangs.
        """
        now = self._clock.now()
        plans = [one for one in self.among(Phase.AHEAD, Phase.RESERVED) if now - one.since > self._patience.hold]
        over = [replace(one) for one in plans]
        for one in plans:
            self._drop(one)
        for one in list(self._in[Phase.TERMINATING].values()):
            if (
                one.holding is not None
                and now - one.since > self._patience.terminating
                and not self._is_reported(one.holding)
            ):
                over.append(replace(one))
                self._move(one, Phase.LAPSED)
        too_many = len(self._in[Phase.LAPSED]) - _MOST_LAPSED
        if too_many > 0:
            # Those that are reported count, and stay: there are no more of them than pods that a node has had.
            silent = (
                one
                for one in self._in[Phase.LAPSED].values()
                if one.holding is not None and not self._is_reported(one.holding)
            )
            for one in list(islice(silent, too_many)):
                self._drop(one)
        return Over(over, self.nominations.step(now))

    # Everything below keeps the table.

    def _overdue(self, one: Reservation) -> bool:
        posted = one.phase in (Phase.UNCONFIRMED, Phase.ASSUMED)
        return posted and self._clock.now() - one.since > self._patience.confirm

    def _is_reported(self, last: Holding) -> bool:
        """By the node where the pod was."""
        return self._reports.reports(last.uid, last.node)

    def _terminate(self, one: Reservation) -> None:
        """Frees no card: what the pod held goes on counting."""
        if one.holding is None:
            self._drop(one)  # it held nothing that its containers could go on using
        else:
            self._put(Reservation(one.pod, one.node, Phase.TERMINATING, self._clock.now(), one.holding))

    def _put(self, one: Reservation) -> None:
        """In place of the pod's earlier reservation."""
        before = self._of.get(one.pod.uid)
        _check(one.pod, before.phase if before is not None else None, one.phase)
        if before is not None:
            self._leave_gang(before)
            del self._in[before.phase][one.pod.uid]
        if one.gang:
            self._plans.setdefault(one.gang, {})[one.pod.uid] = one
        if one.holding is not None and one.holding.mark != MARKS[one.phase]:
            one.holding = replace(one.holding, mark=MARKS[one.phase])
        self._of[one.pod.uid] = self._in[one.phase][one.pod.uid] = one
        self._follow(one.pod.uid)

    def _move(self, one: Reservation, phase: Phase) -> None:
        _check(one.pod, one.phase, phase)
        del self._in[one.phase][one.pod.uid]
        one.phase, one.since = phase, self._clock.now()
        if one.holding is not None and one.holding.mark != MARKS[phase]:
            one.holding = replace(one.holding, mark=MARKS[phase])
        self._in[phase][one.pod.uid] = one
        self._follow(one.pod.uid)

    def _drop(self, one: Reservation, *, seen: bool = False) -> None:
        if self._of.get(one.pod.uid) is one:
            _check(one.pod, one.phase, None)
            self._leave_gang(one)
            del self._of[one.pod.uid], self._in[one.phase][one.pod.uid]
            self._follow(one.pod.uid, seen=seen)

    def _follow(self, uid: str, *, seen: bool = False) -> None:
        """Brings ledger and sums to what the pod holds now. `seen`: kube-scheduler sees the cause itself."""
        self._room.hold(uid, self.holding(uid), seen=seen)
        one = self._of.get(uid)
        self._room.plan(uid, Placed(one.node, one.load) if one is not None and one.load is not None else None)
        for report in (Report(uid, node) for node in self._reports.held().get(uid, ())):
            self._room.hold(stray_uid(report), self.stray(report), seen=seen)

    def _drop_nomination(self, uid: str, node: str = "", got: Assignment | None = None) -> None:
        """`node`, `got`: what the pod has got. If that is what was kept for it, nothing becomes free. kube-scheduler
        sees why this ends, and may have tried pods again before us; but it knows neither cards nor nominations of ours.
        """
        one = self.nominations.drop(uid)
        if one is None:
            return
        elsewhere = any(name != node or place.rest for name, place in one.places.items())
        if elsewhere or any(place.assignment not in (None, got) for place in one.places.values()):
            self._room.free(seen=elsewhere and not one.ours)

    def _leave_gang(self, one: Reservation) -> None:
        if one.gang:
            plan = self._plans[one.gang]
            del plan[one.pod.uid]
            if not plan:
                del self._plans[one.gang]
            one.gang = ""


def stray_uid(report: Report) -> str:
    """The key in the ledger for a share that a node reports of an unknown pod. No pod has this UID, and no report can
    name it: UIDs with a "/" are not read (`survey.is_uid`).
    """
    return f"{report.node}/{report.uid}"


def _check(pod: PodRef, before: Phase | None, now: Phase | None) -> None:
    if now not in FOLLOWS[before]:
        raise IllegalTransition(f"{pod.pod}: a reservation that is {before} cannot be {now}")


def _holding(pod: PodRef, node: str, assignment: Assignment | None, mps_client: MpsClient) -> Holding | None:
    return (
        Holding(pod.uid, pod.namespace, pod.name, node, assignment, mps_client=mps_client)
        if assignment is not None
        else None
    )
