"""Objects that are nested deeper than msgspec follows: everybody who may change a pod can make one of it."""

import json
import sys

import msgspec
import pytest

from cardwise.cli import listing, topdata
from cardwise.kube import paths
from cardwise.kube.client import KubeClient
from cardwise.kube.nesting import DEEPEST, bounded, shallow
from cardwise.kube.reflector import Reflector, Woken
from tests.fakes.apiserver import Answer, ApiServer, Request

DEEP = 9_000  # the API server takes 10,000 levels
PODS = paths.pods()


def nested(levels: int, inner: str = "{}") -> str:
    return '{"f:a":' * levels + inner + "}" * levels


def pod(name: str, version: int, fields: str = "{}") -> str:
    metadata = json.dumps({"name": name, "namespace": "team", "uid": name, "resourceVersion": str(version)})[:-1]
    return f'{{"metadata":{metadata},"managedFields":[{{"fieldsV1":{fields}}}]}},"spec":{{"nodeName":"n1"}}}}'


def project(raw: bytes) -> tuple[str, str]:
    read = msgspec.json.decode(raw)
    return read["metadata"]["uid"], read["spec"]["nodeName"]


def test_what_lies_too_deep_is_cut_and_nothing_else() -> None:
    text = r'{"a": ["\\", "}\"{[", {"b": 1}], "deep": DEEP, "after": {"c": [2, DEEP]}}'
    found = json.loads(shallow(text.replace("DEEP", nested(DEEP, '[{"\\"}": "]"}]')).encode()))
    levels = 0
    deep = found.pop("deep")
    while deep is not None:
        deep, levels = deep["f:a"], levels + 1
    assert levels == DEEPEST - 1
    assert found["after"]["c"][0] == 2
    assert found["a"] == ["\\", '}"{[', {"b": 1}]
    assert shallow(whole := nested(DEEPEST - 1).encode()) == whole


@pytest.mark.parametrize("levels", [sys.getrecursionlimit() + off for off in range(-60, 20, 4)])
def test_at_the_limit_it_is_read_however_deep_the_reader_stands(levels: int) -> None:
    assert bounded(project)(pod("a", 1, nested(levels)).encode()) == ("a", "n1")


def test_a_deep_pod_keeps_nobody_from_the_list_nor_from_the_watch(api: ApiServer, client: KubeClient, clock) -> None:
    def answer(request: Request) -> bytes | Answer:
        if request.query.get("resourceVersion") == "4":
            return Answer(500, b"{}")  # it waits
        if request.verb == "watch":
            late = pod("late", 3, nested(DEEP)), pod("after", 4)
            return "".join(f'{{"type":"ADDED","object":{each}}}\n' for each in late).encode()
        items = pod("deep", 1, nested(DEEP)), pod("plain", 2)
        return f'{{"metadata":{{"resourceVersion":"2"}},"items":[{",".join(items)}]}}'.encode()

    api.answers[PODS] = answer
    reflector = Reflector(client, PODS, project, Woken(), clock=clock)
    reflector.start()
    clock.until_waiting()
    reflector.stop()
    assert reflector.store.snapshot() == dict.fromkeys(("deep", "plain", "late", "after"), "n1")
    assert (reflector.relists, reflector.handler_errors) == (1, 0)


def test_commands_read_a_list_with_a_deep_object(api: ApiServer, client: KubeClient) -> None:
    items = pod("deep", 1, nested(DEEP)), pod("plain", 2)
    api.answers[PODS] = f'{{"metadata":{{"resourceVersion":"2"}},"items":[{",".join(items)}]}}'.encode()
    assert [each["metadata"]["name"] for each in listing.objects(client, PODS)] == ["deep", "plain"]
    assert [each.metadata.name for each in topdata._pods(client, "")] == ["deep", "plain"]


def test_the_client_reads_a_deep_object(api: ApiServer, client: KubeClient) -> None:
    path = paths.pods("team", "deep")
    api.answers[path] = pod("deep", 1, nested(DEEP)).encode()
    assert client.get(path)["spec"] == {"nodeName": "n1"}
