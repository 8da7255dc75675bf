"""Metrics of the cards' memory in MiB, for the whole cluster and for each class: total, used, free, and fragmented.
Fragmented memory is part of the free memory.

A thread computes the metrics, but only while a client scrapes; a scrape returns the latest values. There are no metrics
of each node or card, since there may be 40,000 cards: `cardwise nodes` shows their memory.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.clock import SYSTEM, Clock
from cardwise.core.placement.kinds import CardKinds
from cardwise.core.placement.ledger import Ledger
from extender.cache.clusterview import ClusterView
from extender.cache.pacing import Pace
from extender.state import ChangedNodes, State

if TYPE_CHECKING:
    from cardwise.core.defrag.fragmentation import Fragments
    from cardwise.core.placement.scored.shapes import RequestSize

_SCRAPE_SECONDS: Final = 300.0  # seconds after a scrape in which counting continues
_INTERVAL_SECONDS: Final = 5.0  # seconds between two counts
_LEARN_SECONDS: Final = 60.0  # seconds between two reads of the requests of arriving pods


class FragMetrics(Collector):
    """The collector of these metrics. `step` belongs to one thread, any thread may call `collect`."""

    def __init__(self, state: State, clock: Clock = SYSTEM) -> None:
        self._state = state
        self._clock = clock
        self._scraped = float("-inf")
        self._counted_at = float("-inf")
        self._learned_at = float("-inf")
        self._kinds_at = -1
        self._request_sizes: dict[RequestSize, float] = {}
        self._is_learned = False  # whether the requests of arriving pods are used
        self._fragments: Fragments | None = None
        self._changed = ChangedNodes(set(), set())
        self._metrics: tuple[Metric, ...] = ()

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics. Without this method the registry would call `collect` for the metrics' names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._scraped = self._clock.now()
        yield from self._metrics

    def step(self) -> None:
        """Compute the metrics every `_INTERVAL_SECONDS` seconds, unless the last scrape was more than `_SCRAPE_SECONDS`
        seconds ago.
        """
        now = self._clock.now()
        if now >= self._scraped + _SCRAPE_SECONDS or now < self._counted_at + _INTERVAL_SECONDS:
            return
        if self._fragments is None:
            # Imported only while a client scrapes, since the import loads numpy.
            from cardwise.core.defrag.fragmentation import Fragments  # noqa: PLC0415

            self._fragments = Fragments()
            self._changed = self._state.watch_nodes()
        cluster = self._update_changed(self._fragments)
        self._learn_requests(self._fragments, cluster.ledger, now)
        self._metrics = tuple(self._make_metrics(self._fragments, cluster.ledger.kinds))
        self._counted_at = self._clock.now()

    def _update_changed(self, fragments: "Fragments") -> ClusterView:
        """Compute the fragmentation of the changed nodes again. Returns the snapshot on which it was computed."""
        with self._state.view():
            names = sorted(self._changed.cards | self._changed.loads)
            self._changed.cards.clear()
            self._changed.loads.clear()
        cluster, pace = self._state.snapshot(), Pace(self._clock)  # a later change is added to the sets again
        for name in names:
            fragments.set_node(name, cluster.ledger.node(name), cluster.loads.free_load(name))
            pace.pause()
        return cluster

    def _learn_requests(self, fragments: "Fragments", ledger: Ledger, now: float) -> None:
        """Read the requests of arriving pods. If no policy records arriving pods, read the requests of pods that hold
        cards now.
        """
        from cardwise.core.defrag import fragmentation  # noqa: PLC0415 - see above

        changes = ledger.kinds.changes
        if now < self._learned_at + _LEARN_SECONDS and changes == self._kinds_at:
            return
        if now >= self._learned_at + _LEARN_SECONDS:
            request_sizes = fragmentation.only_card_requests(self._state.policies.arrival_counts())
            self._is_learned = bool(request_sizes)
            self._request_sizes = request_sizes or fragmentation.count_requests(ledger.holdings())
            self._learned_at = now
        self._kinds_at = changes
        fragments.set_expected_pods(fragmentation.typical_pods(self._request_sizes, ledger.kinds))

    def _make_metrics(self, fragments: "Fragments", kinds: CardKinds) -> Iterator[Metric]:
        total, by_class = fragments.total(), fragments.memory_by_class(kinds)
        of_class = GaugeMetricFamily(
            "cardwise_class_memory_mib",
            "Memory in MiB of the GPUs of a ResourceClass, by amount: total, used, free, fragmented. A GPU may be in "
            "several classes.",
            labels=["class", "amount"],
        )
        for name, memory in sorted(by_class.items()):
            for amount, mib in memory._asdict().items():
                of_class.add_metric([name, amount], mib)
        yield of_class
        in_all = GaugeMetricFamily(
            "cardwise_cluster_memory_mib",
            "Memory in MiB of all GPUs, by amount: total, used, free, fragmented. Free is on GPUs that take new "
            "shares; fragmented is the part of it that a typical pod cannot use.",
            labels=["amount"],
        )
        for amount, mib in total._asdict().items():
            in_all.add_metric([amount], mib)
        yield in_all
        yield GaugeMetricFamily(
            "cardwise_workload_learned",
            "1 if fragmentation is computed for the workload of created pods, 0 if for the pods that hold GPUs now.",
            value=float(self._is_learned),
        )
