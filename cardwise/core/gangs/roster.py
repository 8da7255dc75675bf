"""The members of one gang, in order, with counts of their properties.

The counts are updated for each event, so an event takes as long in a large gang as in a small one. This matters,
because events are handled under the extender's lock, and a gang may have thousands of pods.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import ForeignPodGroup, Member

_MAX_UNUSED_REQUESTS: Final = 16  # shared requests without a member that are kept

_T = TypeVar("_T")


class Roster:
    """Sequences of the members of one gang, by their state and oldest first. They change with the gang.

    Members whose pods are gone (`is_counted` is false) are in none of them.
    """

    def __init__(self) -> None:
        self._lists: list[tuple[Callable[[Member], bool], list[Member]]] = []
        self.counted = self._tracked_members(lambda m: m.is_counted)
        self.ready = self._tracked_members(
            lambda m: m.is_counted and not m.foreign_gate
        )  # without a scheduling gate of another project
        self.free = self._tracked_members(lambda m: m.is_counted and not m.foreign_gate and not m.node)
        self.bound = self._tracked_members(lambda m: m.is_counted and bool(m.node))
        self.gated = self._tracked_members(lambda m: m.is_counted and m.gated)
        self.with_foreign_gate = self._tracked_members(lambda m: m.is_counted and bool(m.foreign_gate))
        self.with_problem = self._tracked_members(
            lambda m: m.is_counted and bool(m.problem)
        )  # cannot be placed as written
        self.minimums: Counter[int] = Counter()  # the minimums that members' annotations or labels set
        self.podgroup_origins: Counter[ForeignPodGroup | None] = (
            Counter()
        )  # the API groups of the PodGroups that members name
        self.priorities: Counter[int] = Counter()
        # the requests and loads of members without a node
        self.kinds: Counter[tuple[PodRequest | None, Load]] = Counter()
        self._requests: dict[PodRequest, PodRequest] = {}  # see `share_request`

    def share_request(self, member: Member) -> Member:
        """The member, with the request object that all members with equal requests share. The planner compares the
        requests of hundreds of members for each plan, and comparing an object with itself is fast.
        """
        request = member.request
        if request is None:
            return member
        if len(self._requests) > 2 * len(self.kinds) + _MAX_UNUSED_REQUESTS:
            self._requests = {
                equal_request: equal_request for equal_request, _ in self.kinds if equal_request is not None
            }
        shared = self._requests.setdefault(request, request)
        return member if shared is request else replace(member, request=shared)

    def update_member(self, member_before: Member | None, member_now: Member | None) -> None:
        """Update the sequences and counts for a member that was added (`member_before` is None), changed, or removed
        (`member_now` is None).
        """
        for is_tracked, tracked_members in self._lists:
            if member_before is not None and is_tracked(member_before):
                del tracked_members[bisect_left(tracked_members, _age_key(member_before), key=_age_key)]
            if member_now is not None and is_tracked(member_now):
                insort(tracked_members, member_now, key=_age_key)
        for state, sign in ((member_before, -1), (member_now, 1)):
            if state is None or not state.is_counted:
                continue
            _add_count(self.podgroup_origins, state.foreign_podgroup, sign)
            _add_count(self.priorities, state.priority, sign)
            if state.minimum is not None:
                _add_count(self.minimums, state.minimum, sign)
            if not state.node:
                _add_count(self.kinds, (state.request, state.load), sign)

    def _tracked_members(self, is_tracked: Callable[[Member], bool]) -> Sequence[Member]:
        """A sequence of the members for which `is_tracked` returns True; later changes update it."""
        members: list[Member] = []
        self._lists.append((is_tracked, members))
        return members


def _age_key(member: Member) -> tuple[str, str, str]:
    return member.created, member.name, member.uid


def _add_count(counter: Counter[_T], element: _T, sign: int) -> None:
    counter[element] += sign
    if not counter[element]:
        del counter[element]
