"""A metric: the expiry of the certificates of a component.

The metric is read from the files, so it also shows missed renewals of cert-manager.
"""

from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cardwise.runtime.tls import rotation

METRIC_NAME = "cardwise_certificate_expiry_timestamp_seconds"
_FILE_BY_LABEL = {"authority": rotation.BUNDLE, "server": rotation.SERVER_CERT, "client": rotation.CLIENT_CERT}


class Expiry(Collector):
    """Reads the certificates of `directory` at each scrape. There is no sample for missing or unreadable files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        metric = GaugeMetricFamily(
            METRIC_NAME,
            "The expiry in seconds since 1970, by certificate: authority, server, client.",
            labels=["certificate"],
        )
        for label, name in _FILE_BY_LABEL.items():
            ends = _expiry_time(self._directory / name)
            if ends is not None:
                metric.add_metric([label], ends)
        yield metric


def _expiry_time(path: Path) -> float | None:
    # The first certificate of a bundle is the CA that signs now.
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None
