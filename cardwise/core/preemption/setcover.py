"""Set cover: the cheapest set of pods whose eviction frees enough of every missing amount.

Theory of operation. Each pod frees an amount in one or more dimensions (MiB of a card, cpu of a node), and all needs
must be met. The cost of a set is first the number of evictions beyond PodDisruptionBudgets, then the number of pods.
Pods that are in every cover are taken first. Nearly always one dimension remains. Then the solution is exact: the
largest pods within their budgets are taken, and as the last pod the smallest one that is enough. If several dimensions
remain, a branch and bound with limited effort finds a set that meets the needs, but a cheaper set may exist.

Example: a card is 10 GiB short, and its pods hold 8, 6, 5 and 3 GiB. No single pod is enough. The largest is taken, and
the smallest that adds the missing 2 GiB: {8, 3} at a cost of 2. If the budget of the 8 GiB pod allows no eviction, the
result is {6, 5} at the same cost. If the budget also forbids the eviction of the 6 GiB pod, every set exceeds the
budgets, because 5 + 3 are only 8 GiB. {8, 3} exceeds them by one eviction, and costs `EXCESS_COST` + 2.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

EXCESS_COST: Final = 1 << 20  # the cost of one eviction beyond a budget, in victims
_MAX_SEARCH_STEPS: Final = 6_000  # steps of one search; takes about 5 ms


class Victim(NamedTuple):
    """A pod that may be evicted.

    amounts: by dimension, the amount that its eviction frees.
    budgets: the disruption budgets that limit its eviction.
    """

    name: str
    amounts: Mapping[object, int]
    budgets: tuple[str, ...] = ()


class Cover(NamedTuple):
    """A set of victims.

    cost: `EXCESS_COST` for each eviction beyond a budget, and 1 for each victim.
    """

    cost: int
    victims: tuple[Victim, ...]


class _Candidate(NamedTuple):
    """A victim, with its amounts in the order of the dimensions; an amount above the need is reduced to the need."""

    victim: Victim
    amounts: tuple[int, ...]


class CoverEffort:
    """The remaining effort of the search; several covers can share it.

    remaining: negative after a search that exceeded it to find a first cover.
    """

    def __init__(self, steps: int = _MAX_SEARCH_STEPS) -> None:
        self.remaining = steps

    @property
    def is_spent(self) -> bool:
        return self.remaining <= 0

    def spend(self, steps: int) -> None:
        self.remaining -= steps


def cheapest_cover(
    victims: Sequence[Victim],
    needs: Mapping[object, int],
    allowed: Mapping[str, int],
    effort: CoverEffort,
    cost_limit: int | None = None,
) -> Cover | None:
    """Find the cheapest set that meets the needs; None if no set does.

    allowed: how many evictions each budget allows.
    cost_limit: only sets that cost less are searched; None for no limit.

    Deterministic: the same arguments give the same set.
    """
    dimensions = [dimension for dimension, need in needs.items() if need > 0]
    effort.spend(len(victims) * (1 + len(dimensions)))
    shortfall = tuple([needs[dimension] for dimension in dimensions])
    candidates = []
    for victim in victims:
        amounts = tuple([min(victim.amounts.get(d, 0), need) for d, need in zip(dimensions, shortfall, strict=True)])
        if any(amounts):
            candidates.append(_Candidate(victim, amounts))
    chosen, candidates, shortfall = _take_required(candidates, shortfall)
    if any(sum(candidate.amounts[d] for candidate in candidates) < need for d, need in enumerate(shortfall)):
        return None
    remaining_budgets = _remaining_budgets(allowed, chosen)
    if sum(need > 0 for need in shortfall) == 1 and all(len(candidate.victim.budgets) <= 1 for candidate in candidates):
        dimension = next(d for d, need in enumerate(shortfall) if need > 0)
        chosen = [*chosen, *_cover_dimension(candidates, dimension, shortfall[dimension], remaining_budgets)]
        return _cover_below_limit(chosen, allowed, cost_limit)
    search = _Search(candidates, allowed, effort, cost_limit)
    search.search(shortfall, remaining_budgets, chosen)
    return search.best


def budget_excess(victims: Collection[Victim], allowed: Mapping[str, int]) -> int:
    """The total number of evictions of these victims that the budgets forbid."""
    counts: dict[str, int] = {}
    for victim in victims:
        for budget in victim.budgets:
            counts[budget] = counts.get(budget, 0) + 1
    return sum(max(0, count - max(0, allowed.get(budget, 0))) for budget, count in counts.items())


def _cover_below_limit(
    candidates: Sequence[_Candidate], allowed: Mapping[str, int], cost_limit: int | None
) -> Cover | None:
    victims = tuple([candidate.victim for candidate in candidates])
    cost = EXCESS_COST * budget_excess(victims, allowed) + len(victims)
    return Cover(cost, victims) if cost_limit is None or cost < cost_limit else None


def _take_required(
    candidates: list[_Candidate], shortfall: tuple[int, ...]
) -> tuple[list[_Candidate], list[_Candidate], tuple[int, ...]]:
    """Returns the candidates that are in every cover, the other candidates, and the shortfall that remains."""
    chosen: list[_Candidate] = []
    while True:
        sums = [sum(candidate.amounts[dimension] for candidate in candidates) for dimension in range(len(shortfall))]
        required = [
            candidate
            for candidate in candidates
            if any(
                need > 0 and total - amount < need
                for need, total, amount in zip(shortfall, sums, candidate.amounts, strict=True)
            )
        ]
        if not required or any(total < need for need, total in zip(shortfall, sums, strict=True)):
            return chosen, candidates, shortfall
        chosen += required
        for candidate in required:
            shortfall = tuple(
                [max(0, need - amount) for need, amount in zip(shortfall, candidate.amounts, strict=True)]
            )
        names = {candidate.victim.name for candidate in required}
        candidates = [candidate for candidate in candidates if candidate.victim.name not in names]


def _remaining_budgets(allowed: Mapping[str, int], chosen: Sequence[_Candidate]) -> dict[str, int]:
    """The evictions that the budgets still allow."""
    remaining_budgets = dict(allowed)
    for candidate in chosen:
        for budget in candidate.victim.budgets:
            remaining_budgets[budget] = remaining_budgets.get(budget, 0) - 1
    return remaining_budgets


def _cover_dimension(
    candidates: Sequence[_Candidate], dimension: int, need: int, budgets: Mapping[str, int]
) -> list[_Candidate]:
    """The cheapest cover of one need that the candidates can meet. Candidates beyond their budgets are taken only if
    necessary. The largest candidates are taken first.
    """
    within_budgets, beyond_budgets = _split_by_budgets(candidates, dimension, budgets)
    missing = need - sum(candidate.amounts[dimension] for candidate in within_budgets)
    chosen = []
    for candidate in beyond_budgets:
        if missing <= 0:
            break
        chosen.append(candidate)
        missing -= candidate.amounts[dimension]
    need -= sum(candidate.amounts[dimension] for candidate in chosen)
    for i, candidate in enumerate(within_budgets):
        if need <= 0:
            break
        # The last candidate is the smallest that is enough.
        end = bisect_right(within_budgets, -need, lo=i, key=lambda candidate: -candidate.amounts[dimension])
        chosen.append(within_budgets[end - 1] if end > i else candidate)
        need -= chosen[-1].amounts[dimension]
    return chosen


def _split_by_budgets(
    candidates: Sequence[_Candidate], dimension: int, budgets: Mapping[str, int]
) -> tuple[list[_Candidate], list[_Candidate]]:
    """Split the candidates, the largest first, into those within their budgets and those beyond."""
    within_budgets, beyond_budgets = [], []
    remaining_budgets = dict(budgets)
    for candidate in sorted(candidates, key=lambda candidate: -candidate.amounts[dimension]):
        if all(remaining_budgets.get(budget, 0) > 0 for budget in candidate.victim.budgets):
            within_budgets.append(candidate)
        else:
            beyond_budgets.append(candidate)
        for budget in candidate.victim.budgets:
            remaining_budgets[budget] = remaining_budgets.get(budget, 0) - 1
    return within_budgets, beyond_budgets


class _Search:
    """Branch and bound. Each branch takes or leaves the candidate that frees the most in the hardest dimension.

    Sets of candidates are bit sets in integers, which are fast to copy and to test.
    """

    def __init__(
        self, candidates: Sequence[_Candidate], allowed: Mapping[str, int], effort: CoverEffort, cost_limit: int | None
    ) -> None:
        self.best: Cover | None = None
        self._allowed = allowed
        self._budgets: dict[str, int] = {}  # the evictions that budgets still allow
        self._effort = effort
        self._cost_limit = cost_limit
        self._candidates = {1 << i: candidate for i, candidate in enumerate(candidates)}
        self._budgeted_bits = sum(bit for bit, candidate in self._candidates.items() if candidate.victim.budgets)
        # By dimension, the candidates that free something there, the largest amount first: bit, amount, first budget.
        self._orders = [
            [
                (bit, candidate.amounts[dimension], candidate.victim.budgets[0] if candidate.victim.budgets else None)
                for bit, candidate in sorted(
                    self._candidates.items(), key=lambda entry: (-entry[1].amounts[dimension], -sum(entry[1].amounts))
                )
                if candidate.amounts[dimension]
            ]
            for dimension in range(len(candidates[0].amounts) if candidates else 0)
        ]
        self._bits_up_to_amount = [
            _bits_up_to_amount(self._candidates, dimension) for dimension in range(len(self._orders))
        ]
        self._bits_by_budget: dict[str, int] = {}
        for bit, candidate in self._candidates.items():
            for budget in set(candidate.victim.budgets):
                self._bits_by_budget[budget] = self._bits_by_budget.get(budget, 0) | bit

    def search(self, shortfall: tuple[int, ...], budgets: Mapping[str, int], chosen: Sequence[_Candidate]) -> None:
        self._budgets = dict(budgets)
        cost = EXCESS_COST * budget_excess([candidate.victim for candidate in chosen], self._allowed) + len(chosen)
        self._branch((1 << len(self._candidates)) - 1, shortfall, cost, chosen)

    def _branch(self, open_bits: int, shortfall: tuple[int, ...], cost: int, chosen: Sequence[_Candidate]) -> None:
        if not any(need > 0 for need in shortfall):
            if self._cost_limit is None or cost < self._cost_limit:
                self.best, self._cost_limit = Cover(cost, tuple([candidate.victim for candidate in chosen])), cost
            return
        # With a `cost_limit`, a cover is already known, here or by the caller, so the search may end.
        while not self._effort.is_spent or self._cost_limit is None:
            self._effort.spend(open_bits.bit_count() * len(shortfall))
            hardest = self._hardest_dimension(open_bits, shortfall, cost)
            if hardest is None:
                return
            bit, candidate = self._next_candidate(hardest, open_bits)
            open_bits &= ~bit
            shortfall_after = tuple(
                [max(0, need - amount) for need, amount in zip(shortfall, candidate.amounts, strict=True)]
            )
            excess = sum(self._budgets.get(budget, 0) <= 0 for budget in candidate.victim.budgets)
            self._charge(candidate, -1)
            self._branch(open_bits, shortfall_after, cost + EXCESS_COST * excess + 1, [*chosen, candidate])
            self._charge(candidate, 1)
            # In covers without this candidate, skip the candidates that it could replace: they make no cheaper cover.
            open_bits &= ~self._replaceable_by(candidate)

    def _charge(self, candidate: _Candidate, sign: int) -> None:
        for budget in candidate.victim.budgets:
            self._budgets[budget] = self._budgets.get(budget, 0) + sign

    def _next_candidate(self, dimension: int, open_bits: int) -> tuple[int, _Candidate]:
        """The largest open candidate whose budgets still allow an eviction; if there is none, the largest."""
        biggest = 0
        for bit, _, budget in self._orders[dimension]:
            if not open_bits & bit:
                continue
            biggest = biggest or bit
            if budget is None or all(
                self._budgets.get(other_budget, 0) > 0 for other_budget in self._candidates[bit].victim.budgets
            ):
                return bit, self._candidates[bit]
        return biggest, self._candidates[biggest]

    def _replaceable_by(self, candidate: _Candidate) -> int:
        """The candidates, as a bit set, that free no more than this one and have all its budgets: in any cover, this
        candidate could replace them without a higher cost.
        """
        bits = -1
        for bits_up_to_amount, amount in zip(self._bits_up_to_amount, candidate.amounts, strict=True):
            bits &= bits_up_to_amount[amount]
        for budget in candidate.victim.budgets:
            bits &= self._bits_by_budget[budget]
        return bits

    def _hardest_dimension(self, open_bits: int, shortfall: tuple[int, ...], cost: int) -> int | None:
        """The dimension that needs the most candidates; None if no cover is cheap enough."""
        hardest, max_count, excess = 0, -1, 0
        bounded = self._cost_limit is not None and open_bits & self._budgeted_bits
        for dimension, need in enumerate(shortfall):
            if need <= 0:
                continue
            count = _count_largest_to_reach(
                (amount for bit, amount, _ in self._orders[dimension] if open_bits & bit), need
            )
            if count is None:
                return None
            if count > max_count:
                hardest, max_count = dimension, count
            if bounded:
                excess = max(excess, self._min_excess(dimension, need, open_bits))
        if self._cost_limit is not None and cost + EXCESS_COST * excess + max_count >= self._cost_limit:
            return None
        return hardest

    def _min_excess(self, dimension: int, need: int, open_bits: int) -> int:
        """A lower bound of the evictions beyond budgets in any cover. Only the first budget of a candidate counts, so
        that the bound is never too high.
        """
        remaining_budgets, amounts_beyond_budgets = dict[str, int](), []
        for bit, amount, budget in self._orders[dimension]:
            if not open_bits & bit:
                continue
            if budget is not None:
                allowed = remaining_budgets[budget] if budget in remaining_budgets else self._budgets.get(budget, 0)
                remaining_budgets[budget] = allowed - 1
                if allowed <= 0:
                    amounts_beyond_budgets.append(amount)
                    continue
            need -= amount
            if need <= 0:
                return 0
        return _count_largest_to_reach(amounts_beyond_budgets, need) or 0


def _bits_up_to_amount(candidates: Mapping[int, _Candidate], dimension: int) -> dict[int, int]:
    """By amount in this dimension, the candidates that free no more than this, as a bit set."""
    bits_by_amount, bits = dict[int, int](), 0
    for bit, candidate in sorted(candidates.items(), key=lambda entry: entry[1].amounts[dimension]):
        bits |= bit
        bits_by_amount[candidate.amounts[dimension]] = bits
    return bits_by_amount


def _count_largest_to_reach(amounts: Iterable[int], need: int) -> int | None:
    """The number of amounts, from the first on, that together meet the need; None if all together do not."""
    count = 0
    for amount in amounts:
        if need <= 0:
            break
        need -= amount
        count += 1
    return count if need <= 0 else None
