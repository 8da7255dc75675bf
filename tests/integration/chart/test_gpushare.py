"""A drop-in for gpushare: its own single plain-HTTP stanza on the real scheduler, and the pods that it has left."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.build import P100, binding
from tests.cluster import Cluster, ports
from tests.cluster.parts import says_ready
from tests.cluster.processes import PATIENCE
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("bare")]


@pytest.fixture
def url(cluster: Cluster, space: Space) -> Iterator[str]:
    """Of the extender. One node of two cards, without our webhook: pods come in the shape that it would give them."""
    space.nodes()
    scheduler, extender = cluster.process("kube-scheduler"), cluster.process("extender")
    scheduler.stop()
    _leave_a_pod_of_gpushare(space)
    port, metrics = ports.free(2)
    program = str(Path(sys.executable).parent / "cardwise-extender")
    addresses = [f"--bind=127.0.0.1:{port}", f"--metrics-bind=127.0.0.1:{metrics}", "--plain-http", "--no-lease"]
    extender.start([program, f"--kubeconfig={cluster.kubeconfig}", *addresses])
    try:
        extender.wait_until(lambda: says_ready(metrics), "/readyz")
        cluster.control_plane.start_scheduler([_stanza(port)])
        yield f"http://127.0.0.1:{port}/gpushare-scheduler"
    finally:
        scheduler.stop()
        extender.stop()
        cluster.control_plane.start_scheduler([])


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


def _leave_a_pod_of_gpushare(space: Space) -> None:
    annotations = {
        names.IDX: "1",
        names.POD_MEM: "12000",
        names.DEV_MEM: str(P100),
        names.ASSIGNED: "true",
        names.ASSUME_TIME: "1500000000000000000",
    }
    space.create(_pod(space, "former", annotations=annotations, gpu_mem=12000))
    bound = binding("former", space.own_nodes[0])
    space.cluster.api.create(paths.pods(space.name, "former", "binding"), bound)


def _pod(space: Space, name: str, **settings: Any) -> Json:
    return workload(name, node=space.own_nodes[0], **settings)


def test_its_pods_are_counted_and_its_stanza_works(space, url):
    (name,) = space.own_nodes
    node: Json = {}

    def is_reported() -> bool:
        with urllib.request.urlopen(f"{url}/inspect/{name}", timeout=PATIENCE) as answer:
            (document,) = json.loads(answer.read())["nodes"]
        node.update(document)
        return True

    space.wait(is_reported, "the extender tells")  # where a turn has taken half a second it says that it is busy
    assert [(card["id"], card["usedGPU"]) for card in node["devs"]] == [(0, 0), (1, 12000)]
    assert node["devs"][1]["pods"] == [{"name": "former", "namespace": space.name, "usedGPU": 12000}]

    # Binpack would take card 1, had the former pod not been counted.
    assert space.create_and_locate(_pod(space, "beside", gpu_mem=9000, share=1)) == (name, "0"), "it only fits there"
    assert space.create_and_locate(_pod(space, "tight", gpu_mem=2000, share=1)) == (name, "1"), (
        "it fits beside the former one"
    )
    space.create(_pod(space, "late", gpu_mem=9000, share=1))
    space.refused("late", "Insufficient GPU Memory in one device")
    space.delete("former")
    assert space.placed("late") == (name, "1"), "the former pod's share is free when it has ended"
