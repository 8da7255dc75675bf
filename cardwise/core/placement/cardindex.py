"""The index of all open cards by free memory: filter uses it to find the best of thousands of nodes.

For a request for one card, a bisection finds the best card without checking every node. Cards are in groups, with one
sorted list for each group: cards of the same kind, with the same taints (`mpstaints`, `cardtenants`), and either all
with or all without a share (`USED_TAINT`). So a search reads only the lists of cards that the request may use. The
outcome equals that of a search node by node (tests/core/placement/test_cardindex.py,
tests/property/test_typed_placement.py, tests/property/test_mpstaints.py, tests/property/test_tenants.py).
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from cardwise.core.placement.cardtenants import EXCLUSIVE_TAINT

USED_TAINT: Final = EXCLUSIVE_TAINT << 1  # a taint: a card with a share is closed to requests for whole cards
KIND_SHIFT: Final = USED_TAINT.bit_length()  # the number of bits below the kind in a group

# An open card: free MiB, node, position in the node's lists, and the group: the kind, `USED_TAINT` and the taints in
# one integer.
IndexEntry = tuple[int, str, int, int]

# Changes of a group above which a new list is made: each change alone moves up to 40,000 entries, for 0.01 ms.
_MAX_MOVES = 128
# Groups above which sorting all their cards is faster than merging their lists. Only compromised nodes have so many
# kinds of cards.
_MAX_MERGED = 1024


class CardIndex:
    """The card index of one ledger. `Ledger.index` refreshes it before each use."""

    def __init__(self) -> None:
        self._entries: dict[int, list[IndexEntry]] = {}  # by group
        self._entries_by_node: dict[str, list[IndexEntry]] = {}

    def refresh(self, changed: Iterable[tuple[str, list[IndexEntry]]]) -> None:
        """Replace the open cards of the changed nodes."""
        changes_by_group: dict[int, _Changes] = {}
        for name, entries in changed:
            entries_before = self._entries_by_node.get(name, [])
            for entry in entries_before:
                if entry not in entries:
                    changes_by_group.setdefault(entry[3], _Changes([], [])).removed.append(entry)
            for entry in entries:
                if entry not in entries_before:
                    changes_by_group.setdefault(entry[3], _Changes([], [])).added.append(entry)
            if entries:
                self._entries_by_node[name] = entries
            else:
                self._entries_by_node.pop(name, None)
        for group, changes in changes_by_group.items():
            self._change_group(group, changes)

    def smallest(
        self, mem: int, nodes: Collection[str], kinds: Collection[int] | None = None, untolerated: int = 0
    ) -> Iterator[IndexEntry]:
        """Yield cards of these nodes and kinds with at least `mem` MiB free, the fullest first; equally full cards by
        node and position.

        Cards with a taint that is not tolerated are left out.
        """
        walks = [_walk_upwards(entries, mem, nodes) for entries in self._chosen_lists(kinds, untolerated)]
        return walks[0] if len(walks) == 1 else heapq.merge(*walks)

    def largest(
        self, mem: int, nodes: Collection[str], kinds: Collection[int] | None = None, untolerated: int = 0
    ) -> Iterator[IndexEntry]:
        """As `smallest`, but the emptiest first."""
        walks = [_walk_downwards(entries, mem, nodes) for entries in self._chosen_lists(kinds, untolerated)]
        return walks[0] if len(walks) == 1 else heapq.merge(*walks, key=_emptiest_first_key)

    def open_cards_by_node(self, untolerated: int) -> Mapping[str, int]:
        """By node, how many open cards have none of these taints. Nodes without such a card are left out."""
        return Counter(entry[1] for entries in self._chosen(None, untolerated) for entry in entries)

    def _chosen_lists(self, kinds: Collection[int] | None, untolerated: int) -> Iterable[list[IndexEntry]]:
        """The sorted lists of the groups, as one list if there are many groups."""
        groups = self._chosen(kinds, untolerated)
        return groups if len(groups) <= _MAX_MERGED else [sorted(chain.from_iterable(groups))]

    def _chosen(self, kinds: Collection[int] | None, untolerated: int) -> Collection[list[IndexEntry]]:
        if kinds is None and not untolerated:
            return self._entries.values()
        return [
            entries
            for number, entries in self._entries.items()
            if not number & untolerated and (kinds is None or number >> KIND_SHIFT in kinds)
        ]

    def _change_group(self, group: int, changes: "_Changes") -> None:
        entries = self._entries.setdefault(group, [])
        if len(changes.removed) + len(changes.added) <= _MAX_MOVES:
            for entry in changes.removed:
                del entries[bisect_left(entries, entry)]
            for entry in changes.added:
                insort(entries, entry)
        else:
            self._entries[group] = entries = _change_many(entries, changes)
        if not entries:
            del self._entries[group]


class _Changes(NamedTuple):
    """The changes of one group: entries to remove from its list, and entries to add."""

    removed: list[IndexEntry]
    added: list[IndexEntry]


def _change_many(entries: list[IndexEntry], changes: _Changes) -> list[IndexEntry]:
    """The sorted list with all changes. The parts between them are copied, and no entry of a part is read."""
    remaining: list[IndexEntry] = []
    start = 0
    for position in sorted(bisect_left(entries, entry) for entry in changes.removed):
        remaining += entries[start:position]
        start = position + 1
    remaining += entries[start:]
    changed: list[IndexEntry] = []
    start = 0
    for entry in sorted(changes.added):
        position = bisect_left(remaining, entry, start)
        changed += remaining[start:position]
        changed.append(entry)
        start = position
    return changed + remaining[start:]


def _walk_upwards(entries: list[IndexEntry], mem: int, nodes: Collection[str]) -> Iterator[IndexEntry]:
    for i in range(bisect_left(entries, (mem,)), len(entries)):
        if entries[i][1] in nodes:
            yield entries[i]


def _walk_downwards(entries: list[IndexEntry], mem: int, nodes: Collection[str]) -> Iterator[IndexEntry]:
    end = len(entries)
    while end and entries[end - 1][0] >= mem:
        start = bisect_left(entries, (entries[end - 1][0],))
        for i in range(start, end):
            if entries[i][1] in nodes:
                yield entries[i]
        end = start


def _emptiest_first_key(entry: IndexEntry) -> tuple[int, str, int]:
    return -entry[0], entry[1], entry[2]
