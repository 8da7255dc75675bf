"""Views of gangs for PodGroups, events and metrics: the phase and progress of each gang."""

from dataclasses import dataclass
from typing import Final

from cardwise.core.gangs.gangs import GangPhase, Member
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement.ledger import Ledger
from extender.records.podref import PodRef

_MAX_NOTIFIED: Final = 20  # maximum number of members of a gang that get an event, since a gang may have 500 members


@dataclass(frozen=True, slots=True)
class GangView:
    """The state of a gang, as PodGroups and events show it.

    minimum: the number of members that must run together.
    member_count: the number of members that are included in the minimum.
    oldest: the members that get events.
    bound: the number of members that have a node.
    reserved: by node of the plan, the numbers of planned members and cards.
    """

    namespace: str
    name: str
    phase: GangPhase
    reason: str
    minimum: int
    member_count: int
    oldest: tuple[PodRef, ...]
    bound: int
    waiting_for: tuple[str, ...]
    reserved: tuple[tuple[str, int, int], ...]
    has_minimum_from_member: bool  # whether annotations of the pods set the minimum
    has_foreign_podgroup: bool


def make_view(gang: Gang, ledger: Ledger) -> GangView:
    """The view of the gang as it is now."""
    reserved: dict[str, tuple[int, int]] = {}
    for uid, node in gang.plan.items():
        holding = ledger.holding(uid)
        members, cards = reserved.get(node, (0, 0))
        reserved[node] = members + 1, cards + (len(holding.assignment.shares()) if holding is not None else 0)
    return GangView(
        gang.namespace,
        gang.name,
        gang.phase,
        "" if gang.ran or (gang.plan and not gang.problem) else gang.problem or gang.foreign_gate or gang.reason,
        gang.minimum,
        len(gang.counted_members),
        tuple(pod_ref(gang, member) for member in gang.counted_members[:_MAX_NOTIFIED]),
        len(gang.bound_members),
        tuple(gang.missing_names()),
        tuple((node, *counts) for node, counts in sorted(reserved.items())),
        gang.has_minimum_from_member,
        bool(gang.foreign_podgroups),
    )


def pod_ref(gang: Gang, member: Member) -> PodRef:
    """The name of the member's pod, to write about it."""
    return PodRef(member.uid, gang.namespace, member.name)
