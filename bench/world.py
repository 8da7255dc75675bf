"""A big made-up cluster, and an API server that lists it: what the serving benchmarks run against.

Not a Kubernetes: lists in pages, watches that stay silent, bindings that are accepted. Runs as a process of its own
(`python -m bench.world`), so that its work is not counted as the extender's.
"""

import json
import random
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from cardwise.core import assignment
from cardwise.core.assignment import Assignment, CardShare

P100 = 16276
CARDS = 8
MODELS = 10
SIZES = (1024, 2048, 4069, 6144, 8138, 12207, P100)  # MiB, the sizes that pods ask for


@dataclass(frozen=True)
class Scale:
    """`classes`: ResourceClasses over ten models; with any, the namespace of the pods has a GPUQuota as well."""

    nodes: int = 5000
    pods: int = 60_000
    classes: int = 0
    seed: int = 1


def node_name(i: int) -> str:
    return f"gpu-node-{i:05d}.example.internal"


def pod(name: str, uid: str, mem: int, *, node: str = "", annotations: dict[str, str] | None = None) -> dict:
    """A pod of about 4 KB, as a Deployment's come with sidecar-free defaults."""
    spec = {
        "containers": [
            {
                "name": "main",
                "image": "registry.example.internal/team/inference-server:2026.11.3",
                "args": ["--model", "/models/resnet", "--batch", "16", "--log-level", "info"],
                "env": [{"name": f"SETTING_{i}", "value": f"value-of-setting-{i}"} for i in range(20)],
                "resources": {
                    "limits": {"aliyun.com/gpu-mem": str(mem), "cardwise.dev/share": "1", "cpu": "1", "memory": "2Gi"},
                    "requests": {"aliyun.com/gpu-mem": str(mem), "cardwise.dev/share": "1", "cpu": "1"},
                },
                "volumeMounts": [
                    {"name": f"volume-{i}", "mountPath": f"/var/lib/data/{i}", "readOnly": True} for i in range(6)
                ],
                "terminationMessagePath": "/dev/termination-log",
                "imagePullPolicy": "IfNotPresent",
            }
        ],
        "volumes": [
            {"name": f"volume-{i}", "configMap": {"name": f"config-{i}", "defaultMode": 420}} for i in range(6)
        ],
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": "default",
        "schedulerName": "default-scheduler",
        "tolerations": [
            {
                "key": "node.kubernetes.io/not-ready",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            }
        ],
    }
    status = {"phase": "Pending"}
    if node:
        spec["nodeName"] = node
        status = {
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": "2026-11-21T09:00:00Z"}
                for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
            ],
            "containerStatuses": [
                {"name": "main", "ready": True, "state": {"running": {"startedAt": "2026-11-21T09:00:00Z"}}}
            ],
        }
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid,
        "labels": {"app": "inference", "pod-template-hash": "6d4cf56db6"},
        "annotations": annotations or {},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "inference-6d4cf56db6", "uid": uid}
        ],
        "managedFields": [
            {
                "manager": "kubelet",
                "operation": "Update",
                "fieldsType": "FieldsV1",
                "fieldsV1": {f"f:{i}": {} for i in range(40)},
            }
        ],
    }
    return {"metadata": metadata, "spec": spec, "status": status}


def gpu_uuid(node: int, card: int) -> str:
    return f"GPU-{node:08x}-0000-4000-8000-{card:012x}"


class World:
    """Nodes, cards and bound pods in JSON, pod sizes at random, no card over-full."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.nodes = [
            json.dumps({"metadata": {"name": node_name(i), "resourceVersion": "1"}}).encode()
            for i in range(scale.nodes)
        ]
        models = MODELS if scale.classes else 1
        self.cards = [
            json.dumps(_card(node, card, models)).encode() for node in range(scale.nodes) for card in range(CARDS)
        ]
        self.pods = list(_pods(scale))
        self.classes = [json.dumps(_class(i)).encode() for i in range(scale.classes)]
        self.quotas = [json.dumps(_quota(scale.classes)).encode()] if scale.classes else []


def class_name(i: int) -> str:
    return f"class-{i}"


def _class(i: int) -> dict:
    """A tenth of the cards, by model and memory."""
    expressions = [
        {"key": "model", "operator": "In", "values": [f"Model {i % MODELS}"]},
        {"key": "memory", "operator": "Gt", "values": [f"{i + 1}Mi"]},
    ]
    metadata = {"name": class_name(i), "resourceVersion": "1", "uid": f"class-{i}"}
    return {"metadata": metadata, "spec": {"selector": {"matchExpressions": expressions}}}


def _quota(classes: int) -> dict:
    """Limits on a few of the classes that nothing reaches: each request is compared with all of them."""
    hard = [{"class": class_name(i), "shares": 1_000_000} for i in range(min(classes, 20))]
    return {"metadata": {"name": "team", "namespace": "default", "resourceVersion": "1"}, "spec": {"hard": hard}}


def _card(node: int, card: int, models: int) -> dict:
    uuid = gpu_uuid(node, card)
    model = f"Model {node % models}" if models > 1 else "Tesla P100"
    return {
        "metadata": {"name": uuid.lower(), "resourceVersion": "1", "labels": {"cardwise.dev/node": node_name(node)}},
        "spec": {"node": node_name(node), "index": card, "uuid": uuid, "model": model, "memoryMiB": P100},
        "status": {"health": "Healthy", "cardAccess": "cdi"},
    }


def _pods(scale: Scale):
    draw = random.Random(scale.seed)
    free = [[P100] * CARDS for _ in range(scale.nodes)]
    made = 0
    while made < scale.pods:
        node, card, mem = draw.randrange(scale.nodes), draw.randrange(CARDS), draw.choice(SIZES[:5])
        if free[node][card] < mem:
            continue
        free[node][card] -= mem
        made += 1
        share = CardShare(card, gpu_uuid(node, card), mem, 0, P100)
        annotations = assignment.encode(Assignment({"0": (share,)}), assume_time_ns=1_700_000_000_000_000_000)
        uid = f"{made:08x}-1111-4111-8111-111111111111"
        yield json.dumps(pod(f"inference-{made}", uid, mem, node=node_name(node), annotations=annotations)).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    world: World
    delay = 0.0

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        if "watch" in query:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(float(query.get("timeoutSeconds", "60")))
            return
        items = {
            "pods": self.world.pods,
            "nodes": self.world.nodes,
            "extendedresources": self.world.cards,
            "resourceclasses": self.world.classes,
            "gpuquotas": self.world.quotas,
        }[parts.path.rsplit("/", 1)[-1]]
        start, limit = int(query.get("continue", 0)), int(query.get("limit", 0)) or len(items)
        end = start + limit
        token = json.dumps(str(end) if end < len(items) else "").encode()
        body = b'{"metadata":{"resourceVersion":"5","continue":%s},"items":[%s]}' % (token, b",".join(items[start:end]))
        self._answer(200, body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.delay)
        self._answer(201, b'{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}')

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(nodes: str, pods: str, classes: str, port_file: str) -> None:
    _Handler.world = World(Scale(int(nodes), int(pods), int(classes)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    path = Path(port_file)
    path.with_suffix(".new").write_text(str(server.server_address[1]))
    path.with_suffix(".new").rename(path)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    server.serve_forever()


def _leave_with_parent() -> None:
    import os  # noqa: PLC0415

    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
