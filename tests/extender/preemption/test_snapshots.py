"""Victims are searched on a snapshot without the lock; what has changed meanwhile is checked when they are chosen."""

from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.api.request import Load
from cardwise.core.gangs.gangs import Member
from cardwise.core.gangs.gangstate import Gang
from cardwise.core.placement.holding import Holding
from cardwise.core.values.quantity import MiB, Percent
from extender.cache.nominations import NominatedPlace
from extender.preemption.preemption import Eviction
from extender.records.nodeinfo import NodeRecord
from extender.records.pod import WaitingPod
from tests.build import extended_resource
from tests.examples import examples
from tests.extender.preemption.test_preemption import HALF, HIGH, LOW, MIDDLE, P100, PREFERENCES, Scene, World, as_seen
from tests.extender.states import as_card, as_pod, as_quota, on_victim_search


class Searched(World):
    """After `after` searches for victims, `change` happens once."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(*nodes)
        self.after, self.change = 0, lambda: None
        self.locked: list[bool] = []
        on_victim_search(self.state, self._on_search)

    def _on_search(self, claimant: WaitingPod) -> None:
        self.claimant = claimant
        self.locked.append(self.state._lock._lock.locked())
        if len(self.locked) == self.after:
            assert not self.locked[-1], "such a change would wait for the lock"
            self.change()
        self.claimant = claimant  # the change may be a search for another pod

    def happens(self, change, *, after: int) -> None:
        self.after, self.change = after, change

    def refuse_eviction(self, name: str) -> None:
        """The Eviction API refuses the pod."""
        eviction = Eviction(self.claimant, "n99", (), NominatedPlace())
        self.state.preemption.on_eviction_failed(eviction, [f"uid-{name}"], 60.0)

    def own_evictions(self, pod: dict, *nodes: str) -> dict[str, list[str]]:
        """The victims that the extender evicts by itself for the pod, by node."""
        assert self.filter(pod, *nodes) == []
        self.clock.advance(4.0)
        return {
            eviction.node: sorted(victim.name for victim in eviction.victims)
            for eviction in self.state.preemption.next_evictions()
        }


def test_the_lock_is_free_while_kube_scheduler_waits_for_victims():
    world = Searched("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-{card}", P100, card, node=node)
    assert len(world.preempt(world.wants("p"), n1=["n1-0"], n2=["n2-0"])) == 2
    assert world.locked == [False, False]


def test_the_lock_is_free_while_the_extender_searches_victims_by_itself():
    world = Searched("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-{card}", HALF, card, node=node)
    pod = world.show_pod(world.wants("p"))
    assert list(world.own_evictions(pod, "n1", "n2").values()) == [["n1-0"]]
    assert world.locked == [False, False]


def test_a_card_that_became_unhealthy_during_the_search_is_not_in_the_answer():
    world = Searched("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-{card}", P100, card, node=node, priority=HIGH if card else LOW)
    world.happens(lambda: world.state.set_card(*as_card(extended_resource(0, node="n1", health="Unhealthy"))), after=2)
    assert world.preempt(world.wants("p"), n1=["n1-0"], n2=["n2-0"]) == {"n2": ["n2-0"]}


def test_the_eviction_goes_to_the_node_whose_victims_are_least_important_when_it_is_committed():
    """The best node of the snapshot gets a pod of higher priority during the search."""
    world = Searched("n1", "n2")
    for node, priority in (("n1", LOW), ("n2", LOW + 1)):
        for card in (0, 1):
            world.runs(f"{node}-{card}", HALF, card, node=node, priority=priority)
    pod = world.show_pod(world.wants("p"))

    def grow() -> None:
        for card in (0, 1):
            world.runs(f"late-{card}", P100 - HALF, card, node="n1", priority=MIDDLE)

    world.happens(grow, after=2)
    assert list(world.own_evictions(pod, "n1", "n2")) == ["n2"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda world, pod: world.nominate(pod, "n1"), id="kube-scheduler preempts for it"),
        pytest.param(lambda world, pod: world.state.remove_pod(as_pod(pod)), id="it is deleted"),
    ],
)
def test_a_pod_that_changes_during_the_search_gets_no_victims_of_the_extender(change):
    world = Searched("n1")
    for card in (0, 1):
        world.runs(f"n1-{card}", HALF, card)
    pod = world.show_pod(world.wants("p"))
    world.happens(lambda: change(world, pod), after=1)
    assert world.own_evictions(pod, "n1") == {}


def reserves_nothing(world: World, uid: str) -> bool:
    return world.state._cache.nominations.get(uid) is None


def test_nothing_is_reserved_for_kube_scheduler_if_the_leader_changes_during_the_search():
    world = Searched("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-{card}", P100, card, node=node)
    world.happens(world.state.forget_plans, after=1)
    assert world.preempt(world.wants("p"), n1=["n1-0"], n2=["n2-0"]) == {}
    assert reserves_nothing(world, "uid-p")


def test_no_pod_is_evicted_if_the_leader_changes_during_the_search():
    """Also if kube-scheduler has called filter again since."""
    world = Searched("n1")
    for card in (0, 1):
        world.runs(f"n1-{card}", HALF, card)
    pod = world.show_pod(world.wants("p"))

    def change() -> None:
        world.state.forget_plans()
        assert world.filter(pod, "n1") == []

    world.happens(change, after=1)
    assert world.own_evictions(pod, "n1") == {}
    assert reserves_nothing(world, "uid-p")


def test_of_two_simultaneous_calls_for_a_pod_one_is_answered():
    """kube-scheduler's first call timed out, and the second ends before it."""
    world = Searched("n1", "n2")
    for node in ("n1", "n2"):
        for card in (0, 1):
            world.runs(f"{node}-{card}", P100, card, node=node)
    pod = as_seen(world.wants("p"), "7")
    answers = []
    world.happens(lambda: answers.append(world.preempt(pod, n2=["n2-0"])), after=1)
    assert world.preempt(pod, n1=["n1-0"]) == {}
    assert answers == [{"n2": ["n2-0"]}]


@pytest.fixture
def beside_nominated():
    """Card 0 of n1 is free and reserved for the nominated pod `first`; n2 has a free card, too."""
    world = Searched("n1", "n2")
    world.runs("n1-0", P100, 0, node="n1")
    world.runs("n1-1", P100, 1, node="n1")
    world.runs("n2-1", P100, 1, node="n2", priority=HIGH)
    world.first = world.show_pod(world.wants("first"))
    assert world.preempt(world.first, n1=["n1-0"]) == {"n1": ["n1-0"]}
    world.nominate(world.first, "n1")
    world.delete_pod("n1-0")
    return world


def test_no_pod_is_evicted_if_a_nominated_pod_gets_a_card_elsewhere_during_the_search(beside_nominated):
    """Then what is reserved for it is free."""
    world = beside_nominated
    pod = world.show_pod(world.wants("p"))
    world.happens(lambda: world.filter(world.first, "n2"), after=len(world.locked) + 1)
    assert world.own_evictions(pod, "n1") == {}


def test_the_card_of_a_nominated_pod_that_loses_its_other_card_during_the_search_is_reserved_again(beside_nominated):
    world = beside_nominated
    assert world.filter(world.first, "n2") == ["n2"]
    pod = world.show_pod(world.wants("p"))

    def fail() -> None:
        world.state.set_card(*as_card(extended_resource(0, node="n2", health="Unhealthy")))
        assert world.filter(world.first, "n2") == []

    world.happens(fail, after=len(world.locked) + 1)
    assert world.preempt(pod, n1=["n1-1"]) == {"n1": ["n1-1"]}
    reserved = [
        share.uuid
        for nomination in world.state._cache.nominations.by_pod().values()
        for place in nomination.places.values()
        for share in place.assignment.shares()
    ]
    assert sorted(reserved) == ["GPU-n1-0", "GPU-n1-1"]


def reserve_for_gang(world: World, node: str) -> None:
    """Reserve card 0 of the node for a gang that comes before all pods."""
    gang = Gang("other", "g", {})
    gang.set_member(Member(uid="m", name="m", priority=2 * HIGH, created="2026-11-01T00:00:00Z"), 0.0)
    share = CardShare(0, f"GPU-{node}-0", MiB(P100), Percent(0), MiB(P100), whole=False)
    assignment = Assignment(MappingProxyType({"0": (share,)}))
    world.state._cache.gang_cards.reserve(gang, [Holding("m", "other", "m", node, assignment)])


CHANGES = {
    "pod bound": lambda world, node, card: world.runs("late", 100, card, node=node, priority=HIGH),
    "pod ends": lambda world, node, card: world.ends(f"{node}-{card}"),
    "pod gone": lambda world, node, card: world.delete_pod(f"{node}-{card}"),
    "card fails": lambda world, node, card: world.state.set_card(
        *as_card(extended_resource(card, node=node, health="Unhealthy"))
    ),
    "card cordoned": lambda world, node, card: world.state.set_card(
        *as_card(extended_resource(card, node=node, unschedulable=True))
    ),
    "node gone": lambda world, node, card: world.state.remove_node(node),
    "node cordoned": lambda world, node, card: world.state.set_node(
        node, NodeRecord(Load(64_000, 1 << 40, 100), schedulable=False)
    ),
    "budget": lambda world, node, card: world.budget(f"{node}-{card}", 0),
    "quota": lambda world, node, card: world.state.set_quota(*as_quota({"memoryMiB": 1000})),
    "other preempts": lambda world, node, card: world.preempt(world.wants("other", HALF), **{node: []}),
    "gang reservation": lambda world, node, card: reserve_for_gang(world, node),
    "eviction refused": lambda world, node, card: world.refuse_eviction(f"{node}-{card}"),
}


@pytest.mark.parametrize("by_scheduler", [True, False])
@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=examples(20, soak=500), deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([LOW, MIDDLE, HIGH])] * 2), min_size=1, max_size=3),
    st.integers(1, 3),
    st.data(),
)
def test_victims_are_those_of_the_moment_in_which_they_are_chosen(name, by_scheduler, priorities, after, data):
    """Whatever happens during the search: the same search then gives the same victims on that node."""
    nodes = [f"n{i}" for i in range(len(priorities))]
    world = Searched(*nodes)
    for node, of_cards in zip(nodes, priorities, strict=True):
        for card, priority in enumerate(of_cards):
            world.runs(f"{node}-{card}", HALF + 1, card, node=node, priority=priority)
    pod = world.show_pod(world.wants("p", HALF))
    node, card = data.draw(st.sampled_from(nodes)), data.draw(st.sampled_from([0, 1]))
    world.happens(lambda: CHANGES[name](world, node, card), after=after)
    answers = world.preempt(pod, **{node: [] for node in nodes}) if by_scheduler else world.own_evictions(pod, *nodes)
    world.after = 0
    nominated, policy, refused = world.state._nominated, PREFERENCES.policy, world.state.preemption._refused
    for node, victims in answers.items():
        if by_scheduler:
            current = nominated.find_victims(world.claimant, policy, node)
        else:
            current = nominated.find_unprotected_victims(world.claimant, policy, node, refused=refused)
        assert current is not None
        terminating = {placed.uid for _, placed in world.state._loads.pods_on(node) if placed.terminating}
        assert {f"uid-{victim}" for victim in victims} - terminating == set(current.uids)


def test_a_search_that_always_meets_changes_evicts_in_the_end():
    """A busy cluster: a pod of the node changes at each search."""
    scene = Scene()
    count = 0

    def change(_) -> None:
        nonlocal count
        count += 1
        if not scene.world.state._lock._lock.locked():
            scene.world.runs("busy", 1, 0, priority=HIGH, app=f"busy-{count}")

    on_victim_search(scene.world.state, change)
    scene.rounds(3)
    assert len(scene.evicted()) == 1
