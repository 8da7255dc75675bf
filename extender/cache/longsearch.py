"""The search for a place for pods with several card requests, in many turns at the state's lock.

For such pods each node is searched by itself, which for thousands of nodes takes longer than other callers may wait for
the lock. A result of an earlier turn may be outdated in the last turn. So the last turn takes the first of the best
nodes that still takes the pod (`Placing`), and the decision is right when the cards are reserved.
"""

from typing import Final

from cardwise.clock import Clock
from cardwise.core.placement import fitting
from cardwise.core.placement.searching import SearchEffort
from cardwise.core.values.refusals import Refusal
from extender.cache.cache import Cache
from extender.cache.placing import Looked, PlacementRequest, Placing
from extender.cache.reservations import Phase
from extender.cache.statelock import StateLock
from extender.cache.yielding import TURN, give_way

_MOST: Final = 256  # nodes of one turn: what is reserved on them is counted when it begins
FEW: Final = 16  # nodes that are searched in one turn; and the best ones that the last turn may choose from


class LongSearch:
    """Searches in turns. Any thread may call it, without the lock."""

    def __init__(self, lock: StateLock, cache: Cache, placing: Placing, clock: Clock) -> None:
        self._lock = lock
        self._cache = cache
        self._placing = placing
        self._clock = clock

    def search(self, wanted: PlacementRequest) -> PlacementRequest:
        """Search all nodes for the pod, if that takes more than one turn. Returns the request with the results, else as
        it was.
        """
        if len(wanted.nodes) <= FEW or not fitting.has_several_claims(wanted.request):
            return wanted
        nodes, effort = list(dict.fromkeys(wanted.nodes)), SearchEffort()
        scores: dict[str, int] = {}
        refusals: dict[str, Refusal] = {}
        with self._lock:
            self._cache.sync_cards()
            freed = self._cache.capacity.freed_count
        while (at := len(scores) + len(refusals)) < len(nodes):
            if at:
                give_way(self._clock)
            some = wanted._replace(nodes=nodes[at : at + _MOST])
            with self._lock, self._placing.node_scorer(some, effort) as scorer:
                until, by_name = self._clock.cpu() + TURN, self._cache.ledger.nodes_by_name()
                for name in some.nodes:
                    outcome = scorer.score(by_name.get(name))
                    if isinstance(outcome, Refusal):
                        refusals[name] = outcome
                    else:
                        scores[name] = outcome
                    if self._clock.cpu() >= until:
                        break
        best = sorted(scores, key=lambda name: (-scores[name], name))[:FEW]
        with self._lock:
            refusals |= self._placing.reserved_refusals(wanted, refusals)
            nominated = {row.node for row in self._cache.reservations.rows_in_phases(Phase.NOMINATED)}
        return wanted._replace(
            looked=Looked([*best, *sorted(nominated & refusals.keys())[:FEW]], scores, refusals, freed)
        )
