"""Searches change the live ledger temporarily: it is restored after any exception."""

import json
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from cardwise.core.api import request
from cardwise.core.placement import placement
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Scorer
from cardwise.core.preemption import preemption
from cardwise.core.values.refusals import Refusal
from extender.api import verbs
from extender.cache.nodeload import NodeLoads
from extender.cache.reservations import Phase
from extender.records import wire
from extender.records.podref import PodRef
from tests.build import P100, asking, extended_resource
from tests.extender import nominationcluster
from tests.extender.gangcluster import NodeSpec, World, member
from tests.extender.preemption.test_gangpreemption import LOW, PREFERENCES, Full, gang
from tests.extender.states import as_card, as_quota, begin, make_state, plan, with_cards

# The functions that a search calls; none of them is called after the decision.
STEPS = [
    (Scorer, "__init__"),
    (Scorer, "place_on"),
    (Scorer, "score_all"),
    (Scorer, "best_node"),
    (Ledger, "used_amounts"),
    (NodeLoads, "free_load"),
    (placement, "place"),
    (preemption, "least_harmful_victims"),
]


class Broken(Exception):
    """An internal error in the middle of a search."""


class Steps:
    """Counts calls, and raises in the call with this number."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.at = 0

    @contextmanager
    def counted(self):
        patches = [patch.object(owner, name, self._counted(getattr(owner, name))) for owner, name in STEPS]
        for started in patches:
            started.start()
        try:
            yield
        finally:
            for started in patches:
                started.stop()

    def _counted(self, step):
        def stepped(*args, **kwargs):
            self.at += 1
            if self.at == self.failing:
                raise Broken
            return step(*args, **kwargs)

        return stepped


def sums(ledger):
    return {node.name: (list(node.free), list(node.clients)) for node in ledger.nodes()}


def check(world):
    """Check that the ledger and the totals match the table of reservations."""
    table = world._reservations
    rows = {holder.pod.uid: holder for holder in table.rows_in_phases(*Phase)}
    with world.view() as ledger:
        assert {holder.uid for holder in ledger.holdings()} == {uid for uid in rows if table.holding(uid) is not None}
        assert all(ledger.holding(uid) == table.holding(uid) for uid in rows)
        anew = ledger.empty_copy()
        for node in ledger.nodes():
            anew.set_cards(node.name, node.cards)
        for holder in ledger.holdings():
            anew.set_holding(holder)
        assert sums(ledger) == sums(anew)
        planned = Counter({uid: 1 for uid, holder in rows.items() if holder.load is not None})
        assert Counter(world._loads._planned) == planned
        used = Counter()
        for placed in world._loads._pods.values():
            used[placed.node] += placed.load.cpu
        assert {node: total.cpu for node, total in world._loads._sums.items()} == dict(used)
    gangs = world.gangs._gangs.values()
    assert {uid: holder.node for uid, holder in rows.items() if holder.phase is Phase.WAITING} == {
        uid: node for gang in gangs for uid, node in gang.plan.items()
    }
    assert world.gangs._permits.keys() == {gang.key for gang in gangs if gang.plan}
    return {uid: (holder.places, holder.named_node) for uid, holder in table.nominations._by_pod.items()}


# Each returns a world and a call.


def a_pod_for_whom_a_later_one_gives_way():
    world = nominationcluster.World("n1", "n2")
    world.state.set_quota(*as_quota({"shares": 2}))
    plan(world.state, "asker", 1000, "n2")
    for name in ("held", "other"):
        world.create(name, P100 // 2 + 1)
    assert len(world.nominate_all()) == 1
    world.create("asker", P100, created="2026-11-20T10:00:00Z")
    return world.state, lambda: world.filter("asker", "n1", "n2")


def a_gang_for_which_a_later_pod_gives_way():
    world = nominationcluster.World("n1", "n2")
    world.create("held", P100 // 2 + 1, created="2026-11-21T12:00:00Z")
    assert len(world.nominate_all()) == 1
    for name in ("g0", "g1"):
        world.show_pod(member(name, "g", 2, gated=False, gpu_mem=P100))

    def attempt():
        return [world.answer(name, "n1", "n2").node_names for name in ("g0", "g1")]

    return world.state, attempt


def a_gang_to_which_a_node_is_not_offered_any_more():
    world = World({"n1": 1, "n2": 1, "n3": 1})
    for name in ("g0", "g1"):
        world.create(member(name, "g", 2, gated=False, gpu_mem=P100))
    nodes, _ = world.filter("g0")
    world.nodes[nodes[0]].cpu = 0
    return world.state, lambda: (world.filter("g0"), world.phase("g"))


def a_gang_to_which_no_node_is_offered_any_more():
    world = World({"n1": 1, "n2": 1})
    for name in ("g0", "g1"):
        world.create(member(name, "g", 2, gated=False, gpu_mem=P100))
    nodes, _ = world.filter("g0")
    world.nodes[nodes[0]].cpu = 0
    return world.state, lambda: (world.filter("g0"), world.phase("g"))


def a_gang_for_which_pods_must_go():
    world = Full(n1=[LOW, LOW], n2=[LOW, None])
    names = gang(world, 3)
    world.preempts(names[0])
    world.add_node("n3", NodeSpec(1))
    assert not world.filter(names[1])[0]
    chosen = {node: {"Pods": [{"UID": f"uid-{node}-0"}]} for node in ("n1", "n2")}
    args = wire.decode_preempt_args(json.dumps({"Pod": world.pods[names[1]], "NodeNameToMetaVictims": chosen}).encode())

    def attempt():
        victims_by_node = verbs.preempt(world.state, PREFERENCES, args).node_name_to_meta_victims
        return {node: [pod.uid for pod in victims.pods] for node, victims in victims_by_node.items()}

    return world.state, attempt


def a_pod_whose_plan_is_lost_at_bind():
    world = with_cards(make_state(), n1=2)
    world.set_quota(*as_quota({"shares": 1}))
    placed = plan(world, "p", 1000)
    index = placed.assignment.shares()[0].index
    world.set_card(*as_card(extended_resource(index, node="n1", health="Unhealthy")))
    pod_request = request.parse(asking("p", gpu_mem=1000))
    return world, lambda: world.assume(PodRef("uid-p", "default", "p"), pod_request, "n1", "binpack", epoch=0)


SCENES = [
    a_pod_for_whom_a_later_one_gives_way,
    a_gang_for_which_a_later_pod_gives_way,
    a_gang_to_which_a_node_is_not_offered_any_more,
    a_gang_to_which_no_node_is_offered_any_more,
    a_gang_for_which_pods_must_go,
    a_pod_whose_plan_is_lost_at_bind,
]


@pytest.mark.parametrize("scene", SCENES)
def test_a_search_that_fails_anywhere_leaves_nothing_behind(scene):
    world, ask = scene()
    whole = Steps(0)
    with whole.counted():
        expected = ask()
    check(world)
    assert whole.at >= 3, "the scene searches for nothing"
    for failing in range(1, whole.at + 1):
        world, ask = scene()
        before = check(world)
        with Steps(failing).counted(), pytest.raises(Broken):
            ask()
        assert check(world) == before
        assert ask() == expected


def test_a_plan_that_a_fault_has_put_out_of_the_ledger_is_not_bound():
    """Another pod may have its cards."""
    world = with_cards(make_state(), n1=1)
    plan(world, "p", 5000)
    with world.view() as ledger:
        ledger.release("uid-p")
    plan(world, "q", P100)
    assert begin(world, "p", 5000) is Refusal.NO_MEMORY
