"""The metrics of the device plugin. Labels name a card by UUID, index and model."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.core.api.cards import FULL_CORE
from cardwise.kube.objects.extendedresources import IsolationStatus
from deviceplugin.publish.cardloads import CardLoad

_BYTES_PER_MIB = 1024 * 1024
_LABELS = ["gpu", "index", "model"]

PRE_START = Histogram(
    "cardwise_prestart_seconds",
    "Time of PreStartContainer, by outcome: granted, refused, failed. After a refusal the kubelet tries again",
    ["outcome"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
)
PREPARE = Histogram(
    "cardwise_prepare_claim_seconds",
    "Time of NodePrepareResources for a claim, by outcome: granted, refused, failed. After a refusal the kubelet tries "
    "again",
    ["outcome"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
)
BLOCKED_STARTS = Gauge(
    "cardwise_blocked_starts", "Containers with a claim that cannot start at present, because of a GPU's health or MPS"
)
REGISTRATIONS = Counter("cardwise_registrations", "Registrations with the kubelet")
THREAD_FAILURES = Counter(
    "cardwise_thread_failures", "Unexpected errors in a thread, which continued; see the log", ["thread"]
)
GRANTS = Gauge("cardwise_grants", "Containers on this node that hold a share")
TERMINATING_SHARES = Gauge("cardwise_terminating_shares", "Shares of ended pods whose containers are not gone")
UNKNOWN_HOLDERS = Gauge(
    "cardwise_unknown_holders",
    "Pods that ran at the start and may hold a share, but have no readable assignment",
)
UNREADABLE_GRANTS = Gauge("cardwise_unreadable_grants", "Grants on disk that could not be read at the start")

_CARD_METRICS: tuple[tuple[str, str, Callable[[CardLoad], float]], ...] = (
    ("cardwise_gpu_memory_bytes", "Memory of the GPU.", lambda level: level.card.memory * _BYTES_PER_MIB),
    (
        "cardwise_gpu_used_bytes",
        "Memory of the GPU that pods of this node hold until their containers are gone.",
        lambda level: level.used * _BYTES_PER_MIB,
    ),
    ("cardwise_gpu_free_bytes", "Memory of the GPU that no pod requests.", lambda level: level.free * _BYTES_PER_MIB),
    (
        "cardwise_gpu_granted_bytes",
        "Memory of the GPU that started containers hold.",
        lambda level: level.granted * _BYTES_PER_MIB,
    ),
    ("cardwise_gpu_shares", "Containers that have a share of the GPU.", lambda level: level.shares),
    (
        "cardwise_gpu_cores_used_ratio",
        "Fraction of the GPU's SMs that pods request.",
        lambda level: level.core / FULL_CORE,
    ),
    (
        "cardwise_gpu_healthy",
        "1 while the GPU accepts new shares, 0 while it is unhealthy.",
        lambda level: level.healthy,
    ),
)


class CardCollector(Collector):
    """Collects one sample for each card and metric at each scrape; no samples until the functions are set.

    read_isolation: returns what limits the shares on each card, by UUID.
    """

    def __init__(self) -> None:
        self.read_loads: Callable[[], Iterable[CardLoad]] = tuple
        self.read_isolation: Callable[[], Mapping[str, IsolationStatus]] = dict

    def collect(self) -> Iterator[Metric]:
        loads = list(self.read_loads())
        for name, help_text, measure in _CARD_METRICS:
            family = GaugeMetricFamily(name, help_text, labels=_LABELS)
            for load in loads:
                family.add_metric([load.card.uuid, str(load.card.index), load.card.model], measure(load))
            yield family
        family = GaugeMetricFamily(
            "cardwise_gpu_isolation",
            "1 with the tiers as labels: what limits the memory and the SMs of shares of the GPU.",
            labels=[*_LABELS, "memory", "compute"],
        )
        tiers_by_uuid = self.read_isolation()
        for load in loads:
            if (tiers := tiers_by_uuid.get(load.card.uuid)) is not None:
                card = load.card
                family.add_metric([card.uuid, str(card.index), card.model, tiers.memory, tiers.compute], 1)
        yield family


CARDS = CardCollector()
REGISTRY.register(CARDS)


def connect_gauges(
    grants: Callable[[], int],
    reported_shares: Callable[[], int],
    unreadable: int,
    cards: Callable[[], Iterable[CardLoad]],
    isolation: Callable[[], Mapping[str, IsolationStatus]],
) -> None:
    """Set the functions that the gauges call at each scrape."""
    GRANTS.set_function(grants)
    TERMINATING_SHARES.set_function(reported_shares)
    UNREADABLE_GRANTS.set(unreadable)
    CARDS.read_loads = cards
    CARDS.read_isolation = isolation
