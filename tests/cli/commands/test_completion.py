"""Completion in a shell and in kubectl, and the names by which the program is found."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cardwise.cli import main
from cardwise.cli.commands import completion
from cardwise.kube import errors
from cardwise.kube.client import KubeClient
from tests.cli.clusters import card, device, lists, run
from tests.cli.evictioncluster import Cards

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_the_program(shell):
    completed = CliRunner().invoke(main.cli, ["completion", shell])
    assert completed.exit_code == 0
    assert f"_CARDWISE_COMPLETE={shell}_complete" in completed.stdout


def test_the_program_answers_the_script():
    """As bash runs it: what click understands depends on what the program is called."""
    environment = os.environ | {"_CARDWISE_COMPLETE": "bash_complete", "COMP_WORDS": "cardwise dra", "COMP_CWORD": "1"}
    script = "import sys; sys.argv = ['cardwise']; from cardwise.cli.main import main; main()"
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert completed.stdout == "plain,drain\n"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["unc"], ["uncordon\tUncordon a GPU", ":4"]),
        (["quota", "-o", ""], ["table", "wide", "json", "yaml", ":4"]),
        (["top", "--int"], ["--interval\tRefresh interval, at least 1s.", ":4"]),
        (["top", "--kubeconfig", "x"], [":0"]),
    ],
)
def test_kubectl_gets_what_it_understands(words, lines):
    assert completion.complete_for_kubectl(main.cli, words).splitlines() == lines


def test_without_a_word_all_commands_are_offered():
    lines = completion.complete_for_kubectl(main.cli, []).splitlines()
    assert {line.partition("\t")[0] for line in lines[:-1]} == main._COMMANDS.keys()


def test_cards_are_offered_by_their_places(monkeypatch):
    api = Cards([card("n1", 0), card("n1", 1), card("n2", 0), device("n2", 0)], [])
    monkeypatch.setattr(KubeClient, "load", lambda *_, **__: api.kube)
    assert completion.complete_for_kubectl(main.cli, ["cordon", ""]).splitlines() == ["n1/0", "n1/1", "n2/0", ":4"]
    assert completion.complete_for_kubectl(main.cli, ["drain", "--force", "n1/"]).splitlines() == ["n1/0", "n1/1", ":4"]
    api.forbid("extendedresources")
    assert completion.complete_for_kubectl(main.cli, ["cordon", ""]) == ":4"

    def nowhere(_path, **_):
        raise errors.KubeConfigError("no kubeconfig")

    monkeypatch.setattr(KubeClient, "load", nowhere)
    assert completion.complete_for_kubectl(main.cli, ["cordon", ""]) == ":4"


def test_the_plugin_calls_itself_as_people_do(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kubectl-cardwise", "drain", "--help"])
    with pytest.raises(SystemExit) as ended:
        main.kubectl()
    assert ended.value.code == 0
    assert "Usage: kubectl cardwise drain [OPTIONS] CARD" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-cardwise", "unc"])
    main.kubectl_complete()
    assert capsys.readouterr().out.startswith("uncordon\t")


def test_kubectl_finds_the_plugin_by_its_names():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("cardwise", "kubectl-cardwise", "kubectl_complete-cardwise", "kubectl-inspect-cardwise"):
        module, _, function = scripts[name].partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("command", [["inspect"], ["classes"], ["quota", "-A"], ["gangs", "-A"]])
def test_every_listing_has_the_same_in_json_and_in_yaml(monkeypatch, command):
    api = lists(podgroups=[])
    completed = {form: run(monkeypatch, api, *command, "-o", form) for form in ("json", "yaml", "table")}
    assert [run_of_format.exit_code for run_of_format in completed.values()] == [0, 0, 0], completed
    document = json.loads(completed["json"].stdout)
    assert document == yaml.safe_load(completed["yaml"].stdout)
    assert isinstance(document, dict)
