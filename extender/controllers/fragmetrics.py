"""Metrics of the cards' memory in MiB, of the cluster and by class: all, used, free, and how much of that is
fragmented.

A thread counts them, and only while a client scrapes; a scrape returns the latest counts. There are no metrics by node
or card, of which there may be 40,000: `cardwise nodes` shows these.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.clock import SYSTEM, Clock
from extender.cache.yielding import slices
from extender.state import State

if TYPE_CHECKING:
    from cardwise.core.defrag.fragmentation import Fragments
    from cardwise.core.placement.scored.shapes import RequestSize

_SCRAPED: Final = 300.0  # seconds for which a scrape keeps the counting going
_EVERY: Final = 5.0  # seconds between two counts
_LEARN: Final = 60.0  # seconds between two readings of the requests of arriving pods
_SLICE: Final = 32  # nodes read while the state is locked: below 1 ms


class FragMetrics(Collector):
    """The collector of these metrics. `step` belongs to one thread, any thread may call `collect`."""

    def __init__(self, state: State, clock: Clock = SYSTEM) -> None:
        self._state = state
        self._clock = clock
        self._scraped = float("-inf")
        self._counted = float("-inf")
        self._learned = float("-inf")
        self._kinds_at = -1
        self._asks: dict[RequestSize, float] = {}
        self._known = False  # whether the workload is learned; else it is that of the pods that hold cards
        self._fragments: Fragments | None = None
        self._changed: tuple[set[str], set[str]] = set(), set()
        self._metrics: tuple[Metric, ...] = ()

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics. Without this method the registry would call `collect` to find out."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._scraped = self._clock.now()
        yield from self._metrics

    def step(self) -> None:
        """Count again, every `_EVERY` seconds, unless the last scrape is `_SCRAPED` seconds ago."""
        now = self._clock.now()
        if now >= self._scraped + _SCRAPED or now < self._counted + _EVERY:
            return
        if self._fragments is None:
            from cardwise.core.defrag.fragmentation import Fragments  # noqa: PLC0415 - loads numpy, only if a client scrapes

            self._fragments = Fragments()
            with self._state.view_loads() as (ledger, loads):
                self._changed = ledger.watch(), loads.watch()
        self._update_changed(self._fragments)
        self._learn_requests(self._fragments, now)
        self._metrics = tuple(self._make_metrics(self._fragments))
        self._counted = self._clock.now()

    def _update_changed(self, fragments: "Fragments") -> None:
        """Update the nodes that have changed."""
        with self._state.view():
            names = sorted(set().union(*self._changed))
            for changed in self._changed:
                changed.clear()
        for some_nodes in slices(names, _SLICE, self._clock):
            with self._state.view_loads() as (ledger, loads):
                for name in some_nodes:
                    fragments.set_node(name, ledger.node(name), loads.free_load(name))

    def _learn_requests(self, fragments: "Fragments", now: float) -> None:
        """Learn the requests of arriving pods; if no policy counts these, the requests of the pods that hold
        cards now.
        """
        from cardwise.core.defrag import fragmentation  # noqa: PLC0415 - see above

        with self._state.view() as ledger:
            changes = ledger.kinds.changes
            holdings = ledger.holdings() if now >= self._learned + _LEARN else []
        if now < self._learned + _LEARN and changes == self._kinds_at:
            return
        if now >= self._learned + _LEARN:
            asks = fragmentation.only_card_requests(self._state.policies.request_rates())
            self._known = bool(asks)
            self._asks = asks or fragmentation.count_requests(holdings)
            self._learned = now
        self._kinds_at = changes
        with self._state.view() as ledger:
            pods = fragmentation.typical_pods(self._asks, ledger.kinds)
        fragments.learn(pods)

    def _make_metrics(self, fragments: "Fragments") -> Iterator[Metric]:
        total = fragments.total()  # before the state is locked: it is here that fragments are computed
        with self._state.view() as ledger:
            by_class = fragments.memory_by_class(ledger.kinds)
        of_class = GaugeMetricFamily(
            "cardwise_class_memory_mib",
            "Memory in MiB of the GPUs of a ResourceClass. A GPU may be in several.",
            labels=["class", "amount"],
        )
        for name, memory in sorted(by_class.items()):
            for amount, mib in memory._asdict().items():
                of_class.add_metric([name, amount], mib)
        yield of_class
        in_all = GaugeMetricFamily(
            "cardwise_cluster_memory_mib",
            "Memory in MiB of all GPUs: total, used, free (on GPUs that accept new shares), and fragmented (free, but "
            "not usable by a typical pod).",
            labels=["amount"],
        )
        for amount, mib in total._asdict().items():
            in_all.add_metric([amount], mib)
        yield in_all
        yield GaugeMetricFamily(
            "cardwise_workload_learned",
            "1 if fragmentation is measured by the pods that were created, 0 if by the pods that hold GPUs now.",
            value=float(self._known),
        )
