"""Who goes for a gang: as many as it lacks cards for and nobody in vain, and what is free is kept for it meanwhile."""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cardwise.core.api.request import Load
from cardwise.kube.pods.budgets import Budget, LabelCondition
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.gangs import gangplanner
from extender.gangs.gangplanner import GangPlanner
from extender.preemption import gangpreemption, preemption
from extender.records import wire
from extender.records.nodeinfo import NodeRecord, PlacedPod
from tests.build import P100, extended_resource
from tests.examples import examples
from tests.extender.gangcluster import NodeSpec, World, member, single
from tests.extender.states import as_card, as_quota, bound, looks_slowly, on_victim_search
from tests.theory import theory_of

LOW, HIGH = 0, 1000
PREFERENCES = AnswerSettings(policy="binpack", one_best_node=True)


class Full(World):
    """Nodes of whole cards, with a kube-scheduler that nominates: it asks for the node of a nominated pod first, and
    counts the pod there for all others. `cards`: by node the priority of who is on each, None: it is free.
    """

    def __init__(self, **cards: list[int | None]) -> None:
        self.only: list[str] = []
        super().__init__({node: NodeSpec(len(on)) for node, on in cards.items()})
        for node, on in cards.items():
            for i, priority in enumerate(on):
                if priority is not None:
                    self.runs(f"{node}-{i}", i, node, priority)

    def runs(self, name: str, card: int, node: str, priority: int = LOW) -> None:
        pod = bound(name, P100, card, node=node)
        pod["spec"]["priority"] = priority
        pod["metadata"]["labels"] = {"place": f"{node}-{card}"}
        pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1"}
        self.pods[name] = pod
        self.show_pod(pod)

    def filter(self, name: str) -> tuple[list[str], str]:
        node = self._nominated(name)
        if node in self.offered(self.pods[name]):
            self.only = [node]
            answer = super().filter(name)
            self.only = []
            if answer[0]:
                return answer
        return super().filter(name)

    def offered(self, pod: dict) -> list[str]:
        used: dict[str, int] = {}
        for name, other in self.pods.items():
            node = other["spec"].get("nodeName") or self.assumed.get(name) or self._nominated(name)
            if node and other is not pod and has_card(other):
                used[node] = used.get(node, 0) + 1
        return self.only or [
            node for node in super().offered(pod) if not has_card(pod) or used.get(node, 0) < self.nodes[node].cards
        ]

    def asks(self, name: str, before: Callable[[], None] = lambda: None) -> dict[str, list[str]]:
        """kube-scheduler brings the pod, and would preempt on each node where it may; who goes, by node. `before`: what
        happens before we are asked.
        """
        pod = self.pods[name]
        assert not self.filter(name)[0]
        chosen = {
            node: {"Pods": [{"UID": f"uid-{lower_name}"} for lower_name in lower[:1]]}
            for node in self.nodes
            if (lower := self._lower(node)) and node not in self.offered(pod)
        }
        if not chosen:
            return {}
        before()
        args = wire.decode_preempt_args(json.dumps({"Pod": pod, "NodeNameToMetaVictims": chosen}).encode())
        answer = verbs.preempt(self.state, PREFERENCES, args).node_name_to_meta_victims
        return {node: sorted(victim.uid[4:] for victim in victims.pods) for node, victims in answer.items()}

    def preempts(self, name: str) -> list[str]:
        """As kube-scheduler goes on: the pod is nominated, and the victims end; who they are."""
        status = self.pods[name]["status"]
        if any(
            self.pods[lower_name]["metadata"].get("deletionTimestamp")
            for lower_name in self._lower(self._nominated(name))
        ):
            return []  # it preempts nobody while somebody ends there
        answer = self.asks(name)
        assert len(answer) <= 1, "kube-scheduler could choose a node that the gang is not planned for"
        status["nominatedNodeName"] = next(iter(answer), "")
        status["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
        self.show_pod(self.pods[name])
        gone = [victim for victims in answer.values() for victim in victims]
        for victim in gone:
            self.terminate(victim)
        return gone

    def own(self) -> list[str]:
        """The extender evicts by itself, if that is due. Returns the victims, which begin to end."""
        victims = sorted(
            victim.name for eviction in self.state.preemption.next_evictions() for victim in eviction.victims
        )
        for name in victims:
            self.terminate(name)
        return victims

    def ended(self) -> None:
        """Whoever was ending is gone."""
        self.delete(*[name for name, pod in self.pods.items() if pod["metadata"].get("deletionTimestamp")])

    def _nominated(self, name: str) -> str:
        return str(self.pods[name]["status"].get("nominatedNodeName") or "")

    def _lower(self, node: str) -> list[str]:
        """Pods of lower priority there."""
        return [
            name
            for name, on in self.bound().items()
            if on == node and self.pods[name]["spec"].get("priority", 0) < HIGH
        ]

    def on_step(self, callback: Callable[[int], None]) -> list[str]:
        """Call `callback` with its number at each step of a search: victims on one node, or a plan of the gang.

        Returns the list of the steps, which grows.
        """
        steps: list[str] = []

        def step(name: str) -> None:
            if self.state._lock._lock.locked():
                return  # what was found is checked where something has changed, and nothing else happens meanwhile
            steps.append(name)
            callback(len(steps))

        on_victim_search(self.state, lambda _: step("node"))
        places = self.state.preemption._places
        make_planner = places.make_planner

        def observed(*args: Any) -> GangPlanner:
            planner = make_planner(*args)
            simulate_plan = planner.simulate_plan

            def simulate(*args: Any, **kwargs: Any) -> Any:
                step("plan")
                return simulate_plan(*args, **kwargs)

            planner.simulate_plan = simulate
            return planner

        places.make_planner = observed
        return steps

    def meanwhile(self, number: int, change: Callable[[], None]) -> list[str]:
        """It happens at that step of a search. Returns the steps, as `on_step`."""
        return self.on_step(lambda step: change() if step == number else None)

    def nominated(self, name: str, node: str) -> None:
        """The pod's status says so: another extender has answered for it."""
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        self.pods[name]["status"] |= {"nominatedNodeName": node, "conditions": [refused]}
        self.show_pod(self.pods[name])

    def nominated_other(self, node: str) -> None:
        """The same of a pod of high priority that comes now."""
        self.create(single("other", created=9, priority=HIGH, whole_gpu=1))
        self.nominated("other", node)


def has_card(pod: dict) -> bool:
    return any("gpu" in key for key in pod["spec"]["containers"][0]["resources"]["limits"])


def gang(world: World, size: int, **fields: object) -> list[str]:
    """A gang of that many whole cards, of high priority; its members' names."""
    settings_of = {"whole_gpu": 1} | fields
    names = [f"g{i}" for i in range(size)]
    world.create(
        *(member(n, "g", size, gated=False, priority=HIGH, created=i, **settings_of) for i, n in enumerate(names))
    )
    return names


def test_one_goes_where_one_card_is_short():
    """Each member asks, and for one of them somebody goes."""
    world = Full(n1=[LOW, LOW], n2=[LOW, None])
    gone = [victim for name in gang(world, 2) for victim in world.preempts(name)]
    assert len(gone) == 1
    assert [world.preempts(name) for name in ("g0", "g1")] == [[], []], "they only have to wait"
    world.ended()
    world.run(3)
    assert world.phase("g") == "Running"
    assert len(world.bound()) == 2 + 2


def test_several_go_on_several_nodes_one_for_each_member():
    world = Full(n1=[LOW, LOW], n2=[LOW, HIGH], n3=[LOW, LOW])
    gone = [world.preempts(name) for name in gang(world, 4)]
    assert all(len(victims) == 1 for victims in gone)
    assert len({victim for victims in gone for victim in victims}) == 4
    world.ended()
    world.run(3)
    assert world.phase("g") == "Running"
    assert set(world.bound()) >= {"n2-1", "g0", "g1", "g2", "g3"}


def test_nobody_goes_for_a_gang_that_would_not_be_complete():
    world = Full(n1=[LOW, HIGH], n2=[LOW, HIGH])
    assert [world.asks(name) for name in gang(world, 3)] == [{}, {}, {}]
    with world.state.view() as ledger:
        assert {holding.name for holding in ledger.holdings()} == {"n1-0", "n1-1", "n2-0", "n2-1"}, "no trace"


def test_nobody_goes_for_a_member_that_the_watch_has_not_told_of_yet():
    """kube-scheduler may know it sooner."""
    world = Full(n1=[LOW], n2=[LOW])
    world.pods["g0"] = member("g0", "g", 2, gated=False, priority=HIGH, whole_gpu=1)
    assert world.asks("g0") == {}


def test_the_cards_of_another_nominated_pod_are_not_found_out_in_a_try():
    """A former leader answered for it, so only the node is known. Were the pods gone that a gang would need gone, it
    would have the card of one of them, and not the card that is freed for it.
    """
    world = Full(n1=[LOW, LOW], n2=[HIGH])
    world.nominated_other("n1")
    assert [world.asks(name) for name in gang(world, 3)] == [{}, {}, {}], "it would not be complete"
    world.delete("n1-1")
    world.create(single("late", created=10, whole_gpu=1))
    world.only = ["n1"]
    assert world.filter("late")[0] == [], "the free card is kept"
    assert world.filter("other")[0] == ["n1"]


def test_the_card_of_a_nominated_pod_is_found_out_also_where_the_extender_itself_evicts():
    world = Full(n1=[LOW, LOW], n2=[LOW, LOW, None])
    gang(world, 1, whole_gpu=2)
    world.asks("g0", lambda: world.nominated_other("n2"))
    assert world.state._queue.preemption_nodes("uid-g0") == ("n2",)
    assert world.state._nominated.nodes_with_unknown_cards() == []


def cordon(world: World, node: str) -> None:
    world.state.set_node(node, NodeRecord(Load(64_000, 512 << 30, 500), schedulable=False))


def test_no_pod_goes_for_a_gang_whose_other_place_is_on_a_node_that_was_cordoned_since():
    world = Full(n1=[LOW], n2=[None])
    gang(world, 2)
    assert world.asks("g0", lambda: cordon(world, "n2")) == {}


@pytest.mark.parametrize("step", range(1, 6))
def test_no_pod_goes_if_the_place_of_another_member_is_cordoned_during_the_search(step):
    world = Full(n1=[LOW], n2=[None])
    gang(world, 2)
    steps = world.meanwhile(step, lambda: cordon(world, "n2"))
    assert world.asks("g0") == {} or len(steps) < step


def test_nobody_goes_where_another_kind_of_member_lacks_a_place():
    """The other shape's nodes are known to kube-scheduler alone."""
    world = Full(n1=[LOW], n2=[LOW])
    gang(world, 1)
    world.delete("g0")
    world.create(member("big", "g", 2, gated=False, priority=HIGH, whole_gpu=1, cpu="2"))
    world.create(member("small", "g", 2, gated=False, priority=HIGH, created=1, whole_gpu=1))
    assert [world.asks(name) for name in ("big", "small")] == [{}, {}]


def test_members_without_cards_have_places_beside():
    world = Full(n1=[LOW, LOW])
    names = gang(world, 2)
    world.create(member("ps", "g", 3, gated=False, priority=HIGH, created=5))
    for name in names:
        pod = world.pods[name]
        pod["metadata"]["annotations"]["scheduling.k8s.io/group-pod-num"] = "3"
        world.show_pod(pod)
    assert sorted(victim for name in names for victim in world.preempts(name)) == ["n1-0", "n1-1"]
    world.ended()
    world.run(3)
    assert world.phase("g") == "Running"


def test_what_is_free_is_kept_for_the_gang_while_the_victim_ends():
    """Else it would go in vain."""
    world = Full(n1=[LOW], n2=[None])
    names = gang(world, 2)
    assert world.preempts(names[0]) == ["n1-0"]
    world.create(single("late", created=9, whole_gpu=1))
    assert world.filter("late")[0] == []
    world.ended()
    assert world.filter("late")[0] == []
    world.run(3)
    assert world.phase("g") == "Running"


@pytest.mark.parametrize("change", ["the pod goes", "time"])
def test_it_is_kept_no_longer_than_the_pod_waits(change):
    world = Full(n1=[LOW], n2=[None])
    names = gang(world, 2)
    world.preempts(names[0])
    world.ended()
    world.create(single("late", created=9, whole_gpu=1))
    assert world.filter("late")[0] == []
    if change == "time":
        world.clock.advance(61)
        world.state.expire_reservations()
    else:
        world.delete(names[0])
    assert world.filter("late")[0] != []


def test_what_is_ending_already_is_waited_for():
    world = Full(n1=[LOW], n2=[LOW])
    world.terminate("n1-0")
    world.terminate("n2-0")
    assert [world.asks(name) for name in gang(world, 2)] == [{}, {}]


def test_what_is_ending_is_waited_for_also_where_kube_scheduler_offers_another_node():
    """It offers the node of the free card alone, since the other is full until the pod has ended."""
    world = Full(n1=[LOW], n2=[None], n3=[LOW])
    world.terminate("n1-0")
    assert [world.asks(name) for name in gang(world, 2)] == [{}, {}]


def test_what_is_ending_gives_its_cpu_to_the_gang_as_well_as_its_card(monkeypatch):
    """The plan is of the nodes as they will be, whatever is known of them as they are."""
    plans = []
    simulate_plan = GangPlanner.simulate_plan
    monkeypatch.setattr(
        GangPlanner, "simulate_plan", lambda *args, **kwargs: plans.append(simulate_plan(*args, **kwargs)) or plans[-1]
    )
    world = Full(n1=[LOW], n2=[LOW])
    for node in world.nodes:
        world.add_node(node, NodeSpec(1, cpu=1))
        world.terminate(f"{node}-0")
    gang(world, 2)
    assert world.asks("g0") == {}
    assert [sorted(planned.nodes.values()) for planned in plans] == [["n1", "n2"]]


def test_a_member_of_a_gang_that_runs_preempts_alone():
    world = Full(n1=[None, None], n2=[LOW])
    gang(world, 2)
    world.run(3)
    assert world.phase("g") == "Running"
    world.create(member("more", "g", 2, gated=False, priority=HIGH, created=7, whole_gpu=1))
    assert world.preempts("more") == ["n2-0"]


# The search runs without the lock, and anything may happen meanwhile.

CHANGES: dict[str, Callable[[Full], object]] = {
    "a pod is bound": lambda world: world.runs("late", 0, "n3", HIGH),
    "a card fails": lambda world: world.state.set_card(*as_card(extended_resource(0, node="n2", health="Unhealthy"))),
    "a node goes": lambda world: world.state.remove_node("n2"),
    "a quota is set": lambda world: world.state.set_quota(*as_quota({"gpus": 4})),
    "another is nominated": lambda world: world.nominated_other("n2"),
    "a member goes": lambda world: world.delete("g4"),
    "the pod goes": lambda world: world.delete("g0"),
    "the victims have gone": lambda world: world.delete("n1-0", "n1-1", "n2-0", "n2-1"),
    "the victims are going": lambda world: [world.terminate(name) for name in ("n1-0", "n1-1", "n2-0", "n2-1")],
    "somebody goes for it": lambda world: [world.nominated("g0", "n2"), world.terminate("n2-0")],
}


@pytest.mark.parametrize("step", range(1, 10))
@pytest.mark.parametrize("change", CHANGES)
def test_no_pod_is_evicted_for_what_is_over_when_the_search_ends(change, step):
    world = Full(n1=[LOW, LOW], n2=[LOW, LOW], n3=[None])
    gang(world, 5)
    steps = world.meanwhile(step, lambda: CHANGES[change](world))
    assert world.asks("g0") == {}
    assert len(steps) >= step


on_cards = st.lists(st.sampled_from([LOW, LOW, HIGH, None]), min_size=1, max_size=3)


@settings(max_examples=examples(25, soak=400), deadline=None)
@given(
    nodes=st.lists(on_cards, min_size=1, max_size=4),
    size=st.integers(1, 5),
    limit=st.sampled_from([0, gangplanner.MAX_RESERVED_NODES]),
    data=st.data(),
)
def test_as_many_go_as_cards_are_short_and_nobody_for_nothing(nodes, size, limit, data):
    """Whatever the order in which the members ask and the victims end. Where one card of a node is free, kube-scheduler
    preempts no pod there, and the extender does. `limit`: see `nominated.MAX_RESERVED_NODES`.
    """
    with patch.object(gangplanner, "MAX_RESERVED_NODES", limit):
        goes(nodes, size, data)


def goes(nodes, size, data):
    world = Full(**{f"n{i}": on for i, on in enumerate(nodes)})
    everybody = [priority for on in nodes for priority in on]
    free, low = everybody.count(None), everybody.count(LOW)
    names = gang(world, size)
    gone = set()
    for _ in range(2 * size + 2):
        world.keep()
        if world.phase("g") == "Running":
            break
        for name in data.draw(st.permutations(names)):
            if world.phase("g") == "Waiting" and not world.filter(name)[0]:
                gone |= set(world.preempts(name))
        if world.phase("g") == "Waiting":  # time ends a plan whose pods are not bound
            world.clock.advance(data.draw(st.sampled_from([1.0, 16.0])))
            gone |= set(world.own())
        if data.draw(st.booleans()):
            world.ended()
    world.ended()
    world.run(4)
    ran = world.phase("g") == "Running"
    assert ran == (size <= free + low)
    assert len(gone) == (max(0, size - free) if ran else 0)
    assert world.over_full() == []


def test_the_example_of_the_docstring(monkeypatch):
    theory, size, free = theory_of("extender.preemption.gangpreemption"), 5, 1
    world = Full(n1=[LOW, LOW], n2=[LOW, LOW], n3=[None] * free)
    gang(world, size)
    limits, nodes_by_step, outcomes = [], [], []
    search_class = gangpreemption.GangVictimSearch
    choose_victims, make_gang_victims = search_class._choose_victims, search_class._make_gang_victims

    def record_step(search, count):
        choose_victims(search, count)
        limits.append(count)
        nodes_by_step.append([placed.node for placed in search._member_victims])

    def record_outcome(search, first, places):
        outcomes.append(make_gang_victims(search, first, places))
        return outcomes[-1]

    monkeypatch.setattr(search_class, "_choose_victims", record_step)
    monkeypatch.setattr(search_class, "_make_gang_victims", record_outcome)
    steps = world.meanwhile(0, lambda: None)
    victims = world.asks("g0")
    assert list(map(len, victims.values())) == [1], "only the victims for the requested pod"
    (gang_victims,) = outcomes

    assert (
        f"a gang has {size} members that request a GPU each. {free} GPU is free on {gang_victims.places[0].node}"
        in theory
    )
    assert "Pods of lower priority have 2 GPUs on n1 and 2 on n2" in theory
    small, medium, large = map(len, nodes_by_step)
    assert (
        f"With {small} member on {nodes_by_step[0][0]} in place of a victim, only {small + free} members fit" in theory
    )
    assert f"with {medium} such members only {medium + free}. The next step allows {limits[-1]}:" in theory
    assert f"After {limits[0]}, {limits[1]}, {limits[2]}, … such members the rest of the gang is planned" in theory
    assert f"all {len(gang_victims.victim_uids)} GPUs of n1 and n2 are cleared" in theory
    assert (large, sorted(nodes_by_step[-1]), len(gang_victims.places)) == (4, ["n1", "n1", "n2", "n2"], 1)
    assert f"the gang is complete after {steps.count('plan')} plans" in theory


@pytest.mark.parametrize(("size", "victims"), [(4, 1), (5, 0)])
def test_a_gang_whose_plan_takes_too_long_gets_no_victims_and_is_not_planned(monkeypatch, size, victims):
    monkeypatch.setattr(gangpreemption, "_MAX_CARD_REQUESTS", 4)
    plans, simulate_plan = [], GangPlanner.simulate_plan

    def counted(*args, **kwargs):
        plans.append(args)
        return simulate_plan(*args, **kwargs)

    monkeypatch.setattr(GangPlanner, "simulate_plan", counted)
    world = Full(**{f"n{i}": [LOW] for i in range(5)})
    gang(world, size)
    assert len(world.asks("g0")) == victims
    assert bool(plans) == bool(victims)


def test_some_of_the_time_for_an_answer_is_left_for_the_plans():
    """Each search for victims takes so long that not all nodes can be searched."""
    world = Full(**{f"n{i}": [LOW] for i in range(9)})
    gang(world, 2)
    looks_slowly(world.state, world.clock, 0.05)
    assert len(world.asks("g0")) == 1


def test_what_happens_on_other_nodes_is_no_reason_to_search_again():
    """Otherwise no pod would ever be evicted for a gang in a busy cluster."""
    world = Full(**{f"n{i}": [LOW] for i in range(9)}, busy=[None])
    gang(world, 8)
    priority = {"priority": HIGH}
    there = bound("there", 1000, 0, node="busy")
    world.show_pod(there | {"spec": there["spec"] | priority})

    def change(step: int) -> None:
        late = bound(f"late{step}", 1, 0, node="busy")
        world.show_pod(late | {"spec": late["spec"] | priority})
        world.state.preemption.set_budget("other/busy", Budget("other", step, ()))

    steps = world.on_step(change)
    assert len(world.asks("g0")) == 1
    assert steps.count("plan") == 4, "whether to wait, and with 1, 3 and 7 members with victims"


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("step", range(1, 6))
def test_nothing_is_reserved_for_a_gang_if_the_leader_changes_during_the_search(step, repeats):
    """Also if the next epoch has begun, and the members wait as before. `repeats`: the search must be repeated."""
    world = Full(n1=[LOW], n2=[LOW], n3=[LOW])
    gang(world, 2)

    def change() -> None:
        if repeats:
            world.runs("late", 0, "n1", HIGH)
        world.state.forget_plans()
        for name in ("g0", "g1"):
            world.filter(name)

    steps = world.meanwhile(step, change)
    assert world.asks("g0") == {} or len(steps) < step
    if len(steps) >= step:
        assert {world.state._cache.nominations.get(f"uid-g{i}") for i in range(2)} == {None}


def test_nothing_is_reserved_for_a_gang_if_the_leader_changes_before_the_search_is_repeated(monkeypatch):
    world = Full(n1=[LOW], n2=[LOW], n3=[LOW])
    gang(world, 2)
    steps = world.meanwhile(2, lambda: world.runs("late", 0, "n1", HIGH))
    preemption = world.state.preemption
    find_unknown_cards, calls = preemption.find_unknown_cards, []

    def change_leader(*args: Any) -> None:
        calls.append(len(steps))
        if len(calls) == 2:
            world.state.forget_plans()
            for name in ("g0", "g1"):
                world.filter(name)
        find_unknown_cards(*args)

    monkeypatch.setattr(preemption, "find_unknown_cards", change_leader)
    assert world.asks("g0") == {}
    assert len(calls) == 2
    assert calls[1] == len(steps), "no search after the change"
    assert {world.state._cache.nominations.get(f"uid-g{i}") for i in range(2)} == {None}


@pytest.mark.parametrize("step", range(1, 5))
def test_no_pod_is_evicted_if_enough_becomes_free_during_the_search(step):
    """On a node that the search does not use, because a pod without GPUs has its cpu."""
    world = Full(n1=[LOW, LOW], n2=[None], n3=[None])
    world.state.set_pod_without_request("other", PlacedPod("n3", Load(64_000, 0, 1)))
    gang(world, 2)
    steps = world.meanwhile(step, lambda: world.state.remove_pod_without_request("other"))
    assert world.asks("g0") == {}
    assert len(steps) >= step


def test_what_a_pod_without_gpus_takes_on_the_nodes_of_the_gang_is_no_reason_to_search_again():
    """While cpu and memory are left there. In a busy cluster such pods come and go on each node."""
    world = Full(n1=[LOW, LOW], n2=[LOW], n3=[None])
    gang(world, 4)
    steps = world.on_step(
        lambda step: [
            world.state.set_pod_without_request(f"other{step}", PlacedPod(node, Load(1, 0, 1))) for node in world.nodes
        ]
    )
    assert len(world.asks("g0")) == 1
    assert steps.count("plan") == 3 + 3, "whether to wait, with 1 and 3 members, and whether it is enough to wait now"


@pytest.mark.parametrize("end", [Full.delete, Full.terminate])
@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("max_fewer_checks", [0, 3])
def test_the_extender_evicts_no_more_pods_than_needed_if_a_victim_of_another_member_ends_during_the_search(
    monkeypatch, max_fewer_checks, step, end
):
    monkeypatch.setattr(preemption, "_MAX_FEWER_VICTIMS_CHECKS", max_fewer_checks)
    world = Full(n1=[LOW, None], n2=[LOW, None], n3=[LOW, None])
    for name in gang(world, 6):
        world.filter(name)
    world.clock.advance(4)
    steps = world.meanwhile(step, lambda: end(world, "n3-0"))
    victims = world.own()
    assert victims in (["n1-0", "n2-0"], ["n1-0", "n2-0", "n3-0"][: 3 if len(steps) < step else 2])


def test_the_search_of_the_extender_for_a_gang_takes_no_more_than_five_seconds():
    """Also where budgets change all the time, so that it begins again and again."""
    world = Full(**{f"n{i}": [LOW, LOW] for i in range(60)})
    world.only = list(world.nodes)
    for name in gang(world, 2):
        world.filter(name)
    world.only = []
    world.clock.advance(4)
    began, searches = world.clock.now(), []

    def search(_) -> None:
        if world.state._lock._lock.locked():
            return
        world.clock.worked += 0.05
        world.clock.advance(0.05)
        searches.append(world.clock.now())
        world.state.preemption.set_budget("default/b", Budget("default", 5 + len(searches), ()))

    on_victim_search(world.state, search)
    assert len(world.own()) == 2
    assert world.clock.now() - began < 5.5


def test_no_more_than_8_members_of_a_gang_are_searched_again_under_the_lock():
    """If something has changed where more of them are, they are checked before."""
    world = Full(**{f"n{i}": [LOW] for i in range(20)})
    gang(world, 20)
    locked = []
    on_victim_search(world.state, lambda _: locked.append(world.state._lock._lock.locked()))
    counts = [20, 8]

    def change(_) -> None:
        if counts and sum(not is_locked for is_locked in locked) > 40:
            for i in range(counts.pop(0)):
                world.state.set_pod_without_request(f"other{len(counts)}-{i}", PlacedPod(f"n{i}", Load(1, 0, 1)))

    world.on_step(change)
    assert len(world.asks("g0")) == 1
    assert counts == []
    assert sum(locked) <= 8


def with_member_without_gpus(**cards: list[int | None]) -> Full:
    """Nodes whose cpu is too little for the member `ps`, which only node c can take."""
    world = Full(**cards)
    world.add_node("c", NodeSpec(0, cpu=64))
    for node, on in cards.items():
        world.add_node(node, NodeSpec(len(on), cpu=2 * len(on)))
    return world


@pytest.mark.parametrize("step", range(1, 8))
def test_no_pod_is_evicted_if_the_place_of_a_member_without_gpus_goes_during_the_search(step):
    world = with_member_without_gpus(n1=[LOW], n2=[LOW])
    members = [member(f"g{i}", "g", 3, gated=False, priority=HIGH, created=i, whole_gpu=1) for i in range(2)]
    world.create(*members, member("ps", "g", 3, gated=False, priority=HIGH, created=5, cpu="32"))
    steps = world.meanwhile(
        step, lambda: world.state.set_pod_without_request("other", PlacedPod("c", Load(60_000, 0, 1)))
    )
    assert world.asks("g0") == {} or len(steps) < step


def test_a_gang_of_64_on_8_nodes_of_8_gpus_gets_an_answer_in_one_call():
    """Whatever happens meanwhile in other namespaces and on other nodes."""
    world = Full(**{f"n{i}": [LOW] * 8 for i in range(8)}, busy=[HIGH])
    gang(world, 64)

    def change(step: int) -> None:
        late = bound(f"late{step}", 1, 0, node="busy")
        world.show_pod(late | {"spec": late["spec"] | {"priority": HIGH}})
        world.state.preemption.set_budget("other/busy", Budget("other", step, ()))

    steps = world.on_step(change)
    assert [len(victims) for victims in world.asks("g0").values()] == [1]
    assert steps.count("plan") <= 8


def test_of_two_simultaneous_calls_for_a_member_one_is_answered():
    """kube-scheduler's first call timed out, and the second ends before it."""
    world = Full(n1=[LOW], n2=[LOW])
    gang(world, 2)
    world.pods["g0"]["metadata"]["resourceVersion"] = "7"
    answers = []
    world.meanwhile(3, lambda: answers.append(world.asks("g0")))
    assert world.asks("g0") == {}
    assert len(answers[0]) == 1


def test_a_second_search_begins_with_what_has_changed_since_the_first():
    """The best node fails, and a budget that protected the pod of a better node than the second does so no more."""
    world = Full(n1=[LOW], n2=[LOW], n3=[LOW + 5])
    gang(world, 1)
    conditions = (LabelCondition("place", "In", frozenset(["n1-0"])),)
    world.state.preemption.set_budget("default/b", Budget("default", 0, conditions))

    def change() -> None:
        CHANGES["a card fails"](world)
        world.state.preemption.set_budget("default/b", Budget("default", 1, conditions))

    world.meanwhile(4, change)
    assert world.asks("g0") == {"n1": ["n1-0"]}


@pytest.mark.parametrize("step", range(1, 9))
def test_a_victim_that_a_budget_protects_since_the_search_began_stays(step):
    """Before, it was the first of the victims."""
    world = Full(**{f"n{i}": [LOW] for i in range(4)})
    gang(world, 3)
    protected = Budget("default", 0, (LabelCondition("place", "In", frozenset(["n0-0"])),))
    steps = world.meanwhile(step, lambda: world.state.preemption.set_budget("default/late", protected))
    answer = world.asks("g0")
    assert len(steps) > step
    assert len(answer) == 1
    assert "n0" not in answer


happens = st.sampled_from(["bound", "node", "nominated", "member", "ended", "ending", "budget"])


@settings(max_examples=examples(25, soak=400), deadline=None)
@given(
    nodes=st.lists(on_cards, min_size=1, max_size=4),
    size=st.integers(1, 5),
    happening=happens,
    step=st.integers(1, 12),
    data=st.data(),
)
def test_what_is_answered_is_what_would_be_answered_at_that_moment(nodes, size, happening, step, data):
    """Whatever happens during the search: as if it had happened before the call.

    Or as if it had happened afterwards, if no pod is evicted: kube-scheduler calls again.
    """
    assume(sum(on.count(None) for on in nodes) < size)
    node = f"n{data.draw(st.integers(0, len(nodes) - 1))}"
    card = data.draw(st.integers(0, 2))

    def change(world: Full) -> None:
        there = world.pods.get(f"{node}-{card}")
        if happening == "bound" and there is None and card < world.nodes[node].cards:
            world.runs("late", card, node, HIGH)
        elif happening == "node":
            world.state.remove_node(node)
        elif happening == "nominated":
            world.nominated_other(node)
        elif happening == "member":
            world.delete(f"g{size - 1}")
        elif happening == "ended" and there is not None:
            world.delete(f"{node}-{card}")
        elif happening == "budget":
            protects = LabelCondition("place", "In", frozenset([f"{node}-{card}"]))
            world.state.preemption.set_budget("default/late", Budget("default", 0, (protects,)))
        elif happening == "ending" and there is not None:
            world.terminate(f"{node}-{card}")

    def make_world() -> Full:
        world = Full(**{f"n{i}": on for i, on in enumerate(nodes)})
        gang(world, size)
        return world

    during, before, without = make_world(), make_world(), make_world()
    steps = during.meanwhile(step, lambda: change(during))
    answer = during.asks("g0")
    assume(len(steps) >= step)
    assert answer == before.asks("g0", before=lambda: change(before)) or answer == without.asks("g0") == {}


def test_no_pod_goes_for_a_gang_that_would_exceed_its_quota_as_a_whole():
    """Each member alone would not."""
    world = Full(n1=[LOW, LOW], n2=[LOW, LOW])
    world.state.set_quota(*as_quota({"gpus": 2}))  # it counts whole cards, and the others have shares
    assert [world.asks(name) for name in gang(world, 3)] == [{}, {}, {}]
    world.state.set_quota(*as_quota({"gpus": 3}))
    gone = [victim for name in ("g0", "g1", "g2") for victim in world.preempts(name)]
    assert len(gone) == 3
