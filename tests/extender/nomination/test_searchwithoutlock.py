"""Nominations for which all nodes are compared: on a snapshot, without the lock. The cluster may change meanwhile."""

import pytest

from cardwise.kube.pods.nodeconstraints import NodeConstraints, NodeLabelsAndTaints
from extender.nomination import nominator
from tests.build import P100
from tests.extender.nominationcluster import World
from tests.extender.states import bound

HALF = P100 // 2


class SearchWorld(World):
    """A world in which the pod "p" is nominated, and `meanwhile` is called once while nodes are compared with it.

    locked: for each node that was compared, whether the lock was held.
    """

    def __init__(self, *nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(*nodes)
        self.locked: list[bool] = []
        self.meanwhile = lambda: None
        admits = NodeConstraints.admits

        def observed(constraints: NodeConstraints, name: str, labels: NodeLabelsAndTaints) -> bool:
            self.locked.append(self.state._lock._lock.locked())
            if not self.locked[-1]:
                meanwhile, self.meanwhile = self.meanwhile, lambda: None
                meanwhile()
            return admits(constraints, name, labels)

        monkeypatch.setattr(NodeConstraints, "admits", observed)
        self.create("p", HALF)


def test_new_constraints_are_compared_without_the_lock(monkeypatch):
    world = SearchWorld("n1", "n2", "n3", monkeypatch=monkeypatch)
    assert world.nominate_all() == {"p": "n1"}
    assert world.locked == [False] * 3


def test_the_cpu_of_all_nodes_is_compared_without_the_lock(monkeypatch):
    nodes = [f"n{i}" for i in range(10)]
    world = World(*nodes)
    for node in nodes[:9]:
        world.full(node)
        world.show_pod(bound(f"on-{node}", HALF, 0, node=node))  # binpack prefers these nodes
    has_load, compared = nominator._has_free_load_for, []

    def observed(loads, node, load):
        compared.append((node, loads is world.state._cache.loads, world.state._lock._lock.locked()))
        return has_load(loads, node, load)

    world.create("known", 100)
    assert world.nominate_all() == {"known": "n0"}, "requests no cpu; the constraints are remembered from now on"
    monkeypatch.setattr(nominator, "_has_free_load_for", observed)
    world.create("p", 100, cpu="1")
    assert world.nominate_all() == {"p": "n9"}
    assert [node for node, live, _ in compared if live] == ["n0", "n1", "n2", "n3", "n9"]
    assert {node for node, live, locked in compared if not live and not locked} == set(nodes)
    assert all(locked is live for _, live, locked in compared)


def test_a_pod_that_was_deleted_during_the_search_is_not_nominated(monkeypatch):
    world = SearchWorld("n1", monkeypatch=monkeypatch)
    world.meanwhile = lambda: world.state.remove_pod(world.record("p"))
    assert world.nominate_all() == {}
    assert world.reserved() == {}


def test_a_pod_for_which_filter_was_called_during_the_search_is_not_nominated(monkeypatch):
    world = SearchWorld("n1", "n2", monkeypatch=monkeypatch)
    world.meanwhile = lambda: world.filter("p", "n2")
    assert world.nominate_all() == {}
    assert world.reserved() == {"p": "n2"}


def test_a_pod_that_filter_refused_during_the_search_is_not_nominated(monkeypatch):
    world = SearchWorld("n1", "n2", monkeypatch=monkeypatch)
    world.meanwhile = lambda: world.filter("p", "unknown")
    assert world.nominate_all() == {}
    assert world.reserved() == {}


def test_a_pod_that_has_changed_during_the_search_is_not_nominated(monkeypatch):
    """The node is written only if the pod still has the resourceVersion that was read."""
    world = SearchWorld("n1", monkeypatch=monkeypatch)
    pod = world.pods["p"]
    changed = pod | {"metadata": pod["metadata"] | {"resourceVersion": "8"}}
    world.meanwhile = lambda: world.show_pod(changed)
    assert world.nominate_all() == {}
    assert world.reserved() == {}


def test_an_extender_that_no_longer_leads_nominates_no_pod(monkeypatch):
    world = SearchWorld("n1", monkeypatch=monkeypatch)
    world.meanwhile = world.state.forget_plans
    assert world.nominate_all() == {}
    assert world.reserved() == {}


@pytest.mark.parametrize("change", ["label", "cordon", "remove", "cpu", "card"])
def test_a_node_that_became_unsuitable_during_the_search_is_not_chosen(change, monkeypatch):
    world = SearchWorld("n2", monkeypatch=monkeypatch)
    world.node("n1", labels={"zone": "a"})
    world.node("n2", labels={"zone": "a"})
    world.create("p", HALF, cpu="1", nodeSelector={"zone": "a"})
    world.meanwhile = {
        "label": lambda: world.node("n1", labels={"zone": "b"}),
        "cordon": lambda: world.node("n1", labels={"zone": "a"}, unschedulable=True),
        "remove": lambda: world.state.remove_node("n1"),
        "cpu": lambda: world.full("n1"),
        "card": lambda: world.show_pod(bound("on-n1", P100, 0, node="n1")),
    }[change]
    assert world.nominate_all() == {"p": "n2"}


def test_a_node_that_became_suitable_during_the_search_counts_for_the_next_pod(monkeypatch):
    world = SearchWorld("n1", "n2", monkeypatch=monkeypatch)
    world.create("p", HALF, nodeSelector={"zone": "a"})
    world.meanwhile = lambda: world.node("n2", labels={"zone": "a"})
    assert world.nominate_all() == {}
    world.create("next", HALF, nodeSelector={"zone": "a"})
    assert world.nominate_all() == {"next": "n2"}
