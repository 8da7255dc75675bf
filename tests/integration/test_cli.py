"""`cardwise` as people type it, on the real API server."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cardwise.core import names
from tests.build import pod
from tests.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

BIN = Path(__file__).parents[2] / ".venv" / "bin"


def cardwise(cluster: Cluster, *args: str, program: str = "cardwise") -> subprocess.CompletedProcess[str]:
    environment = os.environ | cluster.environment()
    return subprocess.run([program, *args], capture_output=True, text=True, check=False, env=environment, timeout=60)


@pytest.fixture(scope="module")
def cluster(sim_cluster: Cluster):
    """A pod that is placed, and one that waits: four nodes cannot hold five pods that want both cards."""
    for i in range(5):
        sim_cluster.apply([pod(f"cli-{i}", gpu_count=2)])
    sim_cluster.wait(lambda: len(_placed(sim_cluster)) == 4, "four pods are placed")
    yield sim_cluster
    sim_cluster.kubectl("delete", "pod", *(f"cli-{i}" for i in range(5)), "--grace-period=0", "--force")
    sim_cluster.wait(lambda: _used(sim_cluster) == 0, "the cards are free again", 60)


def _placed(cluster: Cluster) -> dict[str, str]:
    pods = json.loads(cluster.kubectl("get", "pods", "-o", "json"))["items"]
    return {p["metadata"]["name"]: p["spec"]["nodeName"] for p in pods if names.IDX in p["metadata"]["annotations"]}


def _used(cluster: Cluster) -> int:
    shown = json.loads(cardwise(cluster, "inspect", "-o", "json").stdout)
    return sum(card["usedMiB"] for node in shown["nodes"] for card in node["cards"])


def test_inspect_shows_every_card_and_its_holder(cluster):
    summary = cardwise(cluster, "inspect").stdout.splitlines()
    assert summary[1].split() == ["sim-1", "192.0.2.1", "16276/16276", "16276/16276", "32552/32552"]
    assert summary[-1] == "130208/130208 (100%)"
    details = cardwise(cluster, "inspect", "-d", "sim-2").stdout
    (holder,) = [name for name, node in _placed(cluster).items() if node == "sim-2"]
    assert f"{holder}  default    16276            16276" in details
    assert "sim-1" not in details


def test_kubectl_inspect_cardwise_is_the_same(cluster):
    plugin = cardwise(cluster, "inspect", "cardwise", program=str(cluster.bin_dir / "kubectl"))
    assert plugin.stdout == cardwise(cluster, "inspect").stdout


def test_an_unknown_node_is_named_with_the_known_ones(cluster):
    refused = cardwise(cluster, "inspect", "nowhere")
    assert refused.returncode == 1
    assert "'nowhere' has no card" in refused.stderr
    assert "sim-1, sim-2, sim-3, sim-4" in refused.stderr


def test_explain_says_why_a_pod_waits_and_why_one_is_where_it_is(cluster):
    placed = _placed(cluster)
    (waiting,) = {f"cli-{i}" for i in range(5)} - set(placed)
    said = "Insufficient cardwise.dev/gpu"  # the sum of the nodes is used up: kube-scheduler says it by itself
    cluster.wait(lambda: said in cluster.kubectl("get", "pod", waiting, "-o", "yaml"), "said")
    text = cardwise(cluster, "explain", "pod", waiting).stdout
    assert "kube-scheduler says: 0/4 nodes are available" in text
    assert "sim-1: Insufficient empty GPU cards" in text
    assert "16276 MiB short, held by default/cli-" in text
    name, node = min(placed.items())
    assert f"It is on node {node}" in cardwise(cluster, "explain", "pod", name).stdout


def test_a_pod_that_is_not_there_and_a_cluster_that_is_not_there(cluster, tmp_path):
    refused = cardwise(cluster, "explain", "pod", "nobody", "-n", "default")
    assert "there is no pod 'nobody' in namespace 'default'" in refused.stderr
    nowhere = tmp_path / "config"
    nowhere.write_text("not: a kubeconfig")
    bad = cardwise(cluster, "inspect", "--kubeconfig", str(nowhere))
    assert bad.returncode == 1
    assert str(nowhere) in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize("program", ["cardwise", "cardwise-webhook", "cardwise-extender", "cardwise-deviceplugin"])
def test_every_program_tells_its_settings(program):
    shown = subprocess.run([BIN / program, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "Usage:" in shown
    assert program == "cardwise" or "--kubeconfig" in shown
