"""The extender's metrics, an object each; call sites pass values, never label names."""

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)


class Metrics:
    """`registry` is the process's own unless a test brings another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "cardwise_extender_request_seconds",
            "Time from the request's arrival at the extender to its answer.",
            ["verb"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._refusals = Counter(
            "cardwise_extender_refusals_total",
            "Pods for which filter found no node, by the most frequent reason among the nodes.",
            ["reason"],
            registry=registry,
        )
        self._binds = Counter("cardwise_extender_binds_total", "Bind calls by outcome.", ["outcome"], registry=registry)
        self._by_verb = {verb: self._seconds.labels(verb) for verb in ("filter", "prioritize", "bind", "inspect")}

    @contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._by_verb[verb].observe(time.perf_counter() - began)

    def refused(self, reasons: Mapping[str, str]) -> None:
        """`reasons`: by node, as answered."""
        for reason, _ in collections.Counter(reasons.values()).most_common(1):
            self._refusals.labels(reason).inc()

    def bound(self, outcome: str) -> None:
        self._binds.labels(outcome).inc()


class Levels(Collector):
    """What is read when somebody asks: holdings by mark, age of what the reflectors know, whether we lead."""

    def __init__(
        self,
        marks: Callable[[], dict[str, int]],
        staleness: Callable[[], dict[str, float]],
        leads: Callable[[], bool],
    ) -> None:
        self._marks = marks
        self._staleness = staleness
        self._leads = leads

    def collect(self) -> Iterator[Metric]:
        holdings = GaugeMetricFamily(
            "cardwise_extender_holdings", "Shares in the ledger by why they count.", labels=["mark"]
        )
        for mark, count in self._marks().items():
            holdings.add_metric([mark], count)
        yield holdings
        ages = GaugeMetricFamily(
            "cardwise_extender_staleness_seconds",
            "Time since the API server last told anything, by kind of object.",
            labels=["kind"],
        )
        for kind, seconds in self._staleness().items():
            ages.add_metric([kind], seconds)
        yield ages
        yield GaugeMetricFamily(
            "cardwise_extender_leader",
            "1 while this extender answers kube-scheduler, 0 while another one does.",
            value=float(self._leads()),
        )
