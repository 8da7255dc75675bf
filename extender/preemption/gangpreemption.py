"""Preemption for gangs: pods go for a member only where all that its gang lacks has a place then.

kube-scheduler preempts for one pod after the other, and knows no gangs. So with each answer the whole gang is looked
at: what is free or becomes so, for whom somebody goes already, and who else would have to go for the others. Only who
must go for the pod that was asked for is answered; the places of the others are kept, and their turn comes. Under the
lock of the state.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cardwise.clock import Clock
from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Member
from cardwise.core.preemption.preemption import Victims
from extender.cache.cache import Cache
from extender.cache.nodeload import NodeLoads
from extender.cache.nominated import NominatedPods
from extender.cache.nominations import Kept, NominatedPlace
from extender.gangs.gangs import Gangs
from extender.records.pod import WaitingPod
from extender.records.podref import PodRef


@dataclass(frozen=True, slots=True)
class Together:
    """Who goes on which node for the pod, and what is kept for the others of its gang meanwhile."""

    node: str
    victims: Victims
    rest: tuple[Kept, ...]


class GangPreemption:
    """Not thread-safe: the state locks."""

    def __init__(self, nominated: NominatedPods, gangs: Gangs, *, cache: Cache, clock: Clock) -> None:
        self._ledger = cache.ledger
        self._loads = cache.loads
        self._nominations = cache.reservations.nominations
        self._nominated = nominated
        self._gangs = gangs
        self._clock = clock

    def concerns(self, uid: str) -> bool:
        """Whether the pod is in a gang that does not run, so that it is not placed alone."""
        gang = self._gangs.of(uid)
        return gang is None or not gang.ran

    def unhelped(self, uid: str) -> list[str]:
        """All of the pod's gang who have no place yet, and for whom nobody goes."""
        return [member.uid for member in self._lacking(uid)]

    def answer(self, claimant: WaitingPod, policy: str, found: Mapping[str, Victims], until: float) -> Together | None:
        """None where nobody is to go: the gang only has to wait, or would not be complete. `found`: who would have to
        go for this pod alone, by node; `until`: when the search ends.
        """
        with self._nominations.tried():
            self._nominations.drop(claimant.uid)
            lacking = self._lacking(claimant.uid)
            return self._search(claimant, policy, dict(found), lacking, until)

    def _search(
        self,
        claimant: WaitingPod,
        policy: str,
        found: dict[str, Victims],
        lacking: Sequence[Member],
        until: float,
    ) -> Together | None:
        asker = next((member for member in lacking if member.uid == claimant.uid), None)
        nodes = {node for node, victims in found.items() if not victims.uids}  # where it is enough to wait
        if asker is None or self._places(claimant, lacking, nodes) is not None:
            return None
        # Who is alike may have the same nodes; what others lack must be free.
        fellows = [member for member in lacking if member.shape == asker.shape and member is not asker]
        own: tuple[str, Victims] | None = None
        others: list[Kept] = []
        at_once = 1
        while found and self._clock.now() <= until:
            for _ in range(at_once):
                node, victims = min(found.items(), key=lambda item: (item[1].harm, item[0]))
                if victims.uids and own is None:
                    taker, own = claimant, (node, victims)
                elif fellows:
                    taker = _claimant(claimant.ref.namespace, fellows.pop(0))
                    if victims.assignment is not None:
                        others.append(Kept(taker, node, victims.assignment))
                else:
                    found.clear()
                    break
                self._nominations.answered(
                    taker, {node: NominatedPlace(victims.assignment, victims.uids)}, self._clock.now()
                )
                nodes.add(node)
                del found[node]
                taker = _claimant(claimant.ref.namespace, fellows[0]) if fellows else claimant
                again = self._nominated.who_goes(
                    taker, policy, node, own=[m.uid for m in lacking if not self._is_helped(m.uid)]
                )
                if again is not None:
                    found[node] = again
                if not found:
                    break
            at_once *= 2  # a plan costs more than a look, and who is looked at in vain stays
            if own is None:
                continue
            rest = [member for member in lacking if not self._is_helped(member.uid)]
            places = self._places(claimant, rest, nodes)
            if places is not None:
                return Together(*own, (*others, *places))
        return None

    def _lacking(self, uid: str) -> list[Member]:
        """The same; none where nothing can be planned for the gang now."""
        gang = self._gangs.of(uid)
        if gang is None or gang.ran or gang.refusal(self._clock.now()) is not None:
            return []
        return [member for member in gang.missing_in_plan() if not self._is_helped(member.uid)]

    def _is_helped(self, uid: str) -> bool:
        """Whether somebody goes for the pod already."""
        return bool(self._nominations.node(uid))

    def _places(self, claimant: WaitingPod, members: Sequence[Member], nodes: Iterable[str]) -> list[Kept] | None:
        """Places for all of these, once all are gone who go; what they hold there of cards."""
        gang = self._gangs.of(claimant.uid)
        if gang is None:
            return None
        with self._later(claimant, {member.uid for member in members}, nodes) as later:
            shape = gang.members[claimant.uid].shape
            planned = self._gangs.would_place(gang, members, later, shape=shape, also=nodes)
        if planned is None:
            return None
        return [
            Kept(_claimant(claimant.ref.namespace, member), planned.nodes[member.uid], assignment)
            for member in members
            if (assignment := planned.assignments.get(member.uid)) is not None
        ]

    @contextmanager
    def _later(self, claimant: WaitingPod, own: Collection[str], nodes: Iterable[str]) -> Iterator["_Later"]:
        """Meanwhile all who go are gone, and for whom they go is there."""
        going = self._nominations.all_victims()
        more: dict[str, Load] = {}
        for node in {*nodes, *going.values()}:
            for _, one in self._loads.on(node):
                if one.going or one.uid in going:
                    going[one.uid] = node
                    more[node] = more.get(node, _NOTHING).plus(one.load)
        for who, node, _ in self._nominations.before(own, claimant.request.priority):
            if self._loads.get(who.uid) is None:
                more[node] = more.get(node, _NOTHING).plus(who.load, -1)
        with self._nominated.kept(own, claimant.request.priority), self._ledger.what_if(released=going):
            yield _Later(self._loads, more)


class _Later:
    """What nodes will have left."""

    def __init__(self, loads: NodeLoads, more: Mapping[str, Load]) -> None:
        self._loads = loads
        self._more = more

    def left(self, node: str) -> Load | None:
        left = self._loads.left(node)
        return left if left is None else left.plus(self._more.get(node, _NOTHING))

    def names(self) -> Collection[str]:
        return self._loads.names()


_NOTHING = Load(0, 0, 0)


def _claimant(namespace: str, member: Member) -> WaitingPod:
    asked = member.request or PodRequest(containers=(), priority=member.priority)
    return WaitingPod(PodRef(member.uid, namespace, member.name), asked, member.load)
