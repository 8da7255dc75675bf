"""Rule 6: pods without GPU requests never fail because of Cardwise and never wait on it, whatever hangs or is down."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("sim", last=True)]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes()
        yield space


def scheduled_after(space: Space, pod: dict) -> float:
    """Seconds from its creation, which is counted too, to a node. How many are good is in docs/measured.md.

    A pod that waited for what hangs would get no node before that goes on: a node is the proof, however late it comes.
    """
    began = time.monotonic()
    space.create(pod)
    name = pod["metadata"]["name"]
    space.placed(name)
    return time.monotonic() - began


def test_pods_without_gpu_are_scheduled_while_the_extender_hangs(space):
    extender = space.cluster.process("extender")
    extender.pause()
    try:
        waits = []
        for i in range(6):
            # A pod with a GPU request stands before each of them.
            space.create(workload(f"gpu-{i}", gpu_mem=100))
            waits.append(scheduled_after(space, workload(f"plain-{i}")))
            if i < 5:
                space.delete(f"gpu-{i}")
                space.wait_for_deletion(f"gpu-{i}")
        print("seconds:", [round(wait, 2) for wait in waits])
        space.refused("gpu-5")  # it was tried
        assert not space.get("gpu-5")["spec"].get("nodeName")
    finally:
        extender.resume()
    space.running("gpu-5")


def test_an_extender_whose_serving_process_hangs_is_replaced_and_binds_all_pods(space):
    space.cluster.process("extender").pause_children()
    gpus, plain = [f"gpu-{i}" for i in range(5)], [f"plain-{i}" for i in range(10)]
    for name in gpus:
        space.create(workload(name, gpu_mem=100))
    for name in plain:
        space.create(workload(name))
    space.running(*plain)
    space.running(*gpus)  # nobody had to wake it up


def test_pods_without_gpu_are_scheduled_behind_several_that_wait_for_an_extender_that_hangs(space):
    # kube-scheduler takes one pod at a time, so those in line before a pod are waited for, a timeout each.
    extender = space.cluster.process("extender")
    ahead = 3
    extender.pause()
    try:
        for i in range(ahead):
            space.create(workload(f"gpu-{i}", gpu_mem=100))
        waits = [scheduled_after(space, workload(f"plain-{i}")) for i in range(6)]
        print("seconds:", [round(wait, 2) for wait in waits])
    finally:
        extender.resume()
    space.running(*(f"gpu-{i}" for i in range(ahead)))


def test_pods_without_gpu_are_created_while_the_webhook_hangs(space):
    webhook = space.cluster.process("webhook")
    webhook.pause()
    try:
        waits = [scheduled_after(space, workload(f"plain-{i}")) for i in range(5)]
        print("seconds:", [round(wait, 2) for wait in waits])
        space.running(*(f"plain-{i}" for i in range(5)))
    finally:
        webhook.resume()
    space.create_and_locate(workload("gpu", gpu_mem=1024))
