"""Counts the cards whose entries in ledger and cluster have differed for long, and logs the first card of each kind.

`statuswriter` writes statuses from the ledger, so it cannot detect that both are wrong. Nothing is corrected here: a
persistent difference is a bug or a manual change, which an administrator must investigate (docs/runbooks.md).
"""

from collections.abc import Mapping

import structlog

from extender.reporting.statuses import Disagreement

_log = structlog.get_logger(__name__)

# Seconds for which a card must disagree before it counts. Until then writes and watch events may still be on their way.
MIN_DISAGREEMENT_SECONDS = 60.0

Differences = Mapping[tuple[str, Disagreement], int]
"""The disagreements on cards of a node, by the names of their ExtendedResources. The number is the MiB in a card's
status. If it changes from one computation to the next, the status only lags behind. 0 for other disagreements.
"""


class LedgerCheck:
    """The disagreements by node. `set_differences` and `update_counts` belong to one thread, any thread may
    call `counts`.
    """

    def __init__(self) -> None:
        self._first_seen: dict[str, dict[tuple[str, Disagreement], tuple[float, int]]] = {}  # by node
        self._counts = dict.fromkeys(map(str, Disagreement), 0)

    def counts(self) -> dict[str, int]:
        """The number of cards that have disagreed for longer than `MIN_DISAGREEMENT_SECONDS`, by kind."""
        return self._counts

    def nodes(self) -> set[str]:
        """The nodes on which a card disagreed when the node was last checked."""
        return set(self._first_seen)

    def set_differences(self, node: str, differences: Differences, now: float) -> None:
        """Replace the differences of the node."""
        differences_before = self._first_seen.pop(node, {})
        if differences:
            unchanged = {
                card_kind: differences_before[card_kind]
                for card_kind, mib in differences.items()
                if card_kind in differences_before and differences_before[card_kind][1] == mib
            }
            self._first_seen[node] = {
                card_kind: unchanged.get(card_kind, (now, mib)) for card_kind, mib in differences.items()
            }

    def update_counts(self, now: float) -> None:
        """Count the cards that have disagreed for longer than `MIN_DISAGREEMENT_SECONDS`, and log the first card of
        each kind.
        """
        counts = dict.fromkeys(map(str, Disagreement), 0)
        for node, differences in self._first_seen.items():
            for (name, kind), (since, _) in differences.items():
                if now - since > MIN_DISAGREEMENT_SECONDS:
                    counts[kind] += 1
                    if counts[kind] == 1 and not self._counts[kind]:
                        _log.warning("the ledger and the cluster disagree on a card", card=name, node=node, kind=kind)
        self._counts = counts
