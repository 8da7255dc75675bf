"""Paths and queries are those of the official client, whatever the names; or the name is refused."""

import inspect
from collections.abc import Callable
from functools import partial
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes import client as official

from cardwise.core.api import names
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.examples import examples
from tests.fakes.apiserver import ApiServer

# Texts that the API server, a proxy or urllib could read as another segment, a query or a fragment.
HOSTILE = (
    "?watch=true&x=", "a/pods?limit=0&x=", "/pods?limit=0&x=", "#", ";a", "..", ".", "%2e%2e", "%2F", "%", "a%00",
    "a b", "a\r\nX-Remote-User: admin", "\\", "//evil", "@evil", ":1", "\ud800", "\u2215", "\uff0e\uff0e", "http://evil/",
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(HOSTILE), st.text(), st.text("./%?#&=;:@\\ a"))
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


class Asked(Exception):
    """The URL that the official client would ask."""


class Recording(official.ApiClient):
    """The official client; it names the URL instead of sending a request."""

    def call_api(self, method, url, *_, **__):
        raise Asked(url)


HOST = "https://x:6443/k8s/clusters/c-1"
OFFICIAL = Recording(official.Configuration(host=HOST))
CORE, CUSTOM = official.CoreV1Api(OFFICIAL), official.CustomObjectsApi(OFFICIAL)
RESOURCE = official.ResourceV1Api(OFFICIAL)
POLICY, BATCH = official.PolicyV1Api(OFFICIAL), official.BatchV1Api(OFFICIAL)
COORDINATION, ADMISSION = official.CoordinationV1Api(OFFICIAL), official.AdmissionregistrationV1Api(OFFICIAL)


def url_of(call: Callable[..., object], *args: object, **query: object) -> str:
    with pytest.raises(Asked) as raised:
        call(*args, **query)
    return str(raised.value)


def custom_of_cluster(plural: str) -> tuple[Callable, ...]:
    """As below, of our own kinds."""
    kind = names.GROUP, names.VERSION, plural
    return (partial(CUSTOM.list_cluster_custom_object, *kind), partial(CUSTOM.get_cluster_custom_object, *kind))


def custom_of_namespace(plural: str) -> tuple[Callable, ...]:
    kind = names.GROUP, names.VERSION
    return (
        partial(CUSTOM.list_custom_object_for_all_namespaces, *kind, plural),
        lambda namespace: CUSTOM.list_namespaced_custom_object(*kind, namespace, plural),
        lambda name, namespace: CUSTOM.get_namespaced_custom_object(*kind, namespace, plural, name),
    )


# By function, the calls of the official client: list all, list those of a namespace, read one.
OF_NAMESPACES = {
    paths.pods: (CORE.list_pod_for_all_namespaces, CORE.list_namespaced_pod, CORE.read_namespaced_pod),
    paths.secrets: (CORE.list_secret_for_all_namespaces, CORE.list_namespaced_secret, CORE.read_namespaced_secret),
    paths.configmaps: (
        CORE.list_config_map_for_all_namespaces,
        CORE.list_namespaced_config_map,
        CORE.read_namespaced_config_map,
    ),
    paths.events: (CORE.list_event_for_all_namespaces, CORE.list_namespaced_event, CORE.read_namespaced_event),
    paths.poddisruptionbudgets: (
        POLICY.list_pod_disruption_budget_for_all_namespaces,
        POLICY.list_namespaced_pod_disruption_budget,
        POLICY.read_namespaced_pod_disruption_budget,
    ),
    paths.jobs: (BATCH.list_job_for_all_namespaces, BATCH.list_namespaced_job, BATCH.read_namespaced_job),
    paths.leases: (
        COORDINATION.list_lease_for_all_namespaces,
        COORDINATION.list_namespaced_lease,
        COORDINATION.read_namespaced_lease,
    ),
    paths.resourceclaims: (
        RESOURCE.list_resource_claim_for_all_namespaces,
        RESOURCE.list_namespaced_resource_claim,
        RESOURCE.read_namespaced_resource_claim,
    ),
    paths.gpuquotas: custom_of_namespace("gpuquotas"),
    paths.podgroups: custom_of_namespace("podgroups"),
}
OF_THE_CLUSTER = {
    paths.namespaces: (CORE.list_namespace, CORE.read_namespace),
    paths.nodes: (CORE.list_node, CORE.read_node),
    paths.mutatingwebhookconfigurations: (
        ADMISSION.list_mutating_webhook_configuration,
        ADMISSION.read_mutating_webhook_configuration,
    ),
    paths.validatingwebhookconfigurations: (
        ADMISSION.list_validating_webhook_configuration,
        ADMISSION.read_validating_webhook_configuration,
    ),
    paths.validatingadmissionpolicies: (
        ADMISSION.list_validating_admission_policy,
        ADMISSION.read_validating_admission_policy,
    ),
    paths.validatingadmissionpolicybindings: (
        ADMISSION.list_validating_admission_policy_binding,
        ADMISSION.read_validating_admission_policy_binding,
    ),
    paths.extendedresources: custom_of_cluster("extendedresources"),
    paths.resourceclasses: custom_of_cluster("resourceclasses"),
}
# By subresource: the function, and the call of the official client, which has the name first.
SUBRESOURCES = {
    "status": (paths.pods, CORE.read_namespaced_pod_status),
    "eviction": (
        paths.pods,
        lambda name, namespace: CORE.create_namespaced_pod_eviction(name, namespace, official.V1Eviction()),
    ),
    "binding": (
        paths.pods,
        lambda name, namespace: CORE.create_namespaced_pod_binding(
            name, namespace, official.V1Binding(target=official.V1ObjectReference())
        ),
    ),
    "resize": (paths.pods, CORE.read_namespaced_pod_resize),
}
CUSTOM_STATUS = partial(CUSTOM.get_namespaced_custom_object_status, names.GROUP, names.VERSION)


def test_all_functions_that_take_a_name_are_here():
    own = [f for f in vars(paths).values() if inspect.isfunction(f) and f.__module__ == paths.__name__]
    public = {f for f in own if not f.__name__.startswith("_") and "name" in inspect.signature(f).parameters}
    assert public == {*OF_NAMESPACES, *OF_THE_CLUSTER, paths.namespaced}


def path_or_refusal(build: Callable[[], str], *segments: str) -> str | None:
    """The path; None if it was refused, which must be for a segment that is no name."""
    is_valid = not any(map(is_invalid_name, segments))
    try:
        path = build()
    except errors.InvalidName:
        assert not is_valid
        return None
    assert is_valid
    return HOST + path


@given(function=st.sampled_from([*OF_NAMESPACES]), namespace=TEXTS, name=TEXTS)
def test_paths_of_namespaces_are_those_of_the_official_client_or_refused(function, namespace, name):
    list_all, list_namespace, read = OF_NAMESPACES[function]
    assert HOST + function() == url_of(list_all)
    path = path_or_refusal(lambda: function(namespace, name), namespace, name)
    assert path is None or path == url_of(read, name, namespace)
    if namespace:
        path = path_or_refusal(lambda: function(namespace), namespace)
        assert path is None or path == url_of(list_namespace, namespace)


@given(function=st.sampled_from([*OF_THE_CLUSTER]), name=TEXTS)
def test_paths_of_the_cluster_are_those_of_the_official_client_or_refused(function, name):
    list_all, read = OF_THE_CLUSTER[function]
    assert HOST + function() == url_of(list_all)
    path = path_or_refusal(lambda: function(name), name)
    assert path is None or path == url_of(read, name)


@given(sub=st.sampled_from([*SUBRESOURCES]), namespace=NAMES, name=TEXTS)
def test_subresources_are_those_of_the_official_client_or_refused(sub, namespace, name):
    function, call = SUBRESOURCES[sub]
    path = path_or_refusal(lambda: function(namespace, name, sub), name)
    assert path is None or path == url_of(call, name, namespace)
    path = path_or_refusal(lambda: paths.podgroups(namespace, name, "status"), name)
    assert path is None or path == url_of(CUSTOM_STATUS, namespace, "podgroups", name)


class RecordingPool:
    def urlopen(self, method, url, **_):
        raise Asked(url)


CLIENT = KubeClient(HOST)
CLIENT._connection_pool = RecordingPool  # type: ignore[assignment,method-assign]


@settings(max_examples=examples(25, soak=400))
@given(namespace=NAMES, text=TEXTS, gang=NAMES)
def test_the_client_sends_the_query_of_the_official_client(namespace, text, gang):
    """It quotes in another way, `%20` for `+` and `/` for `%2F`, which means the same."""
    try:
        query = paths.label_query(names.GANG, gang) | paths.field_query("spec.nodeName", text)
    except errors.InvalidName:
        assert not is_unicode(text)
        return
    path, _, sent = url_of(CLIENT.get, paths.pods(namespace), query).partition("?")
    options = {"label_selector": query["labelSelector"], "field_selector": query["fieldSelector"]}
    url, _, wanted = url_of(CORE.list_namespaced_pod, namespace, **options).partition("?")
    assert HOST.removesuffix(urlsplit(HOST).path) + path == url
    assert sorted(parse_qsl(sent, strict_parsing=True)) == sorted(parse_qsl(wanted, strict_parsing=True))


def is_invalid_name(text: str) -> bool:
    """Whether the name is invalid, as in `path.IsValidPathSegmentName` of k8s.io/apimachinery, or not valid UTF-8."""
    return text in ("", ".", "..") or "/" in text or "%" in text or not is_unicode(text)


def is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair, which UTF-8 cannot encode."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


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
    if not is_unicode(operand):
        with pytest.raises(errors.InvalidName, match="not a valid text"):
            paths.field_query("spec.nodeName", operand)
        return
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
