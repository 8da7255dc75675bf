"""`cardwise explain -o json`: what programs get of a pod that waits, and of one that is placed."""

import json

import yaml

from tests.cli.clusters import card, lists, run, waiting


def explain_pod_as(monkeypatch, api, name):
    completed = {
        form: run(monkeypatch, api, "explain", "pod", name, "-n", "team-a", "-o", form)
        for form in ("json", "yaml", "table")
    }
    assert [run_of_format.exit_code for run_of_format in completed.values()] == [0, 0, 0], completed["json"].output
    document = json.loads(completed["json"].stdout)
    assert document == yaml.safe_load(completed["yaml"].stdout)
    assert document["text"] == completed["table"].stdout.splitlines()
    return document


def test_a_pod_that_waits_has_every_card_with_its_numbers(monkeypatch):
    smoking = card("n1", 0)
    smoking["spec"]["unschedulable"] = True
    api = lists(extendedresources=[smoking, card("n2", 0)], gpuquotas=[])
    limits = {"aliyun.com/gpu-mem": "9000", "cardwise.dev/share": "1"}
    api.add("pods", waiting("team-a", "big", limits))
    document = explain_pod_as(monkeypatch, api, "big")
    fits, refused = document["nodes"]
    assert (fits["name"], fits["fits"], fits["reason"]) == ("n2", True, "")
    assert (refused["name"], refused["fits"]) == ("n1", False)
    (shown_card,) = refused["gpus"]
    assert (shown_card["index"], shown_card["freeMiB"], shown_card["cordoned"], shown_card["healthy"]) == (
        0,
        8441,
        True,
        True,
    )
    assert {pod["name"] for pod in shown_card["pods"]} == {"notebook", "serve"}
    assert "cordoned" in "".join(document["text"])


def test_a_placed_pod_has_its_cards(monkeypatch):
    document = explain_pod_as(monkeypatch, lists(), "notebook")
    assert (document["node"], document["nodes"]) == ("n1", [])
    assert document["gpus"] == [
        {"container": "main", "index": 0, "uuid": "GPU-n1-0", "memoryMiB": 2000, "corePercent": 0},
    ]  # fmt: skip
