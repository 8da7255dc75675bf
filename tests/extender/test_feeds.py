"""The five lists that the state is fed by: what is missing before they are there, and what is skipped."""

import json

import pytest

from cardwise.core.verdict import Refusal
from cardwise.kube import paths
from extender.feeds import Feeds
from extender.state import State
from tests.extender.worlds import P100, asking, bound, free, gpu_quota, plan, resource, resource_class
from tests.kube.test_reflector import eventually


class FakeApi:
    """At the seam of KubeClient: lists that can be changed, watches that stay silent."""

    def __init__(self):
        self.lists = {
            paths.nodes(): [{"metadata": {"name": "n1"}}],
            paths.extendedresources(): [resource(0)],
            paths.pods(): [],
            paths.resourceclasses(): [resource_class("p100", model="P100")],
            paths.gpuquotas(): [gpu_quota({"shares": 1})],
        }
        self.held_back = set()
        self.watches = []

    def list_pages(self, path, query, limit):
        if path in self.held_back:
            raise OSError("not yet")
        items = json.dumps(self.lists[path])
        yield f'{{"metadata":{{"resourceVersion":"5"}},"items":{items}}}'.encode()

    def watch(self, path, query, version, seconds, *, read_timeout):
        self.watches.append(Silence())
        return self.watches[-1]


class Silence:
    def __init__(self):
        import threading

        self._closed = threading.Event()

    def __iter__(self):
        self._closed.wait(60)
        yield from ()

    def close(self):
        self._closed.set()


class Recorder:
    def record(self, *_):
        pass


@pytest.fixture
def api():
    return FakeApi()


@pytest.fixture
def fed(api):
    made = State()
    feeds = Feeds(api, made, Recorder())
    yield made, feeds
    feeds.stop()


def ready(feeds):
    feeds.start()
    eventually(lambda: not feeds.missing())


@pytest.mark.parametrize("kind", ["nodes", "pods", "extendedresources", "resourceclasses", "gpuquotas"])
def test_nothing_is_decided_before_all_five_lists_are_there(api, fed, kind):
    api.held_back.add(getattr(paths, kind)())
    _, feeds = fed
    feeds.start()
    eventually(lambda: len(feeds.missing()) == 1)
    assert feeds.missing() == [f"the list of {kind} is not complete yet"]
    api.held_back.clear()
    eventually(lambda: feeds.missing() == [])


def test_classes_and_quotas_come_to_the_state(api, fed):
    made, feeds = fed
    ready(feeds)
    assert plan(made, "a", 100, device_class="p100").assignment.indices() == [0]
    assert set(plan(made, "b", 100).refusals.values()) == {Refusal.QUOTA}
    assert set(plan(made, "c", 100, namespace="other", device_class="none").refusals.values()) == {Refusal.NO_SUCH_TYPE}


def test_an_unreadable_class_or_quota_is_none_and_keeps_nothing_else_from_being_read(api, fed):
    api.lists[paths.resourceclasses()].append({"metadata": {"name": "bad"}, "spec": {"selector": {}}})
    api.lists[paths.gpuquotas()] = [gpu_quota({"shares": "many"}), gpu_quota({"shares": 2}, name="good")]
    made, feeds = fed
    ready(feeds)
    for name in ("a", "b"):
        assert plan(made, name, 100, device_class="p100").node == "n1"
    assert set(plan(made, "c", 100).refusals.values()) == {Refusal.QUOTA}
    assert set(plan(made, "d", 100, namespace="other", device_class="bad").refusals.values()) == {Refusal.NO_SUCH_TYPE}


def test_what_becomes_unreadable_is_skipped_from_then_on(api, fed):
    made, feeds = fed
    ready(feeds)
    api.lists[paths.gpuquotas()] = [gpu_quota({"shares": "many"})]
    assert feeds.catch_up(lambda: True)
    for name in ("a", "b"):
        assert plan(made, name, 100).node == "n1"


def test_catching_up_shows_what_the_watch_has_not_told(api, fed):
    made, feeds = fed
    ready(feeds)
    api.lists[paths.pods()] = [bound("other", P100 - 100, 0), asking("waiting", gpu_mem=1)]
    api.lists[paths.gpuquotas()] = [gpu_quota({"shares": 5})]
    assert free(made) == [P100]
    assert feeds.catch_up(lambda: True)
    assert free(made) == [100]
    assert plan(made, "a", 100).node == "n1"


def test_catching_up_is_given_up_when_the_term_is_over(api, fed):
    _, feeds = fed
    ready(feeds)
    api.held_back.add(paths.pods())
    asked = []
    assert not feeds.catch_up(lambda: asked.append(1) or len(asked) < 3)
    assert len(asked) == 3
