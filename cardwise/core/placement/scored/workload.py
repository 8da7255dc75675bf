"""The workload: how often each request size has arrived, and what the scored policies learn from these counts."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from cardwise.core.api.cards import FULL_CORE
from cardwise.core.placement.scored.nodetable import Floats
from cardwise.core.placement.scored.prices import CARD_PARTS, remainder_prices
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.values.wording import quote_text

MAX_REQUEST_SIZES: Final = 512  # request sizes that are counted
_MAX_TOTAL_COUNT: Final = 20_000  # the total of the counts at which all counts are halved
_MIN_ARRIVALS: Final = 16  # arrivals before the first learning
_MAX_CARD_SIZES: Final = 4  # card sizes for which remainders are priced: those with the most MiB in total
_VERSION: Final = 1  # of the saved format
_MIN_COUNT: Final = 0.001  # the smallest count that is saved
# Limits of one request, above any real one, so that the arithmetic does not overflow.
_MAX_CARDS: Final = 6400  # cards
_MAX_MIB: Final = 2**31  # MiB on each card
_MAX_AMOUNT: Final = 2**62  # millicores, and bytes of the node's memory


class InvalidWorkload(ValueError):
    """A saved workload that cannot be read."""


class LearningInput(NamedTuple):
    """The input of learning.

    counts: how often each request size has arrived.
    sizes: by size in MiB, the number of cards.
    """

    counts: Mapping[RequestSize, float]
    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class LearnedWorkload:
    """The result of learning.

    shares: the fraction of each request size in the workload; the fractions sum to 1.
    typical_card_mib: MiB of a card of the size that has the most memory in the cluster, over all its cards.
    prices: for each size of a card in MiB, the value of each possible amount of free memory on such a card.
    """

    shares: Mapping[RequestSize, float]
    typical_card_mib: float
    prices: Mapping[int, Floats]


NOTHING_LEARNED: Final = LearnedWorkload({}, 1.0, {})


class Workload:
    """How often each request size has arrived. Counts are halved from time to time. If there are too many sizes, the
    rarest are removed.
    """

    def __init__(self) -> None:
        self.counts: dict[RequestSize, float] = {}
        self._total_count = 0.0  # the sum of the counts
        self._new_arrivals = 0.0  # arrivals since the last learning, including those of removed sizes
        self._count_when_learned = 0.0

    def count_arrival(self, request_size: RequestSize, times: float = 1.0) -> None:
        """Count the arrival of a pod with this request size. Sizes above what any node could ever serve are ignored."""
        if not _is_possible(request_size):
            return
        if request_size not in self.counts and len(self.counts) >= MAX_REQUEST_SIZES:
            rarest = sorted(self.counts, key=self.counts.__getitem__)[: MAX_REQUEST_SIZES // 8]
            for rare_size in rarest:
                self._total_count -= self.counts.pop(rare_size)
        self.counts[request_size] = self.counts.get(request_size, 0.0) + times
        self._total_count += times
        self._new_arrivals += times
        if self._total_count >= _MAX_TOTAL_COUNT:
            self.counts = {request_size: count / 2 for request_size, count in self.counts.items()}
            self._total_count /= 2
            self._new_arrivals /= 2
            self._count_when_learned /= 2

    @property
    def is_learning_due(self) -> bool:
        """Whether enough pods have arrived since the last learning."""
        return self._new_arrivals >= max(_MIN_ARRIVALS - self._count_when_learned, self._count_when_learned / 2)

    def mark_learned(self) -> None:
        """Record that learning begins now."""
        self._count_when_learned, self._new_arrivals = self._total_count, 0.0

    def dump(self) -> str:
        """The counts as JSON, to be saved."""
        entries = [
            [*request_size, round(count, 3)]
            for request_size, count in sorted(self.counts.items())
            if count >= _MIN_COUNT
        ]
        return json.dumps({"version": _VERSION, "requests": entries}, separators=(",", ":"))

    def load(self, text: str) -> None:
        """Replace the counts with saved counts, as `dump` returned them. Raises InvalidWorkload, and then leaves the
        counts unchanged.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidWorkload(f"is not a workload: {quote_text(error)}") from error
        if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
            raise InvalidWorkload(f"is not a workload: {reprlib.repr(document)}")
        version = document.get("version")
        if type(version) is not int or version != _VERSION:
            raise InvalidWorkload(f"version {reprlib.repr(version)} is not known")
        counts = dict(_parse_entry(entry) for entry in document["requests"])
        if len(counts) > MAX_REQUEST_SIZES:
            counts = dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MAX_REQUEST_SIZES])
        self.counts = counts
        self._total_count = self._new_arrivals = sum(counts.values())
        self._count_when_learned = 0.0


def learn_workload(sample: LearningInput) -> LearnedWorkload:
    """Learn from the counts; takes 0.1 s for each size of card. Returns NOTHING if no pod has arrived."""
    total = sum(sample.counts.values())
    if total <= 0:
        return NOTHING_LEARNED
    shares = {request_size: count / total for request_size, count in sample.counts.items()}
    sizes = sorted(sample.sizes, key=lambda size: (-sample.sizes[size] * size, size))[:_MAX_CARD_SIZES]
    prices = {}
    for size in sizes:
        demand: dict[int, float] = {}
        for request_size, share in shares.items():
            if request_size.mem and request_size.mem <= size:
                parts = max(1, -(-request_size.mem * CARD_PARTS // size), -(-request_size.core * CARD_PARTS // 100))
                demand[parts] = demand.get(parts, 0.0) + share * request_size.cards
        prices[size] = remainder_prices(demand)
    return LearnedWorkload(shares, float(sizes[0]) if sizes else 1.0, prices)


def _parse_entry(entry: object) -> tuple[RequestSize, float]:
    """Parse a request size and its count, as `dump` writes them."""
    if not isinstance(entry, list) or len(entry) != len(RequestSize._fields) + 1:
        raise InvalidWorkload(f"{reprlib.repr(entry)} is not a request size with its count")
    cards, mem, core, resource_class, cpu, memory, count = entry
    # The exact type, because True and False are ints as well.
    if not isinstance(resource_class, str) or any(type(n) is not int for n in (cards, mem, core, cpu, memory)):
        raise InvalidWorkload(f"{reprlib.repr(entry)} is not a request size with its count")
    request_size = RequestSize(cards, mem, core, resource_class, cpu, memory)
    if not _is_possible(request_size):
        raise InvalidWorkload(f"no pod can have asked for {reprlib.repr(entry)}")
    if type(count) not in (int, float) or not _MIN_COUNT <= count <= _MAX_TOTAL_COUNT:  # also refuses NaN
        raise InvalidWorkload(f"{reprlib.repr(entry[:-1])} cannot have come {reprlib.repr(count)} times")
    return request_size, float(count)


def _is_possible(request_size: RequestSize) -> bool:
    """Whether a pod can have these numbers."""
    return (
        0 <= request_size.cards <= _MAX_CARDS
        and 0 <= request_size.mem <= _MAX_MIB
        and 0 <= request_size.core <= FULL_CORE * request_size.cards
        and 0 <= request_size.cpu < _MAX_AMOUNT
        and 0 <= request_size.memory < _MAX_AMOUNT
    )
