"""Set cover: the cheapest set of pods whose eviction frees enough of everything that is short.

Theory of operation. Each pod frees an amount in one or more dimensions (MiB of a card, cpu of a node), and all needs
must be met. The cost of a set is first by how many evictions it exceeds PodDisruptionBudgets, then its number of pods.
Pods that are in every cover are taken first. If one dimension remains, which is nearly always so, the rest is exact:
the largest pods within their budgets, and as the last one the smallest that is enough. In several dimensions it is a
branch and bound with a bounded effort: its result meets the needs, but there may be a cheaper one.

Example: a card is 10 GiB short, and its pods hold 8, 6, 5 and 3 GiB. No single pod is enough. The largest is taken, and
the smallest that adds the missing 2 GiB: {8, 3} at a cost of 2. If the budget of the 8 GiB pod allows no eviction, the
result is {6, 5} at the same cost. If it allows none of the 6 GiB pod either, no set stays within the budgets (5 + 3 are
8 GiB): {8, 3} exceeds them by one eviction, and costs `EXCESS_COST` + 2.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

EXCESS_COST: Final = 1 << 20  # the cost of exceeding a budget by one, in things
_EFFORT: Final = 6_000  # some 5 ms


class Victim(NamedTuple):
    """`amounts` by dimension; a missing one is 0. `budgets`: the budgets that it is charged to when it is taken."""

    name: str
    amounts: Mapping[object, int]
    budgets: tuple[str, ...] = ()


class Cover(NamedTuple):
    """A set of victims. `cost`: `EXCESS_COST` for each eviction beyond a budget, and 1 for each victim."""

    cost: int
    victims: tuple[Victim, ...]


class _Part(NamedTuple):
    """A thing with its amounts in the order of the dimensions; no amount is more than is needed."""

    victim: Victim
    amounts: tuple[int, ...]


class CoverEffort:
    """The remaining effort of the search; several covers can share it.

    remaining: below zero where more was spent than there was: to find any cover at all.
    """

    def __init__(self, looks: int = _EFFORT) -> None:
        self.remaining = looks

    @property
    def spent(self) -> bool:
        return self.remaining <= 0

    def spend(self, looks: int) -> None:
        self.remaining -= looks


def cheapest_cover(
    candidates: Sequence[Victim],
    needs: Mapping[object, int],
    allowed: Mapping[str, int],
    effort: CoverEffort,
    below: int | None = None,
) -> Cover | None:
    """The cheapest set that meets the needs; None if there is none, or none that costs less than `below`.

    allowed: how many evictions each budget allows.

    Deterministic: the same arguments give the same result.
    """
    dimensions = [dimension for dimension, need in needs.items() if need > 0]
    effort.spend(len(candidates) * (1 + len(dimensions)))
    short = tuple([needs[dimension] for dimension in dimensions])
    parts = []
    for candidate in candidates:
        amounts = tuple([min(candidate.amounts.get(d, 0), need) for d, need in zip(dimensions, short, strict=True)])
        if any(amounts):
            parts.append(_Part(candidate, amounts))
    chosen, parts, short = _needed(parts, short)
    if any(sum(part.amounts[d] for part in parts) < need for d, need in enumerate(short)):
        return None
    remaining = _remaining_budgets(allowed, chosen)
    if sum(need > 0 for need in short) == 1 and all(len(part.victim.budgets) <= 1 for part in parts):
        dimension = next(d for d, need in enumerate(short) if need > 0)
        chosen = [*chosen, *_cover_dimension(parts, dimension, short[dimension], remaining)]
        return _cover(chosen, allowed, below)
    search = _Search(parts, allowed, effort, below)
    search.search(short, remaining, chosen)
    return search.best


def budget_excess(victims: Collection[Victim], allowed: Mapping[str, int]) -> int:
    """The total by which these victims exceed the budgets."""
    counts: dict[str, int] = {}
    for victim in victims:
        for budget in victim.budgets:
            counts[budget] = counts.get(budget, 0) + 1
    return sum(max(0, count - max(0, allowed.get(budget, 0))) for budget, count in counts.items())


def _cover(parts: Sequence[_Part], allowed: Mapping[str, int], below: int | None) -> Cover | None:
    victims = tuple([part.victim for part in parts])
    cost = EXCESS_COST * budget_excess(victims, allowed) + len(victims)
    return Cover(cost, victims) if below is None or cost < below else None


def _needed(parts: list[_Part], short: tuple[int, ...]) -> tuple[list[_Part], list[_Part], tuple[int, ...]]:
    """The parts that are in every cover, the other parts, and what is still short."""
    chosen: list[_Part] = []
    while True:
        sums = [sum(part.amounts[dimension] for part in parts) for dimension in range(len(short))]
        must = [
            part
            for part in parts
            if any(
                need > 0 and total - amount < need
                for need, total, amount in zip(short, sums, part.amounts, strict=True)
            )
        ]
        if not must or any(total < need for need, total in zip(short, sums, strict=True)):
            return chosen, parts, short
        chosen += must
        for part in must:
            short = tuple([max(0, need - amount) for need, amount in zip(short, part.amounts, strict=True)])
        names = {part.victim.name for part in must}
        parts = [part for part in parts if part.victim.name not in names]


def _remaining_budgets(allowed: Mapping[str, int], chosen: Sequence[_Part]) -> dict[str, int]:
    """What the budgets still allow."""
    remaining = dict(allowed)
    for part in chosen:
        for budget in part.victim.budgets:
            remaining[budget] = remaining.get(budget, 0) - 1
    return remaining


def _cover_dimension(parts: Sequence[_Part], dimension: int, need: int, budgets: Mapping[str, int]) -> list[_Part]:
    """The cheapest cover of one need that can be met: big parts first, and parts within their budgets before others."""
    within, beyond = _split(parts, dimension, budgets)
    rest = need - sum(part.amounts[dimension] for part in within)
    chosen = []
    for part in beyond:
        if rest <= 0:
            break
        chosen.append(part)
        rest -= part.amounts[dimension]
    need -= sum(part.amounts[dimension] for part in chosen)
    for i, part in enumerate(within):
        if need <= 0:
            break
        # As the last part, the smallest that is enough.
        end = bisect_right(within, -need, lo=i, key=lambda part: -part.amounts[dimension])
        chosen.append(within[end - 1] if end > i else part)
        need -= chosen[-1].amounts[dimension]
    return chosen


def _split(parts: Sequence[_Part], dimension: int, budgets: Mapping[str, int]) -> tuple[list[_Part], list[_Part]]:
    """The parts that their budgets allow, taken by size, and the other parts."""
    within, beyond = [], []
    remaining = dict(budgets)
    for part in sorted(parts, key=lambda part: -part.amounts[dimension]):
        if all(remaining.get(budget, 0) > 0 for budget in part.victim.budgets):
            within.append(part)
        else:
            beyond.append(part)
        for budget in part.victim.budgets:
            remaining[budget] = remaining.get(budget, 0) - 1
    return within, beyond


class _Search:
    """Branch and bound: takes or leaves the part that gives most of the need that is hardest to meet.

    A set of parts is a number with a bit for each, so that it is copied and asked quickly.
    """

    def __init__(
        self, parts: Sequence[_Part], allowed: Mapping[str, int], effort: CoverEffort, below: int | None
    ) -> None:
        self.best: Cover | None = None
        self._allowed = allowed
        self._budgets: dict[str, int] = {}  # what budgets still allow
        self._effort = effort
        self._below = below
        self._parts = {1 << i: part for i, part in enumerate(parts)}
        self._charged = sum(bit for bit, part in self._parts.items() if part.victim.budgets)
        # By dimension, what gives something there, most first: its bit, the amount, and its first budget.
        self._orders = [
            [
                (bit, part.amounts[dimension], part.victim.budgets[0] if part.victim.budgets else None)
                for bit, part in sorted(
                    self._parts.items(), key=lambda entry: (-entry[1].amounts[dimension], -sum(entry[1].amounts))
                )
                if part.amounts[dimension]
            ]
            for dimension in range(len(parts[0].amounts) if parts else 0)
        ]
        self._no_more = [_no_more(self._parts, dimension) for dimension in range(len(self._orders))]
        self._of_budget: dict[str, int] = {}
        for bit, part in self._parts.items():
            for budget in set(part.victim.budgets):
                self._of_budget[budget] = self._of_budget.get(budget, 0) | bit

    def search(self, short: tuple[int, ...], budgets: Mapping[str, int], chosen: Sequence[_Part]) -> None:
        self._budgets = dict(budgets)
        cost = EXCESS_COST * budget_excess([part.victim for part in chosen], self._allowed) + len(chosen)
        self._branch((1 << len(self._parts)) - 1, short, cost, chosen)

    def _branch(self, open_bits: int, short: tuple[int, ...], cost: int, chosen: Sequence[_Part]) -> None:
        if not any(need > 0 for need in short):
            if self._below is None or cost < self._below:
                self.best, self._below = Cover(cost, tuple([part.victim for part in chosen])), cost
            return
        # A caller that gives `below` has a cover already.
        while not self._effort.spent or self._below is None:
            self._effort.spend(open_bits.bit_count() * len(short))
            hardest = self._hardest(open_bits, short, cost)
            if hardest is None:
                return
            bit, part = self._next(hardest, open_bits)
            open_bits &= ~bit
            after = tuple([max(0, need - amount) for need, amount in zip(short, part.amounts, strict=True)])
            excess = sum(self._budgets.get(budget, 0) <= 0 for budget in part.victim.budgets)
            self._charge(part, -1)
            self._branch(open_bits, after, cost + EXCESS_COST * excess + 1, [*chosen, part])
            self._charge(part, 1)
            # A cover without this part need not have a part that this one could replace.
            open_bits &= ~self._replaceable_by(part)

    def _charge(self, part: _Part, sign: int) -> None:
        for budget in part.victim.budgets:
            self._budgets[budget] = self._budgets.get(budget, 0) + sign

    def _next(self, dimension: int, open_bits: int) -> tuple[int, _Part]:
        """The biggest part that its budgets still allow, or else the biggest."""
        biggest = 0
        for bit, _, budget in self._orders[dimension]:
            if not open_bits & bit:
                continue
            biggest = biggest or bit
            if budget is None or all(
                self._budgets.get(other_budget, 0) > 0 for other_budget in self._parts[bit].victim.budgets
            ):
                return bit, self._parts[bit]
        return biggest, self._parts[biggest]

    def _replaceable_by(self, part: _Part) -> int:
        """The parts that this one stands for at no higher cost: they give no more, and have all its budgets."""
        bits = -1
        for no_more, amount in zip(self._no_more, part.amounts, strict=True):
            bits &= no_more[amount]
        for budget in part.victim.budgets:
            bits &= self._of_budget[budget]
        return bits

    def _hardest(self, open_bits: int, short: tuple[int, ...], cost: int) -> int | None:
        """The dimension that needs the most parts; None where no cover of these is cheap enough."""
        hardest, most_parts, excess = 0, -1, 0
        bounded = self._below is not None and open_bits & self._charged
        for dimension, need in enumerate(short):
            if need <= 0:
                continue
            count = _count((amount for bit, amount, _ in self._orders[dimension] if open_bits & bit), need)
            if count is None:
                return None
            if count > most_parts:
                hardest, most_parts = dimension, count
            if bounded:
                excess = max(excess, self._excess(dimension, need, open_bits))
        if self._below is not None and cost + EXCESS_COST * excess + most_parts >= self._below:
            return None
        return hardest

    def _excess(self, dimension: int, need: int, open_bits: int) -> int:
        """How many parts of any cover exceed a budget, at least. Of a part's budgets only the first counts, so that it
        is never too many.
        """
        remaining, beyond = dict[str, int](), []
        for bit, amount, budget in self._orders[dimension]:
            if not open_bits & bit:
                continue
            if budget is not None:
                allowed = remaining[budget] if budget in remaining else self._budgets.get(budget, 0)
                remaining[budget] = allowed - 1
                if allowed <= 0:
                    beyond.append(amount)
                    continue
            need -= amount
            if need <= 0:
                return 0
        return _count(beyond, need) or 0


def _no_more(parts: Mapping[int, _Part], dimension: int) -> dict[int, int]:
    """By each amount that a part gives in this dimension: those that give no more."""
    bits_by_amount, bits = dict[int, int](), 0
    for bit, part in sorted(parts.items(), key=lambda entry: entry[1].amounts[dimension]):
        bits |= bit
        bits_by_amount[part.amounts[dimension]] = bits
    return bits_by_amount


def _count(amounts: Iterable[int], need: int) -> int | None:
    """How many of these amounts, the biggest first, meet the need; None: all together do not."""
    count = 0
    for amount in amounts:
        if need <= 0:
            break
        need -= amount
        count += 1
    return count if need <= 0 else None
