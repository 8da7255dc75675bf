"""`cardwise quota` as people see it."""

import json

import yaml

from cardwise.cli.render import quotatable
from cardwise.core.placement import totals
from cardwise.core.placement.totals import EntryView
from cardwise.kube import clusterstate
from tests.build import gpu_quota, resource_quota
from tests.cli.clusters import K80_CLASS, Cluster, lists

NATIVE = resource_quota(
    {"requests.cardwise.dev/nvidia.tesla.k80": "5", "requests.aliyun.com/gpu-mem": "65536", "pods": "10"},
    namespace="team-a",
    used={"requests.cardwise.dev/nvidia.tesla.k80": "3", "pods": "4"},
)
OTHERS = gpu_quota({"model": "Tesla P100", "memoryMiB": 5000}, namespace="team-b", name="b", onExceed="Refuse")


def entries(api: Cluster, namespace: str = "") -> list[EntryView]:
    seen = clusterstate.read_cluster_state(api.kube, namespace=namespace, addresses=False)
    return totals.quota_entries(seen.ledger, seen.quotas, seen.missing_class, namespace)


def table(api: Cluster, namespace: str = "", *, wide: bool = False) -> str:
    return quotatable.table(entries(api, namespace), clusterstate.list_native_quotas(api.kube, namespace), wide=wide)


def test_both_layers_of_one_namespace():
    api = lists(resourcequotas=[NATIVE])
    api.add("gpuquotas", OTHERS)
    assert table(api, "team-a") == (
        "NAMESPACE  GPUQUOTA  TYPE              SHARES  MIB          WHOLE-GPUS  ON-EXCEED\n"
        "team-a     team      nvidia.tesla.k80  2/2     13441/-      1/1         Wait\n"
        "team-a     team      all GPUs          2/-     13441/32768  1/-         Wait\n"
        "\n"
        "NAMESPACE  RESOURCEQUOTA  RESOURCE                                USED/HARD\n"
        "team-a     gpus           requests.aliyun.com/gpu-mem             -/65536\n"
        "team-a     gpus           requests.cardwise.dev/nvidia.tesla.k80  3/5\n"
    )


def test_all_namespaces_and_a_quota_by_model_that_refuses():
    api = lists()
    api.add("gpuquotas", OTHERS)
    rows = table(api).splitlines()
    assert rows[-1].split() == ["team-b", "b", "Tesla", "P100", "1/-", "4069/5000", "0/-", "Refuse"]
    assert [row.split()[0] for row in rows[1:]] == ["team-a", "team-a", "team-b"]


def test_wide_names_the_pods_of_each_entry_the_largest_first():
    assert table(lists(), "team-a", wide=True).split("\n\n")[1] == (
        "NAMESPACE  GPUQUOTA  TYPE              POD       NODE  SHARES  MIB    WHOLE-GPUS\n"
        "team-a     team      nvidia.tesla.k80  train     n2    1       11441  1\n"
        "team-a     team      nvidia.tesla.k80  notebook  n1    1       2000   0\n"
        "team-a     team      all GPUs          train     n2    1       11441  1\n"
        "team-a     team      all GPUs          notebook  n1    1       2000   0\n"
    )


def test_what_a_vanished_pod_still_holds_is_counted_and_marked():
    api = lists(pods=[])
    held = {"podUID": "u", "namespace": "team-a", "name": "gone", "memoryMiB": 3000}
    api.change("extendedresources", "gpu-n1-0", status={"reported": [held], "terminating": [held]})
    text = table(api, "team-a", wide=True)
    assert "1/2     3000/-" in text
    assert "gone (reported)" in text


def test_what_only_a_node_says_of_a_pod_is_in_no_quota():
    api = lists(pods=[])
    held = {"podUID": "u", "namespace": "team-a", "name": "gone", "memoryMiB": 3000}
    api.change("extendedresources", "gpu-n1-0", status={"reported": [held]})
    text = table(api, "team-a", wide=True)
    assert "0/2     0/-" in text
    assert "gone" not in text


def test_for_programs():
    api = lists(resourcequotas=[NATIVE])
    shown = quotatable.as_json(entries(api, "team-a"), clusterstate.list_native_quotas(api.kube, "team-a"))
    assert yaml.safe_load(yaml.safe_dump(shown)) == json.loads(json.dumps(shown))
    first, second = shown["gpuQuotas"]
    assert (first["class"], first["hard"]) == (K80_CLASS, {"shares": 2, "gpus": 1})
    assert first["used"] == {"shares": 2, "memoryMiB": 13441, "gpus": 1}
    assert first["pods"][0] == {
        "name": "train",
        "uid": "team-a-train",
        "node": "n2",
        "shares": 1,
        "memoryMiB": 11441,
        "gpus": 1,
    }
    assert "class" not in second
    assert "pods" not in shown["resourceQuotas"][0]["hard"]
