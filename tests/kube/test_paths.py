"""Paths have exactly the given segments, whatever their text."""

import inspect
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client as official

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.fakes.apiserver import ApiServer

# Texts that the API server, a proxy or urllib could read as another segment, a query or a fragment.
HOSTILE = (
    "?watch=true&x=", "a/pods?limit=0&x=", "/pods?limit=0&x=", "#", ";a", "..", ".", "%2e%2e", "%2F", "%", "a%00",
    "a b", "a\r\nX-Remote-User: admin", "\\", "//evil", "@evil", ":1", "\ud800", "\u2215", "\uff0e\uff0e", "http://evil/",
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(), st.text("./%?#&=;:@\\ a"))
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
OF_NAMESPACES = [paths.pods, paths.secrets, paths.configmaps, paths.events, paths.gpuquotas, paths.podgroups,
                 paths.poddisruptionbudgets, paths.jobs, paths.leases]  # fmt: skip
OF_THE_CLUSTER = [paths.namespaces, paths.nodes, paths.extendedresources, paths.resourceclasses,
                  paths.mutatingwebhookconfigurations, paths.validatingwebhookconfigurations]  # fmt: skip


def segments(path: str) -> list[str]:
    """The segments of a path after decoding, as kube-apiserver sees them."""
    parts = urlsplit(f"https://kubernetes.default.svc:443{path}")
    assert (parts.netloc, parts.query, parts.fragment) == ("kubernetes.default.svc:443", "", "")
    assert path.isascii()
    assert path.isprintable()
    assert " " not in path
    return unquote(parts.path, errors="strict").split("/")[1:]


def test_all_functions_that_take_a_name_are_here():
    own = [f for f in vars(paths).values() if inspect.isfunction(f) and f.__module__ == paths.__name__]
    public = {f for f in own if not f.__name__.startswith("_") and "name" in inspect.signature(f).parameters}
    assert public == {*OF_NAMESPACES, *OF_THE_CLUSTER, paths.namespaced}


@given(function=st.sampled_from(OF_NAMESPACES), namespace=TEXTS, name=TEXTS)
def test_namespaced_path_has_the_given_segments_or_raises(function, namespace, name):
    prefix = segments(function())
    for given_name in ((), (name,)):
        try:
            path = function(namespace, *given_name)
        except errors.InvalidName:
            assert any(map(is_invalid_name, (namespace, *given_name)))
            continue
        wanted = [*prefix[:-1], "namespaces", namespace, prefix[-1], *given_name] if namespace else prefix
        assert segments(path) == wanted
        assert not any(map(is_invalid_name, (namespace or "all", *given_name)))


@given(function=st.sampled_from(OF_THE_CLUSTER), name=TEXTS)
def test_cluster_path_has_the_given_segments_or_raises(function, name):
    try:
        path = function(name)
    except errors.InvalidName:
        assert is_invalid_name(name)
    else:
        assert segments(path) == [*segments(function()), name]
        assert not is_invalid_name(name)


def is_invalid_name(text: str) -> bool:
    """Whether the name is invalid, as in `path.IsValidPathSegmentName` of k8s.io/apimachinery, or not valid UTF-8."""
    surrogates = any("\ud800" <= letter <= "\udfff" for letter in text)
    return text in ("", ".", "..") or "/" in text or "%" in text or surrogates


class Recording(official.ApiClient):
    """The official client; records its requests instead of sending them."""

    def call_api(self, method, url, *_, **__):
        raise Asked(url)


class Asked(Exception):
    pass


OFFICIAL = official.CoreV1Api(Recording(official.Configuration(host="https://x")))


@given(namespace=NAMES, name=st.one_of(NAMES, TEXTS.filter(lambda text: not is_invalid_name(text))))
def test_the_official_client_builds_the_same_path(namespace: str, name: str):
    with pytest.raises(Asked) as raised:
        OFFICIAL.read_namespaced_pod(name, namespace)
    assert str(raised.value) == f"https://x{paths.pods(namespace, name)}"


@given(name=st.sampled_from(HOSTILE))
def test_request_path_names_exactly_the_object(name: str):
    api = ApiServer()
    client: KubeClient = api.client()
    try:
        with pytest.raises((errors.NotFound, errors.InvalidName)):
            client.get(paths.pods(name, "a"))
    finally:
        api.close()
    assert all(request.verb == "get" and not request.query for request in api.sent())


def test_an_empty_name_is_not_the_list():
    with pytest.raises(errors.InvalidName, match="'' is not a valid name of a Kubernetes object: it is empty"):
        paths.pods("ns", "")
    with pytest.raises(errors.InvalidName, match="it contains '/'"):
        paths.pods("ns", "a/../../secrets")
    with pytest.raises(errors.InvalidName, match=r"binding is a subresource"):
        paths.namespaced("/api/v1", "pods", "ns", None, "binding")
    long = "x/" * 100_000
    with pytest.raises(errors.InvalidName) as caught:
        paths.pods("ns", long)
    assert len(str(caught.value)) < 200


@given(operand=TEXTS)
def test_selector_has_the_given_value_or_raises(operand: str):
    """Read back as k8s.io/apimachinery reads them: requirements by comma; in fields `\\` escapes."""
    (query,) = paths.field_query("spec.nodeName", operand).items()
    text = query[1].removeprefix("spec.nodeName=")
    assert unescaped(text) == operand
    try:
        query = paths.label_query(names.GANG, operand)
    except errors.InvalidName:
        return
    assert query == {"labelSelector": f"{names.GANG}={operand}"}
    assert not set(operand) & set(",()!=<> \t")
    assert len(operand) <= 63


def unescaped(text: str) -> str:
    letters, plain = iter(text), ""
    for letter in letters:
        assert letter not in ",="  # would end the label value
        plain += next(letters) if letter == "\\" else letter
    return plain


def test_several_values_of_a_label():
    assert paths.label_in_query("a", ["b", "c"]) == {"labelSelector": "a in (b,c)"}
    with pytest.raises(errors.InvalidName, match=r"no object has the label a='b\),c': it is not a valid label value"):
        paths.label_in_query("a", ["b", "b),c"])


def test_a_query_is_one_value():
    api = ApiServer()
    api.client().request("GET", "/version", query={"limit": "1&watch=true#x"})
    assert [request.query for request in api.sent()] == [{"limit": "1&watch=true#x"}]
    assert parse_qsl("limit=1%26watch%3Dtrue%23x") == [("limit", "1&watch=true#x")]
