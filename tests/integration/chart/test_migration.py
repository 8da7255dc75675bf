"""From gpushare to Cardwise and back, by the commands of docs/migration.md, while pods of gpushare run.

gpushare counts in GiB, as its own DaemonSet has it: a card of 16276 MiB is 15 there.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from tests.build import P100, binding, container
from tests.cluster import Cluster, binaries, versions
from tests.cluster.parts import CHART
from tests.cluster.processes import run
from tests.integration.chart.gpushareplugin import GpusharePlugin
from tests.integration.conftest import SpecOf, started
from tests.integration.sharing import Space, assigned, deployment, inspect, node_and_card, workload

pytestmark = [pytest.mark.cluster, pytest.mark.node]

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
MOVED, STAYING = "n1", "n2"
LABEL = "gpushare"
SYSTEM = "kube-system"
CARD = P100 // 1024
# What gpushare's own samples/1.yaml to 4.yaml ask for, each a Deployment of one pod: GiB, but the last one's is of the
# time when gpushare counted MiB.
SAMPLES = {"binpack-1": 2, "binpack-2": 2, "binpack-3": 2, "binpack-4": 16276}


class Migration:
    """A cluster of gpushare, and the hands that follow the guide.

    What the test cluster runs as processes of its own, the parts and gpushare's plugin, comes and goes as their
    workloads would: by the labels of the nodes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.space = Space(cluster, "jobs")
        self.plugins: dict[str, GpusharePlugin] = {}
        self.rendered = ""
        self.selector: dict[str, str] | None = None  # of our DaemonSet
        text = PAGE.read_text()
        sections = re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)
        self.sections = dict(zip(sections[1::2], sections[2::2], strict=True))
        self.done: list[str] = []

    def follow(self, section: str) -> str:
        """All commands of a section of the guide, one after the other; what they print."""
        printed = []
        for line in commands(self.sections[section]):
            program, *words = shlex.split(line.replace("$NODE", MOVED).replace("$REGISTRY", "cardwise.local"))
            printed.append(getattr(self, f"_{program}")(words))
            self.done.append(line)
            self.settle()
        return "\n".join(printed)

    def settle(self) -> None:
        """Plugins run where their workloads select the node."""
        for node in (MOVED, STAYING):
            labels = self.cluster.api.get(paths.nodes(node))["metadata"]["labels"]
            if LABEL in labels and node not in self.plugins:
                self.plugins[node] = GpusharePlugin(self.cluster.node(node).kubelet_dir, 2 * CARD)
                self.plugins[node].start()
            elif LABEL not in labels and node in self.plugins:
                self.cluster.wait(lambda node=node: not self._runs(node), "gpushare's DaemonSet has left the node")
                self.plugins.pop(node).stop()
            ours = self.cluster.process(f"deviceplugin-{node}")
            wanted = self.selector is not None and labels.items() >= self.selector.items()
            if wanted and not ours.recorded:
                self._start_plugin(node)
                self.cluster.wait(lambda node=node: len(self.health(node)) == 2, f"{node} tells of its cards")
            elif not wanted and ours.recorded:
                ours.stop()

    def health(self, node: str) -> list[tuple[str, str]]:
        cards = self.cluster.api.get(paths.extendedresources())["items"]
        statuses = [card.get("status") or {} for card in cards if card["spec"]["node"] == node]
        # The extender may write its part first.
        return [(status["health"], status.get("reason", "")) for status in statuses if "health" in status]

    def counted(self, node: str) -> dict[int, int]:
        """By card, as gpushare's extender adds it up from the pods' annotations (`pkg/cache/nodeinfo.go`)."""
        used: Counter[int] = Counter()
        for pod in self.space.pods():
            annotations = pod["metadata"].get("annotations") or {}
            if pod["spec"].get("nodeName") == node and names.IDX in annotations:
                used[int(annotations[names.IDX])] += int(annotations[names.POD_MEM])
        return dict(used)

    def wait_for_gpushare(self, node: str) -> None:
        """Until the kubelet offers what its plugin does."""

        def offered() -> bool:
            status = self.cluster.api.get(paths.nodes(node))["status"]
            return bool(status.get("allocatable", {}).get(names.GPU_MEM) == str(2 * CARD))

        self.cluster.wait(offered, f"gpushare's capacity of {node}")

    def _kubectl(self, words: list[str]) -> str:
        return self.cluster.kubectl(*words)

    def _cardwise(self, words: list[str]) -> str:
        program = str(Path(sys.executable).parent / "cardwise")
        environment = os.environ | self.cluster.environment()
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False, env=environment)
        assert "Traceback" not in done.stderr
        assert words[0] == "doctor" or done.returncode == 0, done.stderr
        return done.stdout

    def _helm(self, words: list[str]) -> str:
        """What the chart makes of the guide's settings; without pods, which are processes here."""
        verb, *rest = words
        if verb == "uninstall":
            for part in ("extender", "webhook"):
                self.cluster.process(part).stop()
            return self.cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=self.rendered)
        settings = [word for word in rest if word not in ("--create-namespace", "--wait")]
        settings[settings.index("helm/cardwise")] = str(CHART)
        helm = str(binaries.helm(print) / "helm")
        self.rendered = run([helm, "template", *settings, "--kube-version", versions.version(), "--no-hooks"])
        self.selector = node_selector(self.rendered)
        parts = self.cluster.parts
        (unit,) = re.findall(r"webhook\.gpuMemUnit=\w+", " ".join(rest))
        parts.apply_chart(self.cluster.api, unit)
        parts.start([])
        for part in ("webhook", "extender"):
            parts.wait_ready(part)
        # "Then give kube-scheduler Cardwise's stanzas".
        self.cluster.process("kube-scheduler").stop()
        self.cluster.control_plane.start_scheduler(parts.stanzas())
        return ""

    def _systemctl(self, words: list[str]) -> str:
        node = self.cluster.node(MOVED)
        kubelet = node.process("kubelet")
        assert words[1] == "kubelet"
        if words[0] == "stop":
            kubelet.stop()
        else:
            with node.slots_listed():
                kubelet.restart()
        return ""

    def _rm(self, words: list[str]) -> str:
        (path,) = words
        (self.cluster.node(MOVED).kubelet_dir / Path(path).relative_to("/var/lib/kubelet")).unlink()
        return ""

    def _runs(self, node: str) -> bool:
        query = {"labelSelector": "component=gpushare-device-plugin", "fieldSelector": f"spec.nodeName={node}"}
        return bool(self.cluster.api.get(paths.pods(SYSTEM), query)["items"])

    def _start_plugin(self, name: str) -> None:
        node = self.cluster.node(name)
        self.cluster.process(f"deviceplugin-{name}").start(
            [
                str(Path(sys.executable).parent / "cardwise-deviceplugin"),
                f"--kubeconfig={self.cluster.state_dir / 'kubeconfig' / 'cardwise-deviceplugin'}",
                f"--node-name={name}",
                f"--simulated-gpus={node.folder / 'cards.yaml'}",
                f"--kubelet-dir={node.kubelet_dir}",
                f"--cdi-dir={node.cdi_dir}",
                f"--state-dir={node.folder / 'cardwise'}",
                f"--cri-socket={node.cri_socket}",
                "--metrics-bind=127.0.0.1:0",
            ]
        )


def commands(text: str) -> list[str]:
    """Of the fenced blocks, in their order."""
    blocks = re.findall(r"```(?:console|sh)\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def node_selector(rendered: str) -> dict[str, str]:
    """Of the device plugin's DaemonSet."""
    (daemonset,) = [
        manifest
        for manifest in yaml.load_all(rendered, yaml.CSafeLoader)
        if manifest and manifest["kind"] == "DaemonSet" and manifest["metadata"]["name"] == "cardwise-deviceplugin"
    ]
    return dict(daemonset["spec"]["template"]["spec"]["nodeSelector"])


def daemonset() -> Json:
    labels = {"component": "gpushare-device-plugin"}
    words = {"command": ["gpushare-device-plugin-v2", "-logtostderr", "--v=5", "--memory-unit=GiB"]}
    main = container("gpushare") | words
    spec = {"nodeSelector": {LABEL: "true"}, "terminationGracePeriodSeconds": 1, "containers": [main]}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "gpushare-device-plugin-ds", "namespace": SYSTEM},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def placed_by_gpushare(migration: Migration, name: str, node: str, index: int, gib: int) -> None:
    """As its extender's bind and its device plugin leave a pod (gpushare-scheduler-extender `pkg/utils/pod.go`)."""
    annotations = {
        names.IDX: str(index),
        names.POD_MEM: str(gib),
        names.DEV_MEM: str(CARD),
        names.ASSIGNED: "true",
        names.ASSUME_TIME: "1500000000000000000",
    }
    pod = workload(name, gpu_mem=gib, annotations=annotations, spec={"schedulerName": "gpushare"})
    pods = paths.pods(migration.space.name)
    for path, manifest in ((pods, pod), (f"{pods}/{name}/binding", binding(name, node))):
        # The API server may heed rules for a moment that were taken away.
        migration.cluster.wait(
            lambda path=path, manifest=manifest: taken(migration.cluster, path, manifest), f"{name} is taken"
        )


def taken(cluster: Cluster, path: str, manifest: Json) -> bool:
    try:
        cluster.api.create(path, manifest)
    except errors.KubeError:
        return False
    return True


@pytest.fixture
def migration() -> Iterator[Migration]:
    """Two real nodes of gpushare's, each with a pod. It ends without Cardwise, so it is nobody else's."""
    for cluster in started(SpecOf(nodes=2, parts=False)):
        migration = Migration(cluster)
        cluster.apply([daemonset()])
        try:
            for node in (MOVED, STAYING):
                cluster.kubectl("label", "node", node, f"{LABEL}=true")
            migration.settle()
            for node in (MOVED, STAYING):
                migration.wait_for_gpushare(node)
            placed_by_gpushare(migration, "former", MOVED, 1, 11)
            placed_by_gpushare(migration, "staying", STAYING, 0, 7)
            migration.space.running("former", "staying")
            yield migration
        finally:
            for plugin in migration.plugins.values():
                plugin.stop()


def test_the_guide_to_cardwise_and_back(migration: Migration) -> None:
    space, cluster = migration.space, migration.cluster
    containers = {name: ids(space, name) for name in ("former", "staying")}

    seen = migration.follow("1. Look")
    assert re.search(rf"jobs +former +{MOVED} +1 +11\s", seen)
    assert "gpushare counts aliyun.com/gpu-mem in GiB" in seen
    assert "webhook.gpuMemUnit=GiB" in seen

    space.kubectl("create", "quota", "cards", f"--hard=requests.{names.GPU_MEM}=48")
    output = migration.follow("2. Install Cardwise, on no node yet")
    for leftover in (
        "gpushare-device-plugin-ds",
        f"label gpushare of node {MOVED}",
        f"label gpushare of node {STAYING}",
    ):
        assert leftover in output
    assert "numbers without a unit in aliyun.com/gpu-mem mean GiB" in output
    assert hard(space) == str(48 * 1024)
    space.create(workload("new", gpu_mem=9))
    space.wait(lambda: f"Insufficient {names.SHARE}" in space.reasons("new"), "new pods wait for a node that has moved")

    # In a hurry: a pod of gpushare's runs there. It is counted, and nothing fails while the kubelet would fail it.
    seen = migration.follow("3. Move a node")
    assert re.search(r"jobs +former +1 +11\s", seen)
    cluster.wait(lambda: inspect(cluster)[MOVED, 1][1] == 11 * 1024, "the pod of gpushare is counted")
    reason = (
        "Unhealthy",
        "pods with a share from gpushare's device plugin run on this node (1): wait until they have ended",
    )
    cluster.wait(lambda: migration.health(MOVED) == [reason] * 2, "the cards say why none is shared")
    assert space.phase("new") == "Pending"
    assert {name: ids(space, name) for name in containers} == containers, "pods of gpushare were disturbed"
    space.kubectl("delete", "pod", "former", "--wait=false")
    cluster.wait(lambda: all("run on" not in message for _, message in migration.health(MOVED)), "its end is seen")

    migration.follow("Without waiting five minutes")
    space.running("new")
    assert node_and_card(space.get("new")) == (MOVED, "0")
    assert space.create_and_locate(workload("beside", gpu_mem=9)) == (MOVED, "1")
    space.running("beside")
    space.create(workload("late", gpu_mem=7))
    space.wait(lambda: "Insufficient GPU Memory in one device" in space.reasons("late"), "no card is over-committed")
    space.kubectl("delete", "pod", "beside", "--wait=false")
    space.running("late")
    assert node_and_card(space.get("late")) == (MOVED, "1")
    for name in ("new", "late"):
        assert assigned(space.get(name)).mem == {"new": 9, "late": 7}[name] * 1024
        space.marked(name)

    samples_run(space)

    output = migration.follow("4. Take gpushare away")
    assert "gpushare-device-plugin-ds" not in output.partition("deleted")[2]
    cluster.apply([daemonset()])  # the way back begins with it

    migration.follow("5. Units, one namespace after the other")
    migration.follow("The way back")
    with pytest.raises(errors.NotFound):
        cluster.api.get(paths.mutatingwebhookconfigurations(names.WEBHOOK_CONFIGURATION))
    migration.wait_for_gpushare(MOVED)
    assert migration.counted(MOVED) == {}
    placed_by_gpushare(migration, "again", MOVED, 0, 7)
    space.running("again", "staying")
    assert "NVIDIA_VISIBLE_DEVICES=1" in space.inside("again", "env").splitlines()
    assert migration.done == commands(PAGE.read_text()), "every command of the guide was executed"


def samples_run(space: Space) -> None:
    *good, mib = SAMPLES
    space.apply(*(sample(name) for name in SAMPLES))

    def deployed(name: str) -> Json:
        return dict(space.kubectl_json("get", "deployment", name).get("status", {}))

    space.wait(lambda: all(deployed(name).get("readyReplicas") == 1 for name in good), f"{good} run")
    pods = [pod for pod in space.pods() if pod["metadata"].get("labels", {}).get("app") in SAMPLES]
    assert [(node_and_card(pod)[0], assigned(pod).mem) for pod in pods] == [(MOVED, 2048)] * len(good)
    space.wait(
        lambda: "write 16276Mi where MiB are meant" in str(deployed(mib).get("conditions")), "what to write is said"
    )
    space.kubectl("delete", "deployment", *SAMPLES, "--cascade=foreground", "--wait")


def sample(name: str) -> Json:
    workload = deployment(name, 1)
    (main,) = workload["spec"]["template"]["spec"]["containers"]
    main["resources"] = {"limits": {names.GPU_MEM: SAMPLES[name]}}  # a number, not a text
    return workload


def hard(space: Space) -> str:
    quota = json.loads(space.kubectl("get", "resourcequota", "cards", "-o", "json"))
    return str(quota["spec"]["hard"][f"requests.{names.GPU_MEM}"])


def ids(space: Space, name: str) -> list[tuple[str, int]]:
    statuses = space.get(name)["status"]["containerStatuses"]
    return [(status["containerID"], status["restartCount"]) for status in statuses]
