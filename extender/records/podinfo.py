"""Compact records of the pods that the watch shows, with only the fields that the extender needs.

The time of a watch event, and the memory for 60,000 pods, depend on these records. So for pods that request no
resource of Cardwise only a few fields are decoded.
"""

from collections.abc import Mapping, Sequence
from sys import intern
from typing import NamedTuple

import msgspec
from msgspec import Struct

from cardwise.core.api import assignment, names, policies
from cardwise.core.api.assignment import Assignment
from cardwise.core.api.mpsprofile import COMMON, MpsClient
from cardwise.core.api.request import Load
from cardwise.core.gangs.gangs import Member
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import wire
from cardwise.kube.objects.pods import ContainerState, PodStatusHead, RunAs, mps_client_of_pod
from cardwise.kube.pods import loads, resizes
from extender.records import shared
from extender.records.nodeinfo import PlacedPod
from extender.records.pod import REFUSED, Pod, WaitingPod

# The JSON of a pod that requests or holds cards contains one of these texts; "/" is never escaped in it.
_SIGNS = (b"cardwise.dev/", b"ALIYUN_COM_GPU_MEM_", b"gpushare.allocation", b"aliyun.com/gpu-mem")
_SLOT = names.SHARE.encode()
_NO_LOAD = Load(0, 0, 0)
_UNANSWERED = "SchedulerError"  # the reason of the condition after a failed call of kube-scheduler to the extender


class PodRecord(PlacedPod, frozen=True, gc=False):
    """A pod that requests or holds cards, or is in a gang, and is bound or finished.

    finished: whether the pod's phase is final; then the pod uses no resources of its node.
    ended: whether the kubelet reports that none of its containers runs or will run.
    problem: why its annotations could not be read.
    mps_client: how the pod uses MPS.
    bound_directly: whether another program has bound the pod, so that it lacks the cards or devices that it requests.
    peers: see `PodRequest.peers`; "" for a pod that is being deleted.

    Creating a Struct takes a tenth of the time of a dataclass.
    """

    assignment: Assignment | None = None
    finished: bool = False
    ended: bool = False
    problem: str = ""
    gang: str = ""
    member: Member | None = None
    mps_client: MpsClient = COMMON
    bound_directly: bool = False
    peers: str = ""

    @property
    def holds_cards(self) -> bool:
        return self.assignment is not None


class TurnedAway(NamedTuple):
    """A pod for which no extender served a call, and that kube-scheduler will try again."""

    priority: int
    scheduler: str


class WaitingRecord(PodRecord, frozen=True, gc=False):
    """A `PodRecord` of a pod that has no node yet.

    classes: the classes that the pod requests.
    waiting_pod: the pod, if kube-scheduler preempts for it, or if it may be nominated; else None.
    status_node: the node in its status if no pods are preempted there; an extender may have written it.
    turned_away: set if the pod is pending because no extender served its call.
    refused: whether kube-scheduler has tried the pod and found no node.
    bindable: see `Pod.bindable`.
    """

    classes: frozenset[str] = frozenset()
    waiting_pod: WaitingPod | None = None
    status_node: str = ""
    turned_away: TurnedAway | None = None
    refused: bool = False
    bindable: bool = False


class _Owner(Struct):
    uid: str = ""
    controller: bool = False


class _Meta(Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None
    deletion_timestamp: str | None = None


class _Container(Struct):
    state: ContainerState = msgspec.field(default_factory=ContainerState)


class _Status(Struct, rename="camel"):
    phase: str = ""
    nominated_node_name: str = ""
    container_statuses: list[_Container] | None = None
    init_container_statuses: list[_Container] | None = None


class _Running(loads.ContainerLoad, rename="camel"):
    security_context: RunAs | None = None


class _Group(Struct, rename="camel"):
    pod_group_name: str = ""


class _Grouped(loads.PodSpec, rename="camel"):
    """A pod's spec, with the PodGroup of Kubernetes that it names."""

    scheduling_group: _Group | None = None


class _PodSpec(_Grouped, rename="camel"):
    """A pod's spec, with the user that it runs as."""

    containers: Sequence[_Running] | None = None
    init_containers: Sequence[_Running] | None = None
    security_context: RunAs | None = None
    host_users: bool | None = None


class _Pod(Struct):
    metadata: _Meta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _Status = msgspec.field(default_factory=_Status)


class _OtherMeta(Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _OtherPod(Struct):
    """A pod that requests no resource of Cardwise: only its cpu and memory on its node count."""

    metadata: _OtherMeta
    spec: _Grouped = msgspec.field(default_factory=_Grouped)
    status: PodStatusHead = msgspec.field(default_factory=PodStatusHead)


_decode_pod = msgspec.json.Decoder(_Pod).decode
_decode_other = msgspec.json.Decoder(_OtherPod).decode
_decode_any = msgspec.json.Decoder().decode


def decode_pod(raw: bytes) -> tuple[str, PlacedPod] | None:
    """Decode a pod: its key and its record, with fewer fields for a pod that requests no resource of Cardwise. None if
    the pod does not count.
    """
    if not any(sign in raw for sign in _SIGNS):
        return _decode_other_pod(raw)
    decoded = _decode_pod(raw)
    meta, node = decoded.metadata, decoded.spec.node_name
    if not node:
        return meta.uid, _waiting(raw, decoded)
    if names.MIRROR in (meta.annotations or {}):
        return _decode_other_pod(raw, static=True)  # a static pod is not scheduled, so its assignment is not valid
    gang = (meta.labels or {}).get(names.GANG) or ""
    member = _decode_whole_pod(raw).member() if gang else None
    assigned, problem = None, ""
    try:
        assigned = assignment.decode(meta.annotations or {}, loads=_decode_any)
    except assignment.InvalidAssignment as error:
        problem = str(error)
    finished = decoded.status.phase in names.FINISHED_PHASES
    bound_directly = assigned is None and not problem and not finished and _SLOT in raw and _decode_whole_pod(raw).slots
    if assigned is None and not problem and member is None and not bound_directly:
        return _decode_other_pod(raw)
    return meta.uid, PodRecord(
        *_place(raw, meta, decoded.spec, counts=not finished),
        grouped=decoded.spec.scheduling_group is not None,
        group="" if gang or finished else _group(meta, decoded.spec),
        assignment=assigned,
        finished=finished,
        ended=_has_ended(decoded, finished=finished),
        problem=problem,
        gang=gang,
        member=member,
        mps_client=mps_client_of_pod(meta.annotations or {}, decoded.spec, assigned.containers)
        if assigned is not None
        else COMMON,
        bound_directly=bool(bound_directly),
        peers=_peer_key(meta, gang),
    )


def _peer_key(meta: _Meta, gang: str) -> str:
    policy = (meta.annotations or {}).get(names.POLICY)
    if policy is None or meta.deletion_timestamp is not None:
        return ""
    controller = next((owner.uid for owner in meta.owner_references or () if owner.controller), "")
    return intern(policies.peer_key(policy, namespace=meta.namespace, gang=gang, controller=controller))


def _decode_whole_pod(raw: bytes) -> Pod:
    return Pod(_decode_any(wire.trim_object(raw)))


def reflector_key(key: str, record: PlacedPod) -> str:
    """The key for the reflector of a record from `decode_pod`: the pod's "namespace/name"."""
    return f"{record.namespace}/{record.name}" if isinstance(record, PodRecord) else key


def _waiting(raw: bytes, decoded: _Pod) -> PodRecord:
    """The record of a pod without a node."""
    pod, status = _decode_whole_pod(raw), decoded.status
    member = pod.member() if pod.gang else None
    if status.phase in names.FINISHED_PHASES:  # no kubelet will start the pod
        return PodRecord(**pod.ref._asdict(), finished=True, ended=True, gang=pod.gang, member=member)
    reason, nominated_node = pod.unscheduled, status.nominated_node_name
    is_unanswered, refused, is_nominated = reason == _UNANSWERED, reason == REFUSED, bool(pod.nominated_node)
    is_new = not (refused or is_unanswered or nominated_node)
    return WaitingRecord(
        **pod.ref._asdict(),
        group="" if pod.gang else _group(decoded.metadata, decoded.spec),
        gang=pod.gang,
        member=member,
        classes=pod.classes,
        waiting_pod=_waiting_pod(pod) if is_nominated or (is_new and pod.predictable) else None,
        status_node="" if is_nominated else nominated_node,
        # kube-scheduler does not try a pod with a gate, even if the condition is in its status.
        turned_away=TurnedAway(pod.priority, intern(pod.scheduler)) if is_unanswered and pod.bindable else None,
        refused=refused or is_unanswered,
        bindable=pod.bindable,
    )


def _waiting_pod(pod: Pod) -> WaitingPod | None:
    try:
        return pod.waiting() if pod.request is not None else None
    except InvalidRequest:
        return None  # filter returns the error


def _decode_other_pod(raw: bytes, *, static: bool = False) -> tuple[str, PlacedPod] | None:
    """Key and record of a pod that requests no resource of Cardwise. The key is "namespace/name", a text that the
    reflector stores in any case.
    """
    decoded = _decode_other(raw)
    meta, group = decoded.metadata, _group(decoded.metadata, decoded.spec)
    if not (decoded.spec.node_name or group) or decoded.status.phase in names.FINISHED_PHASES:
        return None
    grouped = decoded.spec.scheduling_group is not None
    placed_pod = PlacedPod(*_place(raw, meta, decoded.spec), fixed=static, grouped=grouped, group=group)
    return f"{meta.namespace}/{meta.name}", placed_pod


def _group(meta: "_Meta | _OtherMeta", spec: _Grouped) -> str:
    """The pod's PodGroup of Kubernetes, "namespace/name"; "" if the pod names none or is being deleted."""
    if spec.scheduling_group is None or meta.deletion_timestamp is not None:
        return ""
    return intern(f"{meta.namespace}/{spec.scheduling_group.pod_group_name}")


def _place(
    raw: bytes, meta: "_Meta | _OtherMeta", spec: _Grouped, *, counts: bool = True
) -> tuple[str, Load, str, str, str, int, Mapping[str, str], bool]:
    """The first fields of a `PlacedPod`. `counts`: whether the pod uses resources of its node."""
    return (
        intern(spec.node_name),
        resizes.load_of_resized_pod(raw, spec) if counts else _NO_LOAD,
        meta.uid,
        intern(meta.namespace),
        meta.name,
        spec.priority or 0,
        shared.share_labels(meta.labels or {}),
        meta.deletion_timestamp is not None,
    )


def _has_ended(decoded: _Pod, *, finished: bool) -> bool:
    """Whether the pod's containers have ended for good, as the kubelet reports.

    A terminated container does not prove this, since it may be restarted. Missing statuses do not prove it either: the
    kubelet may be starting the first container at this moment.
    """
    containers = [*(decoded.status.container_statuses or ()), *(decoded.status.init_container_statuses or ())]
    if finished:
        return all(container.state.running is None for container in containers)
    dying = decoded.metadata.deletion_timestamp is not None
    return dying and bool(containers) and all(container.state.terminated is not None for container in containers)
