"""Nominating ahead of the real kube-scheduler. It is away while pods come: so it is certain who is nominated where."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cardwise.core.values.decoded import Json
from cardwise.kube import paths
from tests.build import P100
from tests.cluster import Cluster
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, inspect, program, workload

pytestmark = [pytest.mark.cluster("sim")]

HALF = P100 // 2
NODES, CARDS = 2, 2
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(scope="module")
def nominating(cluster: Cluster) -> Iterator[Cluster]:
    first = {"metadata": {"name": "first"}, "value": 1000}
    meek = {"metadata": {"name": "meek"}, "value": 0, "preemptionPolicy": "Never"}
    calm = {"metadata": {"name": "calm"}, "value": 5000, "preemptionPolicy": "Never"}
    with program(cluster, "extender", "tests.cluster.nominatingextender", "0"):
        for priority in (first, meek, calm):
            cluster.api.create(PRIORITIES, priority)
        yield cluster
        for name in ("first", "meek", "calm"):
            cluster.api.delete(f"{PRIORITIES}/{name}")


@pytest.fixture
def space(nominating: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    for space in spaces(nominating, request):
        space.nodes(NODES)
        # Nobody is nominated before a scheduler has asked.
        space.create_and_locate(workload("first", gpu_mem=100))
        space.delete("first", grace=1)  # its node says that it has ended; else its share would be kept for a while
        space.wait(lambda: all(not used for _, used, _ in inspect(nominating).values()), "nothing is held any more")
        yield space


def the_nodes(space: Space) -> list[str]:
    return [f"{space.name}-{i:02}" for i in range(NODES)]


@contextmanager
def without_scheduler(cluster: Cluster) -> Iterator[None]:
    scheduler = cluster.process("kube-scheduler")
    scheduler.stop()
    try:
        yield
    finally:
        scheduler.restart()


def nominated(space: Space, name: str) -> str:
    return str(space.get(name)["status"].get("nominatedNodeName", ""))


def nominate(space: Space, *pods: Json) -> dict[str, str]:
    """The pods are there and waiting; the node by pod, once all are nominated."""
    called = [pod["metadata"]["name"] for pod in pods]
    for pod in pods:
        space.create(pod)
    space.wait(lambda: all(nominated(space, name) for name in called), f"{called} are nominated")
    return {name: nominated(space, name) for name in called}


def refused(space: Space, name: str) -> bool:
    conditions = space.get(name)["status"].get("conditions") or []
    return any(
        condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable" for condition in conditions
    )


def test_pods_land_where_they_were_nominated_and_no_room_is_given_twice(cluster, space):
    with without_scheduler(cluster):
        nodes_of_pods = nominate(space, *[workload(f"p{i}", gpu_mem=HALF) for i in range(2 * CARDS * NODES)])
        assert sorted(nodes_of_pods.values()) == [node for node in the_nodes(space) for _ in range(2 * CARDS)]
        space.create(workload("late", gpu_mem=HALF))
    for name, node in nodes_of_pods.items():
        assert space.placed(name)[0] == node
    assert {used for _, used, _ in inspect(cluster).values()} == {P100}
    space.wait(lambda: refused(space, "late"), "the one without room waits")
    assert nominated(space, "late") == ""


def test_a_name_that_nothing_is_held_for_is_taken_back(cluster, space):
    """Or kube-scheduler would count the pod there for as long as it waits, where it may evict nobody for ever."""
    with without_scheduler(cluster):
        nominate(space, workload("ours", gpu_mem=HALF, spec={"priorityClassName": "meek"}))
        space.create(workload("others", gpu_mem=HALF, spec={"hostNetwork": True}))  # such go the ordinary way
        change = {"status": {"nominatedNodeName": the_nodes(space)[0]}}
        cluster.api.patch(paths.pods(space.name, "others", "status"), change)
        cluster.process("extender").restart()  # what it held ahead ends
        space.wait(lambda: not nominated(space, "ours"), "the name of its time before is taken back")
        assert nominated(space, "others") == the_nodes(space)[0], "what others name is theirs"
    for name in ("ours", "others"):
        space.placed(name)


def test_a_pod_of_higher_priority_gets_what_others_hold_ahead_and_nobody_is_evicted(cluster, space):
    with without_scheduler(cluster):
        low = nominate(space, *[workload(f"low{i}", gpu_mem=P100) for i in range(CARDS * NODES)])
        space.create(workload("high", gpu_mem=P100, spec={"priorityClassName": "first"}))
    space.placed("high")

    def all_nominated() -> bool:
        pods = [space.get(name) for name in low]
        return sum(bool(pod["spec"].get("nodeName")) for pod in pods) == len(low) - 1 and any(
            refused(space, name) for name in low
        )

    space.wait(all_nominated, "one of the others waits")
    assert all(not pod["metadata"].get("deletionTimestamp") for pod in space.pods())
    assert len(space.pods()) == len(low) + 1
