"""What tests may order from their API server beyond what the real one does: faults, moments, watches that lag."""

import json
import threading

import pytest

from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.fakes.apiobjects import Refused
from tests.fakes.apiserver import Fault

PODS = paths.pods()


@pytest.fixture(params=["memory", "http"])
def client(api, request):
    kube_client = api.client() if request.param == "memory" else KubeClient(api.serve())
    yield kube_client
    kube_client.close()


def node(name: str = "n") -> dict:
    return {"metadata": {"name": name}}


def event_names(watch) -> list[str]:
    return [json.loads(line)["object"]["metadata"]["name"] for line in watch]


def watching(client, api) -> tuple:
    """A watch of all pods and the lines that it brings, read by another thread."""
    watch = client.watch(PODS, resource_version=client.get(PODS)["metadata"]["resourceVersion"], timeout_seconds=100)
    lines: list[dict] = []
    ended: list[object] = []

    def read() -> None:
        try:
            for line in watch:
                lines.append(json.loads(line))
                with api.changed:
                    api.changed.notify_all()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=read)
    thread.start()
    return watch, lines, ended, thread


def pod(name: str) -> dict:
    return {"metadata": {"name": name}}


def test_a_fault_takes_as_many_requests_as_it_is_for(api, client):
    api.fault(Fault(status=429, retry_after=7), "get", "*/nodes/*", times=2)
    api.fault(Fault(), "create")
    fault = api.fault(Fault(status=500), "create")
    api.write_object(paths.nodes(), node())
    for _ in range(2):
        with pytest.raises(errors.TooManyRequests) as caught:
            client.get(paths.nodes("n"))
        assert caught.value.retry_after == 7
    assert client.get(paths.nodes("n"))
    client.create(paths.nodes(), node("m"))
    assert fault.remaining == 1
    with pytest.raises(errors.ServerError):
        client.create(paths.nodes(), node("o"))
    assert api.get(paths.nodes("o")) is None
    assert [request.body["metadata"]["name"] for request in api.sent("create", paths.nodes())] == ["m", "o"]


def test_a_lost_answer_was_carried_out_and_a_refused_connection_was_not(api, client):
    api.fault(Fault(lost=True), "create")
    api.fault(Fault(refused=True), "create")
    for name in "ab":
        with pytest.raises(errors.Unreachable):
            client.create(paths.nodes(), node(name))
    assert [listed_node["metadata"]["name"] for listed_node in api.all(paths.nodes())] == ["a"]


def test_who_waits_less_than_it_takes_hears_nothing(api, clock):
    client = api.client()
    api.fault(Fault(seconds=3), "create", times=2)
    api.fault(Fault(seconds=3, lost=True), "create")
    client.create(paths.nodes(), node("a"), timeout=4)
    assert clock.now() == 1003
    for name in "bc":
        with pytest.raises(errors.Unreachable, match="timed out"):
            client.create(paths.nodes(), node(name), timeout=2)
    assert clock.now() == 1007
    assert [listed_node["metadata"]["name"] for listed_node in api.all(paths.nodes())] == ["a", "c"]


def test_somebody_else_acts_just_before_and_just_after(api, client):
    created_node = api.write_object(paths.nodes(), node())
    api.before_request(lambda _: api.edit(paths.nodes("n"), metadata={"labels": {"a": "b"}}), "patch")
    with pytest.raises(errors.Conflict):
        client.patch(paths.nodes("n"), {"metadata": {"resourceVersion": created_node["metadata"]["resourceVersion"]}})
    api.after_request(lambda request: api.remove(request.path), "patch")
    assert client.patch(paths.nodes("n"), {"metadata": {"labels": {"c": "d"}}})["metadata"]["labels"]["c"] == "d"
    assert api.get(paths.nodes("n")) is None


def test_a_policy_refuses_what_would_be_carried_out(api, client):
    def policy(request):
        if request.verb == "create" and request.body["metadata"]["name"] == "b":
            raise Refused(422, "no b")

    api.admission.append(policy)
    client.create(paths.nodes(), node("a"))
    with pytest.raises(errors.Invalid, match="no b"):
        client.create(paths.nodes(), node("b"))
    assert [listed_node["metadata"]["name"] for listed_node in api.all(paths.nodes())] == ["a"]


def test_watches_that_lag_tell_later_and_lists_do_not_lag(api, client, clock):
    watch, lines, _, thread = watching(client, api)
    api.write_object(PODS, pod("a"))
    api.until(lambda: len(lines) == 1)
    api.hold(PODS)
    api.write_object(PODS, pod("b"))
    api.write_object(paths.nodes(), node())
    assert len(client.get(PODS)["items"]) == 2
    clock.until_waiting()
    clock.advance(60)
    api.until(lambda: len(lines) == 2)
    api.let_through(PODS)
    api.until(lambda: len(lines) == 3)
    assert [line["type"] for line in lines] == ["ADDED", "BOOKMARK", "ADDED"], "nothing between hold and let_through"
    watch.close()
    thread.join(60)


def test_a_test_follows_by_hand_what_watches_tell(api):
    api.write_object(PODS, pod("before"))
    fresh = api.follow(PODS)
    api.write_object(PODS, pod("a"))
    api.write_object(paths.nodes(), node())
    assert [(event["type"], event["object"]["metadata"]["name"]) for event in fresh()] == [("ADDED", "a")]
    api.hold(PODS)
    api.remove(paths.pods("default", "a"))
    assert fresh() == []
    api.let_through(PODS)
    assert [event["type"] for event in fresh()] == ["DELETED"]
    assert fresh() == []


@pytest.mark.parametrize("then", ["end", "cut", "gone", "garbage"])
def test_watches_that_end_badly(api, client, then):
    api.fault(Fault(events=1, then=then), "watch")
    _, lines, ended, thread = watching(client, api)
    api.write_object(PODS, pod("a"))
    thread.join(60)
    assert lines[0]["object"]["metadata"]["name"] == "a"
    if then == "gone":
        assert lines[1]["object"]["code"] == 410
    assert isinstance(ended[0], {"cut": errors.Unreachable, "garbage": ValueError}.get(then, type(None)))
    api.until(lambda: api.watches() == 0)


def test_a_silent_watch_ends_by_the_readers_own_patience(api, clock):
    client = api.client()
    api.fault(Fault(then="silence"), "watch")
    watch = client.watch(PODS, resource_version="100", timeout_seconds=10, read_timeout=300)
    api.write_object(PODS, pod("a"))
    with pytest.raises(errors.Unreachable, match="timed out"):
        list(watch)
    assert clock.now() == 1300


def test_watches_that_run_are_ended(api, client):
    _, _, ended, thread = watching(client, api)
    api.until(lambda: api.watches(PODS) == 1)
    api.end_watches("end", paths.nodes())
    assert api.watches(PODS) == 1
    api.end_watches("end", PODS)
    thread.join(60)
    assert ended == [None]
