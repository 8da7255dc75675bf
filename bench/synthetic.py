"""A big synthetic cluster, with which the extender is measured. `apiserver` serves it."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cardwise.core.api import assignment
from cardwise.core.api.assignment import Assignment, CardShare
from cardwise.core.values.decoded import Json
from cardwise.core.values.quantity import MiB, Percent
from cardwise.kube.objects import resourceclasses
from cardwise.kube.objects.extendedresources import ExtenderStatus
from extender.records import cards, nodeinfo, podinfo
from extender.records.podinfo import PodRecord
from extender.reporting import statuses
from extender.state import State

P100 = 16276  # MiB of a card
CARDS = 8  # number of cards of each node
MODELS = 10  # number of card models, if there are classes
SIZES = (1024, 2048, 4069, 6144, 8138, 12207, P100)  # the requests of pods in MiB

_T = TypeVar("_T")

RUNNING = {
    "phase": "Running",
    "conditions": [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-11-21T09:00:00Z"}
        for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ],
    "containerStatuses": [{"name": "main", "ready": True, "state": {"running": {"startedAt": "2026-11-21T09:00:00Z"}}}],
}


@dataclass(frozen=True)
class Scale:
    """The size of a synthetic cluster.

    classes: number of ResourceClasses, over ten models; with any, the pods' namespace has a GPUQuota too.
    fresh: whether no card's status has allocated amounts yet, as just after the installation of Cardwise.
    seed: the seed of the random sizes and cards of pods.
    """

    nodes: int = 5000
    pods: int = 60_000
    classes: int = 0
    fresh: bool = False
    seed: int = 1


def node_name(i: int) -> str:
    return f"gpu-node-{i:05d}.example.internal"


def encode_node_names(nodes: int) -> bytes:
    """The names of the first `nodes` nodes as a JSON list, for `filter_body`."""
    return json.dumps([node_name(i) for i in range(nodes)]).encode()


def filter_body(manifest: Json, names: bytes) -> bytes:
    """The body of a filter or prioritize call for this pod.

    names: the JSON list of the node names. It is encoded once for all calls, since it is long.
    """
    return b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (json.dumps(manifest).encode(), names)


def pod(name: str, uid: str, mem: int, *, node: str = "", annotations: dict[str, str] | None = None) -> Json:
    """A pod of about 4 KB, like a Deployment's pod without sidecars.

    mem: requested GPU memory in MiB.
    node: the node to which the pod is bound; empty for a pending pod.
    """
    spec: Json = {
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
    status: Json = {"phase": "Pending"}
    if node:
        spec["nodeName"] = node
        status = RUNNING
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": uid,
        "resourceVersion": "1",
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


def bound_pod(name: str, uid: str, mem: int, node: int, card: int) -> Json:
    """A running pod with `mem` MiB of card `card` of node `node`, both by index."""
    share = CardShare(card, gpu_uuid(node, card), MiB(mem), Percent(0), MiB(P100))
    annotations = assignment.encode(Assignment({"0": (share,)}), assume_time_ns=1_700_000_000_000_000_000)
    return pod(name, uid, mem, node=node_name(node), annotations=annotations)


def not_none(decoded: _T | None) -> _T:
    """Return the decoded object. Raises `ValueError` for None: each object of the synthetic cluster must be decoded."""
    if decoded is None:
        raise ValueError("the extender skips an object of the synthetic cluster")
    return decoded


def pod_record(raw: bytes) -> PodRecord:
    """The extender's record of a pod in JSON. Raises `TypeError` for a pod that requests nothing of Cardwise."""
    _, record = not_none(podinfo.decode_pod(raw))
    if not isinstance(record, PodRecord):
        raise TypeError(record)
    return record


def gpu_uuid(node: int, card: int) -> str:
    return f"GPU-{node:08x}-0000-4000-8000-{card:012x}"


class SyntheticCluster:
    """Nodes, cards and bound pods in JSON. Pods have random sizes and cards; no card is overcommitted."""

    def __init__(self, scale: Scale) -> None:
        self.nodes = [
            json.dumps({"metadata": {"name": node_name(i), "resourceVersion": "1"}}).encode()
            for i in range(scale.nodes)
        ]
        models = MODELS if scale.classes else 1
        self.cards = [json.dumps(card(node, i, models)).encode() for node in range(scale.nodes) for i in range(CARDS)]
        self.pods = list(_pods(scale))
        self.classes = [json.dumps(_class(i)).encode() for i in range(scale.classes)]
        self.quotas = [json.dumps(_quota(scale.classes)).encode()] if scale.classes else []
        if not scale.fresh:
            self.cards = list(self._cards_with_statuses())

    def _cards_with_statuses(self) -> Iterator[bytes]:
        """The cards with the statuses that an extender would have written."""
        state = State()
        for raw in self.nodes:
            state.set_node(*not_none(nodeinfo.decode_node(raw)))
        for raw in self.classes:
            state.set_class(not_none(resourceclasses.decode(raw).resource_class))
        for raw in self.cards:
            state.set_card(*not_none(cards.decode_card(raw)))
        for raw in self.pods:
            state.set_pod(pod_record(raw))
        with state.view() as ledger:
            cards_by_node: dict[str, Mapping[str, ExtenderStatus]] = {}
            for raw in self.cards:
                card = json.loads(raw)
                node = card["spec"]["node"]
                if node not in cards_by_node:
                    cards_by_node[node] = statuses.compute_node_totals(ledger, node).cards
                patch = statuses.card_status(cards_by_node[node][card["metadata"]["name"]])
                written = {key: entry for key, entry in patch.items() if entry is not None}
                yield json.dumps(card | {"status": card["status"] | written}).encode()


def class_name(i: int) -> str:
    return f"class-{i}"


def _class(i: int) -> Json:
    """A ResourceClass that selects a tenth of the cards, by model and memory."""
    expressions = [
        {"key": "model", "operator": "In", "values": [f"Model {i % MODELS}"]},
        {"key": "memory", "operator": "Gt", "values": [f"{i + 1}Mi"]},
    ]
    metadata = {"name": class_name(i), "resourceVersion": "1", "uid": f"class-{i}"}
    return {"metadata": metadata, "spec": {"selector": {"matchExpressions": expressions}}}


def _quota(classes: int) -> Json:
    """A GPUQuota with limits on up to 20 classes, so high that only the comparisons cost time."""
    hard = [{"class": class_name(i), "shares": 1_000_000} for i in range(min(classes, 20))]
    return {"metadata": {"name": "team", "namespace": "default", "resourceVersion": "1"}, "spec": {"hard": hard}}


def card(node: int, i: int, models: int) -> Json:
    """The ExtendedResource of card `i` of node `node`, both by index; `models`: number of models in the cluster."""
    uuid = gpu_uuid(node, i)
    model = f"Model {node % models}" if models > 1 else "Tesla P100"
    return {
        "metadata": {"name": uuid.lower(), "resourceVersion": "1", "labels": {"cardwise.dev/node": node_name(node)}},
        "spec": {"node": node_name(node), "index": i, "uuid": uuid, "model": model, "memoryMiB": P100},
        "status": {"health": "Healthy", "gpuAccess": "cdi"},
    }


def _pods(scale: Scale) -> Iterator[bytes]:
    rng = random.Random(scale.seed)
    free = [[P100] * CARDS for _ in range(scale.nodes)]
    pods = 0
    while pods < scale.pods:
        node, card, mem = rng.randrange(scale.nodes), rng.randrange(CARDS), rng.choice(SIZES[:5])
        if free[node][card] < mem:
            continue
        free[node][card] -= mem
        pods += 1
        uid = f"{pods:08x}-1111-4111-8111-111111111111"
        yield json.dumps(bound_pod(f"inference-{pods}", uid, mem, node, card)).encode()
