"""The pods of this node, kept by a reflector, with a GET for pods that the reflector has not seen yet."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import mps, names, request
from cardwise.core.values import quantity
from cardwise.core.values.decoded import Json, annotations_of
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.nodepods import NodePods

_log = structlog.get_logger(__name__)

_GET_TIMEOUT = 3.0  # seconds; PreStartContainer has 30
_READ_ANNOTATIONS = frozenset(
    (
        names.ASSIGNMENT,
        names.ASSIGNED,
        names.IDX,
        names.POD_MEM,
        names.DEV_MEM,
        names.GPUSHARE_ALLOCATION,
        names.MIRROR,
        mps.MODE,
        mps.SM_PERCENT,
    )
)

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePod:
    """A pod.

    keys: its container keys by container name.
    requests: its requests of Cardwise's resources and classes, by resource name.
    node: the node that it is bound to, "" while it is pending.
    """

    uid: str
    namespace: str
    name: str
    phase: str
    annotations: Mapping[str, str]
    keys: Mapping[str, str]
    requests: Mapping[str, int]
    node: str = ""

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def finished(self) -> bool:
        return self.phase in names.FINISHED_PHASES


def parse_pod(pod: Json) -> NodePod:
    """Parse a pod of the API server."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = annotations_of(pod)
    keys: dict[str, str] = {}
    requests: dict[str, int] = {}
    for container in request.containers(pod):
        if container.ordinary_init:
            continue
        keys[container.spec["name"]] = container.key
        resources = container.spec.get("resources") or {}
        for name, amount in (resources.get("requests") or resources.get("limits") or {}).items():
            if name in names.REQUESTED or names.class_of(name):
                with contextlib.suppress(quantity.InvalidQuantity):
                    requests[name] = requests.get(name, 0) + quantity.count(amount, minimum=0)
    return NodePod(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=status.get("phase") or "",
        annotations={
            key: text
            for key, text in annotations.items()
            if key in _READ_ANNOTATIONS or key.startswith(names.DEVICES_OF)
        },
        keys=keys,
        requests=requests,
        node=pod["spec"].get("nodeName") or "",
    )


def _project(content: bytes) -> tuple[str, NodePod]:
    pod = parse_pod(_decode(content))
    return pod.uid, pod


class _EndHandler:
    """A reflector handler that calls `on_pod_ended` when a pod has finished or was deleted."""

    def __init__(self, on_pod_ended: Callable[[], None]) -> None:
        self._on_pod_ended = on_pod_ended

    def on_change(self, key: str, old: NodePod | None, new: NodePod) -> None:  # noqa: ARG002 - the Handler protocol
        if new.finished and (old is None or not old.finished):
            self._on_pod_ended()

    def on_delete(self, key: str, old: NodePod) -> None:  # noqa: ARG002
        self._on_pod_ended()

    def on_synced(self) -> None:
        self._on_pod_ended()


class Pods(NodePods[NodePod]):
    """The pods bound to one node.

    on_pod_ended: called from the reflector's thread when a pod has ended.
    """

    def __init__(self, client: KubeClient, node: str, on_pod_ended: Callable[[], None], clock: Clock = SYSTEM) -> None:
        super().__init__(client, node, _project, _EndHandler(on_pod_ended), clock)
        self._client = client
        self._node = node

    def is_bound_here(self, pod: NodePod) -> bool:
        """Whether the pod is bound to this node.

        If not, no kubelet starts its containers here, but it may have run here: a machine that was renamed has the
        containers of its former name, and after a restore of etcd a pod that was bound may be pending again.
        """
        return pod.node == self._node

    def get_pod(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """The pod, None if it is certain that no pod of this UID exists. Raises KubeError."""
        pod = self.find_pod(uid)
        return pod if pod is not None else self.fetch_pod(namespace, name, uid)

    def fetch_pod(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """As `get_pod`, always from the API server: the newest state, never the cache. Raises KubeError."""
        try:
            pod = parse_pod(self._client.get(paths.pods(namespace, name), timeout=_GET_TIMEOUT))
        except (errors.NotFound, errors.InvalidName):  # a runtime and a file may name what no pod can be called
            return None
        return pod if pod.uid == uid else None

    def is_static_pod(self, uid: str) -> bool:
        """Whether the kubelet has this UID from a manifest on the node: the API server has its mirror pod only."""
        return any(pod.annotations.get(names.MIRROR) == uid for pod in self.list_pods())
