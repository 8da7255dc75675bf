"""The webhook's view of the cluster, from watches and single reads."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog.testing

from cardwise.core.api import classes, names
from cardwise.core.api.classes import ResourceClass
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.quantity import MiB
from cardwise.kube import paths
from tests.build import asking, extended_resource, gpu_quota, limit_range, resource_class, resource_quota
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from webhook.cluster import namespaces
from webhook.cluster import view as view_module
from webhook.cluster.cards import CardSizes
from webhook.cluster.limitranges import Bounds
from webhook.cluster.view import LIMIT_RANGES, RESOURCE_QUOTAS, ClusterView
from webhook.pods.defaults import check_defaults
from webhook.server import sizes


def card(index: int, *, model: str = "Tesla K80", mem: int = 11441, **fields: Any) -> Json:
    return extended_resource(index, model=model, mem=mem, labels={"room": "cold"}, **fields)


def device(index: int, **fields: Any) -> Json:
    return extended_resource(index, kind="rdma", labels={"room": "cold"}, **fields)


def parsed_class(labels: dict[str, str]) -> ResourceClass:
    return classes.parse(resource_class(selector={"matchLabels": labels}))


K80S = CardSizes(MiB(11441), 2, MiB(5632), (MiB(11441), MiB(5632)))
CARDS = [card(0), card(1, mem=5632), card(0, node="n2", model="Tesla P100", mem=16276)]


class World:
    """A view of the objects of an API server."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.api = ApiServer(self.clock)
        self.view = ClusterView(self.api.client(clock=self.clock), self.clock)

    def put_objects(self, collection: str, *objects: Json) -> None:
        for manifest in objects:
            self.api.write_object(collection, manifest)

    def follows(self) -> None:
        """Wait until the watches have delivered everything."""
        self.clock.until_waiting(7)

    def start(self, cards: list[Json] = CARDS) -> ClusterView:
        self.put_objects(paths.extendedresources(), *cards)
        self.view.start()
        self.follows()
        return self.view


@pytest.fixture
def world() -> Iterator[World]:
    started = World()
    yield started
    started.view.stop()


def test_cards_are_summed_by_class(world):
    world.put_objects(paths.resourceclasses(), resource_class("k80"), resource_class("v100", model="Tesla V100"))
    view = world.start()
    assert view.cards() == CardSizes(MiB(16276), 2, MiB(5632), (MiB(16276), MiB(5632)))
    assert view.cards(view.resource_class("k80")) == K80S
    assert view.cards(view.resource_class("v100")) == CardSizes()
    asked_about = classes.parse(resource_class("k80", model="Tesla P100"))
    for named_class in (asked_about, dataclasses.replace(asked_about, name="any")):
        assert view.cards(named_class) == CardSizes(MiB(16276), 1, MiB(16276), (MiB(16276),))
    assert set(view._card_sums._sums) <= {"", "k80", "v100"}, "anybody may ask about any class"
    assert view.cards(view.resource_class("k80")) == K80S
    assert view.reviewed_class_cards(parsed_class({"room": "cold", "hostname": "n2"})).max_cards == 1
    assert view.reviewed_class_cards(parsed_class({"room": "hot"})) == CardSizes()


def test_any_number_of_namespaces_costs_one_list_while_it_is_fresh(world):
    labels = {"cardwise.dev/defaults": "enabled"}
    namespace = {"metadata": {"name": "late", "labels": labels, "annotations": {"cardwise.dev/default-gpu-mem": "64"}}}
    world.put_objects(paths.namespaces(), namespace)
    assert [name for i in range(100) if world.view.defaults_or_fetch(name := f"none-{i}")] == []
    assert world.view.defaults_or_fetch("late") is not None
    assert len(world.api.sent()) == 1
    world.clock.advance(0.3)
    world.view.defaults_or_fetch("none")
    assert len(world.api.sent()) == 2


def test_headroom_is_subtracted_from_card_sizes(world):
    for headroom in (500, 6000):
        largest_left = (MiB(16276 - headroom), MiB(max(0, 5632 - headroom)))
        view = ClusterView(world.api.client(clock=world.clock), world.clock, kept_back=MiB(headroom))
        world.put_objects(paths.extendedresources(), *CARDS)
        view.start()
        world.follows()
        assert view.cards() == CardSizes(MiB(16276 - headroom), 2, MiB(max(0, 5632 - headroom)), largest_left)
        view.stop()


def test_auto_headroom_is_that_of_each_card(world):
    view = ClusterView(world.api.client(clock=world.clock), world.clock, kept_back=None)
    larger, smaller = card(0), card(1)
    larger["spec"]["headroomMiB"], smaller["spec"]["headroomMiB"] = 616, 99_999
    world.put_objects(paths.extendedresources(), larger, smaller)
    view.start()
    world.follows()
    assert view.cards() == CardSizes(MiB(11441 - 616), 2, MiB(0), (MiB(11441 - 616), MiB(0)))
    view.stop()


def test_devices_are_counted_only_by_class(world):
    cards = [
        card(0),
        *(device(i) for i in range(3)),
        device(0, node="n2"),
        extended_resource(kind="fpga", labels={"room": "cold"}),
    ]
    loose = {"metadata": {"name": "loose"}, "spec": {"selector": {"matchLabels": {"room": "cold"}}}}
    world.put_objects(paths.resourceclasses(), loose)
    view = world.start(cards)
    assert view.cards() == CardSizes(MiB(11441), 1, MiB(11441), (MiB(11441),))
    assert view.cards(view.resource_class("loose")) == CardSizes(MiB(11441), 1, MiB(11441), (MiB(11441),)), (
        "a class that says no kind is of GPUs"
    )
    assert view.cards(parsed_class({"kind": "rdma"})) == CardSizes(max_cards=3)
    assert view.cards(parsed_class({"kind": "rdma", "node": "n2"})) == CardSizes(max_cards=1)
    assert view.reviewed_class_cards(parsed_class({"kind": "fpga"})) == CardSizes(max_cards=1)
    assert view.reviewed_class_cards(parsed_class({"kind": "nic"})) == CardSizes()


def test_class_missing_in_the_watch_is_read(world):
    view = world.start()
    world.api.hold(paths.resourceclasses())
    world.put_objects(paths.resourceclasses(), resource_class("new"), resource_class("broken", share={"memoryMiB": 0}))
    assert view.classes() == {}
    known = view.resource_class("new")
    assert known is not None
    assert view.cards(known) == K80S
    assert view.resource_class("broken") is None
    assert view.resource_class("none") is None


def test_quotas_of_the_namespace_with_their_usage(world):
    hard, used = [{"class": "k80", "shares": 5}], [{"class": "k80", "shares": 3}]
    world.put_objects(
        paths.gpuquotas(),
        gpu_quota(*hard, namespace="a", name="one", used=used),
        gpu_quota(*hard, namespace="a", name="two"),
        gpu_quota(*hard, namespace="b", name="one"),
    )
    view = world.start()
    assert [standing.quota.name for standing in view.quotas("a")] == ["one", "two"]
    assert [standing.used.get(("k80", ""), (0,))[0] for standing in view.quotas("a")] == [3, 0]
    assert view.quotas("c") == []


def test_unparsable_objects_are_skipped_and_logged_once(world):
    broken = resource_class("broken", share={"memoryMiB": 0})
    with structlog.testing.capture_logs() as logs:
        assert world.view._project_class(json.dumps(broken).encode()) is None
        assert world.view._project_class(json.dumps(broken).encode()) is None
        assert (
            world.view._project_quota(json.dumps(gpu_quota({"shares": -1}, namespace="a", name="bad")).encode()) is None
        )
    assert [(line["object"], line["log_level"]) for line in logs] == [
        ("ResourceClass broken", "warning"), ("GPUQuota a/bad", "warning"),
    ]  # fmt: skip
    assert "spec.share.memoryMiB" in logs[0]["error"]


def test_webhook_is_ready_without_optional_crds(world):
    world.api.missing = {paths.resourceclasses(), paths.gpuquotas()}
    view = world.view
    assert {text.partition(" ")[0] for text in view.problems()} == {
        "namespaces", "extendedresources", "resourceclasses", "gpuquotas", "limitranges", "resourcequotas", "nodes",
    }  # fmt: skip
    world.start()
    assert view.problems() == ["resourceclasses are not listed yet", "gpuquotas are not listed yet"]
    world.clock.step_until(lambda: view.problems() == [], threads=7)
    assert world.clock.now() - 1000 < 5  # seconds; only these two delay the readiness
    assert view.classes() == {}
    assert view.quotas("a") == []
    assert view.resource_class("k80") is None


def test_webhook_is_not_ready_without_cards(world):
    world.api.missing = {paths.extendedresources()}
    world.start([])
    world.clock.step_until(lambda: world.view._card_reflector.errors >= 10, threads=7)
    assert world.view.problems() == ["extendedresources are not listed yet"]


def test_tightest_limit_range_counts(world):
    ranges = [
        limit_range({"type": "Container", "min": {"cpu": "100m"}, "max": {"memory": "2Gi"}}, namespace="a", name="one"),
        limit_range(
            {"type": "Container", "min": {"cpu": "0.2", "memory": "1Mi"}, "max": {"memory": "1Gi"}},
            namespace="a",
            name="two",
        ),
        limit_range(
            {"type": "Pod", "max": {"cpu": "4"}}, {"type": "Pod", "max": {"cpu": "3"}}, namespace="a", name="pods"
        ),
        limit_range({"type": "Container", "min": {"cpu": "lots"}}, namespace="b"),
    ]
    world.put_objects(LIMIT_RANGES, *ranges)
    view = world.start()
    bounds = view.bounds("a")
    assert {name: amount.text for name, amount in bounds.minimum.items()} == {"cpu": "0.2", "memory": "1Mi"}
    assert {name: amount.text for name, amount in bounds.maximum.items()} == {"memory": "1Gi"}
    assert {name: amount.text for name, amount in bounds.pod_maximum.items()} == {"cpu": "3"}
    assert view.bounds("b") == Bounds()
    assert view.bounds("c") == Bounds()


def test_resource_quotas_that_count_gpus_are_known(world):
    quotas = {
        "a": {"requests.aliyun.com/gpu-mem": "8138"},
        "b": {"requests.cardwise.dev/k80": "2", "pods": "9"},
        "c": {"requests.cpu": "4", "requests.nvidia.com/gpu": "1"},
    }
    for namespace, hard in quotas.items():
        world.put_objects(RESOURCE_QUOTAS, resource_quota(hard, namespace=namespace))
    view = world.start()
    assert [namespace for namespace in "abcd" if view.has_gpu_resource_quota(namespace)] == ["a", "b"]


def test_mps_scopes_are_read_from_the_cards(world):
    def served(index: int, **mps: object) -> Json:
        return card(index) | {"status": {"health": "Healthy"} | ({"mps": mps} if mps else {})}

    view = world.start([served(0)])
    assert view.mps_scopes() == frozenset()
    assert view.max_clients() == 48
    world.put_objects(
        paths.extendedresources(),
        served(1, mode="card", state="Down"),
        served(2, mode="node", state="Ready", maxClients=60),
    )
    world.follows()
    assert view.mps_scopes() == {"card", "node"}
    assert view.max_clients() == 60
    world.put_objects(paths.extendedresources(), served(2, mode="node", state="Unavailable"))
    world.follows()
    assert view.mps_scopes() == {"card"}, "no pod uses MPS there"
    world.put_objects(paths.extendedresources(), served(2, mode="node", state="Ready"))
    world.follows()
    assert view.mps_scopes() == {"card", "node"}
    assert view.cards().max_cards == 3


def test_bindings_per_unknown_caller_are_limited(world):
    world.api.write_object(paths.pods(), asking("p", gpu_mem=1))

    def pods_shown_to(caller: str, times: int) -> int:
        return sum(world.view.pod("default", "p", caller, sizes.check_text) is not None for _ in range(times))

    with structlog.testing.capture_logs() as lines:
        assert pods_shown_to("10.0.0.9", 1000) == 200
    assert {line["caller"] for line in lines if "caller" in line} == {"10.0.0.9"}
    assert pods_shown_to("10.0.0.1", 10) == 10
    assert pods_shown_to("", 1000) == 1000, "with webhook.clientCA only API servers call"
    world.clock.advance(1)
    assert pods_shown_to("10.0.0.9", 10) == 10


@pytest.mark.parametrize(
    ("pod", "is_decoded"),
    [
        (asking("p", gpu_mem=1), True),
        (asking("p", gpu_mem=1, annotations={"a": "x" * (1 << 20)}), False),
        (asking("p", gpu_mem=1, annotations={f"a{i}": "" for i in range(60_000)}), False),
        ({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main"}]}}, False),
        ({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "n", "env": [{}] * 300_000}]}}, False),
    ],
)
def test_pods_of_bindings_that_are_too_large_or_request_nothing_are_not_decoded(world, monkeypatch, pod, is_decoded):
    world.api.write_object(paths.pods(), pod)
    decoded = []
    decode = view_module._decode_object
    monkeypatch.setattr(view_module, "_decode_object", lambda text: decoded.append(text) or decode(text))
    found_pod = world.view.pod("default", "p", "", sizes.check_text)
    assert (found_pod is not None, len(decoded)) == (is_decoded, is_decoded)


def test_defaults_that_are_too_long_are_not_kept(world):
    annotations = {names.FRAMEWORKS: "tensorflow," * 20_000 + "jax", names.DEFAULT_GPU_MEM: "1Gi"}
    labels = {names.DEFAULTS_LABEL: "enabled"}
    world.put_objects(paths.namespaces(), {"metadata": {"name": "team", "labels": labels, "annotations": annotations}})
    defaults = world.start().defaults("team")
    assert len(defaults.frameworks) == namespaces.MAX_DEFAULT_LENGTH + 1
    with pytest.raises(InvalidRequest, match="the text is too long; write at most 512 characters"):
        check_defaults(defaults, "team")
