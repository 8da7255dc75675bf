import json
import threading
import time

import pytest

from cardwise.kube.events import EventRecorder, ObjectRef
from tests.kube.fakeapi import Fault

POD = ObjectRef.pod("ns", "p", "uid-1")


@pytest.fixture
def recorder(client):
    made = EventRecorder(client, "cardwise-extender", instance="me", burst=5, refill_seconds=1000)
    yield made
    made.stop()


def sent(api):
    with api.condition:
        return [(method, path, json.loads(body)) for method, path, _, body in api.requests]


def test_event_is_written_with_what_kubectl_shows(api, recorder):
    recorder.record(POD, "GpuMemoryExhausted", "m" * 3000, "Warning")
    recorder.stop()
    ((method, path, event),) = sent(api)
    assert (method, path) == ("POST", "/api/v1/namespaces/ns/events")
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "ns", "uid": "uid-1"
    }  # fmt: skip
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "GpuMemoryExhausted", 1)
    assert len(event["message"]) == 1024
    assert event["source"] == {"component": "cardwise-extender", "host": "me"}
    assert event["metadata"]["name"].startswith("p.")


def test_repeats_are_counted_in_one_object(api, recorder):
    for _ in range(3):
        recorder.record(POD, "Waiting", "for its gang")
    recorder.record(POD, "Waiting", "for something else")
    recorder.stop()
    calls = sent(api)
    assert [method for method, _, _ in calls] == ["POST", "PATCH", "PATCH", "POST"]
    assert [body["count"] for _, _, body in calls] == [1, 2, 3, 1]


def test_repeat_of_an_event_that_expired_is_a_new_one(api, recorder):
    api.faults["PATCH"].append(Fault(status=404))
    recorder.record(POD, "Waiting", "for its gang")
    recorder.record(POD, "Waiting", "for its gang")
    recorder.stop()
    assert [method for method, _, _ in sent(api)] == ["POST", "PATCH", "POST"]
    assert (recorder.written, recorder.failed) == (2, 0)


def test_noisy_object_is_cut_off_and_others_are_not(api, recorder):
    for number in range(20):
        recorder.record(POD, "Noise", f"number {number}")
    recorder.record(ObjectRef.node("n1"), "Quiet", "one line")
    recorder.stop()
    assert (recorder.written, recorder.dropped) == (6, 15)
    assert sent(api)[-1][1] == "/api/v1/namespaces/default/events"


def test_failures_are_counted_and_never_raised(api, recorder, capsys):
    api.faults["POST"].extend([Fault(status=403), Fault(then="cut")])
    for number in range(3):
        recorder.record(POD, "Some", f"number {number}")
    recorder.stop()
    assert (recorder.failed, recorder.written) == (2, 1)
    assert "event not written" in capsys.readouterr().out


def test_full_queue_drops_and_returns_at_once(client):
    recorder = EventRecorder(client, "x", capacity=2)
    stuck = threading.Event()
    recorder._write = lambda note: stuck.wait(5)
    started = time.monotonic()
    for number in range(10):
        recorder.record(POD, "Some", f"number {number}")
    assert time.monotonic() - started < 3.0
    assert recorder.dropped >= 7
    stuck.set()
    recorder.stop()
    recorder.record(POD, "Late", "after stop")  # dropped, not raised
