"""The pods of this node: of each what the agent needs, kept by a reflector, with a GET for what it has not seen yet."""

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
_KEPT = frozenset(
    (
        names.ASSIGNMENT,
        names.ASSIGNED,
        names.IDX,
        names.POD_MEM,
        names.DEV_MEM,
        names.GPUSHARE_ALLOCATION,
        mps.MODE,
        mps.SM_PERCENT,
    )
)

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePod:
    """A pod. `keys` are the container keys by name; `requests` what it asks of each resource of ours and each class.
    `node`: the node that it is bound to, "" while it waits.
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


def view(pod: Json) -> NodePod:
    """From a pod as the API server writes it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    annotations = annotations_of(pod)
    keys: dict[str, str] = {}
    asked: dict[str, int] = {}
    for container in request.containers(pod):
        if container.ordinary_init:
            continue
        keys[container.spec["name"]] = container.key
        resources = container.spec.get("resources") or {}
        for name, amount in (resources.get("requests") or resources.get("limits") or {}).items():
            if name in names.REQUESTED or names.class_of(name):
                with contextlib.suppress(quantity.InvalidQuantity):
                    asked[name] = asked.get(name, 0) + quantity.count(amount, least=0)
    return NodePod(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=status.get("phase") or "",
        annotations={
            key: text for key, text in annotations.items() if key in _KEPT or key.startswith(names.DEVICES_OF)
        },
        keys=keys,
        requests=asked,
        node=pod["spec"].get("nodeName") or "",
    )


def _project(content: bytes) -> tuple[str, NodePod]:
    pod = view(_decode(content))
    return pod.uid, pod


class _Gone:
    """A handler that hears only of pods that have ended."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone

    def on_change(self, key: str, old: NodePod | None, new: NodePod) -> None:  # noqa: ARG002 - the Handler protocol
        if new.finished and (old is None or not old.finished):
            self._on_gone()

    def on_delete(self, key: str, old: NodePod) -> None:  # noqa: ARG002
        self._on_gone()

    def on_synced(self) -> None:
        self._on_gone()


class Pods(NodePods[NodePod]):
    """The pods bound to one node. `on_gone` is called, from the reflector's thread, when one has ended."""

    def __init__(self, client: KubeClient, node: str, on_gone: Callable[[], None], clock: Clock = SYSTEM) -> None:
        super().__init__(client, node, _project, _Gone(on_gone), clock)
        self._client = client
        self._node = node

    def has_left(self, pod: NodePod) -> bool:
        """Whether the pod is bound to another node. It may have run here all the same: a machine that comes back under
        another name has the containers of its former name, and no kubelet starts further ones here.
        """
        return pod.node not in ("", self._node)

    def find(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """The pod, None when it is certain that none of this UID exists. Raises KubeError."""
        found = self.known(uid)
        return found if found is not None else self.ask(namespace, name, uid)

    def ask(self, namespace: str, name: str, uid: str) -> NodePod | None:
        """As `find`, from the API server itself: the newest state, never a cache. Raises KubeError."""
        try:
            pod = view(self._client.get(paths.pods(namespace, name), timeout=_GET_TIMEOUT))
        except errors.NotFound:
            return None
        return pod if pod.uid == uid else None
