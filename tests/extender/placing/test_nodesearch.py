"""Nodes for pods with several card requests are searched on a snapshot; the decision is checked when it is reserved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import request
from cardwise.core.placement import searching
from cardwise.core.placement.placement import Placement, Scorer, Unplaceable
from cardwise.core.values.refusals import Refusal
from extender.cache import pacing
from extender.placing import nodesearch, placing
from extender.placing.nodesearch import SMALL_SEARCH_NODES
from extender.placing.placing import Call, LeaderChanged, PlacementRequest, SearchUnfinished
from extender.queue import searchpauses
from extender.records.podref import PodRef
from tests.build import P100, asking, container, extended_resource, pod
from tests.examples import examples
from tests.extender.gangcluster import reserve
from tests.extender.nominationcluster import World
from tests.extender.states import ENDED, as_card, as_pod, as_quota, bound, make_state
from tests.fakes.clock import FakeClock

NODES = [f"n{i:03}" for i in range(SMALL_SEARCH_NODES + 4)]


class Busy(FakeClock):
    """A clock that calls a function in each pause."""

    def __init__(self):
        super().__init__()
        self.others = []

    def sleep(self, seconds):
        super().sleep(seconds)
        if self.others:
            self.others.pop(0)()


def cluster(clock, frees, cards=2):
    """Nodes with these free MiB on each of their cards."""
    state = make_state(clock)
    for name, free in frees.items():
        state.set_node(name)
        for i in range(cards):
            state.set_card(*as_card(extended_resource(i, node=name)))
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


def test_cards_that_others_took_during_the_search_are_not_used(clock):
    frees = dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000), "n001": (P100, 9000)}
    state = cluster(clock, frees)
    clock.others = [lambda: None] * 5 + [lambda: occupy_card(state, "n000", 1, 1)]
    placement = state.plan_pod(make_request())
    assert isinstance(placement, Placement)
    assert placement.node == "n001"
    with state.view() as ledger:
        assert ledger.violations() == []


def test_nothing_is_reserved_if_the_leader_changes_during_the_search(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 8000)))
    clock.others = [lambda: None] * 5 + [state.forget_plans]
    placement_request = make_request()
    with pytest.raises(LeaderChanged):
        state.plan_pod(placement_request)
    with state.view() as ledger:
        assert ledger.holding(placement_request.pod.uid) is None
    assert isinstance(state.plan_pod(make_request()), Placement), "a later call of the next epoch"


def test_where_all_that_was_found_is_taken_it_comes_again_at_once(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000)})
    ended = as_pod(bound("r-n001-1", P100 - 100, 1, node="n001", phase="Succeeded", containers=ENDED))
    clock.others = [lambda: None] * 5 + [lambda: occupy_card(state, "n000", 1, 1), lambda: state.set_pod(ended)]
    clock.advance(10)
    assert state.next_requeue_node() is None
    placement = state.plan_pod(make_request())
    assert isinstance(placement, Unplaceable)
    assert state.next_requeue_node() is not None, "room has come on a node that was looked at before"


def test_a_pod_is_not_refused_while_nodes_fit_that_the_decision_has_not_tried(clock):
    """The best nodes are taken during the search. After a refusal kube-scheduler would preempt on them."""
    state = cluster(clock, dict.fromkeys(NODES, (P100, P100)))

    def occupy_best_nodes():
        for name in NODES[:SMALL_SEARCH_NODES]:
            for index in (0, 1):
                occupy_card(state, name, index, P100)

    clock.others = [lambda: None] * (len(NODES) - 2) + [occupy_best_nodes]
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request())
    assert state.plan_pod(make_request()).node == NODES[SMALL_SEARCH_NODES]


def test_no_pod_is_requeued_without_freed_capacity():
    clock = Busy()
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)))
    clock.advance(10)
    assert isinstance(state.plan_pod(make_request()), Unplaceable)
    assert state.next_requeue_node() is None


@pytest.mark.parametrize("steps", [100, 0])
def test_the_decision_tries_no_more_cards_than_others_may_wait_for(steps, monkeypatch):
    """On each node the first choice of cards leaves one container without a card."""
    monkeypatch.setattr(placing, "_MAX_STEPS_UNDER_LOCK", steps)
    state = cluster(FakeClock(), dict.fromkeys(NODES, (10_000, 7_000, 7_000)), cards=3)
    parts = [container("a", gpu_mem=10_000, gpu_count=2), container("b", gpu_mem=8000, gpu_count=2)]
    pod_request = request.parse(pod(containers=parts))
    placement_request = make_request()._replace(request=pod_request)
    if steps:
        assert isinstance(state.plan_pod(placement_request), Placement)
    else:
        with pytest.raises(SearchUnfinished):
            state.plan_pod(placement_request)


@pytest.fixture
def searched(monkeypatch):
    """The names of the nodes that were searched, in order."""
    names = []
    score = Scorer.score

    def record_score(self, node):
        names.append(node.name)
        return score(self, node)

    monkeypatch.setattr(Scorer, "score", record_score)
    return names


@pytest.fixture
def limited(clock, searched):
    """A clock that gives a search the time for five nodes."""
    clock.others = [lambda: None] * 4 + [lambda: clock.advance(nodesearch._SEARCH_SECONDS)]
    return clock


@pytest.mark.parametrize("method", ["plan_pod", "score_fitting_nodes"])
def test_a_search_ends_with_the_time_of_its_call(limited, searched, method):
    state = cluster(limited, dict.fromkeys(NODES, (P100, 7999)))
    with pytest.raises(SearchUnfinished):
        getattr(state, method)(make_request())
    assert searched == NODES[:5]


def test_the_next_search_continues_where_the_last_one_ended(limited, searched):
    state = cluster(limited, dict.fromkeys(NODES, (P100, 7999)))
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request())
    placement = state.plan_pod(make_request("equal"))
    assert isinstance(placement, Unplaceable)
    assert placement.refusals == dict.fromkeys(NODES, Refusal.TOGETHER)
    assert searched == NODES, "each node once"


def test_a_pod_gets_a_node_that_the_first_search_has_not_reached(limited):
    state = cluster(limited, dict.fromkeys(NODES, (P100, 7999)) | {NODES[-1]: (P100, 8000)})
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request())
    assert state.plan_pod(make_request()).node == NODES[-1]


def test_a_search_that_ends_early_returns_the_nodes_that_fit_so_far(limited):
    state = cluster(limited, dict.fromkeys(NODES, (P100, 7999)) | {"n001": (P100, 8000), NODES[-1]: (P100, 8000)})
    assert state.plan_pod(make_request()).node == "n001"


def test_prioritize_scores_the_nodes_that_were_searched(limited):
    state = cluster(limited, dict.fromkeys(NODES, (P100, 8000)))
    assert state.score_nodes(make_request()).keys() == set(NODES[:5])


def test_the_time_of_a_call_counts_from_its_arrival(clock, searched):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 8000)))
    late = make_request()._replace(call=Call(clock.now() - nodesearch._SEARCH_SECONDS))
    with pytest.raises(SearchUnfinished):
        state.plan_pod(late)
    assert searched == []


def test_the_search_of_an_abandoned_call_ends_and_reserves_nothing(clock, searched):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 8000)))
    abandoned = []
    clock.others = [lambda: None] * 4 + [lambda: abandoned.append(True)]
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request()._replace(call=Call(None, lambda: bool(abandoned))))
    assert searched == NODES[:5]
    assert state.reservation_counts()["reserved"] == 0


def change_card(state):
    occupy_card(state, "n003", 0, 100)


def free_card(state):
    state.set_pod(as_pod(bound("r-n003-1", P100 - 7999, 1, node="n003", phase="Succeeded", containers=ENDED)))


def limit_namespace(state):
    state.set_quota(*as_quota({"memoryMiB": 1}))


def nothing(state):
    pass


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (nothing, []),
        (change_card, ["n003"]),
        (free_card, ["n003"]),
        (limit_namespace, NODES),
    ],
)
def test_a_search_without_a_node_is_repeated_only_on_changed_nodes(clock, searched, change, again):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    first = state.plan_pod(make_request())
    assert isinstance(first, Unplaceable)
    searched.clear()
    clock.advance(10)
    change(state)
    second = state.plan_pod(make_request("equal"))
    assert searched == again
    assert isinstance(second, Placement if change is free_card else Unplaceable)


def test_cards_that_were_reserved_for_a_gang_count_in_the_next_search(clock, searched):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    wanted = make_request()._replace(rank=(0, 0, "", ""))
    assert isinstance(state.plan_pod(wanted), Unplaceable)
    searched.clear()
    clock.advance(10)
    reserve(state, "n003", 10_000)
    assert isinstance(state.plan_pod(wanted), Unplaceable)
    assert searched == NODES


def test_a_refusal_for_want_of_effort_is_not_remembered(clock, searched, monkeypatch):
    monkeypatch.setattr(searching, "_MAX_STEPS", 0)
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    assert isinstance(state.plan_pod(make_request()), Unplaceable)
    searched.clear()
    clock.advance(10)
    assert isinstance(state.plan_pod(make_request()), Unplaceable)
    assert searched == NODES


def test_the_refusal_of_an_equal_pod_does_not_count_where_the_pod_itself_has_its_plan(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000)})
    assert state.plan_pod(make_request("first")).node == "n000"
    assert isinstance(state.plan_pod(make_request("equal")), Unplaceable)
    assert state.plan_pod(make_request("first")).node == "n000", "its bind failed, and it is tried again"


def test_many_searches_of_a_namespace_displace_only_its_own(clock, searched):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    quiet = make_request()._replace(pod=PodRef("uid-quiet", "quiet", "q"))
    state.plan_pod(quiet)
    for mem in range(8000, 8000 + 2 * nodesearch._MAX_REMEMBERED_SEARCHES):
        clock.advance(10)
        state.plan_pod(make_request(mem=mem))
    searched.clear()
    state.plan_pod(quiet)
    assert searched == []
    assert len(state._node_search._remembered) == nodesearch._MAX_REMEMBERED_SEARCHES


def test_where_nothing_is_remembered_another_search_begins_with_other_nodes(limited, searched, monkeypatch):
    state = cluster(limited, dict.fromkeys(NODES, (P100, 7999)))
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request())
    state._node_search._remembered.clear()
    searched.clear()
    state.plan_pod(make_request())
    assert searched == [*NODES[5:], *NODES[:5]]


def test_after_a_long_search_without_a_node_the_namespace_pauses_ten_times_as_long(clock, searched):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    cost = len(NODES) * 2 * pacing._WORK_SECONDS
    state.plan_pod(make_request())
    searched.clear()
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request("different", mem=8001))
    assert len(searched) == SMALL_SEARCH_NODES
    searched.clear()
    remembered = state.plan_pod(make_request("equal"))
    assert isinstance(remembered, Unplaceable), "what is known needs no search"
    assert searched == []
    state.plan_pod(make_request("other", mem=8002)._replace(pod=PodRef("uid-other", "other", "other")))
    assert set(searched) == set(NODES), "other namespaces do not pause"
    clock.advance(10 * cost - 0.1)
    with pytest.raises(SearchUnfinished):
        state.plan_pod(make_request("different", mem=8003))
    clock.advance(0.1)
    searched.clear()
    state.plan_pod(make_request("different", mem=8004))
    assert set(searched) == set(NODES), "calls during the pause do not extend it"


def test_a_pod_that_fits_on_many_nodes_gets_a_node_in_the_pause_of_its_namespace(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    state.plan_pod(make_request())
    assert isinstance(state.plan_pod(make_request("fits", mem=7000)), Placement)


def test_in_the_pause_each_call_searches_other_nodes(clock, searched):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999)))
    state.plan_pod(make_request(mem=8001))
    searched.clear()
    for mem in (8002, 8003):
        with pytest.raises(SearchUnfinished):
            state.plan_pod(make_request(mem=mem))
    rest = len(NODES) - SMALL_SEARCH_NODES
    assert searched == [*NODES[:SMALL_SEARCH_NODES], *NODES[-rest:], *NODES[: SMALL_SEARCH_NODES - rest]]


@pytest.mark.parametrize("was_short", [False, True], ids=["it fits", "short"])
def test_there_is_no_pause_after_a_short_or_successful_search(clock, searched, monkeypatch, was_short):
    if was_short:
        monkeypatch.setattr(searchpauses, "SHORT_SECONDS", 1.0)
    state = cluster(clock, dict.fromkeys(NODES, (P100, 7999 if was_short else 8000)))
    state.plan_pod(make_request())
    searched.clear()
    state.plan_pod(make_request("different", mem=8001))
    assert set(searched) == set(NODES)


def test_filter_without_one_best_node_and_prioritize_have_all_nodes_that_fit(clock):
    state = cluster(clock, dict.fromkeys(NODES, (P100, 100)) | {"n000": (P100, 8000), "n001": (P100, 9000)})
    assert state.score_fitting_nodes(make_request()).keys() == {"n000", "n001"}
    assert state.score_nodes(make_request()).keys() == {"n000", "n001"}


def test_they_are_not_decided_ahead_of_filter():
    """Nominating them would hold the lock for a search of all nodes."""
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
        original, nodesearch.SMALL_SEARCH_NODES = nodesearch.SMALL_SEARCH_NODES, most_cards
        try:
            answers.append((state.plan_pod(placement_request), state.score_nodes(placement_request)))
        finally:
            nodesearch.SMALL_SEARCH_NODES = original
    assert answers[0] == answers[1]


changes = st.one_of(
    st.tuples(st.just("occupy"), st.integers(0, 3), st.integers(0, 1), st.sampled_from([1, 4000])),
    st.tuples(st.just("end"), st.integers(0, 3), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("reserve"), st.integers(0, 3), st.just(0), st.just(0)),
    st.tuples(st.just("limit"), st.just(0), st.just(0), st.sampled_from([1, 100_000])),
    st.tuples(st.just("plan"), st.sampled_from([1, 2]), st.integers(0, 2), st.sampled_from([1, 4001])),
)


def apply_change(state, kind, first, second, mem):
    name = f"n{first}"
    if kind == "occupy":
        occupy_card(state, name, second, mem)
    elif kind == "end":
        ended = bound(f"other-{name}-{second}", 1, second, node=name, phase="Succeeded", containers=ENDED)
        state.set_pod(as_pod(ended))
    elif kind == "reserve":
        reserve(state, name, 10_000)
    elif kind == "limit":
        state.set_quota(*as_quota({"memoryMiB": mem}))
    else:
        wanted = make_request(f"p{second}", first, mem)
        return state.plan_pod(wanted._replace(nodes=[f"n{i}" for i in range(4)], rank=(0, 0, "", "")))
    return None


@settings(max_examples=examples(60, soak=1000), deadline=None)
@given(st.lists(st.sampled_from([0, 4000, P100]), min_size=8, max_size=8), st.lists(changes, max_size=30))
def test_what_a_search_remembers_changes_no_decision(frees, steps):
    original, nodesearch.SMALL_SEARCH_NODES = nodesearch.SMALL_SEARCH_NODES, 1
    try:
        by_name = {f"n{i}": tuple(frees[2 * i : 2 * i + 2]) for i in range(4)}
        remembering, forgetful = (cluster(FakeClock(), by_name) for _ in range(2))
        for step in steps:
            forgetful._node_search._remembered.clear()
            assert apply_change(remembering, *step) == apply_change(forgetful, *step)
    finally:
        nodesearch.SMALL_SEARCH_NODES = original


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
