"""The extender's metrics. Callers pass values, never label names."""

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.clock import SYSTEM, Clock
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.runtime.http.httpcalls import TakesLong

_CALL_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
_QUEUE_BUCKETS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


def most_frequent(reasons: Mapping[str, str]) -> str:
    """The most frequent of the reasons. `reasons`: by node, not empty."""
    return collections.Counter(reasons.values()).most_common(1)[0][0]


class Metrics:
    """The metrics that are updated when an event happens: a call, a refusal, a bind.

    registry: the registry of the process; tests pass another registry.
    """

    def __init__(self, registry: CollectorRegistry, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._seconds = Histogram(
            "cardwise_extender_request_seconds",
            "Time from a call's arrival at the extender to the response, with a gang's wait in bind, by verb: filter, "
            "prioritize, preempt, bind, inspect.",
            ["verb"],
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self._refusals = Counter(
            "cardwise_extender_refusals_total",
            "Pods for which filter found no node, by the most frequent reason among the nodes.",
            ["reason"],
            registry=registry,
        )
        self._permits = Histogram(
            "cardwise_extender_gang_permit_seconds",
            "Time from the reservation of GPUs for a gang until its end, by outcome: bound, released.",
            ["outcome"],
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self._queues = Histogram(
            "cardwise_extender_gang_queue_seconds",
            "Time from the creation of a gang's oldest pod until all required pods had reached bind.",
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self._binds = Counter(
            "cardwise_extender_binds_total",
            "Bind calls, by outcome: bound, already_bound, refused, gang_not_bound, deleted, conflict, in_progress, "
            "standby, not_ready, api_error, invalid, malformed, failed.",
            ["outcome"],
            registry=registry,
        )
        self._nominations = Counter(
            "cardwise_extender_nominations_total",
            "Pods that were nominated ahead, by outcome: hit, miss, stale, overtaken, expired.",
            ["outcome"],
            registry=registry,
        )
        self._claims = Counter(
            "cardwise_extender_claims_total",
            "ResourceClaims of pods, by outcome: allocated, failed, refused (by kube-scheduler).",
            ["outcome"],
            registry=registry,
        )
        verbs = ("filter", "prioritize", "preempt", "bind", "inspect")
        self._by_verb = {verb: self._seconds.labels(verb) for verb in verbs}

    @contextmanager
    def measure_call(self, verb: str) -> Iterator[None]:
        """Context manager: measures the seconds of a call of the verb.

        If the call raises TakesLong, nothing is recorded, because another thread continues the call.
        """
        began, is_moved = time.perf_counter(), False
        try:
            yield
        except TakesLong:
            is_moved = True
            raise
        finally:
            if not is_moved:
                self._by_verb[verb].observe(time.perf_counter() - began)

    def count_refusal(self, reason: str) -> None:
        """Count a pod for which filter found no node, by the reason from `most_frequent`."""
        self._refusals.labels(reason).inc()

    def observe_permit(self, outcome: str, seconds: float) -> None:
        """Record that a gang's permit has ended. `outcome`: "bound" or "released". `seconds`: the permit's duration."""
        self._permits.labels(outcome).observe(seconds)

    def observe_gang_wait(self, created: str) -> None:
        """Record how long a gang has waited, when its binding starts.

        created: the creationTimestamp of the gang's oldest pod.
        """
        created_at = parse_timestamp(created)
        if created_at is not None:
            self._queues.observe(max(0.0, (self._clock.wall() - created_at).total_seconds()))

    def count_nomination(self, outcome: str) -> None:
        """Count the outcome of a pod that was nominated ahead."""
        self._nominations.labels(outcome).inc()

    def count_claim(self, outcome: str) -> None:
        """Count a ResourceClaim by its outcome."""
        self._claims.labels(outcome).inc()

    def count_bind(self, outcome: str) -> None:
        """Count a bind call by its outcome."""
        self._binds.labels(outcome).inc()


@dataclass(kw_only=True, eq=False)
class GaugeReaders(Collector):
    """Gauges that are read at each scrape: counts by label, except `staleness_seconds` and `disconnected_seconds`.

    Each label has a fixed set of values. Metrics of single cards and pods come from the device plugins, because a large
    cluster has 40,000 of them.
    """

    reservations: Callable[[], Mapping[str, int]]
    gangs: Callable[[], Mapping[str, int]]
    refused_pods: Callable[[], Mapping[str, int]]
    disagreements: Callable[[], Mapping[str, int]]
    staleness_seconds: Callable[[], Mapping[str, float]]
    disconnected_seconds: Callable[[], Mapping[str, float]]
    leads: Callable[[], bool]

    def collect(self) -> Iterator[Metric]:
        yield _gauge(
            "cardwise_extender_reservations",
            "Shares in the ledger, by phase: reserved, waiting, binding, unconfirmed, allocated, bound, terminating, "
            "reported.",
            "phase",
            self.reservations(),
        )
        # A standby sees which members are bound, but not which unbound members the leader has planned.
        gangs = self.gangs() if self.leads() else dict.fromkeys(self.gangs(), 0)
        yield _gauge(
            "cardwise_extender_gangs",
            "Gangs, by phase: Pending, Waiting, Reserved, Binding, Running, PartlyBound; 0 on standbys.",
            "phase",
            gangs,
        )
        yield _gauge(
            "cardwise_extender_waiting_pods",
            "Pods for which the last filter call found no node, for ten minutes, by the most frequent reason of nodes.",
            "reason",
            self.refused_pods(),
        )
        yield _gauge(
            "cardwise_extender_ledger_disagreements",
            "GPUs on which the ledger and the cluster have disagreed for more than a minute, by kind: status, total, "
            "overcommitted, missing.",
            "kind",
            self.disagreements(),
        )
        yield _gauge(
            "cardwise_extender_staleness_seconds",
            "Time since the last response or watch event of the API server, by kind of object; +Inf before the first "
            "list.",
            "kind",
            self.staleness_seconds(),
        )
        yield _gauge(
            "cardwise_extender_disconnected_seconds",
            "Time without an open watch, in which changes may be missed, by kind of object; 0 while it is open.",
            "kind",
            self.disconnected_seconds(),
        )
        yield GaugeMetricFamily(
            "cardwise_extender_leader",
            "1 while this extender serves kube-scheduler, 0 while another one does.",
            value=float(self.leads()),
        )


def _gauge(name: str, text: str, label: str, samples: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for label_value, number in samples.items():
        family.add_metric([label_value], number)
    return family
