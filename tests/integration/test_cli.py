"""`cardwise` as people type it, on the real API server."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cardwise.core import names
from cardwise.kube import paths
from tests.build import pod
from tests.cluster import Cluster
from tests.cluster.cards import card_uuid
from tests.integration.sharing import Space, assigned, deployment, workload

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

BIN = Path(__file__).parents[2] / ".venv" / "bin"


def cardwise(
    cluster: Cluster, *args: str, program: str = "cardwise", timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | cluster.environment()
    return subprocess.run(
        [program, *args], capture_output=True, text=True, check=False, env=environment, timeout=timeout
    )


def test_doctor_finds_a_sound_cluster_sound_and_an_extender_that_is_gone(sim_cluster):
    said = cardwise(sim_cluster, "doctor")
    assert said.returncode == 0, said.stdout
    assert "placed on a card of sim-" in said.stdout
    assert "OK       webhook" in said.stdout
    sim_cluster.process("extender").stop()
    try:
        said = cardwise(sim_cluster, "doctor")
        assert said.returncode == 1
        assert "PROBLEM  scheduler" in said.stdout
        assert "does not reach the extender" in said.stdout
    finally:
        sim_cluster.process("extender").restart()
        sim_cluster.parts.wait_ready("extender", 60)
    assert "cardwise-doctor" not in sim_cluster.kubectl("get", "pods")


@pytest.fixture
def space(sim_cluster: Cluster):
    made = Space(sim_cluster, "cli-cards")
    yield made
    for index in (0, 1):
        _patch(made, index, None)
    made.clear()
    made.wait(lambda: _used(sim_cluster) == 0, "nothing is held any more", 90)


def _patch(space: Space, index: int, mark: bool | None) -> None:
    """As people do without our program."""
    name = names.extended_resource_name(card_uuid("sim-4", index))
    space.cluster.api.patch(paths.extendedresources(name), {"spec": {"unschedulable": mark}})


def _closed(space: Space, index: int) -> bool:
    """Whether the extender knows of the cordon: it says that nothing is free on the card."""
    name = names.extended_resource_name(card_uuid("sim-4", index))
    return space.cluster.api.get(paths.extendedresources(name))["status"].get("freeMiB") == 0


def _bound(space: Space) -> dict[str, int]:
    """Card by name of the pods that have a node and do not end."""
    there = [p for p in space.pods() if p["spec"].get("nodeName") and not p["metadata"].get("deletionTimestamp")]
    return {p["metadata"]["name"]: assigned(p).indices()[0] for p in there}


@pytest.mark.timeout(480)
def test_a_card_is_cordoned_drained_and_given_back(space):
    sim_cluster = space.cluster
    space.kubectl("apply", "-f", "-", stdin=json.dumps(deployment("web", 1, gpu_mem=4000, node="sim-4")))
    space.wait(lambda: len(_bound(space)) == 1, "the Deployment's pod has a card")
    ((web, first),) = _bound(space).items()
    said = cardwise(sim_cluster, "cordon", f"sim-4/{first}", "--reason", "it smokes")
    assert (said.returncode, said.stdout.rstrip().rpartition(" ")[2]) == (0, "cordoned"), said.stderr
    space.wait(lambda: _closed(space, first), "the extender knows")
    # Binpack would take the card that has the least left; what runs there stays.
    assert space.put(workload("beside", gpu_mem=1000, node="sim-4")) == ("sim-4", str(1 - first))
    assert _bound(space)[web] == first
    first_name = names.extended_resource_name(card_uuid("sim-4", first))
    heads, row = sim_cluster.kubectl("get", "er", first_name).splitlines()
    assert row[heads.index("CORDONED") :].split()[0] == "true"

    _patch(space, 1 - first, True)
    space.wait(lambda: _closed(space, 1 - first), "the extender knows")
    space.create(workload("waits", gpu_mem=1000, node="sim-4"))
    space.wait(lambda: "Every GPU card that would do is cordoned" in space.reasons("waits"), "it is told why", 90)
    explained = cardwise(sim_cluster, "explain", "pod", "waits", "-n", space.name).stdout
    assert "sim-4: Every GPU card that would do is cordoned" in explained
    cardwise(sim_cluster, "uncordon", f"sim-4/{1 - first}")
    space.wait(lambda: _bound(space).get("waits") == 1 - first, "it is tried again", 90)

    drained = cardwise(sim_cluster, "drain", f"sim-4/{first}", "--timeout", "120s", timeout=180)
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert f"evicting pod {space.name}/{web}\n" in drained.stdout
    space.wait(lambda: [card for name, card in _bound(space).items() if name.startswith("web")] == [1 - first], "moved")
    top = json.loads(cardwise(sim_cluster, "top", "sim-4", "-o", "json").stdout)
    cards = top["nodes"][0]["cards"]
    assert [card["cordoned"] for card in cards] == [index == first for index in (0, 1)]
    assert {one["name"] for one in cards[1 - first]["holders"]} == set(_bound(space))
    assert cards[first]["holders"] == []


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


def test_kubectl_completes_our_commands_and_the_cards_of_the_cluster(cluster):
    """By what its completion in a shell runs."""

    def completed(*words: str) -> list[str]:
        return cardwise(
            cluster, "__complete", "cardwise", *words, program=str(cluster.bin_dir / "kubectl")
        ).stdout.split()

    assert "uncordon" in completed("un")
    assert "sim-4/1" in completed("cordon", "")


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
