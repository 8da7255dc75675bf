"""The amounts that pods use of a node, as kube-scheduler counts them, and the free amounts."""

import json

import pytest

from cardwise.core.api import names
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import Load
from cardwise.kube.objects.pods import spec_of
from cardwise.kube.pods import loads
from extender.cache.nodeload import STEADY_SECONDS, NodeLoads
from extender.records import nodeinfo, podinfo
from extender.records.nodeinfo import NodeRecord, PlacedPod
from extender.records.podinfo import PodRecord

GIB = 1 << 30


def asks(cpu=None, memory=None, **fields):
    amounts = {name: amount for name, amount in (("cpu", cpu), ("memory", memory)) if amount}
    return {"resources": {"requests": amounts}} | fields


@pytest.mark.parametrize(
    ("spec", "load"),
    [
        ({"containers": [asks("250m", "1Gi"), asks("1", "512Mi")]}, Load(1250, GIB * 3 // 2, 1)),
        ({"containers": [{}]}, Load(0, 0, 1)),
        ({"containers": [asks("1")], "initContainers": [asks("3"), asks("2")]}, Load(3000, 0, 1)),
        ({"containers": [asks("2")], "initContainers": [asks("1", restartPolicy="Always")]}, Load(3000, 0, 1)),
        (
            {"containers": [asks("1")], "initContainers": [asks("1", restartPolicy="Always"), asks("3")]},
            Load(4000, 0, 1),
        ),
        ({"containers": [asks("1")], "overhead": {"cpu": "100m", "memory": "64Mi"}}, Load(1100, 64 << 20, 1)),
        ({"containers": [asks("1")], "resources": {"requests": {"cpu": "4"}}}, Load(4000, 0, 1)),
        ({"containers": [asks("0.0001", "100m")]}, Load(1, 1, 1)),
    ],
)
def test_what_a_pod_takes(spec, load):
    assert loads.load_of_pod(spec_of(spec)) == load


CONTAINERS = [asks("1", "1Gi", name="a"), asks("2", "1Gi", name="b")]


def has(name, allocated, runs=None):
    status = {"name": name, "allocatedResources": {"cpu": allocated, "memory": "1Gi"}}
    return status | ({"resources": {"requests": {"cpu": runs, "memory": "1Gi"}}} if runs else {})


def condition_record(kind, reason=""):
    return [{"type": f"PodResize{kind}", "status": "True", "reason": reason}]


@pytest.mark.parametrize(
    ("spec", "status", "cpu"),
    [
        pytest.param({}, {"containerStatuses": [has("a", "9")]}, 3, id="nothing is resized"),
        pytest.param({}, {"conditions": condition_record("InProgress")}, 3, id="nothing is known of it"),
        pytest.param(
            {},
            {"conditions": condition_record("Pending", "Deferred"), "containerStatuses": [has("a", "500m")]},
            3,
            id="up",
        ),
        pytest.param(
            {}, {"conditions": condition_record("InProgress"), "containerStatuses": [has("a", "4")]}, 6, id="down"
        ),
        pytest.param(
            {},
            {"conditions": condition_record("InProgress"), "containerStatuses": [has("a", "1", "5")]},
            7,
            id="still runs",
        ),
        pytest.param(
            {},
            {
                "conditions": condition_record("Pending", "Infeasible"),
                "containerStatuses": [has("a", "0.5"), has("b", "1", "0.5")],
            },
            1.5,
            id="never",
        ),
        pytest.param(
            {},
            {"conditions": condition_record("Pending", "Infeasible"), "containerStatuses": [has("a", "2")]},
            2,
            id="b: no",
        ),
        pytest.param(
            {"initContainers": [asks("4", name="i", restartPolicy="Always")]},
            {"conditions": condition_record("InProgress"), "initContainerStatuses": [has("i", "6")]},
            9,
            id="sidecar",
        ),
        pytest.param(
            {"resources": {"requests": {"cpu": "4"}}},
            {
                "conditions": condition_record("InProgress"),
                "resources": {"requests": {"cpu": "8"}},
                "allocatedResources": {"cpu": "6"},
            },
            8,
            id="the pod as a whole",
        ),
        pytest.param(
            {"resources": {"requests": {"cpu": "40"}}},
            {
                "conditions": condition_record("Pending", "Infeasible"),
                "resources": {},
                "allocatedResources": {"cpu": "6"},
            },
            6,
            id="the pod as a whole, never",
        ),
        pytest.param(
            {"resources": {"requests": {"cpu": "4"}}},
            {"conditions": condition_record("InProgress")},
            4,
            id="an older kubelet",
        ),
    ],
)
@pytest.mark.parametrize("signs", [{}, {names.IDX: "0"}], ids=["other", "ours"])
def test_a_pod_that_is_resized_takes_what_it_has_or_will_have(spec, status, cpu, signs):
    pod = {
        "metadata": {"name": "x", "namespace": "d", "uid": "u", "annotations": signs},
        "spec": {"nodeName": "n", "containers": CONTAINERS} | spec,
        "status": {"phase": "Running"} | status,
    }
    _, record = podinfo.decode_pod(json.dumps(pod).encode())
    assert record.load.cpu == cpu * 1000


def test_a_node_has_what_it_may_allocate():
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "63500m", "memory": "1Gi", "pods": "110"}}}
    assert nodeinfo.decode_node(json.dumps(node).encode()) == ("n", NodeRecord(Load(63_500, GIB, 110)))
    node["spec"] = {"unschedulable": True}
    assert not nodeinfo.decode_node(json.dumps(node).encode())[1].schedulable
    del node["status"]
    assert nodeinfo.decode_node(json.dumps(node).encode())[1].allocatable is None


def test_what_is_left_follows_pods_and_plans():
    loads = NodeLoads()
    loads.set_node("n", NodeRecord(Load(4000, 8 * GIB, 10)), 0.0)
    loads.set_pod("a", PlacedPod("n", Load(1000, GIB, 1)))
    loads.plan_pod("b", PlacedPod("n", Load(2000, GIB, 1)))
    assert loads.free_load("n") == Load(1000, 6 * GIB, 8)
    loads.plan_pod("a", PlacedPod("n", Load(9, 9, 1)))
    assert loads.free_load("n") == Load(1000, 6 * GIB, 8), "who is there is not planned"
    loads.set_pod("b", PlacedPod("n", Load(2000, GIB, 1)))
    loads.unplan_pods(["a", "b"])
    assert loads.free_load("n") == Load(1000, 6 * GIB, 8), "what was planned is there by now"
    before = loads.freed_count
    loads.remove_pod("a")
    assert loads.freed_count > before
    loads.remove_pod("b")
    assert loads.free_load("n") == Load(4000, 8 * GIB, 10)
    loads.remove_node("n")
    assert loads.free_load("n") is None


def test_a_node_without_slots_offers_nothing():
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "4", names.SHARE: "0"}}}
    name, record = nodeinfo.decode_node(json.dumps(node).encode())
    loads = NodeLoads()
    loads.set_node(name, record, 0.0)
    assert not loads.offers_shares("n")
    assert list(loads.open_nodes()) == []
    node["status"]["allocatable"][names.SHARE] = "512"
    loads.set_node(*nodeinfo.decode_node(json.dumps(node).encode()), 0.0)
    loads.reopen_steady_nodes(STEADY_SECONDS)
    assert loads.offers_shares("n")
    assert list(loads.open_nodes()) == ["n"]
    assert loads.offers_shares("never seen")


def victim(node: str, priority: int, **flags: bool) -> PodRecord:
    """A pod that holds cards."""
    return PodRecord(node, uid="u", priority=priority, assignment=Assignment({}), **flags)


def test_only_nodes_on_which_a_pod_of_lower_priority_could_be_evicted_from_cards_have_victims():
    loads, nodes = NodeLoads(), {"n1", "n2", "n3"}
    assert loads.nodes_with_victims(nodes, 10) == set()
    loads.set_pod("a", victim("n1", 5))
    loads.set_pod("b", victim("n2", 10))
    loads.set_pod("c", PlacedPod("n3", priority=5))
    assert loads.nodes_with_victims(nodes, 10) == {"n1"}
    assert loads.nodes_with_victims(nodes, 11) == {"n1", "n2"}
    assert loads.nodes_with_victims(nodes, 5) == set()
    assert [loads.has_victims(priority) for priority in (5, 6)] == [False, True]


@pytest.mark.parametrize("flag", ["terminating", "fixed", "grouped"])
def test_a_pod_that_cannot_be_evicted_any_more_is_no_victim(flag):
    loads = NodeLoads()
    loads.set_pod("a", victim("n1", 5))
    loads.set_pod("a", victim("n1", 5, **{flag: True}))
    assert loads.nodes_with_victims({"n1"}, 10) == set()
    assert loads.nodes_with_terminating_pods({"n1", "n2"}) == ({"n1"} if flag == "terminating" else set())
    loads.set_pod("a", victim("n1", 5))
    assert loads.nodes_with_victims({"n1"}, 10) == {"n1"}


def test_victims_are_counted_where_they_are_now():
    loads = NodeLoads()
    loads.set_pod("a", victim("n1", 5))
    loads.set_pod("b", victim("n1", 5))
    loads.set_pod("a", victim("n2", 5))
    loads.remove_pod("b")
    assert loads.nodes_with_victims({"n1", "n2"}, 10) == {"n2"}
    loads.remove_pod("a")
    assert loads.nodes_with_victims({"n1", "n2"}, 10) == set()
    assert not loads.has_victims(10)
