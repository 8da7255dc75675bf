"""The generated page has each metric of the code, and all names follow Prometheus' conventions."""

import pytest

from tests.observability.metricdocs import PARTS, ROOT, documented, registered

SHARED = registered(ROOT / "cardwise" / "runtime")  # metrics of parts that serve more than metrics


@pytest.mark.parametrize("heading", PARTS)
def test_documented_metrics_are_exactly_the_registered_ones(heading: str) -> None:
    metrics = registered(ROOT / PARTS[heading])
    assert metrics, "the code was not read"
    assert set(documented()[heading]) - SHARED == metrics


def test_shared_metrics_are_documented_with_each_part() -> None:
    pages = documented()
    assert {"cardwise_certificate_expiry_timestamp_seconds", "cardwise_http_dropped_connections_total"} == SHARED
    assert [heading for heading in pages if pages[heading].keys() >= SHARED] == ["Extender", "Webhook"]
    assert set(pages) == set(PARTS)


def test_names_follow_the_conventions() -> None:
    for rows in documented().values():
        for name, row in rows.items():
            assert row.kind in ("counter", "gauge", "histogram"), name
            assert name.endswith("_total") == (row.kind == "counter"), name
            assert len(row.text.split()) > 2, name
            if row.kind == "histogram":
                assert name.endswith("_seconds"), name
