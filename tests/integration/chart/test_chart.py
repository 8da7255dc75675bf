"""The chart by the real Helm, all parts in pods on a real node: upgraded under load, checked, wired, uninstalled.

The tests follow each other as an admin would: the first one comes from the former commit, the last one takes everything
away.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cardwise.core.api import names
from cardwise.core.values.decoded import Json
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from tests.cluster import Cluster, binaries, former, node, partsimage, pki, processes
from tests.cluster.chart import WAITS
from tests.cluster.controlplane import SCHEDULER
from tests.cluster.images import IDLE
from tests.integration import commands
from tests.integration.conftest import SOAK, SpecOf, started
from tests.integration.ruleone import RuleOne
from tests.integration.sharing import Space, assigned, workload

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.in_order]


ROOT = Path(__file__).parents[3]
SYSTEM = names.NAMESPACE
VALUES: Json = {
    "webhook": {"shareAgent": "never"},
    "mps": {"enabled": True, "extraArgs": ["--probe-timeout=20s"]},
    "scheduler": {"replicas": 1, "image": partsimage.SCHEDULER},
}
ANOTHER: Json = {"node": "elsewhere", "index": 0, "model": "Tesla P100", "memoryMiB": 16276}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With the chart and the code of the commit before this one."""
    with tempfile.TemporaryDirectory(prefix="cw-former-") as folder:
        print(f"upgraded from {former.write(Path(folder))}")
        chart_values = VALUES | {"image": {"tag": partsimage.FORMER}}
        yield from started(SpecOf(nodes=1, chart=True, values=chart_values, former=Path(folder)))


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Space:
    return Space(cluster, "team")


def part_pods(cluster: Cluster, part: str) -> list[Json]:
    query = {"labelSelector": f"app.kubernetes.io/component={part}"}
    pods: list[Json] = cluster.api.get(paths.pods(SYSTEM), query)["items"]
    return pods


# By the default policy the card of a pod depends on how many came before it; here one card is to stay nearly empty.
PACKED = {"cardwise.dev/policy": "binpack"}

# Pods of the churn that are there together, and what each does; `make soak` has the greater number.
_AT_A_TIME, _WORK = (50, "sleep 10") if SOAK else (8, "exit 0")


class Churn(threading.Thread):
    """Pods that come and go, `limit` at a time; what goes wrong is noted. `amounts`: as `workload` takes it."""

    def __init__(self, space: Space, name: str = "churn", limit: int = _AT_A_TIME, **amounts: int) -> None:
        super().__init__(daemon=True, name=name)
        self.created: list[str] = []
        self._amounts = amounts
        self._limit = limit
        self.problems: list[str] = []
        self._space = space
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.wait(2 / self._limit):
            there = {pod["metadata"]["name"] for pod in self._space.pods()}
            if len(there.intersection(self.waiting())) >= self._limit:
                continue
            name = f"{self.name}-{len(self.created)}"
            try:
                self._space.create(workload(name, command=_WORK, spec={"restartPolicy": "Never"}, **self._amounts))
                self.created.append(name)
            except errors.KubeError as error:
                self.problems.append(f"{name}: {error}")

    def waiting(self) -> list[str]:
        """Those that have not run to their end, also if somebody has deleted them."""
        phases = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in self._space.pods()}
        return [name for name in self.created if phases.get(name) != "Succeeded"]

    def stop(self) -> None:
        self._enough.set()
        self.join(processes.PATIENCE)
        assert not self.is_alive(), "the churn does not end"


def deployments(cluster: Cluster) -> list[str]:
    deployments = cluster.api.get(f"/apis/apps/v1/namespaces/{SYSTEM}/deployments")["items"]
    return [deployment["metadata"]["name"] for deployment in deployments]


def cards(cluster: Cluster) -> list[Json]:
    resources: list[Json] = cluster.api.get(paths.extendedresources())["items"]
    return resources


def mps_is_ready(cluster: Cluster) -> bool:
    """Of both cards of n1. An exchanged manager takes over one after the other, and pods go where it is ready."""
    statuses = [card.get("status", {}).get("mps") or {} for card in cards(cluster) if card["spec"]["node"] == "n1"]
    if any(status.get("state") != "Ready" for status in statuses):
        raise LookupError(json.dumps(statuses))
    return True


def test_an_upgrade_from_the_former_commit_under_load_loses_no_pod_and_no_grant(cluster: Cluster, space: Space) -> None:
    space.create(workload("half", gpu_mem=8138, command=IDLE))
    space.running("half")
    space.marked("half")
    before = space.get("half")
    folder = cluster.state_dir / "images"
    partsimage.write_scheduler(folder / "kube-scheduler.tar", cluster.bin_dir)
    cluster.node("n1").load_image(folder / "kube-scheduler.tar")
    churn = Churn(space, gpu_mem=100)
    churn.start()
    try:
        chart_values = {"scheduler": {"mode": "own"}, "extender": {"headroomMiB": 10}, "image": {"tag": partsimage.TAG}}
        notes = cluster.chart.upgrade(chart_values)
    finally:
        churn.stop()
    assert "REVISION: 2" in notes
    assert churn.problems == []
    assert churn.created
    print(f"{len(churn.created)} pods have come meanwhile")
    space.wait(lambda: not churn.waiting(), "all that came have run")
    after = space.get("half")
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    space.wait(lambda: len(part_pods(cluster, "webhook")) == 2, "the former webhooks, which still answered, have ended")
    space.wait(lambda: mps_is_ready(cluster), "the cards are open again")
    space.create(workload("later", gpu_mem=8000, command=IDLE, annotations=PACKED))
    space.running("later")
    assert space.get("later")["spec"]["schedulerName"] == "cardwise-scheduler"
    plain = workload("plain", command=IDLE)
    space.create(plain)
    assert space.get("plain")["spec"]["schedulerName"] == "default-scheduler"


@pytest.mark.skipif(not SOAK, reason="a rollback is shown at the end too; that to the former commit: make soak")
def test_a_rollback_takes_our_scheduler_away_and_no_pod(cluster: Cluster, space: Space) -> None:
    before = space.get("half")
    cluster.chart.helm("rollback", "cardwise", "1", *WAITS)
    after = space.get("half")
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    assert deployments(cluster) == ["cardwise-extender", "cardwise-webhook"]
    space.wait(lambda: len(part_pods(cluster, "webhook")) == 2, "the former webhooks, which still answered, have ended")
    space.wait(lambda: mps_is_ready(cluster), "the cards are open again")
    space.create(workload("back", gpu_mem=100, command=IDLE, annotations=PACKED))
    space.running("back")
    assert space.get("back")["spec"]["schedulerName"] == "default-scheduler"


def static_scheduler(cluster: Cluster) -> Json:
    """The manifest of a kube-scheduler as kubeadm runs it, in the place of the process."""
    kubeconfig, state = str(cluster.control_plane.kubeconfig(SCHEDULER)), str(cluster.state_dir)
    port = cluster.control_plane.ports[SCHEDULER]
    probe = {"httpGet": {"host": "127.0.0.1", "path": "/readyz", "port": port, "scheme": "HTTPS"}, "periodSeconds": 1}
    container = {
        "name": SCHEDULER,
        "image": partsimage.SCHEDULER,
        "command": [
            SCHEDULER,
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
        ],
        "readinessProbe": probe,
        "volumeMounts": [{"name": "state", "mountPath": state, "readOnly": True}],
    }
    volumes = [{"name": "state", "hostPath": {"path": state, "type": "Directory"}}]
    spec = {"containers": [container], "hostNetwork": True, "volumes": volumes, "terminationGracePeriodSeconds": 5}
    labels = {"component": SCHEDULER, "tier": "control-plane"}
    metadata = {"name": SCHEDULER, "namespace": "kube-system", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_a_kubeadm_control_plane_is_wired(cluster: Cluster, space: Space) -> None:
    cluster.process(SCHEDULER).stop()
    manifest = cluster.node("n1").manifests / "kube-scheduler.yaml"
    manifest.write_text(yaml.safe_dump(static_scheduler(cluster)))
    cluster.kubectl("label", "node", "n1", "node-role.kubernetes.io/control-plane=")
    # Helm looks for it: without such a pod this is no control plane of kubeadm's.
    shown = ("get", "pods", "-n", "kube-system", "-o", "name")
    space.wait(lambda: f"{SCHEDULER}-n1" in cluster.kubectl(*shown), "its mirror is there")
    folder = f"{node.OWN_FOLDER}/kubernetes/manifests"
    cluster.chart.upgrade({"scheduler": {"mode": "kubeadm", "manifestsDir": folder}})
    assert deployments(cluster) == ["cardwise-extender", "cardwise-webhook"], "our own scheduler goes"
    spec = yaml.safe_load(manifest.read_text())["spec"]["containers"][0]
    assert spec["command"][-1].startswith(f"--config={node.OWN_FOLDER}/kubernetes/cardwise/")
    space.wait(lambda: len(part_pods(cluster, "webhook")) == 2, "the former webhooks, which still answered, have ended")
    space.wait(lambda: mps_is_ready(cluster), "the cards are open again")
    space.create(workload("wired", gpu_mem=100, command=IDLE, annotations=PACKED))
    space.running("wired")
    assert space.get("wired")["spec"]["schedulerName"] == "default-scheduler"
    assert assigned(space.get("wired"))


def test_a_pod_gets_its_share_of_a_card_from_parts_in_pods(space: Space) -> None:
    space.create(workload("share", gpu_mem=8138, command=IDLE))
    space.running("share")
    ((share,),) = assigned(space.get("share")).containers.values()
    assert space.inside("share", "echo $CARDWISE_MEM_FRACTION $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").split() == [
        "0.5000",
        "0=8138M",
    ]
    assert space.inside("share", "ls /dev | grep nvidia").split() == [f"nvidia{share.index}"]
    assert "control" in space.inside("share", "ls $CUDA_MPS_PIPE_DIRECTORY").split()


def test_the_chart_s_own_test_says_what_it_saw(cluster: Cluster, space: Space) -> None:
    """On a free card: MPS serves one user at a time, and the probe is another than the root of the pods here."""
    gone = ("back", "wired", "share")
    space.delete(*gone, grace=1)
    space.wait_for_deletion(*gone)
    # The extender says it, which hears of the pods' end by a watch.
    space.wait(lambda: 0 in [card["status"]["allocated"]["pods"] for card in cards(cluster)], "a card is free")
    output = cluster.chart.helm("test", "cardwise", "--logs")
    assert "ok    admission: 1Gi became 1024 MiB, and the pod's scheduler is default-scheduler" in output
    assert "ok    extender: the extender knows the GPUs of 1 node" in output
    assert "ok    GPUs: " in output
    assert "ok    kube-scheduler: the probe pod was placed on a GPU of n1 by the extender" in output, output
    assert "FAIL" not in output
    assert output.count("TEST SUITE:") == 2, "what it may do, and the pod"
    preview = commands.cardwise(cluster, "doctor", "--before-install", "--no-probe").stdout
    assert "Cardwise is already installed in this cluster" in preview
    assert "would be refused" not in preview, "of the pods that have shares"


def test_a_leader_that_stands_still_as_a_whole_leaves_the_service_and_holds_up_no_pod_without_gpu(
    cluster: Cluster, space: Space
) -> None:
    """No parent process sees it. Each GPU pod costs kube-scheduler a time-out until readiness has taken it out."""
    query = {"labelSelector": f"{names.LEADER}=true"}
    (leader,) = [pod["metadata"]["name"] for pod in cluster.api.get(paths.pods(SYSTEM), query)["items"]]
    members = [
        int(folder.name) for folder in Path("/proc").glob("[0-9]*") if f"POD_NAME={leader}" in environment(folder)
    ]
    assert len(members) > 1, "the process that serves and its parent"
    created: dict[str, float] = {}
    bound: dict[str, float] = {}

    def all_bound() -> bool:
        for pod in space.pods():
            name = pod["metadata"]["name"]
            if name in created and pod["spec"].get("nodeName"):
                bound.setdefault(name, time.monotonic())
        return bound.keys() == created.keys()

    gpus = [f"behind-{number}" for number in range(20)]
    try:
        for pid in members:
            os.kill(pid, signal.SIGSTOP)
        for number, gpu in enumerate(gpus):
            space.create(workload(gpu, gpu_mem=64, command=IDLE))
            name = f"plain-{number}"
            created[name] = time.monotonic()
            space.create(workload(name, command=IDLE))
        space.wait(all_bound, "pods without GPU have nodes")
    finally:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    print("seconds:", sorted(round(bound[name] - created[name], 2) for name in created))
    space.running(*gpus)
    space.delete(*gpus, *created, grace=1)
    space.wait_for_deletion(*gpus, *created)


@pytest.mark.soak
def test_leaders_that_change_behind_the_service_in_the_middle_of_binds_give_no_card_twice(
    cluster: Cluster, space: Space
) -> None:
    """Deleted, killed and standing still in turn; kube-scheduler reaches the next one through the Service alone."""
    churn = Churn(space, "turns", 8, gpu_mem=8138)
    seconds: list[float] = []
    with RuleOne(cluster) as watcher:
        churn.start()
        try:
            for number in range(9):
                bound_more(space, "turns")
                leader, members = leader_of(cluster)
                began = time.monotonic()
                if number % 3 == 0:
                    cluster.api.delete(paths.pods(SYSTEM, leader))
                for pid in members if number % 3 else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if number % 3 == 1 else signal.SIGSTOP)
                bound_more(space, "turns")
                seconds.append(time.monotonic() - began)
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                assert watcher.violations == []
        finally:
            churn.stop()
        space.wait(lambda: not churn.waiting(), "all that came have run")
    print(f"{len(churn.created)} pods; pods are bound again after {[round(second, 1) for second in seconds]} s")
    assert churn.problems == []
    assert not watcher.failed
    assert watcher.violations == []
    space.delete(*churn.created)


def leader_of(cluster: Cluster) -> tuple[str, list[int]]:
    """The pod that has the leader's label, and the processes in it."""
    query = {"labelSelector": f"{names.LEADER}=true"}
    findings: list[str] = []

    def one_leads() -> bool:
        findings[:] = [pod["metadata"]["name"] for pod in cluster.api.get(paths.pods(SYSTEM), query)["items"]]
        return len(findings) == 1

    cluster.wait(one_leads, "one extender has the label")
    (leader,) = findings
    folders = Path("/proc").glob("[0-9]*")
    return leader, [int(folder.name) for folder in folders if f"POD_NAME={leader}" in environment(folder)]


def bound_more(space: Space, prefix: str) -> None:
    """Three pods with this prefix are bound that were not before."""

    def bound() -> set[str]:
        return {pod["metadata"]["name"] for pod in space.pods() if pod["spec"].get("nodeName")}

    before = bound()
    space.wait(lambda: sum(name.startswith(prefix) for name in bound() - before) > 2, "pods are bound")


def environment(process: Path) -> list[str]:
    """The environment of a process of this machine, by its folder in /proc."""
    try:
        return (process / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def test_a_folder_that_is_removed_from_the_node_is_mounted_anew(cluster: Cluster, space: Space) -> None:
    for folder, parts in (("/var/lib/cardwise", ["deviceplugin"]), ("/run/cardwise/mps", ["deviceplugin", "mps"])):
        before = {part: container(cluster, part)["restartCount"] for part in parts}
        processes.run(cluster.node("n1")._inside("rm", "-rf", folder))
        for part, count in before.items():
            space.wait(lambda part=part, count=count: restarted(cluster, part, count), f"{part} again, for {folder}")
        space.create(workload("after", gpu_mem=64, command=IDLE))
        space.running("after")
        space.delete("after", grace=1)
        space.wait_for_deletion("after")


def container(cluster: Cluster, part: str) -> Json:
    (pod,) = part_pods(cluster, part)
    (status,) = pod["status"]["containerStatuses"]
    return dict(status)


def restarted(cluster: Cluster, part: str, before: int) -> bool:
    """And ready: where the kubelet does not know the device plugin yet, it fails a pod that comes, for good."""
    status = container(cluster, part)
    return status["restartCount"] > before and status["ready"] is True


@pytest.mark.parametrize("part", ["deviceplugin", "mps"])
def test_a_part_on_a_node_writes_about_no_other(cluster: Cluster, part: str) -> None:
    pod = part_pods(cluster, part)[0]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/cardwise-{part}/token"
    token = cluster.api.create(account, {"spec": {"boundObjectRef": bound}})["status"]["token"]
    kubeconfig = cluster.state_dir / "kubeconfig" / f"pod-of-{part}"
    authority = cluster.state_dir / "pki" / "ca.crt"
    pki.kubeconfig(kubeconfig, server=cluster.control_plane.url, ca=authority, token=token)
    client = KubeClient.load(kubeconfig)
    spec = ANOTHER | {"uuid": f"GPU-of-{part}"}
    card = {"metadata": {"name": f"gpu-of-{part}"}, "spec": spec, "apiVersion": names.API_VERSION}
    cluster.api.create(paths.extendedresources(), card | {"kind": "ExtendedResource"})
    own = next(card["metadata"]["name"] for card in cards(cluster) if card["spec"]["node"] == "n1")

    status = {"deviceplugin": {"reason": "tried"}, "mps": {"mps": {"mode": "card", "state": "Down"}}}[part]

    def patch(name: str) -> None:
        client.patch(paths.extendedresources(name, "status"), {"status": status}, query={"dryRun": "All"})

    title = {"deviceplugin": "device plugin", "mps": "MPS manager"}[part]
    refusal = f"the {title} of node n1 may not write objects of node elsewhere"
    with contextlib.closing(client):
        patch(own)
        with pytest.raises(errors.Forbidden, match=refusal):
            patch(f"gpu-of-{part}")


def finding(cluster: Cluster, space: Space, text: str, *flags: str) -> str:
    """The remedy of what doctor says with this text, once it does."""
    remedies: list[str] = []

    def is_found() -> bool:
        output = commands.cardwise(cluster, "doctor", *flags, "-o", "json")
        remedies[:] = [
            finding["remedy"] for finding in json.loads(output.stdout)["findings"] if text in finding["text"]
        ]
        if not remedies:
            raise LookupError(output.stdout + output.stderr)
        return True

    space.wait(is_found, f"doctor says {text!r}")
    assert len(remedies) == 1, remedies
    return remedies[0]


def run_remedy(cluster: Cluster, remedy: str) -> None:
    """Types the command of a remedy as it is printed, in the folder of the repository."""
    (start,) = (remedy.find(program) for program in ("helm ", "kubectl ") if program in remedy)
    cluster_environment = cluster.environment()
    path = f"{binaries.helm(lambda _: None)}:{cluster_environment['PATH']}"
    subprocess.run(
        ["bash", "-c", remedy[start:].partition(" (")[0]],
        cwd=ROOT,
        env=os.environ | cluster_environment | {"PATH": path},
        timeout=processes.PATIENCE,
        check=True,
    )


def plugin_runs(cluster: Cluster) -> bool:
    statuses = [pod["status"].get("containerStatuses") or [{}] for pod in part_pods(cluster, "deviceplugin")]
    return [status.get("ready") for status, *_ in statuses] == [True]


def test_doctor_says_why_the_device_plugin_does_not_run_and_the_remedy_runs(cluster: Cluster, space: Space) -> None:
    daemonset = f"/apis/apps/v1/namespaces/{SYSTEM}/daemonsets/cardwise-deviceplugin"
    right = cluster.api.get(daemonset)["spec"]["template"]["spec"]["containers"][0]
    without_driver = right | {"args": [arg for arg in right["args"] if not arg.startswith("--simulated-gpus")]}
    runtimes = "/apis/node.k8s.io/v1/runtimeclasses"

    def set_container(container: Json) -> None:
        cluster.api.patch(daemonset, {"spec": {"template": {"spec": {"containers": [container]}}}})

    cluster.api.create(runtimes, {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    try:
        set_container(without_driver)
        crash = "on node n1 crashes, last error: cannot start: NVML does not start (NVML Shared Library Not Found)"
        remedy = finding(cluster, space, crash, "--no-probe")
        assert remedy.endswith(" -n cardwise-system --reset-then-reuse-values --set nodes.runtimeClass=nvidia")
        set_container(right)
        cluster.kubectl("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=baseline", "--overwrite")
        cluster.kubectl("delete", "pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=deviceplugin")
        refused = "DaemonSet cardwise-deviceplugin cannot create pods: violates PodSecurity"
        run_remedy(cluster, finding(cluster, space, refused, "--no-probe"))
        space.wait(lambda: plugin_runs(cluster), "the device plugin runs")
        output = commands.cardwise(cluster, "doctor", "--no-probe").stdout
        assert "can be created" not in output, output
    finally:
        set_container(right)
        cluster.api.delete(f"{runtimes}/nvidia")
        cluster.kubectl("label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce-")
    space.wait(lambda: plugin_runs(cluster), "the device plugin runs")
    space.wait(lambda: mps_is_ready(cluster), "the cards are open again")


def test_leaving_kubeadm_mode_unwires_and_a_rollback_wires_again(cluster: Cluster, space: Space) -> None:
    manifest = cluster.node("n1").manifests / "kube-scheduler.yaml"
    wired = yaml.safe_load(manifest.read_text())
    cluster.chart.upgrade({"scheduler": {"mode": "manual"}})
    assert yaml.safe_load(manifest.read_text()) == static_scheduler(cluster)
    space.create(workload("plain-again", command=IDLE))
    space.running("plain-again")
    output = cluster.chart.helm("test", "cardwise", "--logs", check=False)
    assert "FAIL  kube-scheduler: the probe pod was bound to n1 without a GPU" in output
    cluster.chart.helm("rollback", "cardwise", *WAITS)
    assert yaml.safe_load(manifest.read_text()) == wired


def test_an_unwired_scheduler_makes_pods_disappear_and_doctor_s_command_wires_it(
    cluster: Cluster, space: Space
) -> None:
    manifest = cluster.node("n1").manifests / "kube-scheduler.yaml"
    wired = yaml.safe_load(manifest.read_text())
    cluster.chart.upgrade({"scheduler": {"mode": "manual"}})
    space.create(workload("disappears", gpu_mem=100, command=IDLE))
    space.wait_for_deletion("disappears")
    disappeared = f"({space.name}/disappears) disappeared: bound without the extender"
    remedy = finding(cluster, space, disappeared, "--no-probe")
    assert "--set scheduler.mode=kubeadm" in remedy
    run_remedy(cluster, remedy)
    assert yaml.safe_load(manifest.read_text()) == wired
    space.create(workload("placed", gpu_mem=100, command=IDLE, annotations=PACKED))
    space.running("placed")
    space.delete("placed", grace=1)
    space.wait_for_deletion("placed")


def of_gang(space: Space) -> list[Json]:
    return [pod for pod in space.pods() if pod["metadata"]["name"].startswith("gang-")]


def make_gated_deployment(space: Space) -> str:
    """A Deployment with one pod of a gang of two, which asks for no card. Returns the pod's name."""
    annotations = {names.GROUP_NAME: "gang", names.GROUP_NUM: "2"}
    pod = workload("gang", command=IDLE, annotations=annotations)
    labels = {"app": "gang"}
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    path = f"/apis/apps/v1/namespaces/{space.name}/deployments"
    space.cluster.api.create(path, {"metadata": {"name": "gang"}, "spec": spec})
    space.wait(lambda: of_gang(space), "its pod is there")
    return str(of_gang(space)[0]["metadata"]["name"])


def test_uninstalling_under_load_leaves_running_pods_and_nothing_else(cluster: Cluster, space: Space) -> None:
    before = {name: space.get(name)["status"]["containerStatuses"] for name in ("half", "later", "plain")}
    card = cards(cluster)[0]
    gated = make_gated_deployment(space)
    batch = _AT_A_TIME if SOAK else 2
    light, heavy = Churn(space, "light", batch), Churn(space, "heavy", batch, gpu_mem=100)
    light.start()
    heavy.start()
    try:
        cluster.chart.helm("uninstall", "cardwise", *WAITS)
        meanwhile = len(light.created)
        space.wait(lambda: len(light.created) > meanwhile + batch, "others come afterwards")
    finally:
        light.stop()
        heavy.stop()
    assert light.problems == []
    space.wait(lambda: not light.waiting(), "all that asked for no card have run")
    # Between its configuration and the webhook itself there is a moment.
    assert all("failed calling webhook" in problem for problem in heavy.problems), heavy.problems
    print(f"{len(light.created)} came meanwhile, and {len(heavy.created)} with a share: {len(heavy.waiting())} wait")
    # Those that kube-scheduler bound without the extender were deleted by it while it was there.
    space.delete(*heavy.waiting(), grace=1)
    space.wait_for_deletion(*heavy.waiting())
    assert space.get(gated)["spec"]["schedulingGates"]
    still_gated = f"-l {names.GANG} --field-selector=spec.nodeName=,status.phase=Pending"  # as README says
    cluster.kubectl("delete", "pods", "-A", *still_gated.split())
    space.wait(lambda: [pod["status"]["phase"] for pod in of_gang(space)] == ["Running"], "its Deployment's pod runs")
    cluster.kubectl("delete", "deployment", "gang", "-n", space.name)
    manifest = yaml.safe_load((cluster.node("n1").manifests / "kube-scheduler.yaml").read_text())
    assert manifest == static_scheduler(cluster)
    for name, statuses in before.items():
        assert space.get(name)["status"]["containerStatuses"] == statuses
    after = cluster.api.get(paths.nodes("n1"))
    # The kubelet brings its device plugin's resource back, at 0, until it is restarted.
    assert after["status"]["allocatable"].pop(names.SHARE, "0") == "0"
    ours = {key for key in after["status"]["allocatable"] if key.startswith(("aliyun.com/", f"{names.GROUP}/"))}
    assert ours == set()
    metadata = after["metadata"]
    assert names.ACCELERATOR not in metadata["labels"]
    assert not [key for key in metadata.get("annotations", {}) if key.startswith(f"{names.GROUP}/")]
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations,validatingadmissionpolicies,clusterroles"
    listed = cluster.kubectl("get", f"{kinds},clusterrolebindings,validatingadmissionpolicybindings", "-o", "name")
    assert [line for line in listed.splitlines() if "cardwise" in line] == []
    kinds = "all,secrets,configmaps,leases,rolebindings"
    remaining = lambda: cluster.kubectl("get", kinds, "-n", SYSTEM, "-o", "name").split()  # noqa: E731
    # Helm waits for the end of its Jobs; their pods are taken away later.
    space.wait(lambda: remaining() == ["configmap/kube-root-ca.crt"], "nothing is left in the namespace")
    assert cards(cluster) == []
    assert cluster.kubectl("get", "podgroups.cardwise.dev", "-A", "-o", "name") == "", "the gang's was automatic"
    # What it takes away by a Job can be taken away by hand, as docs/upgrade.md says.
    cluster.api.create(paths.extendedresources(), card | {"metadata": {"name": card["metadata"]["name"]}})
    job = str(cluster.chart.cleanup())
    cluster.kubectl("delete", "-f", job, "--ignore-not-found")
    cluster.kubectl("create", "-f", job)
    ended = (
        "logs",
        "-n",
        SYSTEM,
        "job/cardwise-cleanup",
        "--follow",
        f"--pod-running-timeout={processes.PATIENCE:.0f}s",
    )
    assert "deleted 1 of " in cluster.kubectl(*ended)
    cluster.kubectl("delete", "-f", job)
    assert cards(cluster) == []
    # A pod that asks for a card is an ordinary one again, which no node has anything for.
    space.create(workload("orphan", gpu_mem=100, command=IDLE))
    assert space.get("orphan")["spec"]["containers"][0]["resources"]["limits"] == {names.GPU_MEM: "100"}
