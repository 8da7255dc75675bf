"""The HTTP server: Go's JSON field names, and never a 500, whatever the input."""

import json
import re
import socket

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from werkzeug.test import create_environ

from cardwise.core.api import names
from cardwise.kube import paths
from cardwise.runtime.http import httpcalls
from extender.__main__ import main
from extender.api import verbs
from extender.api.app import create_app
from extender.api.metrics import GaugeReaders
from extender.leadership.leadership import Denial, Leadership
from extender.placing.nodesearch import SMALL_SEARCH_NODES
from tests.build import P100, asking
from tests.examples import examples
from tests.extender.api.serverparts import POD, parts
from tests.extender.states import with_cards
from tests.fakes.apiserver import ApiServer, Fault
from tests.fakes.clock import FakeClock


@pytest.fixture
def client():
    return create_app(parts()).test_client()


def post(client, verb, body):
    data = body if isinstance(body, bytes) else json.dumps(body)
    answer = client.post(f"/gpushare-scheduler/{verb}", data=data)
    assert answer.status_code == 200, answer.data
    assert b"Traceback" not in answer.data
    return answer.get_json()


@pytest.mark.parametrize(("pod", "names"), [("Pod", "NodeNames"), ("pod", "nodenames"), ("POD", "nodeNames")])
def test_filter_reads_any_case_and_answers_in_gos_spelling(client, pod, names):
    answer = post(client, "filter", {pod: POD, "nodes": None, names: ["n1", "other"]})
    assert answer == {
        "Nodes": None, "NodeNames": ["n1"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""
    }  # fmt: skip


def test_filter_answers_nodes_as_they_came_when_the_scheduler_sends_nodes(client):
    nodes = [{"metadata": {"name": name}, "status": {"odd": [1]}} for name in ("n1", "other")]
    answer = post(client, "filter", {"Pod": POD, "Nodes": {"kind": "NodeList", "items": nodes}, "NodeNames": None})
    assert answer["Nodes"] == {"items": nodes[:1]}
    assert answer["NodeNames"] == ["n1"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "EOF"),
        (b"{}", "arg or pod is nil"),
        ({"Pod": POD}, "cannot get node names"),
        (b"[1]", "cannot read the call"),
        ({"Pod": {"spec": {"containers": [5]}}, "NodeNames": ["n1"]}, "$.spec.containers[0]"),
        ({"Pod": {"spec": {"containers": [{"resources": "a"}]}}, "NodeNames": ["n1"]}, "resources"),
        ({"Pod": {"metadata": []}, "NodeNames": ["n1"]}, "$.metadata"),
        (
            {"Pod": {"metadata": {"namespace": "?a=b&"}}, "NodeNames": ["n1"]},
            "Pod.metadata.namespace is not a valid Kubernetes",
        ),
        (
            {"Pod": {"metadata": {"name": "a/b"}}, "NodeNames": ["n1"]},
            "Pod.metadata.name is not a valid Kubernetes name",
        ),
        ({"Pod": {"metadata": {"name": 7}}, "NodeNames": ["n1"]}, "$.metadata.name"),
        ({"Pod": {"spec": {"schedulingGroup": []}}, "NodeNames": ["n1"]}, "$.spec.schedulingGroup"),
    ],
)
def test_malformed_filter_calls_get_gpushares_errors(client, body, error):
    assert error in post(client, "filter", body)["Error"]


def test_prioritize_and_bind_in_gos_spelling(client):
    assert post(client, "prioritize", {"Pod": POD, "NodeNames": ["n1"]}) == [{"Host": "n1", "Score": 10}]
    call = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1"}
    assert post(client, "bind", call) == {"Error": ""}
    assert "missing" in post(client, "bind", {"PodName": "p"})["Error"]
    for field, text in (
        ("PodName", "../../secrets"),
        ("PodNamespace", "a?x="),
        ("PodNamespace", "a.b"),
        ("Node", "n#"),
    ):
        assert post(client, "bind", call | {field: text})["Error"] == f"{field} is not a valid Kubernetes name"


def test_before_the_lists_are_complete_nothing_is_decided():
    client = create_app(parts(["the list of pods is not complete yet"])).test_client()
    assert "not ready" in post(client, "filter", {"Pod": POD, "NodeNames": ["n1"]})["Error"]
    assert "not ready" in post(client, "bind", {})["Error"]
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").status_code == 200


def test_while_the_picture_is_outdated_nothing_is_decided_and_the_extender_stays_ready():
    outdated = ["the watch of nodes is interrupted; the latest changes are unknown"]
    client = create_app(
        parts(outdated=lambda: outdated, disconnected=lambda: {"nodes": 7.2, "pods": 0.0})
    ).test_client()
    bind = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1"}
    for verb, call in (("filter", {"Pod": POD, "NodeNames": ["n1"]}), ("bind", bind)):
        assert post(client, verb, call)["Error"] == f"not ready: {outdated[0]}"
    assert post(client, "prioritize", {"Pod": POD, "NodeNames": ["n1"]}) == []
    assert client.post("/gpushare-scheduler/preempt", data=b"{}").status_code == 503
    assert client.get("/readyz").status_code == 200
    assert client.get("/readyz?verbose").text.splitlines()[-2:] == ["nodes: no watch for 7 s", "pods: current"]
    outdated.clear()
    assert post(client, "filter", {"Pod": POD, "NodeNames": ["n1"]})["NodeNames"] == ["n1"]


def test_no_thread_waits_while_the_lock_is_held_for_long(clock):
    app_parts = parts(clock=clock)
    client = create_app(app_parts).test_client()
    filter_, bind = {"Pod": POD, "NodeNames": ["n1"]}, {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p"}
    with app_parts.state.view():
        clock.advance(0.6)
        assert "not ready" in post(client, "filter", filter_)["Error"]
        assert "not ready" in post(client, "bind", bind | {"Node": "n1"})["Error"]
        assert post(client, "prioritize", filter_) == []
        assert client.post("/gpushare-scheduler/preempt", data=b"{}").status_code == 503
        assert client.get("/gpushare-scheduler/inspect").status_code == 503
    clock.advance(10)
    assert post(client, "filter", filter_)["NodeNames"] == ["n1"]


class Denying(Leadership):
    def __init__(self, denial):
        self._denial = denial

    def denial(self):
        return self._denial

    def summary(self):
        return self._denial.text


ELSEWHERE = Denial("not the leader: b_1 holds the lease cardwise-system/cardwise-extender", served_elsewhere=True)


def test_a_standby_answers_nothing_and_closes_the_connection_but_is_ready():
    client = create_app(parts(["the list of pods is not complete yet"], Denying(ELSEWHERE))).test_client()
    closed = []
    for verb in ("filter", "bind", "prioritize"):
        answer = client.post(
            f"/gpushare-scheduler/{verb}",
            data=json.dumps({"Pod": POD, "NodeNames": ["n1"]}),
            environ_overrides={httpcalls.CLOSE_KEY: lambda verb=verb: closed.append(verb)},
        )
        assert answer.status_code == 200
        assert answer.get_json() == [] if verb == "prioritize" else answer.get_json()["Error"] == ELSEWHERE.text
    assert closed == ["filter", "bind", "prioritize"]
    client = create_app(parts((), Denying(ELSEWHERE))).test_client()
    assert client.get("/readyz").data == b"ok\n"
    assert client.get("/readyz?verbose").data.decode() == f"ok\n{ELSEWHERE.text}\n"


def test_a_leader_that_still_catches_up_keeps_the_connection():
    denial = Denial("not ready: still listing what a former leader may have bound", served_elsewhere=False)
    client = create_app(parts((), Denying(denial))).test_client()
    answer = client.post(
        "/gpushare-scheduler/filter", data=b"{}", environ_overrides={httpcalls.CLOSE_KEY: lambda: pytest.fail("closed")}
    )
    assert answer.get_json()["Error"] == denial.text
    assert post(client, "prioritize", {"Pod": POD, "NodeNames": ["n1"]}) == []


@pytest.mark.parametrize("leads", [True, False])
def test_leadership_is_a_metric(leads):
    registry = CollectorRegistry()
    nothing = {
        "reservations": dict,
        "gangs": dict,
        "refused_pods": dict,
        "disagreements": dict,
        "staleness_seconds": dict,
        "disconnected_seconds": dict,
    }
    registry.register(GaugeReaders(**nothing, leads=lambda: leads))
    assert registry.get_sample_value("cardwise_extender_leader") == float(leads)


def test_inspect_and_version(client):
    assert client.get("/gpushare-scheduler/inspect").get_json()["nodes"][0]["totalGPU"] == 2 * P100
    assert client.get("/gpushare-scheduler/inspect/n1").get_json()["nodes"][0]["name"] == "n1"
    assert client.get("/gpushare-scheduler/inspect/nope").get_json()["nodes"] == []
    assert client.get("/version").data.count(b".") == 2


@pytest.mark.parametrize(("verb", "status"), [("filter", 200), ("bind", 200), ("prioritize", 400)])
def test_a_call_too_large_to_be_one_is_not_read(client, verb, status):
    path = f"/gpushare-scheduler/{verb}"
    answer = client.post(path, data=b"{}", environ_overrides={"CONTENT_LENGTH": str(1 << 40)})
    assert answer.status_code == status
    assert "larger than" in (answer.get_json()["Error"] if status == 200 else answer.text)


def test_an_invalid_prioritize_call_gets_a_one_line_error(client):
    for body in (b"", b"{", b"[]", b'{"Pod": 5}', b'{"Pod": "a\\n\\nb"}', b'{"NodeNames": ["n1"]}'):
        answer = client.post("/gpushare-scheduler/prioritize", data=body)
        assert (answer.status_code, answer.mimetype) == (400, "text/plain"), body
        assert re.fullmatch(r"\S.*\n", answer.text), body


def test_the_deadline_of_bind_counts_from_when_the_call_could_be_read():
    app_parts = parts()
    call = {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1"}
    late = {httpcalls.ARRIVED_KEY: FakeClock().now() - 60}
    answer = (
        create_app(app_parts)
        .test_client()
        .post("/gpushare-scheduler/bind", data=json.dumps(call), environ_overrides=late)
    )
    assert "the deadline passed" in answer.get_json()["Error"]


def filter_of_several(**environ):
    """The answer to a filter call for a pod with several card requests, on more nodes than are searched at once."""
    nodes = [f"n{i:02}" for i in range(SMALL_SEARCH_NODES + 1)]
    app_parts = parts()
    with_cards(app_parts.state, **dict.fromkeys(nodes, 2))
    several = asking("several", whole_gpu=1, share=1)
    several["spec"]["containers"] *= 2
    client = create_app(app_parts).test_client()
    call = json.dumps({"Pod": several, "NodeNames": nodes})
    return client.post("/gpushare-scheduler/filter", data=call, environ_overrides=environ).get_json()


def test_a_search_for_a_pod_of_several_requests_ends_a_while_after_the_call_arrived():
    now = FakeClock().now()
    assert filter_of_several(**{httpcalls.ARRIVED_KEY: now})["Error"] == ""
    assert filter_of_several(**{httpcalls.ARRIVED_KEY: now - 60})["Error"] == verbs.SEARCH_UNFINISHED_TEXT


def test_a_search_for_a_pod_of_several_requests_ends_with_the_connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert filter_of_several(**{httpcalls.SOCKET_KEY: ours})["Error"] == ""
        theirs.close()
        assert filter_of_several(**{httpcalls.SOCKET_KEY: ours})["Error"] == verbs.SEARCH_UNFINISHED_TEXT


def test_victims_are_searched_for_on_threads_for_long_calls():
    wsgi, statuses = create_app(parts()).wsgi_app, []
    body = json.dumps({"Pod": asking("p", whole_gpu=1, namespace="team"), "NodeNameToMetaVictims": {"n1": {}}}).encode()
    environ = create_environ("/gpushare-scheduler/preempt", method="POST", data=body)
    with pytest.raises(httpcalls.TakesLong) as moved:
        wsgi(environ | {httpcalls.LONG_OWNER_KEY: None}, lambda status, _: statuses.append(status))
    assert moved.value.owner == "team"
    environ["wsgi.input"].seek(0)
    wsgi(environ | {httpcalls.LONG_OWNER_KEY: "team"}, lambda status, _: statuses.append(status))
    assert statuses == ["200 OK"]


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
def test_a_pod_of_several_requests_is_searched_for_on_threads_for_long_calls(verb):
    several, plain = asking("several", whole_gpu=1, share=1, namespace="team"), asking("plain", whole_gpu=1, share=1)
    several["spec"]["containers"] *= 2
    nodes = [f"n{i:02}" for i in range(SMALL_SEARCH_NODES + 1)]
    app_parts = parts()
    with_cards(app_parts.state, **dict.fromkeys(nodes, 2))
    wsgi = create_app(app_parts).wsgi_app
    statuses = []

    def call(pod, nodes, owner):
        body = json.dumps({"Pod": pod, "NodeNames": nodes}).encode()
        environ = create_environ(f"/gpushare-scheduler/{verb}", method="POST", data=body)
        wsgi(environ | {httpcalls.LONG_OWNER_KEY: owner}, lambda status, _: statuses.append(status))

    def count_calls():
        return app_parts.metrics._by_verb[verb]._sum.get()

    with pytest.raises(httpcalls.TakesLong) as moved:
        call(several, nodes, None)
    assert moved.value.owner == "team"
    assert count_calls() == 0, "it is measured where it is answered"
    call(several, nodes, "team")
    assert count_calls() > 0
    call(several, nodes[:1], None)
    call(plain, nodes, None)
    assert statuses == ["200 OK"] * 3


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["Pod", "pod", "NodeNames", "Nodes", "items", "metadata", "spec", "containers", "resources",
                         "limits", "aliyun.com/gpu-mem", "annotations", "uid", "PodUID", "Node", "PodName"]),
        inner, max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip
_bodies = st.one_of(
    st.binary(max_size=60),
    _json.map(lambda document: json.dumps(document).encode()),
    st.builds(lambda pod, names: json.dumps({"Pod": pod, "NodeNames": names}).encode(), _json, _json),
    st.builds(
        lambda spec, meta: json.dumps({"Pod": {"spec": spec, "metadata": meta}, "NodeNames": ["n1"]}).encode(),
        _json, _json,
    ),
    st.builds(
        lambda limits: json.dumps(
            {"Pod": {"spec": {"containers": [{"resources": {"limits": limits}}]}}, "NodeNames": ["n1"]}
        ).encode(),
        st.dictionaries(st.sampled_from(["aliyun.com/gpu-mem", "cardwise.dev/share", "cardwise.dev/gpu"]), _json),
    ),
)  # fmt: skip

_FUZZED = create_app(parts()).test_client()


@settings(max_examples=examples(120, soak=3000), deadline=None)
@given(st.sampled_from(["filter", "prioritize", "bind"]), _bodies)
def test_no_body_makes_a_traceback_or_a_status_that_its_verb_does_not_have(verb, body):
    answer = _FUZZED.post(f"/gpushare-scheduler/{verb}", data=body)
    if answer.status_code == 200:
        assert answer.is_json
    else:
        assert (verb, answer.status_code, answer.text.count("\n")) == ("prioritize", 400, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plain-http"], "127.0.0.1:12345"),
        (["--plain-http", "--bind", "10.0.0.1:80"], "127.0.0.1:80"),
        (["--plain-http", "--bind", "127.0.0.1:80", "--bind-port-bind", ":81"], "127.0.0.1:81"),
        (["--plain-http", "--bind", "127.0.0.1:80", "--tls-dir", "/no"], "excludes"),
        (["--tls-dir", "/no", "--bind", ":80", "--metrics-bind", ":80"], "--bind and --metrics-bind name the same"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_to_write(arguments, message):
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 2
    assert message in run.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tls-dir", "/no", "--kubeconfig", "/etc/passwd"], "no usable credentials in /etc/passwd"),
        (["--tls-dir", "/dev/null"], "check --tls-dir"),
    ],
)
def test_a_failed_start_prints_one_line(arguments, message, tmp_path):
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(KUBECONFIG)
    arguments = arguments if "--kubeconfig" in arguments else [*arguments, "--kubeconfig", str(kubeconfig)]
    run = CliRunner().invoke(main, [*arguments, "--bind", "127.0.0.1:80"])
    assert (run.exit_code, type(run.exception)) == (1, SystemExit)
    assert message in run.output


@pytest.mark.parametrize(
    ("status", "message"), [(404, 'namespaces "cardwise-system" not found'), (403, "leases is forbidden")]
)
def test_without_a_namespace_for_the_lease_the_start_names_the_option(tmp_path, status, message):
    api = ApiServer()
    api.fault(Fault(status=status, message=message), "create")
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(KUBECONFIG.replace("http://127.0.0.1:9", api.serve()))
    run = CliRunner().invoke(main, ["--plain-http", "--bind", "127.0.0.1:80", "--kubeconfig", str(kubeconfig)])
    api.close()
    assert (run.exit_code, type(run.exception)) == (1, SystemExit)
    for text in (message, "--no-lease", "--namespace"):
        assert text in run.output
    (lease_request,) = api.requests
    assert (lease_request.path, lease_request.query) == (paths.leases(names.NAMESPACE), {"dryRun": "All"})
    assert lease_request.body["metadata"]["name"] == names.LEASE


KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: x
clusters: [{name: x, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: x, user: {}}]
contexts: [{name: x, context: {cluster: x, user: x}}]
"""
