"""Which nodes count as feasible for a pod, by the scheduler's rules of labels and taints."""

from collections.abc import Callable

import pytest

from cardwise.kube.pods.nodeconstraints import NodeLabelsAndTaints
from extender.records import feasiblenodes
from extender.records.feasiblenodes import FeasibleNodes
from tests.extender.nominationcluster import World

ZONE = {"zone": "a", "size": "8"}


def required(*terms: dict) -> dict:
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return {"affinity": {"nodeAffinity": hard}}


def search(nodes: FeasibleNodes, key: bytes, meanwhile: Callable[[], object] = lambda: None) -> set[str]:
    """Search the feasible nodes and remember them; `meanwhile` is called before they are remembered."""
    open_nodes = nodes.open_nodes()
    feasible = feasiblenodes.search(key, open_nodes, lambda: None)
    meanwhile()
    return nodes.record_search(key, open_nodes, feasible)


def test_feasible_nodes_that_are_remembered_follow_changes_of_nodes():
    grounds = FeasibleNodes()
    key = feasiblenodes.constraints_key({"nodeSelector": {"zone": "a"}})
    assert grounds.feasible_nodes(key) is None
    assert search(grounds, key) == set()
    grounds.set_node("n1", NodeLabelsAndTaints(ZONE))
    grounds.set_node("n2", NodeLabelsAndTaints({"zone": "b"}))
    assert grounds.feasible_nodes(key) == {"n1"}
    grounds.set_node("n1", NodeLabelsAndTaints({"zone": "b"}))
    grounds.set_node("n2", NodeLabelsAndTaints(ZONE))
    assert grounds.feasible_nodes(key) == {"n2"}
    grounds.remove_node("n2")
    assert (grounds.feasible_nodes(key), len(grounds)) == (set(), 1)


def test_changes_of_nodes_during_a_search_count():
    nodes = FeasibleNodes()
    for name, zone in (("same", "a"), ("leaves", "a"), ("comes", "b"), ("removed", "a")):
        nodes.set_node(name, NodeLabelsAndTaints({"zone": zone}))

    def change() -> None:
        nodes.set_node("leaves", NodeLabelsAndTaints({"zone": "b"}))
        nodes.set_node("comes", NodeLabelsAndTaints({"zone": "a"}))
        nodes.set_node("added", NodeLabelsAndTaints({"zone": "a"}))
        nodes.remove_node("removed")

    key = feasiblenodes.constraints_key({"nodeSelector": {"zone": "a"}})
    assert search(nodes, key, change) == {"same", "comes", "added"} == nodes.feasible_nodes(key)


def test_nodes_of_the_least_recently_used_constraints_are_forgotten(monkeypatch):
    monkeypatch.setattr(feasiblenodes, "_MAX_REMEMBERED", 2)
    nodes = FeasibleNodes()
    a, b, c = (feasiblenodes.constraints_key({"nodeSelector": {"zone": zone}}) for zone in "abc")
    for key in (a, b, a, c, c):
        search(nodes, key)
    assert [nodes.feasible_nodes(key) for key in (a, b, c)] == [set(), None, set()]


@pytest.mark.parametrize(
    "closed",
    [
        {"unschedulable": True},
        {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
        {"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]},
    ],
)
def test_a_closed_node_is_nominated_for_no_pod(closed):
    world = World("n2")
    world.node("n1", **closed)
    for name in ("a", "b"):
        world.create(name, 16_000)
    assert world.nominate_all() == {"a": "n2"}
    world.node("n1")
    world.create("c", 16_000)
    assert world.nominate_all() == {"c": "n1"}


def test_a_taint_without_an_effect_does_not_matter():
    world = World("n2")
    world.node("n1", taints=[{"key": "gpu", "effect": "PreferNoSchedule"}])
    for name in ("a", "b"):
        world.create(name, 16_000)
    assert sorted(world.nominate_all().values()) == ["n1", "n2"]


def test_a_pod_is_named_a_node_that_it_may_be_on():
    world = World("n1")
    world.node("n2", labels={"zone": "b"})
    world.create("p", 100, nodeSelector={"zone": "b"})
    world.create("nowhere", 100, nodeSelector={"zone": "c"})
    assert world.nominate_all() == {"p": "n2"}


def test_a_pod_that_asks_too_much_of_its_node_goes_the_ordinary_way():
    """Each condition is compared with thousands of nodes: with ten thousand conditions this takes 14 s."""
    world = World("n1")
    expressions = [{"key": f"k{i}", "operator": "DoesNotExist"} for i in range(100)]
    for name, conditions in (("few", expressions[:10]), ("many", expressions)):
        world.create(name, 100, **required({"matchExpressions": conditions}))
    world.create("selects", 100, nodeSelector={"k" * 1024: "v"})
    assert world.nominate_all() == {"few": "n1"}
    assert world.filter("many") == ["n1"]


def test_after_a_pod_that_was_dear_others_have_the_state_for_longer(monkeypatch):
    world = World("n1")
    world.create("a", 100)
    world.create("b", 100)
    search = feasiblenodes.search
    monkeypatch.setattr(feasiblenodes, "search", lambda *of: (setattr(world.clock, "worked", 0.03), search(*of))[1])
    again, nominee = world.state.nominator.nominate_next_pod()
    assert (again, nominee.pod.name) == (True, "a")
    assert world.state.nominator.nominate_next_pod() == (False, None)
    world.clock.advance(0.3)
    assert world.state.nominator.nominate_next_pod().nominee.pod.name == "b"
