"""The metrics of the webhook."""

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.core.api import names

REVIEWS = Counter(
    "cardwise_webhook_reviews_total",
    "AdmissionReviews answered, by path: /mutate, /mutate/defaults, /validate, /validate/bindings, /advise, other; "
    "and by outcome: allowed, patched, refused, malformed, failed.",
    ["path", "outcome"],
)
REFUSALS = Counter(
    "cardwise_webhook_refusals_total",
    "AdmissionReviews refused, by path and by the reason that the invalid field gives: quota, defaults, memory, cores, "
    "cards, isolation, gang, placement, container, selector, resources, annotation, other.",
    ["path", "reason"],
)
REVIEW_SECONDS = Histogram(
    "cardwise_webhook_review_seconds",
    "Time to decide on an AdmissionReview, without TLS and the network.",
    ["path"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)

# Patterns of refused fields, with the value for the metric's label; the first match counts. The field itself must not
# be a label value, since it contains list positions and texts of users.
_REASONS = (
    (re.compile(r"\.hard\b|^GPUQuota$"), "quota"),
    (re.compile(r"cardwise\.dev/(?:policy\b|default)"), "defaults"),
    (re.compile(rf"{re.escape(names.GPU_MEM)}|memoryMiB|gpu-mem"), "memory"),
    (re.compile(rf"{re.escape(names.GPU_CORE)}|corePercent|sm-percent"), "cores"),
    (re.compile(r"gpu-count|cardwise\.dev/gpu\b|nvidia\.com/gpu"), "cards"),
    (re.compile(r"cardwise\.dev/(?:isolation|share-with)\b"), "isolation"),
    (re.compile(r"group-name|group-pod-num|pod-group|/gang\b|queue-priority|podManagementPolicy"), "gang"),
    (re.compile(r"spec\.nodeName|^target\b"), "placement"),
    (re.compile(r"\.env\b|volumeMounts|\.name$"), "container"),
    (re.compile(r"spec\.selector|matchLabels|matchExpressions"), "selector"),
    (re.compile(r"resources\.(?:limits|requests)"), "resources"),
    (re.compile(r"annotations"), "annotation"),
)


def refusal_reason(field: str) -> str:
    """The kind of the refused field: one of `_REASONS`, or "other"."""
    return next((label for pattern, label in _REASONS if pattern.search(field)), "other")


class StalenessCollector(Collector):
    """Seconds since the last update, computed when Prometheus scrapes. `staleness`: seconds by kind of object."""

    def __init__(self, staleness: Callable[[], Mapping[str, float]]) -> None:
        self._staleness = staleness

    def collect(self) -> Iterator[Metric]:
        ages = GaugeMetricFamily(
            "cardwise_webhook_staleness_seconds",
            "Time since the API server last sent anything, by kind of object.",
            labels=["kind"],
        )
        for kind, seconds in self._staleness().items():
            ages.add_metric([kind], seconds)
        yield ages
