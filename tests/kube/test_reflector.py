"""The reflector against a server that misbehaves in every way we know; what counts is the state it ends in."""

import json
import random
import threading
import time
from collections.abc import Callable

import pytest

from cardwise.kube.client import KubeClient
from cardwise.kube.reflector import Pace, Reflector
from tests.kube.fakeapi import FakeApi, Fault

QUICK = Pace(watch_min=1.0, watch_max=2.0, slack=0.3, backoff_initial=0.02, backoff_cap=0.1)


class Recorder:
    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.calls: list[tuple] = []
        self.synced = 0
        self.fail_on: set[str] = set()
        self.failed: list[str] = []

    def _fail(self, key):
        if key in self.fail_on:
            self.failed.append(key)
            raise RuntimeError("handler broke")

    def on_change(self, key, old, new):
        assert self.values.get(key) == old
        assert old != new or key in self.failed
        self._fail(key)
        self.values[key] = new
        self.calls.append((key, old, new))

    def on_delete(self, key, old):
        self._fail(key)
        assert self.values.pop(key, old if key in self.failed else None) == old
        self.calls.append((key, old, None))

    def on_synced(self):
        self.synced += 1


def project(raw: bytes) -> tuple[str, int] | None:
    obj = json.loads(raw)
    size = obj["spec"].get("size", 0)
    if size < 0:
        raise ValueError("cannot be read")
    return (obj["metadata"]["uid"], size) if size else None


def truth(api: FakeApi) -> dict[str, int]:
    with api.condition:
        shown = [project(json.dumps(obj).encode()) for obj in api.objects.values()]
    return dict(each for each in shown if each is not None)


def eventually(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not come true in time"
        time.sleep(0.01)


@pytest.fixture
def following(api, client):
    started: list[Reflector] = []

    def follow(handler: Recorder | None = None, pace: Pace = QUICK, limit: int = 3) -> tuple[Reflector, Recorder]:
        handler = handler or Recorder()
        reflector = Reflector(
            client, "/api/v1/pods", project, handler, query={"fieldSelector": "x=y"}, list_limit=limit, pace=pace
        )
        reflector.start()
        started.append(reflector)
        return reflector, handler

    yield follow
    for reflector in started:
        reflector.stop()
        assert not reflector._thread.is_alive()


def test_lists_in_pages_then_follows_events(api: FakeApi, following):
    for number in range(10):
        api.put(f"p{number}", size=number)
    reflector, handler = following()
    assert reflector.synced.wait(5)
    assert handler.values == truth(api) == reflector.store.snapshot()
    assert len(handler.values) == 9  # p0 is of no interest
    api.put("p3", size=33)
    api.put("p4", size=0)  # no longer of interest: a deletion
    api.remove("p5")
    api.put("p5", uid="other", size=5)
    eventually(lambda: handler.values == truth(api) and "other" in handler.values)
    assert "uid-p4" not in handler.values
    assert reflector.relists == 1
    lists = [query for _, _, query, _ in api.requests if "watch" not in query]
    assert len(lists) == 4
    assert all("resourceVersion" not in query for query in lists)  # consistent, never from a stale cache
    watch = next(query for _, _, query, _ in api.requests if "watch" in query)
    assert watch["allowWatchBookmarks"] == "true"
    assert watch["fieldSelector"] == "x=y"


def test_a_list_that_is_asked_for_shows_what_had_been_written_and_the_watch_had_not_told(api: FakeApi, following):
    api.put("a", size=1)
    pace = Pace(watch_min=60.0, watch_max=60.0, slack=30.0, backoff_initial=0.02, backoff_cap=0.1)
    reflector, handler = following(pace=pace)
    assert reflector.synced.wait(5)
    api.faults["watch"].append(Fault(events=1, then="silence"))
    api.put("b", size=2)
    eventually(lambda: "uid-b" in handler.values)
    # The old watch ends with its list; the next is the one that falls silent after an event.
    assert reflector.relist().wait(5)
    api.put("c", size=3)
    eventually(lambda: "uid-c" in handler.values)
    api.put("d", size=4)
    assert reflector.relist().wait(5)
    assert handler.values == truth(api)
    api.put("e", size=5)
    eventually(lambda: handler.values == truth(api))


def test_a_list_that_is_asked_for_and_fails_is_tried_again_until_it_is_there(api: FakeApi, following):
    api.put("a", size=1)
    reflector, handler = following(pace=Pace(watch_min=60.0, watch_max=60.0, backoff_initial=0.02, backoff_cap=0.1))
    assert reflector.synced.wait(5)
    api.faults["list"].extend([Fault(status=500), Fault(status=429, headers={"Retry-After": "0"})])
    before = api.count("list")
    done = [reflector.relist() for _ in range(3)]
    assert all(each.wait(5) for each in done)
    assert api.count("list") - before <= 2 + 2
    assert handler.values == truth(api)
    eventually(lambda: api.count("watch") >= 2)  # and it watches on


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("list", Fault(status=500)),
        ("list", Fault(status=429, headers={"Retry-After": "0"})),
        ("watch", Fault(status=429, headers={"Retry-After": "0"})),
        ("watch", Fault(status=500)),
        ("watch", Fault(status=410)),
        ("watch", Fault(events=2, then="gone")),
        ("watch", Fault(events=2, then="cut")),
        ("watch", Fault(events=1, then="garbage")),
        ("watch", Fault(events=1, then="silence")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.status or value.then}",
)
def test_state_is_right_after_a_fault(api: FakeApi, following, kind, fault):
    api.put("a", size=1)
    api.faults[kind].append(fault)
    pace = Pace(watch_min=0.2, watch_max=0.3, slack=0.2, backoff_initial=0.02, backoff_cap=0.1)
    reflector, handler = following(pace=pace)
    assert reflector.synced.wait(5)
    for number in range(6):
        api.put(f"p{number}", size=number + 1)
    api.remove("a")
    eventually(lambda: handler.values == truth(api))
    assert not api.faults[kind]


def test_page_that_expired_under_way_is_answered_by_one_whole_list(api: FakeApi, following):
    for number in range(10):
        api.put(f"p{number}", size=number + 1)
    with api.condition:
        # The second page of the first list.
        api.faults["list"] = type(api.faults["list"])([Fault(), Fault(status=410)])
    reflector, handler = following()
    assert reflector.synced.wait(5)
    assert handler.values == truth(api)
    lists = [query for _, _, query, _ in api.requests if "watch" not in query]
    assert "limit" not in lists[-1]


def test_relist_tells_only_what_changed_meanwhile(api: FakeApi, following):
    for name in "abc":
        api.put(name, size=1)
    api.faults["watch"].append(Fault(status=500, headers={"Retry-After": "1"}))
    reflector, handler = following()
    assert reflector.synced.wait(5)
    handler.calls.clear()
    api.remove("a")
    api.put("b", size=2)
    api.put("d", size=4)
    api.compact()
    eventually(lambda: handler.values == truth(api) and reflector.relists == 2)
    assert sorted(handler.calls, key=str) == sorted([("uid-a", 1, None), ("uid-b", 1, 2), ("uid-d", None, 4)], key=str)
    assert handler.synced == 2


def test_bookmarks_keep_the_version_fresh_and_the_reflector_not_stale(api: FakeApi, following):
    api.put("a", size=1)
    reflector, _ = following()
    assert reflector.staleness_seconds() >= 0
    assert reflector.synced.wait(5)
    eventually(lambda: reflector.events >= 2)
    assert reflector.staleness_seconds() < 1.0
    api.version += 50
    eventually(lambda: reflector._version == str(api.version))
    assert reflector.handler_errors == 0


def test_silent_server_makes_it_stale(api: FakeApi, following):
    api.faults["watch"].append(Fault(then="silence"))
    reflector, _ = following()
    assert reflector.synced.wait(5)
    eventually(lambda: reflector.staleness_seconds() > 0.3)


def test_failing_handler_and_unreadable_object_do_not_stop_it(api: FakeApi, following, capsys):
    handler = Recorder()
    handler.fail_on = {"uid-a"}
    api.put("a", size=1)
    api.put("b", size=1)
    reflector, handler = following(handler)
    assert reflector.synced.wait(5)
    api.put("b", size=-1)  # stays as it was
    api.put("c", size=3)
    eventually(lambda: handler.values == {"uid-b": 1, "uid-c": 3})
    assert reflector.handler_errors >= 2
    assert "handler broke" in capsys.readouterr().out


def test_what_the_handler_failed_on_is_handed_over_again_without_another_list(api: FakeApi, following):
    for name in "abc":
        api.put(name, size=1)
    reflector, handler = following()
    assert reflector.synced.wait(5)
    handler.fail_on = {"uid-a", "uid-b", "uid-d"}
    api.put("a", size=2)  # nothing else ever happens to it
    api.remove("b")
    api.put("d", size=4)
    api.put("a", size=3)
    api.put("c", size=5)
    eventually(lambda: reflector.handler_errors >= 4 and handler.values.get("uid-c") == 5)
    assert handler.values == {"uid-a": 1, "uid-b": 1, "uid-c": 5}
    handler.fail_on = set()
    eventually(lambda: handler.values == truth(api))
    assert [call for call in handler.calls if call[0] == "uid-a"][-1] == ("uid-a", 1, 3)  # from what it last took
    assert reflector.relists == 1


def test_handler_that_always_fails_slows_nothing_down(api: FakeApi, following):
    handler = Recorder()
    handler.fail_on = {"uid-bad"}
    reflector, _ = following(handler, pace=Pace(backoff_initial=1.0, backoff_cap=60))
    assert reflector.synced.wait(5)
    for number in range(50):
        api.put("bad", size=number + 1)
        api.put("good", size=number + 1)
        time.sleep(0.01)
    # Each failure is logged with its traceback: seconds on a busy machine. Slowed down it would be a minute.
    eventually(lambda: handler.values == {"uid-good": 50}, 40)
    assert reflector.relists == 1
    assert api.count("watch") < 10


def test_watch_that_ends_at_once_does_not_spin(api: FakeApi, client: KubeClient, following):
    api.faults["watch"].extend(Fault(status=200, body=b"") for _ in range(1000))
    reflector, _ = following(pace=Pace(backoff_initial=0.1, backoff_cap=0.1))
    assert reflector.synced.wait(5)
    time.sleep(0.6)
    assert api.count("watch") < 15


def test_stop_ends_a_silent_watch_at_once(api: FakeApi, client: KubeClient):
    api.bookmark_every = 60
    reflector = Reflector(client, "/api/v1/pods", project, Recorder())
    reflector.start()
    assert reflector.synced.wait(5)
    eventually(lambda: api.count("watch") == 1)
    time.sleep(0.05)
    started = time.monotonic()
    reflector.stop()
    assert not reflector._thread.is_alive()
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("seed", range(3))
def test_random_history_under_random_faults_ends_in_the_truth(api: FakeApi, following, seed):
    chance = random.Random(seed)
    pace = Pace(watch_min=0.1, watch_max=0.3, slack=0.1, backoff_initial=0.01, backoff_cap=0.05)
    reflector, handler = following(pace=pace)
    for _ in range(300):
        name = f"p{chance.randrange(12)}"
        what = chance.random()
        if what < 0.5:
            api.put(name, size=chance.randrange(4))
        elif what < 0.7:
            api.remove(name)
        elif what < 0.75:
            api.remove(name)
            api.put(name, uid=f"uid-{name}-{chance.random()}", size=1)
        elif what < 0.78:
            api.compact()
        elif what < 0.86:
            how = chance.choice(["cut", "silence", "gone", "garbage"])
            api.faults["watch"].append(Fault(events=chance.randrange(4), then=how))
        elif what < 0.88:
            handler.fail_on = {f"uid-p{chance.randrange(12)}", f"uid-p{chance.randrange(12)}"}
        elif what < 0.92:
            kind = chance.choice(["list", "watch"])
            api.faults[kind].append(Fault(status=chance.choice([410, 429, 500, 503])))
        else:
            time.sleep(0.002)
    handler.fail_on = set()
    api.put("last", size=7)
    eventually(lambda: handler.values == truth(api) == reflector.store.snapshot(), 20)
    assert reflector.handler_errors == len(handler.failed)


def test_stop_before_the_server_answers_anything():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        client = KubeClient(f"http://127.0.0.1:{server.getsockname()[1]}")
        reflector = Reflector(client, "/api/v1/pods", project, Recorder())
        reflector.start()
        accepted, _ = server.accept()
        threading.Timer(0.1, accepted.close).start()
        reflector.stop()
        assert not reflector._thread.is_alive()
        assert not reflector.synced.is_set()
        client.close()
