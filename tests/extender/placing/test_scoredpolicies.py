"""Scored policies in the extender: the result of filter, and a workload that is saved across restarts."""

import json
import math

import pytest

from cardwise.core.api import names, policies
from cardwise.core.api.cardlimits import CardLimits
from cardwise.kube import paths
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.controllers.workloadcontroller import WorkloadController
from extender.nomination.nominator import NominationSettings
from extender.records.nodeinfo import NodeRecord
from extender.records.wire import FilterArgs
from tests.build import P100, asking
from tests.extender.nominationcluster import World as Ahead
from tests.extender.states import as_pod, bound, make_state, with_cards
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock

PRICED = AnswerSettings(policy="priced", one_best_node=True)
PATH = paths.configmaps("cardwise-system", names.WORKLOAD)
SPOILT = '{"version":1,"requests":[[1,8000,0,"",0,0,NaN]]}'


def api_with_workload(text):
    """An API server on which this workload was saved."""
    api = ApiServer(FakeClock())
    metadata = {"namespace": "cardwise-system", "name": names.WORKLOAD}
    api.write_object(paths.configmaps(), {"metadata": metadata, "data": {names.WORKLOAD_REQUESTS: text}})
    return api


def saved(api, key=names.WORKLOAD_REQUESTS):
    return ((api.get(PATH) or {}).get("data") or {}).get(key)


def world(**nodes):
    """Nodes of P100 cards with these free MiB on each, and their other resources."""
    state = with_cards(make_state(), **{node: len(frees) for node, frees in nodes.items()})
    for node, frees in nodes.items():
        state.set_node(node, NodeRecord())
        for i, free in enumerate(frees):
            if free < P100:
                state.set_pod(as_pod(bound(f"{node}-{i}", P100 - free, i, node=node)))
    return state


def call_filter(state, pod, preferences=PRICED, nodes=("n1", "n2")):
    answer = verbs.filter_nodes(state, preferences, FilterArgs(pod=pod, node_names=list(nodes)))
    assert not answer.error
    return answer.node_names


def controller(state, api=None, *, leads=True):
    api = api or ApiServer(FakeClock())
    return WorkloadController(api.client(), state, "cardwise-system", leads=lambda: leads, clock=api.clock)


def taught(state, keeping, mem, pods=20):
    """Let pods with this share arrive, and the controller learn from them."""
    call_filter(state, asking("first", gpu_mem=mem), nodes=["nowhere"])
    keeping.step()
    for i in range(pods):
        call_filter(state, asking(f"pod-{i}", gpu_mem=mem), nodes=["nowhere"])
    keeping.step()


HALF = P100 // 2


def test_the_annotation_of_a_pod_decides():
    state = world(n1=[HALF], n2=[HALF + 4000])
    taught(state, controller(state), HALF)
    annotated = asking("p", gpu_mem=3000, annotations={names.POLICY: "binpack"})
    assert call_filter(state, annotated) == ["n1"]
    priced = asking("q", gpu_mem=3000, annotations={names.POLICY: "priced"})
    assert call_filter(state, priced, AnswerSettings(policy="binpack", one_best_node=True)) == ["n2"]


def test_it_decides_ahead_as_well():
    ahead = Ahead("n1", "n2", settings=NominationSettings(above_nodes=0, policy="priced"))
    ahead.show_pod(bound("r1", P100 - HALF, 0, node="n1"))
    ahead.show_pod(bound("r2", P100 - HALF - 4000, 0, node="n2"))
    taught(ahead.state, controller(ahead.state), HALF)
    ahead.create("p", 3000)
    assert ahead.nominate_all() == {"p": "n2"}


def test_all_nodes_are_scored_alike():
    state = world(n1=[HALF], n2=[HALF + 4000])
    taught(state, controller(state), HALF)
    several = AnswerSettings(policy="priced", one_best_node=False)
    pod = asking("p", gpu_mem=3000)
    args = FilterArgs(pod=pod, node_names=["n1", "n2"])
    assert sorted(verbs.filter_nodes(state, several, args).node_names) == ["n1", "n2"]
    top = [score.host for score in verbs.prioritize(state, several, args) if score.score == verbs.MAX_SCORE]
    assert top == ["n2"]


def test_what_the_policy_does_not_find_binpack_may_and_else_there_are_reasons():
    state = with_cards(make_state(), n1=1)  # nothing else is known of it; kube-scheduler has said that it will do
    taught(state, controller(state), HALF)
    assert call_filter(state, asking("p", gpu_mem=3000), nodes=["n1"]) == ["n1"]
    answer = verbs.filter_nodes(state, PRICED, FilterArgs(pod=asking("q", gpu_mem=P100), node_names=["n1"]))
    assert answer.failed_nodes or answer.failed_and_unresolvable_nodes


def test_binpack_creates_no_engine():
    state = world(n1=[HALF])
    call_filter(state, asking("p", gpu_mem=3000), AnswerSettings(policy="binpack", one_best_node=True), nodes=["n1"])
    controller(state).step()
    assert not state.policies.is_active


def test_a_new_leader_continues_with_the_saved_workload(api):
    before = world(n1=[HALF], n2=[HALF + 4000])
    taught(before, controller(before, api), HALF)
    assert arrivals(api) >= 16

    after = world(n1=[HALF], n2=[HALF + 4000])
    after.policies.is_requested = True
    controller(after, api).step()
    assert call_filter(after, asking("p", gpu_mem=3000)) == ["n2"]


def test_a_retried_pod_counts_once(api):
    state = world(n1=[HALF])
    keeping = controller(state, api)
    taught(state, keeping, HALF)
    before = saved(api)
    for _ in range(100):
        call_filter(state, asking("again", gpu_mem=4000), nodes=["nowhere"])
    keeping.step()
    assert saved(api) == before  # not half as many arrivals again


def test_a_follower_writes_nothing_and_a_failed_write_is_retried(api):
    state = world(n1=[HALF])
    keeping = controller(state, api, leads=False)
    taught(state, keeping, HALF)
    assert api.get(PATH) is None

    leading, other = controller(state, api), world(n1=[HALF])
    leading = controller(other, api)
    api.down = True
    taught(other, leading, HALF)
    assert api.get(PATH) is None
    api.down = False
    leading.step()
    assert saved(api)


def test_what_came_since_the_last_learning_outlives_the_process():
    clock, state = FakeClock(), world(n1=[HALF])
    api = ApiServer(clock)
    keeping = WorkloadController(api.client(), state, "cardwise-system", leads=lambda: True, clock=clock)
    taught(state, keeping, HALF)
    call_filter(state, asking("one-more", gpu_mem=HALF), nodes=["nowhere"])
    keeping.step()
    assert arrivals(api) == 20
    clock.advance(60)
    keeping.step()
    assert arrivals(api) == 21
    again = world(n1=[HALF])
    keeping = WorkloadController(api.client(), again, "cardwise-system", leads=lambda: True, clock=clock)
    taught(again, keeping, HALF, pods=1)
    clock.advance(60)
    keeping.step()
    assert arrivals(api) == 22


def test_what_cannot_be_read_is_not_written_over():
    api, state = api_with_workload('{"version":1,"requests":[[1,4000,0,"",0,0,500]]}'), world(n1=[HALF])
    api.fault(Fault(refused=True), "get", times=math.inf)
    taught(state, controller(state, api), HALF)
    assert arrivals(api) == 500


def arrivals(api):
    return sum(ask[-1] for ask in json.loads(saved(api))["requests"])


@pytest.mark.parametrize("text", ["", "nonsense", '{"version":9,"requests":[]}', SPOILT, "[" * 200_000], ids=len)
def test_a_spoilt_configmap_is_as_none(text):
    api = api_with_workload(text)
    state = world(n1=[HALF], n2=[HALF + 4000])
    taught(state, controller(state, api), HALF)
    assert call_filter(state, asking("p", gpu_mem=3000)) == ["n2"]
    assert json.loads(saved(api))["version"] == 1


# The published settings.


def published(api):
    return saved(api, names.WORKLOAD_POLICY)


def publishing(api, *, leads=lambda: True, **settings):
    state = world(n1=[P100])
    return WorkloadController(api.client(), state, "cardwise-system", leads=leads, clock=api.clock, **settings)


def test_the_policy_of_the_setting_is_told_by_who_leads_as_soon_as_it_can():
    api, leads = ApiServer(FakeClock()), []
    controller = publishing(api, leads=lambda: bool(leads), policy="spread")
    controller.step()
    assert api.requests == []  # only the leader writes
    leads.append(True)
    api.down = True
    controller.step()
    api.down = False
    controller.step()
    assert published(api) == "spread"


def test_the_policy_is_told_the_default_too_and_again_when_the_setting_was_changed(api):
    publishing(api).step()
    assert published(api) == policies.DEFAULT_POLICY
    publishing(api, policy="priced").step()
    assert published(api) == "priced"
    publishing(api).step()
    assert published(api) == policies.DEFAULT_POLICY


def test_what_a_card_gives_at_most_is_told_beside_the_policy(api):
    limits = CardLimits(kept_back=700, max_clients=16, core=200)
    publishing(api, policy="priced", limits=limits).step()
    assert api.get(PATH)["data"] == {names.WORKLOAD_POLICY: "priced", **limits.configmap_data()}
    publishing(api, policy="priced").step()
    assert api.get(PATH)["data"] == {names.WORKLOAD_POLICY: "priced", **CardLimits().configmap_data()}


def test_to_what_an_older_extender_has_written_the_limits_are_added():
    text = '{"version":1,"requests":[[1,4000,0,"",0,0,500]]}'
    api = api_with_workload(text)
    api.edit(PATH, data={names.WORKLOAD_POLICY: policies.DEFAULT_POLICY})
    publishing(api).step()
    written = {
        names.WORKLOAD_REQUESTS: text,
        names.WORKLOAD_POLICY: policies.DEFAULT_POLICY,
        **CardLimits().configmap_data(),
    }
    assert api.get(PATH)["data"] == written


def test_published_settings_are_not_written_again(api):
    publishing(api).step()
    before = len(api.requests)
    publishing(api).step()
    assert [request.verb for request in api.requests[before:]] == ["get"]


def test_removed_entries_of_the_configmap_are_written_again_within_minutes():
    clock, state = FakeClock(), world(n1=[HALF])
    api = ApiServer(clock)
    keeping = WorkloadController(
        api.client(), state, "cardwise-system", leads=lambda: True, policy="priced", clock=clock
    )
    taught(state, keeping, HALF)
    assert arrivals(api) == 20
    api.remove(PATH)
    clock.advance(300)
    keeping.step()
    assert published(api) == "priced"
    assert arrivals(api) == 20
