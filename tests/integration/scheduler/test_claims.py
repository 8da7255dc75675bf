"""scheduler.mode=claims: kube-scheduler without any configuration obeys the claims that the extender writes."""

import contextlib
from collections.abc import Iterator

import pytest

from cardwise.core.api import claims, names
from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.build import P100, container
from tests.cluster import Cluster
from tests.cluster.simnodes import CPUS
from tests.integration.conftest import SpecOf, spaces, started
from tests.integration.sharing import Space, assigned, inspect, prioritize, workload
from tests.integration.since import since

pytestmark = [pytest.mark.cluster, since(34, "resource.k8s.io/v1")]

HALF = P100 // 2
CARDS = 2
NODES = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from started(SpecOf(claims=True))


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(cluster, request):
        space.nodes(NODES)
        yield space


def claim_of(space: Space, name: str) -> Json | None:
    claim = claims.claim_name(space.get(name))
    assert claim is not None, f"{name} has no claim"
    listed = space.cluster.api.get(paths.resourceclaims(space.name))["items"]
    return next((entry for entry in listed if entry["metadata"]["name"] == claim), None)


def check_claim(space: Space, name: str) -> str:
    """Pod and claim say the same. Returns the node."""
    node, _ = space.placed(name)
    claim, pod = claim_of(space, name), space.get(name)
    assert claim is not None
    allocation = claims.decode(claim)
    assert allocation is not None
    assert (allocation.node, allocation.pod_uid) == (node, pod["metadata"]["uid"])
    assert allocation.assignment == assigned(pod)
    return node


def used(space: Space) -> dict[tuple[str, int], int]:
    return {card: mib for card, (_, mib, _) in inspect(space.cluster).items() if card[0] in space.own_nodes}


def waits(space: Space, name: str) -> bool:
    """Whether the extender says why the pod waits."""
    return "FailedScheduling" in space.reasons(name)


def test_pods_get_exact_amounts_until_the_cards_are_full_and_the_next_waits_for_an_end(space):
    count = 2 * CARDS * NODES
    for i in range(count):
        space.create(workload(f"p{i}", gpu_mem=HALF))
    for i in range(count):
        check_claim(space, f"p{i}")
    assert set(used(space).values()) == {P100}
    space.create(workload("late", gpu_mem=HALF))
    space.wait(lambda: waits(space, "late"), "an event says why the pod waits")
    assert space.get("late")["spec"].get("schedulingGates"), "its gate is closed: no scheduler tries it"
    freed = check_claim(space, "p3")
    space.delete("p3", grace=1)
    assert space.placed("late")[0] == freed
    assert set(used(space).values()) == {P100}


def test_several_containers_and_whole_gpus(space):
    space.create(workload("pair", [container("a", gpu_mem=1000), container("b", gpu_mem=2000)]))
    space.create(workload("whole", whole_gpu=2))
    check_claim(space, "pair")
    check_claim(space, "whole")
    assert sorted(used(space).values()) == [0, 3000, P100, P100]
    claim = claim_of(space, "pair")
    assert claim is not None
    assert [request["name"] for request in claim["spec"]["devices"]["requests"]] == ["a", "b"]


def test_a_node_that_kube_scheduler_refuses_is_avoided(space):
    """The extender does not know host ports."""
    ports = [{"containerPort": 80, "hostPort": 31_888}]
    for i in range(NODES):
        pod = workload(f"p{i}", gpu_mem=1000)
        pod["spec"]["containers"][0]["ports"] = ports
        space.create(pod)
    assert {check_claim(space, f"p{i}") for i in range(NODES)} == set(space.own_nodes)
    pod = workload("third", gpu_mem=1000)
    pod["spec"]["containers"][0]["ports"] = ports
    space.create(pod)
    space.wait(lambda: "kube-scheduler refused" in space.reasons("third"), "an event says why the pod waits")
    assert not space.get("third")["spec"].get("nodeName")
    space.delete("p1", grace=1)
    check_claim(space, "third")


def test_a_pod_that_may_preempt_for_cpu_evicts_nobody_on_another_node(space):
    """The cpu of its node is taken between the plan and kube-scheduler's try."""
    prioritize(space.cluster, {"low": -10, "high": 10})
    scheduler = space.cluster.process("kube-scheduler")
    space.create(workload("first", spec={"priorityClassName": "low", "nodeName": space.own_nodes[0]}))
    space.running("first")  # a pod of lower priority is known
    # Its next start lists all pods first: a paused one reads of the open gate before the hog, and may bind in between.
    scheduler.kill()
    try:
        linux = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [linux]}}
        high = {"priorityClassName": "high", "affinity": {"nodeAffinity": required}}
        space.create(with_cpus(workload("p", gpu_mem=1000, spec=high), CPUS // 2))
        space.wait(lambda: not space.get("p")["spec"].get("schedulingGates"), "its gate is open")
        node = claims.decode(claim_of(space, "p")).node
        low = {"priorityClassName": "low", "nodeName": node}
        space.create(with_cpus(workload("hog", spec=low), CPUS - 1))
        space.running("hog")
    finally:
        scheduler.restart()
    assert check_claim(space, "p") == node, "the node of its victim"
    assert "hog" not in [pod["metadata"]["name"] for pod in space.pods()]


def with_cpus(pod: Json, cpus: int) -> Json:
    for requested in pod["spec"]["containers"]:
        requested["resources"].setdefault("requests", {})["cpu"] = str(cpus)
    return pod


def test_the_claim_of_an_ended_pod_goes(space):
    space.create(workload("p", gpu_mem=1000))
    check_claim(space, "p")
    space.delete("p", grace=1)
    space.wait(lambda: not space.cluster.api.get(paths.resourceclaims(space.name))["items"], "the claim is gone")
    space.wait(lambda: not any(used(space).values()), "its share is free")


def test_a_claim_that_its_pod_leaves_behind_goes_too(space):
    space.create(workload("p", gpu_mem=1000))
    check_claim(space, "p")
    space.kubectl("delete", "pod", "p", "--cascade=orphan", "--grace-period=1", "--wait=false")
    space.wait(lambda: not space.cluster.api.get(paths.resourceclaims(space.name))["items"], "the claim is gone")
    space.wait(lambda: not any(used(space).values()), "its share is free")


def gang_pod(name: str, mem: int, size: int, gang: str = "g", **settings: object) -> Json:
    annotations = {names.GROUP_NAME: gang, names.GROUP_NUM: str(size)}
    return workload(name, gpu_mem=mem, annotations=annotations, **settings)


def test_a_gang_comes_as_a_whole_or_not_at_all(space):
    size = CARDS * NODES
    for i in range(size - 1):
        space.create(gang_pod(f"m{i}", P100, size))
    space.create(workload("alone", gpu_mem=1000))
    check_claim(space, "alone")
    space.create(gang_pod(f"m{size - 1}", P100, size))
    space.wait(lambda: any(waits(space, f"m{i}") for i in range(size)), "the gang does not fit beside the pod")
    assert all(space.get(f"m{i}")["spec"].get("schedulingGates") for i in range(size))
    assert len(space.cluster.api.get(paths.resourceclaims(space.name))["items"]) == 1
    space.delete("alone", grace=1)
    for i in range(size):
        check_claim(space, f"m{i}")
    assert set(used(space).values()) == {P100}


def test_kills_of_the_leader_while_pods_come_give_no_gpu_twice(space):
    """The extender is killed again and again while it publishes: what was begun is finished or taken back."""
    extender = space.cluster.process("extender")
    count = 2 * CARDS * NODES
    for round_ in range(4):
        for i in range(2 * round_, 2 * round_ + 2):
            space.create(workload(f"p{i}", gpu_mem=HALF))
        extender.kill()
        extender.restart()
    for i in range(count):
        check_claim(space, f"p{i}")
    by_card: dict[str, int] = {}
    for pod in space.pods():
        for share in assigned(pod).shares():
            by_card[share.uuid] = by_card.get(share.uuid, 0) + share.mem
    assert set(by_card.values()) == {P100}
    with contextlib.suppress(AssertionError):
        space.wait(lambda: set(used(space).values()) == {P100}, "the new leader knows all shares")


def test_a_pod_without_a_gpu_is_not_touched(space):
    space.create(workload("plain"))
    space.placed("plain")
    assert "resourceClaims" not in space.get("plain")["spec"]
