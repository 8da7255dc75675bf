"""The pods of this node: who holds which card, who of them does without MPS, and when each ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
import structlog

from cardwise.clock import Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import mps, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mps import Mode
from cardwise.core.values.quantity import MiB
from cardwise.gpus.protocol import GpuCard
from cardwise.kube import wire
from cardwise.kube.client import KubeClient
from cardwise.kube.watch.nodepods import NodePods
from cardwise.kube.watch.reflector import Woken

_log = structlog.get_logger(__name__)

_PATIENCE = 30.0  # the grace of a pod whose spec says none
_NOTHING = Assignment({})


@dataclass(frozen=True, slots=True)
class ContainerView:
    """A container: its key, its name, and what the runtime calls it at present, "" while it has not started."""

    key: str
    name: str
    runtime_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod. `ends`: when its grace period is over, in wall time, None while nobody deletes it; `grace` in seconds.

    `deadline`: when the kubelet ends it by itself, None: never; it then has `patience` seconds of grace, by its spec.
    `cgroup_uid` is the UID that its cgroups are named by: a static pod has one of its own there, which its mirror says.
    Any user can write that mark of a mirror.
    """

    uid: str
    namespace: str
    name: str
    finished: bool
    off: bool
    assignment: Assignment
    ends: float | None = None
    grace: float = 0.0
    deadline: float | None = None
    patience: float = _PATIENCE
    cgroup_uid: str = ""
    containers: tuple[ContainerView, ...] = ()

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"


class _Meta(wire.ObjectMeta, frozen=True, rename="camel"):
    deletion_grace_period_seconds: int | None = None


class _Container(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: int | None = None


class _ContainerStatus(msgspec.Struct):
    name: str
    container_id: str = msgspec.field(default="", name="containerID")


class _Status(wire.PodStatusHead, rename="camel"):
    start_time: str | None = None
    container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)
    init_container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_decode = msgspec.json.Decoder(_Pod).decode


def view(content: bytes) -> PodView:
    """From a pod's JSON. One whose assignment cannot be read holds nothing: the device plugin starts none such."""
    pod = _decode(content)
    metadata, spec = pod.metadata, pod.spec
    started, allowed = _seconds(pod.status.start_time), spec.active_deadline_seconds
    patience = spec.termination_grace_period_seconds
    try:
        assignment = codec.decode(metadata.annotations)
    except codec.InvalidAssignment as error:
        who = f"{metadata.namespace}/{metadata.name}"
        _log.warning("unreadable assignment", pod=who, uid=metadata.uid, error=str(error))
        assignment = None
    return PodView(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        finished=pod.status.phase in names.FINISHED_PHASES,
        off=metadata.annotations.get(mps.MODE) == Mode.OFF,
        assignment=assignment or _NOTHING,
        ends=_seconds(metadata.deletion_timestamp),
        grace=float(metadata.deletion_grace_period_seconds or 0),
        deadline=started + allowed if started is not None and allowed is not None else None,
        patience=_PATIENCE if patience is None else float(patience),
        cgroup_uid=metadata.annotations.get(names.MIRROR) or metadata.uid,
        containers=tuple(_containers(pod)),
    )


def _containers(pod: _Pod) -> Iterator[ContainerView]:
    """With the keys of `core/api/request.py`; ordinary init containers too, which have no share but may open a card."""
    ids = {
        status.name: status.container_id.rpartition("/")[2]  # containerd://<id>
        for status in [*pod.status.init_container_statuses, *pod.status.container_statuses]
    }
    for place, container in enumerate(pod.spec.init_containers):
        yield ContainerView(f"init-{place}", container.name, ids.get(container.name, ""))
    for place, container in enumerate(pod.spec.containers):
        yield ContainerView(str(place), container.name, ids.get(container.name, ""))


def _seconds(timestamp: str | None) -> float | None:
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


@dataclass(frozen=True, slots=True)
class Demand:
    """On one card: the shares of containers, and whether all who hold it do without MPS."""

    shares: tuple[MiB, ...] = ()
    off: bool = False


def indexed(cards: Sequence[GpuCard]) -> dict[int, str]:
    """UUIDs by index."""
    return {card.index: card.uuid for card in cards}


def demands(pods: Sequence[PodView], cards: Sequence[GpuCard]) -> dict[str, Demand]:
    """What pods ask of each card, by UUID. Pure."""
    by_index = indexed(cards)
    shares: dict[str, list[MiB]] = {card.uuid: [] for card in cards}
    modes: dict[str, set[bool]] = {card.uuid: set() for card in cards}
    for pod in pods:
        if pod.finished:
            continue
        for share in pod.assignment.shares():
            uuid = share.uuid_by(by_index)
            if uuid in shares:
                shares[uuid].append(share.mem)
                modes[uuid].add(pod.off)
    return {uuid: Demand(tuple(found), modes[uuid] == {True}) for uuid, found in shares.items()}


def following(client: KubeClient, node: str, on_change: Callable[[], None], clock: Clock) -> NodePods[PodView]:
    """The pods bound to the node. `on_change` is called from the reflector's thread."""
    return NodePods(client, node, _project, Woken(on_change), clock)


def _project(content: bytes) -> tuple[str, PodView]:
    pod = view(content)
    return pod.uid, pod


def wanted_ceilings(found: Mapping[str, Demand]) -> dict[str, MiB]:
    """The memory limits that the daemons must allow, by UUID. Pure."""
    return {uuid: mps.ceiling(demand.shares) for uuid, demand in found.items()}
