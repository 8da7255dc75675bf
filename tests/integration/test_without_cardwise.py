"""Rule 6: pods without GPU requests never fail because of Cardwise and never wait on it, whatever hangs or is down."""

import time
from collections.abc import Iterator

import pytest

from cardwise.core import schedulerconfig
from tests.cluster import Cluster
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, deployment, kill9, workload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

FAST_TIMEOUT = float(schedulerconfig.FAST_TIMEOUT.removesuffix("s"))
MARGIN = 1.0  # seconds: the machine is busy
SIM = "sim-1"


@pytest.fixture(scope="module")
def sim() -> Iterator[Cluster]:
    """Its parts are stopped and hung here, so it is nobody else's."""
    yield from started(SpecOf(sim_nodes=1))


@pytest.fixture(scope="module")
def real() -> Iterator[Cluster]:
    yield from started(SpecOf(nodes=1))


def plain(name: str, node: str = SIM, **settings: object) -> dict:
    return workload(name, node=node, **settings)


def scheduled_after(space: Space, pod: dict) -> float:
    """Seconds from its creation, which is counted too, to a node."""
    began = time.monotonic()
    space.create(pod)
    name = pod["metadata"]["name"]
    space.wait(lambda: bool(space.get(name)["spec"].get("nodeName")), f"{name} is scheduled", 60)
    return time.monotonic() - began


@pytest.mark.node
def test_pods_without_gpu_live_while_every_part_is_down(real):
    space = Space(real, "plain")
    down = [real.process(name) for name in ("webhook", "extender", "deviceplugin-n1")]
    for process in down:
        kill9(process)
    try:
        space.cluster.apply([deployment("web", 2, node="n1") | {"metadata": {"name": "web", "namespace": space.name}}])
        space.create(plain("alone", "n1"))
        space.kubectl("rollout", "status", "deployment/web", "--timeout=30s")
        space.running("alone", timeout=60)
        assert space.inside("alone", "echo works") == "works\n"
        # They end and are replaced as well.
        space.kubectl("delete", "pods", "--all", "--wait=false")
        space.wait(lambda: "alone" not in [pod["metadata"]["name"] for pod in space.pods()], "it is deleted", 60)
        space.kubectl("rollout", "status", "deployment/web", "--timeout=30s")
    finally:
        for process in down:
            process.restart()
    space.clear()
    # And everything is as before.
    for part in ("webhook", "extender"):
        real.parts.wait_ready(part, 60)
    space.wait(lambda: real._node_has_cards("n1"), "the node has its slots again")
    space.create(workload("gpu", gpu_mem=1024, node="n1"))
    space.running("gpu")
    space.clear()


def test_pods_without_gpu_are_scheduled_while_the_extender_hangs(sim):
    space = Space(sim, "plain")
    extender = sim.process("extender")
    extender.pause()
    try:
        waits = []
        for i in range(6):
            # A pod with a GPU request stands before each of them.
            space.create(workload(f"gpu-{i}", gpu_mem=100, node=SIM))
            waits.append(scheduled_after(space, plain(f"plain-{i}")))
            if i < 5:
                space.kubectl("delete", "pod", f"gpu-{i}", "--wait")
        print("seconds:", [round(wait, 2) for wait in waits])
        assert max(waits) <= FAST_TIMEOUT + MARGIN
        assert not space.get("gpu-5")["spec"].get("nodeName")
    finally:
        extender.resume()
    space.running("gpu-5")
    space.clear()


def test_each_gpu_pod_ahead_costs_no_more_than_one_timeout(sim):
    # kube-scheduler takes one pod at a time, so those in line before a pod are waited for; each has its turn once.
    space = Space(sim, "plain")
    extender = sim.process("extender")
    ahead = 3
    extender.pause()
    try:
        for i in range(ahead):
            space.create(workload(f"gpu-{i}", gpu_mem=100, node=SIM))
        waits = [scheduled_after(space, plain(f"plain-{i}")) for i in range(6)]
        print("seconds:", [round(wait, 2) for wait in waits])
        assert max(waits) <= ahead * FAST_TIMEOUT + MARGIN
    finally:
        extender.resume()
    space.running(*(f"gpu-{i}" for i in range(ahead)))
    space.clear()


def test_pods_without_gpu_are_created_while_the_webhook_hangs(sim):
    space = Space(sim, "plain")
    webhook = sim.process("webhook")
    webhook.pause()
    try:
        waits = [scheduled_after(space, plain(f"plain-{i}")) for i in range(5)]
        print("seconds:", [round(wait, 2) for wait in waits])
        assert max(waits) <= MARGIN
        space.running(*(f"plain-{i}" for i in range(5)))
    finally:
        webhook.resume()
    space.put(workload("gpu", gpu_mem=1024, node=SIM))
    space.clear()
