"""doctor --before-install: each value of the chart is proposed from what the cluster has, with its reason."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cardwise.cli.doctor import before, bypasses
from cardwise.cli.doctor.before import PreinstallFacts
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB, Percent
from tests import build
from tests.cli.clusters import Cluster, run
from tests.cli.doctor.planted import Faults
from tests.fakes.apiserver import Fault
from tests.helm.rendering import CHART
from webhook.pods import resources

GPU = {"nvidia.com/gpu.present": "true"}
PLANE = {"node-role.kubernetes.io/control-plane": ""}


def node(name: str, runtime: str = "containerd://2.1.4", *, taints: Any = (), offered: int = 0, **labels: str) -> Json:
    status: Json = {"nodeInfo": {"containerRuntimeVersion": runtime}}
    if offered:
        status["allocatable"] = {names.NVIDIA_GPU: str(offered)}
    return build.node(name, labels=labels, status=status, taints=[*taints])


def gpu_node(name: str, *args: str, **options: Any) -> Json:
    gpu_labelled = node(name, *args, **options)
    gpu_labelled["metadata"]["labels"] |= GPU
    return gpu_labelled


def mirror(on: str) -> Json:
    metadata = {"namespace": "kube-system", "name": f"kube-scheduler-{on}", "annotations": {names.MIRROR: "x"}}
    return {"metadata": metadata | {"labels": {"component": "kube-scheduler"}}, "spec": {"nodeName": on}}


def runtime_class(name: str, handler: str = "nvidia") -> Json:
    return {"metadata": {"name": name}, "handler": handler}


def namespace(**labels: str) -> Json:
    spelled = {f"pod-security.kubernetes.io/{key}": level for key, level in labels.items()}
    return {"metadata": {"name": names.NAMESPACE, "labels": spelled}}


@pytest.fixture
def preview() -> PreinstallFacts:
    """A kubeadm cluster with NVIDIA's GPU Operator, and nothing in the way."""
    return PreinstallFacts(
        version={"gitVersion": "v1.37.2"},
        nodes=[node("cp1") | {"metadata": {"name": "cp1", "labels": PLANE}}, gpu_node("n1"), gpu_node("n2")],
        schedulers=[mirror("cp1")],
        runtimeclasses=[runtime_class("nvidia"), runtime_class("gvisor", "runsc")],
        namespace=namespace(enforce="privileged"),
        unknown_kinds={"cards", "classes"},
    )


def troubles(preview: PreinstallFacts) -> list[Finding]:
    return [
        finding
        for finding in before.check_preinstall_facts(preview, names.NAMESPACE)
        if finding.level is not Severity.OK
    ]


def proposed(preview: PreinstallFacts) -> dict[str, str]:
    return dict(
        setting.split("=", 1)
        for finding in before.check_preinstall_facts(preview, names.NAMESPACE)
        for setting in finding.values
    )


def test_a_cluster_that_is_ready_has_no_trouble_and_gets_the_values_that_decide(preview):
    assert troubles(preview) == []
    assert proposed(preview) == {"scheduler.mode": "kubeadm", "nodes.runtimeClass": "nvidia"}
    assert before.install_command(
        before.check_preinstall_facts(preview, names.NAMESPACE), names.NAMESPACE
    ).splitlines() == [
        "helm install cardwise helm/cardwise --namespace cardwise-system \\",
        "  --set image.repository=$REGISTRY/cardwise \\",
        "  --set scheduler.mode=kubeadm \\",
        "  --set nodes.runtimeClass=nvidia \\",
        "  --wait",
        "helm test cardwise --namespace cardwise-system",
    ]


@pytest.mark.parametrize(
    ("enforced", "first"),
    [
        (None, "kubectl create namespace gpu && kubectl label namespace gpu pod-security.kubernetes.io/enforce=privi"),
        ("", "kubectl label namespace gpu pod-security.kubernetes.io/enforce=privileged --overwrite"),
        ("baseline", "kubectl label namespace gpu pod-security.kubernetes.io/enforce=privileged --overwrite"),
        ("privileged", "helm install cardwise helm/cardwise --namespace gpu"),
    ],
)
def test_the_proposed_installation_makes_the_namespace_ready_first(preview, enforced, first):
    if enforced is None:
        plant_no_namespace(preview)
    else:
        preview.namespace = namespace(**({"enforce": enforced} if enforced else {}))
    lines = before.install_command(before.check_preinstall_facts(preview, "gpu"), "gpu").splitlines()
    assert lines[0].startswith(first)
    assert lines[-1] == "helm test cardwise --namespace gpu"


def plant_managed(preview: PreinstallFacts) -> None:
    preview.version = {"gitVersion": "v1.36.3-gke.1200"}
    preview.nodes, preview.schedulers = preview.nodes[1:], []


def plant_k3s(preview: PreinstallFacts) -> None:
    preview.version = {"gitVersion": "v1.37.2+k3s1"}
    preview.nodes, preview.schedulers = [gpu_node("n1", "containerd://2.1.5-k3s1.33")], []


def plant_k3s_control_plane(preview: PreinstallFacts) -> None:
    """Its kube-scheduler is no pod."""
    plant_k3s(preview)
    preview.nodes[0]["metadata"]["labels"] |= {"node-role.kubernetes.io/control-plane": "true"}


def plant_rke2(preview: PreinstallFacts) -> None:
    """Its kube-scheduler is a static pod, in another folder than kubeadm's."""
    plant_k3s_control_plane(preview)
    preview.schedulers = [mirror("n1")]


def plant_process(preview: PreinstallFacts) -> None:
    preview.schedulers = []


def plant_crio(preview: PreinstallFacts) -> None:
    preview.nodes = [preview.nodes[0], gpu_node("n1", "cri-o://1.34.1")]


MANAGED = {"scheduler.mode": "own", "scheduler.image": "registry.k8s.io/kube-scheduler:v1.36.3"}
NEWEST = MANAGED | {"scheduler.image": "registry.k8s.io/kube-scheduler:v1.37.2"}
K3S = {"nodes.criSocket": "/run/k3s/containerd/containerd.sock"}


@pytest.mark.parametrize(
    ("plant", "settings"),
    [
        (plant_managed, MANAGED),
        (plant_process, NEWEST),
        (plant_k3s, NEWEST | K3S),
        (plant_k3s_control_plane, NEWEST | K3S),
        (plant_rke2, NEWEST | K3S),
        (plant_crio, {"scheduler.mode": "kubeadm", "nodes.criSocket": "/var/run/crio/crio.sock"}),
    ],
)
def test_who_configures_kube_scheduler_and_where_the_runtime_is_are_proposed(preview, plant, settings):
    plant(preview)
    assert troubles(preview) == []
    assert proposed(preview) == settings | {"nodes.runtimeClass": "nvidia"}


FAULTS = Faults()


@FAULTS.says("nodes", Severity.WARNING, "node n1 offers nvidia.com/gpu, but has no", "kubectl label")
def plant_unlabelled(preview: PreinstallFacts) -> None:
    preview.nodes = [preview.nodes[0], node("n1", offered=2)]


@FAULTS.says(
    "nodes",
    Severity.WARNING,
    "no node has a GPU label: no GPU will be found until such a node joins",
    "nvidia.com/gpu.present=true",
)
def plant_no_gpu(preview: PreinstallFacts) -> None:
    preview.nodes = preview.nodes[:1]


@FAULTS.says("taints", Severity.NOTE, "do not tolerate: sku=gpu:NoSchedule", "{nvidia.com/gpu:NoSchedule,sku")
def plant_taint(preview: PreinstallFacts) -> None:
    usual = {"key": names.NVIDIA_GPU, "value": "present", "effect": "NoSchedule"}
    own = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
    passing = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}
    preview.nodes = [preview.nodes[0], gpu_node("n1", taints=[usual, own, passing])]


@FAULTS.says("runtime", Severity.PROBLEM, "node n1: docker://27.1 has no CDI", "use containerd 2 or CRI-O")
def plant_docker(preview: PreinstallFacts) -> None:
    preview.nodes = [preview.nodes[0], gpu_node("n1", "docker://27.1")]


@FAULTS.says(
    "runtime", Severity.WARNING, "does not support CDI by default; without CDI a container can", "set enable_cdi = true"
)
def plant_old_containerd(preview: PreinstallFacts) -> None:
    preview.nodes = [preview.nodes[0], gpu_node("n1", "containerd://1.7.27")]


@FAULTS.says("runtime", Severity.PROBLEM, "have different sockets", "nodes.selector")
def plant_two_runtimes(preview: PreinstallFacts) -> None:
    preview.nodes = [preview.nodes[0], gpu_node("n1", "cri-o://1.34.1"), gpu_node("n2", "containerd://2.1.5-k3s1")]


@FAULTS.says(
    "driver", Severity.NOTE, "the cluster has no NVIDIA RuntimeClass: NVIDIA's runtime must", "NVML Shared Library Not"
)
def plant_no_runtime_class(preview: PreinstallFacts) -> None:
    preview.runtimeclasses = []


@FAULTS.says("driver", Severity.PROBLEM, "nvidia-cdi, nvidia-legacy", "nodes.runtimeClass")
def plant_several_runtime_classes(preview: PreinstallFacts) -> None:
    preview.runtimeclasses = [runtime_class("nvidia-cdi"), runtime_class("nvidia-legacy")]


@FAULTS.says(
    "policies",
    Severity.NOTE,
    "pods without a share would get GPUs through cards",
    "policies.runtimeClasses={nvidia,nvidia-cdi,nvidia-legacy,nvidia-experimental,cards}",
)
def plant_other_runtime_class(preview: PreinstallFacts) -> None:
    preview.runtimeclasses = [*preview.runtimeclasses, runtime_class("cards", "nvidia")]


@FAULTS.says("namespace", Severity.NOTE, "does not exist yet", "kubectl create namespace cardwise-")
def plant_no_namespace(preview: PreinstallFacts) -> None:
    preview.namespace, preview.unknown_kinds = None, {*preview.unknown_kinds, "namespace"}


@FAULTS.says("namespace", Severity.NOTE, "has no label of Pod", "enforce=privileged")
def plant_unlabelled_namespace(preview: PreinstallFacts) -> None:
    preview.namespace = namespace()


@FAULTS.says("namespace", Severity.PROBLEM, "enforces baseline", "enforce=privileged --overwrite")
def plant_baseline(preview: PreinstallFacts) -> None:
    preview.namespace = namespace(enforce="baseline")


@FAULTS.says("other-plugins", Severity.WARNING, "node n1, 2 GPUs: NVIDIA's", "devicePlugin.enabled")
def plant_nvidia_plugin(preview: PreinstallFacts) -> None:
    preview.nodes = [preview.nodes[0], gpu_node("n1", offered=2), gpu_node("n2")]


@FAULTS.says("other-plugins", Severity.NOTE, "HAMi is installed: DaemonSet kube-system/hami-", "nodeSelector")
def plant_hami(preview: PreinstallFacts) -> None:
    preview.other_daemonsets = [{"metadata": {"namespace": "kube-system", "name": "hami-device-plugin"}}]


@FAULTS.says("gpushare", Severity.WARNING, "gpushare-schd-extender", "node by node")
def plant_gpushare(preview: PreinstallFacts) -> None:
    metadata = {"namespace": "kube-system", "name": "gpushare-schd-extender"}
    preview.other_deployments = [{"metadata": metadata}]


@FAULTS.says("kubernetes", Severity.PROBLEM, "Kubernetes v1.30.9, not 1.31", "upgrade")
def plant_old_kubernetes(preview: PreinstallFacts) -> None:
    preview.version = {"gitVersion": "v1.30.9"}


@FAULTS.says(
    "installation",
    Severity.NOTE,
    "Cardwise is already installed in this cluster; the proposed values are for a new installation",
    "without --before-install",
)
def plant_installed(preview: PreinstallFacts) -> None:
    preview.unknown_kinds = set()
    preview.mutating_webhooks = [{"metadata": {"name": names.WEBHOOK_CONFIGURATION}}]


@FAULTS.says("rights", Severity.NOTE, "could not read 2 of 30 kinds of objects", "administrator")
def plant_no_rights(preview: PreinstallFacts) -> None:
    preview.unread_kinds = {"pods": "", "namespace": ""}
    preview.namespace = None


@pytest.mark.parametrize(("plant", "check", "level", "text", "remedy"), FAULTS)
def test_what_is_in_the_way_is_found_alone_and_with_a_remedy(preview, plant, *, check, level, text, remedy):
    plant(preview)
    (finding,) = troubles(preview)
    assert (finding.check, finding.level) == (check, level)
    assert text in finding.text
    assert remedy in finding.remedy


def test_what_may_not_be_read_is_not_taken_for_an_installation(preview):
    lists = ("mutating_webhooks", "validating_webhooks", "policies", "daemonsets", "cards", "classes")
    preview.unknown_kinds, preview.unread_kinds = set(), dict.fromkeys(lists, "")
    assert [finding.check for finding in troubles(preview)] == ["rights"]
    plant_installed(preview)
    assert "installation" in [finding.check for finding in troubles(preview)], "what may be read shows it"


def owned(by: str) -> Json:
    return {"ownerReferences": [{"kind": by, "name": "x", "controller": True}]}


def pod(name: str, spec: Json, space: str = "team", **metadata: Any) -> Json:
    return {"metadata": {"namespace": space, "name": name} | metadata, "spec": spec}


def workload_of(spec: Json, name: str = "w", space: str = "team") -> Json:
    return {"metadata": {"namespace": space, "name": name}, "spec": {"template": {"spec": spec}}}


def container(**fields: Any) -> Json:
    return {"name": "main", "image": "a"} | fields


ALL = {"containers": [container(env=[{"name": names.ENV_VISIBLE_DEVICES, "value": "all"}])]}


def test_workloads_that_the_policies_would_refuse_are_named_once_each(preview):
    preview.other_deployments = [workload_of(ALL, "trainer"), workload_of(ALL, "gfd", "gpu-operator")]
    preview.cronjobs = [
        {"metadata": {"namespace": "team", "name": "nightly"}, "spec": {"jobTemplate": workload_of(ALL)}}
    ]
    preview.replicasets = [
        workload_of(ALL, "of-trainer") | {"metadata": {"namespace": "team", "name": "r"} | owned("Deployment")}
    ]
    preview.pods = [
        pod("by-hand", ALL),
        pod("of-trainer", ALL, **owned("ReplicaSet")),
        pod("of-operator", ALL, **owned("RayCluster")),
        pod("static", ALL, annotations={names.MIRROR: "x"}),
        pod("ours", ALL, names.NAMESPACE),
    ]
    (finding,) = troubles(preview)
    assert finding.text == (
        "4 workloads (CronJob team/nightly, Deployment team/trainer, Pod team/by-hand, Pod team/of-operator) would be "
        "refused when created again, because they have NVIDIA_VISIBLE_DEVICES, CUDA_MPS_* or NVIDIA_GPU_MEMORY_* in env"
    )
    assert "policies.infrastructure.namespaces" in finding.remedy


def of_webhook(container: Json, *, mps: bool = False) -> Json:
    """As the webhook rewrites it, with a share of 1024 MiB."""
    container_request = ContainerRequest(
        key="0", name="main", cards=1, mem=MiB(1024), core=Percent(30), resource_class=""
    )
    limits = {names.GPU_MEM: "1024", names.SHARE: "1"}
    return container | {"env": resources.own_env_entries(container_request, mps=mps), "resources": {"limits": limits}}


@pytest.mark.parametrize("mps", [False, True], ids=["without MPS", "with MPS"])
def test_pods_that_our_own_webhook_has_rewritten_are_not_accused(preview, mps):
    shared = of_webhook(container(), mps=mps)
    beside = container(env=resources.own_env_entries(None))
    preview.pods = [pod("shared", {"containers": [shared, beside]})]
    assert troubles(preview) == []
    preview.pods = [pod("copy", {"containers": [shared | {"resources": {}}]})]
    assert [finding.check for finding in troubles(preview)] == ["policies"], (
        "without a slot a policy refuses these entries"
    )
    preview.pods = [pod("more", {"containers": [shared | {"env": [*shared["env"], *ALL["containers"][0]["env"]]}]})]
    assert [finding.check for finding in troubles(preview)] == ["policies"]


def test_parts_of_an_installation_in_another_namespace_are_not_accused(preview):
    spec = {"volumes": [{"name": "cdi", "hostPath": {"path": "/var/run/cdi"}}], "containers": [container()]}
    plugin = workload_of(spec, "cardwise-deviceplugin", "gpu")
    preview.other_daemonsets = [plugin]
    assert [finding.check for finding in troubles(preview) if "refused when" in finding.text] == ["policies"]
    plugin["metadata"]["labels"] = {"app.kubernetes.io/name": "cardwise"}
    assert [finding.check for finding in troubles(preview) if "refused when" in finding.text] == ["policies"], (
        "a label alone"
    )
    hook = {"clientConfig": {"service": {"namespace": "gpu", "name": "cardwise-webhook"}}}
    preview.mutating_webhooks = [{"metadata": {"name": names.WEBHOOK_CONFIGURATION}, "webhooks": [hook]}]
    assert not any("refused when" in finding.text for finding in troubles(preview))


def test_the_reasons_are_by_the_default_values_of_the_chart():
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["policies"]
    assert list(bypasses.INFRASTRUCTURE) == defaults["infrastructure"]["namespaces"]
    assert list(bypasses.HOST_PATHS) == defaults["hostPaths"]
    assert list(bypasses.RUNTIME_CLASSES) == defaults["runtimeClasses"]
    assert list(bypasses.NVIDIA_RESOURCES) == defaults["nvidiaResources"]
    assert defaults["annotationWriters"] == defaults["deviceHostPaths"] == []


class Tried:
    """Dry runs in a namespace, each refused so, or admitted (None)."""

    def __init__(self, *refusals: Fault | None) -> None:
        self.api = Cluster({"namespaces": [namespace()]})
        for refusal in refusals:
            if refusal is not None:
                self.api.fault(refusal, "create")

    def findings(self) -> Iterator[Finding]:
        yield from before.check_admission(self.api.kube, names.NAMESPACE)
        assert self.api.objects("pods") == []


@pytest.mark.parametrize(
    ("status", "message", "level", "remedy"),
    [
        (403, 'pods is forbidden: violates PodSecurity "baseline:latest"', Severity.PROBLEM, "enforce=privileged"),
        (403, "exceeded quota: limits", Severity.WARNING, "a ResourceQuota"),
    ],
)
def test_a_namespace_that_refuses_pods_like_those_on_nodes_is_told(status, message, level, remedy):
    (finding,) = Tried(Fault(status=status, message=message)).findings()
    assert (finding.level, message in finding.text, remedy in finding.remedy) == (level, True, True)


def test_a_namespace_that_admits_them_is_fine_and_nothing_is_created():
    (finding,) = Tried().findings()
    assert finding.level is Severity.OK


def test_the_command_proposes_and_says_what_is_in_the_way(monkeypatch):
    api = Cluster({"nodes": [gpu_node("n1", "docker://27.1")], "namespaces": [namespace(enforce="baseline")]})
    shown = run(monkeypatch, api, "doctor", "--before-install", "--no-probe")
    assert shown.exit_code == 1
    assert "PROBLEM  namespace" in shown.stdout
    assert "Proposed installation:\nkubectl label namespace cardwise-system" in shown.stdout
    assert "\nhelm install cardwise helm/cardwise --namespace cardwise-system" in shown.stdout
    report = json.loads(run(monkeypatch, api, "doctor", "--before-install", "--no-probe", "-o", "json").stdout)
    assert report["worst"] == "problem"
    assert "--set scheduler.mode=own" in report["command"]


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (plant_managed, "no control plane node is visible: a provider runs the control plane"),
        (plant_k3s_control_plane, "kube-scheduler is not a static pod on the control plane (node n1)"),
        (plant_rke2, "kube-scheduler is a static pod on node n1, but kubeadm did not create it"),
    ],
)
def test_what_is_said_of_a_control_plane_that_kubeadm_has_not_made(preview, plant, text):
    plant(preview)
    (finding,) = before.check_control_plane(preview)
    assert finding.text.startswith(text)
