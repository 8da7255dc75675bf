"""Rule 6 on real nodes: pods without GPU requests come, run and go while every part of Cardwise is dead."""

import pytest

from tests.cluster.processes import PATIENCE
from tests.integration.sharing import Space, deployment, kill9, workload

pytestmark = [pytest.mark.cluster("nodes", last=True), pytest.mark.node]


def uids(space: Space) -> set[str]:
    """Of the pods that run."""
    return {pod["metadata"]["uid"] for pod in space.pods() if pod["status"].get("phase") == "Running"}


def test_pods_without_gpu_live_while_every_part_is_down(cluster, space):
    down = [cluster.process(name) for name in ("webhook", "extender", "deviceplugin-n1")]
    for process in down:
        kill9(process)
    try:
        space.cluster.apply([deployment("web", 2, node="n1") | {"metadata": {"name": "web", "namespace": space.name}}])
        space.create(workload("alone", node="n1"))
        space.kubectl("rollout", "status", "deployment/web", f"--timeout={PATIENCE:.0f}s", timeout=PATIENCE)
        space.running("alone")
        assert space.inside("alone", "echo works") == "works\n"
        # They end and are replaced as well.
        former = uids(space)
        space.kubectl_json("delete", "pods", "--all", "--wait=false")
        space.wait(lambda: len(now := uids(space)) == 2 and not now & former, "the others are gone, two run anew")
    finally:
        with cluster.node("n1").slots_listed():
            for process in down:
                process.restart()
    # And everything is as before.
    for part in ("webhook", "extender"):
        cluster.parts.wait_ready(part)
    space.create(workload("gpu", gpu_mem=1024, node="n1"))
    space.running("gpu")
