"""The reflector with a server that fails in every known way; each test checks the final state."""

import json
import math
import random
import socket
import threading
from types import SimpleNamespace

import pytest

from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.reflector import CENTRAL_PACE, Reflector, WatchPace
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock

PODS = paths.pods()


class Recorder:
    def __init__(self) -> None:
        self.records: dict[str, int] = {}
        self.calls: list[tuple] = []
        self.synced = 0
        self.fail_on: set[str] = set()
        self.failed: list[str] = []

    def _fail(self, key):
        if key in self.fail_on:
            self.failed.append(key)
            raise RuntimeError("handler broke")

    def on_change(self, key, old, new):
        assert self.records.get(key) == old
        assert old != new or key in self.failed
        self._fail(key)
        self.records[key] = new
        self.calls.append((key, old, new))

    def on_delete(self, key, old):
        self._fail(key)
        assert self.records.pop(key, old if key in self.failed else None) == old
        self.calls.append((key, old, None))

    def on_synced(self):
        self.synced += 1


def project(raw: bytes) -> tuple[str, int] | None:
    manifest = json.loads(raw)
    size = manifest["spec"].get("size", 0)
    if size < 0:
        raise ValueError("cannot be read")
    return (manifest["metadata"]["uid"], size) if size else None


def put_pod(api: ApiServer, name: str, *, uid: str = "", **spec: object) -> None:
    api.write_object(PODS, {"metadata": {"name": name, "uid": uid or f"uid-{name}"}, "spec": spec})


def remove(api: ApiServer, name: str) -> None:
    api.remove(paths.pods("default", name))


def truth(api: ApiServer) -> dict[str, int]:
    shown = [project(json.dumps(manifest).encode()) for manifest in api.all(PODS)]
    return dict(record for record in shown if record is not None)


@pytest.fixture
def following(client: KubeClient, clock: FakeClock):
    """Start a reflector and wait until it only waits for the clock."""
    started: list[Reflector] = []

    def follow(handler: Recorder | None = None, pace: WatchPace | None = None) -> tuple[Reflector, Recorder]:
        handler = handler or Recorder()
        query = {"fieldSelector": "spec.nodeName="}
        reflector = Reflector(client, PODS, project, handler, query=query, list_limit=3, pace=pace, clock=clock)
        reflector.start()
        started.append(reflector)
        clock.until_waiting()
        return reflector, handler

    yield follow
    for reflector in started:
        reflector.stop()
        assert not reflector._thread.is_alive()


def test_lists_in_pages_then_follows_events(api: ApiServer, clock, following):
    for number in range(10):
        put_pod(api, f"p{number}", size=number)
    reflector, handler = following()
    assert reflector.synced.is_set()
    assert handler.records == truth(api) == reflector.store.snapshot()
    assert len(handler.records) == 9  # the projection ignores p0
    put_pod(api, "p3", size=33)
    put_pod(api, "p4", size=0)  # ignored from now on, which counts as a deletion
    remove(api, "p5")
    put_pod(api, "p5", uid="other", size=5)
    clock.until_waiting()
    assert handler.records == truth(api)
    assert "other" in handler.records
    assert "uid-p4" not in handler.records
    assert reflector.relists == 1
    lists = [request.query for request in api.sent("list")]
    assert len(lists) == 4
    assert all("resourceVersion" not in query for query in lists)  # consistent, never from a stale cache
    (watch,) = api.sent("watch")
    assert watch.query["allowWatchBookmarks"] == "true"
    assert watch.query["fieldSelector"] == "spec.nodeName="


def test_ended_watch_is_continued_from_its_version(api: ApiServer, clock, following):
    put_pod(api, "a", size=1)
    reflector, handler = following()
    put_pod(api, "b", size=2)
    api.hold(PODS)
    clock.step_until(lambda: len(api.sent("watch")) == 3)
    put_pod(api, "c", size=3)
    api.let_through(PODS)
    clock.until_waiting()
    assert handler.records == truth(api)
    assert (reflector.relists, reflector.errors) == (1, 0)
    first, second, third = (int(request.query["resourceVersion"]) for request in api.sent("watch"))
    assert first < second <= third


def test_requested_list_shows_earlier_writes(api, clock, following):
    put_pod(api, "a", size=1)
    reflector, handler = following()
    api.fault(Fault(events=1, then="silence"), "watch")
    put_pod(api, "b", size=2)
    clock.until_waiting()
    assert "uid-b" in handler.records
    # The old watch ends with its list; the next watch becomes silent after an event.
    assert reflector.relist().wait(60)
    put_pod(api, "c", size=3)
    clock.until_waiting()
    assert "uid-c" in handler.records
    put_pod(api, "d", size=4)
    clock.until_waiting()
    assert "uid-d" not in handler.records
    assert reflector.relist().wait(60)
    assert handler.records == truth(api)
    put_pod(api, "e", size=5)
    clock.until_waiting()
    assert handler.records == truth(api)
    assert clock.now() == 1000


def test_requested_list_begins_after_the_request(api, clock, following, monkeypatch):
    """The list under way began earlier, so later writes are missing in it, and the watch has not delivered them yet."""
    put_pod(api, "a", size=1)
    reflector, handler = following()
    api.hold(PODS)
    put_pod(api, "b", size=2)
    take, relists = handler.on_change, []

    def meanwhile(key, old, new):
        take(key, old, new)
        if key == "uid-b":
            put_pod(api, "c", size=3)
            relists.append(reflector.relist())

    monkeypatch.setattr(handler, "on_change", meanwhile)
    assert reflector.relist().wait(60)
    assert relists[0].wait(60)
    assert handler.records == truth(api), "who asked while a list was under way was answered by that list"


def test_failed_requested_list_is_retried(api, clock, following):
    put_pod(api, "a", size=1)
    reflector, handler = following()
    api.fault(Fault(status=500), "list")
    api.fault(Fault(status=429, retry_after=0), "list")
    before = len(api.sent("list"))
    done = [reflector.relist() for _ in range(3)]
    clock.step_until(lambda: all(relist.is_set() for relist in done))
    assert len(api.sent("list")) - before <= 2 + 2
    assert handler.records == truth(api)
    assert api.watches() == 1  # and the watch continues


def test_relist_ends_the_pause_after_an_outage(api: ApiServer, clock, following):
    """The API server is available again, one caller knows it, and the next attempt would come half a minute later."""
    put_pod(api, "a", size=1)
    reflector, handler = following(pace=WatchPace(backoff_initial=100, backoff_cap=100))
    api.down = True
    clock.until_waiting()
    assert reflector.errors >= 1
    api.down = False
    put_pod(api, "b", size=2)
    before = clock.now()
    done = reflector.relist()
    clock.until_waiting()
    assert done.is_set()
    assert clock.now() == before
    assert handler.records == truth(api)


@pytest.mark.parametrize(
    ("verb", "fault"),
    [
        ("list", Fault(status=500)),
        ("list", Fault(status=429, retry_after=0)),
        ("list", Fault(seconds=math.inf)),
        ("watch", Fault(status=429, retry_after=0)),
        ("watch", Fault(status=500)),
        ("watch", Fault(status=410)),
        ("watch", Fault(events=2, then="gone")),
        ("watch", Fault(events=2, then="cut")),
        ("watch", Fault(events=1, then="garbage")),
        ("watch", Fault(events=1, then="silence")),
    ],
    ids=lambda parameter: (
        parameter if isinstance(parameter, str) else f"{parameter.status or parameter.then or parameter.seconds}"
    ),
)
def test_state_is_right_after_a_fault(api: ApiServer, clock, following, verb, fault):
    put_pod(api, "a", size=1)
    ordered = api.fault(fault, verb)
    reflector, handler = following()
    clock.step_until(reflector.synced.is_set)
    for number in range(6):
        put_pod(api, f"p{number}", size=number + 1)
    remove(api, "a")
    clock.step_until(lambda: handler.records == truth(api))
    assert ordered.remaining == 0


def test_expired_page_causes_an_unpaged_list(api: ApiServer, clock, following):
    for number in range(10):
        put_pod(api, f"p{number}", size=number + 1)
    api.fault(Fault(), "list")
    api.fault(Fault(status=410), "list")  # the second page
    reflector, handler = following()
    clock.step_until(reflector.synced.is_set)
    assert handler.records == truth(api)
    assert "limit" not in api.sent("list")[-1].query


def test_first_list_is_delivered_by_page_and_synced_at_its_end(api: ApiServer, clock, following):
    for number in range(10):
        put_pod(api, f"p{number}", size=number + 1)
    api.fault(Fault(), "list")
    api.fault(Fault(status=500, retry_after=1), "list")  # the second page
    reflector, handler = following()
    assert handler.records == {f"uid-p{number}": number + 1 for number in range(3)}
    assert (reflector.synced.is_set(), handler.synced) == (False, 0)
    remove(api, "p0")
    put_pod(api, "p1", size=100)
    clock.step_until(reflector.synced.is_set)
    assert handler.records == truth(api)
    assert handler.synced == 1


def test_unchanged_list_keeps_the_known_records(api: ApiServer, clock, following):
    for name in "abc":
        put_pod(api, name, size=1000)
    reflector, handler = following()
    before = reflector.store.snapshot()
    handler.calls.clear()
    done = reflector.relist()
    clock.step_until(done.is_set)
    after = reflector.store.snapshot()
    assert all(after[key] is record for key, record in before.items())
    assert not handler.calls


@pytest.mark.parametrize(("pace", "limit"), [(CENTRAL_PACE, 7), (WatchPace(), 38)], ids=["central", "agent"])
def test_retry_after_is_limited_by_the_pace(api: ApiServer, clock, following, pace, limit):
    """Extender and webhook need current data: their longest pause is that of their pace, whatever Retry-After says."""
    api.fault(Fault(status=429, retry_after=3600), "list")
    began = clock.now()
    reflector, _ = following(pace=pace)
    clock.step_until(reflector.synced.is_set)
    assert limit / 2 < clock.now() - began <= limit


def test_relist_delivers_only_changes(api: ApiServer, clock, following):
    for name in "abc":
        put_pod(api, name, size=1)
    api.fault(Fault(status=500, retry_after=1), "watch")
    reflector, handler = following()
    handler.calls.clear()
    remove(api, "a")
    put_pod(api, "b", size=2)
    put_pod(api, "d", size=4)
    api.compact()
    clock.step_until(lambda: reflector.relists == 2)
    assert handler.records == truth(api)
    assert sorted(handler.calls, key=str) == sorted([("uid-a", 1, None), ("uid-b", 1, 2), ("uid-d", None, 4)], key=str)
    assert handler.synced == 2


def test_bookmarks_keep_the_version_fresh_and_the_reflector_not_stale(api: ApiServer, clock, following):
    put_pod(api, "a", size=1)
    reflector, _ = following()
    assert reflector.staleness_seconds() == 0
    last = api.write_object(paths.nodes(), {"metadata": {"name": "n"}})
    clock.advance(59)
    assert (reflector.events, reflector.staleness_seconds()) == (0, 59)
    clock.step()
    clock.until_waiting()
    assert (reflector.events, reflector.staleness_seconds()) == (1, 0)
    assert reflector._version == last["metadata"]["resourceVersion"]
    assert reflector.handler_errors == 0


def test_a_watch_that_sends_nothing_is_replaced_after_100_seconds(api: ApiServer, clock, following):
    """The API server sends a bookmark each minute, unless the kind has had no event."""
    api.fault(Fault(then="silence"), "watch")
    reflector, handler = following()
    put_pod(api, "a", size=1)
    clock.advance(99)
    clock.until_waiting()
    assert (reflector.errors, reflector.staleness_seconds(), reflector.disconnected_seconds()) == (0, 99, 0)
    clock.advance(1)
    clock.step_until(lambda: reflector.relists == 2 and api.watches() == 1)
    assert clock.now() == 1100, "it paused before it listed again"
    assert handler.records == truth(api)
    assert reflector.disconnected_seconds() == 0


@pytest.mark.parametrize("api_answers", [True, False])
def test_a_kind_without_events_is_an_error_only_if_the_list_fails(
    api: ApiServer, clock, following, api_answers, capsys
):
    reflector, _ = following()
    clock.advance(99)
    clock.until_waiting()
    if not api_answers:
        api.fault(Fault(status=500), "list")
    clock.advance(1)
    clock.step_until(lambda: reflector.relists == 2 and api.watches() == 1)
    assert reflector.errors == (0 if api_answers else 1)
    assert ("[warning" in capsys.readouterr().out) is not api_answers


@pytest.mark.parametrize("known", [0, 2], ids=["an empty store", "known objects"])
def test_a_silent_watch_that_missed_events_is_an_error(api: ApiServer, clock, following, known, capsys):
    """The API server accepts the watch and sends nothing although objects change; the next list shows the changes."""
    for number in range(known):
        put_pod(api, f"known{number}", size=1)
    api.fault(Fault(then="silence"), "watch")
    reflector, handler = following()
    for number in range(4):  # over two pages
        put_pod(api, f"new{number}", size=1)
    if known:
        put_pod(api, "known0", size=2)
        remove(api, "known1")
    clock.advance(99)
    clock.until_waiting()
    assert reflector.errors == 0
    clock.advance(1)
    clock.step_until(lambda: reflector.relists == 2 and api.watches() == 1)
    assert handler.records == truth(api)
    assert reflector.errors == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "objects had changed" in line]
    assert "[warning" in line
    assert f"objects={4 + known}" in line
    assert "silent_seconds=100" in line


def test_short_silent_watches_that_missed_events_are_an_error(api: ApiServer, clock, following):
    api.fault(Fault(then="silence"), "watch", times=math.inf)
    reflector, _ = following(pace=WatchPace(watch_min=40, watch_max=40))
    put_pod(api, "a", size=1)
    clock.step_until(lambda: reflector.relists == 2 and api.watches() == 1)
    assert reflector.errors == 1


def test_a_silent_watch_that_missed_events_ends_the_pauses_of_other_reflectors(api: ApiServer, client, clock):
    """The missed events are an outage, whose end is announced."""
    retries = []
    client.recovery.subscribe(SimpleNamespace(retry=lambda: retries.append(clock.now())))
    api.fault(Fault(then="silence"), "watch")
    reflector = Reflector(client, PODS, project, Recorder(), clock=clock)
    reflector.start()
    try:
        clock.until_waiting()
        put_pod(api, "a", size=1)
        clock.step_until(lambda: reflector.relists == 2 and api.watches() == 1)
        assert retries == [1100]
    finally:
        reflector.stop()


def test_a_watch_that_goes_silent_after_an_event_is_an_error(api: ApiServer, clock, following):
    api.fault(Fault(events=1, then="silence"), "watch")
    reflector, _ = following()
    put_pod(api, "a", size=1)
    clock.until_waiting()
    clock.step_until(lambda: reflector.errors == 1 and api.watches() == 1)
    assert (round(clock.now()), reflector.relists) == (1100, 1)


def test_disconnected_seconds_since_the_end_of_the_watch(api: ApiServer, clock, following):
    put_pod(api, "a", size=1)
    reflector, handler = following(pace=WatchPace(backoff_initial=8, backoff_cap=8))
    assert reflector.disconnected_seconds() == 0
    clock.advance(50)
    clock.until_waiting()
    assert reflector.disconnected_seconds() == 0, "no event came, and the watch is open"
    api.down = True
    clock.until_waiting()
    clock.advance(3)
    assert reflector.disconnected_seconds() == 3
    api.down = False
    put_pod(api, "b", size=2)
    clock.step_until(lambda: handler.records == truth(api))
    assert reflector.disconnected_seconds() == 0


def test_disconnected_seconds_are_infinite_before_the_first_watch(client, clock):
    reflector = Reflector(client, PODS, project, Recorder(), clock=clock)
    assert reflector.disconnected_seconds() == math.inf


def test_silent_watch_counts_as_disconnected_since_its_last_line(api: ApiServer, clock, following):
    api.fault(Fault(events=1, then="silence"), "watch")
    reflector, _ = following()
    clock.advance(10)
    put_pod(api, "a", size=1)
    clock.until_waiting()
    api.fault(Fault(refused=True), "watch", times=math.inf)
    clock.step_until(lambda: reflector.errors == 2)
    assert reflector.disconnected_seconds() == pytest.approx(clock.now() - 1010)
    assert reflector.disconnected_seconds() >= 100


def test_silent_watches_are_followed_by_lists_without_an_outage(api: ApiServer, clock, following):
    """kube-apiserver sends no bookmarks of a kind that has had no event since it started, such as GPUQuotas in a
    cluster without any: an extender that took this for an outage gave its Lease away every two minutes.
    """
    silence = api.fault(Fault(then="silence"), "watch", times=math.inf)
    reflector, handler = following()
    put_pod(api, "a", size=1)
    for silent in range(1, 4):
        clock.step_until(lambda silent=silent: reflector.relists == 1 + silent and api.watches() == 1)
        clock.until_waiting()
        assert handler.records == truth(api)
        put_pod(api, "a", size=1 + silent)
        assert reflector.disconnected_seconds() == 0
        clock.advance(40)
        clock.until_waiting()
        assert reflector.disconnected_seconds() == 0
    silence.end()
    clock.step_until(lambda: reflector.relists == 5 and handler.records == truth(api))


def test_silent_watch_without_a_list_counts_from_its_end(api: ApiServer, clock, following):
    api.fault(Fault(then="silence"), "watch")
    reflector, _ = following()
    api.fault(Fault(refused=True), "list", times=math.inf)
    clock.step_until(lambda: reflector.errors > 2)
    assert reflector.disconnected_seconds() == pytest.approx(clock.now() - 1100)


@pytest.mark.parametrize("handler_fails", [False, True], ids=["", "short watches"])
def test_after_etcd_was_restored_the_api_server_is_listed_again(api: ApiServer, clock, following, handler_fails):
    """It accepts a watch from a version that it does not have yet, and sends nothing (kubernetes#107457, see the
    contract of the fakes). A handler that fails makes all watches short, and each ends by itself.
    """
    put_pod(api, "before", size=1)
    reflector, handler = following()
    if handler_fails:
        handler.fail_on.add("uid-broken")
        put_pod(api, "broken", size=1)
        clock.step_until(lambda: reflector.handler_errors > 0)
    # The restored server is at an earlier revision: for this reflector each watch is from the future.
    reflector._version = str(int(reflector._version) + 1000)
    api.down = True
    clock.until_waiting()
    remove(api, "before")
    put_pod(api, "after", size=2)
    api.down = False
    began = clock.now()
    lists = reflector.relists
    clock.step_until(lambda: reflector.relists > lists or clock.now() - began > 1000)
    assert clock.now() - began <= 250
    handler.fail_on.clear()
    clock.step_until(lambda: handler.records == truth(api) or clock.now() - began > 1200)
    assert handler.records == truth(api)
    clock.step_until(lambda: reflector.disconnected_seconds() == 0)


def test_watch_after_a_silent_one_is_trusted_at_once(api: ApiServer, clock, following):
    """The connection was lost; a healthy API server may send nothing for a minute."""
    api.fault(Fault(events=1, then="silence"), "watch")
    reflector, _ = following()
    put_pod(api, "a", size=1)
    clock.step_until(lambda: reflector.errors == 1 and api.watches() == 1)
    clock.until_waiting()
    assert (reflector.events, reflector.disconnected_seconds()) == (1, 0)


def test_recovery_of_one_reflector_ends_the_pauses_of_all(api: ApiServer, client, clock):
    """Otherwise a node that was cordoned after an outage takes pods until the watch of nodes ends its pause."""
    slow, quick = (
        Reflector(
            client, path, lambda raw: (json.loads(raw)["metadata"]["name"], 1), Recorder(),
            pace=WatchPace(backoff_initial=seconds, backoff_cap=seconds), clock=clock,
        )
        for path, seconds in ((paths.nodes(), 1000), (PODS, 10))
    )  # fmt: skip
    reflectors = slow, quick
    try:
        for reflector in reflectors:
            reflector.start()
        clock.until_waiting(2)
        api.down = True
        clock.until_waiting(2)
        assert all(reflector.errors for reflector in reflectors)
        api.down = False
        api.write_object(paths.nodes(), {"metadata": {"name": "n"}})
        clock.step_until(lambda: slow.store.get("n"), threads=2)
        assert clock.now() <= 1010
        assert all(reflector.disconnected_seconds() == 0 for reflector in reflectors)
    finally:
        for reflector in reflectors:
            reflector.stop()


def test_refused_kind_is_not_retried_more_often_by_recovery(api: ApiServer, client, clock):
    api.fault(Fault(status=403), "list", paths.nodes(), times=math.inf)
    pace = WatchPace(backoff_initial=100, backoff_cap=100)
    refused = Reflector(client, paths.nodes(), project, Recorder(), pace=pace, clock=clock)
    well = Reflector(client, PODS, project, Recorder(), pace=WatchPace(watch_min=1, watch_max=2), clock=clock)
    try:
        for reflector in (refused, well):
            reflector.start()
        clock.step_until(lambda: clock.now() >= 1250, threads=2)
        assert len(api.sent("watch")) > 100
        assert refused.errors <= 250 / 50 + 1
    finally:
        for reflector in (refused, well):
            reflector.stop()


def test_failing_handler_and_unreadable_object_do_not_stop_it(api: ApiServer, clock, following, capsys):
    handler = Recorder()
    handler.fail_on = {"uid-a"}
    put_pod(api, "a", size=1)
    put_pod(api, "b", size=1)
    reflector, handler = following(handler)
    put_pod(api, "b", size=-1)  # stays unchanged
    put_pod(api, "c", size=3)
    clock.until_waiting()
    assert handler.records == {"uid-b": 1, "uid-c": 3}
    assert reflector.handler_errors == 2
    assert "handler broke" in capsys.readouterr().out


def test_failed_change_is_delivered_again_without_a_list(api, clock, following):
    for name in "abc":
        put_pod(api, name, size=1)
    reflector, handler = following()
    handler.fail_on = {"uid-a", "uid-b", "uid-d"}
    put_pod(api, "a", size=2)  # the object never changes again
    remove(api, "b")
    put_pod(api, "d", size=4)
    put_pod(api, "a", size=3)
    put_pod(api, "c", size=5)
    clock.until_waiting()
    assert reflector.handler_errors >= 4
    assert handler.records == {"uid-a": 1, "uid-b": 1, "uid-c": 5}
    handler.fail_on = set()
    clock.step_until(lambda: handler.records == truth(api))
    # from the value that the handler last accepted
    assert [call for call in handler.calls if call[0] == "uid-a"][-1] == ("uid-a", 1, 3)
    assert reflector.relists == 1


def test_unreadable_listed_object_keeps_its_record(api, clock, following):
    """The object exists, so it must not be deleted: the card of a deleted pod would be freed."""
    put_pod(api, "a", size=1)
    put_pod(api, "b", size=1)
    reflector, handler = following()
    api.hold(PODS)
    put_pod(api, "a", size=2)
    put_pod(api, "b", size=-1)
    assert reflector.relist().wait(60)
    assert reflector.handler_errors == 1
    assert handler.records == {"uid-a": 2, "uid-b": 1}


def test_relist_is_complete_after_the_handler_accepted_all(api, clock, following):
    put_pod(api, "a", size=1)
    reflector, handler = following()
    handler.fail_on = {"uid-b"}
    api.hold(PODS)
    put_pod(api, "b", size=2)
    done = reflector.relist()
    clock.until_waiting()
    assert "uid-b" in handler.failed
    assert not done.is_set()
    handler.fail_on = set()
    clock.step_until(done.is_set)
    assert handler.records == truth(api)
    assert reflector.relists == 2, "without another list"


def test_undelivered_object_is_new_after_a_failed_deletion(api, clock, following):
    reflector, handler = following()
    handler.fail_on = {"uid-a"}
    for size in (1, 2):
        put_pod(api, "a", size=size)
        remove(api, "a")
        clock.until_waiting()
    put_pod(api, "a", size=3)
    handler.fail_on = set()
    clock.step_until(lambda: handler.calls)
    assert handler.calls == [("uid-a", None, 3)]
    assert reflector.relists == 1


def test_deletion_of_an_undelivered_object_is_delivered(api, clock, following):
    _, handler = following()
    handler.fail_on = {"uid-a"}
    put_pod(api, "a", size=1)
    remove(api, "a")
    clock.until_waiting()
    handler.fail_on = set()  # the handler may have processed half of the change
    clock.step_until(lambda: handler.calls)
    assert handler.calls == [("uid-a", 1, None)]


def test_handler_that_always_fails_slows_nothing_down(api: ApiServer, clock, following):
    handler = Recorder()
    handler.fail_on = {"uid-bad"}
    reflector, _ = following(handler, pace=WatchPace(backoff_initial=1.0, backoff_cap=60))
    for number in range(50):
        put_pod(api, "bad", size=number + 1)
        put_pod(api, "good", size=number + 1)
        clock.until_waiting()
        assert handler.records == {"uid-good": number + 1}
        clock.advance(0.05)
    assert reflector.relists == 1
    assert len(api.sent("watch")) < 10


def test_watch_that_ends_at_once_does_not_spin(api: ApiServer, clock, following):
    api.fault(Fault(then="end"), "watch", times=math.inf)
    following(pace=WatchPace(backoff_initial=0.1, backoff_cap=0.1))
    clock.step_until(lambda: clock.now() >= 1000.6)
    assert len(api.sent("watch")) < 15


def test_stop_ends_a_silent_watch_at_once(api: ApiServer, clock, following):
    api.fault(Fault(then="silence"), "watch")
    reflector, _ = following()
    assert api.watches() == 1
    reflector.stop()
    assert not reflector._thread.is_alive()
    assert api.watches() == 0
    assert clock.now() == 1000


@pytest.mark.parametrize("seed", range(20))
def test_random_history_with_faults_ends_in_the_true_state(api: ApiServer, clock, following, seed):
    chance = random.Random(seed)
    reflector, handler = following()
    for _ in range(300):
        name = f"p{chance.randrange(12)}"
        draw = chance.random()
        if draw < 0.5:
            put_pod(api, name, size=chance.randrange(4))
        elif draw < 0.7:
            remove(api, name)
        elif draw < 0.75:
            remove(api, name)
            put_pod(api, name, uid=f"uid-{name}-{chance.random()}", size=1)
        elif draw < 0.78:
            api.compact()
        elif draw < 0.86:
            fault_kind = chance.choice(["cut", "silence", "gone", "garbage"])
            api.fault(Fault(events=chance.randrange(4), then=fault_kind), "watch")
        elif draw < 0.88:
            handler.fail_on = {f"uid-p{chance.randrange(12)}", f"uid-p{chance.randrange(12)}"}
        elif draw < 0.92:
            api.fault(Fault(status=chance.choice([410, 429, 500, 503])), chance.choice(["list", "watch"]))
        elif draw < 0.96:
            clock.advance(chance.choice([0.1, 1.0, 10.0, 100.0]))
        else:
            clock.until_waiting()
    handler.fail_on = set()
    put_pod(api, "last", size=7)
    clock.step_until(lambda: handler.records == truth(api) == reflector.store.snapshot())
    assert reflector.handler_errors == len(handler.failed)


@pytest.mark.parametrize(
    ("verb", "fault"),
    [("watch", Fault(status=500)), ("watch", Fault(status=410)), ("list", Fault(status=500)), ("pause", None)],
    ids=["watch", "expired", "list", "pause"],
)
def test_failing_logger_or_pause_does_not_end_the_thread(api, clock, following, *, monkeypatch, verb, fault):
    """Exceptions that are raised while handling an error, or outside of the try."""
    put_pod(api, "a", size=1)
    reflector, handler = following()
    failures = []

    def fail(*_: object, **__: object) -> None:
        failures.append(1)
        raise OSError("No space left on device")

    if fault is None:
        monkeypatch.setattr(reflector, "_pause", fail)
    else:
        monkeypatch.setattr(reflector, "_log", SimpleNamespace(info=fail, warning=fail, exception=fail, debug=fail))
        api.fault(fault, verb)
    reflector.relist()
    clock.step_until(lambda: failures)
    monkeypatch.undo()
    put_pod(api, "b", size=2)
    clock.step_until(lambda: handler.records == truth(api))


def test_stop_before_the_server_answers_anything():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = KubeClient(f"http://127.0.0.1:{server.getsockname()[1]}")
        reflector = Reflector(client, "/api/v1/pods", project, Recorder())
        reflector.start()
        accepted, _ = server.accept()
        closing = threading.Thread(target=lambda: (reflector._stopping.wait(60), accepted.close()))
        closing.start()
        reflector.stop(60)
        closing.join(60)
        assert not reflector._thread.is_alive()
        assert not reflector.synced.is_set()
        client.close()
