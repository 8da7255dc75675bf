"""The workload: how often which ask has arrived, and what the scored policies learn from it."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from cardwise.core.api.cards import FULL_CORE
from cardwise.core.placement.scored.nodetable import Floats
from cardwise.core.placement.scored.prices import PARTS, remainder_prices
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.values.wording import quote_text

MAX_REQUEST_SIZES: Final = 512
_HALVE_AFTER: Final = 20_000  # arrivals, after which all counts are halved
_MIN_ARRIVALS: Final = 16  # arrivals, before which nothing is learned
_MAX_CARD_SIZES: Final = 4  # sizes of cards, the most frequent, for which shares are priced
_VERSION: Final = 1
_MIN_COUNT: Final = 0.001  # the smallest count that is written
_MAX_CARDS: Final = 6400  # this and the next two: limits above what any pod can get, to keep the arithmetic safe
_MAX_MIB: Final = 2**31  # MiB
_MAX_AMOUNT: Final = 2**62  # of cpu and memory of a node


class InvalidWorkload(ValueError):
    """A saved workload that cannot be read."""


class LearningInput(NamedTuple):
    """What is learned from: how often each ask has arrived, and how many cards there are of each size."""

    counts: Mapping[RequestSize, float]
    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LearnedWorkload:
    """`shares`: each ask's part of the workload, 1 in sum; `prices`: of the rest of a card, by size of card."""

    shares: Mapping[RequestSize, float]
    yardstick: float
    prices: Mapping[int, Floats]


NOTHING: Final = LearnedWorkload({}, 1.0, {})


class Workload:
    """Counts of asks. All counts fade with time; if there are too many asks, the rarest are forgotten."""

    def __init__(self) -> None:
        self.counts: dict[RequestSize, float] = {}
        self._seen = 0.0  # the sum of the counts
        self._since = 0.0  # arrivals since it was learned from, also those that are forgotten again
        self._learned_at = 0.0

    def count_arrival(self, ask: RequestSize, times: float = 1.0) -> None:
        """A pod with this ask has arrived. An ask that no node could ever serve is not counted."""
        if not _possible(ask):
            return
        if ask not in self.counts and len(self.counts) >= MAX_REQUEST_SIZES:
            rarest = sorted(self.counts, key=self.counts.__getitem__)[: MAX_REQUEST_SIZES // 8]
            for other in rarest:
                self._seen -= self.counts.pop(other)
        self.counts[ask] = self.counts.get(ask, 0.0) + times
        self._seen += times
        self._since += times
        if self._seen >= _HALVE_AFTER:
            self.counts = {ask: count / 2 for ask, count in self.counts.items()}
            self._seen /= 2
            self._since /= 2
            self._learned_at /= 2

    @property
    def is_learning_due(self) -> bool:
        """Whether enough pods have arrived since the last learning."""
        return self._since >= max(_MIN_ARRIVALS - self._learned_at, self._learned_at / 2)

    def mark_learned(self) -> None:
        """The learning begins now."""
        self._learned_at, self._since = self._seen, 0.0

    def dump(self) -> str:
        """The counts as text, to be saved."""
        asks = [[*ask, round(count, 3)] for ask, count in sorted(self.counts.items()) if count >= _MIN_COUNT]
        return json.dumps({"version": _VERSION, "requests": asks}, separators=(",", ":"))

    def load(self, text: str) -> None:
        """Goes on from what `dump` wrote. Raises InvalidWorkload, and then nothing has changed."""
        try:
            saved = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidWorkload(f"is no workload: {quote_text(error)}") from error
        if not isinstance(saved, dict) or not isinstance(saved.get("requests"), list):
            raise InvalidWorkload(f"is no workload: {reprlib.repr(saved)}")
        version = saved.get("version")
        if type(version) is not int or version != _VERSION:
            raise InvalidWorkload(f"version {reprlib.repr(version)} is not known")
        counts = dict(_counted(entry) for entry in saved["requests"])
        if len(counts) > MAX_REQUEST_SIZES:
            counts = dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MAX_REQUEST_SIZES])
        self.counts = counts
        self._seen = self._since = sum(counts.values())
        self._learned_at = 0.0


def learn_workload(sample: LearningInput) -> LearnedWorkload:
    """Learns; takes 0.1 s for each size of card. NOTHING if no pod has arrived."""
    total = sum(sample.counts.values())
    if total <= 0:
        return NOTHING
    shares = {ask: count / total for ask, count in sample.counts.items()}
    sizes = sorted(sample.sizes, key=lambda size: (-sample.sizes[size] * size, size))[:_MAX_CARD_SIZES]
    prices = {}
    for size in sizes:
        demand: dict[int, float] = {}
        for ask, share in shares.items():
            if ask.mem and ask.mem <= size:
                parts = max(1, -(-ask.mem * PARTS // size), -(-ask.core * PARTS // 100))
                demand[parts] = demand.get(parts, 0.0) + share * ask.cards
        prices[size] = remainder_prices(demand)
    return LearnedWorkload(shares, float(sizes[0]) if sizes else 1.0, prices)


def _counted(entry: object) -> tuple[RequestSize, float]:
    """An ask and how often it came, as `dump` writes them."""
    if not isinstance(entry, list) or len(entry) != len(RequestSize._fields) + 1:
        raise InvalidWorkload(f"{reprlib.repr(entry)} is no ask")
    cards, mem, core, resource_class, cpu, memory, count = entry
    # By the very type: True and False are ints as well.
    if not isinstance(resource_class, str) or any(type(n) is not int for n in (cards, mem, core, cpu, memory)):
        raise InvalidWorkload(f"{reprlib.repr(entry)} is no ask")
    ask = RequestSize(cards, mem, core, resource_class, cpu, memory)
    if not _possible(ask):
        raise InvalidWorkload(f"no pod can have asked for {reprlib.repr(entry)}")
    if type(count) not in (int, float) or not _MIN_COUNT <= count <= _HALVE_AFTER:  # which NaN is not
        raise InvalidWorkload(f"{reprlib.repr(entry[:-1])} cannot have come {reprlib.repr(count)} times")
    return ask, float(count)


def _possible(ask: RequestSize) -> bool:
    """Whether a pod can have these numbers."""
    return (
        0 <= ask.cards <= _MAX_CARDS
        and 0 <= ask.mem <= _MAX_MIB
        and 0 <= ask.core <= FULL_CORE * ask.cards
        and 0 <= ask.cpu < _MAX_AMOUNT
        and 0 <= ask.memory < _MAX_AMOUNT
    )
