"""Devices that are not GPUs on every screen, and the screens of cards beside them unchanged."""

import json

import pytest

from cardwise.cli.explanation import sentences
from cardwise.cli.render import inspecttable
from cardwise.core.placement import totals
from cardwise.kube import clusterstate
from cardwise.kube.clusterstate import ClusterState
from tests.build import resource_class
from tests.cli.clusters import (
    FAST_CLASS,
    RDMA_CLASS,
    device,
    lists,
    lists_with_devices,
    placed,
    run,
    waiting,
    with_devices,
)


def device_cluster(**objects_by_kind: list[dict[str, object]]) -> ClusterState:
    return clusterstate.read_cluster_state(lists_with_devices(**objects_by_kind).kube)


def asking(limits: dict[str, str], devices: str = "rdma", **objects_by_kind: list[dict[str, object]]) -> str:
    return sentences.explain_pod(waiting("team-a", "p", limits, devices=devices), device_cluster(**objects_by_kind))


def test_classes_are_counted_apart_from_those_of_cards(monkeypatch):
    text = run(monkeypatch, lists_with_devices(), "classes").output
    assert text.partition("\n\n")[0] + "\n" == run(monkeypatch, lists(pods=seen_pods()), "classes").output
    assert text.partition("\n\n")[2] == (
        "DEVICE-CLASS  DEVICES  NODES  FREE  USED\n"
        "fast          1        1      0     1\n"
        "rdma          4        3      1     2\n"
    )


def seen_pods():
    """As the cards see those of the devices' world."""
    return lists_with_devices().objects("pods")


def test_wide_says_who_uses_them(monkeypatch):
    text = run(monkeypatch, lists_with_devices(), "classes", "-o", "wide").output
    assert "rdma          4        3      1     2     3\n" in text
    assert (
        "DEVICE-CLASS  NAMESPACE  DEVICES\n"
        "fast          team-b     1\n"
        "rdma          team-a     1\n"
        "rdma          team-b     1\n"
    ) in text


def test_one_class_of_devices_and_one_that_nobody_uses(monkeypatch):
    text = run(monkeypatch, lists_with_devices(), "classes", "fast").output
    assert text == (
        "DEVICE-CLASS  DEVICES  NODES  FREE  USED\nfast          1        1      0     1\n\n"
        "NAMESPACE  DEVICES\nteam-b     1\n"
    )
    free = lists_with_devices(extendedresources=[device("n3", 0)])
    assert run(monkeypatch, free, "classes", "rdma").output.endswith("\nNo pod uses it.\n")


def test_a_cluster_of_devices_only_has_one_table(monkeypatch):
    api = lists(extendedresources=[device("n3", 0)], resourceclasses=[RDMA_CLASS], pods=[])
    assert run(monkeypatch, api, "classes").output.splitlines()[0].startswith("DEVICE-CLASS")


def test_classes_for_programs(monkeypatch):
    document = json.loads(run(monkeypatch, lists_with_devices(), "classes", "-o", "json").output)
    assert [resource_class["name"] for resource_class in document["classes"]] == ["big", "nvidia.tesla.k80"]
    assert document["deviceClasses"][1] == {
        "name": "rdma",
        "devices": 4,
        "healthyDevices": 3,
        "nodes": 3,
        "free": 1,
        "used": 2,
        "users": [{"namespace": "team-a", "devices": 1}, {"namespace": "team-b", "devices": 1}],
    }


def test_the_table_of_cards_has_no_devices_and_no_nodes_without_cards(monkeypatch):
    plain = run(monkeypatch, lists(pods=seen_pods()), "inspect").output
    assert run(monkeypatch, lists_with_devices(), "inspect").output == plain
    refused = run(monkeypatch, lists_with_devices(), "inspect", "n3")
    assert refused.exit_code == 1
    assert "node 'n3' has no GPU that Cardwise shares; nodes that have: n1, n2" in refused.stderr


def test_details_have_a_table_of_devices_below_that_of_cards(monkeypatch):
    of_n1 = run(monkeypatch, lists_with_devices(), "inspect", "-d", "n1").output
    assert (
        "DEVICE     KIND  MODEL   CLASSES    USED-BY\n"
        "rdma-n1-0  rdma  MT4119  rdma       team-a/both\n"
        "rdma-n1-1  rdma  MT4119  fast,rdma  team-b/gone (reported)\n"
    ) in of_n1
    assert "both      team-a     0                100\n" in of_n1
    assert "gone" not in of_n1.partition("DEVICE ")[0], "it has no GPU"
    of_n3 = run(monkeypatch, lists_with_devices(), "inspect", "-d", "n3").output
    assert "NAME:       n3\nIPADDRESS:  unknown\n\nDEVICE " in of_n3
    assert "Allocated :" not in of_n3
    assert (
        "rdma-n2-0  rdma  MT4119  rdma     - (unhealthy)\n"
        in run(monkeypatch, lists_with_devices(), "inspect", "-d", "n2").output
    )
    without = inspecttable.details(clusterstate.read_cluster_state(lists(pods=seen_pods()).kube).ledger, {})
    assert "DEVICE" not in without


def test_inspect_for_programs(monkeypatch):
    document = json.loads(run(monkeypatch, lists_with_devices(), "inspect", "-o", "json").output)
    first, _, third = document["nodes"]
    assert [card["uuid"] for card in first["gpus"]] == ["GPU-n1-0", "GPU-n1-1"]
    assert first["devices"][0]["pods"] == [{"namespace": "team-a", "name": "both", "uid": "team-a-both"}]
    assert (third["gpus"], [device["uuid"] for device in third["devices"]]) == ([], ["rdma-n3-0"])


def test_a_class_without_a_kind_selects_no_device():
    loose = resource_class("loose", selector={"matchExpressions": [{"key": "uuid", "operator": "Exists"}]})
    there = device_cluster(resourceclasses=[loose])
    (view,) = totals.classes_of_cards(there.ledger, there.classes)
    assert (view.amounts["devices"], totals.classes_of_devices(there.ledger, there.classes)) == (4, [])


def test_a_waiting_pod_hears_which_class_is_short_and_who_has_it():
    text = asking({"cardwise.dev/rdma": "2", "cardwise.dev/share": "1", "cardwise.dev/place": "1"})
    assert "requests 2 devices of class rdma (container main).\n" in text
    assert "Of class rdma: 4 devices on n1 (2), n2 (1), n3 (1), 1 of them unhealthy; free: n3 (1).\n" in text
    assert "  n1: Insufficient free devices of the requested class\n" in text
    assert "    rdma: 2 requested, 0 of 2 devices free, 2 short, held by team-a/both, team-b/gone (reported)\n" in text
    assert (
        "  n3: The node does not have the requested devices\n    rdma: 2 requested, 1 of 1 device free, 1 short\n"
        in text
    )
    assert "Tesla" not in text, "the GPUs say nothing of it"


def test_a_pod_that_would_fit_hears_where():
    only = {"cardwise.dev/rdma": "1", "cardwise.dev/share": "1"}
    assert "Devices that fit are free on n3 (best first, priced orders them as binpack would)" in asking(only)
    text = asking(
        only | {"aliyun.com/gpu-mem": "100"}, extendedresources=[*lists().objects("extendedresources"), *free()]
    )
    assert "requests 100 MiB (container main) + 1 device of class rdma (container main).\n" in text
    assert "GPUs and devices that fit are free on n1" in text


def free():
    return [device("n1", i, labels={"speed": "fast"} if i == 1 else {}) for i in range(2)]


def test_classes_that_overlap_may_be_too_few_together():
    text = asking(
        {"cardwise.dev/rdma": "1", "cardwise.dev/fast": "1", "cardwise.dev/share": "1"},
        "fast,rdma",
        extendedresources=[device("n1", 0, labels={"speed": "fast"})],
        pods=[],
    )
    assert "    each class has enough free devices, but some devices belong to several classes: together" in text


def test_a_class_that_is_not_there_or_selects_nothing_is_told():
    limits = {"cardwise.dev/rdma": "1", "cardwise.dev/share": "1"}
    assert "There is no ResourceClass rdma; available: fast." in asking(limits, resourceclasses=[FAST_CLASS])
    nothing = asking(limits, extendedresources=[], pods=[])
    assert "No device matches class rdma: see its selector with `kubectl get resourceclass rdma -o yaml`." in nothing
    assert "No node has a GPU or a device" in nothing


def test_a_placed_pod_hears_its_devices_and_what_is_wrong_with_them():
    pod = with_devices(placed("team-a", "p", "n2", 0, 5), ("rdma", "rdma-n2-0"), ("rdma", "rdma-n2-9"))
    pod["spec"]["containers"][0]["resources"] = {"limits": {"cardwise.dev/rdma": "2", "cardwise.dev/share": "1"}}
    pod["metadata"]["annotations"]["cardwise.dev/device-classes"] = "rdma"
    text = sentences.explain_pod(pod, device_cluster())
    assert "  container main: device rdma-n2-0 of class rdma; this device is unhealthy\n" in text
    assert "  container main: device rdma-n2-9 of class rdma; this device is not on the node any more\n" in text
    assert "granted" not in text, "nobody says so of devices"
    mixed = next(listed for listed in seen_pods() if listed["metadata"]["name"] == "both")
    mixed["spec"]["containers"][0]["resources"] = {"limits": {"aliyun.com/gpu-mem": "100", "cardwise.dev/share": "1"}}
    text = sentences.explain_pod(mixed, device_cluster())
    assert "container main: 100 of 16276 MiB (0.0061) of GPU 1 GPU-n1-1" in text
    assert "container main: device rdma-n1-0 of class rdma\n" in text
    assert "\nThe node has not given it the share yet" in text


@pytest.mark.parametrize("command", [["classes", "--help"], ["inspect", "--help"]])
def test_help_tells_of_devices(monkeypatch, command):
    assert "devices" in run(monkeypatch, lists(), *command).output
