"""What the device plugin counts."""

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

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


def observe(grants: Callable[[], int], held: Callable[[], int], unreadable: int) -> None:
    """Let the gauges ask when they are scraped."""
    GRANTS.set_function(grants)
    HELD.set_function(held)
    UNREADABLE.set(unreadable)
