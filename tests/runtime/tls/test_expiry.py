from datetime import UTC, datetime, timedelta

from prometheus_client import CollectorRegistry

from cardwise.runtime.tls import rotation
from cardwise.runtime.tls.certs import KeyPurpose, new_authority, new_leaf
from cardwise.runtime.tls.expiry import METRIC_NAME, Expiry

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_expiry_of_each_certificate_is_exported(tmp_path):
    authority = new_authority("CA", NOW, timedelta(days=100))
    following = new_authority("next CA", NOW, timedelta(days=900))
    leaf = new_leaf(authority, "part", ["localhost"], KeyPurpose.SERVER, now=NOW, lifetime=timedelta(days=10))
    (tmp_path / rotation.BUNDLE).write_bytes(authority.cert + following.cert)
    (tmp_path / rotation.SERVER_CERT).write_bytes(leaf.cert)
    registry = CollectorRegistry()
    registry.register(Expiry(tmp_path))

    def end_of(certificate: str) -> float | None:
        return registry.get_sample_value(METRIC_NAME, {"certificate": certificate})

    assert end_of("server") == (NOW + timedelta(days=10)).timestamp()
    assert end_of("authority") == (NOW + timedelta(days=100)).timestamp(), "the one that signs"
    assert end_of("client") is None

    renewed = new_leaf(authority, "part", ["localhost"], KeyPurpose.SERVER, now=NOW, lifetime=timedelta(days=50))
    (tmp_path / rotation.SERVER_CERT).write_bytes(renewed.cert)
    assert end_of("server") == (NOW + timedelta(days=50)).timestamp()


def test_files_that_cannot_be_read_do_not_break_the_scrape(tmp_path):
    (tmp_path / rotation.SERVER_CERT).write_text("no certificate")
    registry = CollectorRegistry()
    registry.register(Expiry(tmp_path / "nowhere"))
    assert registry.get_sample_value(METRIC_NAME, {"certificate": "server"}) is None
    registry = CollectorRegistry()
    registry.register(Expiry(tmp_path))
    assert registry.get_sample_value(METRIC_NAME, {"certificate": "server"}) is None
