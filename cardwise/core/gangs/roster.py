"""The members of one gang, in order and counted by what matters of them.

Kept up to date member by member, since a gang may have thousands of pods beside those that it needs: an event of one
costs the same in each gang, and happens under the extender's lock.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from cardwise.core.api.request import Load, PodRequest
from cardwise.core.gangs.gangs import Foreign, Member

_T = TypeVar("_T")


class Roster:
    """Sequences are of members that count, the oldest first; they change with the gang."""

    def __init__(self) -> None:
        self._lists: tuple[list[Member], ...] = tuple([] for _ in _OF)
        self.minimums: Counter[int] = Counter()  # as members say them
        self.foreign: Counter[Foreign | None] = Counter()  # whose PodGroups they name
        self.priorities: Counter[int] = Counter()
        self.kinds: Counter[tuple[PodRequest | None, Load]] = Counter()  # what those without a node ask for

    @property
    def there(self) -> Sequence[Member]:
        return self._lists[0]

    @property
    def ready(self) -> Sequence[Member]:
        """No gate of somebody else's keeps them."""
        return self._lists[1]

    @property
    def free(self) -> Sequence[Member]:
        """Those of them without a node."""
        return self._lists[2]

    @property
    def bound(self) -> Sequence[Member]:
        """Those that have a node."""
        return self._lists[3]

    @property
    def gated(self) -> Sequence[Member]:
        return self._lists[4]

    @property
    def barred(self) -> Sequence[Member]:
        """Those that are not ready."""
        return self._lists[5]

    @property
    def wrong(self) -> Sequence[Member]:
        """Those that cannot be placed as they are."""
        return self._lists[6]

    def change(self, before: Member | None, now: Member | None) -> None:
        """A member is another now; None: it was, or is, none."""
        for has, some in zip(_OF, self._lists, strict=True):
            if before is not None and has(before):
                del some[bisect_left(some, _age(before), key=_age)]
            if now is not None and has(now):
                insort(some, now, key=_age)
        for one, sign in ((before, -1), (now, 1)):
            if one is None or not one.there:
                continue
            _add(self.foreign, one.foreign, sign)
            _add(self.priorities, one.priority, sign)
            if one.minimum is not None:
                _add(self.minimums, one.minimum, sign)
            if not one.node:
                _add(self.kinds, (one.request, one.load), sign)


_OF: Final[tuple[Callable[[Member], bool], ...]] = (
    lambda m: m.there,
    lambda m: m.there and not m.barred,
    lambda m: m.there and not m.barred and not m.node,
    lambda m: m.there and bool(m.node),
    lambda m: m.there and m.gated,
    lambda m: m.there and bool(m.barred),
    lambda m: m.there and bool(m.problem),
)


def _age(member: Member) -> tuple[str, str, str]:
    return member.created, member.name, member.uid


def _add(counter: Counter[_T], one: _T, sign: int) -> None:
    counter[one] += sign
    if not counter[one]:
        del counter[one]
