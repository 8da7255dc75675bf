"""scheduler.mode=claims as a whole on a real node: webhook, extender, stock kube-scheduler, kubelet and device plugin.

No part of the control plane is configured for Cardwise, and nothing is made by hand.
"""

from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import P100
from tests.cluster import Cluster
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, container, device_numbers, inspect, probe, probed, workload
from tests.integration.since import since

pytestmark = [pytest.mark.cluster, pytest.mark.node, since(34, "resource.k8s.io/v1")]

NODE = "n1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from started(SpecOf(nodes=1, claims=True))


def claims_of(space: Space) -> list[str]:
    claims = space.cluster.api.get(paths.resourceclaims(space.name))["items"]
    return sorted(claim["metadata"]["ownerReferences"][0]["name"] for claim in claims)


def test_each_container_opens_its_card_and_no_other(space):
    """Two pods that do not fit on one card; each has two containers with a share, and one without."""
    numbers = device_numbers(space.cluster, NODE)
    containers = [container("first", gpu_mem=6000), container("second", gpu_mem=4000), container("none")]
    for pod in ("a", "b"):
        space.create(workload(pod, containers))
    space.running("a", "b")
    cards = [space.placed(pod)[1] for pod in ("a", "b")]
    assert sorted(cards) == ["0", "1"]
    for pod, card in zip(("a", "b"), cards, strict=True):
        assert names.SHARE not in str(space.get(pod)["spec"]), "it has no marker resource"
        for name, limit in (("first", "6000"), ("second", "4000")):
            seen = dict(line.partition("=")[::2] for line in space.inside(pod, "env", main=name).splitlines())
            assert (seen[names.ENV_LIMIT_MIB], seen[names.ENV_VISIBLE_DEVICES]) == (limit, names.NO_CARDS)
            space.inside(pod, probe(numbers), main=name)
            lines = space.inside(pod, "cat /dev/termination-log", main=name).splitlines()
            assert lines == probed(numbers, card)
        assert "nvidia" not in space.inside(pod, "ls /dev; env", main="none")


def test_a_pod_waits_at_its_gate_until_the_node_has_freed_the_card(space):
    for index in range(2):
        space.create(workload(f"full-{index}", gpu_mem=P100 - 500))
    space.running("full-0", "full-1")
    space.create(workload("late", gpu_mem=8138))
    space.create(workload("small", gpu_mem=400))
    space.running("small")
    assert space.get("late")["spec"]["schedulingGates"] == [{"name": names.ALLOCATION_GATE}]
    assert claims_of(space) == ["full-0", "full-1", "small"]
    space.delete("full-0")
    space.running("late")
    node, card = space.placed("late")
    assert (node, "ALIYUN_COM_GPU_MEM_IDX=" + card in space.inside("late", "env")) == (NODE, True)
    space.marked("late")
    used = {pod: mib for _, _, pods in inspect(space.cluster).values() for pod, mib in pods.items()}
    assert used[f"{space.name}/late"] == 8138


def test_when_all_pods_are_gone_no_claim_and_no_grant_is_left(space):
    pods = [f"p{index}" for index in range(6)]
    for name in pods:
        space.create(workload(name, gpu_mem=5000))
    space.running(*pods)
    assert claims_of(space) == pods
    space.delete(*pods)
    space.wait_for_deletion(*pods)
    space.wait(lambda: claims_of(space) == [], "no claim is left")
    grants = space.cluster.node(NODE).folder / "cardwise" / "grants"
    space.wait(lambda: not list(grants.iterdir()), "no grant is left")
