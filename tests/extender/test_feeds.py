"""The seven lists that state and sightings are fed by: what is missing before they are there, and what is skipped."""

import json
import queue

import pytest
from structlog.testing import capture_logs

from cardwise.core.gangs import Load
from cardwise.core.verdict import Refusal
from cardwise.kube import paths
from extender.feeds import Feeds
from extender.sightings import Sightings
from extender.state import State
from tests.extender.gangworlds import member
from tests.extender.worlds import (
    P100,
    asking,
    bound,
    free,
    gpu_quota,
    plan,
    refuse,
    resource,
    resource_class,
)
from tests.fakes.clock import FakeClock
from tests.kube.test_reflector import eventually


class FakeApi:
    """At the seam of KubeClient: lists that can be changed, watches that say what is told to `modify`."""

    def __init__(self):
        self.lists = {
            paths.nodes(): [{"metadata": {"name": "n1"}}],
            paths.extendedresources(): [resource(0)],
            paths.pods(): [],
            paths.resourceclasses(): [resource_class("p100", model="P100")],
            paths.gpuquotas(): [gpu_quota({"shares": 1})],
            paths.podgroups(): [pod_group("g", minMember=2)],
            paths.poddisruptionbudgets(): [],
        }
        self.held_back = set()
        self.watches = {}
        self.listed = []

    def list_pages(self, path, query, limit):
        if path in self.held_back:
            raise OSError("not yet")
        self.listed.append(path)
        items = json.dumps(self.lists[path])
        yield f'{{"metadata":{{"resourceVersion":"5"}},"items":{items}}}'.encode()

    def watch(self, path, query, version, seconds, *, read_timeout):
        self.watches[path] = Lines()
        return self.watches[path]

    def modify(self, path, obj, what="MODIFIED"):
        event = {"type": what, "object": obj}
        eventually(lambda: path in self.watches)
        self.watches[path].put(json.dumps(event).encode())


class Lines(queue.SimpleQueue):
    """A watch: the lines that are put, until it is closed."""

    def __iter__(self):
        yield from iter(self.get, None)

    def close(self):
        self.put(None)


def pod_group(name, **spec):
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


class Recorder:
    def record(self, *_):
        pass


@pytest.fixture
def api():
    return FakeApi()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def seen():
    return Sightings()


@pytest.fixture
def fed(api, clock, seen):
    made = State(clock=clock)
    feeds = Feeds(api, made, seen, Recorder())
    yield made, feeds
    feeds.stop()


def ready(feeds):
    feeds.start()
    eventually(lambda: not feeds.missing())


def left(made):
    with made.view_rooms() as (_, rooms):
        return rooms.left("n1")


KINDS = [
    "nodes", "pods", "extendedresources", "resourceclasses", "gpuquotas", "podgroups", "poddisruptionbudgets",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decided_before_all_seven_lists_are_there(api, fed, kind):
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


def test_each_kind_is_listed_once_for_all_who_ask(api, fed, seen):
    _, feeds = fed
    ready(feeds)
    assert sorted(api.listed) == sorted(api.lists)
    assert seen.cards.models() == {"P100"}
    assert seen.classes.values.keys() == {"p100"}
    assert seen.quotas.values.keys() == {"default/team"}
    assert seen.groups.values.keys() == {"default/g"}


def test_pods_of_a_gang_podgroups_and_other_pods_come_to_the_state(api, fed):
    members = [member(name, minimum=None, gated=False, gpu_mem=100) for name in ("a", "b")]
    other = {"metadata": {"name": "o", "namespace": "d", "uid": "o"}, "spec": {"nodeName": "n1", "containers": []}}
    api.lists[paths.pods()] = [*members, other]
    api.lists[paths.nodes()] = [{"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "2", "pods": "3"}}}]
    made, feeds = fed
    ready(feeds)
    (view,) = made.gangs.views()
    assert (view.name, view.minimum, len(view.there), str(view.phase)) == ("g", 2, 2, "Waiting")
    assert left(made) == Load(2000, 0, 2)
    api.modify(paths.podgroups(), pod_group("g", minMember=3))
    api.modify(paths.pods(), other, "DELETED")
    api.modify(paths.pods(), members[0], "DELETED")
    eventually(lambda: [(view.minimum, len(view.there)) for view in made.gangs.views()] == [(3, 1)])
    assert left(made) == Load(2000, 0, 3)


def test_a_status_that_was_written_is_seen_and_leaves_the_state_as_it_is(api, fed, seen, clock):
    made, feeds = fed
    ready(feeds)
    refuse(made)  # from now on somebody waits to be woken
    clock.advance(60)
    made.waiters.touch_due()
    made.changed_nodes()
    clock.advance(60)
    card, device_class, quota = resource(0), resource_class("p100", model="P100"), gpu_quota({"shares": 1})
    card["status"] |= {"allocated": {"memoryMiB": 7, "whole": False, "pods": 1}, "freeMiB": 9, "classes": ["p100"]}
    api.modify(paths.extendedresources(), card)
    api.modify(paths.resourceclasses(), device_class | {"status": {"cards": 1}})
    api.modify(paths.gpuquotas(), quota | {"status": {"used": []}})
    name = card["metadata"]["name"]
    eventually(lambda: seen.cards.values[name].status.memory == 7)
    eventually(lambda: seen.classes.values["p100"].status == {"cards": 1})
    eventually(lambda: seen.quotas.values["default/team"].status == {"used": []})
    assert (seen.cards.values[name].status.free, seen.cards.values[name].status.classes) == (9, ("p100",))
    assert made.changed_nodes() == set()
    assert made.waiters.touch_due() is None
    api.modify(paths.gpuquotas(), gpu_quota({"shares": 2}))
    eventually(lambda: made.waiters.touch_due() == "n1")
    card["status"]["health"] = "Unhealthy"
    api.modify(paths.extendedresources(), card)
    eventually(lambda: made.changed_nodes() == {"n1"})


def test_a_deleted_object_is_neither_in_the_state_nor_seen(api, fed, seen):
    made, feeds = fed
    ready(feeds)
    for path, keys in (
        (paths.extendedresources(), seen.cards.values),
        (paths.resourceclasses(), seen.classes.values),
        (paths.gpuquotas(), seen.quotas.values),
    ):
        api.modify(path, api.lists[path][0], "DELETED")
        eventually(lambda keys=keys: not keys)
    assert seen.classes.deleted() == ["p100"]
    assert seen.cards.models() == set()
    assert free(made) == []


def test_what_is_unreadable_is_logged_once_and_not_at_each_change_of_its_status(api, fed, seen):
    api.lists[paths.resourceclasses()] = [{"metadata": {"name": "bad"}, "spec": {"selector": {}}}]
    api.lists[paths.gpuquotas()] = [gpu_quota({"shares": "many"})]
    _, feeds = fed
    with capture_logs() as logs:
        ready(feeds)
        api.modify(paths.resourceclasses(), api.lists[paths.resourceclasses()][0] | {"status": {"cards": 0}})
        api.modify(paths.gpuquotas(), api.lists[paths.gpuquotas()][0] | {"status": {"used": []}})
        eventually(lambda: seen.classes.values["bad"].status and seen.quotas.values["default/team"].status)
    assert sorted(entry["event"].split(",")[0] for entry in logs if "unreadable" in entry["event"]) == [
        "unreadable GPUQuota",
        "unreadable ResourceClass",
    ]


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
