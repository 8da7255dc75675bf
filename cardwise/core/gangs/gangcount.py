"""Counts the members of a gang: who is there, how many it needs, and what is wrong with what it says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cardwise.core.api import names
from cardwise.core.gangs.gangs import MOST_MEMBERS, Group, Member


@dataclass(frozen=True, slots=True)
class Counted:
    """`minimum`: how many must be there, 0 where nobody says it. `problem`: why it can never be complete, or ""."""

    minimum: int
    problem: str
    there: list[Member]  # that count, the oldest first
    bound: list[Member]  # of those
    gated: list[Member]


def count(name: str, group: Group, members: Iterable[Member]) -> Counted:
    """What follows from the members and the PodGroup of gang `name` alone."""
    there = sorted((m for m in members if m.there), key=lambda m: (m.created, m.name))
    minimum, problem = _minimum(name, group, there)
    return Counted(minimum, problem, there, [m for m in there if m.node], [m for m in there if m.gated])


def _minimum(name: str, group: Group, there: Sequence[Member]) -> tuple[int, str]:
    """And what is wrong with it."""
    if not there:
        return group.minimum or 0, "all its pods are ending"
    said = {member.minimum for member in there if member.minimum is not None}
    problem = next((f"{member.name}: {member.problem}" for member in there if member.problem), "")
    if group.minimum is not None:
        minimum = group.minimum
        if not 1 <= minimum <= MOST_MEMBERS:
            problem = problem or f"its PodGroup asks for {minimum} members, a gang has 1 to {MOST_MEMBERS}"
        return minimum, problem
    if len(said) > 1:
        numbers = ", ".join(str(number) for number in sorted(said))
        return max(said), problem or f"its pods do not agree on {names.GROUP_NUM}: {numbers}"
    if not said:
        return 0, problem or f"nobody says how many pods it has: add {names.GROUP_NUM}, or a PodGroup {name}"
    return said.pop(), problem
