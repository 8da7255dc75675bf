"""What the extender counts, as Prometheus sees it after calls."""

import json
from datetime import timedelta

import pytest
import structlog
from prometheus_client import CollectorRegistry

from cardwise.core.values.refusals import Refusal
from cardwise.kube import paths
from extender.api import verbs
from extender.api.app import AppComponents, create_app
from extender.api.metrics import GaugeReaders, Metrics, most_frequent
from extender.api.verbs import AnswerSettings
from extender.binding.binder import Binder
from tests.build import P100, asking
from tests.extender.gangcluster import World, member
from tests.extender.states import as_pod, bound, make_state, with_cards
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock


class Serving:
    """The app on a state of one node with one card, and its registry."""

    def __init__(self) -> None:
        clock = FakeClock()
        api = ApiServer(clock)
        api.write_object(paths.pods(), asking("p", gpu_mem=8138))
        self.registry = CollectorRegistry()
        self.leads = True
        self.state = with_cards(make_state(clock), n1=1)
        binder = Binder(api.client(), self.state, policy="binpack", seconds=5, clock=clock)
        components = AppComponents(
            state=self.state,
            binder=binder,
            metrics=Metrics(self.registry),
            preferences=AnswerSettings(policy="binpack", one_best_node=True),
            unsynced_lists=list,
        )
        self.client = create_app(components).test_client()
        levels = GaugeReaders(
            reservations=self.state.reservation_counts,
            gangs=self.state.gangs.phase_counts,
            refused_pods=self.state.refusal_counts,
            disagreements=dict,
            staleness_seconds=dict,
            disconnected_seconds=dict,
            leads=lambda: self.leads,
        )
        self.registry.register(levels)

    def filter(self, name: str, mem: int) -> list[str]:
        call = {"Pod": asking(name, gpu_mem=mem), "NodeNames": ["n1"]}
        answer = self.client.post("/gpushare-scheduler/filter", data=json.dumps(call)).get_json()
        return list(answer["NodeNames"])

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def test_pods_wait_for_the_reason_that_filter_gave_last_until_they_are_placed():
    serving = Serving()
    whole, small = Refusal.NO_MEMORY.text, Refusal.CARD_TOO_SMALL.text
    assert serving.filter("a", P100) == ["n1"]
    assert serving.filter("b", 4096) == []
    assert serving.filter("b", 4096) == []
    assert serving.filter("c", P100 + 1) == []
    assert serving.value("cardwise_extender_waiting_pods", reason=whole) == 1
    assert serving.value("cardwise_extender_waiting_pods", reason=small) == 1
    assert serving.value("cardwise_extender_refusals_total", reason=whole) == 2
    serving.state.forget_plans()
    assert serving.filter("b", 4096) == ["n1"]
    assert serving.value("cardwise_extender_waiting_pods", reason=whole) is None
    serving.state.set_pod(as_pod(bound("c", 4096, 0)))
    assert serving.value("cardwise_extender_waiting_pods", reason=small) is None


def test_gangs_are_the_leaders_to_count():
    """A standby sees a member that is bound before the others, and must not call that PartlyBound (an alert)."""
    serving = Serving()
    for i, node in enumerate(("", "n1")):
        pod = member(f"a{i}", "a", 2, gated=False, gpu_mem=100)
        serving.state.set_pod(as_pod(pod | {"spec": pod["spec"] | {"nodeName": node}}))
    assert serving.value("cardwise_extender_gangs", phase="PartlyBound") == 1
    serving.leads = False
    assert serving.value("cardwise_extender_gangs", phase="PartlyBound") == 0


def test_the_reason_of_most_nodes_counts():
    assert most_frequent({"n1": "x", "n2": "y", "n3": "y"}) == "y"


def test_calls_are_timed_by_verb():
    serving = Serving()
    serving.filter("a", 1024)
    assert serving.value("cardwise_extender_request_seconds_count", verb="filter") == 1
    assert serving.value("cardwise_extender_request_seconds_count", verb="bind") == 0


def test_a_gangs_queue_time_is_observed_once_when_all_members_have_arrived():
    world = World({"n1": 2})
    seconds: list[str] = []
    held: list[str] = []
    world.state.gangs.on_permit_ended, world.state.gangs.on_binding_started = (
        (lambda outcome, _: held.append(outcome)),
        seconds.append,
    )
    world.create(member("m0", minimum=2, gated=False, created=5, gpu_mem=P100))
    world.run(2)
    assert seconds == []
    world.create(member("m1", minimum=2, gated=False, created=9, gpu_mem=P100))
    world.run(3)
    assert set(world.bound()) == {"m0", "m1"}
    assert held == ["bound"]
    assert seconds == ["2026-11-21T10:00:05Z"], "of the oldest"


@pytest.mark.parametrize(("ago", "bucket"), [(0, "1.0"), (50, "60.0"), (7000, "7200.0"), (-100, "1.0")])
def test_the_queue_counts_from_the_creation(ago, bucket, clock):
    registry = CollectorRegistry()
    created = clock.wall() - timedelta(seconds=ago)
    Metrics(registry, clock).observe_gang_wait(created.strftime("%Y-%m-%dT%H:%M:%SZ"))
    assert registry.get_sample_value("cardwise_extender_gang_queue_seconds_bucket", {"le": bucket}) == 1
    assert registry.get_sample_value("cardwise_extender_gang_queue_seconds_count") == 1


def test_a_gang_of_which_no_creation_is_known_is_not_counted():
    registry = CollectorRegistry()
    Metrics(registry).observe_gang_wait("")
    assert registry.get_sample_value("cardwise_extender_gang_queue_seconds_count") == 0


def test_lines_of_a_call_say_its_pod_and_those_of_the_next_do_not(monkeypatch):
    serving = Serving()
    contexts = []

    def log_lines(*args: object) -> object:
        contexts.append(structlog.contextvars.get_contextvars())
        raise RuntimeError

    monkeypatch.setattr(verbs, "filter_nodes", log_lines)
    serving.client.post(
        "/gpushare-scheduler/filter", data=json.dumps({"Pod": asking("a", gpu_mem=1), "NodeNames": ["n1"]})
    )
    assert contexts == [{"pod": "default/a", "uid": "uid-a"}]
    assert structlog.contextvars.get_contextvars() == {}
