"""All open cards of all nodes in the order of their free memory: how filter finds the one best node of thousands.

Apart from the ledger, which knows nodes one by one: a request for one card is answered by a bisection here instead of
a question to every node. What comes out equals the node-by-node answer (tests/property/test_cardindex.py).
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator

Entry = tuple[int, str, int]  # free MiB, node, position of the card in the node's lists

_MANY = 2000  # changed nodes from which sorting anew is cheaper than moving their cards


class CardIndex:
    """Belongs to a ledger, which refreshes it before use (`Ledger.index`)."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._of: dict[str, list[Entry]] = {}

    def refresh(self, changed: Iterable[tuple[str, list[Entry]]]) -> None:
        """These nodes have these open cards now."""
        changed = list(changed)
        if len(changed) > _MANY:
            self._of.update(changed)
            self._entries = sorted(entry for entries in self._of.values() for entry in entries)
            return
        for name, now in changed:
            before = self._of.get(name, [])
            for entry in before:
                if entry not in now:
                    del self._entries[bisect_left(self._entries, entry)]
            for entry in now:
                if entry not in before:
                    insort(self._entries, entry)
            if now:
                self._of[name] = now
            else:
                self._of.pop(name, None)

    def smallest(self, mem: int, nodes: Collection[str]) -> Iterator[Entry]:
        """Cards of these nodes with at least `mem` free, the fullest first; equal ones by node, then position."""
        entries = self._entries
        for i in range(bisect_left(entries, (mem,)), len(entries)):
            if entries[i][1] in nodes:
                yield entries[i]

    def largest(self, mem: int, nodes: Collection[str]) -> Iterator[Entry]:
        """As `smallest`, but the emptiest first."""
        entries = self._entries
        end = len(entries)
        while end and entries[end - 1][0] >= mem:
            start = bisect_left(entries, (entries[end - 1][0],))
            for i in range(start, end):
                if entries[i][1] in nodes:
                    yield entries[i]
            end = start
