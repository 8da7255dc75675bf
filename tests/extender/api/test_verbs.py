"""filter, prioritize and inspect, with the figures of Alibaba's articles."""

import pytest

from cardwise.core.api import names, request
from cardwise.core.values.quantity import Unit
from cardwise.core.values.refusals import Refusal
from extender.api import verbs
from extender.api.verbs import AnswerSettings
from extender.cache.reservations import Phase
from extender.placing.nodesearch import SMALL_SEARCH_NODES
from extender.placing.placing import Call, PlacementRequest
from extender.records.pod import Pod
from extender.records.podref import PodRef
from extender.records.wire import FilterArgs, FilterResult
from tests.build import P100, asking, extended_resource, reported_share, resource_class
from tests.extender.gangcluster import reserve
from tests.extender.states import as_card, as_class, as_pod, as_quota, bound, make_state, with_cards
from tests.fakes.clock import FakeClock

ONE = AnswerSettings(policy="binpack", one_best_node=True)
ALL = AnswerSettings(policy="binpack", one_best_node=False)


def world(**nodes):
    """Nodes of P100 cards with this much free on each, like n1=[4069, 0]."""
    state = with_cards(make_state(), **{node: len(frees) for node, frees in nodes.items()})
    for node, frees in nodes.items():
        for i, free in enumerate(frees):
            if free < P100:
                state.set_pod(as_pod(bound(f"{node}-{i}", P100 - free, i, node=node)))
    return state


def call_filter(state, pod, preferences=ONE, nodes=None):
    if nodes is None:
        with state.view() as ledger:
            nodes = [node.name for node in ledger.nodes()]
    return verbs.filter_nodes(state, preferences, FilterArgs(pod=pod, node_names=nodes))


@pytest.mark.parametrize("preferences", [ONE, ALL])
def test_a_pod_of_8138_goes_to_the_node_with_one_card_that_has_it(preferences):
    state = world(n1=[4069, 0], n2=[4069, 4069], n3=[8138, 0])
    answer = call_filter(state, asking("p", gpu_mem=8138), preferences)
    assert answer.node_names == ["n3"]
    assert answer.failed_nodes == {}


@pytest.mark.parametrize("preferences", [ONE, ALL])
def test_a_card_of_more_than_any_card_has_keeps_no_pod_from_its_node(preferences):
    state = with_cards(make_state(), n1=1)
    liar = extended_resource(0, node="n2")
    liar["spec"]["memoryMiB"] = 2**60
    state.set_node("n2")
    state.set_card(*as_card(liar))
    assert "n1" in call_filter(state, asking("p", gpu_mem=8138), preferences).node_names


def test_when_no_node_fits_every_node_has_a_reason_and_unresolvable_ones_are_separate():
    state = world(n1=[4069, 4069])
    with_cards(state, n2=0)
    answer = call_filter(state, asking("p", gpu_mem=8138), nodes=["n1", "n2"])
    assert answer.node_names == []
    assert answer.failed_nodes == {"n1": Refusal.NO_MEMORY.text}
    assert answer.failed_and_unresolvable_nodes == {"n2": Refusal.NOT_OURS.text}


def test_a_pod_that_was_not_mutated_is_refused():
    raw = asking("p", gpu_mem=1024)
    del raw["spec"]["containers"][0]["resources"]["limits"][names.SHARE]
    assert "not rewritten by the Cardwise webhook" in call_filter(world(n1=[P100]), raw).error


def test_a_pod_with_too_many_card_requests_is_refused_also_without_the_webhook():
    raw = asking("p", whole_gpu=1)
    raw["spec"]["containers"] *= request.MAX_CARD_REQUESTS + 1
    assert "more than 16 separate GPU requests" in call_filter(world(n1=[P100]), raw).error


@pytest.mark.parametrize("preferences", [ONE, ALL])
def test_a_pod_whose_nodes_were_not_all_searched_gets_an_error_and_is_not_refused(preferences):
    """Only after an error kube-scheduler tries a pod again by itself, without evicting pods for it."""
    nodes = [f"n{i:02}" for i in range(SMALL_SEARCH_NODES + 1)]
    state = world(**{node: [P100] for node in nodes})
    raw = asking("p", whole_gpu=1, share=1)
    raw["spec"]["containers"] *= 2
    args = FilterArgs(pod=raw, node_names=nodes)
    late = Call(FakeClock().now() - 1)
    assert verbs.filter_nodes(state, preferences, args, call=late) == FilterResult(error=verbs.SEARCH_UNFINISHED_TEXT)
    changing = Call(is_abandoned=lambda: bool(state.forget_plans()))
    if preferences is ONE:
        changed = FilterResult(error=verbs.LEADER_CHANGED_TEXT)
        assert verbs.filter_nodes(state, preferences, args, call=changing) == changed
    assert not state.refusal_counts()
    refused = verbs.filter_nodes(state, preferences, args)
    assert not refused.error
    assert len(refused.failed_and_unresolvable_nodes) == len(nodes)


def test_thousands_that_the_api_server_prints_with_a_suffix_are_read_as_mib():
    state = world(n1=[15_000])
    assert call_filter(state, asking("p", gpu_mem="15k")).node_names == ["n1"]
    assert "not rewritten" in call_filter(state, asking("q", gpu_mem="8Gi")).error


def test_a_pod_without_gpu_passes():
    raw = asking("p", share=1)
    raw["spec"]["containers"][0]["resources"]["limits"] = {names.FILTER_CALL_RESOURCE: "1"}
    assert call_filter(world(n1=[P100]), raw, nodes=["n1", "cpu-only"]).node_names == ["n1", "cpu-only"]


def test_a_bound_pod_is_answered_its_node_only():
    state = world(n1=[P100], n2=[P100])
    state.set_pod(as_pod(bound("p", 1024, 0, node="n2")))
    for preferences in (ONE, ALL):
        assert call_filter(state, asking("p", gpu_mem=1024), preferences).node_names == ["n2"]
    assert call_filter(state, asking("p", gpu_mem=1024), nodes=["n1"]).error == verbs.BIND_UNDECIDED_TEXT


def test_a_pod_that_waits_for_quota_gets_an_event_with_the_entry_of_its_request():
    state = world(n1=[P100])
    state.set_class(as_class(resource_class("p100", model="P100")))
    state.set_quota(*as_quota({"shares": 0}, {"class": "p100", "memoryMiB": 1000}))
    full_entries = []
    for name, of_class in (("p", "p100"), ("q", "")):
        args = FilterArgs(pod=asking(name, gpu_mem=1024, resource_class=of_class), node_names=["n1"])
        verbs.filter_nodes(state, ONE, args, lambda pod, full: full_entries.append((pod.name, full)))
    assert [(name, full.entry.resource_class) for name, full in full_entries] == [("p", "p100"), ("q", "")]
    assert full_entries[0][1].quota == "default/team"
    assert full_entries[0][1].requested == (1, 1024, 0)
    args = FilterArgs(pod=asking("r", gpu_mem=P100 + 1), node_names=["n1"])
    verbs.filter_nodes(state, ONE, args, lambda *_: pytest.fail("it waits for no quota"))


SOFT = "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("spec", "annotation", "only_best"),
    [
        pytest.param({}, None, True, id="no wishes"),
        pytest.param({"affinity": {"nodeAffinity": {SOFT: [{}]}}}, None, False, id="preferred node affinity"),
        pytest.param({"affinity": {"podAffinity": {SOFT: [{}]}}}, None, False, id="preferred pod affinity"),
        pytest.param({"affinity": {"podAntiAffinity": {SOFT: [{}]}}}, None, False, id="preferred pod anti-affinity"),
        pytest.param({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, None, False, id="soft"),
        pytest.param({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}, None, True, id="hard"),
        pytest.param({"affinity": {"nodeAffinity": {SOFT: [{}]}}}, "true", True, id="the annotation wins"),
        pytest.param({}, "false", False, id="the annotation wins, the other way"),
    ],
)
def test_the_one_best_node_is_answered_unless_the_scheduler_should_weigh(spec, annotation, only_best):
    raw = asking("p", gpu_mem=1024, annotations={names.ONE_NODE: annotation} if annotation else None)
    raw["spec"] |= spec
    assert Pod(raw).one_best_node(default=True) is only_best
    answer = call_filter(world(n1=[P100], n2=[P100]), raw)
    assert answer.node_names == (["n1"] if only_best else ["n1", "n2"])


def test_the_pods_own_policy_wins():
    state = world(n1=[8138], n2=[P100])
    assert call_filter(state, asking("p", gpu_mem=1024)).node_names == ["n1"]
    spread = asking("q", gpu_mem=1024, annotations={names.POLICY: "spread"})
    assert call_filter(state, spread).node_names == ["n2"]


def test_prioritize_gives_whole_numbers_and_the_top_to_exactly_one():
    state = world(n1=[8138, 0], n2=[8138, 0], n3=[P100, P100], n4=[0, 0])
    args = FilterArgs(pod=asking("p", gpu_mem=8138), node_names=["n4", "n3", "n2", "n1"])
    scores = {host_score.host: host_score.score for host_score in verbs.prioritize(state, ALL, args)}
    assert scores["n1"] == verbs.MAX_SCORE
    assert all(type(score) is int and 0 <= score < verbs.MAX_SCORE for host, score in scores.items() if host != "n1")
    assert scores["n2"] == 9
    assert scores["n3"] == scores["n4"] == 0


def test_prioritize_repeats_what_filter_has_found_a_moment_ago_and_only_once():
    state = world(n1=[8138], n2=[P100])
    args = FilterArgs(pod=asking("p", gpu_mem=8138), node_names=["n1", "n2"])
    assert set(verbs.filter_nodes(state, ALL, args).node_names) == {"n1", "n2"}
    state.plan_pod(
        PlacementRequest(PodRef("other", "d", "other"), request.parse(asking("other", gpu_mem=8138)), ["n1"], "binpack")
    )
    tops = []
    for _ in range(2):
        scores = {host_score.host: host_score.score for host_score in verbs.prioritize(state, ALL, args)}
        tops.append([host for host, score in scores.items() if score == verbs.MAX_SCORE])
    assert tops == [["n1"], ["n2"]]


def test_prioritize_knows_only_the_nodes_that_it_is_asked_for():
    state = world(n1=[8138], n2=[9000], n3=[P100])
    pod = asking("p", gpu_mem=8138)
    verbs.filter_nodes(state, ALL, FilterArgs(pod=pod, node_names=["n1", "n2", "n3"]))
    narrowed = FilterArgs(pod=pod, node_names=["n3", "n2"])
    assert {host_score.host: host_score.score for host_score in verbs.prioritize(state, ALL, narrowed)} == {
        "n2": 10,
        "n3": 0,
    }


def test_inspect_is_gpushares_json():
    state = world(n1=[P100 - 1024, P100])
    state.set_card(*as_card(extended_resource(1, reported=[reported_share("vanished", 4069)])))
    state.plan_pod(PlacementRequest(PodRef("u", "d", "p"), request.parse(asking("p", gpu_mem=100)), ["n1"], "binpack"))
    assert verbs.inspect(state) == {
        "unit": "MiB",
        "nodes": [
            {
                "name": "n1",
                "totalGPU": 2 * P100,
                "usedGPU": 1024 + 4069 + 100,
                "devs": [
                    {
                        "id": 0,
                        "totalGPU": P100,
                        "usedGPU": 1024,
                        "pods": [{"name": "n1-0", "namespace": "default", "usedGPU": 1024}],
                    },
                    {
                        "id": 1,
                        "totalGPU": P100,
                        "usedGPU": 4069 + 100,
                        "pods": [{"name": "vanished", "namespace": "default", "usedGPU": 4069}],
                    },
                ],
            }
        ],
    }
    assert verbs.inspect(state, "n1") == verbs.inspect(state)
    unknown = verbs.inspect(state, "nowhere")
    assert unknown["nodes"] == []
    assert "nowhere" in unknown["error"]


def test_inspect_in_gib_shows_what_gpushares_would():
    """A card of 16276 MiB is one of 15 GiB to its plugin; what is used is never less than is taken."""
    state = world(n1=[P100 - 2 * 1024, P100 - 1000, P100, 0])
    (node,) = verbs.inspect(state, unit=Unit.GIB)["nodes"]
    assert [(card["usedGPU"], card["totalGPU"]) for card in node["devs"]] == [(2, 15), (1, 15), (0, 15), (15, 15)]
    assert [card["pods"][0]["usedGPU"] if card["pods"] else 0 for card in node["devs"]] == [2, 1, 0, 15]
    assert (node["usedGPU"], node["totalGPU"]) == (18, 60)


def test_a_pod_that_is_bound_already_is_answered_its_node_though_its_card_is_reserved_for_a_gang_now():
    state = world(n1=[P100])
    pod = asking("p", gpu_mem=8138)
    assert call_filter(state, pod).node_names == ["n1"]
    state.assume(PodRef("uid-p", "default", "p"), request.parse(pod), "n1", "binpack", epoch=0)
    state.record_binding_outcome("uid-p", Phase.ACCEPTED)
    reserve(state, "n1", P100)
    assert call_filter(state, pod).node_names == ["n1"]
    assert call_filter(state, asking("q", gpu_mem=100)).node_names == []


@pytest.mark.parametrize("preferences", [ONE, ALL])
def test_what_is_reserved_for_a_gang_is_in_no_answer_and_the_rest_of_the_card_is(preferences):
    state = world(n1=[P100, 0], n2=[0])
    reserve(state, "n1", P100 - 100)
    refused = call_filter(state, asking("big", gpu_mem=101), preferences)
    assert refused.node_names == []
    reasons = refused.failed_nodes | refused.failed_and_unresolvable_nodes
    assert reasons == {"n1": Refusal.GANG_RESERVED.text, "n2": Refusal.NO_MEMORY.text}
    assert call_filter(state, asking("small", gpu_mem=100), preferences).node_names == ["n1"]


def test_other_nodes_come_before_the_rest_of_a_reserved_card():
    state = world(n1=[P100], n2=[P100])
    reserve(state, "n1", P100 - 100)
    assert call_filter(state, asking("p", gpu_mem=100)).node_names == ["n2"]


def test_bind_chooses_no_reserved_card():
    """kube-scheduler has chosen the node, and the cards are chosen at bind."""
    state = world(n1=[P100, 5000])
    reserve(state, "n1", P100 - 100)
    pods = [asking(name, gpu_mem=5000) for name in ("p", "q")]
    for pod in pods:
        pod["status"] = {"phase": "Pending"}
        state.set_pod(as_pod(pod))
        assert call_filter(state, pod, ALL).node_names == ["n1"]
    begun = [
        state.assume(PodRef(pod["metadata"]["uid"], "default", "p"), request.parse(pod), "n1", "binpack", epoch=0)
        for pod in pods
    ]
    assert [share.index for share in begun[0].assignment.shares()] == [1]
    assert begun[1] is Refusal.NO_MEMORY
