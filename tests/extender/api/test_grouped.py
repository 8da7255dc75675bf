"""Pods of a PodGroup of Kubernetes: kube-scheduler filters all members before it binds any, and cancels no filter
result.
"""

import json

import pytest

from cardwise.core.api import names
from cardwise.core.values.refusals import Refusal
from extender.api import verbs
from extender.api.app import create_app
from extender.api.verbs import AnswerSettings
from extender.records.wire import FilterArgs
from tests.build import P100, asking
from tests.extender.api.serverparts import parts
from tests.extender.states import as_pod, bound, free, make_state, with_cards
from tests.fakes.clock import FakeClock

ALL = AnswerSettings(policy="binpack", one_best_node=False)


class World:
    def __init__(self, **nodes: int) -> None:
        self.clock = FakeClock()
        self.state = with_cards(make_state(self.clock), **nodes)

    def filter(self, pod, *nodes):
        args = FilterArgs(pod=pod, node_names=list(nodes))
        return verbs.filter_nodes(self.state, ALL, args)

    def bind_fails(self, name):
        with self.state.queue() as queue:
            queue.on_bind_failed(f"uid-{name}")


def member(name, mem=P100, **annotations):
    pod = asking(name, gpu_mem=mem)
    pod["spec"]["schedulingGroup"] = {"podGroupName": "g"}
    pod["metadata"]["annotations"] = annotations
    return pod


def test_each_member_has_a_card_of_its_own_before_any_is_bound():
    world = World(n1=1, n2=1)
    wish = {names.ONE_NODE: "false"}
    node_names = [world.filter(member(f"m{i}", **wish), "n1", "n2").node_names for i in range(3)]
    assert sorted(node_names) == [[], ["n1"], ["n2"]]


def test_a_member_that_comes_again_leaves_where_it_was():
    """Another member fitted nowhere, so the scheduler starts again with the first, without notice."""
    world = World(n1=1, n2=1)
    (first,) = world.filter(member("m0"), "n1", "n2").node_names
    (other,) = {"n1", "n2"} - {first}
    assert world.filter(member("m0"), other).node_names == [other]
    assert (free(world.state, first), free(world.state, other)) == ([P100], [0])


def test_one_whose_bind_may_have_landed_does_not_end_the_others_try():
    world = World(n1=1, n2=1)
    world.state.set_pod(as_pod(bound("m0", 100, 0, node="n2")))
    answer = world.filter(member("m0", 100), "n1")
    assert answer.error == ""
    assert answer.failed_and_unresolvable_nodes == {"n1": Refusal.UNSETTLED.text}


def test_a_pod_whose_bind_is_refused_backs_off_longer_each_time():
    """Otherwise kube-scheduler tries it again at once: eleven times in a second and a half."""
    world = World(n1=1)
    pod = member("m0")
    for seconds in (1, 2, 4, 8, 10, 10):
        assert world.filter(pod, "n1").node_names == ["n1"]
        world.bind_fails("m0")
        world.clock.advance(seconds - 0.1)
        assert world.filter(pod, "n1").failed_and_unresolvable_nodes == {"n1": Refusal.UNSETTLED.text}
        world.clock.advance(0.1)
    assert world.filter(pod, "n1").node_names == ["n1"]


def test_one_that_rests_is_woken_when_it_may_be_tried_again():
    """There may be no other change in the cluster for minutes, and kube-scheduler retries no pod by itself."""
    world = World(n1=1)
    world.filter(member("m0"), "n1")
    world.bind_fails("m0")
    assert world.filter(member("m0"), "n1").node_names == []
    world.state.next_requeue_node()  # for the cards that have come
    world.clock.advance(0.9)
    assert world.state.next_requeue_node() is None
    world.clock.advance(0.2)
    assert world.state.next_requeue_node() == "n1"
    assert world.state.next_requeue_node() is None
    assert world.filter(member("m0"), "n1").node_names == ["n1"]


def test_other_pods_come_again_when_the_scheduler_likes():
    world = World(n1=1)
    for _ in range(2):
        assert world.filter(asking("p", gpu_mem=100), "n1").node_names == ["n1"]
        world.bind_fails("p")


@pytest.mark.parametrize("node", ["n1", "nowhere"])
def test_a_refused_bind_is_remembered(node):
    app_parts = parts()
    assert app_parts.state.begin_attempt("uid-p", None, grouped=True), "it comes to filter"
    call = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": node}
    answer = create_app(app_parts).test_client().post("/gpushare-scheduler/bind", data=json.dumps(call)).get_json()
    assert (
        bool(answer["Error"]) == (not app_parts.state.begin_attempt("uid-p", None, grouped=True)) == (node == "nowhere")
    )
