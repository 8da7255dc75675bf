"""Pods of several card requests are searched for on a snapshot; the decision is right when it is reserved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import request
from cardwise.core.placement.placement import Placement, Scorer, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.cache import nodesearch, pacing, placing
from extender.cache.nodesearch import FEW
from extender.cache.placing import PlacementRequest
from extender.records.podref import PodRef
from tests.build import P100, asking, container, pod
from tests.examples import examples
from tests.extender.gangworlds import reserve
from tests.extender.nominationworlds import World
from tests.extender.worlds import ENDED, as_card, as_pod, as_quota, bound, make_state, resource
from tests.fakes.clock import FakeClock

NODES = [f"n{i:03}" for i in range(FEW + 4)]


class Busy(FakeClock):
    """A clock of which others use the pauses."""

    def __init__(self):
        super().__init__()
        self.others = []

    def sleep(self, seconds):
        super().sleep(seconds)
        if self.others:
            self.others.pop(0)()


def cluster(clock, frees, cards=2):
    """Nodes with so much free on each of their cards."""
    state = make_state(clock)
    for name, free in frees.items():
        state.set_node(name)
        for i in range(cards):
            state.set_card(*as_card(resource(i, node=name)))
            if free[i] < P100:
                state.set_pod(as_pod(bound(f"r-{name}-{i}", P100 - free[i], i, node=name)))
    return state


def make_request(name="p", whole=1, mem=8000):
    """A whole card, and a part of another."""
    pod_request = request.parse(pod(containers=[container("a", gpu_count=whole), container("b", gpu_mem=mem)]))
    return PlacementRequest(PodRef(f"uid-{name}", "default", name), pod_request, NODES, "binpack")


def occupy_card(state, name, index, mem):
    state.set_pod(as_pod(bound(f"other-{name}-{index}", mem, index, node=name)))


@pytest.fixture
def clock(monkeypatch):
    """The search of each node is followed by a pause."""
    busy = Busy()
    score = Scorer.score

    def score_slowly(self, node):
        busy.worked += 2 * pacing._WORK_SECONDS
        return score(self, node)

    monkeypatch.setattr(Scorer, "score", score_slowly)
    return busy


def test_the_lock_is_free_while_nodes_are_searched(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    free = []
    clock.others = [lambda: free.append(not state._lock._lock.locked())] * len(NODES)
    placement = state.plan_pod(make_request())
    assert isinstance(placement, Unplaceable)
    assert set(placement.refusals.values()) == {Refusal.TOGETHER}
    assert placement.refusals.keys() == set(NODES)
    assert free == [True] * (len(NODES) - 1), "a pause before each node but the first"


def test_what_others_take_meanwhile_is_theirs(clock):
    frees = dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000), "n001": (P100, 9000)}
    state = cluster(clock, frees)
    clock.others = [lambda: None] * 5 + [lambda: occupy_card(state, "n000", 1, 1)]
    placement = state.plan_pod(make_request())
    assert isinstance(placement, Placement)
    assert placement.node == "n001"
    with state.view() as ledger:
        assert ledger.violations() == []


def test_where_all_that_was_found_is_taken_it_comes_again_at_once(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000)})
    ended = as_pod(bound("r-n001-1", P100 - 100, 1, node="n001", phase="Succeeded", containers=ENDED))
    clock.others = [lambda: None] * 5 + [lambda: occupy_card(state, "n000", 1, 1), lambda: state.set_pod(ended)]
    clock.advance(10)
    assert state.next_requeue_node() is None
    placement = state.plan_pod(make_request())
    assert isinstance(placement, Unplaceable)
    assert state.next_requeue_node() is not None, "room has come on a node that was looked at before"


def test_nobody_is_woken_where_nothing_has_come():
    clock = Busy()
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)))
    clock.advance(10)
    assert isinstance(state.plan_pod(make_request()), Unplaceable)
    assert state.next_requeue_node() is None


@pytest.mark.parametrize("steps", [100, 0])
def test_the_decision_tries_no_more_cards_than_others_may_wait_for(steps, monkeypatch):
    """On no node the first choice of cards does for all containers."""
    monkeypatch.setattr(placing, "_STEPS", steps)
    state = cluster(FakeClock(), dict.fromkeys(NODES, (10_000, 7_000, 7_000)), cards=3)
    parts = [container("a", gpu_mem=10_000, gpu_count=2), container("b", gpu_mem=8000, gpu_count=2)]
    pod_request = request.parse(pod(containers=parts))
    placement = state.plan_pod(make_request()._replace(request=pod_request))
    assert isinstance(placement, Placement if steps else Unplaceable)


def test_filter_without_one_best_node_and_prioritize_have_all_nodes_that_fit(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000), "n001": (P100, 9000)})
    assert state.score_fitting_nodes(make_request()).keys() == {"n000", "n001"}
    assert state.score_nodes(make_request()).keys() == {"n000", "n001"}


def test_they_are_not_decided_ahead_of_filter():
    """That would hold the lock for all nodes."""
    world = World()
    world.node("n2", cards=4)
    pod = asking("two", gpu_mem=100)
    pod["metadata"] |= {"resourceVersion": "7", "creationTimestamp": "2026-11-21T10:00:00Z"}
    pod["spec"]["priority"] = 0
    pod["spec"]["containers"].append(container("b", whole_gpu=1, share=1))
    world.show_pod(pod)
    world.create("one", 100)
    assert world.nominate_all().keys() == {"one"}


frees = st.lists(st.tuples(*[st.sampled_from([0, 4000, 8000, P100])] * 2), min_size=3, max_size=6)


@settings(max_examples=examples(40, soak=500), deadline=None)
@given(frees, st.sampled_from([1, 2]), st.sampled_from([1, 8000]), st.booleans())
def test_on_a_snapshot_and_under_the_lock_the_same_is_decided(frees, whole, mem, limited):
    answers = []
    for most_cards in (1, 100):
        state = cluster(FakeClock(), {f"n{i}": free for i, free in enumerate(frees)})
        if limited:
            state.set_quota(*as_quota({"memoryMiB": sum(P100 - mib for some in frees for mib in some) + 20_000}))
        placement_request = make_request(whole=whole, mem=mem)._replace(nodes=[f"n{i}" for i in range(len(frees))])
        original, nodesearch.FEW = nodesearch.FEW, most_cards
        try:
            answers.append((state.plan_pod(placement_request), state.score_nodes(placement_request)))
        finally:
            nodesearch.FEW = original
    assert answers[0] == answers[1]


def test_what_is_reserved_for_a_gang_counts():
    state = cluster(FakeClock(), dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 9000), "n001": (P100, 8000)})
    reserve(state, "n000", 10_000)
    wanted = make_request()._replace(rank=(0, 0, "", ""))
    placement = state.plan_pod(wanted)
    assert isinstance(placement, Placement)
    assert placement.node == "n001"
    occupy_card(state, "n001", 0, 100)
    refused = state.plan_pod(wanted._replace(pod=PodRef("uid-q", "default", "q")))
    assert isinstance(refused, Unplaceable)
    assert {node for node, reason in refused.refusals.items() if reason is Refusal.GANG_RESERVED} == {"n000"}
