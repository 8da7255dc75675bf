"""Preemption where kube-scheduler's sums have capacity and no card has: the extender itself evicts.

Whole cards and shares are different resources for kube-scheduler, so for a pod of one kind it finds no victim of the
other.
"""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest

from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.request import Load
from cardwise.kube import paths
from cardwise.kube.pods.budgets import Budget, LabelCondition
from extender.cache.nominations import NominatedPlace
from extender.preemption import preemption
from extender.queue import schedulingqueue
from extender.records.nodeinfo import NodeRecord
from tests.build import P100, extended_resource, resource_class, shares
from tests.extender import gangcluster
from tests.extender.preemption.test_gangpreemption import Full, gang
from tests.extender.preemption.test_preemption import HIGH, LOW, MIDDLE, Scene, World
from tests.extender.states import as_card, as_class, as_pod, as_quota, bound, change_at_search, on_victim_search
from tests.fakes.apiserver import Fault

WHOLE = {"mem": 0, "whole_gpu": 1}
SHARE = {"mem": 9000}
SPLIT = {"mem": 18_000, "annotations": {names.GPU_COUNTS: "main=2"}}


def holds(mem: int, *cards: int, node: str = "n1") -> dict[str, str]:
    """The annotations of a pod that holds so many MiB of each of these cards; all of its MiB: the whole card."""
    held = [
        replace(share, whole=mem == P100, core=100 if mem == P100 else 0) for share in shares(mem, *cards, node=node)
    ]
    return assignment.encode(Assignment({"0": tuple(held)}), assume_time_ns=1)


class Shared(Scene):
    """Two cards, and a pod of high priority that waits. `holders`: the MiB that each pod holds of both cards."""

    def __init__(self, wanted: dict, holders: dict[str, tuple[int, int]], priority: int = LOW) -> None:
        self.begin(World(), **wanted)
        for name, held in holders.items():
            cards = [card for card, mem in enumerate(held) if mem]
            self.world.runs(name, max(held), *cards, priority=priority, annotations=holds(max(held), *cards))

    def ends(self) -> list[str]:
        """Victims end. Returns the nodes that the waiting pod gets then."""
        for name in self.evicted():
            self.world.delete_pod(name)
        return self.world.filter(self.wanted)


KINDS = {
    "a share against a pod of both cards": (SHARE, {"a": (P100, P100)}, 1),
    "a share against whole cards": (SHARE, {"a": (P100, 0), "b": (0, P100)}, 1),
    "a share against a split share": (SHARE, {"a": (9000, 9000)}, 1),
    "a whole card against shares": (WHOLE, {"a": (1000, 0), "b": (0, 1000)}, 1),
    "a whole card against a split share": (WHOLE, {"a": (1000, 1000)}, 1),
    "two whole cards against shares": (WHOLE | {"whole_gpu": 2}, {"a": (1000, 0), "b": (0, 1000)}, 2),
    "a split share against whole cards": (SPLIT, {"a": (P100, 0), "b": (0, P100)}, 2),
    "a split share against a share": (SPLIT, {"a": (9000, 0)}, 1),
    "a split share against a split share": (SPLIT, {"a": (9000, 9000)}, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_gets_the_cards_of_pods_of_lower_priority_of_any_kind(kind):
    wanted, holders, victims = KINDS[kind]
    scene = Shared(wanted, holders)
    scene.rounds(3)
    assert len(scene.evicted()) == victims
    assert scene.ends() == ["n1"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_of_the_same_priority_goes_whatever_its_kind(kind):
    wanted, holders, _ = KINDS[kind]
    scene = Shared(wanted, holders, priority=HIGH)
    scene.rounds(3)
    assert scene.evicted() == []


def test_of_pods_of_another_kind_the_one_of_the_lowest_priority_goes():
    scene = Shared(SHARE, {})
    scene.world.runs("middle", P100, 0, priority=MIDDLE, annotations=holds(P100, 0))
    scene.world.runs("low", P100, 1, priority=LOW, annotations=holds(P100, 1))
    scene.rounds(3)
    assert scene.evicted() == ["low"]


def test_a_pod_of_a_class_gets_only_a_card_of_that_class():
    scene = Shared(WHOLE | {"resource_class": "fast"}, {"slow": (1000, 0), "fast": (0, 1000)})
    scene.world.state.set_card(*as_card(extended_resource(1, labels={"speed": "high"})))
    scene.world.state.set_class(as_class(resource_class("fast", selector={"matchLabels": {"speed": "high"}})))
    scene.rounds(3)
    assert scene.evicted() == ["fast"]


def test_a_pod_gets_the_sms_of_one_card_though_both_cards_together_have_them():
    scene = Shared({"mem": 1000, "gpu_core": 60}, {})
    for card, name in enumerate(("a", "b")):
        held = Assignment({"0": shares(1000, card, core=60)})
        annotations = assignment.encode(held, assume_time_ns=1)
        scene.world.runs(name, 1000, card, annotations=annotations)
    scene.rounds(3)
    assert len(scene.evicted()) == 1
    assert scene.ends() == ["n1"]


def test_no_pod_goes_for_a_pod_that_is_over_its_quota():
    scene = Shared(WHOLE | {"namespace": "team"}, {"a": (1000, 0), "b": (0, 1000)})
    scene.world.state.set_quota(*as_quota({"gpus": 0}, namespace="team"))
    scene.rounds(3)
    assert scene.evicted() == []


def test_no_pod_goes_for_a_member_of_a_podgroup_of_kubernetes():
    """kube-scheduler starts its members together or not at all, and asks no extender who must go for all of them."""
    scene = Shared(SHARE, {"a": (P100, P100)})
    scene.wanted["spec"]["schedulingGroup"] = {"podGroupName": "group"}
    scene.world.show_pod(scene.wanted)
    scene.rounds(3)
    assert scene.evicted() == []


class Gangs(gangcluster.World):
    """Nodes of two cards. `holders`: by node the MiB that a pod of low priority holds of each card, 0: none."""

    def __init__(self, **holders: tuple[int, int]) -> None:
        super().__init__(dict.fromkeys(holders, 2))
        for node, cards in holders.items():
            for card, mem in enumerate(cards):
                if mem:
                    self.runs(f"{node}-{card}", mem, card, node)

    def runs(self, name: str, mem: int, card: int, node: str, priority: int = LOW) -> None:
        pod = bound(name, mem, card, node=node, annotations=holds(mem, card, node=node))
        pod["spec"]["priority"] = priority
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
        pod["metadata"]["labels"] = {"app": name}
        self.create(pod)

    def gang(self, size: int, *, priority: int = HIGH, **resources: int) -> None:
        members = (
            gangcluster.member(f"g{i}", "g", size, gated=False, priority=priority, created=i, **resources)
            for i in range(size)
        )
        self.create(*members)

    def evicts(self, seconds: float = 4.0) -> list[str]:
        """Victims of the next pod or gang that is due; they begin to end."""
        self.run(1)
        self.clock.advance(seconds)
        evictions = self.state.preemption.next_evictions()
        victims = sorted(victim.name for eviction in evictions for victim in eviction.victims)
        for name in victims:
            self.terminate(name)
        return victims

    def protect(self, name: str, allowed: int, *apps: str) -> None:
        conditions = (LabelCondition("app", "In", frozenset(apps)),)
        self.state.preemption.set_budget(f"default/{name}", Budget("default", allowed, conditions))


GANGS = {
    "whole cards against shares": ({"whole_gpu": 1}, 1000),
    "shares against whole cards": ({"gpu_mem": 9000}, P100),
    "shares of more than half a card against such": ({"gpu_mem": 9000}, 9000),
}


@pytest.mark.parametrize("kind", GANGS)
def test_a_gang_gets_the_cards_of_pods_of_lower_priority_of_any_kind(kind):
    """All victims go at once, one for each member that lacks a card."""
    resources, held = GANGS[kind]
    world = Gangs(n1=(held, held), n2=(held, held))
    world.gang(3, **resources)
    victims = world.evicts()
    assert len(victims) == 3
    for _ in range(3):
        assert world.evicts(20.0) == [], "the gang only has to wait"
    world.delete(*victims)
    world.run(3)
    assert world.phase() == "Running"


def test_what_is_free_is_kept_for_the_gang_while_its_victims_end():
    world = Gangs(n1=(1000, 0), n2=(1000, 1000))
    world.gang(2, whole_gpu=1)
    victims = world.evicts()
    assert len(victims) == 1
    world.create(gangcluster.single("low", created=9, priority=LOW, whole_gpu=1))
    world.run(2)
    assert "low" not in world.bound()
    world.delete(*victims)
    world.run(3)
    assert world.phase() == "Running"


def test_no_pod_goes_for_a_gang_that_would_not_be_complete():
    world = Gangs(n1=(1000, 1000))
    world.gang(3, whole_gpu=1)
    assert [world.evicts(), world.evicts(20.0)] == [[], []]


def test_no_pod_goes_for_a_gang_of_the_same_priority():
    world = Gangs(n1=(1000, 1000))
    world.gang(2, priority=LOW, whole_gpu=1)
    assert world.evicts() == []


def test_no_pod_goes_for_a_gang_that_is_over_its_quota():
    world = Gangs(n1=(1000, 1000))
    world.state.set_quota(*as_quota({"gpus": 1}))
    world.gang(2, whole_gpu=1)
    assert world.evicts() == []


def test_no_victims_are_searched_for_a_gang_that_is_over_its_quota_as_a_whole():
    """Each member alone would not be."""
    world = Gangs(n1=(1000, 1000), n2=(1000, 1000))
    searches = Mock()
    on_victim_search(world.state, searches)
    world.state.set_quota(*as_quota({"gpus": 2}))
    world.gang(3, whole_gpu=1)
    assert world.evicts() == []
    assert not searches.called
    world.state.set_quota(*as_quota({"gpus": 3}))
    assert len(world.evicts(20.0)) == 3


def test_no_pod_goes_for_a_gang_whose_members_may_not_preempt():
    world = Gangs(n1=(1000, 1000))
    world.gang(2, whole_gpu=1)
    for name in ("g0", "g1"):
        world.pods[name]["spec"]["preemptionPolicy"] = "Never"
    assert world.evicts() == []


def test_no_pod_goes_for_a_gang_if_all_victims_together_exceed_a_disruption_budget():
    """Each of them alone could go."""
    world = Gangs(n1=(1000, 1000))
    world.protect("both", 1, "n1-0", "n1-1")
    world.gang(2, whole_gpu=1)
    assert world.evicts() == []
    world.protect("both", 2, "n1-0", "n1-1")
    assert world.evicts(20.0) == ["n1-0", "n1-1"]


def test_a_gang_spares_pods_that_a_disruption_budget_protects():
    world = Gangs(n1=(1000, 1000), n2=(1000, 1000))
    world.protect("one", 0, "n1-0", "n2-1")
    world.gang(2, whole_gpu=1)
    assert world.evicts() == ["n1-1", "n2-0"]


def test_if_one_victim_of_a_gang_may_not_be_evicted_nothing_is_kept_for_it():
    world = Gangs(n1=(1000, 1000))
    world.gang(2, whole_gpu=1)
    world.run(1)
    world.clock.advance(4.0)
    evictions = world.state.preemption.next_evictions()
    assert len(evictions) == 2
    for eviction in evictions:
        world.state.preemption.on_eviction_failed(eviction, ["uid-n1-0"], 60.0)
    world.create(gangcluster.single("low", created=9, priority=LOW, gpu_mem=1000))
    world.run(2)
    assert "low" in world.bound()


@pytest.mark.parametrize("number", range(1, 5))
def test_a_gang_gets_no_victims_that_the_eviction_api_has_refused_during_the_search(number):
    world = Gangs(n1=(1000, 1000), n2=(1000, 1000))
    world.gang(2, whole_gpu=1)

    def refuse(claimant) -> None:
        eviction = preemption.Eviction(claimant, "n99", (), NominatedPlace())
        world.state.preemption.on_eviction_failed(eviction, ["uid-n1-0", "uid-n1-1"], 600.0)

    searches = change_at_search(world.state, number, refuse)
    assert {"n1-0", "n1-1"}.isdisjoint(world.evicts(20.0))
    assert len(searches) >= number


def test_an_error_while_the_evictions_of_a_gang_are_made_leaves_nothing_reserved(monkeypatch):
    world = Gangs(n1=(1000, 1000), n2=(1000, 1000))
    world.gang(2, whole_gpu=1)
    eviction_class, evictions = preemption.Eviction, []

    def make_eviction(*fields: object) -> preemption.Eviction:
        evictions.append(eviction_class(*fields))
        if len(evictions) == 2:
            raise KeyError
        return evictions[-1]

    with monkeypatch.context() as patch:
        patch.setattr(preemption, "Eviction", make_eviction)
        with pytest.raises(KeyError):
            world.evicts()
    assert {world.state._cache.nominations.get(f"uid-g{i}") for i in range(2)} == {None}
    assert len(world.evicts(20.0)) == 2


@pytest.mark.parametrize("number", range(1, 5))
def test_no_pod_is_evicted_for_a_gang_if_the_leader_changes_during_the_search(number):
    """Also if the next epoch has begun, and the members wait as before."""
    world = Gangs(n1=(1000, 1000), n2=(1000, 1000))
    world.gang(2, whole_gpu=1)

    def change(_) -> None:
        world.state.forget_plans()
        world.run(1)

    searches = change_at_search(world.state, number, change)
    assert world.evicts() == []
    assert len(searches) >= number
    assert {world.state._cache.nominations.get(f"uid-g{i}") for i in range(2)} == {None}


@pytest.mark.parametrize("end", [Gangs.delete, Gangs.terminate])
@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("max_fewer_checks", [0, 3])
def test_a_gang_gets_only_victims_that_run(monkeypatch, max_fewer_checks, step, end):
    """The victim of another member ends during the search."""
    monkeypatch.setattr(preemption, "_MAX_FEWER_VICTIMS_CHECKS", max_fewer_checks)
    world = Gangs(n1=(1000, 1000), n2=(1000, 1000))
    world.gang(3, whole_gpu=1)
    searches = change_at_search(world.state, step, lambda _: end(world, "n2-0"))
    assert "n2-0" not in world.evicts(20.0) or len(searches) < step


# What the search costs.


class Crowd(Scene):
    """Pods of high priority that wait for cards of pods which no eviction frees: budgets protect them."""

    def __init__(self, size: int, search_seconds: float = 0.2) -> None:
        self.begin(World(), **WHOLE)
        for card, name in enumerate(("a", "b")):
            self.world.runs(name, 1000, card)
            self.world.budget(name, 0)
        self.pods = [self.world.show_pod(self.world.wants(f"p{i}", **WHOLE)) for i in range(size)]
        self.searched: list[str] = []
        self.search_seconds = search_seconds
        on_victim_search(self.world.state, self._on_search)

    def _on_search(self, claimant):
        self.searched.append(claimant.ref.name)
        self.world.clock.worked += self.search_seconds

    def refuses(self, *pods: dict) -> None:
        for pod in pods:
            assert self.world.filter(pod) == []

    def search(self, steps: int, every: float) -> None:
        """From when refused pods are searched for, so many steps, with `every` seconds after each."""
        self.world.clock.advance(4.0)
        for _ in range(steps):
            self.evictions.step()
            self.world.clock.advance(every)


def test_the_search_takes_a_tenth_of_the_time_at_most():
    scene = Crowd(1)
    other = scene.world.show_pod(scene.world.wants("other", mem=16_000))
    scene.refuses(scene.wanted, other)
    scene.world.clock.advance(4.0)
    scene.evictions.step()
    assert len(scene.searched) == 1
    scene.world.clock.advance(1.5)
    scene.evictions.step()
    assert len(scene.searched) == 1, "the first took 0.2 s"
    scene.world.clock.advance(1.0)
    scene.evictions.step()
    assert len(scene.searched) == 2


def test_equal_pods_are_searched_for_once_and_then_those_of_lower_priority_have_their_turn():
    scene = Crowd(20)
    lower = scene.world.show_pod(scene.world.wants("lower", priority=MIDDLE, **WHOLE))
    scene.refuses(*scene.pods, lower)
    scene.search(steps=2, every=2.5)
    assert len(scene.searched) == 2
    assert scene.searched[-1] == "lower"


def test_a_pod_over_its_quota_is_not_searched_for():
    """Of a full cluster filter says that cards lack memory, and not that the quota leaves none."""
    scene = Crowd(0)
    scene.world.runs("c", P100 - 1000, 0)
    scene.world.runs("d", P100 - 1000, 1)
    scene.world.state.set_quota(*as_quota({"shares": 0}, namespace="evil"))
    for i in range(3):
        scene.refuses(scene.world.show_pod(scene.world.wants(f"evil{i}", mem=2000 + i, namespace="evil")))
    fair = scene.world.show_pod(scene.world.wants("fair", mem=2000))
    scene.refuses(fair)
    scene.world.clock.advance(4.0)
    scene.evictions.step()
    assert set(scene.searched) == {"fair"}


@pytest.mark.parametrize("priority", [HIGH, MIDDLE])
def test_the_pods_of_one_namespace_hold_up_those_of_another_for_few_searches(priority):
    """Whichever priority they have: every other search is for one of all namespaces."""
    scene = Crowd(0)
    evil = [scene.world.show_pod(scene.world.wants(f"e{i}", mem=16_000 + i, namespace="evil")) for i in range(30)]
    fair = scene.world.show_pod(scene.world.wants("fair", mem=16_000, priority=priority, namespace="fair"))
    scene.refuses(*evil, fair)
    scene.search(steps=4, every=2.5)
    assert "fair" in scene.searched


def test_after_a_long_search_only_the_namespace_of_its_pod_pauses():
    scene = Crowd(0, search_seconds=5.0)
    scene.refuses(*(scene.world.show_pod(scene.world.wants(f"e{i}", mem=16_000 + i, namespace="evil")) for i in (0, 1)))
    scene.search(steps=1, every=1.0)
    assert len(scene.searched) == 1
    scene.refuses(scene.world.show_pod(scene.world.wants("fair", mem=16_000, namespace="fair")))
    scene.search(steps=1, every=41.0)
    assert scene.searched[1:] == ["fair"]
    scene.refuses(scene.world.show_pod(scene.world.wants("e2", mem=16_002, namespace="evil")))
    scene.evictions.step()
    assert len(scene.searched) == 2, "evil pauses 50 s, of which 46 s have passed"
    scene.search(steps=1, every=0.0)
    assert len(scene.searched) == 3


@pytest.mark.parametrize("namespaces", [1, 4, 20])
def test_the_searches_of_all_namespaces_take_a_tenth_of_the_time_together(namespaces):
    """After the first search of each."""
    scene = Crowd(0, search_seconds=1.0)
    pods = [
        scene.world.show_pod(scene.world.wants(f"p{i}-{k}", mem=16_000 + k, namespace=f"ns{i}"))
        for i in range(namespaces)
        for k in range(3)
    ]
    scene.refuses(*pods)
    scene.search(steps=2 * namespaces, every=1.0)
    scene.searched.clear()
    for _ in range(4):
        scene.refuses(*pods)
        scene.search(steps=496, every=1.0)
    assert 100 <= len(scene.searched) <= 1.1 * 200


def test_namespaces_that_are_passed_over_for_a_higher_priority_keep_their_turn():
    """Searches shorter than what a turn counts for at least: to be passed over must not count as a search."""
    scene = Crowd(0, search_seconds=0.015)
    names = [("high", HIGH), ("evil", MIDDLE)]
    pods = [
        scene.world.show_pod(scene.world.wants(f"{name}{i}", mem=16_000 + i, priority=priority, namespace=name))
        for name, priority in names
        for i in range(12)
    ]
    fair = scene.world.show_pod(scene.world.wants("fair", mem=16_100, priority=MIDDLE, namespace="fair"))
    scene.refuses(*pods, fair)
    scene.search(steps=8, every=0.2)
    assert "fair" in scene.searched[:8]


def test_searches_that_cost_little_do_not_wait_for_the_next_step():
    scene = Crowd(0)
    pods = [scene.world.show_pod(scene.world.wants(f"q{i}", mem=16_000 + i)) for i in range(10)]
    scene.refuses(*pods)
    scene.world.clock.advance(4.0)
    scene.search_seconds = 0.002
    scene.evictions.step()
    assert len(scene.searched) == 10


def test_no_namespace_has_the_whole_table_of_waiting_pods(monkeypatch):
    monkeypatch.setattr(schedulingqueue, "_MAX_PREEMPTING", 6)
    scene = Crowd(0)
    evil = [scene.world.show_pod(scene.world.wants(f"e{i}", mem=16_000 + i, namespace="evil")) for i in range(8)]
    fair = [scene.world.show_pod(scene.world.wants(f"f{i}", mem=16_000 + i, namespace="fair")) for i in range(8)]
    scene.refuses(*evil, *fair, *evil)
    with scene.world.state.queue() as queue:
        recorded = [bool(queue.preemption_nodes(pod["metadata"]["uid"])) for pod in (*evil, *fair)]
    assert (sum(recorded[:8]), sum(recorded[8:])) == (3, 3)


def test_namespaces_of_one_waiting_pod_each_do_not_keep_the_table_from_another(monkeypatch):
    """The namespace for which searches have taken most time loses its place."""
    monkeypatch.setattr(schedulingqueue, "_MAX_PREEMPTING", 3)
    scene = Crowd(0)
    flood = [scene.world.show_pod(scene.world.wants(f"e{i}", mem=16_000 + i, namespace=f"evil{i}")) for i in range(3)]
    fair = scene.world.show_pod(scene.world.wants("fair", mem=16_000, namespace="fair"))
    scene.refuses(*flood, fair)

    def recorded() -> list[str]:
        with scene.world.state.queue() as queue:
            return [pod["metadata"]["name"] for pod in (*flood, fair) if queue.preemption_nodes(pod["metadata"]["uid"])]

    assert recorded() == ["e0", "e1", "e2"], "nothing was searched yet"
    scene.world.clock.advance(4.0)
    with scene.world.state.queue() as queue:
        for seconds in (0.1, 0.3):
            queue.on_searched(queue.next_preemption(lambda _: False), seconds, in_vain=False)
    scene.refuses(fair)
    assert recorded() == ["e0", "e2", "fair"]
    scene.refuses(flood[1])
    assert recorded() == ["e0", "e2", "fair"], "others have used less"


def test_if_many_wait_those_of_the_highest_priority_are_recorded(monkeypatch):
    monkeypatch.setattr(schedulingqueue, "_MAX_PREEMPTING", 2)
    scene = Crowd(0)
    pods = [
        scene.world.show_pod(scene.world.wants(f"q{i}", priority=HIGH if i else MIDDLE, mem=16_000 + i))
        for i in range(4)
    ]
    scene.refuses(*pods)
    scene.search(steps=4, every=2.5)
    assert scene.searched == ["q1", "q2"]
    scene.refuses(pods[3])
    scene.world.clock.advance(4.0)
    scene.evictions.step()
    assert scene.searched[2:] == ["q3"], "a pod without victims has given way to the next"


def test_of_many_nodes_some_are_searched_and_others_the_next_time(monkeypatch):
    monkeypatch.setattr(preemption, "_MAX_NODES", 4)
    scene = Crowd(0)
    nodes = [f"m{i}" for i in range(40)]
    for node in nodes:
        scene.world.state.set_node(node, NodeRecord(Load(64_000, 1 << 40, 100)))
        scene.world.state.set_card(*as_card(extended_resource(0, node=node)))
        scene.world.runs(f"on-{node}", 1000, 0, node=node, app="a")
    searched = set[str]()
    for _ in range(1000):
        assert scene.world.filter(scene.wanted, *nodes) == []
        with scene.world.state.queue() as queue:
            scene.world.clock.advance(20.0)
            due = queue.next_preemption(lambda uid: False)
        assert due is not None
        assert len(due.nodes) == 4
        searched.update(due.nodes)
        if searched == set(nodes):
            return
    raise AssertionError(f"never searched: {set(nodes) - searched}")


def test_among_many_nodes_those_are_searched_where_the_pod_only_has_to_wait(monkeypatch):
    """Whether the pod that goes there is to be seen, or its object has vanished already."""
    monkeypatch.setattr(preemption, "_MAX_NODES", 4)
    monkeypatch.setattr(preemption, "_MAX_CANDIDATE_NODES", 1)
    for vanishes in (False, True):
        scene = Shared(WHOLE, {"a": (1000, 0), "b": (0, 1000)})
        nodes = ["n1", *(f"m{i}" for i in range(20))]
        for node in nodes[1:]:
            scene.world.state.set_node(node, NodeRecord(Load(64_000, 1 << 40, 100)))
            scene.world.state.set_card(*as_card(extended_resource(0, node=node)))
            scene.world.runs(f"on-{node}", 1000, 0, node=node)
        scene.world.runs("c", 1000, 0, priority=HIGH)
        if vanishes:
            scene.world.state.remove_pod(as_pod(scene.api.get(paths.pods("default", "b"))))
        else:
            scene.world.ends("b")
        for _ in range(20):
            assert scene.world.filter(scene.wanted, *nodes) == []
            scene.world.clock.advance(0.2)
        assert scene.world.state.preemption.next_evictions() == []


# With kube-scheduler beside it.


class Mixed(Full):
    """Nodes of two cards, full of whole cards or with shares on each, and a kube-scheduler that counts only the whole
    cards of a node: it preempts on the former alone.
    """

    def __init__(self, *, whole: tuple[str, ...], shared: tuple[str, ...]) -> None:
        super().__init__(**{node: [LOW, LOW] for node in whole}, **{node: [None, None] for node in shared})
        self.shared = shared
        for node in shared:
            for card in range(2):
                pod = bound(f"{node}-{card}", 1000, card, node=node, annotations=holds(1000, card, node=node))
                pod["spec"]["priority"] = LOW
                pod["metadata"]["labels"] = {"place": f"{node}-{card}"}
                pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
                self.pods[f"{node}-{card}"] = pod
                self.show_pod(pod)

    def offered(self, pod: dict) -> list[str]:
        nodes = super().offered(pod)
        return nodes if self.only else sorted({*nodes, *self.shared})


def test_a_gang_gets_cards_of_nodes_where_kube_scheduler_preempts_and_of_others():
    world = Mixed(whole=("n1",), shared=("n2",))
    names_of = gang(world, 4)
    gone = [victim for name in names_of for victim in world.preempts(name)]
    assert sorted(gone) == ["n1-0", "n1-1"], "where kube-scheduler counts a shortage, it evicts"
    world.clock.advance(4.0)
    assert world.own() == ["n2-0", "n2-1"]
    world.clock.advance(1.0)
    assert [world.preempts(name) for name in names_of] == [[], [], [], []]
    world.ended()
    world.run(3)
    assert world.phase("g") == "Running"


def test_no_pod_goes_for_a_gang_that_lacks_cards_on_nodes_of_both_kinds_and_would_not_be_complete():
    world = Mixed(whole=("n1",), shared=("n2",))
    assert [world.asks(name) for name in gang(world, 5)] == [{}] * 5
    world.clock.advance(4.0)
    assert world.own() == []


def test_a_budget_on_a_node_where_the_extender_would_evict_spares_pods_where_kube_scheduler_would():
    world = Mixed(whole=("n1",), shared=("n2",))
    condition = (LabelCondition("place", "In", frozenset({"n2-1"})),)
    world.state.preemption.set_budget("default/one", Budget("default", 0, condition))
    assert [world.asks(name) for name in gang(world, 4)] == [{}] * 4


def test_no_pod_goes_for_a_member_that_may_not_preempt():
    world = Gangs(n1=(1000, 1000))
    world.gang(2, whole_gpu=1)
    world.pods["g1"]["spec"]["preemptionPolicy"] = "Never"
    world.show_pod(world.pods["g1"])
    assert [world.evicts(), world.evicts(20.0)] == [[], []]


class GangScene(Scene):
    """A card for each of two pods of low priority, and a gang that needs both."""

    def __init__(self) -> None:
        self.begin(World())
        self.world.state.remove_pod(as_pod(self.wanted))
        self.api.remove(paths.pods("default", "p"))
        for card, name in enumerate(("a", "b")):
            self.world.runs(name, 1000, card)
        self.members = [
            self.world.show_pod(gangcluster.member(f"g{i}", "g", 2, gated=False, priority=HIGH, whole_gpu=1))
            for i in range(2)
        ]

    def gang_rounds(self, count: int) -> None:
        for _ in range(count):
            for member in self.members:
                assert self.world.filter(member) == []
            self.world.clock.advance(4.0)
            self.world.state.expire_reservations()
            self.evictions.step()
            for event in self._fresh():
                self.world.state.set_pod(as_pod(event["object"]))


def test_all_victims_of_a_gang_are_evicted_in_one_round_and_events_tell_which_member_each_went_for():
    scene = GangScene()
    scene.gang_rounds(2)
    assert sorted(scene.evicted()) == ["a", "b"]
    assert sorted(scene.events.recorded) == [
        ("a", "Preempted"), ("b", "Preempted"), ("g0", "Preempting"), ("g1", "Preempting")
    ]  # fmt: skip


@pytest.mark.parametrize("victim", ["a", "b"])
def test_if_the_api_server_refuses_one_victim_of_a_gang_none_is_evicted(victim):
    scene = GangScene()
    scene.api.fault(Fault(status=429), "create", paths.pods("default", victim, "eviction"), times=math.inf)
    scene.gang_rounds(10)
    assert scene.evicted() == []
    assert scene.world.filter(scene.world.wants("low", 1000, priority=LOW)) == ["n1"], "nothing is kept"
