"""`cardwise idle`: pods that hold a share and do not compute."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from click.testing import Result

from cardwise.core.values.decoded import Json
from cardwise.core.values.timestamps import format_timestamp, subtract_seconds
from cardwise.gpus.usagereport import ContainerUsage, UsageReport
from cardwise.kube import paths
from tests.cli import clusters
from tests.cli.clusters import Cluster, placed

HOUR = 3600.0
PROXIES = paths.pods("cardwise-system")
MANAGED = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}


def pod_of(api: Cluster, name: str, node: str, *, hours: float, mib: int = 4000, namespace: str = "team-a") -> None:
    """A pod of the Deployment `web` with a share, started so many hours ago."""
    pod = placed(namespace, name, node, 0, mib)
    owner = {"kind": "ReplicaSet", "name": "web-1a2b", "uid": "u", "controller": True}
    pod["metadata"] |= {"ownerReferences": [owner], "labels": {"pod-template-hash": "1a2b"}}
    pod["status"] = {"phase": "Running", "startTime": hours_ago(api, hours)}
    api.add("pods", pod)


def hours_ago(api: Cluster, hours: float) -> str:
    return format_timestamp(subtract_seconds(api.clock.wall(), hours * HOUR))


def usage(pod: str, hours: float | None, *, namespace: str = "team-a", **fields: Any) -> ContainerUsage:
    """Of a container that last computed so many hours ago."""
    defaults: Json = {"container": "main", "workload": "Deployment/web", "gpu": "GPU-n1-0", "granted_mib": 4000}
    idle_seconds = None if hours is None else hours * HOUR
    defaults |= {"idle_is_minimum": False} | fields
    return ContainerUsage(namespace=namespace, pod=pod, idle_seconds=idle_seconds, **defaults)


def manager(api: Cluster, node: str, *usages: ContainerUsage) -> None:
    """The MPS manager of a node, with what it remembers."""
    metadata = {"namespace": "cardwise-system", "name": f"mps-{node}", "labels": MANAGED}
    api.add("pods", {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}})
    report = UsageReport(node=node, observed_seconds=6 * HOUR, containers=list(usages))
    api.answers[f"{PROXIES}/mps-{node}:9400/proxy/usage"] = msgspec.json.encode(report)


@pytest.fixture
def api() -> Cluster:
    """Pods that are idle for 3 h and for 5 h, one that computes, and one of which that is unknown."""
    api = Cluster({})
    for name, mib in (("short", 4000), ("long", 6000), ("busy", 4000), ("silent", 4000)):
        pod_of(api, name, "n1", hours=9, mib=mib)
    pod_of(api, "other", "n1", hours=9, namespace="team-b")
    usages = [usage("short", 3), usage("long", 5, idle_is_minimum=True), usage("busy", 0.01), usage("silent", None)]
    manager(api, "n1", *usages, usage("other", 4, namespace="team-b"))
    return api


def run(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str) -> Result:
    return clusters.run(monkeypatch, api, "idle", *(args or ("-n", "team-a")))


def idle_names(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str) -> list[str]:
    document = json.loads(run(monkeypatch, api, "-n", "team-a", "-o", "json", *args).stdout)
    return [pod["name"] for pod in document["pods"]]


SCREEN = """\
POD    WORKLOAD        NODE  GPU  MIB   IDLE
long   Deployment/web  n1    0    6000  >5h
short  Deployment/web  n1    0    4000  3h

2 pods idle for 2h or longer, with 10000 MiB
note: whether these pods compute is unknown: team-a/silent
"""


def test_the_screen(monkeypatch, api):
    completed = run(monkeypatch, api)
    assert (completed.exit_code, completed.output) == (0, SCREEN)


def test_all_namespaces_have_a_column(monkeypatch, api):
    lines = run(monkeypatch, api, "-A", "--for", "3h30m").stdout.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["NAMESPACE", "POD"], ["team-a", "long"], ["team-b", "other"]]


def test_json_has_the_shares_and_since_when(monkeypatch, api):
    document = json.loads(run(monkeypatch, api, "-n", "team-a", "-o", "json", "--for", "4h").stdout)
    assert document.pop("notes")
    (long,) = document.pop("pods")
    assert document == {"namespace": "team-a", "forSeconds": 4 * HOUR, "undecided": [], "unknown": ["team-a/silent"]}
    since = datetime.fromisoformat(long.pop("idleSince"))
    assert abs((api.clock.wall() - since.astimezone(UTC)).total_seconds() - 5 * HOUR) < 60
    assert long == {
        "namespace": "team-a",
        "name": "long",
        "workload": "Deployment/web",
        "node": "n1",
        "gpus": [{"index": 0, "uuid": "GPU-n1-0", "grantedMiB": 6000}],
        "grantedMiB": 6000,
        "idleSeconds": 5 * HOUR,
        "mayBeLonger": True,
    }


def test_a_pod_is_idle_for_the_shortest_time_of_its_containers_and_gpus(monkeypatch, api):
    pod_of(api, "several", "n2", hours=9)
    manager(api, "n2", usage("several", 5), usage("several", 2.5, gpu="GPU-n2-1"))
    assert idle_names(monkeypatch, api) == ["long", "short", "several"]
    assert idle_names(monkeypatch, api, "--for", "2h40m") == ["long", "short"]


@pytest.mark.parametrize(("busy_hours", "is_unknown"), [(0.5, False), (5, True)])
def test_a_container_of_unknown_use_decides_unless_another_one_computes(monkeypatch, api, busy_hours, is_unknown):
    pod_of(api, "several", "n2", hours=9)
    manager(api, "n2", usage("several", busy_hours), usage("several", None, container="eval"))
    document = json.loads(run(monkeypatch, api, "-n", "team-a", "-o", "json").stdout)
    assert ("team-a/several" in document["unknown"]) == is_unknown
    assert "several" not in [pod["name"] for pod in document["pods"]]


def test_a_pod_with_a_busy_process_of_an_unknown_container_is_not_idle(monkeypatch, api):
    pod_of(api, "starting", "n2", hours=9)
    manager(api, "n2", usage("starting", 5), usage("starting", 0, container="", granted_mib=None))
    output = run(monkeypatch, api).output
    assert "starting" not in output


def test_a_pod_is_not_idle_for_longer_than_it_runs(monkeypatch, api):
    pod_of(api, "new", "n2", hours=0.5)
    manager(api, "n2", usage("new", 5, idle_is_minimum=True))
    assert "new" not in run(monkeypatch, api).output
    (new,) = json.loads(run(monkeypatch, api, "-n", "team-a", "-o", "json", "--for", "20m").stdout)["pods"][2:]
    assert (new["name"], round(new["idleSeconds"] / HOUR, 1), new["mayBeLonger"]) == ("new", 0.5, False)


def test_a_manager_that_has_just_started_does_not_know_yet(monkeypatch, api):
    pod_of(api, "perhaps", "n2", hours=9)
    manager(api, "n2", usage("perhaps", 1, idle_is_minimum=True))
    output = run(monkeypatch, api).output
    assert (
        "note: these pods have not computed since their use is known, which is less than 2h: team-a/perhaps" in output
    )
    assert "perhaps" in idle_names(monkeypatch, api, "--for", "30m")


def test_pods_of_a_node_that_does_not_answer_are_unknown(monkeypatch, api):
    pod_of(api, "far", "n2", hours=9)
    manager(api, "n2")
    api.answers[f"{PROXIES}/mps-n2:9400/proxy/usage"] = b"<html>"
    output = run(monkeypatch, api).output
    assert "the use on n2 is unknown: its MPS manager sent an unreadable report" in output
    assert "note: whether these pods compute is unknown: team-a/far, team-a/silent" in output


def test_ended_pods_and_pods_without_a_share_are_left_out(monkeypatch, api):
    api.add("pods", {"metadata": {"namespace": "team-a", "name": "plain"}, "spec": {"nodeName": "n1"}})
    api.change("pods", "long", "team-a", status={"phase": "Succeeded"})
    assert idle_names(monkeypatch, api) == ["short"]
    assert "plain" not in run(monkeypatch, api).output


def test_a_former_share_of_the_same_name_does_not_count(monkeypatch, api):
    pod_of(api, "web-0", "n2", hours=9)
    manager(api, "n2", usage("web-0", 5, running=False), usage("web-0", 3, gpu="GPU-n2-1"))
    (web,) = [
        pod
        for pod in json.loads(run(monkeypatch, api, "-n", "team-a", "-o", "json").stdout)["pods"]
        if pod["name"] == "web-0"
    ]
    assert web["idleSeconds"] == 3 * HOUR


def test_without_idle_pods_it_says_so(monkeypatch, api):
    completed = run(monkeypatch, api, "-n", "team-a", "--for", "24h")
    assert completed.exit_code == 0
    assert "no pod with a share in namespace team-a is known to have been idle for 24h" in completed.stdout


def test_wrong_arguments_are_errors(monkeypatch, api):
    completed = run(monkeypatch, api, "--for", "2 hours")
    assert completed.exit_code == 2
    assert "is not a duration; write a number with a unit" in completed.output
    completed = run(monkeypatch, api, "-n", "none")
    assert completed.exit_code == 1
    assert "there is no namespace 'none'" in completed.output
