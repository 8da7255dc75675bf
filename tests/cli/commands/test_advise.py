"""`cardwise advise`: what workloads use, the shares that fit, and what these would bring."""

import json
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import Result

from cardwise.cli import advice
from cardwise.cli.cluster.frameworks import recognise_framework
from cardwise.cli.commands import advise
from cardwise.core.api import assignment, names
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.decoded import Json
from cardwise.gpus.usagereport import ContainerUsage, UsageReport
from cardwise.kube import paths
from tests.cli import clusters
from tests.cli.clusters import Cluster, card, placed

A100 = 81920  # MiB
PARTS = paths.pods("cardwise-system")
MANAGED = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}


def pod_of(workload: str, name: str, node: str, index: int, mib: int, **container: Any) -> Json:
    """A running pod of a Deployment with a share; container: fields of its container."""
    pod = placed("team-a", name, node, index, mib, total=A100)
    owner = {"kind": "ReplicaSet", "name": f"{workload}-1a2b", "uid": "u", "controller": True}
    pod["metadata"] |= {"ownerReferences": [owner], "labels": {"pod-template-hash": "1a2b"}}
    limits = {names.GPU_MEM: str(mib)}
    pod["spec"]["containers"] = [{"name": "main", "resources": {"limits": limits}, **container}]
    pod["status"] = {"phase": "Running"}
    return pod


def usage(workload: str, pod: str, granted: int, peaks: dict[int, int], **fields: Any) -> ContainerUsage:
    return ContainerUsage(
        namespace="team-a",
        pod=pod,
        container="main",
        workload=f"Deployment/{workload}",
        gpu="GPU-n1-0",
        granted_mib=granted,
        peaks_mib=peaks,
        **fields,
    )


def manager(api: Cluster, node: str, *usages: ContainerUsage) -> None:
    """The MPS manager of a node, with what it remembers."""
    metadata = {"namespace": "cardwise-system", "name": f"mps-{node}", "labels": MANAGED}
    api.add("pods", {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}})
    report = UsageReport(node=node, observed_seconds=7200.0, containers=list(usages))
    api.answers[f"{PARTS}/mps-{node}:9400/proxy/usage"] = msgspec.json.encode(report)


def deployment(name: str, **resources: Any) -> Json:
    template = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    return {"metadata": {"namespace": "team-a", "name": name}, "spec": {"template": template}}


@pytest.fixture
def api() -> Cluster:
    """Two GPUs, each with two pods of `web`, which has 40,000 MiB and uses 9,000; `chat` is a vLLM on the third."""
    pods = [pod_of("web", f"web-{i}", "n1", i // 2, 40000) for i in range(4)]
    pods += [pod_of("chat", "chat-0", "n2", 0, 60000, image="docker.io/vllm/vllm-openai:v0.10")]
    api = Cluster({"extendedresources": [card("n1", i, "A100", A100) for i in range(2)], "pods": pods})
    api.add("extendedresources", card("n2", 0, "A100", A100))
    allocatable = {"cpu": "64", "memory": "256Gi", "pods": "110"}
    api.add("nodes", *({"metadata": {"name": node}, "status": {"allocatable": allocatable}} for node in ("n1", "n2")))
    api.add("deployments", deployment("web", limits={names.GPU_MEM: "40000"}))
    manager(api, "n1", *(usage("web", f"web-{i}", 40000, {2000: 60, 8000: 59, 9000: 1}) for i in range(4)))
    manager(api, "n2", usage("chat", "chat-0", 60000, {59000: 120}))
    return api


def run(monkeypatch: pytest.MonkeyPatch, api: Cluster, *args: str) -> Result:
    return clusters.run(monkeypatch, api, "advise", "-n", "team-a", *args)


SCREEN = """\
WORKLOAD         CONTAINER  PODS  REQUESTED  P50    P99    PEAK   RECOMMENDED  FRAMEWORK
Deployment/chat  main       1     60000      59000  59000  59000  60000        vLLM (preallocates)
Deployment/web   main       4     40000      2000   8000   9000   10368        unknown

Deployment/chat, container main: vLLM takes its share when it starts: lower --gpu-memory-utilization to learn more
Deployment/web: 12 more pods of this kind would fit; 1 more GPU would be empty
note: use is what the nodes' MPS managers remember: at least the last 2h; the margin is 15 %
"""


def test_the_screen(monkeypatch, api):
    completed = run(monkeypatch, api)
    assert completed.exit_code == 0, completed.output
    notes = [line for line in completed.output.splitlines() if "cardwise-workload" not in line]
    assert "\n".join(notes) + "\n" == SCREEN


def test_json_has_the_numbers_and_the_source_of_what_is_known_of_a_framework(monkeypatch, api):
    document = json.loads(run(monkeypatch, api, "-o", "json", "deploy/web").stdout)
    (container,) = document["containers"]
    assert container["recommendedMiB"] == 10368
    assert container["knownMinutes"] == 480
    assert container["framework"] is None
    assert document["effects"] == [
        {"workload": "Deployment/web", "morePods": 12, "moreEmptyGPUs": 1, "unplacedPods": 0}
    ]
    (chat,) = json.loads(run(monkeypatch, api, "-o", "json", "deploy/chat").stdout)["containers"]
    assert chat["framework"]["preallocates"]
    assert chat["framework"]["source"].startswith("https://docs.vllm.ai/")


def test_yaml_is_a_patch_of_the_workload_and_names_the_command(monkeypatch, api):
    completed = run(monkeypatch, api, "-o", "yaml")
    assert "kubectl patch deployment web -n team-a --patch-file FILE" in completed.stdout
    assert yaml.safe_load(completed.stdout) == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "team-a"},
        "spec": {
            "template": {"spec": {"containers": [{"name": "main", "resources": {"limits": {names.GPU_MEM: "10368"}}}]}}
        },
    }
    assert not api.sent("patch")


def test_a_share_that_the_template_does_not_name_is_only_described(monkeypatch, api):
    api.replace("deployments", deployment("web", limits={"cardwise.dev/nvidia.a100": "1"}))
    completed = run(monkeypatch, api, "-o", "yaml")
    assert yaml.safe_load(completed.stdout) is None
    assert "its share is not an amount of its own in limits" in completed.stdout


def test_without_managers_nothing_is_recommended_and_it_says_so(monkeypatch, api):
    for pod in api.objects("pods"):
        if pod["metadata"]["namespace"] == "cardwise-system":
            api.remove(paths.pods("cardwise-system", pod["metadata"]["name"]))
    completed = run(monkeypatch, api)
    assert completed.exit_code == 0
    assert "no use is known: no MPS manager runs in namespace cardwise-system" in completed.output


def test_a_node_that_does_not_answer_is_named(monkeypatch, api):
    api.answers[f"{PARTS}/mps-n2:9400/proxy/usage"] = b"<html>"
    completed = run(monkeypatch, api)
    assert "the use on n2 is unknown: its MPS manager sent an unreadable report" in completed.output
    assert "Deployment/web" in completed.output


@pytest.mark.parametrize(
    ("requested", "peaks", "image", "recommended", "reason"),
    [
        (40000, {9000: 60}, "", 10368, None),
        (10000, {9000: 60}, "", 10000, None),  # with the margin it needs no less
        (8138, {8684: 60}, "", 8138, None),  # full, and the context on top
        (8138, {9684: 60}, "", 11200, None),
        (8138, {}, "", None, "its use is unknown"),
        (8138, {0: 60}, "", None, "it has not used its GPU"),
        (8138, {100: 60}, "pytorch/pytorch:2.11", 544, None),
        (8138, {100: 60}, "", 128, None),
    ],
)
def test_the_share_covers_the_peak_with_a_margin(requested, peaks, image, recommended, reason):
    pods = [pod_of("web", "web-0", "n1", 0, requested, image=image)]
    report = UsageReport(node="n1", observed_seconds=60.0, containers=[usage("web", "web-0", requested, peaks)])
    (advised,) = advice.advise([report], "team-a", pods, workload="", margin=15.0)
    assert (advised.recommended, advised.reason) == (recommended, reason)


def test_ended_pods_count_with_their_peaks_but_not_with_their_shares():
    usages = [usage("web", "old", 40000, {12000: 5}, running=False), usage("web", "new", 20000, {9000: 5})]
    report = UsageReport(node="n1", observed_seconds=60.0, containers=usages)
    (advised,) = advice.advise([report], "team-a", [], workload="", margin=0.0)
    assert (advised.requested, advised.peak, advised.pods) == (20000, 12000, 2)


@pytest.mark.parametrize(
    ("container", "name", "preallocates"),
    [
        ({"image": "vllm/vllm-openai"}, "vLLM", True),
        ({"command": ["python3", "-m", "sglang.launch_server"]}, "SGLang", True),
        ({"image": "nvcr.io/nvidia/tritonserver:25.01-py3"}, "Triton", True),
        ({"image": "tensorflow/tensorflow:2.19-gpu"}, "TensorFlow", True),
        ({"image": "tf", "args": ["tensorflow"], "env": [{"name": "TF_FORCE_GPU_ALLOW_GROWTH", "value": "true"}]},
         "TensorFlow", False),
        ({"image": "ghcr.io/nvidia/jax:nightly"}, "JAX", True),
        ({"image": "pytorch/pytorch"}, "PyTorch", False),
        ({"image": "registry/ajaxserver"}, None, None),
    ],
)  # fmt: skip
def test_frameworks_are_recognised_by_image_command_and_environment(container, name, preallocates):
    framework = recognise_framework({"spec": {"containers": [{"name": "main", **container}]}}, "main")
    assert (framework and framework.name, framework and framework.preallocates) == (name, preallocates)


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("deploy/web", "Deployment/web"),
        ("cronjobs.batch/report", "CronJob/report"),
        ("PyTorchJob/bert", "PyTorchJob/bert"),
    ],
)
def test_a_workload_is_named_as_for_kubectl(text, workload):
    assert advise.parse_workload(text) == workload


@pytest.mark.parametrize("text", ["web", "deploy/", "/web"])
def test_an_argument_without_kind_and_name_is_an_error(text):
    with pytest.raises(click.UsageError, match="write, for example, deploy/web"):
        advise.parse_workload(text)


def test_a_workload_without_remembered_use_is_an_error(monkeypatch, api):
    completed = run(monkeypatch, api, "deploy/none")
    assert completed.exit_code == 1
    assert "no use of Deployment/none in namespace team-a is remembered" in completed.output


def test_assignments_of_the_built_pods_can_be_read():
    pod = pod_of("web", "web-0", "n1", 0, 40000)
    share = CardShare(0, "GPU-n1-0", 40000, 0, A100)
    assert assignment.decode(pod["metadata"]["annotations"]) == Assignment({"0": (share,)})
