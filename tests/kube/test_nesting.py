"""Objects that are nested deeper than msgspec supports. Every user who may change a pod can create one."""

import json
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cardwise.cli.cluster import usage
from cardwise.kube import nesting, paths, wire
from cardwise.kube.client import KubeClient
from cardwise.kube.nesting import cut_nesting, cut_nesting_by_scan, null_deep_values, tolerate_depth
from cardwise.kube.watch.reflector import Reflector, WakeHandler
from tests.examples import examples
from tests.fakes.apiserver import Answer, ApiServer, Request
from tests.fakes.clock import FakeClock

DEEP = 9_000  # the API server accepts 10,000 levels
DEEPER = 100_000  # than any Python makes objects of
ENDLESS = 300_000  # than any Python can skip: a level takes some 50 bytes of a stack of 8 MiB
LIMIT = sys.getrecursionlimit()
PODS = paths.pods()


def nested(levels: int, inner: str = "{}") -> str:
    return '{"f:a":' * levels + inner + "}" * levels


def pod(name: str, version: int, fields: str = "{}") -> str:
    metadata = json.dumps({"name": name, "namespace": "team", "uid": name, "resourceVersion": str(version)})[:-1]
    return f'{{"metadata":{metadata},"managedFields":[{{"fieldsV1":{fields}}}]}},"spec":{{"nodeName":"n1"}}}}'


def project(raw: bytes) -> tuple[str, str]:
    read = msgspec.json.decode(raw)
    return read["metadata"]["uid"], read["spec"]["nodeName"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="what this Python cannot skip is found by the scan")
def test_too_deep_values_become_null() -> None:
    text = r'{"a": ["\\", "}\"{[", {"b": 1}], "deep": DEEP, "after": {"c": [2, DEEP, {"d": [DEEP]}]}}'
    document = json.loads(cut_nesting(text.replace("DEEP", nested(DEEP, '[{"\\"}": "]"}]')).encode()))
    assert document.pop("deep") == {"f:a": {"f:a": {"f:a": None}}}
    assert document == {"a": ["\\", '}"{[', {"b": 1}], "after": {"c": [2, {"f:a": None}, {"d": None}]}}
    assert cut_nesting(whole := nested(100).encode()) == whole


def test_unread_values_are_skipped_at_any_depth() -> None:
    head = tolerate_depth(msgspec.json.Decoder(wire.ObjectHead).decode)
    assert head(pod("deep", 1, nested(DEEP)).encode()).metadata.name == "deep"
    assert sys.getrecursionlimit() == LIMIT


@pytest.fixture(params=["", "3.12 and 3.13"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose recursion limit cannot be raised."""
    if request.param:
        monkeypatch.setattr(nesting.sys, "setrecursionlimit", lambda _: None)


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("levels", [LIMIT, DEEP, DEEPER])
def test_every_depth_is_decoded(levels: int) -> None:
    raw = pod("a", 1, nested(levels)).encode()
    assert tolerate_depth(msgspec.json.Decoder(wire.ObjectHead).decode)(raw).metadata.name == "a"
    assert null_deep_values(project)(raw) == ("a", "n1")
    cut = b'{"items":[' + raw + b"]}"
    assert null_deep_values(msgspec.json.Decoder().decode)(cut)["items"][0]["spec"] == {"nodeName": "n1"}
    for broken in (b"[" * levels, b"]" * levels + b'"', raw[:-3], b'"' + raw):
        with pytest.raises(msgspec.DecodeError):
            null_deep_values(msgspec.json.Decoder().decode)(broken)
    assert sys.getrecursionlimit() == LIMIT


_TEXTS = st.sampled_from(["", "{", "]", '"', "\\", '\\"', '}"{[', "a"])
_VALUES = st.recursive(
    st.none() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=20,
)


def cut_below(document: object, levels: int) -> object:
    if isinstance(document, dict | list) and not levels:
        return None
    if isinstance(document, dict):
        return {key: cut_below(nested_part, levels - 1) for key, nested_part in document.items()}
    return [cut_below(nested_part, levels - 1) for nested_part in document] if isinstance(document, list) else document


@settings(max_examples=examples(200, soak=5000))
@given(document=_VALUES, levels=st.integers(0, 4), indent=st.sampled_from([None, 1]))
def test_scan_removes_only_too_deep_values(document: object, levels: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "_MAX_LEVELS", levels)
        assert json.loads(cut_nesting_by_scan(json.dumps(document, indent=indent).encode())) == cut_below(
            document, levels
        )


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 14), reason="what can be skipped there, objects are made of")
def test_only_the_deep_object_is_cut(
    api: ApiServer, client: KubeClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting takes ten times as long as decoding, and any user can cause it repeatedly."""
    cut: list[bytes] = []
    monkeypatch.setattr(nesting, "cut_nesting", lambda raw: (cut.append(raw), cut_nesting(raw))[1])
    levels = DEEP if sys.version_info < (3, 12) else DEEPER
    deep, late = pod("deep", 1, nested(levels)), pod("late", 3, nested(levels))
    follow(api, client, clock, [deep, pod("plain", 2)], [late, pod("after", 4)])
    assert cut == [deep.encode(), late.encode()]


def test_undecodable_depth_is_scanned_once(
    api: ApiServer, client: KubeClient, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole list is decoded; in a watch, only the deep event is affected."""
    scans: list[bytes] = []
    monkeypatch.setattr(nesting, "cut_nesting_by_scan", lambda raw: (scans.append(raw), cut_nesting_by_scan(raw))[1])
    deep, late = pod("deep", 1, nested(ENDLESS)), pod("late", 3, nested(ENDLESS))
    follow(api, client, clock, [deep, pod("plain", 2)], [late, pod("after", 4)])
    assert len(scans) == 2
    assert deep.encode() in scans[0]
    assert scans[1] == f'{{"type":"ADDED","object":{late}}}'.encode()


@pytest.mark.parametrize("levels", [sys.getrecursionlimit() + off for off in range(-60, 20, 4)])
def test_depth_limit_is_independent_of_the_callers_stack(levels: int) -> None:
    assert null_deep_values(project)(pod("a", 1, nested(levels)).encode()) == ("a", "n1")


def test_deep_pod_breaks_neither_list_nor_watch(api: ApiServer, client: KubeClient, clock: FakeClock) -> None:
    pods = [pod("deep", 1, nested(DEEP)), pod("plain", 2)]
    reflector = follow(api, client, clock, pods, [pod("late", 3, nested(DEEP)), pod("after", 4)])
    assert reflector.store.snapshot() == dict.fromkeys(("deep", "plain", "late", "after"), "n1")
    assert (reflector.relists, reflector.handler_errors) == (1, 0)


def follow(api: ApiServer, client: KubeClient, clock: FakeClock, pods: list[str], added: list[str]) -> Reflector[str]:
    def answer(request: Request) -> bytes | Answer:
        if request.query.get("resourceVersion") == "4":
            return Answer(500, b"{}")  # it waits
        if request.verb == "watch":
            return "".join(f'{{"type":"ADDED","object":{manifest}}}\n' for manifest in added).encode()
        return f'{{"metadata":{{"resourceVersion":"2"}},"items":[{",".join(pods)}]}}'.encode()

    api.answers[PODS] = answer
    reflector = Reflector(client, PODS, project, WakeHandler(), clock=clock)
    reflector.start()
    clock.until_waiting()
    reflector.stop()
    return reflector


def test_commands_read_a_list_with_a_deep_object(api: ApiServer, client: KubeClient) -> None:
    pods = pod("deep", 1, nested(DEEP)), pod("plain", 2)
    api.answers[PODS] = f'{{"metadata":{{"resourceVersion":"2"}},"items":[{",".join(pods)}]}}'.encode()
    assert [manifest["metadata"]["name"] for manifest in client.list_objects(PODS)] == ["deep", "plain"]
    assert [record.metadata.name for record in usage._list_pods(client, "")] == ["deep", "plain"]


def test_the_client_reads_a_deep_object(api: ApiServer, client: KubeClient) -> None:
    path = paths.pods("team", "deep")
    api.answers[path] = pod("deep", 1, nested(DEEP)).encode()
    assert client.get(path)["spec"] == {"nodeName": "n1"}
