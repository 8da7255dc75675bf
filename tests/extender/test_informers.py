"""The seven reflectors of the state: the unsynced lists at the start, and the skipped objects."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from cardwise.core.api.request import Load
from cardwise.core.values.refusals import Refusal
from cardwise.kube import paths
from extender.informers import Informers
from extender.reporting.listers import Listers
from extender.state import State
from tests.build import P100, asking, extended_resource, gpu_quota, pod_group, resource_class
from tests.extender.gangcluster import member
from tests.extender.states import bound, free, plan, refuse
from tests.extender.statuscluster import CARDS, CLASSES, QUOTAS
from tests.fakes.apiserver import ApiServer, Fault


class Recorder:
    def record(self, *_):
        pass


@pytest.fixture
def api(clock):
    server = ApiServer(clock)
    server.write_object(paths.nodes(), {"metadata": {"name": "n1"}})
    server.write_object(CARDS, extended_resource(0))
    server.write_object(CLASSES, resource_class("p100", model="P100"))
    server.write_object(QUOTAS, gpu_quota({"shares": 1}))
    server.write_object(paths.podgroups(), pod_group("g", 2))
    return server


@pytest.fixture
def listers():
    return Listers()


@pytest.fixture
def fed(api, clock, listers):
    state = State(clock=clock)
    feeds = Informers(api.client(), state, listers, Recorder(), clock)
    yield state, feeds
    feeds.stop()


def all_told(clock):
    """Wait until every reflector has handled all events."""
    clock.until_waiting(len(KINDS))


def ready(feeds, clock):
    feeds.start()
    all_told(clock)
    assert feeds.unsynced_lists() == []


def caught_up(feeds):
    with ThreadPoolExecutor() as pool:
        return pool.submit(feeds.catch_up, lambda: True).result(60)


def free_load_of(state):
    return state.snapshot().loads.free_load("n1")


KINDS = [
    "nodes", "pods", "extendedresources", "resourceclasses", "gpuquotas", "podgroups", "poddisruptionbudgets",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decided_before_all_seven_lists_are_there(api, fed, clock, kind):
    refused = api.fault(Fault(refused=True), "list", getattr(paths, kind)(), times=math.inf)
    _, feeds = fed
    feeds.start()
    all_told(clock)
    assert feeds.unsynced_lists() == [f"the list of {kind} is not complete yet"]
    refused.remaining = 0
    clock.advance(60)
    all_told(clock)
    assert feeds.unsynced_lists() == []


def test_classes_and_quotas_come_to_the_state(api, fed, clock):
    state, feeds = fed
    ready(feeds, clock)
    assert plan(state, "a", 100, resource_class="p100").assignment.indices() == [0]
    assert set(plan(state, "b", 100).refusals.values()) == {Refusal.QUOTA}
    assert set(plan(state, "c", 100, namespace="other", resource_class="none").refusals.values()) == {
        Refusal.NO_SUCH_TYPE
    }


def test_each_kind_is_listed_once_for_all_callers(api, fed, listers, clock):
    _, feeds = fed
    ready(feeds, clock)
    assert sorted(call.path for call in api.sent("list")) == sorted(getattr(paths, kind)() for kind in KINDS)
    assert listers.cards.models() == {"P100"}
    assert listers.classes.objects.keys() == {"p100"}
    assert listers.quotas.objects.keys() == {"default/team"}
    assert listers.groups.objects.keys() == {"default/g"}


def test_pods_of_a_gang_podgroups_and_other_pods_come_to_the_state(api, fed, clock):
    members = [member(name, minimum=None, gated=False, gpu_mem=100) for name in ("a", "b")]
    other = {"metadata": {"name": "o", "namespace": "d", "uid": "o"}, "spec": {"nodeName": "n1", "containers": []}}
    for pod in (*members, other):
        api.write_object(paths.pods(), pod)
    api.edit(paths.nodes("n1"), status={"allocatable": {"cpu": "2", "pods": "3"}})
    state, feeds = fed
    ready(feeds, clock)
    (view,) = state.gangs.views()
    assert (view.name, view.minimum, view.member_count, str(view.phase)) == ("g", 2, 2, "Waiting")
    assert free_load_of(state) == Load(2000, 0, 2)
    api.write_object(paths.podgroups(), pod_group("g", 3))
    api.remove(paths.pods("d", "o"))
    api.remove(paths.pods("default", "a"))
    all_told(clock)
    assert [(view.minimum, view.member_count) for view in state.gangs.views()] == [(3, 1)]
    assert free_load_of(state) == Load(2000, 0, 3)


def test_a_status_that_was_written_is_seen_and_leaves_the_state_as_it_is(api, fed, listers, clock):
    state, feeds = fed
    ready(feeds, clock)
    refuse(state)  # from now on a pod waits to be requeued
    clock.advance(60)
    state.next_requeue_node()
    state.take_changed_nodes()
    clock.advance(60)
    card, p100, quota = extended_resource(0), resource_class("p100", model="P100"), gpu_quota({"shares": 1})
    card["status"] |= {"allocated": {"memoryMiB": 7, "whole": False, "pods": 1}, "freeMiB": 9, "classes": ["p100"]}
    api.write_object(CARDS, card)
    api.write_object(CLASSES, p100 | {"status": {"devices": 1}})
    api.write_object(QUOTAS, quota | {"status": {"used": []}})
    all_told(clock)
    name = card["metadata"]["name"]
    assert listers.cards.objects[name].status.allocated.memory_mib == 7
    assert listers.classes.objects["p100"].status == {"devices": 1}
    assert listers.quotas.objects["default/team"].status == {"used": []}
    assert (listers.cards.objects[name].status.free_mib, listers.cards.objects[name].status.classes) == (9, ("p100",))
    assert state.take_changed_nodes() == set()
    assert state.next_requeue_node() is None
    api.write_object(QUOTAS, gpu_quota({"shares": 2}))
    all_told(clock)
    assert state.next_requeue_node() == "n1"
    card["status"]["health"] = "Unhealthy"
    api.write_object(CARDS, card)
    all_told(clock)
    assert state.take_changed_nodes() == {"n1"}


def test_a_deleted_object_is_neither_in_the_state_nor_seen(api, fed, listers, clock):
    state, feeds = fed
    ready(feeds, clock)
    api.remove(paths.extendedresources(extended_resource(0)["metadata"]["name"]))
    api.remove(paths.resourceclasses("p100"))
    api.remove(paths.gpuquotas("default", "team"))
    all_told(clock)
    assert (listers.cards.objects, listers.classes.objects, listers.quotas.objects) == ({}, {}, {})
    assert listers.classes.take_deleted() == ["p100"]
    assert listers.cards.models() == set()
    assert free(state) == []


def test_what_is_unreadable_is_logged_once_and_not_at_each_change_of_its_status(api, fed, listers, clock):
    api.write_object(CLASSES, {"metadata": {"name": "bad"}, "spec": {"selector": {}}})
    api.write_object(QUOTAS, gpu_quota({"shares": "many"}))
    _, feeds = fed
    with capture_logs() as logs:
        ready(feeds, clock)
        api.edit(paths.resourceclasses("bad"), status={"devices": 0})
        api.edit(paths.gpuquotas("default", "team"), status={"used": []})
        all_told(clock)
    assert listers.classes.objects["bad"].status == {"devices": 0}
    assert listers.quotas.objects["default/team"].status == {"used": []}
    assert sorted(entry["event"].split(":")[0] for entry in logs if "invalid" in entry["event"]) == [
        "ignored an invalid GPUQuota",
        "ignored an invalid ResourceClass",
    ]


def test_an_unreadable_class_or_quota_is_none_and_keeps_nothing_else_from_being_read(api, fed, clock):
    api.write_object(CLASSES, {"metadata": {"name": "bad"}, "spec": {"selector": {}}})
    api.write_object(QUOTAS, gpu_quota({"shares": "many"}))
    api.write_object(QUOTAS, gpu_quota({"shares": 2}, name="good"))
    state, feeds = fed
    ready(feeds, clock)
    for name in ("a", "b"):
        assert plan(state, name, 100, resource_class="p100").node == "n1"
    assert set(plan(state, "c", 100).refusals.values()) == {Refusal.QUOTA}
    assert set(plan(state, "d", 100, namespace="other", resource_class="bad").refusals.values()) == {
        Refusal.NO_SUCH_TYPE
    }


def test_what_becomes_unreadable_is_skipped_from_then_on(api, fed, clock):
    state, feeds = fed
    ready(feeds, clock)
    api.hold(QUOTAS)
    api.write_object(QUOTAS, gpu_quota({"shares": "many"}))
    assert caught_up(feeds)
    for name in ("a", "b"):
        assert plan(state, name, 100).node == "n1"


def test_catching_up_shows_changes_that_the_watch_missed(api, fed, clock):
    state, feeds = fed
    ready(feeds, clock)
    api.hold(paths.pods(), QUOTAS, paths.podgroups())
    api.write_object(paths.pods(), bound("other", P100 - 100, 0))
    api.write_object(paths.pods(), asking("waiting", gpu_mem=1))
    api.write_object(paths.pods(), member("m", minimum=None))
    api.write_object(QUOTAS, gpu_quota({"shares": 5}))
    api.write_object(paths.podgroups(), pod_group("g", 3))
    assert free(state) == [P100]
    assert caught_up(feeds)
    assert free(state) == [100]
    assert plan(state, "a", 100).node == "n1"
    assert [view.minimum for view in state.gangs.views()] == [3]


def test_catching_up_is_given_up_when_the_epoch_is_over(api, fed, clock):
    _, feeds = fed
    ready(feeds, clock)
    api.fault(Fault(refused=True), "list", paths.pods(), times=math.inf)
    checks = []
    with ThreadPoolExecutor() as pool:
        catching_up = pool.submit(feeds.catch_up, lambda: checks.append(1) or len(checks) < 3)
        for _ in range(3):
            clock.until_waiting(len(KINDS) + 1)
            clock.advance(0.2)
        assert not catching_up.result(60)
    assert len(checks) == 3


RESTRICTING = ["nodes", "extendedresources", "resourceclasses", "gpuquotas"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_watch_of_what_forbids_placements_the_picture_is_outdated_after_five_seconds(api, fed, clock, kind):
    """Otherwise a card that was cordoned while the watch was interrupted would get pods."""
    _, feeds = fed
    ready(feeds, clock)
    collection = getattr(paths, kind)()
    refused = api.fault(Fault(refused=True), "watch", collection, times=math.inf)
    api.end_watches("cut", collection)
    all_told(clock)
    assert feeds.outdated_watches() == [], "a watch that is only replaced"
    clock.step_until(lambda: clock.now() > 1005, threads=len(KINDS))
    assert len(feeds.outdated_watches()) == (kind in RESTRICTING)
    assert feeds.disconnected_seconds()[kind] > 5
    assert feeds.unsynced_lists() == [], "another replica would know no more"
    refused.remaining = 0
    clock.advance(5)  # the longest pause
    all_told(clock)
    assert feeds.outdated_watches() == []
    assert set(feeds.disconnected_seconds().values()) == {0}


def test_a_new_epoch_ends_the_pauses_of_all_watches(api, fed, clock):
    _, feeds = fed
    ready(feeds, clock)
    api.down = True
    clock.step_until(lambda: clock.now() > 1060, threads=len(KINDS))
    api.down = False
    assert caught_up(feeds)
    before = clock.now()
    all_told(clock)
    assert set(feeds.disconnected_seconds().values()) == {0}
    assert clock.now() - before < 0.2
