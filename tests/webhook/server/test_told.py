"""Messages about an object are short, whatever it contains: refusals, warnings and log lines."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors
from tests import build
from tests.examples import examples
from tests.fakes.clock import FakeClock
from tests.webhook.anypods import CLASSES, PODS
from tests.webhook.reviews import Known, body, mutate_object_twice, paths_of
from webhook.cluster.namespaces import Defaults
from webhook.cluster.offers import NodeOffer, NodeOffers
from webhook.pods.context import WebhookSettings
from webhook.server import app as shell

KIB = 1024
MAX_WARNINGS = 16


def known() -> Known:
    offers = NodeOffers()
    offers.on_change("n1", None, NodeOffer(frozenset({names.SHARE}), {"zone": "a"}))
    defaults = {"default": Defaults("1Gi", "spread")}
    return Known(namespaces=defaults, known_classes=CLASSES, offered=offers, scopes=frozenset({"card"}))


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    return shell.create_app(known(), WebhookSettings(nvidia_gpu="take")).test_client()


def post_review(client: FlaskClient, path: str, data: bytes) -> Json:
    answer = client.post(path, data=data, content_type="application/json")
    assert answer.status_code == 200
    response: Json = answer.get_json()["response"]
    return response


def check(response: Json) -> None:
    messages = [*response.get("warnings", ()), response.get("status", {}).get("message", "")]
    assert len(messages) <= MAX_WARNINGS + 1
    for text in messages:
        assert len(text.encode()) <= KIB
        assert text.isprintable()


def strings(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of the texts in an object; a path that ends in None is that of a key."""
    if isinstance(node, str):
        yield path
    elif isinstance(node, dict):
        for key, inner in node.items():
            yield (*path, key, None)
            yield from strings(inner, (*path, key))
    elif isinstance(node, list):
        for i, inner in enumerate(node):
            yield from strings(inner, (*path, i))


def replaced(node: Any, path: tuple[Any, ...], text: str) -> Any:
    """The object with another text at the path, in place of the former text or next to it."""
    if not path:
        return text
    first, *rest = path
    if rest == [None]:
        return node | {first + text: node[first]}
    changed = replaced(node[first], tuple(rest), text)
    return node | {first: changed} if isinstance(node, dict) else [*node[:first], changed, *node[first + 1 :]]


# Texts as tenants can write them, with characters that a cut may split and control characters.
TEXTS = st.builds(
    lambda text: text * 20_000, st.sampled_from(["a", "1", "é", "\U0001f600", "\n", "\x1b[2J", "k80,", "a=1,", "/gpu"])
)
OTHERS = {
    "resourceclasses": {
        "metadata": {"name": "c"},
        "spec": {"selector": {"matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}]}, "share": {}},
    },
    "gpuquotas": {"metadata": {"name": "q"}, "spec": {"hard": [{"class": "k80", "gpus": 1, "memory": "1Gi"}]}},
    "resourcequotas": {"metadata": {"name": "q"}, "spec": {"hard": {"requests.aliyun.com/gpu-mem": "1Gi"}}},
    "limitranges": {
        "metadata": {"name": "l"},
        "spec": {"limits": [{"type": "Container", "default": {names.GPU_MEM: "1Gi"}, "max": {"k80": "1"}}]},
    },
    "namespaces": {
        "metadata": {
            "name": "n",
            "labels": {names.DEFAULTS_LABEL: "enabled"},
            "annotations": {
                names.DEFAULT_GPU_MEM: "1Gi",
                names.POLICY: "x",
                names.ISOLATION: "x",
                names.FRAMEWORKS: "x",
            },
        }
    },
}


@settings(max_examples=examples(150, soak=3000))
@given(path=st.sampled_from(paths_of("pods")), pod=PODS, text=TEXTS, data=st.data())
def test_of_pods(client: FlaskClient, path: str, pod: Json, text: str, data: Any) -> None:
    annotations = {names.POLICY: "spread", names.GROUP_NAME: "g", names.GROUP_NUM: "2", names.ISOLATION: "none"}
    pod["metadata"]["annotations"] |= data.draw(st.sampled_from([{}, annotations]))
    place = data.draw(st.sampled_from(list(strings(pod))))
    check(post_review(client, path, body(replaced(pod, place, text))))


@settings(max_examples=examples(60, soak=1000))
@given(resource=st.sampled_from(sorted(OTHERS)), text=TEXTS, data=st.data())
def test_of_other_objects(client: FlaskClient, resource: str, text: str, data: Any) -> None:
    path = data.draw(st.sampled_from(paths_of(resource)))
    place = data.draw(st.sampled_from(list(strings(OTHERS[resource]))))
    check(post_review(client, path, body(replaced(OTHERS[resource], place, text), resource)))


def test_many_errors(client: FlaskClient) -> None:
    """512 gates with different names, each of which causes a warning."""
    pod = build.pod(gpu_mem="1Gi")
    pod["spec"]["schedulingGates"] = [{"name": f"example.com/{i}"} for i in range(500)]
    warnings = mutated_then_validated(client, pod)["warnings"]
    assert len(warnings) == MAX_WARNINGS
    assert warnings[0].startswith("spec.schedulingGates[example.com/0]: ")
    assert warnings[-1] == "and 485 more warnings"


def mutated_then_validated(client: FlaskClient, pod: Json) -> Json:
    return post_review(client, "/validate", body(mutate_object_twice(pod, "pods", known())))


@pytest.mark.parametrize(
    ("annotations", "begins", "ends"),
    [
        ({names.POLICY: "x" * 120_000}, "is not a placement policy", "spread-by=LABEL"),
        ({names.GROUP_NAME: "X" * 120_000, names.GROUP_NUM: "2"}, "is not a valid gang name", "63 of them"),
        ({names.ISOLATION: "x" * 120_000}, "is not a tier of isolation", "kernel"),
    ],
)
def test_a_refusal_quotes_the_beginning_and_says_how_long_the_text_is(
    client: FlaskClient, annotations: Json, begins: str, ends: str
) -> None:
    pod = build.pod(gpu_mem="1Gi")
    pod["metadata"]["annotations"] = annotations
    message = post_review(client, "/mutate", body(pod))["status"]["message"]
    assert f"(120000 characters) {begins}" in message
    assert message.endswith(ends)
    assert len(message) < 400


def test_many_refusals_do_not_flood_the_log(clock: FakeClock) -> None:
    client = shell.create_app(known(), WebhookSettings(), clock).test_client()
    wrong = build.pod(gpu_mem="-1")

    def lines(reviews: int, namespace: str) -> list[Json]:
        data = body(wrong, namespace=namespace)
        with structlog.testing.capture_logs() as logs:
            for _ in range(reviews):
                assert not post_review(client, "/mutate", data)["allowed"]
        return [dict(line) for line in logs]

    clock.advance(15)
    first, *greedy = lines(20, "greedy")
    clock.advance(45)
    notice = lines(30, "greedy")
    assert len([first, *greedy]) == 20
    assert [(line["event"], line["key"], line["seconds"]) for line in notice] == [
        ("dropping log lines: too many of this kind", "greedy", 15)
    ]
    assert len(lines(3, "other")) == 3  # another namespace, whose log lines are not affected
    assert sum(len(lines(20, f"n{i}")) for i in range(12)) == 200 - 23
    clock.advance(15 + 3600)
    count, last = lines(1, "greedy")
    assert (count["event"], count["lines"], count["seconds_ago"]) == ("dropped log lines", 30 + 63, 3600)
    assert last["event"] == "refused"
    assert json.dumps(last)


@pytest.mark.parametrize("error", [errors.Unreachable("no answer"), RuntimeError("a fault")])
def test_many_failed_reviews_do_not_flood_the_log(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    view = known()
    monkeypatch.setattr(view, "serves_podgroups", fails)
    monkeypatch.setattr(view, "defaults", fails)
    client = shell.create_app(view, WebhookSettings(), FakeClock()).test_client()
    data = body(build.pod(gpu_mem="1Gi"))
    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            assert client.post("/mutate", data=data, content_type="application/json").status_code >= 500
    assert len(logs) == 20 + 1  # one line says that lines are dropped
