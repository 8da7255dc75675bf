"""What a node may answer when `cardwise advise` and `cardwise idle` ask for its use."""

from typing import Any

import msgspec
import pytest

from cardwise.cli.cluster import usagehistory
from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.gpus.usagereport import ContainerUsage, UsageReport
from cardwise.kube import paths
from tests.cli.clusters import Cluster

MANAGED = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}
REPORT = UsageReport(
    node="n1",
    observed_seconds=21600.0,
    containers=[
        ContainerUsage(
            namespace="team-a",
            pod="p",
            container="main",
            workload="Deployment/web",
            gpu="GPU-n1-0",
            granted_mib=4000,
            peaks_mib={0: 1, 3000: 359},
            busy_percent=100.00000000000001,
            idle_seconds=0.0,
        )
    ],
)


def cluster(answer: bytes) -> Cluster:
    """n1 answers so, and n2 as it should."""
    api = Cluster({})
    for node, content in (("n1", answer), ("n2", msgspec.json.encode(REPORT))):
        metadata = {"namespace": names.NAMESPACE, "name": f"mps-{node}", "labels": MANAGED}
        api.add("pods", {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}})
        api.answers[f"{paths.pods(names.NAMESPACE)}/mps-{node}:9400/proxy/usage"] = content
    return api


def changed(**fields: Any) -> bytes:
    """The report with other fields of its container."""
    document: Json = msgspec.to_builtins(REPORT)
    document["containers"][0] |= fields
    return msgspec.json.encode(document)


def test_reports_are_read_as_managers_send_them():
    history = usagehistory.read_history(cluster(msgspec.json.encode(REPORT)).kube)
    assert (history.reports, history.notes) == ([REPORT, REPORT], [])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"node":"\xff","observedSeconds":1}',
        b'{"node":"n1","observedSeconds":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"node":"n1","observedSeconds":1e308}',
        b'{"node":"n1","observedSeconds":1e999}',
        b'{"node":"n1","observedSeconds":-1}',
        changed(peaksMiB={"9" * 400: 1}),
        changed(peaksMiB={"9" * 5000: 1}),
        changed(peaksMiB={"-5": 1}),
        changed(peaksMiB={"5": -1}),
        changed(peaksMiB={"5": 10**15}),
        changed(grantedMiB=10**15),
        changed(grantedMiB=-1),
        changed(idle_seconds=1e300),
        changed(busy_percent=-1),
        changed(workload="Deployment/" + "x" * 100_000),
    ],
)
def test_a_report_that_cannot_be_read_leaves_the_use_of_its_node_unknown(answer):
    history = usagehistory.read_history(cluster(answer).kube)
    assert history.reports == [REPORT]
    (note,) = history.notes
    assert note.startswith("the use on n1 is unknown: its MPS manager sent an unreadable report")
