"""What others write into the cluster obeys no terminal."""

import json
import math
import sys

import pytest
import yaml

from cardwise.cli import console, main
from cardwise.cli.commands import completion
from cardwise.cli.render import tables
from cardwise.core.api import names
from cardwise.kube.client import KubeClient
from tests.cli.clusters import Cluster, card, lists, run, waiting
from tests.fakes.apiserver import Fault

EVIL = "ok\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202eback\x7f"


def harmless(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def test_control_characters_are_marked_and_lines_stay():
    assert console.clean_text("a\tb\r\n\x1b[31mred\x85\u2028é ░…\n") == "a b \n\\x1b[31mred  é ░…\n"
    assert console.clean_line("one\ntwo") == "one two"


def test_a_cell_is_one_line_whatever_is_in_it():
    assert tables.align_rows([["A", "B"], ["x\ny", "z\x0b\x85\u2028z"]]) == "A    B\nx y  z z\n"


@pytest.fixture
def api() -> Cluster:
    """With a sick card whose reason a node tells, and a waiting pod of which kube-scheduler says something."""
    sick = card("n1", 0, EVIL, health="Unhealthy")
    sick["status"]["reason"] = f"two\nlines {EVIL}"
    limits = {"aliyun.com/gpu-mem": "4000", "cardwise.dev/share": "1"}
    pod = waiting("team-a", "p", limits)
    pod["status"] = {"conditions": [{"type": "PodScheduled", "message": EVIL}]}
    pod["metadata"]["annotations"] = {"cardwise.dev/class": EVIL}
    own = {"metadata": {"name": names.NAMESPACE}}
    cluster = lists(extendedresources=[sick], pods=[pod], namespaces=[own])
    cluster.kube.namespace = "team-a"
    return cluster


@pytest.mark.parametrize(
    "words", [("explain", "p"), ("inspect", "-d"), ("top", "--once"), ("nodes", "-o", "wide"), ("doctor", "--no-probe")]
)
def test_no_command_prints_any(monkeypatch, api, words):
    completed = run(monkeypatch, api, *words)
    assert "ok\\x1b[2J\\x1b]0;owned" in completed.output
    assert harmless(completed.output)


def test_nobody_writes_a_line_of_ours(monkeypatch, api):
    """What somebody has written is a part of one."""
    forged = "no\nIt runs."
    api.change("pods", "p", "team-a", status={"conditions": [{"type": "PodScheduled", "message": forged}]})
    assert "kube-scheduler says: no It runs.\n" in run(monkeypatch, api, "explain", "p").stdout
    api.change("pods", "p", "team-a", status={"phase": "Failed", "reason": "R", "message": forged})
    assert "R: no It runs.\n" in run(monkeypatch, api, "explain", "p").stdout
    api.change("extendedresources", "gpu-n1-0", spec={"unschedulable": True, "cordon": {"reason": forged}})
    assert run(monkeypatch, api, "cordon", "n1/0").stdout.endswith("already cordoned: no It runs.\n")


@pytest.mark.parametrize("words", [("explain", "p"), ("inspect",)])
def test_programs_get_what_is_there(monkeypatch, api, words):
    output = run(monkeypatch, api, *words, "-o", "json").stdout
    assert json.loads(output) == yaml.safe_load(run(monkeypatch, api, *words, "-o", "yaml").stdout)
    assert "\\u001b[2J" in output


def test_no_shell_is_offered_any(monkeypatch, api):
    api.add("extendedresources", card(f"n{EVIL}", 1))
    monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
    assert completion.complete_for_kubectl(main.cli, ["cordon", ""]).splitlines() == ["n1/0", ":4"]


def test_nor_does_an_error(monkeypatch, api):
    api.add("extendedresources", card(f"n{EVIL}", 1))
    refused = run(monkeypatch, api, "nodes", "none")
    assert "nodes that have: n1, nok\\x1b[2J" in refused.stderr
    assert harmless(refused.stderr)
    api.fault(Fault(status=500, message=EVIL), "list", times=math.inf)
    monkeypatch.setattr(sys, "argv", ["cardwise", "nodes"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert r"ok\x1b[2J" in str(ended.value.code)
    assert harmless(str(ended.value.code))
