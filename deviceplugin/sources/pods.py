"""The pods of this node, kept up to date by a reflector; reads a pod that the reflector has not seen yet by GET."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from cardwise.clock import SYSTEM, Clock
from cardwise.core.api import mps, names
from cardwise.core.values import quantity
from cardwise.kube import errors, paths
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import pods
from cardwise.kube.objects.pods import Pod, Resources
from cardwise.kube.watch.nodepods import NodePods

_log = structlog.get_logger(__name__)

_GET_TIMEOUT = 3.0  # maximum seconds of a GET; the kubelet waits 30 s for PreStartContainer
_READ_ANNOTATIONS = frozenset(
    (
        names.ASSIGNMENT,
        names.ASSIGNED,
        names.IDX,
        names.POD_MEM,
        names.DEV_MEM,
        names.GPUSHARE_ALLOCATION,
        names.MIRROR,
        names.ISOLATION,
        mps.SM_PERCENT,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePod:
    """The fields of a pod that the device plugin uses.

    keys: container keys in the assignment, by container name.
    requests: requested amounts of Cardwise's resources and classes, by resource name.
    node: the node to which the pod is bound; "" while it is pending.
    claim: the name of the ResourceClaim with the pod's shares; None if they are not allocated by claim.
    """

    uid: str
    namespace: str
    name: str
    phase: str
    annotations: Mapping[str, str]
    keys: Mapping[str, str]
    requests: Mapping[str, int]
    node: str = ""
    claim: str | None = None

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def finished(self) -> bool:
        return self.phase in names.FINISHED_PHASES


def project_pod(pod: Pod) -> NodePod:
    """The fields of a pod that the device plugin uses. Ordinary init containers are left out: they have no share."""
    meta = pod.metadata
    keys: dict[str, str] = {}
    requests: dict[str, int] = {}
    for key, container in pod.spec.containers_by_key():
        if key.startswith("init-") and not container.is_sidecar:
            continue
        keys[container.name] = key
        resources = container.resources or Resources()
        for name, amount in (resources.requests or resources.limits or {}).items():
            if name in names.REQUESTED or names.class_of(name):
                with contextlib.suppress(quantity.InvalidQuantity):
                    requests[name] = requests.get(name, 0) + quantity.parse_count(str(amount), minimum=0)
    return NodePod(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        phase=pod.status.phase,
        annotations={
            key: text
            for key, text in meta.annotations.items()
            if key in _READ_ANNOTATIONS or key.startswith(names.DEVICES_OF)
        },
        keys=keys,
        requests=requests,
        node=pod.spec.node_name,
        claim=pod.spec.claim_name,
    )


def _project(content: bytes) -> tuple[str, NodePod]:
    pod = project_pod(pods.decode(content))
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

        If the pod is bound elsewhere, its containers will not be started here. But its containers may still run here,
        for two reasons. A renamed machine has the containers of its former node name. After a restore of etcd, a bound
        pod may be pending again.
        """
        return pod.node == self._node

    def get_pod(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """The pod with this UID; None if the pod certainly does not exist. Raises KubeError."""
        pod = self.find_pod(uid)
        return pod if pod is not None else self.fetch_pod(namespace, name, uid)

    def fetch_pod(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """Read the pod with this UID from the API server, not from the cache; None if it does not exist.

        Raises KubeError.
        """
        try:
            pod = project_pod(pods.record_of(self._client.get(paths.pods(namespace, name), timeout=_GET_TIMEOUT)))
        except (errors.NotFound, errors.InvalidName):  # the name, from the runtime or a file, may be invalid for a pod
            return None
        return pod if pod.uid == uid else None

    def is_static_pod(self, uid: str) -> bool:
        """Whether this UID belongs to a static pod. The API server has only its mirror pod, with another UID."""
        return any(pod.annotations.get(names.MIRROR) == uid for pod in self.list_pods())
