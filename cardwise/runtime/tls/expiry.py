"""A metric: when the certificates that a part serves and calls with end.

It reads the files, so a renewal that nobody carried out, and files of cert-manager, show here alike.
"""

from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.runtime.tls import rotation

NAME = "cardwise_certificate_expiry_timestamp_seconds"
_FILES = {"authority": rotation.BUNDLE, "server": rotation.SERVER_CERT, "client": rotation.CLIENT_CERT}


class Expiry(Collector):
    """Reads the files of `directory` at each scrape. One that is missing or unreadable has no sample."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        metric = GaugeMetricFamily(NAME, "When the certificate ends, in seconds since 1970.", labels=["certificate"])
        for label, name in _FILES.items():
            ends = _expiry_time(self._directory / name)
            if ends is not None:
                metric.add_metric([label], ends)
        yield metric


def _expiry_time(path: Path) -> float | None:
    # Of a bundle the first one: it is the authority that signs now.
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None
