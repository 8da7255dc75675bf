"""What a filter call of a single pod does under the lock has a limit, whatever the pod requests and lacks.

Where more would be needed, the nodes are searched without the lock.
"""

import pytest

from cardwise.core.api import request
from cardwise.core.api.quotas import GPUQuota, QuotaEntry
from cardwise.core.placement import fitting, searching
from cardwise.core.placement.cardindex import CardIndex
from cardwise.core.placement.ledger import Ledger
from cardwise.core.placement.placement import Placement, Scorer, Unplaceable
from cardwise.core.values.quantity import MiB
from extender.cache import cache, gangcards
from extender.nomination.nominator import NominationSettings
from extender.placing.nodesearch import SMALL_SEARCH_NODES
from extender.placing.placing import PlacementRequest
from extender.records.podref import PodRef
from extender.state import State
from tests.build import container, extended_resource, holding, pod
from tests.core.placement.placing import of_class
from tests.extender.states import ENDED, as_card, as_pod, asking, bound
from tests.fakes.clock import FakeClock

NODES = [f"n{i:03}" for i in range(250)]
CARDS = 8
FULL, FULL_END = NODES[:-2], NODES[-2]  # the last two nodes have no shares
MAX_CHECKS = len(NODES) * CARDS * 2 // 3


@pytest.fixture(scope="module")
def state():
    """Each card has one share of its four, except on the last two nodes."""
    state = State(clock=FakeClock(), max_clients=4, nomination_settings=NominationSettings(above_nodes=0))
    for name in NODES:
        state.set_node(name)
        for i in range(CARDS):
            state.set_card(*as_card(extended_resource(i, node=name)))
        if name in FULL:
            state.set_pod(as_pod(bound(f"r-{name}", 1000 * CARDS, *range(CARDS), node=name)))
    entries = QuotaEntry(shares=2), QuotaEntry(memory=MiB(500), model="another")
    state.set_quota("limited/team", GPUQuota(namespace="limited", name="team", entries=entries))
    state.set_quota("full/team", GPUQuota(namespace="full", name="team", entries=(QuotaEntry(shares=0),)))
    with state.view() as ledger:
        ledger.index()
    return state


@pytest.fixture
def checks(state, monkeypatch):
    """How many cards were checked while the lock was held; a node counts as its cards."""
    counts, outermost = [0], [True]

    def count(owner, name, cards):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            if not outermost[0] or not state._lock._lock.locked():
                return function(*args, **kwargs)
            counts[0] += cards
            outermost[0] = False
            try:
                return function(*args, **kwargs)
            finally:
                outermost[0] = True

        monkeypatch.setattr(owner, name, counted)

    count(fitting, "has_capacity", 1)
    for owner, name in (
        (fitting, "refusal_of_node"),
        (searching, "refusal_reason"),
        (searching, "fit_request"),
        (Scorer, "_score"),
    ):
        count(owner, name, CARDS)
    return counts


def containers(count, **amounts):
    return [container(f"c{i}", **amounts) for i in range(count)]


SHAPES = {
    "more containers than clients of a card": (containers(5, gpu_mem=1), "default", {}),
    "as many containers as clients": (containers(4, gpu_mem=1), "default", {}),
    "SMs and too many containers": (containers(5, gpu_mem=1, gpu_core=1), "default", {}),
    "a quota of fewer shares": (containers(3, gpu_mem=1), "limited", {}),
    "a quota without shares": (containers(1, gpu_mem=1), "full", {}),
    "MPS is required and not there": (containers(1, gpu_mem=1), "default", {"cardwise.dev/isolation": "mps"}),
    "whole cards": (containers(1, gpu_count=9), "default", {}),
    "whole cards of empty nodes": (containers(1, gpu_count=8), "default", {}),
    "whole cards and a quota": (containers(1, gpu_count=8), "full", {}),
    "an unknown class": ([of_class("nothing", gpu_mem=1)], "default", {}),
}


def make_request(shape):
    parts, namespace, annotations = SHAPES[shape]
    pod_request = request.parse(pod(containers=parts, annotations=annotations))
    return PlacementRequest(PodRef(f"uid-{shape}", namespace, "p"), pod_request, NODES, "binpack")


def node_by_node(state, placement_request):
    """The scores and refusals without a limit."""
    snapshot = state.snapshot()
    headroom = snapshot.headroom(placement_request.pod.namespace)
    scorer = Scorer(snapshot.ledger.kinds, placement_request.request, "binpack", headroom)
    return scorer.score_all(snapshot.ledger, NODES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["plan_pod", "score_fitting_nodes"])
def test_the_cards_that_are_checked_under_the_lock_are_limited(state, checks, shape, method):
    placement_request = make_request(shape)
    scores, refusals = node_by_node(state, placement_request)
    checks[0] = 0
    answer = getattr(state, method)(placement_request)
    assert checks[0] <= MAX_CHECKS
    if isinstance(answer, Placement):
        assert answer.node == min(scores, key=lambda name: (-scores[name], name))
        state.forget_plans()
    elif isinstance(answer, Unplaceable):
        assert (answer.refusals, scores) == (refusals, {})
    else:
        assert answer == scores


def test_the_limit_holds_for_all_ranks_of_a_policy_together(state, checks):
    placement_request = make_request("as many containers as clients")._replace(
        ranks={n: i for i, n in enumerate(NODES)}
    )
    answer = state.plan_pod(placement_request)
    assert answer.node == FULL_END
    assert checks[0] <= MAX_CHECKS
    state.forget_plans()


def test_what_a_big_gang_has_reserved_is_counted_only_on_the_nodes_that_are_tried(state, monkeypatch):
    reserved = {name: [holding(f"g-{name}", 1000, 0, node=name)] for name in NODES}
    owner = gangcards._Owner("team", (-9, 0, "", "team/g"), frozenset())
    monkeypatch.setattr(state._cache.gang_cards, "_owner_then", owner)
    monkeypatch.setattr(state._cache.gang_cards, "_by_node", reserved)
    parts = [container("a", gpu_count=1), container("b", gpu_mem=1)]
    pod_request = request.parse(pod(containers=parts))
    placement_request = PlacementRequest(
        PodRef("uid-two", "default", "p"), pod_request, NODES, "binpack", rank=(0, 0, "", "p")
    )
    counted = []
    set_holding = Ledger.set_holding

    def count(ledger, added):
        if ledger is state._ledger:
            counted.append(added)
        return set_holding(ledger, added)

    monkeypatch.setattr(Ledger, "set_holding", count)
    assert isinstance(state.plan_pod(placement_request), Placement)
    assert len(counted) <= 2 * SMALL_SEARCH_NODES + 1
    state.forget_plans()


@pytest.mark.parametrize("method", ["plan_pod", "score_fitting_nodes", "nominate_next_pod", "warm_caches"])
def test_few_changed_nodes_are_indexed_in_one_hold_of_the_lock(state, method, monkeypatch):
    """A gang changes hundreds of nodes at once."""
    for name in NODES:
        state.set_pod(as_pod(bound(f"g-{name}", 1, 0, node=name)))
    indexed = []
    refresh = CardIndex.refresh

    def record_refresh(index, changed):
        changed = list(changed)
        indexed.append(len(changed))
        refresh(index, changed)

    monkeypatch.setattr(CardIndex, "refresh", record_refresh)
    calls = {"nominate_next_pod": (state.nominator, ()), "warm_caches": (state, ())}
    owner, arguments = calls.get(method, (state, (make_request("whole cards"),)))
    getattr(owner, method)(*arguments)
    assert max(indexed) <= cache._NODES_INDEXED_PER_LOCK
    assert sum(indexed) >= len(NODES) - cache._NODES_INDEXED_PER_LOCK
    for name in NODES:
        state.set_pod(as_pod(bound(f"g-{name}", 1, 0, node=name, phase="Succeeded", containers=ENDED)))


def test_a_pod_whose_search_takes_long_is_not_nominated(state, checks):
    state.nominator.add_scheduler("default-scheduler")
    manifest = asking("nominee", containers=containers(5, gpu_mem=1))
    record = as_pod(manifest)
    state.set_pod(record)
    assert state.nominator.nominate_next_pod().nominee is None
    assert checks[0] <= MAX_CHECKS
    state.remove_pod(record)
