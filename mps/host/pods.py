"""The pods of this node: their shares, their use of MPS, and the times of their ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from cardwise.clock import Clock
from cardwise.core.api import assignment as codec
from cardwise.core.api import classes, mps, names
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.isolation import Isolation
from cardwise.core.api.mps import DaemonScope
from cardwise.core.values.quantity import MiB
from cardwise.core.values.timestamps import parse_timestamp
from cardwise.gpus.protocol import GpuCard
from cardwise.kube.client import KubeClient
from cardwise.kube.objects import pods
from cardwise.kube.objects.pods import Pod
from cardwise.kube.watch.nodepods import NodePods
from cardwise.kube.watch.reflector import WakeHandler

_log = structlog.get_logger(__name__)

_DEFAULT_GRACE_SECONDS = 30.0  # the grace period of a pod whose spec has no grace period
_NO_ASSIGNMENT = Assignment({})


@dataclass(frozen=True, slots=True)
class ContainerView:
    """A container.

    runtime_id: the container's present ID in the container runtime; "" until it has started.
    resource_class: the ResourceClass that it requests; "" for any.
    """

    key: str
    name: str
    runtime_id: str = ""
    resource_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """The fields of a pod that the MPS manager uses.

    without_mps: whether an annotation of the pod sets that the pod runs without MPS.
    ends_at: when the pod's grace period is over, in the API server's time; None until the pod is deleted.
    grace: the grace period of the pod's deletion, in seconds.
    deadline: when the kubelet ends the pod (activeDeadlineSeconds), in the node's time; None: never.
    spec_grace: the grace period of its spec, in seconds, which the kubelet uses at the deadline.
    cgroup_uid: the UID in its cgroups. For a mirror pod this is the UID of the static pod. It comes from an annotation
        that any user can write.
    workload: kind and name of what created the pod (`Pod.workload`).
    """

    uid: str
    namespace: str
    name: str
    finished: bool
    without_mps: bool
    assignment: Assignment
    ends_at: float | None = None
    grace: float = 0.0
    deadline: float | None = None
    spec_grace: float = _DEFAULT_GRACE_SECONDS
    cgroup_uid: str = ""
    workload: str = ""
    containers: tuple[ContainerView, ...] = ()

    def runs_without_mps(self, scope: DaemonScope) -> bool:
        """Whether the pod's containers start without MPS. A pod with whole cards only does so where each card has a
        daemon of its own, because no other pod can use these cards.
        """
        has_whole_cards_only = scope is DaemonScope.CARD and all(share.whole for share in self.assignment.shares())
        return self.without_mps or has_whole_cards_only

    @property
    def pod(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_pod(content: bytes) -> PodView:
    """Parse a pod's JSON. A pod with an invalid assignment gets no shares, because the device plugin refuses to start
    it.
    """
    pod = pods.decode(content)
    metadata, spec = pod.metadata, pod.spec
    started, max_seconds = _parse_time(pod.status.start_time), spec.active_deadline_seconds
    spec_grace = spec.termination_grace_period_seconds
    try:
        assignment = codec.decode(metadata.annotations)
    except codec.InvalidAssignment as error:
        _log.warning("ignored an invalid assignment", pod=pod.full_name, uid=metadata.uid, error=str(error))
        assignment = None
    return PodView(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        finished=pod.finished,
        without_mps=metadata.annotations.get(names.ISOLATION) == Isolation.NONE,
        assignment=assignment or _NO_ASSIGNMENT,
        ends_at=_parse_time(metadata.deletion_timestamp),
        grace=float(metadata.deletion_grace_period_seconds or 0),
        deadline=started + max_seconds if started is not None and max_seconds is not None else None,
        spec_grace=_DEFAULT_GRACE_SECONDS if spec_grace is None else float(spec_grace),
        cgroup_uid=metadata.annotations.get(names.MIRROR) or metadata.uid,
        workload=pod.workload,
        containers=tuple(_parse_containers(pod)),
    )


def _parse_containers(pod: Pod) -> Iterator[ContainerView]:
    """The containers of a pod. Ordinary init containers are included: they have no share, but may open a card."""
    ids = {
        status.name: status.container_id.rpartition("/")[2]  # containerd://<id>
        for status in pod.status.all_containers()
    }
    common_class = pod.metadata.annotations.get(names.CLASS, "")
    if not classes.is_name(common_class):  # users may write any text
        common_class = ""
    for key, container in pod.spec.containers_by_key():
        limits = (container.resources.limits if container.resources is not None else None) or {}
        resource_class = next(filter(None, map(names.class_of, limits)), common_class)
        yield ContainerView(key, container.name, ids.get(container.name, ""), resource_class)


def _parse_time(timestamp: str | None) -> float | None:
    time = parse_timestamp(timestamp)
    return None if time is None else time.timestamp()


@dataclass(frozen=True, slots=True)
class CardDemand:
    """The demand of pods on one card.

    shares: MiB of each share.
    without_mps: whether all pods with a share run without MPS.
    """

    shares: tuple[MiB, ...] = ()
    without_mps: bool = False


def uuids_by_index(cards: Sequence[GpuCard]) -> dict[int, str]:
    """The UUIDs of cards by index."""
    return {card.index: card.uuid for card in cards}


def compute_demands(
    pods: Sequence[PodView], cards: Sequence[GpuCard], scope: DaemonScope = DaemonScope.CARD
) -> dict[str, CardDemand]:
    """Compute the demand of pods on each card, by UUID. Pure. `scope`: of the node's daemons."""
    uuid_by_index = uuids_by_index(cards)
    shares: dict[str, list[MiB]] = {card.uuid: [] for card in cards}
    without_mps_values: dict[str, set[bool]] = {card.uuid: set() for card in cards}
    for pod in pods:
        if pod.finished:
            continue
        for share in pod.assignment.shares():
            uuid = share.resolve_uuid(uuid_by_index)
            if uuid in shares:
                shares[uuid].append(share.mem)
                without_mps_values[uuid].add(pod.runs_without_mps(scope))
    return {
        uuid: CardDemand(tuple(card_shares), without_mps_values[uuid] == {True}) for uuid, card_shares in shares.items()
    }


def watch_pods(client: KubeClient, node: str, on_change: Callable[[], None], clock: Clock) -> NodePods[PodView]:
    """Watch the pods bound to the node.

    on_change: called from the reflector's thread.
    """
    return NodePods(client, node, _project, WakeHandler(on_change), clock)


def _project(content: bytes) -> tuple[str, PodView]:
    pod = parse_pod(content)
    return pod.uid, pod


def min_ceilings_by_card(demands_by_card: Mapping[str, CardDemand]) -> dict[str, MiB]:
    """The memory limit that the daemon of each card must allow its clients, by UUID. Pure."""
    return {uuid: mps.ceiling_of_shares(demand.shares) for uuid, demand in demands_by_card.items()}
