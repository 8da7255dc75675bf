"""`cardwise explain -o json`: what programs get of a pod that waits, and of one that is placed."""

import json

import yaml

from tests.cli.worlds import card, lists, run, waiting


def asked(monkeypatch, api, name):
    said = {
        form: run(monkeypatch, api, "explain", "pod", name, "-n", "team-a", "-o", form)
        for form in ("json", "yaml", "table")
    }
    assert [one.exit_code for one in said.values()] == [0, 0, 0], said["json"].output
    found = json.loads(said["json"].stdout)
    assert found == yaml.safe_load(said["yaml"].stdout)
    assert found["text"] == said["table"].stdout.splitlines()
    return found


def test_a_pod_that_waits_has_every_card_with_its_numbers(monkeypatch):
    smoking = card("n1", 0)
    smoking["spec"]["unschedulable"] = True
    api = lists(extendedresources=[smoking, card("n2", 0)], gpuquotas=[])
    limits = {"aliyun.com/gpu-mem": "9000", "cardwise.dev/share": "1"}
    api.add("pods", waiting("team-a", "big", limits))
    found = asked(monkeypatch, api, "big")
    fits, refused = found["nodes"]
    assert (fits["name"], fits["fits"], fits["reason"]) == ("n2", True, "")
    assert (refused["name"], refused["fits"]) == ("n1", False)
    (told,) = refused["cards"]
    assert (told["index"], told["freeMiB"], told["cordoned"], told["healthy"]) == (0, 8441, True, True)
    assert {one["name"] for one in told["pods"]} == {"notebook", "serve"}
    assert "cordoned" in "".join(found["text"])


def test_a_placed_pod_has_its_cards(monkeypatch):
    found = asked(monkeypatch, lists(), "notebook")
    assert (found["node"], found["nodes"]) == ("n1", [])
    assert found["cards"] == [
        {"container": "main", "index": 0, "uuid": "GPU-n1-0", "memoryMiB": 2000, "corePercent": 0},
    ]  # fmt: skip
