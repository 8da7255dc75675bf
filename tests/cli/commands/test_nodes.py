"""`cardwise nodes` as golden output."""

import json
import re

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.placement.scored.shapes import RequestSize
from cardwise.core.placement.scored.workload import Workload
from tests.cli import clusters
from tests.cli.clusters import K80, P100, Cluster, card, lists, placed, sharing_within


def run(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str):
    return clusters.run(monkeypatch, api, "nodes", *args)


def learned(*asks: tuple[RequestSize, float]) -> dict:
    """The ConfigMap of an extender that has seen these pods."""
    seen = Workload()
    for ask, times in asks:
        seen.count_arrival(ask, times)
    data = {names.WORKLOAD_REQUESTS: seen.dump(), names.WORKLOAD_POLICY: "spread"}
    return {"metadata": {"namespace": names.NAMESPACE, "name": names.WORKLOAD}, "data": data}


def typical_ask(mem: int, cpu: int = 0) -> RequestSize:
    return RequestSize(1, mem, 0, "", cpu, 0)


HALVES = learned((typical_ask(8000), 3), (typical_ask(13_000), 1))


def test_the_table(monkeypatch):
    shown = run(monkeypatch, lists(configmaps=[HALVES]))
    assert shown.stderr == ""
    # n1 has 8441 MiB free on a K80 and 12207 on a P100: a quarter of the pods can use neither.
    assert shown.stdout == (
        "NAME     GPUS  USED/TOTAL(MiB)  FREE-GPUS  LARGEST  FRAGMENTED(MiB)  ISOLATION  PODS\n"
        "n1       2/2   7069/27717       0          12207    5162 (25%)       -          3\n"
        "n2       1/2   11441/22882      0          0        0 (0%)           -          1\n"
        "CLUSTER  3/4   18510/50599      0          12207    5162 (25%)       -          4\n"
    )


def test_the_help_names_columns_of_the_table(monkeypatch):
    heads = run(monkeypatch, lists(configmaps=[HALVES])).stdout.splitlines()[0]
    named = re.findall(r"\b([A-Z][A-Z-]+): ", run(monkeypatch, lists(), "--help").stdout)
    assert named
    assert [name for name in named if name not in re.findall(r"[A-Z-]+", heads)] == []


def test_wide_tells_which_cards_and_the_classes(monkeypatch):
    api = lists(configmaps=[HALVES])
    api.change("extendedresources", "gpu-n1-1", spec={"unschedulable": True})
    ready = {"mode": "card", "state": "Ready", "multiUser": True}
    advisory = {"memory": "advisory", "memoryReason": "x", "compute": "none", "computeReason": "x"}
    api.change("extendedresources", "gpu-n2-1", status={"mps": ready, "isolation": advisory | {"memory": "mps"}})
    api.change("extendedresources", "gpu-n2-0", status={"isolation": advisory})
    assert run(monkeypatch, api, "-o", "wide", "n2").stdout == (
        "NAME     GPUS  USED/TOTAL(MiB)  FREE-GPUS  LARGEST  FRAGMENTED(MiB)  ISOLATION     PODS  UNHEALTHY  CORDONED  "
        "ONLY-NAMESPACE  MODELS\n"
        "n2       1/2   11441/22882      0          0        0 (0%)           advisory,mps  1     0          -         "
        "-               Tesla K80\n"
        "CLUSTER  2/4   18510/50599      0          8441     2110 (25%)       advisory,mps  4     n2/0       n1/1      "
        "-               Tesla K80, Tesla P100\n"
        "\n"
        "CLASS              USED/TOTAL(MiB)  FREE(MiB)  FRAGMENTED(MiB)\n"
        "big                4069/16276       0          0 (0%)\n"
        "nvidia.tesla.k80   14441/34323      8441       2110 (25%)\n"
        "nvidia.tesla.p100  4069/16276       0          0 (0%)\n"
    )


def test_gpus_that_pods_of_one_namespace_share_are_named_with_it(monkeypatch):
    pods = [sharing_within(placed("team-a", "apart", "n1", 0, 100)), placed("team-b", "plain", "n2", 1, 100)]
    api = lists(configmaps=[HALVES], pods=pods)
    _, n1, n2, cluster, *_ = run(monkeypatch, api, "-o", "wide").stdout.splitlines()
    assert ["  0:team-a  " in n1, "team" in n2, "  n1/0:team-a  " in cluster] == [True, False, True]
    document = json.loads(run(monkeypatch, api, "-o", "json").stdout)
    assert [node["onlyNamespaces"] for node in document["nodes"]] == [{"0": "team-a"}, {}]
    assert document["cluster"]["onlyNamespaces"] == {"n1/0": "team-a"}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"spec": {"unschedulable": True}}, "cordoned"),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, "NotReady"),
    ],
)
def test_a_node_that_takes_no_pods_has_no_fragments_and_says_why(monkeypatch, state, reason):
    api = lists(configmaps=[HALVES], pods=[])
    api.change("nodes", "n1", **state)
    shown = run(monkeypatch, api)
    assert shown.stderr == f"note: node n1 takes no new pods: it is {reason}\n"
    assert shown.stdout.splitlines()[1].split() == ["n1", "0/2", "0/27717", "0", "0", "0", "(0%)", "-", "0"]
    assert shown.stdout.splitlines()[3].split()[:2] == ["CLUSTER", "1/4"]
    document = json.loads(run(monkeypatch, api, "-o", "json").stdout)
    assert [node["unschedulableReason"] for node in document["nodes"]] == [reason, ""]
    assert document["nodes"][0]["cordonedGPUs"] == [], "the node is, and none of its GPUs"


def test_for_programs(monkeypatch):
    api = lists(configmaps=[HALVES])
    document = json.loads(run(monkeypatch, api, "-o", "json", "n2").stdout)
    assert document == yaml.safe_load(run(monkeypatch, api, "-o", "yaml", "n2").stdout)
    assert document["nodes"] == [
        {
            "name": "n2",
            "models": ["Tesla K80"],
            "gpus": 2,
            "unhealthyGPUs": ["0"],
            "cordonedGPUs": [],
            "onlyNamespaces": {},
            "memoryMiB": 2 * K80,
            "usedMiB": K80,
            "freeMiB": 0,
            "fragmentedMiB": 0,
            "fragmentedPercent": 0.0,
            "freeGPUs": 0,
            "largestFreeMiB": 0,
            "mps": [],
            "isolation": [],
            "pods": 1,
            "unschedulableReason": "",
        }
    ]
    assert (document["cluster"]["freeMiB"], document["cluster"]["fragmentedPercent"]) == (8441 + 12207, 25.0)
    assert [resource_class["name"] for resource_class in document["classes"]] == [
        "big",
        "nvidia.tesla.k80",
        "nvidia.tesla.p100",
    ]
    assert document["typicalPods"] == "learned"


def test_whole_free_cards_and_what_the_nodes_have_left(monkeypatch):
    """The node has two cards free and cpu for one of the pods that come; the other pod runs on it already."""
    here = {"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "4", "memory": "1Gi", "pods": "10"}}}
    pod = placed("a", "b", "n1", 0, 1000)
    pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2"}}
    api = lists(
        nodes=[here],
        extendedresources=[card("n1", 0), card("n1", 1), card("n1", 2, memory=P100)],
        pods=[pod],
        configmaps=[learned((typical_ask(1000, 2000), 1), (typical_ask(1000, 3000), 1))],
    )
    row = run(monkeypatch, api).stdout.splitlines()[1].split()
    free = 2 * K80 + P100 - 1000
    assert row == ["n1", "3/3", f"1000/{2 * K80 + P100}", "2", f"{P100}", f"{free // 2}", "(50%)", "-", "1"]


def test_where_nothing_is_learned_the_running_pods_count_and_it_says_so(monkeypatch):
    shown = run(monkeypatch, lists(configmaps=[learned()]))
    assert (
        "note: fragmentation is measured with the requests of the pods that hold GPUs now: the extender has not seen "
        "enough pods yet" in shown.stderr
    )
    assert (
        "note: fragmentation is measured with the requests of the pods that hold GPUs now: there is no ConfigMap "
        "cardwise-workload in "
        "cardwise-system" in run(monkeypatch, lists()).stderr
    )
    assert json.loads(run(monkeypatch, lists(), "-o", "json").stdout)["typicalPods"] == "running"
    nobody = run(monkeypatch, lists(pods=[]))
    assert "note: fragmentation cannot be measured, because no pod that uses GPUs" in nobody.stderr
    assert nobody.stdout.splitlines()[1].split() == ["n1", "2/2", "0/27717", "2", "16276", "-", "-", "0"]
    document = json.loads(run(monkeypatch, lists(pods=[]), "-o", "json").stdout)
    assert (document["cluster"]["fragmentedMiB"], document["typicalPods"]) == (None, None)


def test_a_viewer_who_may_read_less_is_told_what_is_less_exact(monkeypatch):
    api = lists(configmaps=[HALVES])
    whole = run(monkeypatch, api).stdout
    api.forbid("nodes", "configmaps")
    shown = run(monkeypatch, api)
    assert shown.exit_code == 0
    assert 'assuming unlimited cpu and memory of nodes: User "jane" cannot list resource "nodes"' in shown.stderr
    assert "you may not read the ConfigMap cardwise-workload in cardwise-system" in shown.stderr
    assert [line.split()[:5] for line in shown.stdout.splitlines()] == [line.split()[:5] for line in whole.splitlines()]


def test_a_spoilt_workload_and_an_unknown_node(monkeypatch):
    for text in ("{}", '{"version":1,"requests":[[1,8000,0,"",0,0,NaN]]}', "[" * 200_000):
        spoilt = HALVES | {"data": {names.WORKLOAD_REQUESTS: text}}
        assert "the extender's saved data cannot be read" in run(monkeypatch, lists(configmaps=[spoilt])).stderr
    refused = run(monkeypatch, lists(), "n9")
    assert refused.exit_code == 1
    assert "node 'n9' has no GPU that Cardwise shares; nodes that have: n1, n2" in refused.stderr
