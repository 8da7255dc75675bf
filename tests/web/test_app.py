"""The page without a browser: what it shows to whom, what it escapes, and what it sends along."""

import json
import re

import pytest
from flask.testing import FlaskClient

from cardwise.core.api import names
from cardwise.kube import paths
from cardwise.kube.clusterstate import OTHER_NAMESPACES
from cardwise.web import app, pages
from cardwise.web.snapshot import MIN_SECONDS, ClusterReader
from tests.build import event, pod_group
from tests.cli.clusters import K80, Cluster, allocated, card, lists, placed, run, sharing_within, waiting
from tests.fakes.clock import FakeClock

PAGES = (
    "/",
    "/nodes",
    "/node?node=n1",
    "/waiting",
    "/gangs",
    "/quotas",
    "/try?gpu-mem=2Gi",
    "/pod?namespace=team-a&name=wants",
)
BIG = {names.GPU_MEM: "20000", names.SHARE: "1"}


@pytest.fixture
def api() -> Cluster:
    api = lists()
    api.add("pods", waiting("team-a", "wants", BIG))
    return api


def browse(api: Cluster) -> FlaskClient:
    """A browser that has the page open: what follows is read anew at once."""
    return app.create_app(ClusterReader(api.kube, names.NAMESPACE, FakeClock())).test_client()


@pytest.mark.parametrize("path", PAGES)
def test_every_page_may_load_only_what_this_server_has_and_is_kept_nowhere(api, path):
    response = browse(api).get(path)
    assert response.status_code == 200
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "unsafe" not in response.headers["Content-Security-Policy"]
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert not re.findall(r'(?:src|href|action)="(?:https?:|//)', response.text)
    assert "<script>" not in response.text
    assert " style=" not in response.text


def test_each_gpu_is_a_bar_with_its_shares(api):
    text = browse(api).get("/").text
    assert text.count('class="bar') == 4
    assert "team-a/notebook: 2000 MiB" in text
    assert 'aria-label="GPU 0: 3000 of 11441 MiB granted"' in text
    assert "unhealthy" in text


def test_a_gpu_that_pods_of_one_namespace_share_says_whose_it_is(api):
    api.add("pods", sharing_within(placed("team-a", "apart", "n2", 1, 100)))
    browser = browse(api)
    assert browser.get("/").text.count(">only team-a<") == 1
    assert ">only pods of team-a<" in browser.get("/node?node=n2").text
    assert ">GPU 1: only team-a<" in browser.get("/nodes").text


@pytest.mark.parametrize(("query", "bars"), [("name=n2", 2), ("class=big", 1), ("namespace=team-b", 2), ("label=x", 0)])
def test_gpus_are_filtered_by_node_class_namespace_and_label(api, query, bars):
    assert browse(api).get(f"/?{query}").text.count('class="bar') == bars


def test_a_waiting_pod_has_the_explanation_of_the_command_line(monkeypatch, api):
    explanation = run(monkeypatch, api, "explain", "wants", "-n", "team-a").stdout
    shown = browse(api).get("/explanation?namespace=team-a&name=wants").text
    lines = [line.strip() for line in explanation.splitlines()]
    assert [line for line in lines if line.replace("'", "&#39;").replace(">", "&gt;") not in shown] == []


def test_a_pod_has_its_life_from_its_events(api):
    api.change("pods", "notebook", "team-a", metadata={"creationTimestamp": "2026-11-28T05:00:00Z"})
    at = "2026-11-28T05:00:09Z"
    api.add("events", event("Pulling", "pulling the image", about="Pod/notebook", namespace="team-a", at=at))
    text = browse(api).get("/pod?namespace=team-a&name=notebook").text
    assert text.index("Created") < text.index("pulling the image")


def test_a_gang_shows_its_missing_members(api):
    api.add("podgroups", pod_group("train", minimum=3, namespace="team-a"))
    member = waiting("team-a", "train-0", BIG)
    member["metadata"]["labels"] = {names.GANG: "train"}
    api.add("pods", member)
    text = browse(api).get("/gangs").text
    assert text.count("does not exist yet") == 2
    assert "0 bound, 1 waiting, 2 missing; needs 3 pods." in text


def test_try_answers_with_the_node_and_gpu_of_the_engine(api):
    text = browse(api).get("/try?gpu-mem=8Gi").text
    assert "It would go to" in text
    assert "It would wait" in browse(api).get("/try?gpu-mem=99999").text
    assert "8192 MiB" in text.replace("\N{NARROW NO-BREAK SPACE}", "")


@pytest.mark.parametrize("amount", ["x", "-1", "1,class=big", "<b>", "0"])
def test_try_says_what_is_wrong_with_an_amount(api, amount):
    response = browse(api).get("/try", query_string={"gpu-mem": amount})
    assert response.status_code == 200
    assert 'role="alert"' in response.text
    assert "<b>" not in response.text.replace('<b class="', "")


def test_who_may_not_read_all_pods_sees_others_as_a_sum_without_names(api):
    api.change("extendedresources", names.extended_resource_name("GPU-n1-0"), **allocated(card("n1", 0), 3000, 2))
    api.forbid("pods of all")
    api.kube.namespace = "team-a"
    text = browse(api).get("/").text
    assert "team-b" not in text
    assert f"{OTHER_NAMESPACES}: 1\N{NARROW NO-BREAK SPACE}000 MiB" in text
    assert "team-a/notebook" in text


def test_who_may_not_read_gpus_sees_the_types_and_their_own_pods(api):
    api.forbid("extendedresources", "pods of all", "gpuquotas", "nodes")
    api.kube.namespace = "team-a"
    client = browse(api)
    text = client.get("/").text
    assert "GPUs are not shown: the right to list extendedresources" in text
    assert "notebook" in text
    assert "serve" not in text
    for path in PAGES[1:]:
        assert client.get(path).status_code in (200, 404), path


def test_who_may_read_nothing_gets_the_role_that_grants_it(api):
    api.forbid("extendedresources", "resourceclasses", "pods", "configmaps", "nodes")
    response = browse(api).get("/")
    assert response.status_code == 403
    assert "kubectl create" in response.text


MARKUP = "<script>alert(1)</script>\u202e\x1b[31m"


def test_text_from_the_cluster_is_escaped_everywhere():
    api = lists()
    api.add("extendedresources", card("n9", 0, MARKUP) | {"status": {"health": "Unhealthy", "reason": MARKUP}})
    pod = waiting("team-a", "wants", BIG)
    pod["metadata"] |= {"labels": {names.GANG: "g", "x": MARKUP}, "annotations": {"y": MARKUP}}
    pod["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": MARKUP}]}
    api.add("pods", pod)
    api.add("podgroups", pod_group("g", namespace="team-a") | {"status": {"phase": MARKUP, "reason": MARKUP}})
    api.add("events", event(MARKUP, MARKUP, about="Pod/wants", namespace="team-a"))
    client = browse(api)
    for path in (*PAGES, "/node?node=n9", "/explanation?namespace=team-a&name=wants", f"/?namespace={MARKUP}"):
        text = client.get(path).text
        assert "<script>alert" not in text, path
        assert "\u202e" not in text, path
        assert "\x1b" not in text, path


def test_pages_change_nothing_and_take_only_reads(api):
    client = browse(api)
    for path in PAGES:
        client.get(path)
        assert client.post(path).status_code == 405
    assert {request.verb for request in api.requests} <= {"get", "list"}


class Stream:
    """The messages of `/events`; the clock runs while the server sleeps."""

    def __init__(self, client: FlaskClient, query: str) -> None:
        self.response = client.get(f"/events?{query}", buffered=False)
        self._chunks = self.response.iter_encoded()

    def next(self) -> dict[str, object]:
        """The next message; {} for a sign of life."""
        chunk = next(self._chunks).decode()
        return json.loads(chunk.removeprefix("data: ")) if chunk.startswith("data: ") else {}


def test_a_change_is_sent_as_the_part_that_has_changed(api):
    client = browse(api)
    client.get("/")
    stream = Stream(client, "page=gpus&generation=1")
    assert stream.next() == {}
    assert stream.next() == {}, "no news"
    api.add("pods", placed("team-b", "new", "n1", 0, 500, total=K80))
    parts = stream.next()["parts"]
    assert set(parts) == {"summary", "node-n1"}
    assert "team-b/new" in parts["node-n1"]
    api.add("extendedresources", card("n3", 0))
    assert stream.next() == {"reload": True}
    stream.response.close()


def test_a_page_older_than_its_stream_is_fetched_again(api):
    stream = Stream(browse(api), "page=gpus&generation=77")
    assert stream.next() == {}
    assert stream.next() == {"reload": True}
    stream.response.close()


def test_an_api_server_that_is_away_is_told_and_so_is_its_return(api):
    client = browse(api)
    client.get("/")
    stream = Stream(client, "page=gpus&generation=1")
    stream.next()
    api.forbid("extendedresources", "resourceclasses", "pods", "configmaps", "nodes")
    assert str(stream.next()["problem"]).startswith("Outdated: ")
    api.forbid()
    assert stream.next()["problem"] == ""
    stream.response.close()


def test_streams_are_bounded_and_one_that_ends_makes_place(api):
    client = browse(api)
    streams = [client.get("/events?page=gpus", buffered=False) for _ in range(app.MAX_STREAMS)]
    assert client.get("/events?page=gpus").status_code == 503
    streams[0].close()
    again = client.get("/events?page=gpus", buffered=False)
    assert again.status_code == 200
    for response in (*streams[1:], again):
        response.close()


def test_open_pages_share_one_read_of_the_cluster(api):
    clock = FakeClock()
    reader = ClusterReader(api.kube, names.NAMESPACE, clock)
    first = reader.latest()
    assert reader.latest(MIN_SECONDS) is first
    clock.sleep(MIN_SECONDS + 1)
    assert reader.latest(MIN_SECONDS).generation == first.generation + 1


def test_shares_of_a_gpu_lie_side_by_side_within_its_bar(api):
    reader = ClusterReader(api.kube, names.NAMESPACE, FakeClock())
    shares = pages.list_nodes(reader.latest(), pages.Filters(node="n1"))[0].gpus[0].shares
    assert [share.pod for share in shares] == ["notebook", "serve"]
    assert shares[1].start == shares[0].width
    assert sum(share.width for share in shares) <= pages.BAR_WIDTH


def test_a_node_whose_metrics_cannot_be_read_does_not_hide_the_page(api):
    labels = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}
    metadata = {"namespace": names.NAMESPACE, "name": "mps-n1", "labels": labels}
    api.add("pods", {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}})
    metrics = b'cardwise_container_gpu_memory_used_bytes{namespace="team-a"} NaN\n'
    api.answers[f"{paths.pods(names.NAMESPACE)}/mps-n1:9400/proxy/metrics"] = metrics
    assert "team-a/notebook: 2000 MiB" in browse(api).get("/").text
