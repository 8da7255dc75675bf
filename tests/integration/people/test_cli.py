"""`cardwise` as people type it, on the real API server."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import names
from cardwise.kube import paths
from tests.build import container, pod
from tests.cluster import Cluster
from tests.cluster.cards import card_uuid
from tests.cluster.controlplane import SCHEDULER
from tests.cluster.processes import PATIENCE
from tests.integration.commands import cardwise
from tests.integration.sharing import Space, assigned, deployment, inspect, prioritize, workload

pytestmark = [pytest.mark.cluster("sim"), pytest.mark.in_order]

BIN = Path(__file__).parents[3] / ".venv" / "bin"


def process(cluster: Cluster, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | cluster.environment()
    return subprocess.run(
        [program, *args], capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE
    )


def doctor_says(space: Space, code: int, *texts: str) -> None:
    """Once it does: on a busy machine an extender may be late with its Lease, and kube-scheduler with the probe."""

    def so() -> bool:
        output = process(space.cluster, "cardwise", "doctor")
        if output.returncode != code or not all(text in output.stdout for text in texts):
            raise LookupError(output.stdout + output.stderr)
        return True

    space.wait(so, f"doctor says {texts}")


def test_doctor_finds_a_sound_cluster_sound_and_an_extender_that_is_gone(cluster, space):
    (node,) = space.nodes()
    doctor_says(space, 0, f"placed on a GPU of {node}", "OK       webhook")
    cluster.process("extender").stop()
    try:
        doctor_says(space, 1, "PROBLEM  scheduler", "cannot reach the extender")
    finally:
        cluster.process("extender").restart()
        cluster.parts.wait_ready("extender")
    assert "cardwise-doctor" not in str(cluster.api.get(paths.pods("default")))
    gone = lambda: "cardwise-doctor" not in str(cluster.api.get(paths.pods()))  # noqa: E731
    space.wait(gone, "its kubelet has ended the probe")
    space.wait(lambda: "cardwise-doctor" not in str(inspect(cluster)), "its share is free")


def test_the_probe_preempts_no_pod(cluster: Cluster, space: Space):
    """Without a class of its own the probe has priority 0, or the priority that the cluster gives by default."""
    (node,) = space.nodes()
    prioritize(cluster, {"below-all": -5})
    cards = [index for of_node, index in inspect(cluster) if of_node == node]
    names_of = [f"low-{index}" for index in cards]
    for name in names_of:
        space.create(workload(name, gpu_count=1, spec={"priorityClassName": "below-all"}))
    space.running(*names_of)
    before = {pod["metadata"]["uid"] for pod in space.pods()}
    output = process(cluster, "cardwise", "doctor").stdout
    assert "which has no capacity now" in output or "no GPU is free" in output, output
    assert {pod["metadata"]["uid"] for pod in space.pods()} == before
    assert not any("deletionTimestamp" in pod["metadata"] for pod in space.pods())


def test_an_unwired_kube_scheduler_makes_pods_disappear_and_doctor_says_so(cluster: Cluster, space: Space):
    (node,) = space.nodes()
    keeper = cluster.process("simnodes")  # it starts containers without a card, which no device plugin does
    keeper.stop()
    cluster.process(SCHEDULER).stop()
    cluster.control_plane.start_scheduler([])
    try:
        space.create(workload("web", gpu_mem=100))
        space.wait(lambda: "deletionTimestamp" in space.get("web")["metadata"], "the extender deletes it")
        disappeared = f"({space.name}/web) disappeared: bound without the extender, so without a GPU, and then deleted"
        doctor_says(space, 1, f"the probe pod was bound to {node} without a GPU", disappeared)
        assert "check whether kube-scheduler calls the extender" in cardwise(cluster, "doctor", "--no-probe").stdout
        output = cardwise(cluster, "doctor").stdout
        # No kube-scheduler is seen in pods, as in managed control planes.
        assert (
            "--reset-then-reuse-values --set scheduler.mode=own,scheduler.image=registry.k8s.io/kube-scheduler:v1."
            in output
        )
    finally:
        cluster.process(SCHEDULER).stop()
        cluster.control_plane.start_scheduler(cluster.parts.stanzas())
        keeper.restart()
    space.wait_for_deletion("web")
    doctor_says(space, 0, f"placed on a GPU of {node}")


def test_doctor_says_why_pods_of_a_part_are_refused_and_the_remedy_lets_them_in(cluster: Cluster, space: Space):
    """By the DaemonSet of a part that mounts a folder of its node, as the chart's do."""
    space.nodes()
    system, labels = names.NAMESPACE, {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}
    pod_spec = {
        "containers": [{"name": "mps", "image": "cardwise"}],
        "volumes": [{"name": "root", "hostPath": {"path": "/run"}}],
        "tolerations": [{"operator": "Exists"}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod_spec}
    daemonset = {
        "metadata": {"name": "cardwise-mps", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    label = "pod-security.kubernetes.io/enforce"
    cluster.kubectl("label", "namespace", system, f"{label}=baseline")
    path = paths.namespaced("/apis/apps/v1", "daemonsets", system)
    cluster.api.create(path, daemonset)
    try:
        remedy = f"kubectl label namespace {system} {label}=privileged --overwrite"
        doctor_says(
            space, 1, 'DaemonSet cardwise-mps cannot create pods: violates PodSecurity "baseline:latest"', remedy
        )
        cluster.kubectl(*remedy.split()[1:])
        admitted = lambda: cluster.api.get(f"{path}/cardwise-mps")["status"].get("currentNumberScheduled")  # noqa: E731
        space.wait(lambda: bool(admitted()), "its pods are created")
        assert "can be created" not in cardwise(cluster, "doctor", "--no-probe").stdout
    finally:
        cluster.api.delete(f"{path}/cardwise-mps")
        cluster.kubectl("label", "namespace", system, f"{label}-")
        space.wait(lambda: "cardwise-mps" not in str(cluster.api.get(paths.pods(system))), "its pods are gone")


def test_kubectl_gives_the_plugin_what_stands_behind_its_name_and_nothing_else(cluster: Cluster, tmp_path: Path):
    config = yaml.safe_load((cluster.state_dir / "kubeconfig" / "admin").read_text())
    good = config["contexts"][0]["context"]
    config["clusters"].append({"name": "nowhere", "cluster": {"server": "https://127.0.0.1:9"}})
    config["contexts"] = [
        {"name": "good", "context": good},
        {"name": "bad", "context": good | {"cluster": "nowhere"}},
    ]
    config["current-context"] = "bad"
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    environment = os.environ | cluster.environment() | {"KUBECONFIG": str(file)}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"

    def kubectl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["kubectl", *words], capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE
        )

    for words in (["--context", "good", "quota", "-A"], ["quota", "-A", "--context=good"]):
        output = kubectl("cardwise", *words)
        assert output.returncode == 0, output.stderr
    assert kubectl("cardwise", "quota", "-A").returncode != 0, "the current context is tried"
    before = kubectl("--context", "good", "cardwise", "quota", "-A")
    # When kubectl takes it, docs/admin.md and the help of the plugin have to say so.
    assert "flags cannot be placed before plugin name: --context" in before.stderr
    assert "kubectl cardwise --context X top" in kubectl("cardwise", "--help").stdout


def _patch(space: Space, index: int, mark: bool | None) -> None:
    """As people do without our program."""
    name = names.extended_resource_name(card_uuid(space.own_nodes[0], index))
    space.cluster.api.patch(paths.extendedresources(name), {"spec": {"unschedulable": mark}})


def _closed(space: Space, index: int) -> bool:
    """Whether the extender knows of the cordon: it says that nothing is free on the card."""
    name = names.extended_resource_name(card_uuid(space.own_nodes[0], index))
    return space.cluster.api.get(paths.extendedresources(name))["status"].get("freeMiB") == 0


def _bound(space: Space) -> dict[str, int]:
    """Card by name of the pods that have a node and do not end."""
    there = [p for p in space.pods() if p["spec"].get("nodeName") and not p["metadata"].get("deletionTimestamp")]
    return {p["metadata"]["name"]: assigned(p).indices()[0] for p in there}


def test_a_card_is_cordoned_drained_and_given_back(space):
    cluster = space.cluster
    (node,) = space.nodes()
    space.apply(deployment("web", 1, gpu_mem=4000))
    space.wait(lambda: len(_bound(space)) == 1, "the Deployment's pod has a card")
    ((web, first),) = _bound(space).items()
    output = cardwise(cluster, "cordon", f"{node}/{first}", "--reason", "it smokes")
    assert (output.returncode, output.stdout.rstrip().rpartition(" ")[2]) == (0, "cordoned"), output.stderr
    space.wait(lambda: _closed(space, first), "the extender knows")
    # Binpack would take the card that has the least left; what runs there stays.
    assert space.create_and_locate(workload("beside", gpu_mem=1000)) == (node, str(1 - first))
    assert _bound(space)[web] == first
    first_name = names.extended_resource_name(card_uuid(node, first))
    heads, row = cluster.kubectl("get", "er", first_name).splitlines()
    assert row[heads.index("CORDONED") :].split()[0] == "true"

    _patch(space, 1 - first, True)
    space.wait(lambda: _closed(space, 1 - first), "the extender knows")
    space.create(workload("waits", gpu_mem=1000))
    space.wait(lambda: "All suitable GPUs are cordoned" in space.reasons("waits"), "it is told why")
    explained = cardwise(cluster, "explain", "pod", "waits", "-n", space.name).stdout
    assert f"{node}: All suitable GPUs are cordoned" in explained
    cardwise(cluster, "uncordon", f"{node}/{1 - first}")
    space.wait(lambda: _bound(space).get("waits") == 1 - first, "it is tried again")

    drained = cardwise(cluster, "drain", f"{node}/{first}", "--timeout", f"{PATIENCE:.0f}s")
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert f"evicting pod {space.name}/{web}\n" in drained.stdout
    space.wait(lambda: [card for name, card in _bound(space).items() if name.startswith("web")] == [1 - first], "moved")
    top = json.loads(cardwise(cluster, "top", node, "-o", "json").stdout)
    cards = top["nodes"][0]["gpus"]
    assert [card["cordoned"] for card in cards] == [index == first for index in (0, 1)]
    assert {holder["name"] for holder in cards[1 - first]["holders"]} == set(_bound(space))
    assert cards[first]["holders"] == []


@pytest.fixture(scope="module")
def crowded(cluster: Cluster):
    """Pods that are placed, and one that waits: four nodes cannot hold five pods that want both cards."""
    with Space(cluster, "crowded") as space:
        space.nodes(4)
        for i in range(5):
            space.create(pod(f"cli-{i}", namespace=space.name, gpu_count=2))
        space.wait(lambda: len(_placed(space)) == 4, "four pods are placed")
        yield space


def _placed(space: Space) -> dict[str, str]:
    """Node by pod."""
    return {p["metadata"]["name"]: p["spec"]["nodeName"] for p in space.pods() if p["spec"].get("nodeName")}


def test_explain_says_why_a_workload_has_no_pod_and_what_became_of_one_that_is_gone(space):
    def explained(*words: str) -> str:
        output = cardwise(space.cluster, "explain", *words, "-n", space.name)
        assert output.returncode == 0, output.stderr
        return output.stdout

    space.nodes()
    space.apply(deployment("web", 1, gpu_mem=4000))
    space.wait(lambda: len(_bound(space)) == 1, "the Deployment's pod has a card")
    (web,) = _bound(space)
    deployments = paths.namespaced("/apis/apps/v1", "deployments", space.name, "web")
    space.cluster.api.patch(deployments, {"spec": {"replicas": 0}})
    space.wait_for_deletion(web)
    assert f"deployment {space.name}/web has no pod.\nIt is scaled to zero" in explained("deploy/web")
    gone = f"SuccessfulDelete: ReplicaSet {web.rpartition('-')[0]}: Deleted pod: {web}\n"
    space.wait(lambda: gone in explained(web), "its controller says that it has deleted it")
    assert f"pod {space.name}/{web} no longer exists. Its last events:\n" in explained(web)

    every_card = container() | {"env": [{"name": names.ENV_VISIBLE_DEVICES, "value": "all"}]}
    space.apply(deployment("refused", 1, containers=[every_card]))
    refused = "has no pod.\nKubernetes could not create a pod: "
    space.wait(lambda: refused in explained("deploy/refused"), "the ReplicaSet says why it makes no pods")
    assert "spec.containers[main].env" in explained("deploy/refused")

    template = {"spec": {"containers": [container(gpu_mem=100)], "restartPolicy": "Never"}}
    jobs = paths.jobs(space.name)
    space.cluster.api.create(jobs, {"metadata": {"name": "later"}, "spec": {"suspend": True, "template": template}})
    assert "It is suspended (spec.suspend): it creates pods once that is set to false.\n" in explained("job/later")


def test_inspect_shows_every_card_and_its_holder(cluster, crowded):
    first, second, *_ = crowded.own_nodes
    summary = cardwise(cluster, "inspect").stdout.splitlines()
    assert summary[1].split() == [first, "192.0.2.1", "16276/16276", "16276/16276", "32552/32552"]
    assert summary[-1] == "130208/130208 (100%)"
    details = cardwise(cluster, "inspect", "-d", second).stdout
    (holder,) = [name for name, node in _placed(crowded).items() if node == second]
    rows = [line.split()[:4] for line in details.splitlines()]
    assert [holder, crowded.name, "16276", "16276"] in rows
    assert first not in details


def test_kubectl_inspect_cardwise_is_the_same(cluster, crowded):
    plugin = process(cluster, str(cluster.bin_dir / "kubectl"), "inspect", "cardwise")
    assert plugin.stdout == cardwise(cluster, "inspect").stdout


def test_kubectl_completes_our_commands_and_the_cards_of_the_cluster(cluster, crowded):
    """By what its completion in a shell runs."""

    def completed(*words: str) -> list[str]:
        return process(cluster, str(cluster.bin_dir / "kubectl"), "__complete", "cardwise", *words).stdout.split()

    assert "uncordon" in completed("un")
    # It waits for the API server for two seconds only.
    crowded.wait(lambda: f"{crowded.own_nodes[3]}/1" in completed("cordon", ""), "the cards are offered")
