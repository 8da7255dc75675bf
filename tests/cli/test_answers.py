"""Every command against a cluster, or a proxy before it, that answers otherwise than a sound installation.

A command ends with one line that says what is wrong, never with a traceback.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cardwise.cli import main
from cardwise.core.values.decoded import Json
from cardwise.kube.client import KubeClient
from tests.cli.clusters import Cluster, lists, waiting
from tests.fakes.apiserver import Fault

COMMANDS = {
    "advise": ["advise", "-n", "team-a"],
    "bundle": ["bundle", "FILE"],
    "classes": ["classes"],
    "cordon": ["cordon", "n1/0"],
    "defrag": ["defrag"],
    "doctor": ["doctor"],
    "doctor before": ["doctor", "--before-install"],
    "drain": ["drain", "n1/0"],
    "explain pod": ["explain", "pod", "p", "-n", "team-a"],
    "explain any": ["explain", "web", "-n", "team-a"],
    "explain workload": ["explain", "deployment", "web", "-n", "team-a"],
    "gangs": ["gangs"],
    "idle": ["idle", "-n", "team-a"],
    "inspect": ["inspect", "-d"],
    "nodes": ["nodes"],
    "quota": ["quota"],
    "simulate": ["simulate"],
    "top": ["top", "-1"],
    "uncordon": ["uncordon", "n1/0"],
}
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>\n<h1>Sign in</h1></body></html>\n"
ANSWERS = {
    "400": Fault(status=400, reason="BadRequest"),
    "401": Fault(status=401, reason="Unauthorized"),
    "403": Fault(status=403, reason="Forbidden"),
    "404": Fault(status=404, reason="NotFound"),
    "404 of a kind": Fault(status=404, body=b"404 page not found\n"),
    "407 of a proxy": Fault(status=407, body=PAGE),
    "410": Fault(status=410, reason="Expired"),
    "429": Fault(status=429, reason="TooManyRequests", retry_after=1),
    "500": Fault(status=500, reason="InternalError"),
    "502 of a proxy": Fault(status=502, body=PAGE),
    "503": Fault(status=503, body=b""),
    "a page": Fault(status=200, body=PAGE),
    "nothing": Fault(status=200, body=b""),
    "a list that is none": Fault(status=200, body=b"[]"),
    "a text": Fault(status=200, body=b'"ok"'),
    "half of it": Fault(status=200, body=b'{"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": [{"m'),
    "no connection": Fault(refused=True),
    "no answer": Fault(seconds=3600.0),
}
LISTS = {
    "null": Fault(status=200, body=b'{"metadata": {"resourceVersion": "1"}, "items": null}'),
    "items of no kind": Fault(status=200, body=b'{"metadata": {"resourceVersion": "1"}, "items": ["x", 1]}'),
}


@pytest.fixture
def api() -> Cluster:
    api = lists()
    api.add("pods", waiting("team-a", "p", {"aliyun.com/gpu-mem": "20000", "cardwise.dev/share": "1"}))
    web: Json = {"metadata": {"name": "web", "namespace": "team-a", "uid": "web"}, "spec": {}}
    api.add("deployments", web)
    return api


@pytest.fixture
def end_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, api: Cluster
) -> Callable[[list[str]], str]:
    """What the program, called with these words, writes on stderr before it ends. It raises nothing else."""

    def end(words: list[str]) -> str:
        monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.tar.gz"
        monkeypatch.setattr(sys, "argv", ["cardwise", *(str(file) if word == "FILE" else word for word in words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        message = ended.value.code
        return capsys.readouterr().err + (message if isinstance(message, str) else "")

    return end


@pytest.mark.parametrize("answer", [*ANSWERS, *LISTS])
@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_the_api_server_answers_a_command_ends_in_words(api, end_of, command, answer):
    if answer in LISTS:
        api.fault(LISTS[answer], "list", times=math.inf)
    else:
        api.fault(ANSWERS[answer], times=math.inf)
    text = end_of(COMMANDS[command])
    assert "Traceback" not in text
    assert "\n<h1>" not in text, "a page is one line"


@pytest.mark.parametrize("answer", ["403", "404 of a kind", "a page"])
@pytest.mark.parametrize("command", COMMANDS)
def test_also_where_one_kind_alone_is_answered_so(api, end_of, command, answer):
    for kind in ("extendedresources", "resourceclasses", "gpuquotas", "podgroups", "pods", "nodes", "events", "leases"):
        rule = api.fault(ANSWERS[answer], path=f"*/{kind}*", times=math.inf)
        assert "Traceback" not in end_of(COMMANDS[command])
        rule.end()
