"""What the webhook knows of the cluster, from lists and single reads."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from cardwise.core import classes
from cardwise.core.classes import DeviceClass
from cardwise.core.quantity import MiB
from cardwise.kube import errors, paths
from tests.webhook.reviews import resource_class
from webhook.limitranges import Bounds
from webhook.validate import Cards
from webhook.view import LIMIT_RANGES, ClusterView

Json = dict[str, Any]


class Client:
    """Lists `objects` once; `late` are there, but the watch has not told of them yet."""

    def __init__(self, objects: dict[str, list[Json]], late: dict[str, Json] | None = None) -> None:
        self.objects, self.late = objects, late or {}
        self.read: list[str] = []

    def list_pages(self, path: str, query: object, limit: int) -> Iterator[bytes]:
        if path not in self.objects:
            raise errors.NotFound(404, "NotFound", "no such kind")
        yield json.dumps({"metadata": {"resourceVersion": "1"}, "items": self.objects[path]}).encode()

    def watch(self, *args: object, **kwargs: object) -> "Silence":
        return Silence()

    def get(self, path: str, **kwargs: object) -> Json:
        self.read.append(path)
        if path not in self.late:
            raise errors.NotFound(404, "NotFound", "no such object")
        return self.late[path]


class Silence:
    def __init__(self) -> None:
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self._closed.wait(10)
        yield from ()

    def close(self) -> None:
        self._closed.set()


def card(index: int, *, node: str = "n1", model: str = "Tesla K80", memory: int = 11441) -> Json:
    spec = {"node": node, "index": index, "uuid": f"GPU-{node}-{index}", "model": model, "memoryMiB": memory}
    return {"metadata": {"name": f"gpu-{node}-{index}", "labels": {"room": "cold"}}, "spec": spec}


def device(index: int, *, node: str = "n1", kind: str = "rdma") -> Json:
    spec = {"node": node, "index": index, "uuid": f"{kind}-{node}-{index}", "kind": kind}
    return {"metadata": {"name": spec["uuid"], "labels": {"room": "cold"}}, "spec": spec}


def of(labels: dict[str, str]) -> DeviceClass:
    return classes.parse({"metadata": {"name": "mine"}, "spec": {"selector": {"matchLabels": labels}}})


def quota(namespace: str, name: str, hard: list[Json], used: list[Json] | None = None) -> Json:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"hard": hard}, "status": {"used": used or []}}


def lists(**others: list[Json]) -> dict[str, list[Json]]:
    cards = [card(0), card(1, memory=5632), card(0, node="n2", model="Tesla P100", memory=16276)]
    return {
        paths.namespaces(): [],
        paths.extendedresources(): others.get("cards", cards),
        paths.resourceclasses(): others.get("classes", []),
        paths.gpuquotas(): others.get("quotas", []),
        LIMIT_RANGES: others.get("ranges", []),
    }


def wait(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def started() -> Iterator[Callable[[Client], ClusterView]]:
    views: list[ClusterView] = []

    def start(client: Client) -> ClusterView:
        views.append(ClusterView(client))  # type: ignore[arg-type]
        views[-1].start()
        wait(lambda: not views[-1].problems())
        return views[-1]

    yield start
    for view in views:
        view.stop()


def test_cards_are_summed_by_class(started):
    view = started(Client(lists(classes=[resource_class("k80"), resource_class("v100", model="Tesla V100")])))
    assert view.cards() == Cards(MiB(16276), 2)
    assert view.cards(view.device_class("k80")) == Cards(MiB(11441), 2)
    assert view.cards(view.device_class("v100")) == Cards()
    assert view.selects(of({"room": "cold", "hostname": "n2"}))
    assert not view.selects(of({"room": "hot"}))


def test_devices_are_no_cards_and_counted_by_their_classes_only(started):
    cards = [card(0), *(device(i) for i in range(3)), device(0, node="n2"), device(0, kind="fpga")]
    loose = {"metadata": {"name": "loose"}, "spec": {"selector": {"matchLabels": {"room": "cold"}}}}
    view = started(Client(lists(cards=cards, classes=[loose])))
    assert view.cards() == Cards(MiB(11441), 1)
    assert view.cards(view.device_class("loose")) == Cards(MiB(11441), 1), "a class that says no kind is of GPUs"
    assert view.cards(of({"kind": "rdma"})) == Cards(most=3)
    assert view.cards(of({"kind": "rdma", "node": "n2"})) == Cards(most=1)
    assert view.selects(of({"kind": "fpga"}))
    assert not view.selects(of({"kind": "nic"}))


def test_a_class_that_the_watch_has_not_told_of_is_read(started):
    broken = resource_class("broken", share={"memoryMiB": 0})
    client = Client(lists(), {paths.resourceclasses(): {"items": [resource_class("new"), broken]}})
    view = started(client)
    known = view.device_class("new")
    assert known is not None
    assert view.cards(known) == Cards(MiB(11441), 2)
    assert view.device_class("broken") is None
    assert view.device_class("none") is None


def test_quotas_are_those_of_the_namespace_with_what_is_used(started):
    hard, used = [{"class": "k80", "shares": 5}], [{"class": "k80", "shares": 3}]
    view = started(
        Client(lists(quotas=[quota("a", "one", hard, used), quota("a", "two", hard), quota("b", "one", hard)]))
    )
    assert [standing.quota.name for standing in view.quotas("a")] == ["one", "two"]
    assert [standing.used.get(("k80", ""), (0,))[0] for standing in view.quotas("a")] == [3, 0]
    assert view.quotas("c") == []


def test_what_cannot_be_read_is_skipped_and_said_once():
    broken = resource_class("broken", share={"memoryMiB": 0})
    with structlog.testing.capture_logs() as told:
        view = ClusterView(Client({}))  # type: ignore[arg-type]
        raw = json.dumps(broken).encode()
        assert view._project_class(raw) is None
        assert view._project_class(raw) is None
        assert view._project_quota(json.dumps(quota("a", "bad", [{"shares": -1}])).encode()) is None
    assert [(line["object"], line["log_level"]) for line in told] == [
        ("ResourceClass broken", "warning"), ("GPUQuota a/bad", "warning"),
    ]  # fmt: skip
    assert "spec.share.memoryMiB" in told[0]["error"]


def test_without_the_crds_of_types_and_quotas_the_webhook_becomes_ready():
    client = Client({path: found for path, found in lists().items() if "class" not in path and "quota" not in path})
    view = ClusterView(client)  # type: ignore[arg-type]
    assert {text.partition(" ")[0] for text in view.problems()} == {
        "namespaces", "extendedresources", "resourceclasses", "gpuquotas", "limitranges",
    }  # fmt: skip
    view.start()
    try:
        wait(lambda: view.problems() == [])
        assert view.classes() == {}
        assert view.quotas("a") == []
        assert view.device_class("k80") is None
    finally:
        view.stop()


def test_without_the_cards_it_does_not():
    view = ClusterView(Client({path: found for path, found in lists().items() if "extended" not in path}))  # type: ignore[arg-type]
    view.start()
    try:
        wait(lambda: view._cards_known.errors >= 3)
        assert view.problems() == ["extendedresources are not listed yet"]
    finally:
        view.stop()


def limit_range(namespace: str, name: str, *items: Json) -> Json:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": {"limits": list(items)}}


def test_the_tightest_of_a_namespaces_limit_ranges_counts(started):
    ranges = [
        limit_range("a", "one", {"type": "Container", "min": {"cpu": "100m"}, "max": {"memory": "2Gi"}}),
        limit_range(
            "a", "two", {"type": "Container", "min": {"cpu": "0.2", "memory": "1Mi"}, "max": {"memory": "1Gi"}}
        ),
        limit_range("a", "pods", {"type": "Pod", "max": {"cpu": "4"}}, {"type": "Pod", "max": {"cpu": "3"}}),
        limit_range("b", "bad", {"type": "Container", "min": {"cpu": "lots"}}),
    ]
    view = started(Client(lists(ranges=ranges)))
    found = view.bounds("a")
    assert {name: amount.text for name, amount in found.least.items()} == {"cpu": "0.2", "memory": "1Mi"}
    assert {name: amount.text for name, amount in found.most.items()} == {"memory": "1Gi"}
    assert {name: amount.text for name, amount in found.most_of_pod.items()} == {"cpu": "3"}
    assert view.bounds("b") == Bounds()
    assert view.bounds("c") == Bounds()


def test_which_daemons_the_mps_managers_have_is_told_by_the_cards(started):
    def served(index: int, **mps: object) -> Json:
        return card(index) | {"status": {"health": "Healthy"} | ({"mps": mps} if mps else {})}

    assert started(Client(lists())).mps_scopes() == frozenset()
    cards = [served(0), served(1, mode="card", state="Down"), served(2, mode="node", state="Ready", maxClients=48)]
    view = started(Client(lists(cards=cards)))
    assert view.mps_scopes() == {"card", "node"}
    assert view.cards().most == 3
