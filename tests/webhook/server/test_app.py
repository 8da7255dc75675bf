"""The HTTP layer: correct responses, and never a 500 because of a client's input."""

import base64
import io
import json
from typing import Any

import jsonpatch
import msgspec
import pytest
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.core.api import names
from cardwise.core.api.classes import ResourceClass
from cardwise.kube import errors
from tests import build
from tests.build import resource_class
from tests.examples import examples
from tests.webhook.reviews import Known, body, paths_of, resource_classes, review
from tests.working import work
from webhook.cluster.namespaces import Defaults
from webhook.pods.context import WebhookSettings
from webhook.server import app as shell
from webhook.server import review as codec
from webhook.server import sizes

PATHS = sorted(shell.DECIDE_BY_PATH)
OTHERS = ("nodes", "pytorchjobs")  # kinds that the webhook does not know
KNOWN = sorted({*shell._KNOWN_RESOURCES, *OTHERS, "pods/exec"})
PLACES = [(path, resource) for resource in KNOWN for path in paths_of(resource)]


def body_of(manifest: Any, resource: str, **about: Any) -> bytes:
    """A review of a resource with its subresource."""
    resource, _, sub = resource.partition("/")
    return body(manifest, resource, sub=sub, **about)


@pytest.fixture(scope="module")
def client() -> FlaskClient:
    classes = resource_classes(resource_class("nvidia.tesla.k80"), resource_class("half", share={"memoryMiB": 64}))
    known = Known(namespaces={"default": Defaults("1Gi", "spread")}, known_classes=classes)
    return shell.create_app(known, WebhookSettings(nvidia_gpu="take")).test_client()


def post(client: FlaskClient, path: str, data: bytes, content_type: str = "application/json") -> Any:
    return client.post(path, data=data, content_type=content_type)


def test_a_patch_is_base64_of_a_json_patch(client: FlaskClient) -> None:
    answer = post(client, "/mutate", body(build.pod(gpu_mem="8Gi"))).get_json()
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = answer["response"]
    assert response["uid"] == review({})["request"]["uid"]
    assert response["patchType"] == "JSONPatch"
    assert any(names.SHARE.replace("/", "~1") in op["path"] for op in json.loads(base64.b64decode(response["patch"])))


def test_path_decides_the_unit_of_bare_numbers(client: FlaskClient) -> None:
    for behind, mib in (("", "2"), ("/gib", "2048")):
        for path in ("/mutate", "/mutate/defaults"):
            answer = post(client, path + behind, body(build.pod(gpu_mem="2"))).get_json()
            patch = jsonpatch.JsonPatch(json.loads(base64.b64decode(answer["response"]["patch"])))
            (container,) = patch.apply(build.pod(gpu_mem="2"))["spec"]["containers"]
            assert container["resources"]["limits"][names.GPU_MEM] == mib
    assert post(client, "/advise/gib", b"{").status_code == 400


@pytest.mark.parametrize(
    ("callers_known", "address", "caller"),
    [(True, "10.1.2.3", ""), (False, "10.1.2.3", "10.1.2.3"), (False, "2001:db8::1", "2001:db8::/64")],
)
def test_pods_of_bindings_are_looked_up_for_the_network_that_sent_the_review(
    callers_known: bool, address: str, caller: str
) -> None:
    """With a client certificate the caller is an API server, which has no limit."""
    known = Known()
    client = shell.create_app(known, WebhookSettings(callers_known=callers_known)).test_client()
    sent = {"data": body({"metadata": {"name": "p"}}, "bindings"), "content_type": "application/json"}
    for header in ({}, {"X-Forwarded-For": "10.9.9.9"}):
        answer = client.post(shell.BINDINGS_PATH, **sent, headers=header, environ_base={"REMOTE_ADDR": address})
        assert answer.get_json()["response"]["allowed"]
    assert known.callers == [caller] * 2


def test_refusal_has_field_and_remedy(client: FlaskClient) -> None:
    answer = post(client, "/mutate", body(build.pod(gpu_mem="-1")))
    assert answer.status_code == 200
    response = answer.get_json()["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, 422)
    assert response["status"]["message"].startswith(f"spec.containers[0].resources.limits[{names.GPU_MEM}]: ")


def test_unchanged_object_has_no_patch(client: FlaskClient) -> None:
    response = post(client, "/mutate", body(build.pod())).get_json()["response"]
    assert response == {"uid": response["uid"], "allowed": True}


@pytest.mark.parametrize(
    ("data", "content_type", "says"),
    [
        pytest.param(b"", "application/json", "no AdmissionReview", id="empty"),
        pytest.param(b"{", "application/json", "no AdmissionReview", id="truncated"),
        pytest.param(b"\xff\xfe", "application/json", "no AdmissionReview", id="no UTF-8"),
        pytest.param(b"[" * 100_000, "application/json", "no AdmissionReview", id="deep"),
        pytest.param(b'{"kind":"Pod"}', "application/json", "apiVersion", id="something else"),
        pytest.param(
            body({}).replace(b"/v1", b"/v1beta1"), "application/json", "expected admission.k8s.io/v1", id="version"
        ),
        pytest.param(body({}), "text/plain", "Content-Type must be application/json", id="content type"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_malformed_requests_get_400_and_a_reason(
    client: FlaskClient, path: str, data: bytes, content_type: str, says: str
) -> None:
    answer = post(client, path, data, content_type)
    assert answer.status_code == 400
    assert says in answer.text
    assert "Traceback" not in answer.text
    assert len(answer.text) < 1000


@pytest.mark.parametrize(
    ("data", "namespace"),
    [
        pytest.param(body(build.pod(), namespace="team"), "team", id="a pod"),
        pytest.param(b"[", "", id="no review"),
        pytest.param(b"\xff", "", id="no UTF-8"),
        pytest.param(b'{"request":{"namespace":7}}', "", id="misshapen"),
        pytest.param(b'{"request":{"name":"\\"namespace\\":\\"y\\"","namespace":"x"}}', "x", id="a name that quotes"),
        pytest.param(b'{"request":{"object":{"metadata":{"namespace":"x"}},"namespace":"x"}}', "x", id="any order"),
        pytest.param(b'{"request":{"object":[' + b"[]," * 2_000_000 + b'1],"namespace":"x"}}', "", id="far behind"),
    ],
)
def test_waiting_reviews_are_answered_fairly_by_namespace(data: bytes, namespace: str) -> None:
    assert shell.namespace_of({"wsgi.input": io.BytesIO(data)}) == namespace


def test_namespace_of_a_large_review_is_detected(client: FlaskClient) -> None:
    """Go writes the fields in this order, and only the first 4 KiB are searched for the namespace."""
    kind = {"group": "g" * 253, "version": "v" * 63, "kind": "k" * 63}
    resource = {"group": "g" * 253, "version": "v" * 63, "resource": "r" * 63}
    request = {"uid": "u" * 36, "kind": kind, "resource": resource, "subResource": "s" * 63, "requestKind": kind}
    request |= {"requestResource": resource, "requestSubResource": "s" * 63, "name": "n" * 253, "namespace": "x" * 63}
    data = json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}).encode()
    assert shell.namespace_of({"wsgi.input": io.BytesIO(data)}) == "x" * 63


def test_content_type_parameters_are_not_parsed(client: FlaskClient, monkeypatch) -> None:
    """werkzeug takes 95 ms to parse 60 KB of parameters."""
    monkeypatch.setattr("werkzeug.http.parse_options_header", lambda _: pytest.fail("the parameters were read"))
    monkeypatch.setattr("werkzeug.sansio.request.parse_options_header", lambda _: pytest.fail("they were read"))
    assert post(client, "/mutate", body(build.pod()), "Application/JSON ; " + 'a="";' * 100).status_code == 200


def test_other_methods_paths_and_sizes(client: FlaskClient) -> None:
    assert client.get("/mutate").status_code == 405
    assert client.get("/nothing").status_code == 404
    assert client.get("/healthz").status_code == 200
    assert post(client, "/mutate", b" " * (shell.MAX_BODY + 1)).status_code == 413


def test_unreachable_api_server_is_reported() -> None:
    class Lost(Known):
        def defaults_or_fetch(self, namespace: str) -> Defaults | None:
            raise errors.Unreachable("GET /api/v1/namespaces/x: refused")

    answer = post(shell.create_app(Lost(), WebhookSettings()).test_client(), "/mutate/defaults", body(build.pod()))
    assert answer.status_code == 503
    assert "try again" in answer.text


def test_failed_class_lookup_is_reported() -> None:
    class Lost(Known):
        def resource_class(self, name: str) -> ResourceClass | None:
            raise errors.Unreachable("GET /apis/cardwise.dev/v1alpha1/resourceclasses/half: refused")

    pod = build.pod(containers=[{"name": "a", "resources": {"limits": {"half": "1"}}}])
    answer = post(shell.create_app(Lost(), WebhookSettings()).test_client(), "/mutate", body(pod))
    assert answer.status_code == 503


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    ["metadata", "spec", "containers", "initContainers", "resources", "limits", "requests", "env", "name",
     "annotations",
     "valueFrom", "fieldRef", "hard", "max", "envFrom", "nodeName", names.GPU_MEM, names.GPU_COUNT, names.SHARE,
     "template", "jobTemplate", "ownerReferences", "selector", "resourceSelector", "share", "status", "used", "class",
     "shares", names.CLASS, names.REWRITTEN, names.NVIDIA_GPU, "nvidia.tesla.k80", "half", "cardwise.dev/half",
     "kubectl.kubernetes.io/last-applied-configuration"]
)  # fmt: skip
_LIKE_OBJECTS = st.recursive(
    st.none() | st.text(max_size=4) | st.integers() | st.just("8Gi") | st.just("1e999"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("path", "resource"), [(path, resource) for path in PATHS for resource in KNOWN if (path, resource) not in PLACES]
)
def test_resource_of_another_path_is_not_decoded(
    client: FlaskClient, path: str, resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reviews of slow classes, sent to the path of Bindings, used to occupy both of its threads."""
    monkeypatch.setattr(codec, "_decode_manifest", None)
    for suffix in shell.UNIT_BY_PATH_END:
        answer = post(client, path + suffix, body_of(build.pod(gpu_mem="1Gi"), resource))
        assert answer.status_code == 400
        assert answer.text.startswith(f"the resource '{resource}' is not reviewed at this path; send it where ")


@given(path=st.sampled_from(PATHS), data=st.binary(max_size=200))
def test_random_bytes_never_cause_a_500(client: FlaskClient, path: str, data: bytes) -> None:
    assert post(client, path, data).status_code == 400


@given(path=st.sampled_from(PATHS), data=_JSON)
def test_random_json_never_causes_a_500(client: FlaskClient, path: str, data: Any) -> None:
    assert post(client, path, json.dumps(data).encode()).status_code == 400


@settings(max_examples=examples(60, soak=1000))
@given(
    place=st.sampled_from(PLACES),
    manifest=_LIKE_OBJECTS,
    about=st.fixed_dictionaries({"operation": st.sampled_from(["CREATE", "UPDATE"]), "old": st.none() | _LIKE_OBJECTS}),
)
def test_random_objects_never_cause_a_500(
    client: FlaskClient, place: tuple[str, str], manifest: Any, about: Any
) -> None:
    path, resource = place
    assert post(client, path, body_of(manifest, resource, **about)).status_code == 200


@settings(max_examples=examples(60, soak=1000))
@given(
    place=st.sampled_from([place for place in PLACES if place[1] in ("resourceclasses", "gpuquotas")]),
    spec=st.dictionaries(_KEYS, _LIKE_OBJECTS, max_size=4),
    old=st.none() | st.dictionaries(_KEYS, _LIKE_OBJECTS, max_size=4),
)
def test_random_classes_and_quotas_never_cause_a_500(
    client: FlaskClient, place: tuple[str, str], spec: Any, old: Any
) -> None:
    path, resource = place
    manifest = {"metadata": {"name": "x", "namespace": "default"}, "spec": spec, "status": spec}
    assert (
        post(client, path, body(manifest, resource, operation="UPDATE", old=old and {"spec": old})).status_code == 200
    )


@pytest.mark.parametrize(
    ("resource", "manifest"),
    [
        ("deployments", {"spec": {"template": 7}}),
        ("cronjobs", {"spec": {"jobTemplate": {"spec": {"template": {"spec": {"containers": {}}}}}}}),
        ("podtemplates", {"template": []}),
        ("jobs", {"metadata": {"annotations": {names.REWRITTEN: 7}}}),
        ("resourceclasses", {"spec": "x"}),
        ("gpuquotas", {"spec": []}),
    ],
)
def test_object_with_a_wrong_structure_is_refused_with_the_reason(
    client: FlaskClient, resource: str, manifest: Any
) -> None:
    path = "/validate" if resource == "gpuquotas" else "/mutate"
    assert message_shown(client, body(manifest, resource), path).startswith(
        f"object does not have the structure of {resource}"
    )
    if resource != "gpuquotas":
        message = message_shown(client, body({}, resource, operation="UPDATE", old=manifest))
        assert message.startswith(f"oldObject does not have the structure of {resource}")


# Deeper than any version of Python can decode.
DEEP = {"metadata": {"managedFields": [{"fieldsV1": msgspec.Raw(b'{"f:a":' * 100_000 + b"1" + b"}" * 100_000)}]}}


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        pytest.param(None, "object does not have", id="no object"),
        pytest.param({"spec": {"containers": 7}}, "$.spec.containers", id="misshapen pod"),
        pytest.param({"spec": {"securityContext": [1]}}, "$.spec.securityContext", id="of a pod"),
        pytest.param({"spec": {"containers": [{"securityContext": {"runAsUser": "root"}}]}}, "runAsUser", id="of one"),
        pytest.param(build.pod(gpu_mem="9" * 5000), "limits", id="number of 5000 digits"),
        pytest.param(DEEP, "nested too deep", id="deep"),
        pytest.param({"spec": {"x": [{}] * 20_000}}, "too many entries", id="of empty maps"),
        pytest.param({"spec": {"x": [1] * 40_000}}, "too many entries", id="of numbers"),
        pytest.param({"spec": {"x": "x" * sizes.MAX_BYTES}}, "the object has 512 KiB", id="large"),
        pytest.param({"metadata": {"finalizers": 5}}, "$.metadata.finalizers", id="finalizers that are no list"),
        pytest.param({"metadata": {"ownerReferences": "x"}}, "$.metadata.ownerReferences", id="owners that are none"),
    ],
)
@pytest.mark.parametrize("path", [path for path in paths_of("pods") if path != "/advise"])
def test_undecodable_object_is_refused_with_the_reason(
    client: FlaskClient, path: str, manifest: Any, says: str
) -> None:
    message = message_shown(client, msgspec.json.encode(review(manifest)), path)
    assert says in message
    assert len(message) < 1000


def test_advice_admits_undecodable_objects(client: FlaskClient) -> None:
    answer = post(client, "/advise", msgspec.json.encode(review(DEEP))).get_json()["response"]
    assert answer == {"uid": answer["uid"], "allowed": True}


def test_deep_nesting_is_not_searched(client: FlaskClient) -> None:
    """Searching 8 MiB for the deep part would occupy one of the few threads for more than a second."""
    deep = b"[" * 500_000 + b"]" * 500_000
    data = msgspec.json.encode(review({}))
    for before, status in ((b'"dryRun"', 200), (b'"uid"', 400)):
        with work() as done:
            answer = post(client, "/mutate", data.replace(before, b'"x":' + deep + b"," + before))
        assert answer.status_code == status
        assert "nested too deep" in answer.get_data(as_text=True)
        assert done.steps < 20_000


def message_shown(client: FlaskClient, data: bytes, path: str = "/mutate") -> str:
    """The refusal that the API server shows to the user."""
    answer = post(client, path, data)
    assert answer.status_code == 200
    response = answer.get_json()["response"]
    assert not response["allowed"]
    assert response["uid"] == review({})["request"]["uid"]
    return str(response["status"]["message"])


@settings(max_examples=examples(60, soak=1000))
@given(
    path=st.sampled_from(paths_of("pods")),
    container=st.dictionaries(_KEYS, _LIKE_OBJECTS, max_size=6),
)
def test_random_containers_never_cause_a_500(client: FlaskClient, path: str, container: Any) -> None:
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [container, build.container("x", gpu_mem=1)]}}
    assert post(client, path, body(pod)).status_code == 200
