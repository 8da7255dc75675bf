"""The lock is held for a short time only, however many pods are nominated on other nodes or by another extender."""

from typing import Any

import pytest

from cardwise.core.api.request import Load
from cardwise.core.placement.nodestate import NodeState
from extender.cache.nominated import NominatedPods
from extender.placing import nodesearch
from extender.preemption import preemption
from extender.records.nodeinfo import PlacedPod
from tests.extender.gangcluster import NodeSpec, single
from tests.extender.preemption.test_gangpreemption import HIGH, LOW, Full, gang


def nominate_elsewhere(world: Full, count: int) -> None:
    """Pods of higher priority are nominated on nodes of their own, by another extender."""
    for i in range(count):
        world.create(single(f"other{i}", created=9, priority=HIGH + 1, whole_gpu=1))
        world.nominated(f"other{i}", f"x{i}")


@pytest.fixture
def searches(monkeypatch):
    """A world, and for each search for unknown cards the node and whether the lock was held."""
    searches: list[tuple[str, bool]] = []
    place_after_termination = NominatedPods.place_after_termination

    def search(self: NominatedPods, claimant: Any, policy: str, node: str, *args: Any) -> Any:
        searches.append((node, world.state._lock._lock.locked()))
        return place_after_termination(self, claimant, policy, node, *args)

    monkeypatch.setattr(NominatedPods, "place_after_termination", search)
    world = full_node()
    return world, searches


def full_node() -> Full:
    """Two pods are nominated to n1 by another extender: one gets the card of a pod that terminates, and none is left
    for the other.
    """
    world = Full(n1=[LOW, LOW], n2=[LOW, LOW])
    for i in range(2):
        world.create(single(f"other{i}", created=9, priority=HIGH + 1, whole_gpu=1 + i))
        world.nominated(f"other{i}", "n1")
    world.terminate("n1-0")
    world.create(single("p", created=1, priority=HIGH, whole_gpu=1))
    return world


def find_unknown_cards(world: Full) -> None:
    world.state.preemption.find_unknown_cards({"n1", "n2"}, lambda: False)


def test_unknown_cards_are_found_without_the_lock(searches):
    world, log = searches
    find_unknown_cards(world)
    assert log == [("n1", False), ("n1", False)]
    with world.state._lock:
        assert [reserved.holding.uid for reserved in world.state._nominated.reservations_on(("n1",), (), LOW)] == [
            "uid-other0@n1"
        ]
    assert len(log) == 2, "what was found is kept, and also that nothing was found"


def test_before_victims_are_searched_unknown_cards_are_found_without_the_lock(searches):
    world, log = searches
    world.only = ["n1", "n2"]
    assert world.filter("p")[0] == []
    world.only = []
    world.state.forget_plans()  # makes the cards of all nominated pods unknown
    world.filter("p")
    log.clear()
    world.asks("p")
    assert log
    assert not any(locked for _, locked in log)


@pytest.fixture
def pods_on_other_nodes(searches):
    """The world of `searches`, in which 4 more pods are nominated, on nodes of their own."""
    world, log = searches
    for i in range(4):
        world.add_node(f"x{i}", NodeSpec(2))
        world.create(single(f"elsewhere{i}", created=9, priority=HIGH + 1, whole_gpu=1))
        world.nominated(f"elsewhere{i}", f"x{i}")
    world.only = ["n1", "n2", *(f"x{i}" for i in range(4))]
    return world, log


def test_before_nodes_are_searched_for_several_requests_unknown_cards_are_found_without_the_lock(
    pods_on_other_nodes, monkeypatch
):
    world, log = pods_on_other_nodes
    monkeypatch.setattr(nodesearch, "SMALL_SEARCH_NODES", 2)
    world.create(single("several", created=1, priority=HIGH, whole_gpu=1))
    container = world.pods["several"]["spec"]["containers"][0]
    world.pods["several"]["spec"]["containers"] = [container | {"name": name} for name in ("a", "b")]
    assert world.filter("several")[0] == []
    assert {node for node, _ in log} == {"n1", "x0", "x1", "x2", "x3"}
    assert not any(locked for _, locked in log)


def test_only_few_unknown_cards_are_found_under_the_lock(pods_on_other_nodes):
    world, log = pods_on_other_nodes
    nodes, _ = world.filter("p")
    assert nodes[0] in {f"x{i}" for i in range(4)}
    assert [locked for _, locked in log] == [True] * 3 + [False] * 3


def test_cards_that_were_not_found_are_searched_again_once_the_node_has_changed(searches):
    world, log = searches
    find_unknown_cards(world)
    find_unknown_cards(world)
    assert len(log) == 2
    world.state.set_pod_without_request("o", PlacedPod("n2", Load(1, 0, 1)))
    find_unknown_cards(world)
    assert len(log) == 2, "another node"
    world.terminate("n1-1")
    find_unknown_cards(world)
    assert len(log) == 3
    assert world.state._nominated.nodes_with_unknown_cards() == []


def test_cards_that_were_not_found_are_searched_again_once_the_node_has_other_victims(searches):
    """The victims of another nominated pod count as gone."""
    world, log = searches
    find_unknown_cards(world)
    nomination = world.state._cache.nominations.get("uid-other0")
    place = preemption.NominatedPlace(nomination.places["n1"].assignment, ("uid-n1-1",))
    with world.state._lock:
        world.state._cache.nominations.set_own_place(nomination.claimant, "n1", place, world.clock.now())
    find_unknown_cards(world)
    assert len(log) == 3


def test_cards_that_were_found_before_the_leader_changed_are_forgotten(searches):
    world, log = searches
    before_each_search = iter([lambda: None, world.state.forget_plans])
    world.state.preemption.find_unknown_cards(["n1"], lambda: bool(next(before_each_search)()))
    assert len(log) == 2
    assert world.state._nominated.nodes_with_unknown_cards() == ["n1"]
    assert {world.state._cache.nominations.get(f"uid-other{i}").places["n1"].searched_on for i in range(2)} == {None}


def test_a_search_for_unknown_cards_ends_in_time(searches):
    world, log = searches
    answers = iter([False, True])
    world.state.preemption.find_unknown_cards(["n1"], lambda: next(answers))
    assert len(log) == 1
    find_unknown_cards(world)
    assert len(log) == 2


def test_victims_of_a_gang_are_checked_without_counting_what_is_reserved_on_other_nodes(monkeypatch):
    """Under the lock."""
    counts = []
    for nominated in (2, 20):
        world = Full(n1=[LOW], n2=[None], **{f"x{i}": [LOW] for i in range(nominated)})
        nominate_elsewhere(world, nominated)
        world.state.warm_caches()
        for i in range(nominated):
            world.terminate(f"x{i}-0")
        world.state.expire_reservations()
        assert len(world.state._cache.nominations.victim_nodes_by_uid()) == nominated
        gang(world, 2)
        changes: list[str] = []

        def count_changes(changes: list[str] = changes, world: Full = world) -> None:
            method = NodeState.apply_card_use

            def counted(node: NodeState, *change: object) -> int:
                if world.state._lock._lock.locked():
                    changes.append(node.name)
                return method(node, *change)

            monkeypatch.setattr(NodeState, "apply_card_use", counted)

        assert world.filter("g0")[0] == []
        world.on_step(
            lambda step, world=world: world.state.set_pod_without_request(f"o{step}", PlacedPod("n2", Load(1, 0, 1)))
        )
        victims = world.asks("g0", before=count_changes)
        monkeypatch.undo()
        assert victims == {"n1": ["n1-0"]}
        counts.append(len(changes))
    assert counts[0] == counts[1] > 0


def test_cards_that_become_known_otherwise_during_the_search_are_kept(searches):
    world, _ = searches
    find_unknown_cards(world)
    nominations = world.state._cache.nominations
    known = preemption.NominatedPlace(nominations.get("uid-other0").places["n1"].assignment, ("uid-n1-1",))
    world.state.forget_plans()

    def answer() -> bool:
        """This extender answers preempt for the pod."""
        nominations.set_own_place(nominations.get("uid-other1").claimant, "n1", known, 0.0)
        return False

    world.state.preemption.find_unknown_cards(["n1"], answer)
    assert nominations.get("uid-other1").places["n1"] is known
