"""What the command line reads from pods and their controllers."""

import pytest

from cardwise.cli.cluster import workloads


@pytest.mark.parametrize(
    ("end", "grace", "deleted"),
    [
        ("2026-06-01T01:00:30Z", 30, "2026-06-01T01:00:00Z"),
        ("2026-06-01T01:00:00Z", None, "2026-06-01T01:00:00Z"),
        # As API server 1.37.2 wrote it for `kubectl delete --grace-period=64000000000`: its sum had wrapped.
        ("2301-05-01T21:18:30Z", 64_000_000_000, "2026-11-30T02:15:31Z"),
        ("2026-11-30T02:16:59Z", 2**63 - 1, "2026-11-30T02:17:00Z"),
        ("0273-04-02T03:31:50Z", 9_000_000_000, "0001-01-01T00:00:00Z"),
        ("10000-01-01T00:00:00Z", 0, "9999-12-31T23:59:59Z"),
        ("soon", 30, "soon"),
    ],
)
def test_when_a_pod_was_deleted(end, grace, deleted):
    metadata = {"deletionTimestamp": end, "deletionGracePeriodSeconds": grace}
    assert workloads.deletion_time(metadata) == deleted
