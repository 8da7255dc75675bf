"""Compares the ledger with the cluster, card by card, again and again.

`statuswriter` makes statuses follow the ledger, so it cannot tell when both are wrong. Nothing is corrected here: a
difference that stays is a fault of ours or a change by hand, and a person has to look at it (docs/runbooks.md).
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import names
from cardwise.core.placement.ledger import Ledger
from extender.cache.yielding import slices
from extender.records.objects import CardRecord
from extender.reporting import statuses
from extender.reporting.listers import CardLister
from extender.state import State

_log = structlog.get_logger(__name__)

PATIENCE = 60.0  # seconds that a card must disagree to count: writes and watches are on their way before
_ROUND_SECONDS = 30.0  # in which every node is looked at
_TOGETHER = 8  # nodes under one lock: half a millisecond


class Disagreement(StrEnum):
    """How a card disagrees."""

    STATUS = "status"  # its ExtendedResource says other MiB allocated than the ledger has held there
    TOTAL = "total"  # the running total, by which placement decides, is not the sum of what is held
    OVERFULL = "overfull"  # more is held than the card has
    MISSING = "missing"  # something is held on a card that its node does not have


def differences(ledger: Ledger, node: str, told: Mapping[str, CardRecord]) -> set[tuple[str, Disagreement]]:
    """The cards of the node that disagree now, by the names of their ExtendedResources. `told`: those of the node."""
    state = ledger.node(node)
    held = statuses.count_node(ledger, node).cards
    found: set[tuple[str, Disagreement]] = set()
    here: set[str] = set()
    if state is not None:
        here.update(names.extended_resource_name(device.uuid) for device in state.devices)
        for i, card in enumerate(state.cards):
            name = names.extended_resource_name(card.uuid)
            here.add(name)
            if held[name].memory != state.used[i]:
                found.add((name, Disagreement.TOTAL))
            if held[name].memory > card.mem:
                found.add((name, Disagreement.OVERFULL))
    found.update((name, Disagreement.MISSING) for name in held.keys() - here)
    for name, record in told.items():
        # -1: the status has never been written.
        if record.status.memory not in (-1, held.get(name, statuses.NOTHING_ALLOCATED).memory):
            found.add((name, Disagreement.STATUS))
    return found


class LedgerCheck:
    """`step` belongs to one thread, `counts` to any."""

    def __init__(self, state: State, cards: CardLister, *, clock: Clock = SYSTEM) -> None:
        self._state = state
        self._cards = cards
        self._clock = clock
        self._since: dict[
            str, dict[tuple[str, Disagreement], tuple[float, int]]
        ] = {}  # by node, with what was said then
        self._round: Iterator[str] = iter(())
        self._looked = clock.now()
        self._counts = dict.fromkeys(map(str, Disagreement), 0)

    def counts(self) -> dict[str, int]:
        """Cards that have disagreed for longer than `PATIENCE`, by kind."""
        return self._counts

    def step(self) -> None:
        """Compares a part of the nodes, so many that a round compares all."""
        now = self._clock.now()
        if now - self._looked < 1.0:
            return
        nodes = self._part(now)
        for some in slices(nodes, _TOGETHER, self._clock):
            told = {node: self._told(node) for node in some}
            with self._state.view() as ledger:
                found = {node: differences(ledger, node, told[node]) for node in some}
            for node, these in found.items():
                self._note(node, {(name, kind): _said(told[node], name, kind) for name, kind in these}, now)
        self._count(now)

    def _part(self, now: float) -> list[str]:
        every = self._cards.nodes()
        with self._state.view() as ledger:
            every.update(ledger.by_name())
        due = max(1, int(len(every) * (now - self._looked) / _ROUND_SECONDS))
        self._looked = now
        part = list(islice(self._round, due))
        if len(part) < due:
            for node in self._since.keys() - every:
                del self._since[node]
            self._round = iter(sorted(every))
        return part

    def _told(self, node: str) -> dict[str, CardRecord]:
        known = self._cards.values
        return {name: record for name in self._cards.names(node) if (record := known.get(name)) is not None}

    def _note(self, node: str, found: dict[tuple[str, Disagreement], int], now: float) -> None:
        before = self._since.pop(node, {})
        if found:
            kept = {each: before[each] for each, said in found.items() if each in before and before[each][1] == said}
            self._since[node] = {each: kept.get(each, (now, said)) for each, said in found.items()}

    def _count(self, now: float) -> None:
        counts = dict.fromkeys(map(str, Disagreement), 0)
        for node, these in self._since.items():
            for (name, kind), (since, _) in these.items():
                if now - since > PATIENCE:
                    counts[kind] += 1
                    if counts[kind] == 1 and not self._counts[kind]:
                        _log.warning("the ledger and the cluster disagree on a card", card=name, node=node, kind=kind)
        self._counts = counts


def _said(told: Mapping[str, CardRecord], name: str, kind: Disagreement) -> int:
    """What is said, to compare with the next look: a status that changes from look to look only lags behind."""
    return told[name].status.memory if kind is Disagreement.STATUS else 0
