"""Which nodes count as feasible for a pod, by the scheduler's rules of labels and taints."""

import pytest

from cardwise.kube.pods.nodeconstraints import NodeLabels
from extender.records import feasiblenodes
from extender.records.feasiblenodes import FeasibleNodes
from tests.extender.nominationworlds import World

ZONE = {"zone": "a", "size": "8"}


def required(*terms: dict) -> dict:
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return {"affinity": {"nodeAffinity": hard}}


def test_what_was_asked_once_is_kept_true():
    grounds = FeasibleNodes()
    key = feasiblenodes.constraints_key({"nodeSelector": {"zone": "a"}})
    assert grounds.feasible_nodes(key) == set()
    grounds.set_node("n1", NodeLabels(ZONE))
    grounds.set_node("n2", NodeLabels({"zone": "b"}))
    assert grounds.feasible_nodes(key) == {"n1"}
    grounds.set_node("n1", NodeLabels({"zone": "b"}))
    grounds.set_node("n2", NodeLabels(ZONE))
    assert grounds.feasible_nodes(key) == {"n2"}
    grounds.remove_node("n2")
    assert (grounds.feasible_nodes(key), len(grounds)) == (set(), 1)


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
    """What it asks is asked of thousands of nodes under the state's lock: with ten thousand conditions for 14 s."""
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
    allowed = FeasibleNodes.feasible_nodes
    monkeypatch.setattr(
        FeasibleNodes, "feasible_nodes", lambda *of: (setattr(world.clock, "worked", 0.03), allowed(*of))[1]
    )
    again, nominee = world.state.nominator.nominate_next()
    assert (again, nominee.pod.name) == (True, "a")
    assert world.state.nominator.nominate_next() == (False, None)
    world.clock.advance(0.3)
    assert world.state.nominator.nominate_next()[1].pod.name == "b"
