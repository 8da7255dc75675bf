"""The metrics of the device plugin. Cards are named by UUID, index and model."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.core.api.cards import FULL_CORE
from deviceplugin.publish.cardlevels import CardLevel

_BYTES = 1024 * 1024
_LABELS = ["card", "index", "model"]

PRE_START = Histogram(
    "cardwise_prestart_seconds",
    "Time of PreStartContainer by outcome: granted, refused (told to the pod, retried by the kubelet) or failed",
    ["outcome"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
)
REGISTRATIONS = Counter("cardwise_registrations", "Registrations with the kubelet")
FAILURES = Counter(
    "cardwise_thread_failures", "Unforeseen errors that a thread met and went on after; see the log", ["thread"]
)
GRANTS = Gauge("cardwise_grants", "Containers on this node that hold a share")
HELD = Gauge("cardwise_held_shares", "Shares of ended pods whose containers are not gone yet")
UNREADABLE = Gauge("cardwise_unreadable_grants", "Grants on disk that could not be read at the start")

_OF_CARDS: tuple[tuple[str, str, Callable[[CardLevel], float]], ...] = (
    ("cardwise_card_memory_bytes", "Memory of the card.", lambda one: one.card.memory * _BYTES),
    (
        "cardwise_card_used_bytes",
        "Memory of the card that pods of this node have asked for.",
        lambda one: one.used * _BYTES,
    ),
    ("cardwise_card_free_bytes", "Memory of the card that no pod has asked for.", lambda one: one.free * _BYTES),
    (
        "cardwise_card_granted_bytes",
        "Memory of the card that started containers hold.",
        lambda one: one.granted * _BYTES,
    ),
    ("cardwise_card_shares", "Containers that have a share of the card.", lambda one: one.shares),
    (
        "cardwise_card_cores_used_ratio",
        "Part of the card's SMs that pods have asked for.",
        lambda one: one.core / FULL_CORE,
    ),
    ("cardwise_card_healthy", "1 while the card takes new shares, 0 while it is sick.", lambda one: one.healthy),
)


class CardCollector(Collector):
    """A sample for each card and metric, asked for at the scrape; none until `ask` is set."""

    def __init__(self) -> None:
        self.ask: Callable[[], Iterable[CardLevel]] = tuple

    def collect(self) -> Iterator[Metric]:
        found = list(self.ask())
        for name, text, value in _OF_CARDS:
            family = GaugeMetricFamily(name, text, labels=_LABELS)
            for one in found:
                family.add_metric([one.card.uuid, str(one.card.index), one.card.model], value(one))
            yield family


CARDS = CardCollector()
REGISTRY.register(CARDS)


def observe(
    grants: Callable[[], int], held: Callable[[], int], unreadable: int, cards: Callable[[], Iterable[CardLevel]]
) -> None:
    """Let the gauges ask when they are scraped."""
    GRANTS.set_function(grants)
    HELD.set_function(held)
    UNREADABLE.set(unreadable)
    CARDS.ask = cards
