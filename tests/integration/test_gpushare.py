"""A drop-in for gpushare: its own single plain-HTTP stanza on the real scheduler, and the pods that it has left."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cardwise.core import names
from cardwise.kube import paths
from tests.build import P100, pod
from tests.cluster import Cluster, ports
from tests.cluster.parts import says_ready
from tests.integration.conftest import SpecOf, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node of two cards without our webhook: the pods come in the shape that it would give them."""
    for cluster in started(SpecOf(sim_nodes=1, parts=False)):
        cluster.process("kube-scheduler").stop()
        _leave_a_pod_of_gpushare(cluster)
        port, metrics = ports.free(2)
        extender = cluster.process("extender")
        program = str(Path(sys.executable).parent / "cardwise-extender")
        where = [f"--bind=127.0.0.1:{port}", f"--metrics-bind=127.0.0.1:{metrics}", "--plain-http", "--no-lease"]
        extender.start([program, f"--kubeconfig={cluster.kubeconfig}", *where])
        extender.wait_until(lambda metrics=metrics: says_ready(metrics), "/readyz", 60)
        cluster.control_plane.start_scheduler([_stanza(port)])
        cluster.inspect_url = f"http://127.0.0.1:{port}/gpushare-scheduler/inspect"
        yield cluster


def _stanza(port: int) -> dict[str, object]:
    """gpushare-scheduler-extender `config/scheduler-policy-config.yaml`, as kubescheduler v1 wants it."""
    return {
        "urlPrefix": f"http://127.0.0.1:{port}/gpushare-scheduler",
        "filterVerb": "filter",
        "bindVerb": "bind",
        "enableHTTPS": False,
        "nodeCacheCapable": True,
        "managedResources": [{"name": names.GPU_MEM, "ignoredByScheduler": False}],
        "ignorable": False,
    }


def _leave_a_pod_of_gpushare(cluster: Cluster) -> None:
    annotations = {
        names.IDX: "1",
        names.POD_MEM: "12000",
        names.DEV_MEM: str(P100),
        names.ASSIGNED: "true",
        names.ASSUME_TIME: "1500000000000000000",
    }
    cluster.api.create(paths.pods("default"), pod("former", gpu_mem=12000, annotations=annotations))
    binding = {"metadata": {"name": "former"}, "target": {"kind": "Node", "name": "sim-1"}}
    cluster.api.create(paths.pods("default", "former", "binding"), binding)


def _index(cluster: Cluster, name: str) -> str | None:
    annotations = cluster.api.get(paths.pods("default", name))["metadata"].get("annotations", {})
    return annotations.get(names.IDX)


def test_its_pods_are_counted_and_its_stanza_works(cluster):
    with urllib.request.urlopen(cluster.inspect_url, timeout=5) as answer:
        (node,) = json.loads(answer.read())["nodes"]
    assert [(card["id"], card["usedGPU"]) for card in node["devs"]] == [(0, 0), (1, 12000)]
    assert node["devs"][1]["pods"] == [{"name": "former", "namespace": "default", "usedGPU": 12000}]

    # Binpack would take card 1, had the former pod not been counted.
    cluster.api.create(paths.pods("default"), pod("beside", gpu_mem=9000, share=1))
    cluster.wait(lambda: _index(cluster, "beside") == "0", "a pod that only fits on card 0 is there")
    cluster.api.create(paths.pods("default"), pod("tight", gpu_mem=2000, share=1))
    cluster.wait(lambda: _index(cluster, "tight") == "1", "a pod that fits beside the former one is there")

    cluster.api.create(paths.pods("default"), pod("late", gpu_mem=9000, share=1))
    refused = "Insufficient GPU Memory in one device"
    cluster.wait(lambda: refused in json.dumps(cluster.api.get(paths.pods("default", "late"))), "refused")
    cluster.api.delete(paths.pods("default", "former"))
    cluster.wait(lambda: _index(cluster, "late") == "1", "the former pod's share is free when it has ended", 60)
