"""What each pod may have, by everything that is said of it; for every pod UID there is one answer, `holding`.

The API server says it (bound), this process has decided it and not seen it confirmed (tentative), the pod had it when
it vanished (ghost), and the node where it had it reports it still (held). Apart from the state, which after each change
here brings the ledger to `holding`: these are the rules of *who counts when* alone, so the order in which things are
heard does not matter. Not thread-safe: its owner locks.

A node is believed for pods that were bound to it. What it reports of others fills its own cards and nobody's quota
(`stray`), since it may be right: nobody remembers what vanished while no extender ran. It says nothing about other
nodes: neither does its word keep their shares, nor does its silence end them.
"""

from dataclasses import replace
from itertools import islice

from cardwise.clock import Clock
from cardwise.core.placement.ledger import Holding
from extender.cache.decisions import Decided, Ghost, Patience, Stage, Tentative
from extender.cache.inventory import Inventory, Report
from extender.records.projection import PodRecord

_PLANS = (Stage.PLANNED, Stage.HELD)
_MOST_LAPSED = 4096
_MOST_BACK_OFF = 6  # doublings of a second between two look-ups of one pod


class Claims:
    """By pod UID. `reports`: what nodes say."""

    def __init__(self, reports: Inventory, patience: Patience, clock: Clock) -> None:
        self._reports = reports
        self._patience = patience
        self._clock = clock
        self._pods: dict[str, PodRecord] = {}  # bound and not finished
        self._tentative: dict[str, Tentative] = {}
        self._ghosts: dict[str, Ghost] = {}
        self._lapsed: dict[str, Holding] = {}  # ghosts whose time was over: their node may have been away for longer

    def holding(self, uid: str) -> Holding | None:
        """What the pod holds, all told."""
        pod = self._pods.get(uid)
        if pod is not None:
            return _of_pod(pod)
        tentative = self._tentative.get(uid)
        if tentative is not None:
            return tentative.holding
        ghost = self._ghosts.get(uid)
        if ghost is not None:
            return replace(ghost.holding, mark="held") if self._is_reported(ghost.holding) else ghost.holding
        lapsed = self._lapsed.get(uid)
        return replace(lapsed, mark="held") if lapsed is not None and self._is_reported(lapsed) else None

    def stray(self, report: Report) -> Holding | None:
        """What the node's report adds to its cards: nothing where the pod is known to be there or to have been."""
        known = self.holding(report.uid)
        if known is not None and known.node == report.node:
            return None
        found = self._reports.reported(*report)
        return replace(found, uid=stray_uid(report), charged=False) if found is not None else None

    def bound_on(self, uid: str, node: str) -> bool:
        """Whether the API server has the pod on the node, and it is not finished."""
        pod = self._pods.get(uid)
        return pod is not None and pod.node == node

    def knows(self, uid: str) -> bool:
        """Whether anybody but a node has spoken of the pod as having a place, or as having had one."""
        return any(uid in known for known in (self._pods, self._tentative, self._ghosts, self._lapsed))

    def decided(self, uid: str) -> Decided | None:
        """Where the pod is or may be bound already."""
        pod = self._pods.get(uid)
        if pod is not None and pod.assignment is not None:
            return Decided(node=pod.node, assignment=pod.assignment, stage=Stage.BOUND)
        tentative = self._tentative.get(uid)
        ghost = self._ghosts.get(uid)
        if tentative is not None and tentative.stage not in _PLANS:
            holding, stage = tentative.holding, tentative.stage
        elif ghost is not None:
            holding, stage = ghost.holding, Stage.UNSURE  # a call from before the pod vanished
        else:
            return None
        return Decided(node=holding.node, assignment=holding.assignment, stage=stage)

    def counts(self) -> dict[str, int]:
        """Pods by what they hold their share as."""
        counts = {"bound": len(self._pods)}
        for t in self._tentative.values():
            counts[t.stage.value] = counts.get(t.stage.value, 0) + 1
        counts["ghost"] = len(self._ghosts)
        held = self._reports.held()
        counts["held"] = sum(uid not in self._pods and uid not in self._ghosts for uid in held)
        return counts

    # What is heard.

    def bound(self, pod: PodRecord) -> None:
        """The API server has the pod on its node, with an assignment."""
        self._pods[pod.uid] = pod
        self._ghosts.pop(pod.uid, None)
        self._lapsed.pop(pod.uid, None)
        tentative = self._tentative.get(pod.uid)
        if tentative is not None and tentative.stage is not Stage.BINDING:
            del self._tentative[pod.uid]

    def left(self, uid: str, *, ended: bool) -> None:
        """The pod is over. What it held ends with its containers, not with its object; `ended`: they have ended."""
        pod = self._pods.pop(uid, None)
        tentative = self._tentative.get(uid)
        if tentative is not None and tentative.stage is Stage.BINDING:
            tentative.gone = True
        else:
            self._tentative.pop(uid, None)
        last = _of_pod(pod) if pod is not None else None
        if last is None and tentative is not None and tentative.stage in (Stage.UNSURE, Stage.BOUND):
            last = tentative.holding
        if ended:
            self._ghosts.pop(uid, None)
            self._lapsed.pop(uid, None)
        elif last is not None:
            self._haunt(last)

    def unreported(self, report: Report) -> bool:
        """A card does not report the pod any more. Where none of its node does, that is the proof: it has let go.
        Returns whether that ends what the pod held.
        """
        ghost = self._ghosts.get(report.uid)
        last = ghost.holding if ghost is not None else self._lapsed.get(report.uid)
        if last is None or last.node != report.node or self._is_reported(last):
            return False
        self._ghosts.pop(report.uid, None)
        self._lapsed.pop(report.uid, None)
        return True

    def noted(self, report: Report) -> None:
        """The extender before us has seen the pod vanish from the node; we have not seen it at all."""
        last = self._reports.terminating(*report)
        if last is not None and report.uid not in self._pods and report.uid not in self._tentative:
            self._haunt(last)

    # What is decided.

    def tentative(self, uid: str) -> Tentative | None:
        """The decision that is not confirmed yet."""
        return self._tentative.get(uid)

    def decide(self, holding: Holding, stage: Stage, term: int = 0) -> None:
        """The pod is to have this, in place of an earlier decision."""
        self._tentative[holding.uid] = Tentative(holding, stage, self._clock.now(), term)

    def drop(self, uid: str) -> bool:
        """The decision does not hold any more; whether there was one."""
        return self._tentative.pop(uid, None) is not None

    def release_plan(self, uid: str) -> bool:
        """As `drop`, where nothing has been posted."""
        tentative = self._tentative.get(uid)
        return tentative is not None and tentative.stage in _PLANS and self.drop(uid)

    def posted(self, uid: str, stage: Stage | None) -> bool:
        """How the posting of a decision ended, as `State.finish_bind` has it; whether there was one."""
        tentative = self._tentative.get(uid)
        if tentative is None or tentative.stage is not Stage.BINDING:
            return False
        del self._tentative[uid]
        if stage is not None and tentative.gone:
            self._haunt(tentative.holding)
        elif stage is not None and uid not in self._pods:
            self.decide(replace(tentative.holding, mark=stage.value), stage, tentative.term)
        return True

    def looked_up(self, uid: str, *, bound: bool, exists: bool) -> bool:
        """What a consistent read said of a decision from `unconfirmed`; whether that ends it."""
        tentative = self._tentative.get(uid)
        if tentative is None or not self._overdue(tentative):
            return False  # settled, or posted once more since
        if bound:
            tentative.since = self._clock.now()  # the watch is behind; ask again later
            return False
        del self._tentative[uid]
        if not exists:
            # It may have been bound and deleted between two looks.
            self._haunt(tentative.holding)
        return True

    def look_up_failed(self, uid: str) -> None:
        """Nothing could be found out of a decision from `unconfirmed`: later again, after the others."""
        tentative = self._tentative.get(uid)
        if tentative is not None:
            tentative.again = self._clock.now() + 2.0 ** min(tentative.tries, _MOST_BACK_OFF)
            tentative.tries += 1

    def unheard(self) -> set[str]:
        """The pods of which a Binding of ours may be under way."""
        return {uid for uid, t in self._tentative.items() if t.stage in (Stage.BINDING, Stage.UNSURE)}

    # What time does.

    def drop_plans(self, *, older: float | None = None) -> list[str]:
        """Ends plans: all, or those of more than so many seconds that end by themselves. Returns their pods."""
        now = self._clock.now()
        plans = [
            uid
            for uid, t in self._tentative.items()
            if (t.stage in _PLANS if older is None else t.stage is Stage.PLANNED and now - t.since > older)
        ]
        for uid in plans:
            del self._tentative[uid]
        return plans

    def drop_ghosts(self) -> list[str]:
        """Ends those whose time is over and whose node says nothing. Returns their pods."""
        now = self._clock.now()
        ghosts = [
            uid for uid, ghost in self._ghosts.items() if now > ghost.until and not self._is_reported(ghost.holding)
        ]
        for uid in ghosts:
            self._lapsed[uid] = self._ghosts.pop(uid).holding
        over = len(self._lapsed) - _MOST_LAPSED
        if over > 0:
            # Those that are reported count, and stay: there are no more of them than pods that a node has had.
            silent = (uid for uid, last in self._lapsed.items() if not self._is_reported(last))
            for uid in list(islice(silent, over)):
                del self._lapsed[uid]
        return ghosts

    def unconfirmed(self) -> list[Holding]:
        """What should have been confirmed by now, and is to be looked up; the last that was tried comes last."""
        now = self._clock.now()
        due = [t for t in self._tentative.values() if self._overdue(t) and t.again <= now]
        return [t.holding for t in sorted(due, key=lambda t: t.again)]

    def _overdue(self, tentative: Tentative) -> bool:
        posted = tentative.stage in (Stage.UNSURE, Stage.BOUND)
        return posted and self._clock.now() - tentative.since > self._patience.confirm

    def _is_reported(self, last: Holding) -> bool:
        """By the node where the pod was."""
        return self._reports.reports(last.uid, last.node)

    def _haunt(self, last: Holding) -> None:
        self._lapsed.pop(last.uid, None)
        self._ghosts[last.uid] = Ghost(replace(last, mark="ghost"), self._clock.now() + self._patience.ghost)


def stray_uid(report: Report) -> str:
    """By which the ledger knows what a node says of a pod that nobody knows there. No pod has it, and no report can
    spell it: UIDs with a "/" are not read (`survey.is_uid`).
    """
    return f"{report.node}/{report.uid}"


def _of_pod(pod: PodRecord) -> Holding:
    if pod.assignment is None:  # only pods with one are kept
        raise AssertionError(pod)
    return Holding(pod.uid, pod.namespace, pod.name, pod.node, pod.assignment, party=pod.party)
