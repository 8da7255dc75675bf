"""MPS and the real scheduler: what a node says of its cards decides where pods go, and who waits, with a reason."""

from collections.abc import Iterator

import pytest

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.core.values.refusals import Refusal
from cardwise.kube import paths
from tests.cluster import Cluster
from tests.integration.commands import cardwise
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("sim")]


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """With one node of two cards."""
    for space in spaces(cluster, request):
        space.nodes()
        yield space


def the_node(space: Space) -> str:
    return f"{space.name}-00"


def cards(space: Space) -> list[str]:
    """The ExtendedResources of the node, in the order of the cards' indices."""
    query = {"labelSelector": f"{names.NODE_LABEL}={the_node(space)}"}
    resources = space.cluster.api.get(paths.extendedresources(), query)["items"]
    return [
        resource["metadata"]["name"] for resource in sorted(resources, key=lambda resource: resource["spec"]["index"])
    ]


def report_mps(cluster: Cluster, name: str, state: str) -> None:
    """As the node's manager would."""
    mps_status = {"mode": "card", "state": state, "multiUser": True, "maxClients": 48, "ceilingMiB": 1024}
    cluster.api.patch(paths.extendedresources(name, "status"), {"status": {"mps": mps_status}}, "merge")


def pod(space: Space, name: str, isolation: str = "advisory") -> Json:
    """For the node."""
    return workload(name, gpu_mem=4000, annotations={names.ISOLATION: isolation}, node=the_node(space))


def waits(space: Space, name: str, refusal: Refusal) -> None:
    """kube-scheduler says why, and the pod has no node."""
    space.refused(name, refusal.text)
    assert not space.get(name)["spec"].get("nodeName")


def test_a_pod_waits_for_a_card_whose_mps_is_ready_and_runs_as_soon_as_one_is(space: Space) -> None:
    cluster = space.cluster
    first, second = cards(space)
    report_mps(cluster, first, "Down")
    report_mps(cluster, second, "Starting")
    space.nodes()  # whose cards the extender knows: it hears of all cards by one watch, so it has heard these too
    space.create(pod(space, "waits"))
    space.create(pod(space, "none", "none"))
    waits(space, "waits", Refusal.MPS_DOWN)
    waits(space, "none", Refusal.MPS_DOWN)
    report_mps(cluster, second, "Ready")
    space.wait(lambda: any(space.get(name)["spec"].get("nodeName") for name in ("waits", "none")), "one of them goes")
    lucky, other = ("waits", "none") if space.get("waits")["spec"].get("nodeName") else ("none", "waits")
    assert space.placed(lucky) == (the_node(space), "1")
    waits(space, other, Refusal.MPS_MIXED)
    report_mps(cluster, first, "Ready")
    assert space.placed(other) == (the_node(space), "0")
    space.running("waits", "none")


def report_tier(cluster: Cluster, name: str, memory: str, reason: str = "") -> None:
    """As the node's device plugin would."""
    tiers = {"memory": memory, "memoryReason": reason, "compute": "none", "computeReason": ""}
    cluster.api.patch(paths.extendedresources(name, "status"), {"status": {"isolation": tiers}}, "merge")


def test_pods_wait_for_the_tier_that_they_demand_and_whole_gpus_meet_each(space: Space) -> None:
    cluster = space.cluster
    first, second = cards(space)
    reason = "limits by the driver need driver 615 or later; this is 580.95.05"
    for name in (first, second):
        report_mps(cluster, name, "Unavailable")
        report_tier(cluster, name, "advisory", reason)
    space.nodes()
    space.create(pod(space, "kernel", "kernel"))
    space.create(pod(space, "mps", "mps"))
    waits(space, "kernel", Refusal.KERNEL_MISSING)
    waits(space, "mps", Refusal.MPS_MISSING)
    report_mps(cluster, second, "Ready")
    report_tier(cluster, second, "mps", reason)
    assert space.placed("mps") == (the_node(space), "1")
    waits(space, "kernel", Refusal.KERNEL_MISSING)
    explained = cardwise(cluster, "explain", "pod", "kernel", "-n", space.name).stdout
    assert f"its memory tier is mps, the pod demands kernel ({reason})" in explained
    space.create(workload("whole", gpu_count=1, annotations={names.ISOLATION: "kernel"}, node=the_node(space)))
    assert space.placed("whole") == (the_node(space), "0")
    report_tier(cluster, second, "kernel", "not verified")
    assert space.placed("kernel") == (the_node(space), "1")
    space.running("kernel", "mps", "whole")
