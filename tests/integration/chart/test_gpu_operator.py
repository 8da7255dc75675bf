"""A cluster as NVIDIA's GPU Operator makes it: its labels and RuntimeClasses, and its pods by its own texts.

The operator itself is played: it fills in images and its RuntimeClass, which it does to all texts alike, and labels
nodes. What needs a driver does not run here; simulated nodes say that it does. What the toolkit does with the settings
that the operator gives it: node/test_nvidia_runtime.py.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import gpunodes, names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.cluster import Cluster, binaries, images
from tests.helm.rendering import documents, template
from tests.integration.commands import cardwise
from tests.integration.conftest import spaces
from tests.integration.sharing import Space, workload

pytestmark = [pytest.mark.cluster("sim")]

NAMESPACE = "nvidia-gpu-operator"
OBJECTS: list[Json] = list(yaml.safe_load_all(Path(__file__).with_name("gpuoperator.yaml").read_text()))
CLASSES = [manifest for manifest in OBJECTS if manifest["kind"] == "RuntimeClass"]
DAEMONS = {manifest["metadata"]["name"]: manifest for manifest in OBJECTS if manifest["kind"] == "DaemonSet"}
TOOLKIT, PLUGIN, VALIDATOR = (
    "nvidia-container-toolkit-daemonset",
    "nvidia-device-plugin-daemonset",
    "nvidia-operator-validator",
)
# What it labels a node with cards that containers use: gpuStateLabels of its controllers/state_manager.go.
DEPLOYED = (
    "driver",
    "gpu-feature-discovery",
    "container-toolkit",
    "device-plugin",
    "dcgm",
    "dcgm-exporter",
    "node-status-exporter",
    "operator-validator",
    "client",
)
LABELS = {"nvidia.com/gpu.present": "true"} | {f"nvidia.com/gpu.deploy.{manifest}": "true" for manifest in DEPLOYED}
TAINT = {"key": names.NVIDIA_GPU, "value": "present", "effect": "NoSchedule"}  # GKE's, and usual elsewhere
ON_NODES = (f"image.repository={images.BUSYBOX.partition(':')[0]}",)
PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "gpu-operator.md"
TAKEN_OFF = dict.fromkeys(re.findall(r"nvidia\.com/gpu\.deploy\.[a-z-]+(?==false)", PAGE.read_text()), "false")


def filled(daemon: Json) -> Json:
    """As the operator creates it."""
    text = yaml.safe_dump(daemon).replace("FILLED BY THE OPERATOR", images.BUSYBOX)
    manifest: Json = yaml.safe_load(text)
    manifest["metadata"]["namespace"] = NAMESPACE
    if daemon["metadata"]["name"] != TOOLKIT:  # which brings that runtime
        manifest["spec"]["template"]["spec"]["runtimeClassName"] = "nvidia"
    return manifest


@pytest.fixture
def operator(cluster: Cluster) -> Iterator[Space]:
    classes = "/apis/node.k8s.io/v1/runtimeclasses"
    for manifest in CLASSES:
        named = yaml.safe_load(yaml.safe_dump(manifest).replace("FILLED_BY_OPERATOR", "nvidia"))
        cluster.api.create(classes, named)
    try:
        with Space(cluster, NAMESPACE) as space:
            for daemon in DAEMONS.values():
                account = {"metadata": {"name": daemon["spec"]["template"]["spec"]["serviceAccountName"]}}
                with suppress(errors.Conflict):
                    cluster.api.create(paths.namespaced("/api/v1", "serviceaccounts", NAMESPACE), account)
            yield space
    finally:
        for manifest in CLASSES:
            cluster.api.delete(f"{classes}/{manifest['metadata']['name'].replace('FILLED_BY_OPERATOR', 'nvidia')}")


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """Two nodes as the operator labels them: the first is ours, as the page says, the second its plugin's."""
    assert TAKEN_OFF.keys() <= LABELS.keys()
    for space in spaces(cluster, request):
        (ours,) = space.nodes(1)
        (theirs,) = space.nodes(1, [])
        for node, labels in ((theirs, LABELS), (ours, LABELS | TAKEN_OFF)):
            cluster.api.patch(paths.nodes(node), {"metadata": {"labels": labels}, "spec": {"taints": [TAINT]}})
        yield space


def test_its_pods_run_where_its_labels_say_and_shares_where_its_plugin_does_not(space: Space, operator: Space) -> None:
    ours, theirs = space.own_nodes
    for daemon in DAEMONS.values():
        space.cluster.api.create(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets", filled(daemon))

    def nodes_of_daemons() -> dict[str, set[str]]:
        """The nodes on which the pods of each run."""
        nodes: dict[str, set[str]] = {name: set() for name in DAEMONS}
        for pod in operator.pods():
            if pod["status"].get("phase") == "Running":
                nodes[pod["metadata"]["ownerReferences"][0]["name"]].add(pod["spec"]["nodeName"])
        return nodes

    wanted = {name: {theirs} if name in (PLUGIN, VALIDATOR) else {ours, theirs} for name in DAEMONS}
    operator.wait(lambda: nodes_of_daemons() == wanted, "its pods run, none of its plugin and validator on our node")
    assert space.create_and_locate(workload("share", gpu_mem=8138, spec={"runtimeClassName": "nvidia"}))[0] == ours
    assert nodes_of_daemons() == wanted


def test_the_parts_on_a_node_leave_while_its_driver_is_replaced_and_come_back(space: Space, operator: Space) -> None:
    """By the DaemonSets of the chart; `operator` is a namespace whose pods may mount what they mount."""
    ours, theirs = space.own_nodes
    parts = ("deviceplugin", "mps")
    templates = tuple(f"--show-only=templates/{part}/daemonset.yaml" for part in parts)
    rendered = template(str(binaries.helm(print) / "helm"), *ON_NODES, flags=templates)
    assert rendered.returncode == 0, rendered.stderr
    for daemon in documents(rendered.stdout):
        if daemon["kind"] != "DaemonSet":
            continue
        daemon["metadata"]["namespace"] = NAMESPACE
        daemon["spec"]["template"]["spec"]["serviceAccountName"] = "default"
        space.cluster.api.create(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets", daemon)

    def running_on(node: str) -> int:
        return sum(pod["spec"].get("nodeName") == node for pod in operator.pods())

    operator.wait(lambda: (running_on(ours), running_on(theirs)) == (2, 2), "both parts are on both nodes")
    for key, done_state in gpunodes.UPGRADE_LABELS.items():
        for state in ("drain-required", done_state):
            space.cluster.api.patch(paths.nodes(ours), {"metadata": {"labels": {key: state}}})
        operator.wait(lambda: running_on(ours) == 0, f"they have left because of {key}")
        assert running_on(theirs) == 2
        space.cluster.api.patch(paths.nodes(ours), {"metadata": {"labels": {key: "upgrade-done"}}})
        operator.wait(lambda: running_on(ours) == 2, "they are back")


def test_a_share_tolerates_the_taint_of_nodes_with_cards_and_no_other(space: Space) -> None:
    (ours, _), own = space.own_nodes, {"key": "mine", "operator": "Exists"}
    # By a label that came with the taints: when it is placed, kube-scheduler knows them, those of the other node too.
    labelled = {"nodeSelector": {"nvidia.com/gpu.present": "true"}}
    tolerating = workload("applied", gpu_mem=100, spec=labelled | {"tolerations": [own]})
    space.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(tolerating))
    assert space.placed("applied")[0] == ours
    stored = space.get("applied")["spec"]["tolerations"]
    assert {"key": TAINT["key"], "operator": "Exists", "effect": "NoSchedule"} in stored
    # Lists of tolerations are replaced as a whole, and nobody may take one away.
    space.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(tolerating))
    space.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(tolerating))
    again = space.get("applied")["spec"]["tolerations"]
    assert sorted(map(str, again)) == sorted(map(str, stored))
    space.create(workload("plain"))
    space.refused("plain", "untolerated taint")
    mine = TAINT | {"key": own["key"], "value": "x"}
    change = {"metadata": {"labels": {"mine": "x"}}, "spec": {"taints": [TAINT, mine]}}
    space.cluster.api.patch(paths.nodes(ours), change)
    labelled = {"nodeSelector": {"mine": "x"}}
    assert space.create_and_locate(workload("own", gpu_mem=100, spec=labelled | {"tolerations": [own]}))[0] == ours
    space.create(workload("intolerant", gpu_mem=100))
    space.refused("intolerant", "untolerated taint")
    output = cardwise(space.cluster, "explain", "intolerant", "-n", space.name).stdout
    assert "It excludes every node with GPUs by taints that it does not tolerate (mine=x:NoSchedule)" in output


def test_its_pods_are_its_namespaces_alone(space: Space, operator: Space) -> None:
    for daemon in DAEMONS.values():
        template = filled(daemon)["spec"]["template"]
        template["metadata"]["name"] = "copied"
        template["spec"]["serviceAccountName"] = "default"
        operator.cluster.api.create(paths.pods(NAMESPACE), template, query={"dryRun": "All"})
        with pytest.raises(errors.Invalid):
            space.cluster.api.create(paths.pods(space.name), template, query={"dryRun": "All"})
