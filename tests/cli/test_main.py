"""The commands by their arguments: what comes out, where, and with which errors."""

import json
import sys

import pytest
import yaml
from click.testing import CliRunner, Result

from cardwise.cli import main
from tests.cli.worlds import K80_CLASS, Lists, lists, resource_class, waiting


def run(monkeypatch: pytest.MonkeyPatch, api: Lists, *args: str) -> Result:
    monkeypatch.setattr(main.KubeClient, "load", lambda _path: api)
    return CliRunner().invoke(main.cli, args)


def test_classes_by_every_output(monkeypatch):
    table = run(monkeypatch, lists(), "classes").output
    assert "NAMESPACE" not in table
    assert "NAMESPACE" in run(monkeypatch, lists(), "classes", "-o", "wide").output
    of_one = run(monkeypatch, lists(), "classes", K80_CLASS).output
    assert (table.split()[:9], "big" in of_one, "NAMESPACE" in of_one) == (of_one.split()[:9], False, True)
    as_json = json.loads(run(monkeypatch, lists(), "classes", "-o", "json").output)
    assert as_json == yaml.safe_load(run(monkeypatch, lists(), "classes", "-o", "yaml").output)
    assert [one["name"] for one in as_json["classes"]] == ["big", K80_CLASS]


def test_an_unknown_class_is_named_with_the_known_ones_and_a_broken_one_with_its_mistake(monkeypatch):
    refused = run(monkeypatch, lists(), "classes", "k80")
    assert refused.exit_code == 1
    assert "no ResourceClass 'k80' that can be read; those there are: big, nvidia.tesla.k80" in refused.stderr
    broken = lists(resourceclasses=[resource_class("k80", selector={})])
    assert (
        "warning: ResourceClass k80: spec.selector: an empty selector"
        in run(monkeypatch, broken, "classes", "k80").stderr
    )


def test_a_cluster_without_classes_and_quotas_says_so(monkeypatch):
    api = lists()
    del api.objects["resourceclasses"], api.objects["gpuquotas"]
    assert "there is no ResourceClass yet" in run(monkeypatch, api, "classes").stderr
    said = run(monkeypatch, api, "quota", "-n", "team-a")
    assert said.exit_code == 0
    assert said.stdout == ""
    assert "namespace 'team-a' has no GPUQuota" in said.stderr
    assert json.loads(run(monkeypatch, api, "quota", "-A", "-o", "json").stdout) == {
        "gpuQuotas": [],
        "resourceQuotas": [],
    }


def test_quota_of_one_namespace_and_of_all(monkeypatch):
    assert "13441/32768" in run(monkeypatch, lists(), "quota", "-n", "team-a").output
    assert "13441/32768" in run(monkeypatch, lists(), "quota", "-A").output
    assert "13441/32768" not in run(monkeypatch, lists(), "quota", "-n", "team-b").output


def test_explain_pod_of_a_full_quota(monkeypatch):
    api = lists()
    limits = {f"cardwise.dev/{K80_CLASS}": "1", "aliyun.com/gpu-mem": "100", "cardwise.dev/share": "1"}
    api.objects["pods"].append(waiting("team-a", "more", limits))
    text = run(monkeypatch, api, "explain", "pod", "more", "-n", "team-a").output
    assert f"asks for 100 MiB of class {K80_CLASS} (container main)" in text
    assert f"GPUQuota team closes {K80_CLASS}: 2 of 2 shares used, 1 asked." in text


def test_a_missing_right_is_told_with_what_to_do(monkeypatch, capsys):
    api = lists()
    api.forbidden = ("pods",)
    monkeypatch.setattr(main.KubeClient, "load", lambda _path: api)
    monkeypatch.setattr(sys, "argv", ["cardwise", "classes"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert "the right to list pods in the whole cluster is missing" in str(ended.value.code)
    assert "ClusterRole" in str(ended.value.code)
    monkeypatch.setattr(sys, "argv", ["cardwise", "quota", "-n", "team-a"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert "the right to list pods in namespace team-a is missing" in str(ended.value.code)


def test_who_may_not_read_nodes_sees_classes_and_quotas(monkeypatch):
    api = lists()
    api.forbidden = ("nodes",)
    assert run(monkeypatch, api, "classes").exit_code == 0
    assert run(monkeypatch, api, "quota", "-A").exit_code == 0
