"""Records what the pictures of the terminal are drawn from, on a real Kubernetes of this machine; as root.

`screens`: the objects of a cluster of two nodes with MPS, in cluster.yaml. `demo`: the output of `make demo`, in
demo.cast, in the format of asciinema. Usage: `.venv/bin/python -m docs.pictures.record`; takes two minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cardwise.core.api import names
from cardwise.kube import clusterstate, paths
from demo.__main__ import WIDTH
from demo.scenes import IMAGE
from docs.pictures import cast, screens
from tests.cluster import Cluster, ClusterSpec
from tests.fakes import apiobjects

_T4, _A100 = {"model": "T4", "memoryMiB": 15360}, {"model": "A100", "memoryMiB": 40960}
_CARDS = {"nodes": {"n1": [_A100] * 2, "n2": [_T4] * 2}}
_A100_CLASS = "nvidia.a100"
# Namespace, name and limits of each pod, in the order of their creation; and the MiB that its process is said to use:
# nothing computes on a simulated GPU.
_PODS: tuple[tuple[str, str, dict[str, str], int], ...] = (
    ("ml", "train", {names.GPU_COUNT: "1", _A100_CLASS: "1"}, 0),
    ("web", "chat", {names.GPU_MEM: "20Gi"}, 17408),
    ("web", "embed", {names.GPU_MEM: "12Gi"}, 9216),
    ("lab", "ada", {names.GPU_MEM: "4Gi"}, 1433),
    ("lab", "lin", {names.GPU_MEM: "6Gi"}, 5632),
)
_WAITING = ("default", "large", {names.GPU_MEM: "24Gi"})
_KINDS = (
    *("namespaces", "nodes", "pods", "events", "leases", "configmaps"),
    *("mutatingwebhookconfigurations", "extendedresources", "resourceclasses"),
)


def _pod(name: str, limits: dict[str, str]) -> dict[str, Any]:
    container = {"name": "main", "image": IMAGE, "resources": {"limits": limits}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}


def record_cluster() -> dict[str, Any]:
    """Pods that share GPUs under MPS, and one that waits. Returns objects by collection, and metrics by path."""
    with tempfile.TemporaryDirectory(prefix="cw-pic-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # MPS servers run as the users of their clients
        cards = Path(folder, "cards.yaml")
        cards.write_text(yaml.safe_dump(_CARDS))
        spec = ClusterSpec(state_dir=Path(folder, "c"), nodes=2, cards=cards, mps=True, agent=True)
        with Cluster.start(spec, print) as cluster:
            cluster.wait(partial(_has_mps, cluster), "MPS is ready on each GPU")
            cluster.wait(partial(cluster.api.get, paths.resourceclasses(_A100_CLASS)), "the A100s have a class")
            for namespace, name, limits, _ in _PODS:
                _create(cluster, namespace, name, limits)
                cluster.wait(partial(_has_card, cluster, name), f"{name} has a card")
                cluster.wait(partial(_is_running, cluster, namespace, name), f"{name} runs")
            _create(cluster, *_WAITING)
            cluster.wait(partial(_has_event, cluster, _WAITING[1]), "kube-scheduler says why the pod waits")
            cluster.wait(partial(_is_reported, cluster), "the extender has reported what is granted")
            objects = {
                collection: [
                    _strip(manifest) for manifest in cluster.api.get(collection)["items"] if _is_shown(manifest)
                ]
                for collection in apiobjects.KINDS
                if collection.rpartition("/")[2] in _KINDS
            }
    return {"objects": objects, "answers": _add_managers(objects)}


def _create(cluster: Cluster, namespace: str, name: str, limits: dict[str, str]) -> None:
    cluster.kubectl("create", "namespace", namespace, check=False)
    cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(_pod(name, limits)))


def _has_mps(cluster: Cluster) -> bool:
    cards = cluster.api.get(paths.extendedresources())["items"]
    return all(card["status"]["mps"]["state"] == "Ready" for card in cards)


def _is_running(cluster: Cluster, namespace: str, name: str) -> bool:
    return bool(cluster.api.get(paths.pods(namespace, name))["status"].get("phase") == "Running")


def _has_card(cluster: Cluster, name: str) -> bool:
    return any(holding.name == name for holding in clusterstate.read_cluster_state(cluster.api).ledger.holdings())


def _has_event(cluster: Cluster, name: str) -> bool:
    return any(event["involvedObject"]["name"] == name for event in cluster.api.get("/api/v1/events")["items"])


def _is_reported(cluster: Cluster) -> bool:
    statuses = [card["status"] for card in cluster.api.get(paths.extendedresources())["items"]]
    return sum(status.get("allocated", {}).get("pods", 0) for status in statuses) == len(_PODS)


def _is_shown(manifest: dict[str, Any]) -> bool:
    """Whether a command reads the object: of events and settings there are many others."""
    name = manifest["metadata"]["name"]
    if "involvedObject" in manifest:
        return bool(manifest["involvedObject"]["name"] == _WAITING[1])
    return "data" not in manifest or name.startswith("cardwise")


def _strip(manifest: dict[str, Any]) -> dict[str, Any]:
    """The object without what no picture shows."""
    for field in ("managedFields", "selfLink"):
        manifest["metadata"].pop(field, None)
    for webhook in manifest.get("webhooks", ()):
        webhook["clientConfig"].pop("caBundle", None)
        webhook.pop("matchConditions", None)
    manifest.get("status", {}).pop("images", None)
    manifest["metadata"].get("annotations", {}).pop(names.LEADER_EPOCH, None)
    return manifest


def _add_managers(objects: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Managers of the tests are processes: add a pod for each, as on a cluster, and its metrics by their path."""
    answers = {}
    used = {name: mib for _, name, _, mib in _PODS}
    pods = objects["/api/v1/pods"]
    labels = {"app.kubernetes.io/name": "cardwise", "app.kubernetes.io/component": "mps"}
    cards = objects[paths.extendedresources()]
    for node in sorted({card["spec"]["node"] for card in cards}):
        lines = []
        for pod in pods:
            annotations = pod["metadata"].get("annotations", {})
            if pod["spec"].get("nodeName") == node and used.get(pod["metadata"]["name"]):
                index = int(annotations[names.IDX])
                uuid = next(
                    c["spec"]["uuid"] for c in cards if (c["spec"]["node"], c["spec"]["index"]) == (node, index)
                )
                metadata = pod["metadata"]
                owner = f'UUID="{uuid}",container="main",namespace="{metadata["namespace"]}",pod="{metadata["name"]}"'
                lines.append(
                    f"cardwise_container_gpu_memory_used_bytes{{{owner}}} {used[metadata['name']] * 1024 * 1024}"
                )
        metadata = {"namespace": names.NAMESPACE, "name": f"cardwise-mps-{node}", "labels": labels}
        manager = {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}}
        pods.append({"apiVersion": "v1", "kind": "Pod"} | manager)
        answers[f"{paths.pods(names.NAMESPACE)}/{metadata['name']}:9400/proxy/metrics"] = "\n".join([*lines, ""])
    return answers


def record_demo() -> str:
    """The lines of `make demo ARGS=--once` with their times. Raises CalledProcessError if a scene fails."""
    command = [sys.executable, "-m", "demo", "--once"]
    events = [json.dumps({"version": 2, "width": WIDTH, "height": 27, "title": "make demo"})]
    events.append(json.dumps([0.0, "o", "$ make demo ARGS=--once\r\n"]))
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            now = round(time.monotonic() - start, 1)
            text = line.replace("\n", "\r\n").replace(str(Path.home()), "~")
            events.append(json.dumps([now, "o", text], ensure_ascii=False))
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return "\n".join([*events, ""])


if __name__ == "__main__":
    recorded = yaml.safe_dump(record_cluster(), allow_unicode=True)
    # Lease holders are named after this machine, which is nobody's business.
    screens.RECORDED.write_text(recorded.replace(os.uname().nodename, "extender"))
    cast.RECORDED.write_text(record_demo())
