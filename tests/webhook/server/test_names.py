"""Names in a review must be valid in Kubernetes; otherwise the review is refused before any request is sent."""

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import names
from cardwise.kube import paths
from tests import build
from tests.fakes.apiserver import ApiServer
from tests.fakes.clock import FakeClock
from tests.webhook.reviews import paths_of, review
from webhook.cluster.view import ClusterView
from webhook.pods.context import WebhookSettings
from webhook.server import app as shell

ATTACKS = (
    "?watch=true&x=",
    "/pods?limit=0&x=",
    "a/../b",
    "a%2Fb",
    "..",
    "a#",
    "a b",
    "a\r\nb",
    "A",
    "\u0430",
    "a_b",
    "-a",
)
GANG = {names.GROUP_NAME: "g", names.GROUP_NUM: "2"}
POD = build.pod(gpu_mem="1Gi", annotations=GANG)
BINDING = build.binding()
PLACES = ("request.namespace", "request.name", "metadata.namespace", "metadata.name", "metadata.generateName")


class World:
    def __init__(self) -> None:
        clock = FakeClock()
        self.api = ApiServer(clock)
        view = ClusterView(self.api.client(clock=clock), clock)
        self.app: FlaskClient = shell.create_app(view, WebhookSettings()).test_client()

    def post(self, path: str, document: Any) -> Any:
        return self.app.post(path, data=json.dumps(document), content_type="application/json")


@pytest.fixture
def world() -> World:
    return World()


def review_with_text(
    place: str, text: str, manifest: Any = BINDING, resource: str = "pods", sub: str = "binding"
) -> Any:
    """A review of a Binding with the text in this field."""
    named_review = review(json.loads(json.dumps(manifest)), resource, sub=sub, name="p")
    part, field = place.split(".")
    at = named_review["request"] if part == "request" else named_review["request"]["object"]["metadata"]
    at[field] = text
    return named_review


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", ATTACKS)
def test_binding_with_an_invalid_name_causes_no_request(world: World, place: str, text: str) -> None:
    answer = world.post(shell.BINDINGS_PATH, review_with_text(place, text)).get_json()["response"]
    assert not answer["allowed"]
    assert answer["status"]["message"].startswith(f"{place}: {text!r} is not a name in Kubernetes; write at most")
    assert world.api.requests == []


@pytest.mark.parametrize("text", ATTACKS)
@pytest.mark.parametrize("path", paths_of("pods"))
def test_pod_with_an_invalid_namespace_causes_no_request(world: World, path: str, text: str) -> None:
    answer = world.post(path, review_with_text("request.namespace", text, POD, sub="")).get_json()["response"]
    assert answer["allowed"] == (path == "/advise")
    assert world.api.requests == []


def test_a_legacy_binding_names_its_pod_in_the_object(world: World) -> None:
    binding_review = review_with_text("metadata.name", "/pods?limit=0&x=", resource="bindings", sub="")
    binding_review["request"]["name"] = ""
    assert not world.post(shell.BINDINGS_PATH, binding_review).get_json()["response"]["allowed"]
    binding_review["request"]["object"]["metadata"]["name"] = ""
    world.post(shell.BINDINGS_PATH, binding_review)
    assert world.api.requests == []  # in particular, no list request


@pytest.mark.parametrize("resource", ["pods", "bindings", "deployments", "resourcequotas", "gpuquotas"])
def test_missing_namespace_causes_no_request(world: World, resource: str) -> None:
    for path in paths_of(resource):
        answer = world.post(path, review_with_text("request.namespace", "", POD, resource, "")).get_json()["response"]
        assert answer["allowed"] == (path == "/advise"), answer
    assert world.api.requests == []


def test_a_message_quotes_the_beginning_and_the_end_only(world: World) -> None:
    for place in PLACES:
        answer = world.post(shell.BINDINGS_PATH, review_with_text(place, "x/" * 100_000)).get_json()["response"]
        assert len(answer["status"]["message"]) < 200


@pytest.mark.parametrize("field", ["resource", "subResource", "operation"])
def test_words_of_the_api_server_have_a_maximum_length(world: World, field: str) -> None:
    named_review = review_with_text("request.name", "p")
    if field == "resource":
        named_review["request"]["resource"]["resource"] = "x" * 300
    else:
        named_review["request"][field] = "x" * 300
    answer = world.post("/mutate", named_review)
    assert answer.status_code == 400
    assert len(answer.text) < 300


LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


@settings(max_examples=50)
@given(namespace=LABELS, name=st.lists(LABELS, min_size=1, max_size=4).map(".".join))
def test_valid_names_are_requested(namespace: str, name: str) -> None:
    world = World()
    binding_review = review(
        BINDING | {"metadata": {"name": name, "namespace": namespace}}, "pods", sub="binding", name=name
    )
    binding_review["request"]["namespace"] = namespace
    assert world.post(shell.BINDINGS_PATH, binding_review).get_json()["response"]["allowed"]
    assert [call.path for call in world.api.sent("get")] == [paths.pods(namespace, name)]


@settings(max_examples=50)
@given(place=st.sampled_from(PLACES), text=st.text(max_size=300))
def test_any_text_causes_at_most_a_get_of_one_pod(place: str, text: str) -> None:
    world = World()
    assert world.post(shell.BINDINGS_PATH, review_with_text(place, text)).status_code == 200
    for request in world.api.requests:
        assert (request.verb, request.query) == ("get", {})
        assert request.path.startswith("/api/v1/namespaces/")
        assert request.path.count("/") == 6


@pytest.mark.parametrize(
    ("resource", "name"),
    [("pods", "web-0.a"), ("namespaces", "team-a"), ("resourceclasses", "nvidia.a100"), ("widgets", "w.x")],
)
@pytest.mark.parametrize("generated", ["web-", "web", "w.x-", ""])
def test_names_that_the_api_server_accepts_are_accepted(world: World, resource: str, name: str, generated: str) -> None:
    metadata = {"name": name} if not generated else {"generateName": generated}
    namespace = "" if resource in ("namespaces", "resourceclasses") else "team-a"
    object_review = review({"metadata": metadata, "spec": {"containers": []}}, resource, namespace=namespace)
    for path in paths_of(resource):
        answer = world.post(path, object_review).get_json()["response"]
        assert "is not a name in Kubernetes" not in str(answer)
