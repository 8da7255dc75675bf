"""doctor --before-install: each value of the chart is proposed from what the cluster has, with its reason."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cardwise.cli.doctor import before, bypasses
from cardwise.cli.doctor.before import Preview
from cardwise.cli.doctor.finding import Finding, Severity
from cardwise.core.api import names
from cardwise.core.api.request import ContainerRequest
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB, Percent
from tests.cli.worlds import Cluster, run
from tests.fakes.apiserver import Fault
from tests.helm.rendering import CHART
from webhook.pods import environment

GPU = {"nvidia.com/gpu.present": "true"}
PLANE = {"node-role.kubernetes.io/control-plane": ""}


def node(name: str, runtime: str = "containerd://2.1.4", *, taints: Any = (), offered: int = 0, **labels: str) -> Json:
    status: Json = {"nodeInfo": {"containerRuntimeVersion": runtime}}
    if offered:
        status["allocatable"] = {names.NVIDIA_GPU: str(offered)}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": [*taints]}, "status": status}


def gpu_node(name: str, *args: str, **more: Any) -> Json:
    made = node(name, *args, **more)
    made["metadata"]["labels"] |= GPU
    return made


def mirror(on: str) -> Json:
    metadata = {"namespace": "kube-system", "name": f"kube-scheduler-{on}", "annotations": {names.MIRROR: "x"}}
    return {"metadata": metadata | {"labels": {"component": "kube-scheduler"}}, "spec": {"nodeName": on}}


def runtime_class(name: str, handler: str = "nvidia") -> Json:
    return {"metadata": {"name": name}, "handler": handler}


def namespace(**labels: str) -> Json:
    spelled = {f"pod-security.kubernetes.io/{key}": value for key, value in labels.items()}
    return {"metadata": {"name": names.NAMESPACE, "labels": spelled}}


@pytest.fixture
def seen() -> Preview:
    """A kubeadm cluster with NVIDIA's GPU Operator, and nothing in the way."""
    return Preview(
        version={"gitVersion": "v1.37.2"},
        nodes=[node("cp1") | {"metadata": {"name": "cp1", "labels": PLANE}}, gpu_node("n1"), gpu_node("n2")],
        schedulers=[mirror("cp1")],
        runtimeclasses=[runtime_class("nvidia"), runtime_class("gvisor", "runsc")],
        namespace=namespace(enforce="privileged"),
        absent={"cards", "classes"},
    )


def troubles(seen: Preview) -> list[Finding]:
    return [one for one in before.judge(seen, names.NAMESPACE) if one.level is not Severity.OK]


def proposed(seen: Preview) -> dict[str, str]:
    return dict(value.split("=", 1) for one in before.judge(seen, names.NAMESPACE) for value in one.values)


def test_a_cluster_that_is_ready_has_no_trouble_and_gets_the_values_that_decide(seen):
    assert troubles(seen) == []
    assert proposed(seen) == {"scheduler.mode": "kubeadm", "nodes.runtimeClass": "nvidia"}
    assert before.install_command(before.judge(seen, names.NAMESPACE), names.NAMESPACE).splitlines() == [
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
def test_the_proposed_installation_makes_the_namespace_ready_first(seen, enforced, first):
    if enforced is None:
        plant_no_namespace(seen)
    else:
        seen.namespace = namespace(**({"enforce": enforced} if enforced else {}))
    lines = before.install_command(before.judge(seen, "gpu"), "gpu").splitlines()
    assert lines[0].startswith(first)
    assert lines[-1] == "helm test cardwise --namespace gpu"


def plant_managed(seen: Preview) -> None:
    seen.version = {"gitVersion": "v1.36.3-gke.1200"}
    seen.nodes, seen.schedulers = seen.nodes[1:], []


def plant_k3s(seen: Preview) -> None:
    seen.version = {"gitVersion": "v1.37.2+k3s1"}
    seen.nodes, seen.schedulers = [gpu_node("n1", "containerd://2.1.5-k3s1.33")], []


def plant_k3s_control_plane(seen: Preview) -> None:
    """Its kube-scheduler is no pod."""
    plant_k3s(seen)
    seen.nodes[0]["metadata"]["labels"] |= {"node-role.kubernetes.io/control-plane": "true"}


def plant_rke2(seen: Preview) -> None:
    """Its kube-scheduler is a static pod, in another folder than kubeadm's."""
    plant_k3s_control_plane(seen)
    seen.schedulers = [mirror("n1")]


def plant_process(seen: Preview) -> None:
    seen.schedulers = []


def plant_crio(seen: Preview) -> None:
    seen.nodes = [seen.nodes[0], gpu_node("n1", "cri-o://1.34.1")]


MANAGED = {"scheduler.mode": "own", "scheduler.image": "registry.k8s.io/kube-scheduler:v1.36.3"}
NEWEST = MANAGED | {"scheduler.image": "registry.k8s.io/kube-scheduler:v1.37.2"}
K3S = {"nodes.criSocket": "/run/k3s/containerd/containerd.sock"}


@pytest.mark.parametrize(
    ("plant", "values"),
    [
        (plant_managed, MANAGED),
        (plant_process, NEWEST),
        (plant_k3s, NEWEST | K3S),
        (plant_k3s_control_plane, NEWEST | K3S),
        (plant_rke2, NEWEST | K3S),
        (plant_crio, {"scheduler.mode": "kubeadm", "nodes.criSocket": "/var/run/crio/crio.sock"}),
    ],
)
def test_who_configures_kube_scheduler_and_where_the_runtime_is_are_proposed(seen, plant, values):
    plant(seen)
    assert troubles(seen) == []
    assert proposed(seen) == values | {"nodes.runtimeClass": "nvidia"}


def plant_unlabelled(seen: Preview) -> None:
    seen.nodes = [seen.nodes[0], node("n1", offered=2)]


def plant_no_gpu(seen: Preview) -> None:
    seen.nodes = seen.nodes[:1]


def plant_taint(seen: Preview) -> None:
    usual = {"key": names.NVIDIA_GPU, "value": "present", "effect": "NoSchedule"}
    own = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
    passing = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}
    seen.nodes = [seen.nodes[0], gpu_node("n1", taints=[usual, own, passing])]


def plant_docker(seen: Preview) -> None:
    seen.nodes = [seen.nodes[0], gpu_node("n1", "docker://27.1")]


def plant_old_containerd(seen: Preview) -> None:
    seen.nodes = [seen.nodes[0], gpu_node("n1", "containerd://1.7.27")]


def plant_two_runtimes(seen: Preview) -> None:
    seen.nodes = [seen.nodes[0], gpu_node("n1", "cri-o://1.34.1"), gpu_node("n2", "containerd://2.1.5-k3s1")]


def plant_no_runtime_class(seen: Preview) -> None:
    seen.runtimeclasses = []


def plant_several_runtime_classes(seen: Preview) -> None:
    seen.runtimeclasses = [runtime_class("nvidia-cdi"), runtime_class("nvidia-legacy")]


def plant_other_runtime_class(seen: Preview) -> None:
    seen.runtimeclasses = [*seen.runtimeclasses, runtime_class("cards", "nvidia")]


def plant_no_namespace(seen: Preview) -> None:
    seen.namespace, seen.absent = None, {*seen.absent, "namespace"}


def plant_unlabelled_namespace(seen: Preview) -> None:
    seen.namespace = namespace()


def plant_baseline(seen: Preview) -> None:
    seen.namespace = namespace(enforce="baseline")


def plant_nvidia_plugin(seen: Preview) -> None:
    seen.nodes = [seen.nodes[0], gpu_node("n1", offered=2), gpu_node("n2")]


def plant_hami(seen: Preview) -> None:
    seen.other_daemonsets = [{"metadata": {"namespace": "kube-system", "name": "hami-device-plugin"}}]


def plant_gpushare(seen: Preview) -> None:
    metadata = {"namespace": "kube-system", "name": "gpushare-schd-extender"}
    seen.other_deployments = [{"metadata": metadata}]


def plant_old_kubernetes(seen: Preview) -> None:
    seen.version = {"gitVersion": "v1.30.9"}


def plant_installed(seen: Preview) -> None:
    seen.absent = set()
    seen.mutating = [{"metadata": {"name": names.WEBHOOK_CONFIGURATION}}]


def plant_no_rights(seen: Preview) -> None:
    seen.unread = {"pods": "", "namespace": ""}
    seen.namespace = None


@pytest.mark.parametrize(
    ("plant", "check", "level", "text", "remedy"),
    [
        (plant_old_kubernetes, "kubernetes", Severity.PROBLEM, "Kubernetes v1.30.9, not 1.31", "upgrade"),
        (plant_unlabelled, "nodes", Severity.WARNING, "node n1 offers nvidia.com/gpu, but has no", "kubectl label"),
        (plant_no_gpu, "nodes", Severity.WARNING, "no node has a label of a GPU", "nvidia.com/gpu.present=true"),
        (plant_taint, "taints", Severity.NOTE, "do not tolerate: sku=gpu:NoSchedule", "{nvidia.com/gpu:NoSchedule,sku"),
        (plant_docker, "runtime", Severity.PROBLEM, "node n1: docker://27.1 has no CDI", "use containerd 2 or CRI-O"),
        (plant_old_containerd, "runtime", Severity.WARNING, "takes no CDI devices", "set enable_cdi = true"),
        (plant_two_runtimes, "runtime", Severity.PROBLEM, "have different sockets", "nodes.selector"),
        (plant_no_runtime_class, "driver", Severity.NOTE, "no RuntimeClass of NVIDIA's", "NVML Shared Library Not"),
        (plant_several_runtime_classes, "driver", Severity.PROBLEM, "nvidia-cdi, nvidia-legacy", "nodes.runtimeClass"),
        (
            plant_other_runtime_class,
            "policies",
            Severity.NOTE,
            "pods without a share would get cards by cards",
            "policies.runtimeClasses={nvidia,nvidia-cdi,nvidia-legacy,nvidia-experimental,cards}",
        ),
        (plant_no_namespace, "namespace", Severity.NOTE, "there is no namespace", "kubectl create namespace cardwise-"),
        (plant_unlabelled_namespace, "namespace", Severity.NOTE, "has no label of Pod", "enforce=privileged"),
        (plant_baseline, "namespace", Severity.PROBLEM, "enforces baseline", "enforce=privileged --overwrite"),
        (plant_nvidia_plugin, "other-plugins", Severity.WARNING, "node n1, 2 cards: NVIDIA's", "devicePlugin.enabled"),
        (plant_hami, "other-plugins", Severity.NOTE, "HAMi is installed: DaemonSet kube-system/hami-", "nodeSelector"),
        (plant_gpushare, "gpushare", Severity.WARNING, "gpushare-schd-extender", "node by node"),
        (plant_installed, "installation", Severity.NOTE, "installed here already", "without --before-install"),
        (plant_no_rights, "rights", Severity.NOTE, "could not look at 2 of 27 things", "administrator"),
    ],
)
def test_what_is_in_the_way_is_found_alone_and_with_a_remedy(seen, plant, *, check, level, text, remedy):
    plant(seen)
    (found,) = troubles(seen)
    assert (found.check, found.level) == (check, level)
    assert text in found.text
    assert remedy in found.remedy


def test_what_may_not_be_read_is_not_taken_for_an_installation(seen):
    lists = ("mutating", "validating", "policies", "daemonsets", "cards", "classes")
    seen.absent, seen.unread = set(), dict.fromkeys(lists, "")
    assert [one.check for one in troubles(seen)] == ["rights"]
    plant_installed(seen)
    assert "installation" in [one.check for one in troubles(seen)], "what may be read shows it"


def owned(by: str) -> Json:
    return {"ownerReferences": [{"kind": by, "name": "x", "controller": True}]}


def pod(name: str, spec: Json, space: str = "team", **metadata: Any) -> Json:
    return {"metadata": {"namespace": space, "name": name} | metadata, "spec": spec}


def made(spec: Json, name: str = "w", space: str = "team") -> Json:
    return {"metadata": {"namespace": space, "name": name}, "spec": {"template": {"spec": spec}}}


def container(**fields: Any) -> Json:
    return {"name": "main", "image": "a"} | fields


ALL = {"containers": [container(env=[{"name": names.ENV_VISIBLE_DEVICES, "value": "all"}])]}


def test_workloads_that_the_policies_would_refuse_are_named_once_each(seen):
    seen.other_deployments = [made(ALL, "trainer"), made(ALL, "gfd", "gpu-operator")]
    seen.cronjobs = [{"metadata": {"namespace": "team", "name": "nightly"}, "spec": {"jobTemplate": made(ALL)}}]
    seen.replicasets = [
        made(ALL, "of-trainer") | {"metadata": {"namespace": "team", "name": "r"} | owned("Deployment")}
    ]
    seen.pods = [
        pod("by-hand", ALL),
        pod("of-trainer", ALL, **owned("ReplicaSet")),
        pod("of-operator", ALL, **owned("RayCluster")),
        pod("static", ALL, annotations={names.MIRROR: "x"}),
        pod("ours", ALL, names.NAMESPACE),
    ]
    (found,) = troubles(seen)
    assert found.text == (
        "4 workloads (CronJob team/nightly, Deployment team/trainer, Pod team/by-hand, Pod team/of-operator) would be "
        "refused when created again, because of NVIDIA_VISIBLE_DEVICES, CUDA_MPS_* or NVIDIA_GPU_MEMORY_* in env"
    )
    assert "policies.infrastructure.namespaces" in found.remedy


def of_webhook(container: Json, *, mps: bool = False) -> Json:
    """As the webhook rewrites it, with a share of 1024 MiB."""
    asked = ContainerRequest(key="0", name="main", cards=1, mem=MiB(1024), core=Percent(30), resource_class="")
    limits = {names.GPU_MEM: "1024", names.SHARE: "1"}
    return container | {"env": environment.owned(asked, mps=mps), "resources": {"limits": limits}}


@pytest.mark.parametrize("mps", [False, True], ids=["without MPS", "with MPS"])
def test_pods_that_our_own_webhook_has_rewritten_are_not_accused(seen, mps):
    shared = of_webhook(container(), mps=mps)
    beside = container(env=environment.owned(None))
    seen.pods = [pod("shared", {"containers": [shared, beside]})]
    assert troubles(seen) == []
    seen.pods = [pod("copy", {"containers": [shared | {"resources": {}}]})]
    assert [one.check for one in troubles(seen)] == ["policies"], "without a slot a policy refuses these entries"
    seen.pods = [pod("more", {"containers": [shared | {"env": [*shared["env"], *ALL["containers"][0]["env"]]}]})]
    assert [one.check for one in troubles(seen)] == ["policies"]


def test_parts_of_an_installation_in_another_namespace_are_not_accused(seen):
    spec = {"volumes": [{"name": "cdi", "hostPath": {"path": "/var/run/cdi"}}], "containers": [container()]}
    plugin = made(spec, "cardwise-deviceplugin", "gpu")
    seen.other_daemonsets = [plugin]
    assert [one.check for one in troubles(seen) if "refused when" in one.text] == ["policies"]
    plugin["metadata"]["labels"] = {"app.kubernetes.io/name": "cardwise"}
    assert [one.check for one in troubles(seen) if "refused when" in one.text] == ["policies"], "a label alone"
    hook = {"clientConfig": {"service": {"namespace": "gpu", "name": "cardwise-webhook"}}}
    seen.mutating = [{"metadata": {"name": names.WEBHOOK_CONFIGURATION}, "webhooks": [hook]}]
    assert not any("refused when" in one.text for one in troubles(seen))


def test_the_reasons_are_by_the_default_values_of_the_chart():
    values = yaml.safe_load((CHART / "values.yaml").read_text())["policies"]
    assert list(bypasses.INFRASTRUCTURE) == values["infrastructure"]["namespaces"]
    assert list(bypasses.HOST_PATHS) == values["hostPaths"]
    assert list(bypasses.RUNTIME_CLASSES) == values["runtimeClasses"]
    assert list(bypasses.NVIDIA_RESOURCES) == values["nvidiaResources"]
    assert values["annotationWriters"] == values["deviceHostPaths"] == []


class Tried:
    """Dry runs in a namespace, each refused so, or admitted (None)."""

    def __init__(self, *refusals: Fault | None) -> None:
        self.api = Cluster({"namespaces": [namespace()]})
        for refusal in refusals:
            if refusal is not None:
                self.api.fault(refusal, "create")

    def findings(self) -> Iterator[Finding]:
        yield from before.admission(self.api.kube, names.NAMESPACE)
        assert self.api.of("pods") == []


@pytest.mark.parametrize(
    ("status", "message", "level", "remedy"),
    [
        (403, 'pods is forbidden: violates PodSecurity "baseline:latest"', Severity.PROBLEM, "enforce=privileged"),
        (403, "exceeded quota: limits", Severity.WARNING, "a ResourceQuota"),
    ],
)
def test_a_namespace_that_refuses_pods_like_those_on_nodes_is_told(status, message, level, remedy):
    (found,) = Tried(Fault(status=status, message=message)).findings()
    assert (found.level, message in found.text, remedy in found.remedy) == (level, True, True)


def test_a_namespace_that_admits_them_is_fine_and_nothing_is_created():
    (found,) = Tried().findings()
    assert found.level is Severity.OK


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
        (plant_managed, "no node is visible as a control plane"),
        (plant_k3s_control_plane, "kube-scheduler is no static pod of the control plane (node n1)"),
        (plant_rke2, "kube-scheduler is a static pod on node n1, and not one that kubeadm has made"),
    ],
)
def test_what_is_said_of_a_control_plane_that_kubeadm_has_not_made(seen, plant, text):
    plant(seen)
    (found,) = before.control_plane(seen)
    assert found.text.startswith(text)
