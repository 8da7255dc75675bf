import math
import threading

import pytest

from cardwise.kube import paths
from cardwise.kube.events import EventRecorder, ObjectRef
from tests.fakes.apiserver import Fault

POD = ObjectRef.pod("ns", "p", "uid-1")


@pytest.fixture
def recorder(client, clock):
    event_recorder = EventRecorder(
        client, "cardwise-extender", instance="me", burst=5, refill_seconds=1000, clock=clock
    )
    yield event_recorder
    event_recorder.stop()


def sent(api):
    return [(request.verb, request.path, request.body) for request in api.sent()]


def test_event_has_the_fields_that_kubectl_shows(api, recorder):
    recorder.record(POD, "GpuMemoryExhausted", "m" * 3000, "Warning")
    recorder.stop()
    ((verb, path, event),) = sent(api)
    assert (verb, path) == ("create", paths.events("ns"))
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "ns", "uid": "uid-1"
    }  # fmt: skip
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "GpuMemoryExhausted", 1)
    assert len(event["message"]) == 1024
    assert event["source"] == {"component": "cardwise-extender", "host": "me"}
    assert event["metadata"]["name"].startswith("p.")


def test_messages_are_truncated_to_the_api_limit(api, recorder):
    recorder.record(POD, "GpuMemoryExhausted", f"field: {'é' * 3000}; remedy", "Warning")
    recorder.stop()
    ((_, _, event),) = sent(api)
    assert 1000 < len(event["message"].encode()) <= 1024
    assert event["message"].endswith("; remedy")


def test_repeats_are_counted_in_one_object(api, recorder):
    for _ in range(3):
        recorder.record(POD, "Waiting", "for its gang")
    recorder.record(POD, "Waiting", "for something else")
    recorder.stop()
    calls = sent(api)
    assert [verb for verb, _, _ in calls] == ["create", "patch", "patch", "create"]
    assert [body["count"] for _, _, body in calls] == [1, 2, 3, 1]
    assert sorted(event["count"] for event in api.all(paths.events())) == [1, 3]


def test_repeat_of_an_event_that_expired_is_a_new_one(api, recorder):
    api.before_request(lambda request: api.remove(request.path), "patch")
    recorder.record(POD, "Waiting", "for its gang")
    recorder.record(POD, "Waiting", "for its gang")
    recorder.stop()
    assert [verb for verb, _, _ in sent(api)] == ["create", "patch", "create"]
    assert (recorder.written, recorder.failed) == (2, 0)


def test_noisy_object_is_rate_limited_and_others_are_not(api, recorder):
    for number in range(20):
        recorder.record(POD, "Noise", f"number {number}")
    recorder.record(ObjectRef.node("n1"), "Quiet", "one line")
    recorder.stop()
    assert (recorder.written, recorder.dropped) == (6, 15)
    assert [path for _, path, _ in sent(api)].count(paths.events("default")) == 1


def test_failures_are_counted_and_never_raised(api, recorder, capsys):
    api.fault(Fault(status=403))
    api.fault(Fault(lost=True))
    for number in range(3):
        recorder.record(POD, "Some", f"number {number}")
    recorder.stop()
    assert (recorder.failed, recorder.written) == (2, 1)
    assert "failed to write an Event" in capsys.readouterr().out


def events_of(api, namespace):
    return [request for request in api.sent("create") if request.path == paths.events(namespace)]


def test_namespace_with_many_events_loses_only_its_own(api, client, clock):
    recorder = EventRecorder(client, "x", capacity=10, clock=clock)
    writing, answered = threading.Event(), threading.Event()
    api.before_request(lambda _: (writing.set(), answered.wait(60)))
    for number in range(100):
        recorder.record(ObjectRef.pod("many", f"p{number}"), "Some", "text")
    assert writing.wait(60)
    for number in range(4):
        recorder.record(ObjectRef.pod("few", f"p{number}"), "Some", "text")
    answered.set()
    recorder.stop()
    assert len(events_of(api, "few")) == 4
    assert len(events_of(api, "many")) == 7, "the first, and what has room beside the others"
    assert recorder.written + recorder.dropped == 104


def test_many_namespaces_with_one_event_do_not_block_another(api, client, clock):
    """The namespace whose Events took the most time loses its place."""
    flood = [f"many-{number}" for number in range(10)]
    recorder = EventRecorder(client, "x", capacity=10, clock=clock)
    writing, answered = threading.Event(), threading.Event()
    for namespace in flood[:9]:
        api.before_request(lambda _: clock.advance(0.05), path=paths.events(namespace))
    api.before_request(lambda _: (writing.set(), answered.wait(60)), path=paths.events(flood[9]))
    for namespace in flood:
        recorder.record(ObjectRef.pod(namespace, "first"), "Some", "text")
    assert writing.wait(60)
    for namespace in flood:
        recorder.record(ObjectRef.pod(namespace, "second"), "Some", "text")
    recorder.record(ObjectRef.pod("fair", "p"), "Some", "text")
    answered.set()
    recorder.stop()
    assert len(events_of(api, "fair")) == 1
    assert (recorder.written, recorder.dropped) == (20, 1)


def test_slow_namespace_delays_only_its_own_events(api, client, clock):
    api.before_request(lambda _: clock.advance(3.0), path=paths.events("slow"), times=math.inf)
    hold, go_on = threading.Event(), threading.Event()
    api.before_request(lambda _: (hold.set(), go_on.wait(60)), path=paths.events("first"))
    recorder = EventRecorder(client, "x", clock=clock)
    recorder.record(ObjectRef.pod("first", "p"), "Some", "text")
    assert hold.wait(60)
    for number in range(20):
        recorder.record(ObjectRef.pod("slow", f"p{number}"), "Some", "text")
    for number in range(20):
        recorder.record(ObjectRef.pod("quick", f"p{number}"), "Some", "text")
    go_on.set()
    recorder.stop()
    order = [request.path for request in api.sent("create")]
    before = order[: len(order) - order[::-1].index(paths.events("quick"))]
    assert before.count(paths.events("slow")) <= 2


def test_full_queue_drops_and_returns_at_once(api, client, clock):
    recorder = EventRecorder(client, "x", capacity=2, clock=clock)
    writing, answered = threading.Event(), threading.Event()
    api.before_request(lambda _: (writing.set(), answered.wait(60)))
    recorder.record(POD, "Some", "the first")
    assert writing.wait(60)
    for number in range(9):
        recorder.record(POD, "Some", f"number {number}")
    assert recorder.dropped == 7
    assert not api.all(paths.events())  # no caller has waited for the API server
    answered.set()
    recorder.stop()
    assert recorder.written == 3
    recorder.record(POD, "Late", "after stop")  # dropped, not raised
