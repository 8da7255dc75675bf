"""Before the first installation, on a real API server: what helm refuses and proposes, and what doctor does."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cardwise.cli.doctor import bypasses, repairs
from cardwise.core.api import mps, names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.cluster import PatientClient, binaries
from tests.cluster.controlplane import ControlPlane
from tests.cluster.processes import wait_for
from tests.helm.rendering import CHART, documents, template
from tests.integration.commands import typed
from webhook.pods.resources import env_from_annotation

pytestmark = [
    pytest.mark.cluster("api"),
    # The harness keeps its processes by pid and lets the Popen objects go.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

TEAM = "team-before"
PLANE, GPU = "node-role.kubernetes.io/control-plane", "nvidia.com/gpu.present"
RUNTIME_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
ALL = {"containers": [{"name": "c", "image": "a", "env": [{"name": names.ENV_VISIBLE_DEVICES, "value": "all"}]}]}


@pytest.fixture(scope="module")
def client(plane: ControlPlane) -> Iterator[PatientClient]:
    client = PatientClient.load(plane.kubeconfig("admin"))
    for name in (TEAM, names.NAMESPACE):
        client.create(paths.namespaces(), {"metadata": {"name": name}})
        # No controller makes it here, and admission wants it for every pod.
        client.create(f"{paths.namespaces(name)}/serviceaccounts", {"metadata": {"name": "default"}})
    yield client
    client.close()


@contextlib.contextmanager
def there(client: PatientClient, *objects: tuple[str, Json]) -> Iterator[None]:
    """Objects by the path of their list, for a while."""
    for path, manifest in objects:
        client.create(path, manifest)
    try:
        yield
    finally:
        for path, manifest in objects:
            client.delete(f"{path}/{manifest['metadata']['name']}", {"gracePeriodSeconds": 0})


def node(name: str, label: str, label_text: str) -> tuple[str, Json]:
    return paths.nodes(), {"metadata": {"name": name, "labels": {label: label_text, "kubernetes.io/os": "linux"}}}


def runtime_class(name: str) -> tuple[str, Json]:
    return RUNTIME_CLASSES, {"metadata": {"name": name}, "handler": "nvidia"}


def mirror(on: str) -> tuple[str, Json]:
    """As the kubelet makes it of kubeadm's static pod."""
    labels, annotations = {"component": "kube-scheduler"}, {names.MIRROR: "x"}
    metadata = {"name": f"kube-scheduler-{on}", "labels": labels, "annotations": annotations}
    return paths.pods("kube-system"), {
        "metadata": metadata,
        "spec": {"nodeName": on, "containers": [{"name": "c", "image": "a"}]},
    }


def install(plane: ControlPlane, *sets: str) -> str:
    """What `helm install` answers, which changes nothing here."""
    flags = [flag for setting in ("image.repository=cardwise", *sets) for flag in ("--set", setting)]
    connection = [f"--kubeconfig={plane.kubeconfig('admin')}", f"--namespace={names.NAMESPACE}", "--dry-run=server"]
    command = [str(binaries.helm(print) / "helm"), "install", "cardwise", str(CHART), *connection, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_helm_looks_at_the_cluster_before_it_installs(plane: ControlPlane, client: PatientClient) -> None:
    managed = install(plane, "scheduler.mode=")
    assert (
        "Here no node is visible as a control plane of kubeadm, so kubeadm cannot work: write scheduler.mode=own,"
        in managed
    )
    assert "the cluster has no RuntimeClass nvidia, so pods that name it cannot be created" in install(
        plane, "scheduler.mode=manual", "nodes.runtimeClass=nvidia"
    )
    notes = install(plane, "scheduler.mode=manual")
    assert "No node is labelled as having a GPU" in notes
    assert "the cluster has no NVIDIA RuntimeClass" in notes
    assert "runtimeClassName" not in notes.partition("kind: DaemonSet")[2].partition("---")[0]
    with there(client, runtime_class("nvidia"), node("cp1", PLANE, ""), node("n1", GPU, "true")):
        assert "kube-system has no such pod for a control plane node (cp1)" in install(plane, "scheduler.mode=kubeadm")
        with there(client, mirror("cp1")):
            wired = install(plane, "scheduler.mode=kubeadm")
            assert "1 node is labelled as having a GPU" in wired
            assert "kubectl rollout status daemonset/cardwise-deviceplugin --namespace cardwise-system" in wired
            assert "daemonset/cardwise-mps" in wired.partition("NOTES:")[2]
            assert 'runtimeClassName: "nvidia"' in wired
            assert "completions: 1" in wired
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
    client.patch(paths.namespaces(names.NAMESPACE), label)
    assert "Pod Security enforces the profile baseline in cardwise-system" in install(plane, "scheduler.mode=manual")


def doctor(plane: ControlPlane) -> tuple[int, str]:
    done = typed({"KUBECONFIG": str(plane.kubeconfig("admin"))}, "doctor", "--before-install")
    return done.returncode, done.stdout


def test_doctor_proposes_the_values_of_a_cluster_without_cardwise(plane: ControlPlane, client: PatientClient) -> None:
    def enforce(profile: str | None) -> None:
        label = {"pod-security.kubernetes.io/enforce": profile}
        client.patch(paths.namespaces(names.NAMESPACE), {"metadata": {"labels": label}})

    enforce("baseline")
    code, output = doctor(plane)
    assert code == 1
    assert "Pod Security enforces baseline in cardwise-system" in output
    assert "refuses a pod like those of Cardwise's DaemonSets" in output
    enforce("privileged")
    with (
        there(client, runtime_class("nvidia"), node("cp1", PLANE, ""), node("n1", GPU, "true"), mirror("cp1")),
        there(client, (paths.pods(TEAM), {"metadata": {"name": "plain"}, "spec": ALL})),
    ):
        code, output = doctor(plane)
    assert code == 1, "the container runtime of the node is not known"
    assert "kube-scheduler is a static pod on node cp1" in output
    refused = f"1 workload (Pod {TEAM}/plain) would be refused when created again, because they have"
    assert f"{refused} {bypasses.ENVIRONMENT_BYPASS.text}" in output
    assert "admits pods like those of Cardwise's DaemonSets, also with system priority" in output
    assert "--set scheduler.mode=kubeadm" in output
    assert "--set nodes.runtimeClass=nvidia" in output


def env(*entries: Json, **fields: Any) -> Json:
    return {"containers": [{"name": "c", "image": "a", "env": list(entries)} | fields]}


def mounting(path: str, at: str = "/x", **fields: Any) -> Json:
    mount = [{"name": "v", "mountPath": at}]
    volume = {"name": "v", "hostPath": {"path": path}}
    return {"containers": [{"name": "c", "image": "a", "volumeMounts": mount} | fields], "volumes": [volume]}


VOID = {"name": names.ENV_VISIBLE_DEVICES, "value": names.NO_CARDS}
OF_NVIDIA = {"resources": {"limits": {names.NVIDIA_GPU: "1"}}}
SHARE = {"resources": {"limits": {names.GPU_MEM: "1"}}}
SLOT = {"resources": {"limits": {names.GPU_MEM: "1", names.SHARE: "1"}}}  # as the webhook leaves it
CARD = env_from_annotation(names.ENV_VISIBLE_DEVICES, f"{names.DEVICES_OF}0")
LIMITS = {"name": mps.LIMIT_ENV, "value": "0=1M"}
FIELD = {"name": names.ENV_VISIBLE_DEVICES, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
SPECS = [
    env({"name": "A", "value": "b"}),
    env({"name": names.ENV_VISIBLE_DEVICES, "value": "all"}),
    env({"name": names.ENV_VISIBLE_DEVICES, "value": "none"}),
    env({"name": names.ENV_VISIBLE_DEVICES}),
    env(VOID),
    env(FIELD),
    env({"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}),
    env({"name": names.ENV_GPU_MEMORY_LIMIT, "value": "1"}),
    {"containers": [{"name": "c", "image": "a"}], "initContainers": ALL["containers"]},
    mounting("/dev/nvidia0"),
    mounting("//dev/./nvidia0"),
    mounting("/proc/1/root"),
    mounting("/proc"),
    mounting("/dev"),
    mounting("/dev", **SHARE),
    mounting("/var/lib", **SHARE),
    mounting("/dev/null", "/var/run/nvidia-container-devices/all"),
    mounting("/data", "/x/../y"),
    env() | {"runtimeClassName": "nvidia"},
    env(VOID) | {"runtimeClassName": "nvidia"},
    env(VOID, **SHARE) | {"runtimeClassName": "nvidia"},
    env(**OF_NVIDIA) | {"runtimeClassName": "nvidia"},
    env(**OF_NVIDIA) | {"runtimeClassName": "nvidia", "nodeName": "n1"},
    env(**OF_NVIDIA) | {"runtimeClassName": "nvidia", "initContainers": [{"name": "i", "image": "a"}]},
    env(**OF_NVIDIA) | {"runtimeClassName": "nvidia", "initContainers": [{"name": "i", "image": "a", "env": [VOID]}]},
    env() | {"runtimeClassName": "gvisor"},
    env(CARD, LIMITS, {"name": mps.PERCENT_ENV, "value": "100"}, **SLOT),
    env(CARD),
    env(LIMITS),
    env(FIELD, **SLOT),
    env({"name": mps.LIMIT_ENV, "value": "0=1M,1=1M"}, **SLOT),
    env({"name": mps.PERCENT_ENV, "value": "101"}, **SLOT),
    env({"name": mps.PIPE_ENV, "value": mps.CONTAINER_PIPE}, **SLOT),
    env({"name": names.ENV_GPU_MEMORY_LIMIT, "value": "1"}, **SLOT),
]


def test_doctor_names_what_the_policies_refuse_and_nothing_else(plane: ControlPlane, client: PatientClient) -> None:
    helm = str(binaries.helm(print) / "helm")
    shown = [f"--show-only=templates/policies/{name}.yaml" for name in ("environment", "hostpaths", "runtimeclasses")]
    paths_of = {"ValidatingAdmissionPolicy": POLICIES, "ValidatingAdmissionPolicyBinding": BINDINGS}
    objects = [(paths_of[manifest["kind"]], manifest) for manifest in documents(template(helm, flags=shown).stdout)]
    assert len(objects) == 6

    def refusal(spec: Json) -> str:
        pod = {"metadata": {"generateName": "p-"}, "spec": spec}
        try:
            client.create(paths.pods(TEAM), pod, query={"dryRun": "All"})
        except errors.Invalid as error:
            return error.message
        return ""

    with there(client, runtime_class("nvidia"), runtime_class("gvisor"), *objects):
        for spec in (SPECS[1], SPECS[9], SPECS[18]):  # one of each policy
            assert wait_for(lambda spec=spec: refusal(spec)), "the policy is in force"
        for spec in SPECS:
            assert bool(refusal(spec)) == bool(list(bypasses.find_bypasses(spec))), (spec, refusal(spec))
    assert wait_for(lambda: not refusal(SPECS[1])), "the API server heeds a deleted policy for a moment"


def test_the_remedy_of_pods_without_a_controller_makes_them_again(
    plane: ControlPlane, client: PatientClient, tmp_path: Path
) -> None:
    spec = {"schedulerName": names.SCHEDULER, "containers": [{"name": "c", "image": "a", "command": ["keep", "me"]}]}
    pods = [client.create(paths.pods(TEAM), {"metadata": {"name": name}, "spec": spec}) for name in ("first", "second")]
    try:
        remedy = repairs.recreate_command(pods, dropped_fields=["schedulerName"])
        kubectl = str(binaries.kube(print))
        path = {"KUBECONFIG": str(plane.kubeconfig("admin")), "PATH": f"{kubectl}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", remedy.partition(": ")[2]], cwd=tmp_path, env=os.environ | path, check=True)
        for pod in pods:
            again = client.get(paths.pods(TEAM, pod["metadata"]["name"]))
            assert again["metadata"]["uid"] != pod["metadata"]["uid"]
            assert again["spec"]["schedulerName"] == "default-scheduler"
            assert again["spec"]["containers"][0]["command"] == ["keep", "me"]
    finally:
        for pod in pods:
            client.delete(paths.pods(TEAM, pod["metadata"]["name"]), {"gracePeriodSeconds": 0})
